"""The privacy of a run, decided before it starts: the record that sampler and accountant read."""

import dataclasses
import functools
import math

import numpy as np

from bam.core.sampling import OVERFLOW_PROB, PaddedBatch, pad
from bam.files import JsonMapping, JsonObject
from bam.privacy import mechanisms, units
from bam.privacy import selection as selecting
from bam.privacy.accounting import rounded_down, rounded_up
from bam.privacy.mechanisms import ADJACENCIES, Mechanism, PoissonSteps
from bam.privacy.selection import Selection
from bam.privacy.units import UNITS, worded

# Standard deviations of the noise that 32-bit floats hold with room to spare.
LEAST_NOISE_STD, MOST_NOISE_STD = 1e-30, 1e30
SMALLEST_DELTA = 1e-100  # so that shares of it are numbers
OVERFLOW_SHARE = 1e-3  # of δ, see `PrivacyPlan.overflow`
NUMBERS = {str(int): (int, np.integer), str(float): (int, float, np.integer, np.floating)}
# What versions of dp-accounting and SciPy may differ by in the ε that they compute of one plan.
EPSILON_TOLERANCE = 1e-6


class BudgetExhaustedError(RuntimeError):
    """Raised instead of taking a step that the privacy plan does not cover."""


@dataclasses.dataclass(frozen=True)
class PrivacyPlan:
    """The privacy of a run, fixed before its first step. All fields are public.

    Attributes:
      num_examples: N, the number of training examples, treated as public; of users, where those
        are the unit.
      expected_batch_size: l.
      sampling_prob: q = l/N.
      num_steps: the most steps the run may begin; ε covers them all.
      noise_multiplier: σ.
      clip_norm: C, which the clip makes its sensitivity S of.
      epsilon: ε after all T steps, at most the target; `inf` for a non-private run.
      delta: δ.
      accountant: "pld" or "rdp".
      adjacency: what neighbouring data sets differ in: "add_or_remove_one" or "replace_one".
      spare_steps: how many of these steps are a margin for steps that a crash loses.
      mechanism_name: how batches are drawn: "poisson", "banded", "fixed_size", "full_batch" or
        "random_allocation".
      mechanism_options: what else it was given, by name.
      selection: of a run that is a trial, of which only the best is released; ε is then that of
        the whole search.
      unit: what neighbouring data sets differ in one of: an "example", or a "user" with all of
        its examples.
      group_size: k, the most examples used of a user; 0 where examples are the unit.
      overflow: what of δ covers that some draw outgrows the rows it is padded to, `capacity`; see
        `bam.core.sampling.pad`.
    """

    num_examples: int
    expected_batch_size: int
    sampling_prob: float
    num_steps: int
    noise_multiplier: float
    clip_norm: float
    epsilon: float
    delta: float
    accountant: str
    adjacency: str = "add_or_remove_one"
    spare_steps: int = 0
    mechanism_name: str = "poisson"
    selection: Selection | None = None
    mechanism_options: JsonMapping = dataclasses.field(default_factory=dict)
    unit: str = "example"
    group_size: int = 0
    overflow: float = 0.0

    def __post_init__(self) -> None:
        """ValueError for what is no number of its type, or below 0: True is no number of steps."""
        for field in dataclasses.fields(self):
            value, kinds = getattr(self, field.name), NUMBERS.get(str(field.type), ())
            is_number = isinstance(value, kinds) and not isinstance(value, bool)
            most = math.inf if isinstance(value, float) else 2**31 - 2
            if kinds and not (is_number and 0 <= value <= most):
                raise ValueError(f"{field.name} must be of {field.type}, got {value!r}")

    @classmethod
    def from_json(cls, record: JsonMapping) -> "PrivacyPlan":
        """The plan that a `plan.json` holds, of an earlier version too; see `to_json`.

        Records may be a stranger's, so code that they name is not run: ValueError for a mechanism
        of one's own, and for whatever `make_plan` would not have made.
        """
        try:
            return cls._from_json(record)
        except (TypeError, KeyError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"this is no record of a plan: {error}") from None

    @classmethod
    def _from_json(cls, record: JsonMapping) -> "PrivacyPlan":
        name = record.get("mechanism", "poisson")
        if name not in mechanisms.MECHANISMS:
            raise ValueError(f"the ε of mechanism {name!r}, code of one's own, is unknown here")
        names = {field.name for field in dataclasses.fields(cls)}
        facts = {key: value for key, value in record.items() if key in names}
        facts["mechanism_name"] = name
        if not isinstance(facts.get("mechanism_options", {}), dict):
            raise ValueError(f"mechanism_options are {facts['mechanism_options']!r}, no options")
        facts["epsilon"] = math.inf if record["epsilon"] is None else record["epsilon"]
        facts["clip_norm"] = math.inf if record["clip_norm"] is None else record["clip_norm"]
        if record.get("selection"):
            facts["selection"] = Selection(**record["selection"])
        plan = cls(**facts)
        units.check(plan.unit, plan.group_size)
        if plan.mechanism.adjacency != plan.adjacency:
            raise ValueError(f"the records disagree: {name} batches, neighbours {plan.adjacency!r}")
        prob = plan.expected_batch_size / plan.num_examples
        right = 1 <= plan.expected_batch_size <= plan.num_examples and 0 < plan.delta < 1
        right &= 0 <= plan.overflow < plan.delta and plan.spare_steps < plan.num_steps
        if not right or not math.isclose(plan.sampling_prob, prob, rel_tol=1e-9):
            raise ValueError("the records disagree: on q = l/N, on δ or on spare steps")
        if plan.accountant not in ("pld", "rdp"):
            raise ValueError(f"accountant {plan.accountant!r} is no guarantee")
        if plan.selection:
            _check_selection(plan.accountant, plan.epsilon, plan.unit, plan.mechanism_name)
        return plan

    @functools.cached_property
    def mechanism(self) -> Mechanism:
        """The record that the sampler, the accountant and every statement read."""
        num, size = self.num_examples, self.expected_batch_size
        made = mechanisms.make(self.mechanism_name, num, size, self.mechanism_options)
        batches, sampling = (worded(text, self.unit) for text in (made.batches, made.sampling))
        return dataclasses.replace(made, batches=batches, sampling=sampling)

    @property
    def private(self) -> bool:
        """Whether the run has a guarantee: whoever asks that of a run asks its plan."""
        return self.epsilon < math.inf

    @property
    def dp_event(self) -> PoissonSteps | None:
        """Poisson-sampled Gaussians that dominate all T steps; None where none are known."""
        return self.dp_event_after(self.num_steps)

    def dp_event_after(self, num_steps: int) -> PoissonSteps | None:
        """The same of so many of its steps."""
        dp_event = self.mechanism.dp_event
        return None if dp_event is None else dp_event(self.noise_multiplier, num_steps)

    @functools.cached_property
    def capacity(self) -> int:
        """Rows of a padded batch: all runs' draws outgrow them with probability `overflow`."""
        num_draws = self.num_steps * (self.selection.trials_mean if self.selection else 1)
        return self.mechanism.capacity(self.overflow / num_draws or OVERFLOW_PROB)

    def batch(self, seed: int, step: int) -> PaddedBatch:
        """The batch that a seed's run draws in a step, padded; to be kept as secret as the seed."""
        return pad(self.mechanism.draw(seed, step), self.capacity, seed, step)

    @property
    def training_steps(self) -> int:
        """T, the steps that training takes: all but the spare ones."""
        return self.num_steps - self.spare_steps

    def epsilon_after(self, num_steps: int) -> float:
        """ε, at the plan's δ, spent once `num_steps` of its steps are begun, lost ones included.

        It is `inf` for a non-private run. Raises BudgetExhaustedError for more than planned.
        """
        self.check_steps(num_steps)
        if self.noise_multiplier == 0:  # no accountant is asked
            return math.inf if num_steps else 0.0
        if self.selection:
            return selecting.epsilon(
                self.selection,
                noise_multiplier=self.noise_multiplier,
                sampling_prob=self.sampling_prob,
                num_steps=num_steps,
                delta=self.delta - self.overflow,
            )
        return self.mechanism.epsilon(
            accountant=self.accountant,
            noise_multiplier=self.noise_multiplier,
            num_steps=num_steps,
            delta=self.delta - self.overflow,
        )

    def check_epsilon(self) -> None:
        """Raises ValueError if ε, computed again here, is above the recorded one.

        By more than a relative 1e-6, that is. So a plan from a file is held to what it claims.
        """
        epsilon = self.epsilon_after(self.num_steps)
        if not epsilon <= self.epsilon * (1 + EPSILON_TOLERANCE):
            raise ValueError(
                f"epsilon {self.epsilon} is claimed, but its plan gives {epsilon} with the "
                "dp-accounting that is installed here"
            )

    def check_steps(self, num_steps: int) -> None:
        """Raises BudgetExhaustedError for more steps begun than planned, lost ones included."""
        if num_steps > self.num_steps:
            raise BudgetExhaustedError(
                f"the privacy plan covers {self.num_steps} steps; step {num_steps} would spend "
                f"more than epsilon {self.epsilon:.4g}"
            )

    def to_json(self) -> JsonObject:
        """The plan as strict JSON values; an infinite ε is None."""
        fields = dataclasses.asdict(self)
        fields["mechanism"] = fields.pop("mechanism_name")
        return {k: None if v == math.inf else v for k, v in fields.items()}

    def describe(self) -> str:
        """The plan in a few lines of plain text, for people."""
        if not self.private:
            clipping = "no clipping" if math.isinf(self.clip_norm) else f"clip {self.clip_norm:.4g}"
            return f"NOT PRIVATE: {clipping}, no noise; {self.training_steps} steps"
        epsilon, delta = rounded_up(self.epsilon, ".4g"), rounded_up(self.delta, ".3g")
        spare = f" and {self.spare_steps} spare ones" if self.spare_steps else ""
        best = ""
        if self.selection:
            mean = f"{self.selection.trials_mean:g}"
            best = f" for the best of a random number of such runs, {mean} on average"
        return (
            f"({epsilon}, {delta})-DP{best}, {self.accountant} accountant, "
            f"{ADJACENCIES[self.adjacency][0]} of {self.num_examples} {self.unit}s\n"
            f"{self.training_steps} steps{spare}, {self.mechanism.batches}\n"
            f"noise multiplier {rounded_down(self.noise_multiplier, '.4g')}, "
            f"clip norm {self.clip_norm:.4g}"
        )


def make_plan(
    *,
    num_examples: int,
    expected_batch_size: int,
    num_steps: int,
    target_epsilon: float,
    delta: float,
    clip_norm: float,
    accountant: str = "pld",
    spare_steps: int = 0,
    mechanism: str = "poisson",
    mechanism_options: JsonMapping | None = None,
    selection: Selection | None = None,
    group_size: int = 0,
) -> PrivacyPlan:
    """Chooses the noise for a target (ε, δ) and fixes everything the guarantee depends on.

    The plan's ε is at most the target. The message of an error names the fix.

    Args:
      num_examples: N ≥ 1.
      expected_batch_size: l, from 1 to N.
      num_steps: the most steps the run may begin, ≥ 1.
      target_epsilon: ε > 0; `inf` plans a non-private run (σ = 0).
      delta: δ, from 1e-100 to below 1/N.
      clip_norm: C.
      accountant: "pld" or "rdp". "gdp" is refused: it is no guarantee.
      spare_steps: how many of `num_steps` are a margin for steps that a crash loses, see
        `bam.training.ledger`; from 0 to one less.
      mechanism: how batches are drawn, see `bam.privacy.mechanisms.make`.
      mechanism_options: of it, by name.
      selection: how the best of several such runs will be chosen, if it will be; "rdp" only.
      group_size: k ≥ 1 where each of the N is a user with at most k examples, all of which are
        protected together; 0: each is an example.

    Raises a ValueError if an argument is out of range.

    Examples:
      >>> plan = make_plan(num_examples=1000, expected_batch_size=100, num_steps=10,
      ...                  target_epsilon=2.0, delta=1e-5, clip_norm=1.0)
      >>> plan.sampling_prob, plan.epsilon_after(5) < plan.epsilon <= 2.0
      (0.1, True)
    """
    unit = "user" if group_size else "example"
    units.check(unit, group_size)
    if not 1 <= expected_batch_size <= num_examples:
        raise ValueError(
            f"expected_batch_size {expected_batch_size} must be from 1 to the number of "
            f"{UNITS[unit].many}, {num_examples}"
        )
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    if not 0 <= spare_steps < num_steps:
        raise ValueError(f"spare_steps must be from 0 to {num_steps - 1}, got {spare_steps}")
    if not target_epsilon > 0:
        raise ValueError(f"epsilon must be positive, got {target_epsilon}")
    if not SMALLEST_DELTA <= delta < 1 / num_examples:
        raise ValueError(
            f"delta {delta} must be positive and below 1/N = {1 / num_examples:.2g}; "
            f"a larger delta would allow publishing {worded('an example', unit)} outright"
        )
    if target_epsilon < math.inf and not 0 < clip_norm < math.inf:
        raise ValueError(f"clip_norm must be a positive finite number, got {clip_norm}")
    if accountant == "gdp":
        raise ValueError("accountant gdp is asymptotic and no guarantee; plan with pld or rdp")
    if selection:
        _check_selection(accountant, target_epsilon, unit, mechanism)
    options = dict(mechanism_options or {})
    made = mechanisms.make(mechanism, num_examples, expected_batch_size, options)
    sampling_prob = expected_batch_size / num_examples
    overflow = OVERFLOW_SHARE * delta
    steps: JsonObject = {"num_steps": num_steps, "delta": delta - overflow}
    sigma = 0.0
    if selection:
        sigma = selecting.noise_multiplier(
            selection, target_epsilon=target_epsilon, sampling_prob=sampling_prob, **steps
        )
    elif target_epsilon < math.inf:
        sigma = made.noise_multiplier(target_epsilon=target_epsilon, accountant=accountant, **steps)
    if target_epsilon < math.inf:
        noise_std = sigma * clip_norm / expected_batch_size
        if not LEAST_NOISE_STD <= noise_std <= MOST_NOISE_STD:
            raise ValueError(
                f"clip_norm {clip_norm} would need noise of {noise_std:.1g}, which 32-bit floats "
                "cannot hold; choose one nearer to 1"
            )
    plan = PrivacyPlan(
        num_examples=num_examples,
        expected_batch_size=expected_batch_size,
        sampling_prob=sampling_prob,
        num_steps=num_steps,
        noise_multiplier=sigma,
        clip_norm=clip_norm,
        epsilon=math.inf,
        delta=delta,
        accountant=accountant,
        adjacency=made.adjacency,
        spare_steps=spare_steps,
        mechanism_name=mechanism,
        mechanism_options=options,
        selection=selection,
        unit=unit,
        group_size=group_size,
        overflow=overflow,
    )
    return dataclasses.replace(plan, epsilon=plan.epsilon_after(num_steps))


def _check_selection(accountant: str, epsilon: float, unit: str, mechanism: str) -> None:
    """Refuses a choice among runs that nothing here accounts for."""
    if accountant != "rdp" or epsilon == math.inf:
        raise ValueError("a choice among runs is private only if they are, by accountant rdp")
    if unit == "user":
        raise ValueError("a choice among runs is scored by examples: it is not private for users")
    if mechanism not in ("poisson", "full_batch"):
        raise ValueError(f"a choice among runs is accounted for Poisson batches, not {mechanism}")
