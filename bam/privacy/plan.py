"""The privacy of a run, decided before it starts: a record that sampler and accountant both read.

The plan knows no clip: σ is in units of the clip's sensitivity, so neither σ nor ε depends on C.
"""

import dataclasses
import functools
import math
import types
import typing
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64

from bam.core import scalars
from bam.core.sampling import PaddedBatch, pad
from bam.errors import InputError
from bam.files import JsonMapping, JsonObject
from bam.privacy import accounting, mechanisms, pld, user_ids
from bam.privacy.accounting import PoissonSteps, poisson_steps
from bam.privacy.mechanisms import ADJACENCIES, Mechanism
from bam.privacy.rounding import round_down, round_up
from bam.text import plural

SMALLEST_DELTA = 1e-100  # so that a share of it does not underflow
OVERFLOW_SHARE = 1e-3  # share of δ, see `PrivacyPlan.overflow`
READERS = {int: scalars.whole, float: scalars.number, bool: scalars.flag}
# Keys of a plan.json; "mechanism_name" is written as "mechanism".
RECORDED = (
    *("num_examples", "expected_batch_size", "sampling_prob", "num_steps", "noise_multiplier"),
    *("epsilon", "delta", "accountant", "spare_steps", "mechanism_options", "unit"),
    *("group_size", "overflow", "num_examples_given", "adjacency", "mechanism_name"),
)
# Relative difference of ε that versions of dp-accounting and SciPy may compute for one plan.
EPSILON_TOLERANCE = 1e-6


class BudgetExhaustedError(RuntimeError):
    """Raised instead of taking a step that the privacy plan does not cover."""


@dataclasses.dataclass(frozen=True)
class Population:
    """The units of privacy: N examples or N users, and how N is known.

    Attributes:
      num_examples: N, the number of training examples, or of users if they are the unit. N is
        treated as public. If it was given as a constant, it is the largest possible number.
      group_size: k, the largest number of examples used of a user; 0 if examples are the unit.
      num_examples_given: whether N is a public constant, at least the number of examples and fixed
        without counting them. Then neighbours may differ in that number: add or remove one.
    """

    num_examples: int
    group_size: int = 0
    num_examples_given: bool = False

    def __post_init__(self) -> None:
        """Copies the numbers.

        InputError for a number of another type, or one out of range.
        """
        _read_numbers(self)

    def number_users(
        self, groups: np.ndarray | Sequence[object] | None
    ) -> Int64[np.ndarray, " rows"]:
        """Returns the user of each row, see `bam.privacy.user_ids.number_users`.

        InputError unless there are N users, or from 1 to N if N was given.
        """
        if groups is None or not self.group_size:
            raise InputError(
                "groups (the user of each row) and group_size (the most rows of one user) belong "
                "together: pass both"
            )
        numbers = user_ids.number_users(groups)
        num, most = len(np.unique(numbers)), self.num_examples
        if not (1 if self.num_examples_given else most) <= num <= most:
            raise InputError(f"num_examples is {most}, the users in groups are {num}")
        return numbers


@dataclasses.dataclass(frozen=True)
class PrivacyPlan:
    """The privacy of a run, fixed before its first step. All fields are public.

    Attributes:
      population: the N examples or users.
      expected_batch_size: l.
      num_steps: the largest number of steps that the run may begin; ε covers them all.
      noise_multiplier: σ; the fresh noise on a step's sum has at least the deviation σS, with the
        clip's S.
      epsilon: ε after all T steps, at most the target; `inf` for a non-private run.
      delta: δ.
      accountant: "pld" or "rdp".
      mechanism_config: name (a key of `mechanisms.MECHANISMS`) and options of the way to draw
        batches, as in a config's `mechanism` section; a read-only copy.
      spare_steps: number of steps in `num_steps` that only replace steps lost in a crash.
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
        """Copies the arguments.

        InputError for an argument of another type, or one out of range.
        """
        _read_numbers(self)
        named = self.mechanism_config
        if not (isinstance(named, Mapping) and "name" in named):
            raise InputError(f"mechanism must be a name, or a mapping with a name, got {named!r}")
        config = types.MappingProxyType(mechanisms.read_options(self.mechanism_config))
        object.__setattr__(self, "mechanism_config", config)
        if self.private and self.noise_multiplier > accounting.LARGEST_NOISE:
            raise InputError(f"noise_multiplier must be at most 1e6, got {self.noise_multiplier}")
        if not self.spare_steps < max(1, self.num_steps):
            most = self.num_steps - 1
            raise InputError(f"spare_steps must be from 0 to {most}, got {self.spare_steps}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes copies and pickles from the fields alone."""
        fields = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        fields["mechanism_config"] = dict(self.mechanism_config)
        return functools.partial(type(self), **fields), ()

    @classmethod
    def from_json(cls, record: JsonMapping) -> "PrivacyPlan":
        """Returns the plan in a `plan.json`, see `to_json`.

        A record is not trusted, so code that it names is not run. InputError for a user's own
        mechanism, for numbers that are out of range or disagree, and for a record of bam 0.1 or
        0.2. σ is not checked against ε here, see `check_epsilon`.
        """
        # `to_json` writes `mechanism` for `mechanism_name`.
        keys = {key.replace("mechanism_name", "mechanism") for key in RECORDED}
        if missing := sorted(keys - record.keys()):
            raise InputError(
                f"not the record of a plan: {missing[0]} is missing (records of bam 0.1 and 0.2 "
                "are no longer read)"
            )
        if record.get("selection"):
            raise InputError("this is a trial of a private search by an earlier version")
        name, options = record["mechanism"], record["mechanism_options"]
        mechanisms.check_name(name)
        if not isinstance(options, dict):
            raise InputError(f"mechanism_options must be a dict, got {options!r}")
        _check_unit(record["unit"], record["group_size"])
        try:
            fields = _fields_of(cls, record) | {
                "population": Population(**_fields_of(Population, record)),
                "mechanism_config": {**options, "name": name},
            }
            fields |= {"epsilon": math.inf} if record["epsilon"] is None else {}
            plan = cls(**fields)
            _check(plan)
            # Derived numbers are recorded for other readers; here they must agree with the plan.
            derived = plan.to_json()
            agree = all(record[key] == derived[key] for key in ("adjacency", "unit")) and all(
                math.isclose(record[key], derived[key], rel_tol=1e-9)
                for key in ("sampling_prob", "overflow")
            )
        except (TypeError, KeyError, AttributeError, ArithmeticError) as error:
            raise InputError(f"not the record of a plan: {error}") from None
        if not agree or (plan.noise_multiplier > 0) != plan.private:
            raise InputError(
                "the record contradicts itself in its neighbours, unit, q = l/N, overflow or noise"
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
        """k, the largest number of examples used of a user, or 0 if examples are the unit."""
        return self.population.group_size

    @property
    def unit(self) -> str:
        """The unit in which neighbours differ: an "example", or a "user" with all its examples."""
        return "user" if self.group_size else "example"

    @property
    def adjacency(self) -> str:
        """The relation of neighbouring data sets: a key of `mechanisms.ADJACENCIES`."""
        return "add_or_remove_one" if self.num_examples_given else "zero_out"

    @property
    def sampling_prob(self) -> float:
        """The ratio l/N.

        It is the sampling probability q, except with random allocation, where q is 1/b (see
        `mechanism.sampling_prob`).
        """
        return self.expected_batch_size / max(1, self.num_examples)

    @property
    def overflow(self) -> float:
        """The part of δ that covers draws with more rows than `capacity`.

        See `bam.core.sampling.pad`.
        """
        return OVERFLOW_SHARE * self.delta

    @property
    def mechanism_name(self) -> str:
        """The mechanism's name, a key of `mechanisms.MECHANISMS`."""
        return str(self.mechanism_config["name"])

    @property
    def mechanism_options(self) -> JsonObject:
        """The mechanism's options, by name."""
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
        # The mechanism's words have `{unit}` for "example" or "user".
        words = {
            key: getattr(mechanism, key).format(unit=self.unit) for key in ("batches", "sampling")
        }
        return dataclasses.replace(mechanism, **words)

    @functools.cached_property
    def mu(self) -> float | None:
        """μ of Gaussian DP, an upper bound, see `pld.mu`.

        None if no Poisson-sampled Gaussians are known to dominate, if their noise multiplier is
        below 0.1, or without privacy.
        """
        event = self.dp_event if self.private else None
        if event is None or event.noise_multiplier < accounting.LEAST_PLD_NOISE:
            return None
        # The plan has warned of a loose bound already.
        with warnings.catch_warnings(action="ignore", category=pld.LooseBoundWarning):
            return pld.mu(*event, up_to=self.epsilon)

    @property
    def private(self) -> bool:
        """Whether the run has a guarantee."""
        return self.epsilon < math.inf

    @property
    def dp_event(self) -> PoissonSteps | None:
        """Poisson-sampled Gaussians that dominate all T steps, or None if none are known."""
        return self.dp_event_after(self.num_steps)

    def dp_event_after(self, num_steps: int) -> PoissonSteps | None:
        """Returns Poisson-sampled Gaussians that dominate `num_steps` steps.

        None if none are known.
        """
        return poisson_steps(self.mechanism.event(self.noise_multiplier, num_steps))

    @functools.cached_property
    def capacity(self) -> int:
        """The number of rows of a padded batch.

        The probability that a batch of the run has more examples is at most `overflow`.
        """
        # A union bound: each step may overflow with its share of the probability.
        return self.mechanism.capacity(self.overflow / self.num_steps)

    def batch(self, seed: int, step: int) -> PaddedBatch:
        """Returns the padded batch of a seed and a step.

        Keep it as secret as the seed.
        """
        return pad(self.mechanism.draw(seed, step), self.capacity, seed, step)

    @property
    def training_steps(self) -> int:
        """The number of steps of training: T without the spare ones."""
        return self.num_steps - self.spare_steps

    def epsilon_after(self, num_steps: int) -> float:
        """Returns ε at the plan's δ after `num_steps` begun steps, lost ones included.

        It is `inf` for a non-private run. BudgetExhaustedError for more steps than planned.
        """
        self.check_steps(num_steps)
        if self.noise_multiplier == 0:  # without privacy, δ may be one that an accountant refuses
            return math.inf if num_steps else 0.0
        return self.mechanism.epsilon(
            noise_multiplier=self.noise_multiplier,
            num_steps=num_steps,
            delta=self.delta - self.overflow,
            accountant=self.accountant,
        )

    def check_target(self, target: float) -> None:
        """Raises InputError if the plan's ε is above the target."""
        if not self.epsilon <= target:
            raise InputError(f"the plan's epsilon {self.epsilon} is above the target, {target}")

    def check_epsilon(self) -> None:
        """Computes ε again and compares it with the recorded ε.

        InputError if it exceeds the recorded ε by a relative 1e-6.
        """
        epsilon = self.epsilon_after(self.num_steps)
        if not epsilon <= self.epsilon * (1 + EPSILON_TOLERANCE):
            raise InputError(
                f"epsilon {self.epsilon} is claimed, but its plan gives {epsilon} with the "
                "dp-accounting that is installed here"
            )

    def check(self) -> None:
        """Checks the numbers and ε, as for a plan of `make_plan`.

        InputError unless the numbers are in range and ε holds.

        A copy by `dataclasses.replace` may claim an ε that its noise does not give.
        """
        _check(self)
        if (self.noise_multiplier > 0) != self.private:
            raise InputError("the plan contradicts itself: noise is for a finite epsilon, and only")
        if self.private:
            _check_epsilon_once(self)

    def check_steps(self, num_steps: int) -> None:
        """Raises BudgetExhaustedError for more begun steps than planned, lost ones included."""
        if num_steps > self.num_steps:
            raise BudgetExhaustedError(
                f"the privacy plan covers {self.num_steps} steps; step {num_steps} would spend "
                f"more than epsilon {self.epsilon:.4g}"
            )

    def to_json(self) -> JsonObject:
        """Returns the plan and its derived numbers as strict JSON values.

        An infinite ε is None.
        """
        values: JsonObject = {name: getattr(self, name) for name in RECORDED}
        values["mechanism"] = values.pop("mechanism_name")
        return {k: None if v == math.inf else v for k, v in values.items()}

    def describe(self, bound: str = "") -> str:
        """Returns the plan in a few lines of text.

        `bound` describes the clip, which the plan does not know, such as "clip norm 1".
        """
        steps = plural(self.training_steps, "step", "")
        if not self.private:
            return f"NOT PRIVATE: no clipping, no noise; {steps}"
        epsilon, delta = round_up(self.epsilon, ".4g"), round_up(self.delta, ".3g")
        sigma = round_down(self.noise_multiplier, ".4g")
        spare = f" and {plural(self.spare_steps, 'spare one')}" if self.spare_steps else ""
        at_most = "at most " if self.num_examples_given else ""
        bound = bound and f", {bound}"
        mu = f"\nGaussian DP, but for delta: mu = {round_up(self.mu, '.4g')}" if self.mu else ""
        return (
            f"({epsilon}, {delta})-DP, {self.accountant} accountant, "
            f"{ADJACENCIES[self.adjacency][0]} of {at_most}{self.num_examples} {self.unit}s\n"
            f"{steps}{spare}, {self.mechanism.batches}\n"
            f"noise multiplier {sigma}{bound}{mu}"
        )


def make_plan(
    *,
    num_examples: int,
    expected_batch_size: int,
    delta: float,
    num_steps: int | None = None,
    num_epochs: float | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    accountant: str = "pld",
    mechanism: str | JsonMapping = "poisson",
    num_examples_given: bool = False,
    group_size: int = 0,
) -> PrivacyPlan:
    """Chooses the noise for a target ε, or tells the ε of a noise, and fixes what it depends on.

    A plan holds for any clip, because σ is in units of S. To plan spare steps, use
    `dataclasses.replace`: σ and ε stay the same. An error names the remedy.

    Args:
      num_examples: N, public: the number of examples, or of users; with `num_examples_given` the
        largest possible number.
      expected_batch_size: l, from 1 to N; the drawn number varies.
      delta: δ, from 1e-100 to below 1/N.
      num_steps: T, spare steps included.
      num_epochs: passes over the data, on average, in place of `num_steps`; see `steps_in`.
      epsilon: the target, which the plan's ε does not exceed; `inf` plans a run without privacy.
      noise_multiplier: σ, in place of `epsilon`; the plan's ε follows from it.
      accountant: "pld" or "rdp". "gdp" is refused, because it is not a guarantee.
      mechanism: the way to draw batches: a name in `mechanisms.MECHANISMS`, or a mapping with its
        name and options, as a config's section.
      num_examples_given: whether N is a public constant, fixed without counting the data, see
        `Population`.
      group_size: k, public: the largest number of rows used of a user, if N counts users.

    Raises:
      InputError: if an argument is out of range, or not one of each pair is given.

    Examples:
      >>> plan = make_plan(num_examples=1000, expected_batch_size=100, num_steps=10,
      ...                  epsilon=2.0, delta=1e-5)
      >>> plan.sampling_prob, plan.epsilon_after(5) < plan.epsilon <= 2.0
      (0.1, True)
      >>> again = make_plan(num_examples=1000, expected_batch_size=100, num_epochs=1,
      ...                   noise_multiplier=plan.noise_multiplier, delta=1e-5)
      >>> again == plan
      True
    """
    asked = plan_without_epsilon(
        num_examples=num_examples,
        expected_batch_size=expected_batch_size,
        delta=delta,
        num_steps=num_steps,
        num_epochs=num_epochs,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        accountant=accountant,
        mechanism=mechanism,
        num_examples_given=num_examples_given,
        group_size=group_size,
    )
    return with_epsilon(asked)


def plan_without_epsilon(
    *,
    num_examples: int,
    expected_batch_size: int,
    delta: float,
    num_steps: int | None = None,
    num_epochs: float | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    accountant: str = "pld",
    mechanism: str | JsonMapping = "poisson",
    num_examples_given: bool = False,
    group_size: int = 0,
) -> PrivacyPlan:
    """Returns the plan of these arguments of `make_plan`, before σ or ε are computed.

    Its ε is the target, and 0 if σ is given; its σ is 0 unless it is given. Everything is checked
    here, because the search for σ takes seconds.
    """
    if num_steps is not None and num_epochs is not None:
        raise InputError("num_steps and num_epochs both set the length: pass one of them")
    if epsilon is not None and noise_multiplier is not None:
        raise InputError("epsilon and noise_multiplier both set the noise: pass one of them")
    if num_steps is None:
        if num_epochs is None:
            raise InputError("the length is missing: pass num_steps or num_epochs")
        num_steps = steps_in(num_epochs, num_examples, expected_batch_size)
    if noise_multiplier is not None:
        sigma, target = scalars.number("noise_multiplier", noise_multiplier), 0.0
        if not 0 < sigma <= accounting.LARGEST_NOISE:
            raise InputError(
                f"noise_multiplier must be above 0 and at most 1e6, got {sigma}: without privacy, "
                "pass epsilon=inf"
            )
    elif epsilon is None:
        raise InputError("the noise is missing: pass epsilon or noise_multiplier")
    else:
        sigma, target = 0.0, scalars.number("epsilon", epsilon)
        if not target > 0:
            raise InputError(f"epsilon must be positive, got {target}")
    plan = PrivacyPlan(
        population=Population(num_examples, group_size, num_examples_given),
        expected_batch_size=expected_batch_size,
        num_steps=num_steps,
        noise_multiplier=sigma,
        epsilon=target,
        delta=delta,
        accountant=accountant,
        mechanism_config={"name": mechanism} if isinstance(mechanism, str) else mechanism,
    )
    _check(plan)
    return plan


def with_epsilon(asked: PrivacyPlan) -> PrivacyPlan:
    """Returns a plan of `plan_without_epsilon` with its σ and its ε.

    InputError if σ gives no finite ε.
    """
    plan = asked
    if plan.private and not plan.noise_multiplier:
        sigma = plan.mechanism.noise_multiplier(
            target_epsilon=plan.epsilon,
            num_steps=plan.num_steps,
            # The rest of δ covers draws that exceed `capacity`.
            delta=plan.delta - plan.overflow,
            accountant=plan.accountant,
        )
        plan = dataclasses.replace(plan, noise_multiplier=sigma)
    epsilon = plan.epsilon_after(plan.num_steps)
    if plan.private and not epsilon < math.inf:
        raise InputError(
            f"noise_multiplier {plan.noise_multiplier} gives no finite epsilon: raise it"
        )
    return dataclasses.replace(plan, epsilon=epsilon)


def steps_in(num_epochs: float, num_examples: int, expected_batch_size: int) -> int:
    """Returns the steps of a number of epochs, num_epochs · ⌊N/l⌋ to the nearest, at least 1.

    An epoch has ⌊N/l⌋ steps, because q = l/N.
    """
    epochs = scalars.number("num_epochs", num_epochs)
    size = scalars.count("expected_batch_size", expected_batch_size)
    if not 0 < epochs < math.inf:
        raise InputError(f"num_epochs must be positive and finite, got {num_epochs}")
    return max(1, round(epochs * (scalars.count("num_examples", num_examples) // max(1, size))))


@functools.lru_cache(maxsize=32)  # of one plan for each seed
def _check_epsilon_once(plan: PrivacyPlan) -> None:
    plan.check_epsilon()


def _check_unit(unit: object, group_size: object) -> None:
    """Raises InputError unless the unit is "user" with k above 0, or "example" with k = 0."""
    is_user = unit == "user" and type(group_size) is int and group_size > 0
    if not is_user and (unit, group_size) != ("example", 0):
        raise InputError(
            f'unit {unit!r} with group_size {group_size!r} is invalid: "example" needs 0, and '
            '"user" at least 1'
        )


def _check(plan: PrivacyPlan) -> None:
    """Checks the numbers of a plan.

    InputError if one is out of range, and the message names the remedy.
    """
    if plan.expected_batch_size < 1:
        raise InputError(f"expected_batch_size must be at least 1, got {plan.expected_batch_size}")
    if plan.expected_batch_size > plan.num_examples:
        raise InputError(
            f"expected_batch_size {plan.expected_batch_size} exceeds the {plan.num_examples} "
            f"{'users' if plan.unit == 'user' else 'training examples'}: set it lower, in a config "
            "by --config.expected_batch_size"
        )
    if plan.num_steps < 1:
        raise InputError(f"num_steps must be at least 1, got {plan.num_steps}")
    if not SMALLEST_DELTA <= plan.delta < 1 / plan.num_examples or plan.overflow >= plan.delta:
        raise InputError(
            f"delta {plan.delta} must be at least {SMALLEST_DELTA} and below 1/N = "
            f"{1 / plan.num_examples:.2g}; a larger delta would allow publishing "
            f"{'a user' if plan.unit == 'user' else 'an example'} outright"
        )
    # The central limit can understate ε.
    if plan.accountant == "gdp":
        raise InputError("accountant gdp is asymptotic and guarantees no epsilon: use pld or rdp")
    if plan.accountant not in accounting.ACCOUNTANTS:
        raise InputError(f"unknown accountant {plan.accountant!r}; plan with pld or rdp")
    # Options that the mechanism cannot have are refused when it is made.
    plan.mechanism.check(plan.unit, plan.accountant, plan.private)


def _read_numbers(record: PrivacyPlan | Population) -> None:
    """Converts the numbers of a record to plain Python numbers.

    InputError for a number of another type, or one out of range.
    """
    for name, kind in typing.get_type_hints(type(record)).items():
        if kind not in READERS:
            continue
        value = READERS[kind](name, getattr(record, name))
        most = math.inf if isinstance(value, float) else 2**31 - 2
        if not 0 <= value <= most:
            raise InputError(
                f"{name} must be of type {kind.__name__} and from 0 to {most}, got {value!r}"
            )
        object.__setattr__(record, name, value)


def _fields_of(cls: type[PrivacyPlan] | type[Population], record: JsonMapping) -> JsonObject:
    """Returns the entries of a record that are fields of the class."""
    return {x.name: record[x.name] for x in dataclasses.fields(cls) if x.name in record}
