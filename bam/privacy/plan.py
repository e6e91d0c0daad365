"""The privacy of a run, decided before it starts: the record that sampler and accountant read."""

import dataclasses
import functools
import math
import typing
import warnings

import numpy as np

from bam.core.sampling import OVERFLOW_PROB, PaddedBatch, pad
from bam.files import JsonMapping, JsonObject
from bam.privacy import accounting, mechanisms, pld
from bam.privacy import selection as selecting
from bam.privacy.accounting import rounded_down, rounded_up
from bam.privacy.mechanisms import ADJACENCIES, Mechanism, PoissonSteps
from bam.privacy.selection import Selection

# Standard deviations of the noise that 32-bit floats hold with room to spare.
LEAST_NOISE_STD, MOST_NOISE_STD = 1e-30, 1e30
SMALLEST_DELTA = 1e-100  # so that shares of it are numbers
OVERFLOW_SHARE = 1e-3  # of δ, see `PrivacyPlan.overflow`
NUMBERS = {int: (int, np.integer), float: (int, float, np.integer, np.floating), bool: (bool,)}
# What versions of dp-accounting and SciPy may differ by in the ε that they compute of one plan.
EPSILON_TOLERANCE = 1e-6


class BudgetExhaustedError(RuntimeError):
    """Raised instead of taking a step that the privacy plan does not cover."""


@dataclasses.dataclass(frozen=True)
class PrivacyPlan:
    """The privacy of a run, fixed before its first step. All fields are public.

    Attributes:
      num_examples: N, the number of training examples, treated as public; of users, where those
        are the unit. If it was given as a constant, the most that there may be.
      expected_batch_size: l.
      sampling_prob: q = l/N.
      num_steps: the most steps the run may begin; ε covers them all.
      noise_multiplier: σ.
      clip_norm: C, which a run's clip is made of; `inf` where there is none.
      epsilon: ε after all T steps, at most the target; `inf` for a non-private run.
      delta: δ.
      accountant: "pld" or "rdp".
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
      num_examples_given: whether N is a public constant, fixed without counting the data.
      sensitivity: S of the clip: the noise on a step's sum has deviation σS; 0: not recorded.
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
    spare_steps: int = 0
    mechanism_name: str = "poisson"
    selection: Selection | None = None
    mechanism_options: JsonMapping = dataclasses.field(default_factory=dict)
    unit: str = "example"
    group_size: int = 0
    overflow: float = 0.0
    num_examples_given: bool = False
    sensitivity: float = 0.0

    def __post_init__(self) -> None:
        """ValueError for what is not of its type or below 0, or noise that floats cannot hold."""
        for name, kind in typing.get_type_hints(type(self)).items():
            value, kinds = getattr(self, name), NUMBERS.get(kind, ())
            of_kind = isinstance(value, kinds) and isinstance(value, bool) == (kind is bool)
            most = math.inf if isinstance(value, float) else 2**31 - 2
            if kinds and not (of_kind and 0 <= value <= most):
                raise ValueError(f"{name} must be of {kind}, got {value!r}")
        if self.private and self.noise_multiplier > accounting.LARGEST_NOISE:
            raise ValueError(f"noise_multiplier must be at most 1e6, got {self.noise_multiplier}")
        std = self.noise_multiplier * (self.sensitivity or self.clip_norm)  # on a sum
        least = std / max(1, self.expected_batch_size)  # on the mean
        if self.private and std > 0 and not LEAST_NOISE_STD <= least <= std <= MOST_NOISE_STD:
            raise ValueError(
                f"clip_norm {self.clip_norm} would need noise of {least:.1g}, which 32-bit floats "
                "cannot hold; choose one nearer to 1"
            )

    @classmethod
    def from_json(cls, record: JsonMapping) -> "PrivacyPlan":
        """The plan that a `plan.json` holds, of an earlier version too; see `to_json`.

        Records may be a stranger's, so code that they name is not run: ValueError for a mechanism
        of one's own, and for whatever `make_plan` would not have made.
        """
        name = record.get("mechanism", "poisson")
        if name not in tuple(mechanisms.MECHANISMS):
            raise ValueError(f"the ε of mechanism {name!r}, code of one's own, is unknown here")
        names = {field.name for field in dataclasses.fields(cls)}
        facts = {k: v for k, v in record.items() if k in names} | {"mechanism_name": name}
        if not isinstance(facts.get("mechanism_options", {}), dict):
            raise ValueError(f"mechanism_options are {facts['mechanism_options']!r}, no options")
        try:
            facts |= {k: math.inf for k in ("epsilon", "clip_norm") if record[k] is None}
            if record.get("selection"):
                facts["selection"] = Selection(**record["selection"])
            plan = cls(**facts)
            _check(plan)
            neighbours = mechanisms.adjacency_of({"adjacency": plan.adjacency} | dict(record))
        except (TypeError, KeyError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"this is no record of a plan: {error}") from None
        if neighbours != plan.adjacency:
            raise ValueError(f"the records disagree: {name} batches, neighbours {neighbours!r}")
        prob = plan.expected_batch_size / plan.num_examples
        private = plan.noise_multiplier > 0
        if not math.isclose(plan.sampling_prob, prob, rel_tol=1e-9) or private != plan.private:
            raise ValueError("the records disagree: on q = l/N, or on whether there is noise")
        return plan

    @functools.cached_property
    def mechanism(self) -> Mechanism:
        """The record that the sampler, the accountant and every statement read."""
        num, size = self.num_examples, self.expected_batch_size
        made = mechanisms.make(self.mechanism_name, num, size, self.mechanism_options)
        words = {key: getattr(made, key).format(unit=self.unit) for key in ("batches", "sampling")}
        return dataclasses.replace(made, **words)

    @property
    def adjacency(self) -> str:
        """What neighbouring data sets differ in: a key of `mechanisms.ADJACENCIES`."""
        kept = self.mechanism.adjacency
        return "add_or_remove_one" if self.num_examples_given and kept == "zero_out" else kept

    @functools.cached_property
    def mu(self) -> float | None:
        """μ of Gaussian DP, from above, see `pld.mu`; None where no Poisson steps are known."""
        event = None if self.selection or not self.private else self.dp_event
        if event is None or event.noise_multiplier < accounting.LEAST_PLD_NOISE:
            return None
        with warnings.catch_warnings(action="ignore", category=pld.LooseBoundWarning):
            return pld.mu(*event, up_to=self.epsilon)

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
        steps: JsonObject = {"noise_multiplier": self.noise_multiplier, "num_steps": num_steps}
        steps["delta"] = self.delta - self.overflow
        if self.selection:
            return selecting.epsilon(self.selection, sampling_prob=self.sampling_prob, **steps)
        return self.mechanism.epsilon(accountant=self.accountant, **steps)

    def check_epsilon(self) -> None:
        """Raises ValueError if ε, computed again here, is above the record's by a relative 1e-6."""
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
        fields |= {"mechanism": fields.pop("mechanism_name"), "adjacency": self.adjacency}
        return {k: None if v == math.inf else v for k, v in fields.items()}

    def describe(self) -> str:
        """The plan in a few lines of plain text, for people."""
        if not self.private:
            clipping = "no clipping" if math.isinf(self.clip_norm) else f"clip {self.clip_norm:.4g}"
            return f"NOT PRIVATE: {clipping}, no noise; {self.training_steps} steps"
        epsilon, delta = rounded_up(self.epsilon, ".4g"), rounded_up(self.delta, ".3g")
        sigma = rounded_down(self.noise_multiplier, ".4g")
        spare = f" and {self.spare_steps} spare ones" if self.spare_steps else ""
        at_most = "at most " if self.num_examples_given else ""
        has_norm = self.clip_norm < math.inf
        bound = ("clip norm", self.clip_norm) if has_norm else ("sensitivity", self.sensitivity)
        mu = f"\nGaussian DP: mu = {rounded_up(self.mu, '.4g')}" if self.mu else ""
        best = " for the best of a random number of such runs, {:g} on average"
        best = best.format(self.selection.trials_mean) if self.selection else ""
        return (
            f"({epsilon}, {delta})-DP{best}, {self.accountant} accountant, "
            f"{ADJACENCIES[self.adjacency][0]} of {at_most}{self.num_examples} {self.unit}s\n"
            f"{self.training_steps} steps{spare}, {self.mechanism.batches}\n"
            f"noise multiplier {sigma}, {bound[0]} {bound[1]:.4g}{mu}"
        )


def make_plan(
    *,
    num_examples: int,
    expected_batch_size: int,
    num_steps: int,
    target_epsilon: float,
    delta: float,
    clip_norm: float = math.inf,
    accountant: str = "pld",
    spare_steps: int = 0,
    mechanism: str = "poisson",
    mechanism_options: JsonMapping | None = None,
    selection: Selection | None = None,
    group_size: int = 0,
    num_examples_given: bool = False,
    sensitivity: float | None = None,
) -> PrivacyPlan:
    """Chooses the noise for a target (ε, δ) and fixes everything the guarantee depends on.

    The plan's ε is at most the target. The message of an error names the fix.

    Args are the plan's attributes, but for:
      target_epsilon: ε > 0; `inf` plans a non-private run (σ = 0).
      delta: δ, from 1e-100 to below 1/N.
      clip_norm: C; not needed where the sensitivity is given.
      accountant: "pld" or "rdp". "gdp" is refused: it is no guarantee.
      selection: how the best of several such runs will be chosen, if it will be; "rdp" only.
      group_size: k ≥ 1 where each of the N is a user; 0: each is an example.
      num_examples_given: whether N is a public constant, at least the number of examples and fixed
        without counting them. Then neighbours may differ in that number: add or remove one.
      sensitivity: S of the clip; None: C.

    Raises a ValueError if an argument is out of range.

    Examples:
      >>> plan = make_plan(num_examples=1000, expected_batch_size=100, num_steps=10,
      ...                  target_epsilon=2.0, delta=1e-5, clip_norm=1.0)
      >>> plan.sampling_prob, plan.epsilon_after(5) < plan.epsilon <= 2.0
      (0.1, True)
    """
    if not target_epsilon > 0:
        raise ValueError(f"epsilon must be positive, got {target_epsilon}")
    sensitivity = clip_norm if sensitivity is None else sensitivity
    if not 0 <= spare_steps < max(1, num_steps):
        raise ValueError(f"spare_steps must be from 0 to {num_steps - 1}, got {spare_steps}")
    plan = PrivacyPlan(
        num_examples=num_examples,
        expected_batch_size=expected_batch_size,
        sampling_prob=expected_batch_size / max(1, num_examples),
        num_steps=num_steps,
        noise_multiplier=0.0,
        clip_norm=clip_norm,
        epsilon=target_epsilon,
        delta=delta,
        accountant=accountant,
        spare_steps=spare_steps,
        mechanism_name=mechanism,
        mechanism_options=dict(mechanism_options or {}),
        selection=selection,
        unit="user" if group_size else "example",
        group_size=group_size,
        overflow=OVERFLOW_SHARE * delta,
        num_examples_given=num_examples_given,
        sensitivity=sensitivity if target_epsilon < math.inf else 0.0,
    )
    _check(plan)
    steps: JsonObject = {"num_steps": num_steps, "delta": delta - plan.overflow}
    sigma = 0.0
    if selection:
        sigma = selecting.noise_multiplier(
            selection, target_epsilon=target_epsilon, sampling_prob=plan.sampling_prob, **steps
        )
    elif plan.private:
        sigma = plan.mechanism.noise_multiplier(
            target_epsilon=target_epsilon, accountant=accountant, **steps
        )
    plan = dataclasses.replace(plan, noise_multiplier=sigma)
    return dataclasses.replace(plan, epsilon=plan.epsilon_after(num_steps))


def _check(plan: PrivacyPlan) -> None:
    """ValueError for what no plan can have; the message names the fix."""
    of_users = plan.unit == "user" and plan.group_size > 0
    if not of_users and (plan.unit, plan.group_size) != ("example", 0):
        raise ValueError(
            f"a unit of privacy {plan.unit!r} with a group_size of {plan.group_size} is none"
        )
    if not 1 <= plan.expected_batch_size <= plan.num_examples:
        raise ValueError(
            f"expected_batch_size {plan.expected_batch_size} must be from 1 to the number of "
            f"{'users' if of_users else 'training examples'}, {plan.num_examples}"
        )
    if plan.num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {plan.num_steps}")
    if not SMALLEST_DELTA <= plan.delta < 1 / plan.num_examples or plan.overflow >= plan.delta:
        raise ValueError(
            f"delta {plan.delta} must be positive and below 1/N = {1 / plan.num_examples:.2g}; "
            f"a larger delta would allow publishing "
            f"{'a user' if of_users else 'an example'} outright"
        )
    if plan.accountant not in ("pld", "rdp"):
        if plan.accountant == "gdp":
            raise ValueError("accountant gdp is asymptotic, no guarantee; plan with pld or rdp")
        raise ValueError(f"unknown accountant {plan.accountant!r}; plan with pld or rdp")
    if plan.private and not (0 < (plan.sensitivity or plan.clip_norm) < math.inf):
        raise ValueError(f"clip_norm must be a positive finite number, got {plan.clip_norm}")
    if plan.selection:
        selecting.check(plan.accountant, plan.private, plan.unit, plan.mechanism_name)
