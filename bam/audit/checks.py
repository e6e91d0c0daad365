"""p-values of what the proof assumes of a run's noise and of its batches.

Each check has a name, and its p-value is already corrected for the many pairs, steps or entries
that it looks at (Bonferroni), so a sound run stays above `LEVEL` in every check but for one run in
10⁵. Reused, copied or missing randomness gives numbers far below it, often exactly 0.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float
from scipy import stats

from bam.core.sampling import separated
from bam.privacy.plan import PrivacyPlan

LEVEL = 1e-6
LAGS = 10  # entries are compared within a step and up to so many steps apart


def failures(p_values: Mapping[str, float], level: float = LEVEL) -> list[str]:
    """The names of the checks that a run does not pass, those with p-values below the level."""
    return [name for name, p in p_values.items() if not p >= level]


def noise_p_values(
    runs: Sequence[Float[np.ndarray, "_ entries"]], leaf_sizes: Sequence[int]
) -> dict[str, float]:
    """Two-sided p-values of "all entries of all steps' noise are independent, standard normal".

    `scale`, `scale of a leaf` and `scale of a step` (each leaf of each step), of the variance;
    `mean` and `mean of an entry`; `shape` (Kolmogorov-Smirnov) and `tails` (kurtosis); `steps`,
    that no two steps of any runs are correlated, in any leaf or all of them; `entries`, that no two
    entries are, of whichever leaves, in the same step or up to `LAGS` steps apart.

    A run is every step of its noise over the planned standard deviation, the leaves of
    `leaf_sizes` entries in order. All runs must be independent: two with one seed fail.
    """
    z = np.concatenate(runs).astype(float)
    ends = list(itertools.accumulate(leaf_sizes))
    leaves = [z[:, end - size : end] for size, end in zip(leaf_sizes, ends, strict=True)]
    whole_and_leaves = [z, *leaves] if len(leaves) > 1 else [z]
    kurtosis = (np.mean(z**4) - 3) * math.sqrt(z.size / 96)
    return {
        "scale": _spread(z),
        "scale of a leaf": _smallest([_spread(leaf) for leaf in leaves]),
        "scale of a step": _smallest([_spread(row) for leaf in leaves for row in leaf if row.size]),
        "mean": _normal(np.sum(z) / math.sqrt(z.size)),
        "mean of an entry": _smallest([_normal(x) for x in np.sum(z, 0) / math.sqrt(len(z))]),
        "shape": float(stats.kstest(z.ravel(), "norm").pvalue),
        "tails": _normal(kurtosis),
        "steps": _smallest([_pairs(_cosines(leaf.T), leaf.shape[1]) for leaf in whole_and_leaves]),
        "entries": _smallest([_entries(runs, lag) for lag in range(LAGS + 1)]),
    }


def batches_p_values(
    runs: Sequence[Bool[np.ndarray, "_ examples"]], plan: PrivacyPlan
) -> dict[str, float]:
    """p-values of "batches are drawn as the plan says".

    `runs` has who was in the batches of each of several independent runs.
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
    """p-values of "each example is in a part of its own draw, and drawn there with probability bq".

    `separation` is 0 if an example is twice within b steps, else 1. In every b steps each example
    has one turn, so those are as `batch_p_values` has them. `parts`: examples' turns are spread
    over the b steps as independent draws are, neither less nor more evenly.
    """
    bands, num_examples = len(plan.mechanism.strategy), plan.num_examples
    turns, parts_p_values = [], []
    for run in runs:
        whole = run[: len(run) // bands * bands].reshape(-1, bands, num_examples)
        turns.append(whole.any(axis=1))
        counts = whole.any(axis=0).sum(axis=1)
        if counts.sum() >= 10 * bands:  # for χ² to be near its law
            law, statistic = stats.chi2(bands - 1), stats.chisquare(counts).statistic
            parts_p_values.append(_two_sided(law.cdf(statistic), law.sf(statistic)))
    prob = bands * plan.expected_batch_size / num_examples
    blocks = np.concatenate(turns)
    alike = batch_p_values(blocks, prob) if prob < 1 else {"all examples": float(blocks.all())}
    return alike | {
        "separation": float(all(separated(run, bands) for run in runs)),
        "parts": _smallest(parts_p_values or [1.0]),
    }


def period_p_values(
    runs: Sequence[Bool[np.ndarray, "_ examples"]], period: int, sampling_prob: float
) -> dict[str, float]:
    """p-values of "in every period an example is in one batch at most, drawn anew for it".

    The batches at any one place of their periods are as `batch_p_values` has them; with a period of
    one step these are all. Of longer ones, the epochs of an allocation, `one batch of an epoch` is
    0 if an example is in two batches of an epoch, or in none of a whole one, else 1.
    """
    at_places = [
        batch_p_values(np.concatenate([run[place::period] for run in runs]), sampling_prob)
        for place in range(period)
    ]
    smallest = {name: _smallest([place[name] for place in at_places]) for name in at_places[0]}
    if period == 1:
        return smallest
    right = True
    for run in runs:
        times = np.add.reduceat(run, np.arange(0, len(run), period), dtype=int)
        whole = len(run) // period
        right &= bool(np.all(times[:whole] == 1) and np.all(times <= 1))
    return smallest | {"one batch of an epoch": float(right)}


def batch_p_values(
    members: Bool[np.ndarray, "steps examples"], sampling_prob: float
) -> dict[str, float]:
    """Two-sided p-values of "every example is in every batch independently with probability q".

    `batch mean`, of the mean size; `batch sizes`, of their spread (χ²), which batches of a fixed
    size have none of; `participation`, of the example that is drawn least or most often;
    `participation spread`, which batches that go through the data in turn have none of; `batch
    pairs` and `example pairs`, of how much any two batches, or any two examples' participations,
    have in common (hypergeometric). The steps are of one or more independent runs, and 0 < q < 1.
    """
    num_steps, num_examples = members.shape
    sizes, counts = members.sum(axis=1), members.sum(axis=0)
    drawn = stats.binom(num_steps, sampling_prob)
    return {
        "batch mean": float(stats.binomtest(int(sizes.sum()), members.size, sampling_prob).pvalue),
        "batch sizes": _binomial_spread(sizes, num_examples, sampling_prob),
        "participation": _smallest([_two_sided(drawn.cdf(c), drawn.sf(c - 1)) for c in counts]),
        "participation spread": _binomial_spread(counts, num_steps, sampling_prob),
        "batch pairs": _overlaps(members),
        "example pairs": _overlaps(members.T),
    }


def _entries(runs: Sequence[np.ndarray], lag: int) -> float:
    """Of every pair of entries, the second so many steps after the first."""
    pairs = [(run[: max(0, len(run) - lag)], run[lag:]) for run in runs]
    first, second = (np.concatenate(part).astype(np.float32) for part in zip(*pairs, strict=True))
    return _pairs(_cosines(first, second if lag else None), len(first))


def _cosines(first: np.ndarray, second: np.ndarray | None = None) -> np.ndarray:
    """|cos| between any two columns; each pair of one array's once. 0 for a column of zeros."""
    other = first if second is None else second
    norms = np.sqrt(np.sum(first**2, 0)[:, None] * np.sum(other**2, 0))
    cosines = np.abs(first.T @ other) / np.where(norms > 0, norms, np.inf)
    return cosines[np.triu_indices(len(cosines), 1)] if second is None else cosines.ravel()


def _pairs(cosines: np.ndarray, length: int) -> float:
    """p-value of the largest of many |cos| of independent normal vectors of some length.

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
    """χ² of standard normal numbers."""
    squares = np.sum(z**2)
    return _two_sided(stats.chi2.cdf(squares, z.size), stats.chi2.sf(squares, z.size))


def _binomial_spread(counts: np.ndarray, num_draws: int, prob: float) -> float:
    """χ² of counts, each of so many draws, around their mean."""
    return _spread((counts - num_draws * prob) / math.sqrt(num_draws * prob * (1 - prob)))


def _normal(x: float) -> float:
    return float(2 * stats.norm.sf(abs(x)))


def _two_sided(below: float, above: float) -> float:
    return float(min(1.0, 2 * min(below, above)))


def _smallest(p_values: Sequence[float]) -> float:
    return min(1.0, min(p_values) * len(p_values))
