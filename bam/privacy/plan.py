"""The privacy of a run, decided before it starts: the record that sampler and accountant read.

It knows no clip: σ is in units of the clip's sensitivity, so neither σ nor ε depends on C.
"""

import dataclasses
import functools
import math
import types
import typing
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64

from bam.core import scalars
from bam.core.sampling import PaddedBatch, pad
from bam.core.user_table import with_id
from bam.errors import InputError
from bam.files import JsonMapping, JsonObject
from bam.privacy import accounting, mechanisms, pld
from bam.privacy.accounting import PoissonSteps, poisson_steps
from bam.privacy.mechanisms import ADJACENCIES, Mechanism
from bam.privacy.rounding import rounded_down, rounded_up

SMALLEST_DELTA = 1e-100  # so that shares of it are numbers
OVERFLOW_SHARE = 1e-3  # of δ, see `PrivacyPlan.overflow`
READERS = {int: scalars.whole, float: scalars.number, bool: scalars.flag}
# What a plan.json has, beside the mechanism's name.
RECORDED = (
    *("num_examples", "expected_batch_size", "sampling_prob", "num_steps", "noise_multiplier"),
    *("epsilon", "delta", "accountant", "spare_steps", "mechanism_options", "unit"),
    *("group_size", "overflow", "num_examples_given", "adjacency", "mechanism_name"),
)
# What versions of dp-accounting and SciPy may differ by in the ε that they compute of one plan.
EPSILON_TOLERANCE = 1e-6


class BudgetExhaustedError(RuntimeError):
    """Raised instead of taking a step that the privacy plan does not cover."""


@dataclasses.dataclass(frozen=True)
class Population:
    """What is protected one by one: N of what, and how N is known.

    Attributes:
      num_examples: N, the number of training examples, treated as public; of users, where those
        are the unit. If it was given as a constant, the most that there may be.
      group_size: k, the most examples used of a user; 0 where examples are the unit.
      num_examples_given: whether N is a public constant, at least the number of examples and fixed
        without counting them. Then neighbours may differ in that number: add or remove one.
    """

    num_examples: int
    group_size: int = 0
    num_examples_given: bool = False

    def __post_init__(self) -> None:
        """Copies the numbers; InputError for what is not of its type or below 0."""
        _read_numbers(self)

    def numbered(self, groups: np.ndarray | Sequence[object] | None) -> Int64[np.ndarray, " rows"]:
        """The user of each row, as numbers in the order of ids; InputError if there are not N."""
        if groups is None or not self.group_size:
            raise InputError(
                "groups, the user of each row, and group_size, the most rows used of each"
            )
        ids = with_id(groups)
        if ids.ndim != 1 or ids.dtype.kind not in "iuUS":
            raise InputError(f"groups must be [rows] integers or texts, got {ids.dtype}{ids.shape}")
        different, numbers = np.unique(ids, return_inverse=True)
        num, most = len(different), self.num_examples
        if not (1 if self.num_examples_given else most) <= num <= most:
            raise InputError(f"num_examples is {most}, the users in groups are {num}")
        return numbers


@dataclasses.dataclass(frozen=True)
class PrivacyPlan:
    """The privacy of a run, fixed before its first step. All fields are public.

    Attributes:
      population: the N examples or users.
      expected_batch_size: l.
      num_steps: the most steps the run may begin; ε covers them all.
      noise_multiplier: σ; the noise on a step's sum has deviation σS, where S is the clip's.
      epsilon: ε after all T steps, at most the target; `inf` for a non-private run.
      delta: δ.
      accountant: "pld" or "rdp".
      mechanism_config: how batches are drawn: its name in `mechanisms.MECHANISMS`, with its
        options, as in a config's `mechanism` section; a copy that cannot be written to.
      spare_steps: how many of the steps are a margin for steps that a crash loses.
    """

    population: Population
    expected_batch_size: int
    num_steps: int
    noise_multiplier: float
    epsilon: float
    delta: float
    accountant: str
    mechanism_config: JsonMapping = dataclasses.field(hash=False)
    spare_steps: int = 0

    def __post_init__(self) -> None:
        """Copies what it is given; InputError for what is not of its type or below 0."""
        _read_numbers(self)
        config = types.MappingProxyType(mechanisms.read_options(self.mechanism_config))
        object.__setattr__(self, "mechanism_config", config)
        if self.private and self.noise_multiplier > accounting.LARGEST_NOISE:
            raise InputError(f"noise_multiplier must be at most 1e6, got {self.noise_multiplier}")
        if not self.spare_steps < max(1, self.num_steps):
            most = self.num_steps - 1
            raise InputError(f"spare_steps must be from 0 to {most}, got {self.spare_steps}")

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or what a pickle has, is made anew of the fields: nothing else is kept."""
        fields = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        fields["mechanism_config"] = dict(self.mechanism_config)
        return functools.partial(type(self), **fields), ()

    @classmethod
    def from_json(cls, record: JsonMapping) -> "PrivacyPlan":
        """The plan that a `plan.json` holds, see `to_json`.

        Records may be a stranger's, so code that they name is not run: InputError for a mechanism
        of one's own, for whatever `make_plan` would not have made, and for a record of bam 0.1 or
        0.2.
        """
        keys = {key.replace("mechanism_name", "mechanism") for key in RECORDED}
        if missing := sorted(keys - record.keys()):
            raise InputError(
                f"this is no record of a plan: it has no {missing[0]}; records of bam 0.1 and 0.2 "
                "are not read any more"
            )
        if record.get("selection"):
            raise InputError("this is a trial of a private search by an earlier version")
        name, options = record["mechanism"], record["mechanism_options"]
        mechanisms.check_name(name)
        if not isinstance(options, dict):
            raise InputError(f"mechanism_options are {options!r}, no options")
        _check_unit(record["unit"], record["group_size"])
        try:
            facts = _fields_of(cls, record) | {
                "population": Population(**_fields_of(Population, record)),
                "mechanism_config": {**options, "name": name},
            }
            facts |= {"epsilon": math.inf} if record["epsilon"] is None else {}
            plan = cls(**facts)
            _check(plan)
            derived = plan.to_json()
            agree = all(record[key] == derived[key] for key in ("adjacency", "unit")) and all(
                math.isclose(record[key], derived[key], rel_tol=1e-9)
                for key in ("sampling_prob", "overflow")
            )
        except (TypeError, KeyError, AttributeError, ArithmeticError) as error:
            raise InputError(f"this is no record of a plan: {error}") from None
        if not agree or (plan.noise_multiplier > 0) != plan.private:
            raise InputError(
                "the records disagree: on neighbours, q = l/N, or whether there is noise"
            )
        return plan

    @property
    def num_examples(self) -> int:
        """N."""
        return self.population.num_examples

    @property
    def num_examples_given(self) -> bool:
        """Whether N is a public constant, fixed without counting the data."""
        return self.population.num_examples_given

    @property
    def group_size(self) -> int:
        """k, the most examples used of a user; 0 where examples are the unit."""
        return self.population.group_size

    @property
    def unit(self) -> str:
        """What neighbours differ in one of: an "example", or a "user" with all of its examples."""
        return "user" if self.group_size else "example"

    @property
    def adjacency(self) -> str:
        """What neighbouring data sets differ in: a key of `mechanisms.ADJACENCIES`."""
        return "add_or_remove_one" if self.num_examples_given else "zero_out"

    @property
    def sampling_prob(self) -> float:
        """The sampling probability, q = l/N."""
        return self.expected_batch_size / max(1, self.num_examples)

    @property
    def overflow(self) -> float:
        """What of δ covers that some draw outgrows the rows it is padded to, `capacity`.

        See `bam.core.sampling.pad`.
        """
        return OVERFLOW_SHARE * self.delta

    @property
    def mechanism_name(self) -> str:
        """The mechanism's name, a key of `mechanisms.MECHANISMS`."""
        return str(self.mechanism_config["name"])

    @property
    def mechanism_options(self) -> JsonObject:
        """What else the mechanism was given, by name."""
        return {k: v for k, v in self.mechanism_config.items() if k != "name"}

    @functools.cached_property
    def mechanism(self) -> Mechanism:
        """The record that the sampler, the accountant and every statement read."""
        mechanism = mechanisms.make(
            self.mechanism_name,
            self.num_examples,
            self.expected_batch_size,
            self.mechanism_options,
        )
        words = {
            key: getattr(mechanism, key).format(unit=self.unit) for key in ("batches", "sampling")
        }
        return dataclasses.replace(mechanism, **words)

    @functools.cached_property
    def mu(self) -> float | None:
        """μ of Gaussian DP, from above, see `pld.mu`; None where no Poisson steps are known."""
        event = self.dp_event if self.private else None
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
        return poisson_steps(self.mechanism.event(self.noise_multiplier, num_steps))

    @functools.cached_property
    def capacity(self) -> int:
        """Rows of a padded batch: all runs' draws outgrow them with probability `overflow`."""
        return self.mechanism.capacity(self.overflow / self.num_steps)

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
        return self.mechanism.epsilon(
            noise_multiplier=self.noise_multiplier,
            num_steps=num_steps,
            delta=self.delta - self.overflow,
            accountant=self.accountant,
        )

    def check_target(self, target: float) -> None:
        """Raises InputError for an ε above the one that is asked for."""
        if not self.epsilon <= target:
            raise InputError(f"the plan's epsilon {self.epsilon} is above the target, {target}")

    def check_epsilon(self) -> None:
        """Raises InputError if ε, computed again here, is above the record's by a relative 1e-6."""
        epsilon = self.epsilon_after(self.num_steps)
        if not epsilon <= self.epsilon * (1 + EPSILON_TOLERANCE):
            raise InputError(
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
        """The plan, with what follows from it, as strict JSON values; an infinite ε is None."""
        values: JsonObject = {name: getattr(self, name) for name in RECORDED}
        values["mechanism"] = values.pop("mechanism_name")
        return {k: None if v == math.inf else v for k, v in values.items()}

    def describe(self, bound: str = "") -> str:
        """The plan in a few lines of plain text, for people.

        `bound` is the clip's, which the plan does not know, in words such as "clip norm 1".
        """
        if not self.private:
            return f"NOT PRIVATE: no clipping, no noise; {self.training_steps} steps"
        epsilon, delta = rounded_up(self.epsilon, ".4g"), rounded_up(self.delta, ".3g")
        sigma = rounded_down(self.noise_multiplier, ".4g")
        spare = f" and {self.spare_steps} spare ones" if self.spare_steps else ""
        at_most = "at most " if self.num_examples_given else ""
        bound = bound and f", {bound}"
        mu = f"\nGaussian DP, but for delta: mu = {rounded_up(self.mu, '.4g')}" if self.mu else ""
        return (
            f"({epsilon}, {delta})-DP, {self.accountant} accountant, "
            f"{ADJACENCIES[self.adjacency][0]} of {at_most}{self.num_examples} {self.unit}s\n"
            f"{self.training_steps} steps{spare}, {self.mechanism.batches}\n"
            f"noise multiplier {sigma}{bound}{mu}"
        )


def make_plan(
    *,
    num_examples: int | Population,
    expected_batch_size: int,
    num_steps: int,
    target_epsilon: float,
    delta: float,
    accountant: str = "pld",
    mechanism: str | JsonMapping = "poisson",
) -> PrivacyPlan:
    """Chooses the noise for a target (ε, δ) and fixes everything the guarantee depends on.

    The plan's ε is at most the target. It is that of any clip: σ is in units of S.
    `dataclasses.replace` gives the plan with spare steps, whose σ and ε are the same. The message
    of an error names the fix.

    Args:
      num_examples: N; a `Population` if it counts users, or is a constant that was given.
      expected_batch_size: l.
      num_steps: T, of which some may be spare.
      target_epsilon: ε > 0; `inf` plans a non-private run (σ = 0).
      delta: δ, from 1e-100 to below 1/N.
      accountant: "pld" or "rdp". "gdp" is refused: it is no guarantee.
      mechanism: how batches are drawn: a name in `mechanisms.MECHANISMS`, or a config's section of
        its name and options.

    Raises an InputError if an argument is out of range.

    Examples:
      >>> plan = make_plan(num_examples=1000, expected_batch_size=100, num_steps=10,
      ...                  target_epsilon=2.0, delta=1e-5)
      >>> plan.sampling_prob, plan.epsilon_after(5) < plan.epsilon <= 2.0
      (0.1, True)
    """
    target_epsilon = scalars.number("epsilon", target_epsilon)
    if not target_epsilon > 0:
        raise InputError(f"epsilon must be positive, got {target_epsilon}")
    if not isinstance(num_examples, Population):
        num_examples = Population(num_examples)
    plan = PrivacyPlan(
        population=num_examples,
        expected_batch_size=expected_batch_size,
        num_steps=num_steps,
        noise_multiplier=0.0,
        epsilon=target_epsilon,
        delta=delta,
        accountant=accountant,
        mechanism_config={"name": mechanism} if isinstance(mechanism, str) else mechanism,
    )
    _check(plan)
    num_steps = plan.num_steps
    if plan.private:
        sigma = plan.mechanism.noise_multiplier(
            target_epsilon=target_epsilon,
            num_steps=num_steps,
            delta=plan.delta - plan.overflow,
            accountant=accountant,
        )
        plan = dataclasses.replace(plan, noise_multiplier=sigma)
    return dataclasses.replace(plan, epsilon=plan.epsilon_after(num_steps))


def joint_epsilon(plans: Sequence[PrivacyPlan], delta: float) -> float:
    """ε of the runs of several plans together, on the same data, at a given δ: by PLD, from above.

    The privacy losses of all planned steps are composed; that is at most the sum of the plans' ε,
    at a δ that need not be the sum of theirs. Each run needs batches and noise of its own: no seed,
    or a seed that no other has, which no plan says.

    Raises an InputError if there is no plan, one is not private, its ε is known by no
    Poisson-sampled Gaussians (random allocation, a private search), plans protect different units
    or have other neighbours, or δ is not above what their draws may overflow with and below 1/N.

    Examples:
      >>> plan = make_plan(num_examples=1000, expected_batch_size=100, num_steps=10,
      ...                  target_epsilon=2.0, delta=1e-5)
      >>> 2.0 < joint_epsilon([plan, plan], delta=1e-5) < 3.0
      True
    """
    delta, steps = scalars.real("delta", delta), []
    if not plans:
        raise InputError("epsilon of several plans together needs one at least")
    for plan in plans:
        if not plan.private:
            raise InputError("a run without privacy has no epsilon, and none together with others")
        if (event := plan.dp_event) is None:
            raise InputError(
                f"the privacy loss of mechanism {plan.mechanism_name} is not composed with others: "
                "add up the epsilons, and the deltas"
            )
        steps.append(event)
    for what in ("unit", "adjacency"):
        if len(different := {getattr(plan, what): None for plan in plans}) > 1:
            raise InputError(
                f"these plans do not protect the same: their {what} is {' and '.join(different)}"
            )
    overflow = sum(plan.overflow for plan in plans)
    most = 1 / max(plan.num_examples for plan in plans)
    if not overflow < delta < most:
        raise InputError(
            f"delta must be above {overflow:.3g} and below 1/N = {most:.2g}, got {delta}"
        )
    return accounting.joint_epsilon(steps, delta - overflow)


def check_same(where: object, recorded: JsonMapping, asked: JsonMapping) -> None:
    """Refuses, with an InputError, the record of another run: its ε would not be this run's.

    `asked` has what the record is to say, a plan as `to_json` does.
    """
    for key, value in asked.items():
        if recorded.get(key) != value:
            raise InputError(
                f"{where} is of a run with {key} = {recorded.get(key)!r}, not {value!r}; choose "
                "another folder"
            )


def _check_unit(unit: object, group_size: object) -> None:
    """Refuses, with an InputError, a unit that there is not, or with no such k; 0 of examples."""
    is_user = unit == "user" and type(group_size) is int and group_size > 0
    if not is_user and (unit, group_size) != ("example", 0):
        raise InputError(f"a unit of privacy {unit!r} with a group_size of {group_size!r} is none")


def _check(plan: PrivacyPlan) -> None:
    """InputError for what no plan can have; the message names the fix."""
    if not 1 <= plan.expected_batch_size <= plan.num_examples:
        raise InputError(
            f"expected_batch_size {plan.expected_batch_size} must be from 1 to the number of "
            f"{'users' if plan.unit == 'user' else 'training examples'}, {plan.num_examples}"
        )
    if plan.num_steps < 1:
        raise InputError(f"num_steps must be at least 1, got {plan.num_steps}")
    if not SMALLEST_DELTA <= plan.delta < 1 / plan.num_examples or plan.overflow >= plan.delta:
        raise InputError(
            f"delta {plan.delta} must be positive and below 1/N = {1 / plan.num_examples:.2g}; "
            f"a larger delta would allow publishing "
            f"{'a user' if plan.unit == 'user' else 'an example'} outright"
        )
    if plan.accountant == "gdp":
        raise InputError("accountant gdp is asymptotic, no guarantee; plan with pld or rdp")
    if plan.accountant not in accounting.ACCOUNTANTS:
        raise InputError(f"unknown accountant {plan.accountant!r}; plan with pld or rdp")
    # Options that the mechanism cannot have are refused when it is made.
    plan.mechanism.check(plan.unit, plan.accountant, plan.private)


def _read_numbers(record: PrivacyPlan | Population) -> None:
    """Makes the numbers Python's own; InputError for one that is not of its type or below 0."""
    for name, kind in typing.get_type_hints(type(record)).items():
        if kind not in READERS:
            continue
        value = READERS[kind](name, getattr(record, name))
        most = math.inf if isinstance(value, float) else 2**31 - 2
        if not 0 <= value <= most:
            raise InputError(f"{name} must be of type {kind.__name__} from 0, got {value!r}")
        object.__setattr__(record, name, value)


def _fields_of(cls: type[PrivacyPlan] | type[Population], record: JsonMapping) -> JsonObject:
    """What of a record is a field of the class."""
    return {x.name: record[x.name] for x in dataclasses.fields(cls) if x.name in record}
