r"""Batches drawn on the host, padded to a fixed shape for the device.

Poisson sampling, the rule: each example is in a batch independently with probability q, so the
batch size varies. `bam.privacy.mechanisms` has each way to draw together with what it is worth.

Words are ChaCha20's (`bam.core.chacha`), of a key that is derived from the seed. What is drawn has
just the law that is accounted: integers are compared, and what would not be uniform is drawn again.
"""

import functools
import math
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32, Int64, PyTree, UInt32
from scipy import stats

from bam.core import chacha, seeds
from bam.core.chacha import Stream, nonce
from bam.errors import InputError

# Chance that a draw of one step exceeds the usual capacity, unless another is given; then a larger
# shape is compiled, nothing is cut.
OVERFLOW_PROB = 1e-12
PADDING = 2**31 - 1  # the row number of no example


class PaddedBatch(NamedTuple):
    """Indices of the sampled examples, at random places of a fixed number of rows.

    Attributes:
      indices: `[M]` int32 row numbers in the data set; `PADDING`, which no example has, elsewhere.
      mask: `[M]` bool, True for sampled examples.
    """

    indices: Int32[np.ndarray | Array, " rows"]
    mask: Bool[np.ndarray | Array, " rows"]

    def only(self, num_rows: int) -> "PaddedBatch":
        """The same batch, on the host, of data with so many rows: later places are empty."""
        kept = np.asarray(self.mask) & (np.asarray(self.indices) < num_rows)
        return PaddedBatch(np.where(kept, self.indices, PADDING).astype(np.int32), kept)

    def take(self, data: PyTree) -> PyTree:
        """The batch's rows of arrays `[N, ...]`, of JAX; zeros where there is no example.

        IndexError for a row that the data do not have; where it is traced, it is zeros or NaN.
        """

        def rows(x: Array) -> Array:
            if isinstance(self.indices, np.ndarray):
                most = np.max(self.indices, initial=-1, where=np.asarray(self.mask))
                if most >= len(x):
                    raise IndexError(f"row {most} of an array of {len(x)} rows")
            gathered = jnp.asarray(x).at[jnp.where(self.mask, self.indices, 0)].get(mode="fill")
            return jnp.where(jnp.reshape(self.mask, (-1, *(1,) * (gathered.ndim - 1))), gathered, 0)

        return jax.tree.map(rows, data)


def rows_or_zeros(
    values: Any, indices: Int[np.ndarray, " m"], mask: Bool[np.ndarray, " m"]
) -> np.ndarray:
    """Rows of an array on the host, or in files, zeros where the mask is False: nothing is read."""
    rows = np.zeros((len(indices), *values.shape[1:]), values.dtype)
    rows[mask] = values[indices[mask]]
    return rows


def poisson_sample(
    seed: int, step: int, num_examples: int, sampling_prob: float
) -> Int64[np.ndarray, " sampled"]:
    """Draws the examples of one step: each of N, which is public, independently with probability q.

    Returns sorted row numbers, of random length (possibly none). Every (seed, step) has its own
    independent stream, and gives the same rows again. The probability is q, rounded down to a
    multiple of 2^-80. InputError if q is outside [0, 1] or N is negative.

    The seed is an integer from 0 to 2^256 - 1. Keep it secret if the guarantee is to hold against
    someone who reads it: the amplification by sampling assumes unknown batches.

    Examples:
      >>> poisson_sample(seed=0, step=3, num_examples=10, sampling_prob=1.0).tolist()
      [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    if not 0 <= sampling_prob <= 1:
        raise InputError(f"sampling_prob must be between 0 and 1, got {sampling_prob}")
    if num_examples < 0:
        raise InputError(f"num_examples must be at least 0, got {num_examples}")
    key = seeds.host_key(seed, "batches")
    # Of 80 random bits that are compared with q, 16 decide, or once in 2^16 times the other 64.
    first, rest = divmod(math.floor(Fraction(sampling_prob) * 2**80), 2**64)
    halves = chacha.words(key, -(-num_examples // 2), nonce(Stream.BATCH, step))
    drawn = np.stack([halves & 0xFFFF, halves >> 16], axis=1).ravel()[:num_examples]
    chosen = drawn < first
    ties = np.flatnonzero(drawn == first)
    if len(ties):
        others = chacha.blocks(key, ties.astype(np.uint32), nonce(Stream.BATCH_TIES, step))
        chosen[ties] = _uint64(others[:2]) < rest
    return np.flatnonzero(chosen)


def _uint64(words: UInt32[np.ndarray, "2 n"]) -> np.ndarray:
    """Integers of 64 bits, of two words each."""
    return words[0].astype(np.uint64) << np.uint64(32) | words[1].astype(np.uint64)


def permutation(
    key: UInt32[np.ndarray, "8"], stream: Stream, step: int, size: int
) -> Int64[np.ndarray, " size"]:
    """A permutation, all of them equally likely: the order of random numbers, no two the same."""
    for attempt in range(2**32):
        drawn = chacha.words(key, 2 * size, nonce(stream, step, attempt))
        numbers = _uint64(drawn.reshape(2, size))
        order = np.argsort(numbers)
        if np.all(np.diff(numbers[order])):
            break
    return order


def cyclic_sample(
    seed: int, step: int, num_examples: int, sampling_prob: float, num_parts: int
) -> Int64[np.ndarray, " sampled"]:
    """Draws from one of b parts of the data, those of step mod b: Poisson sampling within it.

    The parts are of random sizes: each example is in any of them with probability 1/b, the same in
    all steps of a seed and independently of the other examples. `sampling_prob` is that of an
    example of the part; the rest as `poisson_sample`. InputError for fewer than 1 part.

    Examples:
      >>> drawn = [cyclic_sample(0, step, 10, 1.0, num_parts=2) for step in (1, 2, 3)]
      >>> sorted([*drawn[0], *drawn[1]]) == list(range(10)), (drawn[0] == drawn[2]).all()
      (True, np.True_)
    """
    if num_parts < 1:
        raise InputError(f"num_parts must be at least 1, got {num_parts}")
    drawn = poisson_sample(seed, step, num_examples, sampling_prob)
    return drawn[cycle_parts(seed, num_examples, num_parts)[drawn] == step % num_parts]


def allocated_sample(
    seed: int, step: int, num_examples: int, batches_per_epoch: int
) -> Int64[np.ndarray, " sampled"]:
    """Draws the examples that are allocated to a step: to one of each epoch's b steps, anew.

    Any step of an epoch is equally likely, independently of other examples and other epochs. Steps
    1 to b of a seed are its first epoch. InputError for fewer than 1 batch.

    Examples:
      >>> epoch = [allocated_sample(0, step, 10, batches_per_epoch=2) for step in (1, 2)]
      >>> sorted([*epoch[0], *epoch[1]]) == list(range(10))
      True
    """
    if batches_per_epoch < 1:
        raise InputError(f"batches_per_epoch must be at least 1, got {batches_per_epoch}")
    epoch, place = divmod(step - 1, batches_per_epoch)
    return np.flatnonzero(cycle_parts(seed, num_examples, batches_per_epoch, epoch + 1) == place)


@functools.lru_cache(maxsize=2)
def cycle_parts(
    seed: int, num_examples: int, num_parts: int, epoch: int = 0
) -> Int64[np.ndarray, " examples"]:
    """The part that each example is in: random numbers that no batch's draw uses."""
    key, parts, attempt = seeds.host_key(seed, "batches"), np.full(num_examples, num_parts), 0
    while np.any(parts == num_parts):  # a word at the end of the range would favour the first parts
        drawn = chacha.words(key, num_examples, nonce(Stream.PARTS, epoch, attempt))
        fair = (parts == num_parts) & (drawn < 2**32 - 2**32 % num_parts)
        parts, attempt = np.where(fair, drawn % num_parts, parts), attempt + 1
    return parts


def separated(members: Bool[np.ndarray, "_ examples"], num_steps: int) -> bool:
    """Whether no example is twice in the batches of so many steps; of one run, from its first."""
    windows = np.lib.stride_tricks.sliding_window_view(members, min(num_steps, len(members)), 0)
    return bool(np.all(windows.sum(axis=-1) <= 1))


def usual_capacity(
    num_examples: int, sampling_prob: float, overflow_prob: float = OVERFLOW_PROB
) -> int:
    """Rows that Poisson draws of N examples with probability q fill with at most this probability.

    More than N are never needed.
    """
    rows = int(stats.binom.isf(overflow_prob, num_examples, sampling_prob)) + 1
    return max(1, min(rows, num_examples))


def pad(indices: Int64[np.ndarray, " sampled"], capacity: int, seed: int, step: int) -> PaddedBatch:
    """Puts row numbers at random places of `capacity` rows, or of a doubling that holds them all.

    Any places, in any order, are equally likely. So removing a row leaves the law of the others'
    places as it was, and the bits that a `vmap` gives at a place tell nothing of who else was
    drawn. That holds while the draw fits the capacity; the chance that it does not,
    `usual_capacity`'s, adds to δ. A draw is never cut: leaving examples out would change the
    sampling distribution. A longer shape costs one more compilation, rarely.

    Seed and step are those of the draw. InputError if the capacity is below 1, or the row numbers
    are not different integers from 0 to 2^31 - 2.

    Examples:
      >>> import numpy as np
      >>> indices, mask = pad(np.array([4, 7, 9]), capacity=4, seed=0, step=1)
      >>> sorted(indices[mask].tolist()), indices[~mask].tolist() == [PADDING]
      ([4, 7, 9], True)
    """
    if capacity < 1:
        raise InputError(f"capacity must be at least 1, got {capacity}")
    if not np.issubdtype(np.asarray(indices).dtype, np.integer):
        raise InputError(f"row numbers must be integers, got {np.asarray(indices).dtype}")
    if len(indices) and not 0 <= np.min(indices) <= np.max(indices) < PADDING:
        raise InputError(f"row numbers must be from 0 to {PADDING - 1}")
    if len(np.unique(indices)) < len(indices):
        raise InputError("a row is drawn twice: one example would count for two")
    while capacity < len(indices):
        capacity *= 2
    places = permutation(seeds.host_key(seed, "batches"), Stream.SLOTS, step, capacity)
    padded = np.full(capacity, PADDING, np.int32)
    padded[places[: len(indices)]] = indices
    return PaddedBatch(padded, padded != PADDING)
