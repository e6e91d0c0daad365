"""Batches drawn on the host, padded to a fixed shape for the device.

Poisson sampling, the rule: each example is in a batch independently with probability q, so the
batch size varies. Batches of a fixed size earn another, larger ε: `bam.privacy.mechanisms` has each
way to draw together with what it is worth.
"""

import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int32, Int64
from scipy import stats

# Chance that a draw exceeds the usual capacity; then a larger shape is compiled, nothing is cut.
OVERFLOW_PROB = 1e-9


class PaddedBatch(NamedTuple):
    """Indices of the sampled examples, padded with zeros to a fixed number of rows.

    Attributes:
      indices: `[M]` int32 row numbers in the data set; 0 in padded rows.
      mask: `[M]` bool, True for sampled examples. Padded rows come last.
    """

    indices: Int32[np.ndarray | Array, " rows"]
    mask: Bool[np.ndarray | Array, " rows"]


def poisson_sample(
    seed: int, step: int, num_examples: int, sampling_prob: float
) -> Int64[np.ndarray, " sampled"]:
    """Draws the examples of one step: each of N, which is public, independently with probability q.

    Returns sorted row numbers, of random length (possibly none). Every (seed, step) has its own
    independent stream, and gives the same rows again. ValueError if q is outside [0, 1] or N is
    negative.

    The seed is a non-negative integer of any size. Keep it secret if the guarantee is to hold
    against someone who reads it: the amplification by sampling assumes unknown batches.

    Examples:
      >>> poisson_sample(seed=0, step=3, num_examples=10, sampling_prob=1.0).tolist()
      [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    if not 0 <= sampling_prob <= 1:
        raise ValueError(f"sampling_prob must be between 0 and 1, got {sampling_prob}")
    if num_examples < 0:
        raise ValueError(f"num_examples must be at least 0, got {num_examples}")
    return np.flatnonzero(_stream(seed, step).random(num_examples) < sampling_prob)


def cyclic_sample(
    seed: int, step: int, num_examples: int, sampling_prob: float, num_parts: int
) -> Int64[np.ndarray, " sampled"]:
    """Draws from one of b parts of the data, those of step mod b: Poisson sampling within it.

    The parts are of random sizes: each example is in any of them with probability 1/b, the same in
    all steps of a seed and independently of the other examples. `sampling_prob` is that of an
    example of the part; the rest as `poisson_sample`. ValueError for fewer than 1 part.

    Examples:
      >>> drawn = [cyclic_sample(0, step, 10, 1.0, num_parts=2) for step in (1, 2, 3)]
      >>> sorted([*drawn[0], *drawn[1]]) == list(range(10)), (drawn[0] == drawn[2]).all()
      (True, np.True_)
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}")
    drawn = poisson_sample(seed, step, num_examples, sampling_prob)
    return drawn[_parts(seed, num_examples, num_parts)[drawn] == step % num_parts]


@functools.lru_cache(maxsize=2)
def _parts(seed: int, num_examples: int, num_parts: int) -> Int64[np.ndarray, " examples"]:
    """The part that each example is in: random numbers that no batch's draw uses."""
    stream = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0x5B,)))
    return stream.integers(num_parts, size=num_examples)


def separated(members: Bool[np.ndarray, "_ examples"], num_steps: int) -> bool:
    """Whether no example is twice in the batches of so many steps; of one run, from its first."""
    windows = np.lib.stride_tricks.sliding_window_view(members, min(num_steps, len(members)), 0)
    return bool(np.all(windows.sum(axis=-1) <= 1))


def fixed_size_sample(
    seed: int, step: int, num_examples: int, batch_size: int
) -> Int64[np.ndarray, " sampled"]:
    """Draws just l of N examples without replacement, any l of them equally likely, as sorted rows.

    Seed and step are those of `poisson_sample`. ValueError if l is not from 0 to N.

    Examples:
      >>> len(fixed_size_sample(seed=0, step=3, num_examples=10, batch_size=4))
      4
    """
    if not 0 <= batch_size <= num_examples:
        raise ValueError(f"batch_size must be from 0 to {num_examples}, got {batch_size}")
    return np.sort(_stream(seed, step).choice(num_examples, batch_size, replace=False))


def _stream(seed: int, step: int) -> np.random.Generator:
    """Random numbers of one step's batch; spawn_key keeps them apart from other uses of a seed."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0x5A, step)))


def usual_capacity(num_examples: int, sampling_prob: float, multiple_of: int = 1) -> int:
    """Number of rows that holds all but one in 10⁹ Poisson draws, of N examples with probability q.

    It is rounded up to a multiple of `multiple_of`, the microbatch size.
    """
    rows = int(stats.binom.isf(OVERFLOW_PROB, num_examples, sampling_prob))
    return max(1, -(-min(rows, num_examples) // multiple_of)) * multiple_of


def pad(indices: Int64[np.ndarray, " sampled"], capacity: int) -> PaddedBatch:
    """Pads row numbers to `capacity` rows, or to the next doubling of it that holds them all.

    A draw is never truncated: leaving examples out would change the sampling distribution and
    with it the guarantee. A longer shape costs one more compilation, rarely. ValueError if the
    capacity, the usual number of rows, is below 1.

    Examples:
      >>> import numpy as np
      >>> indices, mask = pad(np.array([4, 7, 9]), capacity=4)
      >>> indices.tolist(), mask.tolist()
      ([4, 7, 9, 0], [True, True, True, False])
    """
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, got {capacity}")
    while capacity < len(indices):
        capacity *= 2
    padded = np.zeros(capacity, np.int32)
    padded[: len(indices)] = indices
    return PaddedBatch(padded, np.arange(capacity) < len(indices))
