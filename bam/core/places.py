"""Where the rows of a batch stand in microbatches: drawn, so that a place tells nothing of others.

A compiler may round a row at one place of a `vmap` in other bits than the same row at another, and
a last bit can decide between a clipped gradient and none. If rows stood in order, one that is
removed would move all later ones by a place.

So each row gets a place at random, by a permutation that depends on no row. Removing a row leaves
the law of the others' places as it was and, given those places, what they add to the sum. Which
microbatch and which device sum a row does not matter: all of them run the same code, and devices
are of one kind.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from bam.core.chacha import Stream, blocks, nonce
from bam.core.gaussian import GaussianNoise


def drawn(
    noise: GaussianNoise, mask: Bool[Array, " rows"], group_size: int, num_devices: int
) -> Int[Array, " places"]:
    """The row at each place of all microbatches; at a place without one no row's number.

    The places are in the order in which devices take rows in turn.
    """
    num_seats = _num_seats(mask, group_size, num_devices)
    seats = jnp.arange(num_seats)
    if group_size > 1:
        # In 96 bits, two of 10⁶ rows share a number with probability 1e-17.
        numbers = jnp.arange(-(-3 * num_seats // 16), dtype=jnp.uint32)
        drawn = blocks(noise.key, numbers, nonce(Stream.PLACES, noise.step)).ravel()
        *_, seats = jax.lax.sort((*drawn[: 3 * num_seats].reshape(3, -1), seats), num_keys=3)
    return _in_few_turns(seats, mask, group_size, num_devices)


def in_batch(
    mask: Bool[Array, " rows"], group_size: int, num_devices: int
) -> Int[Array, " places"]:
    """The same for a batch whose rows already stand at random, as `sampling.pad` puts them.

    Then the seed of the batches has to be secret for this, too.
    """
    seats = jnp.arange(_num_seats(mask, group_size, num_devices))
    return _in_few_turns(seats, mask, group_size, num_devices)


def _num_seats(mask: Array, group_size: int, num_devices: int) -> int:
    return mask.shape[0] + -mask.shape[0] % (group_size * num_devices)


def _in_few_turns(
    seats: Int[Array, " places"], mask: Bool[Array, " rows"], group_size: int, num_devices: int
) -> Int[Array, " places"]:
    """Rows that are real come first at every place, so that few turns hold them all.

    As many as the fullest place has; no row leaves its place.
    """
    seats = seats.reshape(-1, group_size)
    is_real = mask.at[seats].get(mode="fill", fill_value=False)
    order = jnp.argsort(~is_real, axis=0, stable=True)
    turns = jnp.take_along_axis(seats, order, axis=0)
    return turns.reshape(-1, num_devices, group_size).swapaxes(1, 2).ravel()
