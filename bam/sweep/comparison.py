"""Statistics of a few seeds: means, 95 % confidence intervals, seed-paired differences."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

from bam.files import JsonObject


class Estimate(NamedTuple):
    """A mean over seeds and how well it is known.

    `sd` is the sample standard deviation, `half_width` half of the 95 % confidence interval of the
    mean by Student's t; both are None for a single value.
    """

    mean: float
    sd: float | None
    half_width: float | None
    num: int


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean, spread and confidence of values that are taken as independent and normal, if any.

    Examples:
      >>> estimate([1.0, 2.0, 3.0])
      Estimate(mean=2.0, sd=1.0, half_width=2.484..., num=3)
    """
    num = len(values)
    if num == 0:
        return None
    mean = float(np.mean(values))
    if num == 1:
        return Estimate(mean, None, None, 1)
    sd = float(np.std(values, ddof=1))
    half_width = float(stats.t.ppf(0.975, num - 1)) * sd / math.sqrt(num)
    return Estimate(mean, sd, half_width, num)


def as_json(found: Estimate | None) -> JsonObject | None:
    """An estimate as JSON files have it."""
    return found and found._asdict()


def paired_difference(
    values: Mapping[int, float], baseline: Mapping[int, float]
) -> Estimate | None:
    """The mean of value − baseline over the seeds both have, if any.

    Runs with one seed share weights, batches and noise, so their difference has less spread than
    either.

    Examples:
      >>> paired_difference({0: 5.0, 1: 7.0, 2: 1.0}, {0: 4.0, 1: 5.0}).mean
      1.5
    """
    return estimate([values[seed] - baseline[seed] for seed in values if seed in baseline])


def p_value(found: Estimate) -> float | None:
    """Two-sided p of Student's test that the true mean is 0; of paired differences, paired.

    None for a single value, and for equal ones: of a spread that was not seen no test can tell.

    Examples:
      >>> round(p_value(estimate([0.1, 0.5, 0.3, 0.9, -0.2])), 3)
      0.16
    """
    if not found.sd:
        return None
    t = found.mean / (found.sd / math.sqrt(found.num))
    return float(2 * stats.t.sf(abs(t), found.num - 1))


def minimum_detectable_effect(found: Estimate, power: float = 0.8) -> float | None:
    """The smallest true mean that this test, at 5 %, detects with this power, at the SD `found.sd`.

    It says what a study of so many seeds can be expected to detect, and so how much a result that
    is not significant excludes: by the noncentral t distribution. None for a single
    value, and for equal ones.

    Examples:
      >>> [round(minimum_detectable_effect(Estimate(0.0, 1.0, None, n)), 2) for n in (5, 10)]
      [1.68, 1.0]
    """
    if not found.sd:
        return None
    freedom, scale = found.num - 1, found.sd / math.sqrt(found.num)
    limit = stats.t.ppf(0.975, freedom)

    def excess(shift: float) -> float:
        # A significant mean of the wrong sign is no detection; it would be one in 40 at most.
        return float(stats.nct.sf(limit, freedom, shift)) - power

    return float(optimize.brentq(excess, 0, 10 * limit)) * scale
