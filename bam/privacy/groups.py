"""Group privacy: the guarantee of example-level DP for someone who has several examples.

With users as the unit of privacy (`bam.data.users`) none of this is needed. It is what that is
compared with, and what can be said of a run that protected examples.
"""

import math

from dp_accounting.pld import privacy_loss_distribution
from scipy import stats

from bam.privacy import accounting, pld


def epsilon_of_group(
    *,
    noise_multiplier: float,
    sampling_prob: float,
    num_steps: int,
    delta: float,
    group_size: int,
    spacing: float = pld.COARSE,
) -> float:
    r"""ε of T steps of the Poisson-sampled Gaussian for adding or removing m examples at once.

    The m are drawn independently, and move the sum by at most one S each: a step is no worse than

    $N(0, \sigma^2)$ against $\sum_j \binom{m}{j} q^j (1 - q)^{m-j} N(j, \sigma^2)$,

    in either direction, which dp-accounting composes.

    Args:
      noise_multiplier: σ > 0.
      sampling_prob: q in (0, 1].
      num_steps: T ≥ 1.
      delta: δ, as `accounting.epsilon` takes it for "pld".
      group_size: m ≥ 1; with 1 it is `accounting.epsilon`.
      spacing: of the table of a step's privacy loss; ε is an upper bound with any.

    Raises:
      ValueError: if an argument is out of range.

    Source: Ganesh 2024, "Tight Group-Level DP Guarantees for DP-SGD with Sampling via Mixture of
    Gaussians Mechanisms", arXiv 2401.10294.
    """
    accounting.check_mechanism(sampling_prob, num_steps, delta, "pld")
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")
    if not (noise_multiplier > 0 and sampling_prob > 0 and num_steps > 0):
        raise ValueError("noise_multiplier, sampling_prob and num_steps must be positive")
    drawn = range(group_size + 1)
    step = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        noise_multiplier,
        sensitivities=[float(j) for j in drawn],
        sampling_probs=[float(stats.binom.pmf(j, group_size, sampling_prob)) for j in drawn],
        value_discretization_interval=spacing,
    )
    delta -= pld.ROUNDING * num_steps
    return float(step.self_compose(num_steps).get_epsilon_for_delta(delta))


def of_example(epsilon: float, delta: float, group_size: int) -> tuple[float, float]:
    """The (ε, δ) of one example that is (ε, δ) of any m of them, for every mechanism there is.

    (ε', δ') of one is (m·ε', δ'·(e^{m·ε'} − 1)/(e^{ε'} − 1)) of m, composed one after the other.

    Examples:
      >>> of_example(3.0, 1e-5, 1)
      (3.0, 1e-05)
    """
    each = epsilon / group_size
    return each, delta * (math.expm1(each) / math.expm1(epsilon) if group_size > 1 else 1)
