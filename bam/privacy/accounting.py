"""ε, δ and σ of T steps of a Poisson-sampled Gaussian, composed by Google's `dp-accounting`.

`bam.privacy.mechanisms` has the other ways to draw batches.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import dp_accounting
import numpy as np
from absl import logging as absl_logging
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS
from scipy import optimize

from bam.core import scalars
from bam.errors import InputError
from bam.privacy import pld, tradeoff

# Range of a target ε. Below, rounding errors are not small beside ε. Above, ε protects nobody, and
# the tables of the privacy loss are long.
SMALLEST_EPSILON, LARGEST_EPSILON = 1e-3, 256
LARGEST_NUM_STEPS = 10**7  # no training has more, and rounding errors grow with their number
# Below, σ protects nobody and ε is infinite; above, nothing is learnt. Powers of both would leave
# the range of floats.
SMALLEST_NOISE, LARGEST_NOISE = 1e-6, 1e6
LARGEST_PLD_EPSILON = 1000  # largest ε by RDP for which PLD is tried: its tables grow with ε
LEAST_PLD_NOISE = 0.1  # for smaller σ, PLD's tables grow too long, and nobody is protected
# Rényi orders for searches. Integers have a closed form.
ALL_ORDERS = tuple(DEFAULT_RDP_ORDERS)  # of accountant rdp
FEW_ORDERS = (*range(2, 17), *range(20, 64, 4), 80, 96, 128, 192, 256, 512)


class PoissonSteps(NamedTuple):
    """T steps of Gaussian noise on batches that contain each example with probability q."""

    noise_multiplier: float
    sampling_prob: float
    num_steps: int


def poisson_event(
    noise_multiplier: float, sampling_prob: float, num_steps: int
) -> dp_accounting.SelfComposedDpEvent:
    """Returns T Poisson-sampled Gaussian steps as an event of dp-accounting."""
    noise_multiplier = scalars.real("noise_multiplier", noise_multiplier)
    sampling_prob = scalars.real("sampling_prob", sampling_prob)
    num_steps = scalars.count("num_steps", num_steps)
    # In the order in which dp-accounting names events: composed, sampled, Gaussian.
    step = dp_accounting.GaussianDpEvent(noise_multiplier)
    sampled = dp_accounting.PoissonSampledDpEvent(sampling_prob, step)
    return dp_accounting.SelfComposedDpEvent(sampled, num_steps)


def poisson_steps(event: dp_accounting.DpEvent) -> PoissonSteps | None:
    """Returns the arguments with which `poisson_event` made an event.

    None if it did not make it.

    Examples:
      >>> poisson_steps(poisson_event(1.5, 0.04, 2250))
      PoissonSteps(noise_multiplier=1.5, sampling_prob=0.04, num_steps=2250)
    """
    # Exactly the shape that `poisson_event` makes.
    match event:
        case dp_accounting.SelfComposedDpEvent(
            event=dp_accounting.PoissonSampledDpEvent(
                sampling_probability=prob,
                event=dp_accounting.GaussianDpEvent(noise_multiplier=sigma),
            ),
            count=num_steps,
        ):
            return PoissonSteps(sigma, prob, num_steps)
    return None


def epsilon(
    *,
    noise_multiplier: float,
    sampling_prob: float,
    num_steps: int,
    delta: float,
    accountant: str = "pld",
) -> float:
    """Returns ε of T steps of the Poisson-sampled Gaussian mechanism, at a given δ.

    Neighbours: one example is replaced by nothing, at the same q and T (zero-out). ε is 0 for
    T = 0, q = 0 or σ = ∞, and otherwise `inf` for σ below 1e-6.

    Args:
      noise_multiplier: σ from 0 to 10⁶, or ∞; noise standard deviation over L2 sensitivity.
      sampling_prob: q in [0, 1], the Poisson sampling probability.
      num_steps: T, from 0 to 10⁷.
      delta: δ in (0, 1); for "pld" at least T · 2⁻⁵⁰ + 2e-15, twice its rounding error.
      accountant: "pld" (numerically tight, an upper bound), "rdp" (the moments accountant, a
        looser upper bound), or "gdp" (a central limit: asymptotic, *not* a guarantee).

    Raises:
      InputError: if an argument is out of range; for "pld" also if δ is too small for T, or if ε is
        above about 1,000.

    A `bam.privacy.pld.LooseBoundWarning` says that ε by "pld" is an upper bound but not tight,
    because its rounding error exceeds a thousandth of δ, or because the privacy loss of a step is
    below three spacings of its tables, 3e-4.

    Examples:
      >>> settings = dict(noise_multiplier=1.5, sampling_prob=0.04, num_steps=2250, delta=1e-5)
      >>> round(epsilon(**settings), 3), round(epsilon(**settings, accountant="rdp"), 3)
      (6.769, 7.329)
    """
    # Plain floats, because dp-accounting would compute in the few bits of NumPy's narrow types.
    sigma = scalars.real("noise_multiplier", noise_multiplier)
    prob, steps, delta = read_steps(sampling_prob, num_steps, delta)
    check_steps(prob, steps, delta, accountant)
    check_noise_multiplier(sigma)
    return cached_epsilon(accountant, sigma, prob, steps, delta)


@functools.lru_cache(maxsize=4096)
def cached_epsilon(
    accountant: str, sigma: float, prob: float, num_steps: int, delta: float
) -> float:
    """Returns ε by an accountant, for checked numbers, and computes each set of them once."""
    if num_steps == 0 or prob == 0 or math.isinf(sigma):
        return 0.0
    if sigma < SMALLEST_NOISE:
        return math.inf
    return ACCOUNTANTS[accountant](sigma, prob, num_steps, delta)


def joint_epsilon(events: Sequence[PoissonSteps], delta: float) -> float:
    """Returns ε of several Poisson-sampled Gaussian mechanisms on the same data, at δ, by PLD.

    Their privacy losses are composed. If each has ε_i at δ_i and the δ_i add up to δ, the result is
    at most the sum of the ε_i, and usually much less. Each σ, q and T must be positive. Errors are
    those of `epsilon`.

    Examples:
      >>> half = PoissonSteps(noise_multiplier=1.5, sampling_prob=0.04, num_steps=1125)
      >>> round(joint_epsilon([half, half], delta=1e-5), 3)  # the ε of 2,250 steps
      6.769
    """
    delta = scalars.real("delta", delta)
    if not all(0 < sigma < math.inf and q > 0 and steps > 0 for sigma, q, steps in events):
        raise InputError("noise_multiplier, sampling_prob and num_steps must be positive")
    if not events:
        raise InputError("the joint epsilon needs at least one mechanism")
    for sigma, prob, steps in events:
        check_steps(prob, steps, delta, "pld")
        check_noise_multiplier(sigma)
    check_tables(events, delta)
    return pld.joint_epsilon(events, delta)


def check_tables(events: Sequence[PoissonSteps], delta: float) -> None:
    """Raises InputError if PLD cannot resolve δ of the events together, or lacks the memory."""
    # Composing two tables rounds like one more step, even for Gaussians without sampling.
    pld.check(0.5, sum(steps + 1 for *_, steps in events), delta)
    _check_room(events, delta)


def deltas(
    *, noise_multiplier: float, sampling_prob: float, num_steps: int, epsilons: Sequence[float]
) -> list[float]:
    """Returns δ at several ε of T steps of the Poisson-sampled Gaussian mechanism, by PLD.

    Arguments are those of `epsilon`. InputError unless σ, q and T are positive and each ε is at
    least 0. `tradeoff.profile_tradeoff` makes the mechanism's trade-off function of the result.
    """
    noise_multiplier = scalars.real("noise_multiplier", noise_multiplier)
    epsilons = [scalars.real("epsilons", x) for x in epsilons]
    sampling_prob, num_steps, _ = read_steps(sampling_prob, num_steps, 0.5)
    check_steps(sampling_prob, num_steps, 0.5, "pld")
    if not (noise_multiplier > 0 and sampling_prob > 0 and num_steps > 0 and min(epsilons) >= 0):
        raise InputError(
            "noise_multiplier, sampling_prob and num_steps must be positive, and epsilons at "
            "least 0"
        )
    _check_room([PoissonSteps(noise_multiplier, sampling_prob, num_steps)], 1e-5)
    return pld.deltas(noise_multiplier, sampling_prob, num_steps, epsilons)


@functools.lru_cache(maxsize=8)
def poisson_tradeoff(
    *, noise_multiplier: float, sampling_prob: float, num_steps: int, up_to: float
) -> tradeoff.Tradeoff:
    """Returns a lower bound of the trade-off function of T steps of the Poisson-sampled Gaussian.

    It bounds every attacker on a training with these settings. It is computed by `deltas` at 200 ε
    from 0 to `up_to`, which should exceed the claimed ε.
    """
    epsilons = np.linspace(0, up_to, 200).tolist()
    mechanism = {"noise_multiplier": noise_multiplier, "sampling_prob": sampling_prob}
    return tradeoff.profile_tradeoff(
        epsilons, deltas(num_steps=num_steps, epsilons=epsilons, **mechanism)
    )


def noise_multiplier(
    *,
    target_epsilon: float,
    delta: float,
    sampling_prob: float,
    num_steps: int,
    accountant: str = "pld",
) -> float:
    """Returns the smallest noise multiplier σ that keeps T steps within (ε, δ).

    `epsilon(noise_multiplier=σ, …)` is never above the target, which must be from 0.001 to 256. ε
    is at most a relative 1e-5 below the target; it is further below if a σ below 0.1 suffices, if
    q · T ≤ δ, or if ε jumps. The other arguments and errors are those of `epsilon`, with q and T
    above 0. It is also an InputError if σ would exceed 10⁶, or if accountant "rdp" cannot tell an ε
    as small as the target at this δ.

    Examples:
      >>> steps = {"sampling_prob": 0.1, "num_steps": 10, "delta": 1e-5}
      >>> sigma = noise_multiplier(target_epsilon=2.0, **steps)
      >>> epsilon(noise_multiplier=sigma, **steps) <= 2.0, round(sigma, 2)
      (True, 1.19)
    """
    target = scalars.real("target_epsilon", target_epsilon)
    prob, steps, delta = read_steps(sampling_prob, num_steps, delta)
    check_steps(prob, steps, delta, accountant)
    check_search(target, prob, steps)
    return _noise_multiplier(accountant, target, prob, steps, delta)


@functools.lru_cache(maxsize=256)
def _noise_multiplier(
    accountant: str, target: float, prob: float, num_steps: int, delta: float
) -> float:
    steps = (prob, num_steps, delta)

    def by_accountant(sigma: float) -> float:
        spent = cached_epsilon(accountant, min(sigma, LARGEST_NOISE), *steps)
        if sigma > LARGEST_NOISE and spent > target:
            raise InputError(
                f"target_epsilon {target:g} at delta {delta:g} needs a noise_multiplier above "
                f"{LARGEST_NOISE:.0e}: choose a larger epsilon or delta, or fewer steps"
            )
        return spent

    any_noise_will_do = prob * num_steps <= delta  # P(an example is ever drawn) ≤ δ
    # No noise brings ε by RDP below a floor, which is higher for fewer orders.
    if target <= 1.05 * rdp_floor(FEW_ORDERS, delta) and not any_noise_will_do:
        if accountant == "rdp":
            check_rdp_floor(target, delta)
        # A central limit brackets σ: it is good enough where ε is this small.
        sigma = least_noise(lambda s: _by_gdp(s, *steps), target, 1.0, 1e-2)
        return _refine(by_accountant, target, sigma)
    # A cheap bound brackets σ; the accountant's own refines it.
    sigma = least_noise(lambda s: _by_rdp(s, *steps, FEW_ORDERS), target, 1.0, 1e-2)
    # RDP with few orders decides alone, with 1 % more noise: PLD's tables would grow too long.
    if sigma < LEAST_PLD_NOISE or any_noise_will_do:
        return 1.01 * sigma
    spacing = min(pld.COARSE, target / 50, prob / sigma)
    if accountant == "pld" and spacing > 5 * pld.FINE:  # otherwise it is hardly cheaper
        by_coarse_pld = functools.partial(pld.epsilon, spacing=spacing)
        at = lambda s: by_coarse_pld(s, *steps)  # noqa: E731
        sigma = least_noise(at, target, sigma, 1e-6)
        # The coarse table's error is nearly the same for any σ nearby, so it is measured once.
        aim = (1 - 4e-6) * target + (target - by_accountant(sigma))
        sigma = least_noise(at, aim, sigma, 1e-6)
    return _refine(by_accountant, target, sigma)


def _refine(by_accountant: Callable[[float], float], target: float, near: float) -> float:
    """Returns the least σ up to `LARGEST_NOISE`, from which on `by_accountant` is constant."""
    return min(LARGEST_NOISE, least_noise(by_accountant, target, near, 1e-5))


def rdp_floor(orders: Sequence[float], delta: float) -> float:
    """Returns the ε that RDP with these orders approaches as the noise grows.

    It is the cost of δ alone.
    """
    costs = (math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in orders)
    return max(0.0, min(costs))


def check_rdp_floor(target: float, delta: float) -> None:
    """Raises InputError for a target that accountant rdp cannot reach with any useful noise."""
    floor = rdp_floor(ALL_ORDERS, delta)
    if target <= floor:
        raise InputError(
            f"target_epsilon {target:g} is below {floor:.2g}, the least that accountant rdp can "
            f"tell at delta {delta:g}: use accountant=pld"
        )


def _by_pld(sigma: float, prob: float, num_steps: int, delta: float) -> float:
    _check_room([PoissonSteps(sigma, prob, num_steps)], delta)
    return pld.epsilon(sigma, prob, num_steps, delta)


def _by_rdp(
    sigma: float,
    prob: float,
    num_steps: int,
    delta: float,
    orders: tuple[float, ...] | None = None,
) -> float:
    """Returns ε by dp-accounting's Rényi accountant, with these orders or its default ones."""
    with without_order_warnings():
        step = _step_rdp(sigma, prob, orders)
        spent = float(compute_epsilon(step.orders, num_steps * step.rdp, delta)[0])
    # `compute_epsilon` also returns 0 where rounding makes a Rényi divergence negative. So another
    # bound replaces a 0.
    return spent or epsilon_near_zero(sigma, prob, num_steps, delta)


def epsilon_near_zero(sigma: float, prob: float, num_steps: int, delta: float) -> float:
    """Returns an upper bound on ε without sums of small numbers.

    It is 0 if δ covers the total variation. Otherwise it is the bound of the Gaussian without
    sampling, ρ + 2 √(ρ log 1/δ) with ρ = T/(2σ²) (Bun & Steinke 2016, Proposition 1.3).
    """
    if num_steps * prob * math.erf(1 / (math.sqrt(8) * sigma)) <= delta:
        return 0.0
    rho = num_steps / (2 * sigma**2)
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


def _by_gdp(sigma: float, prob: float, num_steps: int, delta: float) -> float:
    return tradeoff.epsilon_of_mu(tradeoff.mu_of_noisy_sgd(sigma, prob, num_steps), delta)


ACCOUNTANTS: dict[str, Callable[[float, float, int, float], float]] = {
    "pld": _by_pld,
    "rdp": _by_rdp,
    "gdp": _by_gdp,
}


@functools.lru_cache(maxsize=64)  # takes most of the time, and does not depend on T
def _step_rdp(
    noise_multiplier: float, sampling_prob: float, orders: tuple[float, ...] | None
) -> RdpAccountant:
    step = dp_accounting.GaussianDpEvent(noise_multiplier)
    if sampling_prob < 1:
        step = dp_accounting.PoissonSampledDpEvent(sampling_prob, step)
    return RdpAccountant(orders).compose(step)


def least_noise(
    epsilon_of: Callable[[float], float], target: float, near: float, tolerance: float
) -> float:
    """Returns σ with ε at most the target and, if ε is continuous, at most the tolerance below it.

    The search begins at `near`. It is fast if `epsilon_of` falls about as 1/σ or faster.
    """

    @functools.cache
    def excess(sigma: float) -> float:  # 0 ends the search
        over = epsilon_of(sigma) / target - 1
        return 0.0 if -tolerance <= over <= 0 else over + tolerance / 2

    # Doubling and halving until the target is bracketed.
    low = high = near
    while (over := excess(high)) > 0:
        low, high = high, high * min(2, 1 + max(2 * over, tolerance))
    while (over := excess(low)) < 0:
        low, high = low * max(0.5, 1 + min(2 * over, -tolerance)), low
    sigma = float(optimize.brentq(excess, low, high, xtol=1e-300, rtol=tolerance / 10))
    while epsilon_of(sigma) > target:  # at a jump of ε, Brent's method may end on either side
        sigma *= 1 + tolerance
    return sigma


@contextlib.contextmanager
def without_order_warnings() -> Iterator[None]:
    """Silences dp-accounting's notes on excluded Rényi orders and on rounding, handled here."""
    logger = absl_logging.get_absl_logger()
    notes = re.compile("Excluding this order|Negative Renyi divergence")
    keep = lambda record: not notes.search(record.getMessage())  # noqa: E731
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _joint_rdp(
    events: Sequence[PoissonSteps], delta: float, orders: tuple[float, ...] | None
) -> float:
    with without_order_warnings():
        steps = [_step_rdp(*x[:2], orders) for x in events]
        rdp = sum(x.num_steps * step.rdp for x, step in zip(events, steps, strict=True))
        return float(compute_epsilon(steps[0].orders, rdp, delta)[0])


def _check_room(events: Sequence[PoissonSteps], delta: float) -> None:
    """Raises InputError if PLD's tables would fill the memory."""
    about, least = math.inf, min(x.noise_multiplier for x in events)
    # RDP is fast, and the tables grow with its ε. Few orders overestimate a large ε, so from
    # σ = 0.1, all orders are tried before the refusal.
    for orders, smallest in ((FEW_ORDERS, SMALLEST_NOISE), (None, LEAST_PLD_NOISE)):
        if about > LARGEST_PLD_EPSILON and least >= smallest:
            about = _joint_rdp(events, delta, orders)
    if about > LARGEST_PLD_EPSILON:
        raise InputError(
            f"epsilon would be about {about:.2g}, too large for accountant pld and for any "
            "protection: use more noise, fewer steps, or accountant rdp"
        )


def read_steps(sampling_prob: float, num_steps: float, delta: float) -> tuple[float, int, float]:
    """Returns q, T and δ as plain Python numbers.

    InputError for one that is not a number.
    """
    return (
        scalars.real("sampling_prob", sampling_prob),
        scalars.count("num_steps", num_steps),
        scalars.real("delta", delta),
    )


def check_noise_multiplier(noise_multiplier: float) -> None:
    """Raises InputError for a σ that is negative, NaN, or finite and above `LARGEST_NOISE`."""
    if not (0 <= noise_multiplier <= LARGEST_NOISE or noise_multiplier == math.inf):
        raise InputError(
            f"noise_multiplier must be from 0 to {LARGEST_NOISE:.0e}, got {noise_multiplier}"
        )


def check_search(target_epsilon: float, sampling_prob: float, num_steps: int) -> None:
    """Raises InputError for an ε outside the range of searches, or if nothing is released."""
    if not SMALLEST_EPSILON <= target_epsilon <= LARGEST_EPSILON:
        raise InputError(
            f"epsilon must be from {SMALLEST_EPSILON} to {LARGEST_EPSILON}, got {target_epsilon}"
        )
    if num_steps == 0 or sampling_prob == 0:
        raise InputError(
            f"num_steps and sampling_prob must be positive, got {num_steps} and {sampling_prob}"
        )


def check_steps(sampling_prob: float, num_steps: int, delta: float, accountant: str) -> None:
    """Raises InputError for a q, T or δ out of range, or an unknown accountant."""
    if accountant not in ACCOUNTANTS:
        raise InputError(f"unknown accountant {accountant!r}; choose from {', '.join(ACCOUNTANTS)}")
    if not 0 <= sampling_prob <= 1:
        raise InputError(f"sampling_prob must be between 0 and 1, got {sampling_prob}")
    if not 0 <= num_steps <= LARGEST_NUM_STEPS or num_steps != int(num_steps):
        raise InputError(
            f"num_steps must be an integer from 0 to {LARGEST_NUM_STEPS}, got {num_steps}"
        )
    if not 0 < delta < 1:
        raise InputError(f"delta must be between 0 and 1, got {delta}")
    if accountant == "pld":
        pld.check(sampling_prob, num_steps, delta)
