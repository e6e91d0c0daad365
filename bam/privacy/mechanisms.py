"""How a run draws its batches, who its neighbours are, and the ε that this earns: one record each.

The loop, the plan, the audit and a release's statement read the same record, so that none of them
can speak of another mechanism than the one that ran.
"""

import functools
import importlib
import math
from collections.abc import Callable
from typing import NamedTuple

import dp_accounting
import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from jaxtyping import Int64
from scipy import stats

from bam import sampling
from bam.privacy import accounting
from bam.privacy.accounting import rounded_up

# What neighbouring data sets differ in, in few words and in more.
ADJACENCIES = {
    "add_or_remove_one": ("add/remove one", "one example added or removed"),
    "replace_one": ("replace one", "one example replaced by another"),
}
# Rényi orders for batches of a fixed size: more take long, and beyond 256 the bound does not fall
# with σ.
WHOLE_ORDERS = (*range(2, 33), 40, 48, 64, 96, 128, 192, 256)

NUM_BINS = 40_000  # of a step's outcome, to bound ε from below


class Mechanism(NamedTuple):
    """A way to draw batches, with what it is worth beside Gaussian noise.

    Everything in it is public. σ is the standard deviation of the noise on a step's sum over S, the
    longest that the bounded gradient of *one* example can be, whatever the neighbours are.

    Attributes:
      adjacency: what neighbouring data sets differ in, a key of `ADJACENCIES`.
      batches: how batches are drawn, in few words.
      sampling: the same for whoever reads a release, with the random generator.
      draw: `(seed, step) -> sorted row numbers` of a step's batch. Each pair is a stream of its
        own; the seed is a non-negative integer of any size, to be kept secret.
      capacity: rows that hold all but one in 10⁹ draws.
      epsilon: `(noise_multiplier=σ, num_steps=T, delta=δ, accountant=name) -> ε`, an upper bound;
        ValueError for an accountant that has none.
      noise_multiplier: `(target_epsilon=ε, num_steps=T, delta=δ, accountant=name) -> σ`, the least
        that was found, and never one of a larger ε.
    """

    adjacency: str
    batches: str
    sampling: str
    draw: Callable[[int, int], Int64[np.ndarray, " drawn"]]
    capacity: int
    epsilon: Callable[..., float]
    noise_multiplier: Callable[..., float]


def make(name: str, num_examples: int, batch_size: int) -> Mechanism:
    """The mechanism of a name in `MECHANISMS`, or of your own MODULE:FUNCTION, called likewise.

    Args:
      name: as of a config's `mechanism` section.
      num_examples: N, public.
      batch_size: l, examples in a batch: the expected number, where it is random.

    Raises:
      ValueError: for an unknown name, or a batch size that the mechanism cannot have.
    """
    maker = MECHANISMS.get(name)
    if maker is None:
        module, _, function = name.partition(":")
        if not function:
            raise ValueError(
                f"unknown mechanism {name!r}; choose from {', '.join(MECHANISMS)}, or "
                "MODULE:FUNCTION"
            )
        try:
            maker = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"mechanism {name!r} cannot be imported: {error}") from None
    try:
        mechanism = maker(num_examples, batch_size)
    except TypeError as error:
        raise ValueError(f"mechanism {name} is no function of N and l: {error}") from None
    if not isinstance(mechanism, Mechanism):
        raise ValueError(f"mechanism {name} returns a {type(mechanism).__name__}, no Mechanism")
    if mechanism.adjacency not in ADJACENCIES:
        raise ValueError(f"mechanism {name}: its adjacency must be one of {', '.join(ADJACENCIES)}")
    return mechanism


def poisson(num_examples: int, batch_size: int) -> Mechanism:
    """Each example is in each batch independently with probability q = l/N. Add or remove one.

    The same noise earns the smallest ε that is known with this one.
    """
    prob = batch_size / num_examples
    return Mechanism(
        adjacency="add_or_remove_one",
        batches=f"Poisson sampling with q = {batch_size}/{num_examples} = "
        f"{rounded_up(prob, '.4g')}",
        sampling="Poisson: each example is in each batch independently with probability q, by "
        "NumPy's PCG64; not a cryptographic generator",
        draw=lambda seed, step: sampling.poisson_sample(seed, step, num_examples, prob),
        capacity=sampling.usual_capacity(num_examples, prob),
        epsilon=functools.partial(accounting.epsilon, sampling_prob=prob),
        noise_multiplier=functools.partial(accounting.noise_multiplier, sampling_prob=prob),
    )


def fixed_size(num_examples: int, batch_size: int) -> Mechanism:
    """Each batch is drawn anew, of exactly l of the N examples, without replacement. Replace one.

    A batch of a fixed size tells whether an example is missing by taking another in its place, so
    neighbours have the same N. Only the RDP accountant has a bound.
    """

    def epsilon(*, noise_multiplier: float, num_steps: int, delta: float, accountant: str) -> float:
        if accountant != "rdp":
            raise ValueError(
                f"accountant {accountant} has no bound for fixed_size batches: rdp has"
            )
        return epsilon_of_fixed_size(
            noise_multiplier=noise_multiplier,
            num_examples=num_examples,
            batch_size=batch_size,
            num_steps=num_steps,
            delta=delta,
        )

    return Mechanism(
        adjacency="replace_one",
        batches=f"batches of exactly {batch_size} of {num_examples} examples",
        sampling="fixed size: each batch is l different examples, any l of them equally likely and "
        "independent of other batches, by NumPy's PCG64; not a cryptographic generator",
        draw=lambda seed, step: sampling.fixed_size_sample(seed, step, num_examples, batch_size),
        capacity=batch_size,
        epsilon=epsilon,
        noise_multiplier=_searched(epsilon),
    )


def full_batch(num_examples: int, batch_size: int) -> Mechanism:
    """Every batch is all of the data: nothing is random but the noise. Add or remove one."""
    if batch_size != num_examples:
        raise ValueError(
            f"mechanism full_batch needs expected_batch_size = N = {num_examples}, got {batch_size}"
        )
    return poisson(num_examples, num_examples)._replace(
        batches=f"all {num_examples} examples in every step",
        sampling="none: every batch is all of the examples",
        draw=lambda seed, step: np.arange(num_examples),
        capacity=num_examples,
    )


MECHANISMS: dict[str, Callable[[int, int], Mechanism]] = {
    "poisson": poisson,
    "fixed_size": fixed_size,
    "full_batch": full_batch,
}


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
        value_discretization_interval=accounting.FINE,
        pessimistic_estimate=False,
    )
    return float(step.self_compose(num_steps).get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=64)  # most of the time, and the same for any number of steps
def _step_rdp_of_fixed_size(
    noise_multiplier: float, num_examples: int, batch_size: int
) -> RdpAccountant:
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier / 2)
    step = dp_accounting.SampledWithoutReplacementDpEvent(num_examples, batch_size, gaussian)
    with accounting.without_order_warnings():
        return RdpAccountant(WHOLE_ORDERS, NeighboringRelation.REPLACE_ONE).compose(step)


def _searched(epsilon_of: Callable[..., float]) -> Callable[..., float]:
    """σ for an ε by bisection of `epsilon_of`, to a relative 1e-5 and never above the target."""

    def noise_multiplier(
        *, target_epsilon: float, num_steps: int, delta: float, accountant: str
    ) -> float:
        accounting.check_target(target_epsilon)
        of_sigma = functools.partial(
            epsilon_of, num_steps=num_steps, delta=delta, accountant=accountant
        )
        return accounting.least_noise(
            lambda sigma: of_sigma(noise_multiplier=sigma), target_epsilon, 1.0, 1e-5
        )

    return noise_multiplier
