"""What a public function keeps is what it was given: numbers that change later change nothing."""

import copy
import dataclasses
import inspect
import math
import pickle
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bam
from bam.core import clipping, noise, private_mean
from bam.part_table import CLIPS, MECHANISMS, METHODS
from bam.privacy import mechanisms, random_allocation, selection
from bam.privacy.plan import Population, PrivacyPlan
from tests.cases import compilations, thoroughly

pytestmark = pytest.mark.usefixtures("without_the_tests_type_checks")

W = {"w": jnp.ones(2), "b": jnp.zeros(1)}
LONG = {"w": jnp.array([300.0, 400.0]), "b": jnp.array([500.0])}
ROWS = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)
KEY, OTHER_KEY = (np.asarray(bam.seeded_key(seed)) for seed in (1, 2))


# What changes after it is given.


def changing_array(value):
    array = np.array(value)
    return array, lambda new: np.copyto(array, new)


def changing_dict(value):
    kept = dict(value)
    return kept, kept.update


def changing_dict_of_arrays(value):
    kept = {name: np.array(x) for name, x in value.items()}
    return kept, lambda new: [np.copyto(kept[name], x) for name, x in new.items()]


def changing_list(value):
    kept = list(value)
    return kept, lambda new: kept.__setitem__(slice(None), new)


def holders(value):
    """All ways to give a value so that it can change later."""
    if isinstance(value, dict):
        is_of_text = any(isinstance(x, str) for x in value.values())
        return [changing_dict, *([] if is_of_text else [changing_dict_of_arrays])]
    if isinstance(value, tuple):
        return [changing_list, changing_array]
    return [changing_array]


# What is made, and how it behaves.


class Case(NamedTuple):
    """A factory, its arguments that keep numbers, each with another value, and the others."""

    make: Callable[..., Any]
    behaviour: Callable[[Any], Any]
    numbers: dict[str, tuple[Any, Any]]
    others: Mapping[str, Any] = {}


def clipped(clip):
    return clip.update(LONG, clip.init(LONG), LONG)[0], clip.sensitivity


def clipped_with_slots(clip):
    return *clipped(clip), jnp.shape(clip.update(LONG, clip.init(LONG), LONG)[0].slots)


def shifted(oracle):
    example = {"image": ROWS[:2]}
    return oracle.ascend(W, LONG), oracle.grad(W, example)


def loss(params, example):
    logits = example["image"] @ jnp.concatenate([params["w"], params["b"]])
    return jnp.mean(jnp.tanh(logits) ** 2) + jnp.sum(params["b"] ** 3) + jnp.sum(params["w"] ** 3)


def drawn(made):
    return made.std, made.step, made.correlated, made.draws_of_device(3)


def privatized(key, **given):
    return bam.privatize(key=key.copy() if key is KEY or key is OTHER_KEY else key, **given)


def program(transform):
    """What `privatize` makes of a few rows, in two steps: its numbers are arguments of it."""
    state = transform.init(ROWS[0])
    first, after = transform.update(ROWS, state, mask=None)
    second, _ = transform.update(ROWS, after, mask=None)
    return [np.asarray(x) for x in jax.tree.leaves((first, second, state))]


def facts_of(plan):
    return plan.to_json(), plan.mechanism.batches, plan.capacity, plan.batch(0, 1)


def draws(mechanism):
    return (
        *(mechanism.batches, mechanism.sampling_prob, mechanism.strategy, mechanism.period),
        *(mechanism.draw(0, 1), mechanism.capacity(1e-6), mechanism.event(1.0, 4)),
    )


def as_it_is(value):
    return value


COUNTS = {"num_examples": (120, 60), "batch_size": (10, 20)}
PLANNED = {
    **{"num_examples": (120, 60), "expected_batch_size": (10, 20), "num_steps": (4, 8)},
    **{"epsilon": (2.0, 3.0), "delta": (1e-3, 1e-4)},
    "mechanism": ({"name": "banded", "bands": 2}, {"name": "banded", "bands": 3}),
}
STEPS = {"sampling_prob": (0.1, 0.2), "num_steps": (4, 8), "delta": (1e-3, 1e-4)}
OWN_CLIP = (lambda params: (), lambda grads, state, params=None: (grads, state))
MASKS = ({"w": True, "b": False}, {"w": False, "b": True})
ASCENT = {"ascent_views": (1, 2), "ascent_mask": MASKS}
GAUSSIAN = {"key": (KEY, OTHER_KEY), "step": (0, 3)}
PUBLIC = {
    "clip_by_l2_norm": Case(bam.clip_by_l2_norm, clipped, {"clip_norm": (1.0, 50.0)}),
    "normalize": Case(bam.normalize, clipped, {"clip_norm": (1.0, 50.0), "gamma": (1.0, 99.0)}),
    "clip_per_layer": Case(bam.clip_per_layer, clipped, {"clip_norm": (1.0, 50.0)}),
    "BoundedTransformation": Case(
        lambda sensitivity: bam.BoundedTransformation(*OWN_CLIP, sensitivity),
        clipped, {"sensitivity": (1.0, 50.0)},
    ),
    "gaussian_noise": Case(
        bam.gaussian_noise, drawn,
        {"noise_multiplier": (1.0, 4.0), **GAUSSIAN}, {"clip": bam.clip_by_l2_norm(1.0)},
    ),
    "GaussianNoise": Case(
        lambda correlated=None, **given: bam.GaussianNoise(correlated=correlated, **given), drawn,
        {"std": (1.0, 4.0), **GAUSSIAN, "correlated": (np.arange(3), np.ones(3, int))},
    ),
    "privatize": Case(
        privatized, program,
        {
            **{"noise_multiplier": (1.0, 4.0), "expected_batch_size": (4.0, 1.0)},
            **{"key": (KEY, OTHER_KEY), "strategy": ((1.0, 0.5), (1.0, 0.25))},
        },
        {"clip": bam.clip_by_l2_norm(1.0)},
    ),
    "dp_sat": Case(bam.dp_sat, shifted, {"radius": (0.1, 2.0)}, {"loss_fn": loss}),
    "bam_sam": Case(
        bam.bam_sam, shifted, {"radius": (0.1, 2.0), "mix": (0.5, 0.9), **ASCENT},
        {"loss_fn": loss},
    ),
    "bam_exact": Case(
        bam.bam_exact, shifted, {"penalty": (0.1, 2.0), **ASCENT}, {"loss_fn": loss}
    ),
    "epsilon": Case(
        bam.epsilon, as_it_is, {**STEPS, "noise_multiplier": (1.0, 2.0)}, {"accountant": "rdp"}
    ),
    "noise_multiplier": Case(
        bam.noise_multiplier, as_it_is,
        {**STEPS, "target_epsilon": (1.0, 2.0)}, {"accountant": "rdp"},
    ),
    "make_plan": Case(
        bam.make_plan, facts_of,
        PLANNED | {"num_examples_given": (False, True)}, {"accountant": "rdp"},
    ),
    "PrivacyPlan": Case(
        PrivacyPlan, facts_of,
        {
            **{"expected_batch_size": (10, 20), "num_steps": (4, 8), "delta": (1e-3, 1e-4)},
            **{"noise_multiplier": (1.0, 2.0), "epsilon": (2.0, 3.0), "spare_steps": (0, 1)},
            "mechanism_config": PLANNED["mechanism"],
        },
        {"population": Population(120), "accountant": "rdp"},
    ),
    "PrivateTraining": Case(
        bam.PrivateTraining, lambda private: facts_of(private.plan),
        {
            **{"num_examples": (120, 60), "expected_batch_size": (10, 20), "num_epochs": (1, 2)},
            **{"epsilon": (2.0, 3.0), "delta": (1e-3, 1e-4), "num_examples_given": (False, True)},
            "mechanism": PLANNED["mechanism"],
        },
        {"clip": bam.clip_by_l2_norm(1.0), "accountant": "rdp"},
    ),
}  # fmt: skip
# The arguments that stand in place of others, and one that has a case of its own.
IN_PLACE = {
    "slack": "clip_norm",
    "num_epochs": "num_steps",
    "num_steps": "num_epochs",
    "noise_multiplier": "epsilon",
}
# Of what is public beside `bam.__all__`, and of the tables of a config.
WITHIN = {
    "make_plan of a noise and epochs": Case(
        bam.make_plan, facts_of,
        {
            **{x: PLANNED[x] for x in ("num_examples", "expected_batch_size", "delta")},
            **{"num_epochs": (0.5, 2.0), "noise_multiplier": (1.0, 2.0)},
        },
        {"accountant": "rdp"},
    ),
    "clip_by_l2_norm with slots": Case(
        bam.clip_by_l2_norm, clipped_with_slots, {"slack": (2, 8)}, {"clip_norm": 50.0}
    ),
    "clip_per_layer of a tree": Case(
        bam.clip_per_layer, clipped, {"clip_norm": ({"w": 1.0, "b": 2.0}, {"w": 50.0, "b": 0.1})}
    ),
    "advance_noise": Case(
        lambda **given: noise.advance_noise(
            noise.init_noise(bam.seeded_key(0), bam.clip_by_l2_norm(1.0), W, (1.0, 0.5)), **given
        )[0],
        drawn,
        {"noise_multiplier": (1.0, 2.0), "sensitivity": (1.0, 2.0)},
        {"strategy": [1.0, 0.5]},
    ),
    "NoisedMean": Case(
        private_mean.NoisedMean, lambda by: (by, hash(by)),
        {
            **{"noise_multiplier": (1.0, 2.0), "expected_batch_size": (4.0, 1.0)},
            "strategy": ((1.0, 0.5), (1.0, 0.25)),
        },
    ),
    "Population": Case(
        Population, lambda kept: (kept, hash(kept)),
        {"num_examples": (9, 8), "group_size": (2, 3), "num_examples_given": (False, True)},
    ),
    "Selection": Case(
        selection.Selection, lambda kept: (kept, hash(kept), kept.gamma),
        {
            **{"trials_mean": (8.0, 9.0), "trials_shape": (1.0, 2.0)},
            "score_noise_multiplier": (9.0, 5.0),
        },
    ),
    "selection.epsilon": Case(
        selection.epsilon, as_it_is, {**STEPS, "noise_multiplier": (1.0, 2.0)},
        {"selection": selection.Selection(8, 1, 10)},
    ),
    "Mechanism": Case(
        lambda **changed: dataclasses.replace(mechanisms.poisson(120, 10), **changed), draws,
        {
            **{"sampling_prob": (0.1, 0.2), "period": (2, 3)},
            "strategy": ((1.0, 0.5), (1.0, 0.25)),
        },
    ),
    "mechanisms.make": Case(
        mechanisms.make, draws, {**COUNTS, "options": ({"bands": 2}, {"bands": 3})},
        {"name": "banded"},
    ),
    "mechanism poisson": Case(mechanisms.poisson, draws, COUNTS),
    "mechanism banded": Case(mechanisms.banded, draws, {**COUNTS, "bands": (2, 3)}),
    "mechanism best_of_trials": Case(
        selection.best_of_trials, lambda made: (draws(made), made.capacity(1e-9)),
        {
            **COUNTS, "trials_mean": (8.0, 90.0), "trials_shape": (1.0, 2.0),
            "score_noise_multiplier": (9.0, 5.0),
        },
    ),
    "mechanism random_allocation": Case(random_allocation.random_allocation, draws, COUNTS),
    "clip l2": Case(lambda: CLIPS["l2"].make(1.0), clipped, {}),
    "clip normalize": Case(
        lambda gamma: CLIPS["normalize"].make(1.0, gamma), clipped, {"gamma": (1.0, 99.0)}
    ),
    "clip per_layer": Case(lambda: CLIPS["per_layer"].make(1.0), clipped, {}),
}  # fmt: skip
CASES = {**PUBLIC, **WITHIN}
PLAN = bam.make_plan(
    num_examples=120, expected_batch_size=10, num_steps=4, epsilon=2.0, delta=1e-3,
    accountant="rdp",
)  # fmt: skip
# Names that keep no number: each with the reason.
KEEP_NONE = {
    "chain": "its bound is its last member's, which cannot change",
    "clipped_sum": "keeps a program, found by its numbers: see below",
    "DrawnBatch": "arrays of one step, which its transform is given at once",
    "dp_sgd": "has no number",
    "Oracle": "two functions",
    "InputError": "an error",
    "sampling": "a module, whose functions return what they draw",
    "secret_key": "has no argument",
    "seeded_key": "returns a key",
    "strategy": "a module, whose functions return what they compute",
}
# Parameters that are no number: functions, arrays that are not kept, text, or other records.
NO_NUMBERS = {
    *("clip", "loss_fn", "init", "update", "finish", "accountant", "selection", "population"),
    *("mechanism", "groups", "mesh", "trainable", "name", "folder", "plan"),
    "seed",  # checked at once: an integer of Python's or NumPy's own
    "group_size",  # that of `Population`
}


def same(a, b):
    leaves, others = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(leaves) == len(others) and all(
        np.array_equal(x, y) if hasattr(x, "shape") else x == y
        for x, y in zip(leaves, others, strict=True)
    )


def check_made_once(case, argument, holder):
    """AssertionError if what is made changes with its argument afterwards."""
    others = {**case.others, **{name: value for name, (value, _) in case.numbers.items()}}
    if "correlated" in others and argument != "correlated":
        del others["correlated"]
    first, second = case.numbers[argument]
    expected, other = (case.behaviour(case.make(**others | {argument: x})) for x in (first, second))
    assert not same(expected, other), f"what is made does not show {argument}"
    given, change = holder(first)
    made = case.make(**others | {argument: given})
    change(second)
    assert same(case.behaviour(made), expected), f"{argument} is read after the call"


WALK = [
    (name, argument, holder)
    for name, case in CASES.items()
    for argument, (value, _) in case.numbers.items()
    for holder in holders(value)
]


@pytest.mark.filterwarnings("ignore:another transform has an equal key")
@pytest.mark.parametrize(
    ("name", "argument", "holder"),
    thoroughly(WALK, *(case for case in WALK if "clip" in case[0])),
    ids=[f"{a}-{b}-{c.__name__}" for a, b, c in WALK],
)
def test_what_is_made_does_not_change_with_what_it_was_made_of(name, argument, holder):
    check_made_once(CASES[name], argument, holder)


def late_clip(clip_norm):
    """The planted fault: the bound is read when the clip is made, C when it is used."""
    return bam.BoundedTransformation(
        lambda params: (),
        lambda grads, state, params=None: (
            jax.tree.map(lambda g: g * jnp.float32(float(clip_norm)), grads),
            state,
        ),
        float(clip_norm),
    )


class LateBounds:
    """The planted fault of trees and sequences: the caller's is kept."""

    def __init__(self, bounds):
        self.bounds = bounds


@pytest.mark.parametrize(
    ("make", "behaviour", "values"),
    [
        (late_clip, clipped, (1.0, 50.0)),
        (LateBounds, lambda late: dict(late.bounds), ({"w": 1.0}, {"w": 50.0})),
        (LateBounds, lambda late: list(late.bounds), ((1.0, 0.5), (1.0, 0.25))),
    ],
    ids=["number", "dict", "list"],
)
def test_the_walk_finds_a_factory_that_keeps_what_the_caller_can_change(make, behaviour, values):
    argument = next(iter(inspect.signature(make).parameters))
    for holder in holders(values[0]):
        with pytest.raises(AssertionError, match="is read after the call"):
            check_made_once(Case(make, behaviour, {argument: values}), argument, holder)


def not_walked(names, cases):
    """Public names, and arguments of them, that the walk says nothing of."""
    for name in names:
        if name not in cases and name not in KEEP_NONE:
            yield name
        elif name in cases:
            arguments = set(inspect.signature(getattr(bam, name)).parameters)
            arguments -= {x for x, other in IN_PLACE.items() if other in cases[name].numbers}
            yield from sorted(
                f"{name}({x})" for x in arguments - set(cases[name].numbers) - NO_NUMBERS
            )


def test_every_public_name_and_argument_is_walked_or_keeps_no_number():
    assert list(not_walked(bam.__all__, PUBLIC)) == []
    assert not set(KEEP_NONE) & set(PUBLIC)
    makers = {row.make for row in METHODS.values()}
    assert makers <= {bam.dp_sgd, *(case.make for case in PUBLIC.values())}
    tables = {f"clip {x}" for x in CLIPS} | {
        f"mechanism {x}" for x in MECHANISMS if x != "full_batch"  # `poisson` again
    }  # fmt: skip
    assert tables <= set(WITHIN)


def test_a_new_public_name_or_argument_that_is_not_walked_is_found():  # the control
    fewer = {**PUBLIC, "normalize": PUBLIC["normalize"]._replace(numbers={"clip_norm": ()})}
    del fewer["bam_sam"]
    assert list(not_walked(bam.__all__, fewer)) == ["bam_sam", "normalize(gamma)"]


# What is no number is refused, in one line.

BAD = {"text": "1.0", "complex": 1j, "bool": True, "a row": np.ones(1), "none": None}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize(
    "make",
    [
        bam.clip_by_l2_norm,
        bam.normalize,
        lambda x: bam.normalize(1.0, x),
        lambda x: bam.clip_per_layer({"w": x} if x is not None else 1j),
        lambda x: bam.BoundedTransformation(*OWN_CLIP, x),
        lambda x: bam.gaussian_noise(bam.clip_by_l2_norm(1.0), x, KEY),
        lambda x: bam.GaussianNoise(KEY, x),
        lambda x: bam.privatize(bam.clip_by_l2_norm(1.0), x, 4, bam.secret_key()),
        lambda x: bam.privatize(bam.clip_by_l2_norm(1.0), 1.0, x, bam.secret_key()),
        lambda x: bam.privatize(bam.clip_by_l2_norm(1.0), 1.0, 4, bam.secret_key(), [1.0, x]),
        lambda x: bam.dp_sat(loss, x),
        lambda x: bam.bam_sam(loss, x),
        lambda x: bam.bam_sam(loss, 0.1, x),
        lambda x: bam.bam_exact(loss, x),
        lambda x: bam.bam_exact(loss, 0.1, ascent_views=x),
        lambda x: bam.epsilon(noise_multiplier=x, sampling_prob=0.1, num_steps=1, delta=1e-5),
        lambda x: mechanisms.banded(100, 10, x),
        lambda x: selection.Selection(8, 1, x),
        Population,
    ],
)
def test_what_is_no_number_is_refused_in_one_line(make, bad):
    with pytest.raises(ValueError, match=r" must be .*got ") as refusal:
        make(bad)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: bam.bam_sam(loss, 0.1, ascent_views=x),
        lambda x: bam.privatize(bam.clip_by_l2_norm(1.0), 1.0, 4, KEY.copy(), (1.0, x)),
        lambda x: mechanisms.banded(100, 10, x),
        lambda x: bam.clipped_sum(
            lambda w, x: x, bam.clip_by_l2_norm(1.0), ROWS[0], ROWS, mask=None, microbatch_size=x
        ),
    ],
)
def test_a_traced_number_is_refused_in_one_line(make):
    with pytest.raises(ValueError, match="must be a number, not a tracer") as refusal:
        jax.eval_shape(make, jnp.float32(1.0))
    assert "\n" not in str(refusal.value)


# A clip that declares a bound of its own.


def test_a_class_that_declares_another_bound_than_it_was_made_with_is_not_proved():
    class Mine(clipping.ClipByL2Norm):
        sensitivity, is_proved = 1.0, True

    bound = clipping.bound_of(Mine(50.0), ())
    assert (bound.sensitivity, bound.is_proved) == (1.0, False)


# A pair that somebody declared a bound of, and may declare another.


class Declared(optax.GradientTransformation):
    """A pair with a bound, as optax makes it and a caller extends it."""


def declared(sensitivity):
    pair = Declared(*OWN_CLIP)
    pair.sensitivity = sensitivity
    return pair


def moved(clip, sigma, microbatch_size=1):
    """How far one row of norm 0.9 S moves a sum with noise of deviation 1."""
    rows = jnp.array([[0.9, 0, 0], [0, 0.9, 0]])

    def total(mask):
        made = bam.gaussian_noise(clip, sigma, bam.seeded_key(3))
        return bam.clipped_sum(
            gradient_given, clip, rows[0], rows,
            mask=jnp.array(mask), noise=made, microbatch_size=microbatch_size,
        )[0]  # fmt: skip

    return float(jnp.linalg.norm(total([True, True]) - total([True, False])))


def gradient_given(w, x):
    return x


def test_a_bound_that_is_declared_anew_never_meets_the_program_of_the_old_one():
    clip = declared(1.0)
    assert moved(clip, 1.0) == pytest.approx(0.9, abs=1e-4)
    clip.sensitivity = 0.25  # σS stays 1
    assert moved(clip, 4.0) == 0  # rows longer than what is declared are dropped
    clip.sensitivity = 1.0
    assert compilations(lambda: moved(clip, 1.0)) == 0


def test_privatize_sums_by_the_bound_that_was_declared_when_it_was_made():
    clip = declared(1.0)
    transform = bam.privatize(clip, 0.5, 1, bam.secret_key())
    clip.sensitivity = 50.0
    rows = jnp.array([[40.0, 0.0, 0.0]])
    mean, _ = transform.update(rows, transform.init(rows[0]), mask=None)
    assert float(jnp.linalg.norm(mean)) < 10  # without the row, which is longer than 1


# NumPy's numbers are numbers.

SIZES = [np.int64(2), np.int32(2), np.array(2), jnp.int32(2), np.float32(2.0), 2, 2.0]
SIGMAS = [np.float32(1.5), np.float64(1.5), np.array(1.5), jnp.float32(1.5), 1.5]


def test_a_sum_is_compiled_once_whatever_library_its_numbers_are_of():
    clip, key = bam.clip_by_l2_norm(1.0), bam.seeded_key(0)

    def total(size=2, sigma=1.5):
        made = bam.gaussian_noise(clip, sigma, key)
        return bam.clipped_sum(
            gradient_given, clip, ROWS[0], ROWS, mask=None, microbatch_size=size, noise=made
        )[0]

    expected = total()
    for size in SIZES:
        total(size)
    for sigma in SIGMAS:
        total(sigma=sigma)
    assert compilations(lambda: [total(size) for size in SIZES]) == 0
    assert compilations(lambda: [total(sigma=sigma) for sigma in SIGMAS]) == 0
    for made in (*map(total, SIZES), *(total(sigma=sigma) for sigma in SIGMAS)):
        assert np.array_equal(made, expected)


# A plan cannot be made another one.


def test_a_plan_cannot_be_written_to_and_copies_of_it_are_equal():
    plan = dataclasses.replace(PLAN, mechanism_config={"name": "banded", "bands": 2})
    with pytest.raises(TypeError):
        plan.mechanism_config["bands"] = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.epsilon = 0.1
    for field in dataclasses.fields(plan):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(plan, field.name, 1)
    options = plan.mechanism_options
    options["bands"] = 3
    assert plan.mechanism_options == {"bands": 2} and plan.mechanism.period == 2
    copies = [f(plan) for f in (copy.copy, copy.deepcopy, dataclasses.replace)]
    copies += [pickle.loads(pickle.dumps(plan)), PrivacyPlan.from_json(plan.to_json())]
    assert all(x == plan and hash(x) == hash(plan) for x in copies)
    other = dataclasses.replace(plan, mechanism_config={"name": "banded", "bands": 3})
    assert other != plan and other.mechanism.period == 3  # not the mechanism that was computed


@pytest.mark.parametrize("bad", [[1.0], {"a": 1}, np.ones(2), len, 1j])
def test_an_option_of_a_mechanism_is_a_number_a_text_or_none(bad):
    with pytest.raises(ValueError, match=r"^mechanism.bands must be "):
        bam.make_plan(
            num_examples=120, expected_batch_size=10, num_steps=4, epsilon=2.0, delta=1e-3,
            mechanism={"name": "banded", "bands": bad},
        )  # fmt: skip


def test_plans_of_numbers_of_numpy_are_those_of_python_s_numbers():
    given = {"num_examples": 120, "expected_batch_size": 10, "num_steps": 4, "delta": 1e-3}
    given |= {"epsilon": 2.0, "accountant": "rdp"}
    plans = [
        bam.make_plan(**{k: kind(x) if k != "accountant" else x for k, x in given.items()})
        for kind in (lambda x: x, np.array, jnp.asarray, lambda x: np.array(x)[()])
    ]
    assert plans[0] == plans[1] == plans[3]
    assert math.isclose(plans[2].epsilon, plans[0].epsilon, rel_tol=1e-4)  # δ of 32 bits
    for plan in plans:
        fields = (getattr(plan, field.name) for field in dataclasses.fields(plan))
        assert all(type(x).__module__ != "numpy" for x in fields)
