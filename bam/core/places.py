"""Random places of a batch's rows in microbatches, so that a place tells nothing about other rows.

A compiler may round a row differently at another place of a `vmap`, and a last bit can decide
whether a gradient is clipped. If rows stood in order, removing one would move all later ones.

So a permutation that depends on no row gives each row a random place in a microbatch. Removing a
row changes neither the law of the others' places nor, given their places, what they add to the sum.
The microbatch and the device that sum a row do not matter, because all run the same code on devices
of one kind.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from bam.core.chacha import Stream, blocks, nonce
from bam.core.gaussian import GaussianNoise


def draw(
    noise: GaussianNoise, mask: Bool[Array, " rows"], group_size: int, num_devices: int
) -> Int[Array, " places"]:
    """The row number at each slot of all microbatches, beyond the last row at an empty slot.

    Slots are ordered as devices take rows in turn. A row's place is its slot within a microbatch.
    """
    num_seats = _num_seats(mask, group_size, num_devices)
    seats = jnp.arange(num_seats)
    if group_size > 1:  # a microbatch of one row has one place
        # Rows are sorted by random numbers of 96 bits; two of 10⁶ are equal with probability 1e-17.
        numbers = jnp.arange(-(-3 * num_seats // 16), dtype=jnp.uint32)
        words = blocks(noise.key, numbers, nonce(Stream.PLACES, noise.step)).ravel()
        *_, seats = jax.lax.sort((*words[: 3 * num_seats].reshape(3, -1), seats), num_keys=3)
    return _in_few_turns(seats, mask, group_size, num_devices)


def in_batch(
    mask: Bool[Array, " rows"], group_size: int, num_devices: int
) -> Int[Array, " places"]:
    """The row number at each slot if the rows' order is random already, as by `sampling.pad`.

    Then the places rest on the secrecy of the batches' seed, too.
    """
    seats = jnp.arange(_num_seats(mask, group_size, num_devices))
    return _in_few_turns(seats, mask, group_size, num_devices)


def _num_seats(mask: Array, group_size: int, num_devices: int) -> int:
    return mask.shape[0] + -mask.shape[0] % (group_size * num_devices)


def _in_few_turns(
    seats: Int[Array, " places"], mask: Bool[Array, " rows"], group_size: int, num_devices: int
) -> Int[Array, " places"]:
    """Moves real rows into the first microbatches, each at its place within a microbatch.

    The number of microbatches with real rows is then that of real rows at the fullest place.
    """
    seats = seats.reshape(-1, group_size)
    is_real = mask.at[seats].get(mode="fill", fill_value=False)
    order = jnp.argsort(~is_real, axis=0, stable=True)
    turns = jnp.take_along_axis(seats, order, axis=0)
    return turns.reshape(-1, num_devices, group_size).swapaxes(1, 2).ravel()
