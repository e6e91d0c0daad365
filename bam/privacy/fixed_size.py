"""Accounting of batches of a fixed size, drawn without replacement: ε from above and from below."""

import functools
import math

import dp_accounting
import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from scipy import stats

from bam.privacy import accounting, pld

# Rényi orders for batches of a fixed size: more take long, and beyond 256 the bound does not fall
# with σ.
WHOLE_ORDERS = (*range(2, 33), 40, 48, 64, 96, 128, 192, 256)

NUM_BINS = 40_000  # of a step's outcome, to bound ε from below


def epsilon_of_fixed_size(
    *, noise_multiplier: float, num_examples: int, batch_size: int, num_steps: int, delta: float
) -> float:
    """ε of T Gaussians of batches of a fixed size without replacement, by dp-accounting's RDP.

    Neighbours differ in one example that is *replaced* by another: two gradients of norm S can be
    2S apart, so noise that is σ times S is σ/2 times what it must hide. The bound is not tight.

    Args:
      noise_multiplier: σ ≥ 0, noise standard deviation over the longest gradient of one example, S.
      num_examples: N.
      batch_size: examples in every batch, from 0 to N.
      num_steps: T, from 0 to 10⁷.
      delta: δ in (0, 1).

    Raises:
      ValueError: if an argument is out of range.

    Source: Wang, Balle, Kasiviswanathan 2019, Theorem 27.

    Examples:
      >>> settings = dict(noise_multiplier=1.5, num_steps=200, delta=1e-5)
      >>> fixed = epsilon_of_fixed_size(num_examples=1000, batch_size=40, **settings)
      >>> poisson = accounting.epsilon(sampling_prob=0.04, **settings)
      >>> round(fixed, 1), round(poisson, 1)
      (12.8, 1.8)
    """
    if not 0 <= batch_size <= num_examples:
        raise ValueError(f"batch_size must be from 0 to {num_examples}, got {batch_size}")
    accounting.check_mechanism(0.0, num_steps, delta, "rdp")
    accounting.check_noise_multiplier(noise_multiplier)
    if num_steps == 0 or batch_size == 0 or math.isinf(noise_multiplier):
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    prob = batch_size / num_examples
    if noise_multiplier > 1e6:  # beyond what dp-accounting can compute
        return accounting.epsilon_near_zero(noise_multiplier / 2, prob, num_steps, delta)
    step = _step_rdp_of_fixed_size(noise_multiplier, num_examples, batch_size)
    with accounting.without_order_warnings():
        spent = float(compute_epsilon(step.orders, num_steps * step.rdp, delta)[0])
    if spent > 0:
        return spent
    return accounting.epsilon_near_zero(noise_multiplier / 2, prob, num_steps, delta)


def least_epsilon_of_fixed_size(
    *, noise_multiplier: float, num_examples: int, batch_size: int, num_steps: int, delta: float
) -> float:
    r"""ε from below, of the same: no accountant can be right that says less.

    It is that of two data sets that exist. In one, an example's gradient has norm S in a direction
    of its own, in the other the opposite one; all other gradients are 0. A step then shows
    $(1-q) N(0, \sigma^2) + q N(\pm 1, \sigma^2)$. What is seen of it is the bin of its outcome, and
    privacy losses are rounded down. Arguments as of `epsilon_of_fixed_size`, σ above 0.
    """
    prob = batch_size / num_examples
    edges = np.linspace(-12 * noise_multiplier, 12 * noise_multiplier, NUM_BINS + 1)
    edges[0], edges[-1] = -np.inf, np.inf

    def masses(mean: float) -> np.ndarray:  # of the bins of a normal variable
        below, above = (f(edges, mean, noise_multiplier) for f in (stats.norm.cdf, stats.norm.sf))
        found: np.ndarray = np.where(edges[1:] <= mean, np.diff(below), -np.diff(above))
        return found

    def log_probabilities(mean: float) -> dict[int, float]:
        mixed = (1 - prob) * masses(0.0) + prob * masses(mean)
        return dict(enumerate(np.log(np.maximum(mixed, 1e-300))))

    step = privacy_loss_distribution.from_two_probability_mass_functions(
        log_probabilities(1.0),
        log_probabilities(-1.0),
        value_discretization_interval=pld.FINE,
        pessimistic_estimate=False,
    )
    delta += pld.ROUNDING * num_steps  # from below, that is
    return float(step.self_compose(num_steps).get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=64)  # most of the time, and the same for any number of steps
def _step_rdp_of_fixed_size(
    noise_multiplier: float, num_examples: int, batch_size: int
) -> RdpAccountant:
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier / 2)
    step = dp_accounting.SampledWithoutReplacementDpEvent(num_examples, batch_size, gaussian)
    with accounting.without_order_warnings():
        return RdpAccountant(WHOLE_ORDERS, NeighboringRelation.REPLACE_ONE).compose(step)
