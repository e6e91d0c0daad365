"""Mechanisms: ways to draw batches and to correlate noise, each with its ε.

The loop, the plan, the audit and a release's statement read the same record, so none of them can
describe another mechanism than the one that ran. Neighbours are those of `ADJACENCIES`.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
from dp_accounting import DpEvent
from jaxtyping import Int64

from bam import named
from bam.core import sampling, scalars
from bam.core import strategy as strategies
from bam.errors import InputError
from bam.files import JsonMapping, JsonObject
from bam.part_table import MECHANISMS
from bam.privacy import accounting
from bam.privacy.accounting import poisson_event, poisson_steps
from bam.privacy.rounding import round_up

# The relation of neighbouring data sets: in few words, followed by "of N examples", and in full,
# where {unit} is "example" or "user".
# It is `add_or_remove_one` if N was given.
ADJACENCIES = {
    "zero_out": (
        "zero-out: one",
        "one {unit} replaced by nothing, its place left empty (zero-out)",
    ),
    "add_or_remove_one": ("add/remove one", "one {unit} added or removed"),
}
# The random generator, as a release describes it.
BY = "by ChaCha20 with a key of 256 bits"
NOISE = (
    "Gaussian, rounded to integer multiples of a grid on which the bounded gradients lie too, so "
    "that no rounding depends on the data; reaches at least 10 standard deviations; "
    f"random numbers {BY}"
)


class OwnEvent(DpEvent):
    """An event that dominates T steps if no Poisson-sampled Gaussians do, with its own ε."""

    def epsilon(self, delta: float, accountant: str) -> float:
        """Returns an upper bound on ε.

        InputError for an accountant that cannot compute it.
        """
        raise NotImplementedError

    def as_dp_accounting(self) -> DpEvent | None:
        """Returns the event in dp-accounting, for readers without bam, or None if there is none."""
        return None

    def least_noise(self, target_epsilon: float, delta: float, accountant: str) -> float:
        """Returns the smallest σ whose ε is at most the target, with the event's q and T.

        It is found by search.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Mechanism:
    r"""A way to draw batches and to correlate Gaussian noise over steps, with its ε.

    Everything in it is public. σ is the noise multiplier: the fresh noise on a step's sum has at
    least the standard deviation σS, where S is the largest norm of *one* example's bounded
    gradient.

    Attributes:
      sampling_prob: the probability that an example is in the batch of a step, the same for all
        steps.
      batches: the way to draw batches, in few words, with `{unit}` for "example" or "user".
      sampling: the same for readers of a release, with the random generator.
      draw: `(seed, step) -> sorted row numbers` of a step's batch. Each pair has its own random
        stream. The seed is an integer from 0 to 2^256 - 1; keep it secret.
      capacity: `probability -> rows`: a number of rows that a draw exceeds with at most this
        probability, see `bam.core.sampling.pad`.
      event: `(σ, T) -> event` that dominates T steps: Poisson-sampled Gaussians with independent
        noise $\sigma / \|c\|$, where c is the strategy, or an `OwnEvent`.
      strategy: the correlation of noise over steps, see `core/strategy.py`; (1.0,) is independent
        noise. `draw` must not draw an example twice within as many steps as there are numbers.
      check: `(unit, accountant, private)` of a plan -> None; InputError for a plan to which the
        mechanism's ε does not apply, whatever its numbers.
      period: b, if ε is that of ⌈T/b⌉ blocks of b steps, in each of which an example is drawn at
        most once. A run without a seed takes a new seed when it resumes, so the missing steps of
        its block count as begun.
    """

    sampling_prob: float
    batches: str
    sampling: str
    draw: Callable[[int, int], Int64[np.ndarray, " drawn"]]
    capacity: Callable[[float], int]
    event: Callable[[float, int], DpEvent]
    strategy: tuple[float, ...] = strategies.INDEPENDENT
    period: int = 1
    check: Callable[[str, str, bool], None] = lambda unit, accountant, private: None

    def __post_init__(self) -> None:
        """Copies the numbers.

        InputError for one that is not a number.
        """
        read = scalars.real("sampling_prob", self.sampling_prob)
        object.__setattr__(self, "sampling_prob", read)
        object.__setattr__(self, "strategy", strategies.as_numbers(self.strategy))
        object.__setattr__(self, "period", scalars.whole("period", self.period))

    @property
    def noise(self) -> str:
        """The noise as a release describes it."""
        if len(self.strategy) == 1:
            return NOISE
        factors = ", ".join(str(c) for c in self.strategy[1:])
        return (
            f"{NOISE}; a step's is fresh noise less the last {len(self.strategy) - 1} steps' noise "
            f"times {factors}, added up and rounded down to the grid"
        )

    def epsilon(
        self, *, noise_multiplier: float, num_steps: int, delta: float, accountant: str
    ) -> float:
        """Returns an upper bound on ε of T steps.

        InputError for an accountant that cannot compute it.
        """
        noise_multiplier = scalars.real("noise_multiplier", noise_multiplier)
        num_steps = scalars.count("num_steps", num_steps)
        accounting.check_noise_multiplier(noise_multiplier)
        event = self.event(noise_multiplier, num_steps)
        if steps := poisson_steps(event):
            return accounting.epsilon(delta=delta, accountant=accountant, **steps._asdict())
        assert isinstance(event, OwnEvent)
        return event.epsilon(delta, accountant)

    def noise_multiplier(
        self, *, target_epsilon: float, num_steps: int, delta: float, accountant: str
    ) -> float:
        """Returns the smallest σ, by search, whose ε is at most the target."""
        target: JsonObject = {"delta": delta, "accountant": accountant}
        # σ does not matter here: q and T of the event are the same for any.
        event = self.event(1.0, num_steps)
        if steps := poisson_steps(event):
            sigma = accounting.noise_multiplier(
                target_epsilon=target_epsilon,
                sampling_prob=steps.sampling_prob,
                num_steps=steps.num_steps,
                **target,
            )
            length = strategies.norm(self.strategy)
            # The event divides by ‖c‖ again; the factor keeps rounding from giving less than σ.
            return sigma if length == 1 else sigma * length * (1 + 1e-12)
        assert isinstance(event, OwnEvent)
        return event.least_noise(target_epsilon, **target)


def check_name(name: object) -> None:
    """Raises an InputError, in one line, for an unknown name of a mechanism."""
    if name == "fixed_size":
        raise InputError(
            "mechanism fixed_size no longer exists: use poisson, --config.mechanism.name=poisson"
        )
    if name not in tuple(MECHANISMS):  # in an untrusted record a name may be a list
        raise InputError(f"unknown mechanism {name!r}; choose from {', '.join(MECHANISMS)}")


def make(
    name: str, num_examples: int, batch_size: int, options: JsonMapping | None = None
) -> Mechanism:
    """Makes a mechanism of `MECHANISMS` by its name.

    Args:
      name: a key of `MECHANISMS`, as in a config's `mechanism` section.
      num_examples: N, public.
      batch_size: l, the number of examples in a batch, or its expectation if it is random.
      options: the section's other values, passed to the mechanism by name.

    Raises:
      InputError: for an unknown name, or a batch size or options that the mechanism refuses.
    """
    values = read_options(options or {})
    check_name(name)
    row = MECHANISMS[name]
    return named.call(f"mechanism {name}", row.make, num_examples, batch_size, **values)


def read_options(options: JsonMapping) -> JsonObject:
    """Returns a copy of a mechanism's options.

    InputError unless each is a number, a text or None.
    """
    read = {}
    for key, value in options.items():
        plain = (
            value.item() if hasattr(value, "item") and not getattr(value, "shape", ()) else value
        )
        if not (plain is None or isinstance(plain, bool | int | float | str)):
            raise InputError(f"mechanism.{key} must be a number, a text or None, got {value!r}")
        read[str(key)] = plain
    return read


def counts(num_examples: int, batch_size: int) -> tuple[int, int]:
    """Returns N and l as plain Python integers."""
    read = scalars.whole
    return read("num_examples", num_examples), read("expected_batch_size", batch_size)


def poisson(num_examples: int, batch_size: int) -> Mechanism:
    """Each example is in each batch independently with probability q = l/N."""
    num_examples, batch_size = counts(num_examples, batch_size)
    prob = batch_size / num_examples
    return Mechanism(
        sampling_prob=prob,
        batches=f"Poisson sampling with q = {batch_size}/{num_examples} = {round_up(prob, '.4g')}",
        sampling=f"Poisson: each {{unit}} is in each batch independently with probability q, {BY}",
        draw=lambda seed, step: sampling.poisson_sample(seed, step, num_examples, prob),
        capacity=functools.partial(sampling.usual_capacity, num_examples, prob),
        event=lambda sigma, num_steps: poisson_event(sigma, prob, num_steps),
    )


def banded(num_examples: int, batch_size: int, bands: int = 0) -> Mechanism:
    r"""Returns noise correlated over b steps, with batches from b parts of the data in turn.

    Each example is put in one of b parts, once and at random, independently of all others. Step t
    draws from part t mod b, each example of it independently with probability b·q, where q = l/N.
    So no example is drawn twice within b steps, and overall each is in a batch with probability q.
    The noise is $C^{-1} z$ with `strategy.square_root(b)`. T steps are dominated by ⌈T/b⌉
    Poisson-sampled Gaussians with probability b·q and noise multiplier $\sigma / \|c\|$, for any
    accountant.

    Source: Choquette-Choo et al. 2023 (arXiv 2306.08153), Theorem 4. Their parts are given and have
    equal size; here adding an example does not change the parts of the others.
    """
    num_examples, batch_size = counts(num_examples, batch_size)
    bands = scalars.whole("mechanism.bands", bands)
    if not 2 <= bands <= strategies.UNITS:
        raise InputError(
            f"mechanism banded needs mechanism.bands from 2 to {strategies.UNITS}, got {bands}"
        )
    if bands * batch_size > num_examples:
        raise InputError(
            f"mechanism banded draws from 1/{bands} of the {num_examples} examples at a time: "
            f"expected_batch_size must be at most {num_examples // bands}, got {batch_size}"
        )
    strategy = strategies.square_root(bands)
    length, prob = strategies.norm(strategy), batch_size / num_examples
    # Each step sees one of b parts, so q within the part is b times as large.
    part_prob = min(1.0, bands * batch_size / num_examples)
    return Mechanism(
        sampling_prob=prob,
        batches=f"noise correlated over {bands} steps; batches from {bands} parts of the data in "
        f"turn, Poisson sampling with q = {round_up(part_prob, '.4g')} in each",
        sampling=f"each {{unit}} is in one of {bands} parts, drawn once at random and "
        f"independently of others; step t has each {{unit}} of part t mod {bands} independently "
        f"with probability {bands}q, {BY}",
        draw=lambda seed, step: sampling.cyclic_sample(seed, step, num_examples, part_prob, bands),
        # Over the random parts, each example is in a batch with probability q.
        capacity=functools.partial(sampling.usual_capacity, num_examples, prob),
        event=lambda sigma, num_steps: poisson_event(
            sigma / length, part_prob, -(-num_steps // bands)
        ),
        strategy=strategy,
        period=bands,
    )


def full_batch(num_examples: int, batch_size: int) -> Mechanism:
    """Returns batches that are all of the data, where only the noise is random."""
    num_examples, batch_size = counts(num_examples, batch_size)
    if batch_size != num_examples:
        raise InputError(
            f"mechanism full_batch needs expected_batch_size = N = {num_examples}, got {batch_size}"
        )
    return dataclasses.replace(
        poisson(num_examples, num_examples),
        batches=f"all {num_examples} {{unit}}s in every step",
        sampling="none: every batch is all of the {unit}s",
    )
