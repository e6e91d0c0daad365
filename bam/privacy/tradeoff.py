"""f-DP: trade-off functions, the power of attackers, Gaussian DP and its central limit.

An attacker decides whether an example took part. A trade-off function f maps the type-I error α
(the false positive rate) to the smallest type-II error (1 − true positive rate) of any test. Here
it is a function of a NumPy array of α in [0, 1]. It is convex, does not rise, and is at most 1 − α.

The central limit of many Poisson-sampled Gaussian steps (`mu_of_noisy_sgd`) is asymptotic and can
*under*state ε: use it to compare, never as a guarantee.

Source: Dong, Roth, Su 2019, "Gaussian Differential Privacy"; Bu, Dong, Long, Su 2019, "Deep
Learning with Gaussian Differential Privacy".
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, special

from bam.errors import InputError


def mu_of_noisy_sgd(noise_multiplier: float, sampling_prob: float, num_steps: int) -> float:
    r"""Returns the μ of NoisySGD and NoisyAdam: $\mu = q\sqrt{T (e^{1/\sigma^2} - 1)}$.

    It is the limit as T → ∞ with q√T held constant, for σ > 0; `inf` if it overflows.
    """
    if sampling_prob == 0 or num_steps == 0:
        return 0.0
    try:
        return sampling_prob * math.sqrt(num_steps * math.expm1(noise_multiplier**-2))
    except (OverflowError, ZeroDivisionError):
        return math.inf


def delta_of_mu(mu: float, epsilon: ArrayLike) -> np.ndarray:
    """Returns δ of a μ-GDP mechanism at each ε.

    δ = Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2), and 0 for μ = 0.
    """
    epsilon = np.asarray(epsilon, float)
    if mu == 0 or math.isinf(mu):
        return np.full(epsilon.shape, float(mu > 0))
    second = np.exp(np.minimum(0.0, epsilon + special.log_ndtr(-epsilon / mu - mu / 2)))
    return np.asarray(np.maximum(0.0, special.ndtr(-epsilon / mu + mu / 2) - second))


def epsilon_of_mu(mu: float, delta: float) -> float:
    """Returns the ε at which a μ-GDP mechanism is (ε, δ)-DP.

    This is the inverse of `delta_of_mu`. Its absolute accuracy is 1e-10, for δ in (0, 1). It is
    `inf` for infinite μ.
    """
    excess = lambda epsilon: float(delta_of_mu(mu, epsilon)) - delta  # noqa: E731
    if math.isinf(mu):
        return math.inf
    if excess(0.0) <= 0:
        return 0.0
    upper = 1.0
    while excess(upper) > 0:
        upper *= 2
    return float(optimize.brentq(excess, 0.0, upper, xtol=1e-10))


Tradeoff: TypeAlias = Callable[[np.ndarray], np.ndarray]


def gaussian_tradeoff(mu: float) -> Tradeoff:
    r"""$G_\mu(\alpha) = \Phi(\Phi^{-1}(1 - \alpha) - \mu)$, N(0, 1) against N(μ, 1), for μ ≥ 0.

    Examples:
      >>> gaussian_tradeoff(0.0)(np.array([0.25]))
      array([0.75])
    """
    if not mu >= 0:
        raise InputError(f"mu must be at least 0, got {mu}")
    return lambda alpha: special.ndtr(-special.ndtri(alpha) - mu)


def epsilon_delta_tradeoff(epsilon: float, delta: float) -> Tradeoff:
    r"""Returns the trade-off function $f_{\epsilon,\delta}$ that bounds (ε, δ)-DP mechanisms below.

    $f(\alpha) = \max\{0, 1 - \delta - e^\epsilon\alpha, e^{-\epsilon}(1 - \delta - \alpha)\}$.
    Raises InputError unless ε ≥ 0 and δ is in [0, 1].
    """
    if not epsilon >= 0 or not 0 <= delta <= 1:
        raise InputError(f"epsilon {epsilon} must be at least 0 and delta {delta} in [0, 1]")

    def f(alpha: np.ndarray) -> np.ndarray:
        steep = 1 - delta - np.exp(min(epsilon, 700.0)) * alpha
        flat = np.exp(-epsilon) * (1 - delta - alpha)
        return np.maximum(0.0, np.maximum(steep, flat))

    return f


def profile_tradeoff(epsilons: ArrayLike, deltas: ArrayLike) -> Tradeoff:
    r"""Returns the trade-off function of a mechanism that is (ε_j, δ_j)-DP for every j.

    It is $\sup_j f_{\epsilon_j,\delta_j}$. With finitely many ε it is a lower bound of the
    mechanism's trade-off function, so it never hides an attacker's power.
    """
    for epsilon, delta in np.stack([epsilons, deltas], axis=1):
        epsilon_delta_tradeoff(epsilon, delta)  # raises for numbers out of range
    rises, heights = np.exp(np.minimum(epsilons, 700.0)), 1 - np.asarray(deltas, float)

    def f(alpha: np.ndarray) -> np.ndarray:
        alpha = np.asarray(alpha, float)[..., None]
        lines = np.maximum(heights - rises * alpha, (heights - alpha) / rises)
        return np.maximum(0.0, np.max(lines, axis=-1))

    return f


def subsampled_tradeoff(f: Tradeoff, sampling_prob: float) -> Tradeoff:
    r"""Returns the trade-off function of a mechanism that sees each example with probability p.

    $C_p(f) = \min\{f_p, f_p^{-1}\}^{**}$ with $f_p = p f + (1 - p) Id$, where Id(α) = 1 - α. For a
    symmetric f with fixed point α* it is f_p up to α*, the inverse of f_p beyond f_p(α*), and a
    straight line between. InputError unless p is in [0, 1].
    """
    if not 0 <= sampling_prob <= 1:
        raise InputError(f"sampling_prob must be between 0 and 1, got {sampling_prob}")

    def one_sided_curve(alpha: np.ndarray) -> np.ndarray:
        return sampling_prob * f(alpha) + (1 - sampling_prob) * (1 - alpha)

    fixed = optimize.brentq(lambda a: float(f(np.array([a]))[0]) - a, 0.0, 1.0, xtol=1e-15)
    at_fixed = float(one_sided_curve(np.array([fixed]))[0])

    def inverse(beta: np.ndarray) -> np.ndarray:  # for a whole array, unlike SciPy's searches
        low, high = np.zeros_like(beta), np.ones_like(beta)
        for _ in range(80):  # f_p falls: bisect
            middle = (low + high) / 2
            above = one_sided_curve(middle) > beta
            low, high = np.where(above, middle, low), np.where(above, high, middle)
        return (low + high) / 2

    def symmetric_curve(alpha: np.ndarray) -> np.ndarray:
        alpha = np.asarray(alpha, float)
        line = fixed + at_fixed - alpha
        beyond = np.where(alpha >= at_fixed, inverse(alpha), line)
        return np.where(alpha <= fixed, one_sided_curve(alpha), beyond)

    return symmetric_curve


def best_true_positive_rate(f: Tradeoff, false_positive_rate: float) -> float:
    """Returns the highest true positive rate of any attacker with this false positive rate.

    It is 1 − f(FPR).
    """
    return float(1 - f(np.array([false_positive_rate]))[0])


def most_power(epsilon: float, delta: float, false_positive_rate: float) -> float:
    """Returns the largest power of a test under (ε, δ)-DP: min(e^ε α + δ, 1 − e^−ε (1 − δ − α)).

    α is its false positive rate (Kairouz, Oh & Viswanath 2015).

    Examples:
      >>> round(most_power(1.0, 1e-5, 0.01), 5)
      0.02719
    """
    return best_true_positive_rate(epsilon_delta_tradeoff(epsilon, delta), false_positive_rate)
