r"""Privacy loss distributions of T Poisson-sampled Gaussian steps, by Google's `dp-accounting`.

A step's losses are put in a table with spacing h, approximated from above, so ε is an upper bound
for any h. The table adds about $h^2/6$ to the variance $s^2$ of a step's loss, so ε is too large by
a share of about $h^2 / (12 s^2)$, where $s \approx q \sqrt{e^{1/\sigma^2} - 1}$.

T tables are composed by Fourier transforms, whose rounding moves δ by about $T \cdot 2^{-53}$, up
or down. A larger amount is subtracted from the given δ, so this rounding only makes ε larger, too.

Source: Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022, "Connect the Dots: Tighter Discrete
Approximations of Privacy Loss Distributions", arXiv 2207.04380.
"""

import functools
import math
import warnings
from collections.abc import Sequence

import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import optimize

from bam.errors import InputError
from bam.privacy import tradeoff

# Spacing of the table of a step's privacy loss: dp-accounting's default, and one for searches.
FINE, COARSE = 1e-4, 2e-3
# Rounding error of δ for each composed step, up or down (the largest in 400 settings was
# 1.5 · 2⁻⁵³), and the probability that the tables leave out, on the safe side.
ROUNDING, TRUNCATION = 2.0**-51, 1e-15


class LooseBoundWarning(UserWarning):
    """Warns that ε holds but is larger than necessary, and names a way to a smaller one."""


def epsilon(
    noise_multiplier: float,
    sampling_prob: float,
    num_steps: int,
    delta: float,
    spacing: float = FINE,
) -> float:
    """Returns an upper bound on ε of T steps.

    σ, q and T must be positive, and δ must pass `check`.
    """
    return joint_epsilon([(noise_multiplier, sampling_prob, num_steps)], delta, spacing)


def joint_epsilon(
    events: Sequence[tuple[float, float, int]], delta: float, spacing: float = FINE
) -> float:
    """Returns an upper bound on ε of several mechanisms (σ, q, T) on the same data.

    All numbers are positive.
    """
    composed, error = compose(events, spacing)
    return float(composed.get_epsilon_for_delta(delta - error))


def compose(
    events: Sequence[tuple[float, float, int]], spacing: float = FINE
) -> tuple[PrivacyLossDistribution, float]:
    """Returns the distribution of several mechanisms (σ, q, T), and the rounding error of its δ."""
    composed, error = _compose(*events[0], spacing)
    for event in events[1:]:
        other, its_error = _compose(*event, spacing)
        composed, error = composed.compose(other), error + its_error + ROUNDING
    return composed, error


def deltas(
    noise_multiplier: float, sampling_prob: float, num_steps: int, epsilons: Sequence[float]
) -> list[float]:
    """Returns upper bounds on δ of T steps at several ε.

    σ, q and T must be positive.
    """
    composed, error = _compose(noise_multiplier, sampling_prob, num_steps, FINE)
    at_most = [float(composed.get_delta_for_epsilon(e)) + error for e in epsilons]
    return [min(1.0, max(0.0, delta)) for delta in at_most]  # rounding may give -1e-15


@functools.lru_cache(maxsize=64)  # takes half a second, and equal plans ask again
def mu(noise_multiplier: float, sampling_prob: float, num_steps: int, up_to: float) -> float:
    r"""Returns the smallest μ whose Gaussian DP bounds T steps: δ(ε) ≤ δ_μ(ε) for 0 ≤ ε ≤ `up_to`.

    So the trade-off function is at least $G_\mu - \delta$ with δ = δ(`up_to`). At q = 1, μ is
    $\sqrt T/\sigma$. Otherwise it is an upper bound, about 0.1 % too large: it is computed at 2,000
    ε, and between two of them δ is at most its value at the lower one. σ, q and T must be positive.

    Source: Gomez et al. 2025, arXiv 2503.10945, who report this number beside (ε, δ).
    """
    if sampling_prob == 1:
        return math.sqrt(num_steps) / noise_multiplier
    composed, error = _compose(noise_multiplier, sampling_prob, num_steps, FINE)
    epsilons = np.linspace(0, up_to, 2001)
    # δ is at most 1, though the added error may lift it above: no μ gives more, and the search
    # would not end.
    deltas = np.minimum(1.0, np.asarray(composed.get_delta_for_epsilon(epsilons[:-1])) + error)

    def excess(mu: float) -> float:  # falls with μ; at most 0 if μ bounds all of them
        return float(np.max(deltas - tradeoff.delta_of_mu(mu, epsilons[1:])))

    # Doubling until μ bounds all ε, then a search.
    high = 1.0
    while excess(high) > 0:
        high *= 2
    mu = float(optimize.brentq(excess, 0.0, high, rtol=1e-6))
    while excess(mu) > 0:  # Brent's method may end on either side
        mu *= 1 + 1e-6
    return mu


def _compose(
    noise_multiplier: float, sampling_prob: float, num_steps: int, spacing: float
) -> tuple[PrivacyLossDistribution, float]:
    """Returns the distribution of T steps, and the rounding error of its δ."""
    if sampling_prob == 1:  # T Gaussians compose to one, so nothing is rounded
        return step_pld(noise_multiplier / math.sqrt(num_steps), 1.0, spacing), 0.0
    step = step_pld(noise_multiplier, sampling_prob, spacing)
    return step.self_compose(num_steps), ROUNDING * num_steps


@functools.lru_cache(maxsize=8)  # takes most of the time, and does not depend on T
def step_pld(
    noise_multiplier: float, sampling_prob: float, spacing: float
) -> PrivacyLossDistribution:
    """Returns the distribution of one step.

    `LooseBoundWarning` if its losses are below 3 · `FINE`. Coarse tables, for searches, do not
    warn.
    """
    if (
        spacing == FINE
        and tradeoff.mu_of_noisy_sgd(noise_multiplier, sampling_prob, 1) < 3 * spacing
    ):
        _warn(
            f"the privacy loss of a step is near the resolution of accountant pld, {FINE}, so "
            "epsilon is 1 % or more too large; accountant rdp may give a smaller one"
        )
    return privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=sampling_prob, value_discretization_interval=spacing
    )


def check(sampling_prob: float, num_steps: int, delta: float) -> None:
    """Checks that rounding does not hide δ after T steps.

    InputError if it does, a warning if it takes 1/1000 of δ.
    """
    error = TRUNCATION + (ROUNDING * num_steps if sampling_prob < 1 else 0.0)
    if delta < 2 * error:
        raise InputError(
            f"accountant pld cannot resolve delta {delta:.3g} after {num_steps} steps: choose a "
            f"delta of at least {2.2 * error:.2g}, or accountant rdp"
        )
    if delta < 1000 * error:  # the text does not depend on T, so that a run says it once
        most = max(0, int((delta / 1000 - TRUNCATION) / ROUNDING))
        since = f"after {most} steps" if most else "in any step"
        _warn(
            f"{since} accountant pld does not resolve a thousandth of delta {delta:.3g}, and "
            "epsilon is larger for it: a larger delta, or accountant rdp, may give a smaller one"
        )


def _warn(message: str) -> None:
    warnings.warn(message, LooseBoundWarning, stacklevel=1)  # one place, so each is shown once
