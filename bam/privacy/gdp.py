"""Gaussian differential privacy: the central limit of many Poisson-sampled Gaussian steps.

Source: Bu, Dong, Long, Su 2019, "Deep Learning with Gaussian Differential Privacy". The limit is
asymptotic and can *under*state ε: use it to compare, never as a guarantee.
"""

import math

from scipy import optimize, special


def mu_of_noisy_sgd(noise_multiplier: float, sampling_prob: float, num_steps: int) -> float:
    r"""The μ of NoisySGD and NoisyAdam: $\mu = q\sqrt{T (e^{1/\sigma^2} - 1)}$.

    Args:
      noise_multiplier: σ > 0.
      sampling_prob: q in [0, 1], Poisson sampling.
      num_steps: T ≥ 0.

    Returns:
      μ ≥ 0, the limit as T → ∞ with q√T held constant; `inf` if it overflows.
    """
    if sampling_prob == 0 or num_steps == 0:
        return 0.0
    try:
        return sampling_prob * math.sqrt(num_steps * math.expm1(noise_multiplier**-2))
    except (OverflowError, ZeroDivisionError):
        return math.inf


def delta_of_mu(mu: float, epsilon: float) -> float:
    r"""δ(ε; μ) = Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2) of a μ-GDP mechanism.

    Args:
      mu: μ ≥ 0.
      epsilon: ε ≥ 0.

    Returns:
      δ in [0, 1]; 0 for μ = 0.
    """
    if mu == 0:
        return 0.0
    if math.isinf(mu):
        return 1.0
    second = math.exp(min(0.0, epsilon + float(special.log_ndtr(-epsilon / mu - mu / 2))))
    return max(0.0, float(special.ndtr(-epsilon / mu + mu / 2)) - second)


def epsilon_of_mu(mu: float, delta: float) -> float:
    """The ε at which a μ-GDP mechanism is (ε, δ)-DP; the inverse of `delta_of_mu`.

    Args:
      mu: μ ≥ 0.
      delta: δ in (0, 1).

    Returns:
      ε ≥ 0, to an absolute accuracy of 1e-10; `inf` for infinite μ.
    """
    if math.isinf(mu):
        return math.inf
    if delta_of_mu(mu, 0.0) <= delta:
        return 0.0
    upper = 1.0
    while delta_of_mu(mu, upper) > delta:
        upper *= 2
    return float(optimize.brentq(lambda e: delta_of_mu(mu, e) - delta, 0.0, upper, xtol=1e-10))
