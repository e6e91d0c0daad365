"""What a handful of seeds say: means, 95 % confidence intervals, seed-paired differences."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats


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
