"""Random places of rows in microbatches, so that a row's rounding tells nothing of other rows.

A compiler may round a row differently at another place of a `vmap`, and a last bit can decide
whether a gradient is clipped. If rows stood in order, removing one would move all later ones.

So a permutation that depends on no row gives each row a random place in a microbatch. Removing a
row changes neither the law of the others' places nor, given their places, what they add to the sum.
The microbatch and the device that sum a row do not matter, because all run the same code on devices
of one kind.

A place is a microbatch and an index in it. Only the index matters to a compiler.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from bam.core.chacha import Stream, blocks, nonce
from bam.core.gaussian import GaussianNoise


def draw(
    noise: GaussianNoise, mask: Bool[Array, " rows"], microbatch_size: int, num_devices: int
) -> Int[Array, " places"]:
    """Returns the row number at each place, at random.

    An empty place has a number beyond the last row. Devices take rows in turn: device d of D has
    places d, d + D, ….
    """
    num_places = _num_places(mask, microbatch_size, num_devices)
    rows = jnp.arange(num_places)
    if microbatch_size > 1:  # in microbatches of one row every index is 0
        # Rows are sorted by random numbers of 96 bits; two of 10⁶ are equal with probability 1e-17.
        numbers = jnp.arange(-(-3 * num_places // 16), dtype=jnp.uint32)
        words = blocks(noise.key, numbers, nonce(Stream.PLACES, noise.step)).ravel()
        *_, rows = jax.lax.sort((*words[: 3 * num_places].reshape(3, -1), rows), num_keys=3)
    return _real_rows_first(rows, mask, microbatch_size, num_devices)


def in_batch(
    mask: Bool[Array, " rows"], microbatch_size: int, num_devices: int
) -> Int[Array, " places"]:
    """Returns the row number at each place if their order is random, as by `sampling.pad`.

    The places are then as secret as the seed of the batches.
    """
    rows = jnp.arange(_num_places(mask, microbatch_size, num_devices))
    return _real_rows_first(rows, mask, microbatch_size, num_devices)


def _num_places(mask: Array, microbatch_size: int, num_devices: int) -> int:
    return mask.shape[0] + -mask.shape[0] % (microbatch_size * num_devices)


def _real_rows_first(
    rows: Int[Array, " places"], mask: Bool[Array, " rows"], microbatch_size: int, num_devices: int
) -> Int[Array, " places"]:
    """Moves real rows into the first microbatches, where each keeps its index.

    The number of microbatches with a real row is then the largest number of real rows at one index.
    """
    rows = rows.reshape(-1, microbatch_size)
    is_real = mask.at[rows].get(mode="fill", fill_value=False)
    order = jnp.argsort(~is_real, axis=0, stable=True)
    microbatches = jnp.take_along_axis(rows, order, axis=0)
    return microbatches.reshape(-1, num_devices, microbatch_size).swapaxes(1, 2).ravel()
