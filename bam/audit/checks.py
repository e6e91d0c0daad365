"""Tests of what the proof assumes about a run's noise and batches, as p-values.

Each check has a name. Its p-value is already corrected for the pairs, steps or entries that it
examines (Bonferroni), so a correct run falls below `LEVEL` about once in 10⁵ runs. Reused,
copied or missing randomness gives p-values far below, often exactly 0.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float
from scipy import stats

from bam.core.sampling import are_separated
from bam.privacy.plan import PrivacyPlan

LEVEL = 1e-6
LAGS = 10  # entries are compared within a step and up to 10 steps apart


def failures(p_values: Mapping[str, float], level: float = LEVEL) -> list[str]:
    """The names of the checks that a run fails, whose p-values are below the level or NaN."""
    return [name for name, p in p_values.items() if not p >= level]


def noise_p_values(
    runs: Sequence[Float[np.ndarray, "_ entries"]], leaf_sizes: Sequence[int]
) -> dict[str, float]:
    """Two-sided p-values of "all entries of all steps' noise are independent, standard normal".

    * `scale`, `scale of a leaf`, `scale of a step` (in each leaf): the variance;
    * `mean`, `mean of an entry`: the mean;
    * `shape`, `tails`: the distribution, by Kolmogorov-Smirnov and by kurtosis;
    * `steps`: two steps of the same or two runs are uncorrelated, in each leaf and all together;
    * `entries`: two entries are uncorrelated, within a step and up to `LAGS` steps apart.

    Args:
      runs: the noise of each run, divided by its planned standard deviation, one step a row, with
        the leaves in order. The runs must be independent: two with the same seed fail.
      leaf_sizes: number of entries in each leaf.
    """
    z = np.concatenate(runs).astype(float)
    ends = list(itertools.accumulate(leaf_sizes))
    leaves = [z[:, end - size : end] for size, end in zip(leaf_sizes, ends, strict=True)]
    parts = [z, *leaves] if len(leaves) > 1 else [z]
    # For a standard normal z, z⁴ has mean 3 and variance 96.
    kurtosis = (np.mean(z**4) - 3) * math.sqrt(z.size / 96)
    return {
        "scale": _spread(z),
        "scale of a leaf": _smallest([_spread(leaf) for leaf in leaves]),
        "scale of a step": _smallest([_spread(row) for leaf in leaves for row in leaf if row.size]),
        "mean": _normal(np.sum(z) / math.sqrt(z.size)),
        "mean of an entry": _smallest([_normal(x) for x in np.sum(z, 0) / math.sqrt(len(z))]),
        "shape": float(stats.kstest(z.ravel(), "norm").pvalue),
        "tails": _normal(kurtosis),
        "steps": _smallest([_pairs(_cosines(part.T), part.shape[1]) for part in parts]),
        "entries": _smallest([_entries(runs, lag) for lag in range(LAGS + 1)]),
    }


def batches_p_values(
    runs: Sequence[Bool[np.ndarray, "_ examples"]], plan: PrivacyPlan
) -> dict[str, float]:
    """p-values of "batches are drawn as the plan says", by the checks for its mechanism.

    `runs` says for each of several independent runs which examples each step's batch has.
    """
    mechanism = plan.mechanism
    if mechanism.sampling_prob == 1:
        return {"all examples": float(np.concatenate(runs).all())}
    if len(mechanism.strategy) > 1:
        return banded_p_values(runs, plan)
    return period_p_values(runs, mechanism.period, mechanism.sampling_prob)


def banded_p_values(
    runs: Sequence[Bool[np.ndarray, "_ examples"]], plan: PrivacyPlan
) -> dict[str, float]:
    """p-values of "each example is in one of b parts at random, drawn there with probability bq".

    In every b steps each part has one turn, so the batches of b steps together are independent
    draws with probability bq, which `batch_p_values` checks. `separation` is 0 if an example occurs
    twice within b steps, else 1. `parts`: the examples spread over the b steps as evenly as
    independent draws, neither less nor more.
    """
    bands, num_examples = len(plan.mechanism.strategy), plan.num_examples
    turns, parts_p_values = [], []
    for run in runs:
        blocks = run[: len(run) // bands * bands].reshape(-1, bands, num_examples)
        turns.append(blocks.any(axis=1))
        counts = blocks.any(axis=0).sum(axis=1)
        if counts.sum() >= 10 * bands:  # with fewer, the statistic is not nearly χ²
            law, statistic = stats.chi2(bands - 1), stats.chisquare(counts).statistic
            parts_p_values.append(_two_sided_p_value(law.cdf(statistic), law.sf(statistic)))
    prob = bands * plan.expected_batch_size / num_examples
    members = np.concatenate(turns)
    p_values = batch_p_values(members, prob) if prob < 1 else {"all examples": float(members.all())}
    return p_values | {
        "separation": float(all(are_separated(run, bands) for run in runs)),
        "parts": _smallest(parts_p_values or [1.0]),
    }


def period_p_values(
    runs: Sequence[Bool[np.ndarray, "_ examples"]], period: int, sampling_prob: float
) -> dict[str, float]:
    """p-values of "in every period an example is in one batch at most, drawn anew for it".

    The batches at one position in their periods are independent draws, which `batch_p_values`
    checks for each position. With a period of one step these are all batches. A longer period is an
    epoch of random allocation: `one batch of an epoch` is 0 if an example is in two batches of an
    epoch, or in none of a complete epoch, else 1.
    """
    at_positions = [
        batch_p_values(np.concatenate([run[start::period] for run in runs]), sampling_prob)
        for start in range(period)
    ]
    smallest = {
        name: _smallest([p_values[name] for p_values in at_positions]) for name in at_positions[0]
    }
    if period == 1:
        return smallest
    is_right = True
    for run in runs:
        counts = np.add.reduceat(run, np.arange(0, len(run), period), dtype=int)
        num_complete = len(run) // period  # the last epoch may be cut short
        is_right &= bool(np.all(counts[:num_complete] == 1) and np.all(counts <= 1))
    return smallest | {"one batch of an epoch": float(is_right)}


def batch_p_values(
    members: Bool[np.ndarray, "steps examples"], sampling_prob: float
) -> dict[str, float]:
    """Two-sided p-values of "every example is in every batch independently with probability q".

    * `batch mean`: the mean batch size;
    * `batch sizes`: their spread (χ²), which is 0 for batches of a fixed size;
    * `participation`: the example that is drawn least or most often;
    * `participation spread`: the spread over examples, which is 0 for batches in a cyclic order;
    * `batch pairs`, `example pairs`: the overlap of two batches, or of two examples' participations
      (hypergeometric).

    The steps may come from several independent runs, and 0 < q < 1.
    """
    num_steps, num_examples = members.shape
    sizes, counts = members.sum(axis=1), members.sum(axis=0)
    law = stats.binom(num_steps, sampling_prob)  # of an example's number of batches
    return {
        "batch mean": float(stats.binomtest(int(sizes.sum()), members.size, sampling_prob).pvalue),
        "batch sizes": _binomial_spread(sizes, num_examples, sampling_prob),
        "participation": _smallest([_two_sided_p_value(law.cdf(c), law.sf(c - 1)) for c in counts]),
        "participation spread": _binomial_spread(counts, num_steps, sampling_prob),
        "batch pairs": _overlaps(members),
        "example pairs": _overlaps(members.T),
    }


def _entries(runs: Sequence[np.ndarray], lag: int) -> float:
    """p-value of the correlation of two entries, the second `lag` steps after the first."""
    pairs = [(run[: max(0, len(run) - lag)], run[lag:]) for run in runs]
    first, second = (np.concatenate(part).astype(np.float32) for part in zip(*pairs, strict=True))
    return _pairs(_cosines(first, second if lag else None), len(first))


def _cosines(first: np.ndarray, second: np.ndarray | None = None) -> np.ndarray:
    """Returns |cos| of every two columns.

    For one array, each pair appears once. The value is 0 for a column of zeros.
    """
    other = first if second is None else second
    norms = np.sqrt(np.sum(first**2, 0)[:, None] * np.sum(other**2, 0))
    cosines = np.abs(first.T @ other) / np.where(norms > 0, norms, np.inf)
    return cosines[np.triu_indices(len(cosines), 1)] if second is None else cosines.ravel()


def _pairs(cosines: np.ndarray, length: int) -> float:
    """p-value of the largest |cos| among pairs of independent normal vectors with `length` entries.

    (1 + cos)/2 has a Beta distribution with both parameters (length - 1)/2.
    """
    if cosines.size == 0 or length < 2:
        return 1.0
    half = (length - 1) / 2
    p = 2 * stats.beta.cdf((1 - min(1.0, float(np.max(cosines)))) / 2, half, half)
    return float(min(1.0, p * cosines.size))


def _overlaps(members: np.ndarray) -> float:
    """p-value of the least likely overlap of two rows, given their sizes."""
    if len(members) < 2:
        return 1.0
    counts = members.astype(np.float32)
    first, second = np.triu_indices(len(members), 1)
    sizes = members.sum(axis=1)
    both = (counts @ counts.T)[first, second].round().astype(int)
    overlap = stats.hypergeom(members.shape[1], sizes[first], sizes[second])
    p = 2 * np.minimum(overlap.cdf(both), overlap.sf(both - 1))
    return float(min(1.0, np.min(p) * len(p)))


def _spread(z: np.ndarray) -> float:
    """Two-sided p-value of the χ² of standard normal numbers."""
    squares = np.sum(z**2)
    return _two_sided_p_value(stats.chi2.cdf(squares, z.size), stats.chi2.sf(squares, z.size))


def _binomial_spread(counts: np.ndarray, num_draws: int, prob: float) -> float:
    """Two-sided p-value of the spread of binomial counts, by χ² around their mean."""
    return _spread((counts - num_draws * prob) / math.sqrt(num_draws * prob * (1 - prob)))


def _normal(x: float) -> float:
    return float(2 * stats.norm.sf(abs(x)))


def _two_sided_p_value(below: float, above: float) -> float:
    return float(np.minimum(1.0, 2 * np.minimum(below, above)))  # NaN of NaN, unlike `min`


def _smallest(p_values: Sequence[float]) -> float:
    """The smallest p-value, corrected for their number (Bonferroni)."""
    return float(np.minimum(1.0, np.min(p_values) * len(p_values)))
