r"""Noise that is correlated over steps: the strategies and their privacy.

With independent noise, the weights collect the noise of all steps. If later noise takes back a part
of earlier noise, less is left in their sum (DP-FTRL by matrix factorisation). Let x_t be the sum of
bounded gradients in step t. The step releases $x_t + n_t$ with

$$ n_t = z_t - \lfloor \textstyle\sum_{j=1}^{b-1} c_j n_{t-j} \rfloor, $$

where the z_t are independent Gaussians in integer multiples of the noise's grid (`grid.py`), and
nothing else is rounded. Without the rounding, $C n = z$ for the lower triangular Toeplitz matrix C
whose first column is the *strategy* c = (1, c_1, …, c_{b-1}), so releasing $x + n$ is the same as
releasing $C x + z$.

One example with norm S in step t changes rows t to t + b − 1 of $C x$, by $c_j S$. So if no example
takes part twice within b steps, each time is one Gaussian mechanism with sensitivity $\|c\|_2 S$,
and they compose. Given the earlier releases, the rounding moves an entry by less than one grid step
in each of the b − 1 later rows; `bam.core.noise.advance_noise` widens z by that.

Source: Denisov et al. 2022 (arXiv 2202.08312); Choquette-Choo et al. 2023 (arXiv 2306.08153) for
banded matrices with sampling from b parts in turn; Kalinin and Lampert 2024 (arXiv 2405.13763) for
the square root.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy import signal

from bam.core import scalars
from bam.errors import InputError

INDEPENDENT = (1.0,)
UNITS = 256  # every c_j is a multiple of 1/256, so that products are integers
# Largest Σ|c_j| · Σ_j |C^-1 e_1|_j. An entry of z is below 2^24 (`gaussian`), and rounding down
# adds less than 1 to it, so all sums are below 100 · (2^24 + 1) < 2^31.
MOST_GROWTH = 100.0
HORIZON = 2**14  # steps for which growth is computed; the rest must be negligible by then


def square_root(bands: int) -> tuple[float, ...]:
    r"""Returns the first b coefficients of $(1 - x)^{-1/2}$, in 256ths: 1, 1/2, 3/8 and so on.

    Among strategies of b numbers they are close to optimal for the prefix sums of the gradients.
    b = 1 is independent noise. InputError for fewer than 1 or more than 256 bands.

    Examples:
      >>> square_root(4)
      (1.0, 0.5, 0.375, 0.3125)
    """
    bands = scalars.whole("bands", bands)
    if not 1 <= bands <= UNITS:
        raise InputError(f"bands must be from 1 to {UNITS}, got {bands}")
    coefficients = np.cumprod([1.0, *((2 * j - 1) / (2 * j) for j in range(1, bands))])
    return tuple(float(c) for c in np.round(coefficients * UNITS) / UNITS)


def as_numbers(strategy: Sequence[float] | np.ndarray) -> tuple[float, ...]:
    """Returns a copy of a strategy as Python numbers.

    InputError if it is not a sequence of numbers.
    """
    if not hasattr(strategy, "__len__") or isinstance(strategy, str | dict):
        raise InputError(f"a strategy is a sequence of numbers, got {strategy!r}")
    return tuple(scalars.real("every number of a strategy", c) for c in strategy)


def norm(strategy: Sequence[float] | np.ndarray) -> float:
    r"""Returns $\|c\|_2$, the factor by which the strategy increases one example's influence."""
    return math.hypot(*strategy)


def noise_of(strategy: Sequence[float], num_steps: int) -> np.ndarray:
    """Returns the first column of C^-1, `[T]`, before any rounding.

    It is n_t in terms of z_t, z_{t-1} and so on.
    """
    impulse = np.zeros(num_steps)
    impulse[0] = 1.0
    column: np.ndarray = signal.lfilter([1.0], strategy, impulse)
    return column


def check(strategy: Sequence[float]) -> None:
    """Raises an InputError, in one line, for a strategy that cannot be used.

    It must begin with 1, in multiples of 1/256, and its noise must not overflow or grow.
    """
    if len(strategy) == 0 or strategy[0] != 1:
        raise InputError(f"a strategy begins with 1, got {tuple(strategy)[:4]}")
    if any(not math.isfinite(c) or c * UNITS != round(c * UNITS) for c in strategy):
        raise InputError(f"every number of a strategy must be a multiple of 1/{UNITS}")
    with np.errstate(over="ignore", invalid="ignore"):
        column = np.abs(noise_of(strategy, HORIZON))
        growth = float(column.sum() * np.abs(strategy).sum())
    # The last eighth must be negligible, or the growth beyond the horizon is unknown.
    if not growth <= MOST_GROWTH or column[-HORIZON // 8 :].sum() > 1e-9:
        raise InputError(
            "the noise of this strategy grows with the steps: use positive numbers that decrease"
        )
