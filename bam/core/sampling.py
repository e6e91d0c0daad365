r"""Batches drawn on the host, padded to a fixed shape for the device.

The rule is Poisson sampling: each example is in a batch independently with probability q, so the
batch size varies. `bam.privacy.mechanisms` lists each way to draw with its privacy.

The random words are ChaCha20's (`bam.core.chacha`), with a key derived from the seed. Draws follow
the accounted law exactly, with q rounded down to a multiple of 2^-80: integers are compared, and
words that would favour a value are redrawn.
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

# Default probability that a step's draw exceeds the usual capacity. Then a larger shape is
# compiled, and nothing is cut.
OVERFLOW_PROB = 1e-12
PADDING = 2**31 - 1  # stands for a row number where there is no example


class PaddedBatch(NamedTuple):
    """Row numbers of the sampled examples, at random places among a fixed number of rows.

    Attributes:
      indices: `[M]` int32 row numbers in the data set, and `PADDING` at places without an
        example.
      mask: `[M]` bool, True for sampled examples.
    """

    indices: Int32[np.ndarray | Array, " rows"]
    mask: Bool[np.ndarray | Array, " rows"]

    def within(self, num_rows: int) -> "PaddedBatch":
        """Returns the batch on the host, without the row numbers from `num_rows` on."""
        mask = np.asarray(self.mask) & (np.asarray(self.indices) < num_rows)
        return PaddedBatch(np.where(mask, self.indices, PADDING).astype(np.int32), mask)

    def take(self, data: PyTree) -> PyTree:
        """Returns the batch's rows of arrays `[N, ...]`, as JAX arrays.

        A row without an example is zeros. A row number beyond the data is an IndexError if
        `indices` are on the host. If they are a JAX array, the row is NaN or an integer's limit.
        """

        def rows(x: Array) -> Array:
            if isinstance(self.indices, np.ndarray):
                most = np.max(self.indices, initial=-1, where=np.asarray(self.mask))
                if most >= len(x):
                    raise IndexError(f"row number {most} is outside of an array with {len(x)} rows")
            gathered = jnp.asarray(x).at[jnp.where(self.mask, self.indices, 0)].get(mode="fill")
            return jnp.where(jnp.reshape(self.mask, (-1, *(1,) * (gathered.ndim - 1))), gathered, 0)

        return jax.tree.map(rows, data)


def rows_or_zeros(
    values: Any, indices: Int[np.ndarray, " m"], mask: Bool[np.ndarray, " m"]
) -> np.ndarray:
    """Returns rows of an array on the host or in files.

    Where the mask is False, they are zeros, and nothing is read.
    """
    rows = np.zeros((len(indices), *values.shape[1:]), values.dtype)
    rows[mask] = values[indices[mask]]
    return rows


def poisson_sample(
    seed: int, step: int, num_examples: int, sampling_prob: float
) -> Int64[np.ndarray, " sampled"]:
    """Draws the examples of one step: each of N (a public number) independently with probability q.

    Returns sorted row numbers; there may be none. Each (seed, step) has its own independent stream,
    and gives the same rows again. The probability is q rounded down to a multiple of 2^-80.
    InputError if q is outside [0, 1] or N is negative.

    The seed is an integer from 0 to 2^256 - 1. Keep it secret: amplification by sampling assumes
    unknown batches, so the guarantee does not hold against someone who has read the seed.

    Examples:
      >>> poisson_sample(seed=0, step=3, num_examples=10, sampling_prob=1.0).tolist()
      [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    if not 0 <= sampling_prob <= 1:
        raise InputError(f"sampling_prob must be between 0 and 1, got {sampling_prob}")
    if num_examples < 0:
        raise InputError(f"num_examples must be at least 0, got {num_examples}")
    key = seeds.host_key(seed, "batches")
    # 80 random bits are compared with q. The first 16 decide, or once in 2^16 times the other 64.
    first, rest = divmod(math.floor(Fraction(sampling_prob) * 2**80), 2**64)
    halves = chacha.words(key, -(-num_examples // 2), nonce(Stream.BATCH, step))
    leading = np.stack([halves & 0xFFFF, halves >> 16], axis=1).ravel()[:num_examples]
    chosen = leading < first
    ties = np.flatnonzero(leading == first)
    if len(ties):
        rest_drawn = chacha.blocks(key, ties.astype(np.uint32), nonce(Stream.BATCH_TIES, step))
        chosen[ties] = _uint64(rest_drawn[:2]) < rest
    return np.flatnonzero(chosen)


def _uint64(words: UInt32[np.ndarray, "2 n"]) -> np.ndarray:
    """Returns integers of 64 bits, made of two words each."""
    return words[0].astype(np.uint64) << np.uint64(32) | words[1].astype(np.uint64)


def permutation(
    key: UInt32[np.ndarray, "8"], stream: Stream, step: int, size: int
) -> Int64[np.ndarray, " size"]:
    """Returns a uniformly random permutation: the order of distinct random numbers."""
    for attempt in range(2**32):
        words = chacha.words(key, 2 * size, nonce(stream, step, attempt))
        numbers = _uint64(words.reshape(2, size))
        order = np.argsort(numbers)
        # Equal numbers would be ordered by index, which is not uniform: draw again.
        if np.all(np.diff(numbers[order])):
            break
    return order


def cyclic_sample(
    seed: int, step: int, num_examples: int, sampling_prob: float, num_parts: int
) -> Int64[np.ndarray, " sampled"]:
    """Draws by Poisson sampling within one of b parts of the data: part number step mod b.

    Each example is in any part with probability 1/b, independently of the other examples, so the
    parts have random sizes. An example stays in its part in all steps of a seed. `sampling_prob` is
    the probability of an example of the part; the rest is as in `poisson_sample`. InputError for
    fewer than 1 part.

    Examples:
      >>> drawn = [cyclic_sample(0, step, 10, 1.0, num_parts=2) for step in (1, 2, 3)]
      >>> sorted([*drawn[0], *drawn[1]]) == list(range(10)), (drawn[0] == drawn[2]).all()
      (True, np.True_)
    """
    if num_parts < 1:
        raise InputError(f"num_parts must be at least 1, got {num_parts}")
    rows = poisson_sample(seed, step, num_examples, sampling_prob)
    return rows[cycle_parts(seed, num_examples, num_parts)[rows] == step % num_parts]


def allocated_sample(
    seed: int, step: int, num_examples: int, batches_per_epoch: int
) -> Int64[np.ndarray, " sampled"]:
    """Draws the examples of a step, where each example is in one random step of every epoch.

    Each of an epoch's b steps is equally likely, independently of other examples and other epochs.
    Steps 1 to b of a seed are its first epoch. InputError for fewer than 1 batch.

    Examples:
      >>> epoch = [allocated_sample(0, step, 10, batches_per_epoch=2) for step in (1, 2)]
      >>> sorted([*epoch[0], *epoch[1]]) == list(range(10))
      True
    """
    if batches_per_epoch < 1:
        raise InputError(f"batches_per_epoch must be at least 1, got {batches_per_epoch}")
    epoch, part = divmod(step - 1, batches_per_epoch)
    return np.flatnonzero(cycle_parts(seed, num_examples, batches_per_epoch, epoch + 1) == part)


@functools.lru_cache(maxsize=2)
def cycle_parts(
    seed: int, num_examples: int, num_parts: int, epoch: int = 0
) -> Int64[np.ndarray, " examples"]:
    """Returns the random part of each example.

    Parts that never change have epoch 0.
    """
    key, parts, attempt = seeds.host_key(seed, "batches"), np.full(num_examples, num_parts), 0
    while np.any(parts == num_parts):  # a word at the end of the range would favour the first parts
        words = chacha.words(key, num_examples, nonce(Stream.PARTS, epoch, attempt))
        fair = (parts == num_parts) & (words < 2**32 - 2**32 % num_parts)
        parts, attempt = np.where(fair, words % num_parts, parts), attempt + 1
    return parts


def are_separated(members: Bool[np.ndarray, "_ examples"], num_steps: int) -> bool:
    """Returns whether no example is in two of any `num_steps` consecutive batches of a run."""
    windows = np.lib.stride_tricks.sliding_window_view(members, min(num_steps, len(members)), 0)
    return bool(np.all(windows.sum(axis=-1) <= 1))


def usual_capacity(
    num_examples: int, sampling_prob: float, overflow_prob: float = OVERFLOW_PROB
) -> int:
    """Returns a number of rows, at most N, that a draw exceeds with at most `overflow_prob`."""
    rows = int(stats.binom.isf(overflow_prob, num_examples, sampling_prob)) + 1
    return max(1, min(rows, num_examples))


def pad(indices: Int64[np.ndarray, " sampled"], capacity: int, seed: int, step: int) -> PaddedBatch:
    """Puts row numbers at random places of `capacity` rows, doubled until they all fit.

    All places, in any order, are equally likely. So removing a row does not change the law of the
    other rows' places, and the bits that a `vmap` computes at a place do not tell who else was
    drawn. That holds while the draw fits the capacity; the probability that it does not
    (`usual_capacity`) adds to δ. A draw is never cut, because leaving examples out would change the
    sampling distribution. A longer shape is rare and costs one more compilation.

    Give the draw's seed and step. InputError if the capacity is below 1, or the row numbers are not
    distinct integers from 0 to 2^31 - 2.

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
        raise InputError("the batch has a row twice: one example would count twice")
    while capacity < len(indices):
        capacity *= 2
    # Another stream than the draw, so a place says nothing about who was drawn.
    places = permutation(seeds.host_key(seed, "batches"), Stream.BATCH_PLACES, step, capacity)
    padded = np.full(capacity, PADDING, np.int32)
    padded[places[: len(indices)]] = indices
    return PaddedBatch(padded, padded != PADDING)
