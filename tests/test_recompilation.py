"""Changing σ, C or a radius compiles nothing again, and the bound follows the number."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.tree_util import Partial

import bam
from bam import part_table
from bam.core import clipping, grid, noise, program, pytree
from bam.models import finetune
from bam.training import loop
from tests.cases import (
    assert_same_bits,
    compilations,
    mesh_of,
    norm64,
    random_images,
    refused,
    thoroughly,
    tiny_digits,
)

pytestmark = pytest.mark.usefixtures("without_the_tests_type_checks")

DATA = random_images("numbers", 60, 12, mean=0.5, std=0.25)
KEY = bam.seeded_key(60)
ROWS = jnp.asarray(3 * np.random.default_rng(60).normal(size=(6, 3)), jnp.float32)
W = jnp.array([0.1, -0.2, 0.3])
P = {"a": W[:2], "b": W[2:]}
TREES = {"a": ROWS[:, :2], "b": ROWS[:, 2:]}


def squared(w, x):
    w, x = (jnp.concatenate(jax.tree.leaves(y)) for y in (w, x))
    return 0.5 * jnp.sum((w - x) ** 2) + jnp.sum(w**3)


def given(w, x):
    return x


def same(a, b):
    return all(
        np.array_equal(x, y, equal_nan=True)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def alone(fn, *args):
    """What `fn` gives where nothing was compiled of other numbers."""
    program._program.cache_clear()
    result = jax.device_get(fn(*args))
    program._program.cache_clear()
    return result


def check_shared(fn, before, after):
    """AssertionError if a number of `before` stays in a program, or it is compiled again."""
    expected = alone(fn, after)
    other = jax.device_get(fn(before))
    results = []
    assert compilations(lambda: results.append(jax.device_get(fn(after)))) == 0, "compiled again"
    assert same(results[0], expected), "a number of the run before is in the program"
    assert not same(results[0], other)


# Runs of configs.

FIRST = {"epsilon": 2.0, "clip_norm": 1.0, "optimizer.learning_rate": 0.1, "ema_decay": 0.5}
SECOND = {"epsilon": 5.0, "clip_norm": 0.3, "optimizer.learning_rate": 0.02, "ema_decay": 0.9}
GAMMA = {"clip.gamma": 0.01}, {"clip.gamma": 2.0}


class Case(NamedTuple):
    """A structure, and the options of its parts in two runs, beside `FIRST` and `SECOND`."""

    method: str
    structure: Mapping[str, Any]
    before: Mapping[str, Any]
    after: Mapping[str, Any]


CASES = {
    "non_private": Case("non_private", {"optimizer.name": "adam"}, {}, {}),
    "dp_sgd": Case(
        "dp_sgd", {"mechanism.name": "full_batch", "expected_batch_size": 60}, {}, {}
    ),
    "dp_sat": Case(
        "dp_sat",
        {
            **{"clip.name": "normalize", "mechanism.name": "banded", "mechanism.bands": 2},
            **{"optimizer.name": "sgd", "optimizer.schedule": "cosine"},
            "optimizer.warmup_steps": 1,
        },
        {"method.radius": 0.1, "optimizer.momentum": 0.5, **GAMMA[0]},
        {"method.radius": 2.0, "optimizer.momentum": 0.9, **GAMMA[1]},
    ),
    "bam_sam": Case(
        "bam_sam", {"clip.name": "per_layer", "optimizer.name": "nadam"},
        {"method.radius": 0.1, "method.mix": 0.5}, {"method.radius": 2.0, "method.mix": 0.9},
    ),
    "bam_sam, ahead": Case(
        "bam_sam",
        {
            **{"mechanism.name": "random_allocation", "accountant": "pld", "num_steps": 5},
            **{"optimizer.name": "sgd", "optimizer.per_clip_norm": True, "method.mix": 1.0},
        },
        {"method.radius": 0.1}, {"method.radius": 2.0},
    ),
    "bam_exact": Case(
        "bam_exact",
        {
            **{"mechanism.name": "best_of_trials", "mechanism.trials_mean": 3.0},
            **{"mechanism.trials_shape": 1.0, "mechanism.score_noise_multiplier": 10.0},
        },
        {"method.penalty": 0.1}, {"method.penalty": 2.0},
    ),
}  # fmt: skip


def trained(case, changes, seed=0):
    """Two steps of a run, from its config to an evaluation."""
    changed = {"epsilon": math.inf} if case.method == "non_private" else {}
    config = tiny_digits(case.method, expected_batch_size=12, microbatch_size=4, delta=1e-3)
    options = {**case.structure, **changes, **changed}
    for section in ("clip", "optimizer", "mechanism"):
        with config[section].unlocked():
            for key in [x for x in options if x.startswith(f"{section}.")]:
                config[section][key.partition(".")[2]] = options[key]
    config.update_from_flattened_dict(options)
    run = loop.build(config, DATA)
    state = run.init(seed)
    for step in (1, 2):
        state = run.step(state, run.batch(state, run.plan.batch(seed, step)))
    params = finetune.merge(state.averaged, state.frozen)
    judged = run.score_images(params, DATA.test.images, DATA.test.labels)
    return jax.device_get((state._replace(augment_key=()), judged))


def test_every_method_clip_mechanism_and_optimizer_has_a_case():
    chosen = lambda key, default: {  # noqa: E731
        case.structure.get(f"{key}.name", default) for case in CASES.values()
    }
    assert {case.method for case in CASES.values()} == set(part_table.METHODS)
    assert chosen("clip", "l2") == set(part_table.CLIPS)
    assert chosen("mechanism", "poisson") == set(part_table.MECHANISMS)
    assert chosen("optimizer", "nadam") == set(part_table.OPTIMIZERS)


@pytest.mark.parametrize("name", thoroughly(CASES, "non_private", "dp_sat"))
def test_a_run_of_other_numbers_compiles_nothing_and_has_none_of_the_run_before(name):
    case = CASES[name]
    check_shared(
        lambda run: trained(case, run[0], run[1]),
        (FIRST | dict(case.before), 0),
        (SECOND | dict(case.after), 7),
    )


PRIVATE_NUMBERS = {
    "sigma": {"epsilon": 5.0}, "clip_norm": {"clip_norm": 0.3}, "gamma": GAMMA[1],
    "radius": {"method.radius": 2.0},
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("changed", PRIVATE_NUMBERS.values(), ids=PRIVATE_NUMBERS)
def test_a_run_of_one_other_number_has_none_of_the_run_before(changed):
    case = CASES["dp_sat"]
    first = FIRST | dict(case.before)
    check_shared(functools.partial(trained, case), first, first | changed)


@pytest.mark.thorough
def test_another_number_of_views_and_a_radius_of_zero_are_other_programs():  # the control
    case = CASES["bam_sam"]
    first = FIRST | dict(case.before)
    trained(case, first)
    assert compilations(lambda: trained(case, first | {"method.radius": 0.0})) > 0
    assert compilations(lambda: trained(case, first | {"augment.views": 2})) > 0


# A loop of one's own.


def looped(run):
    epsilon, clip, oracle, rate, mechanism = run
    options = {"mechanism": {"name": "banded", "bands": 2}} if mechanism else {}
    private = bam.PrivateTraining(
        num_examples=60, expected_batch_size=12, num_epochs=1, epsilon=epsilon, delta=1e-3,
        clip=clip, accountant="rdp", seed=3, **options,
    )  # fmt: skip
    tx = optax.chain(private.gradient(oracle, microbatch_size=4), optax.nadam(rate))
    w, state = W, tx.init(W)
    for _, batch in zip(range(2), private.batches(np.resize(ROWS, (60, 3))), strict=False):
        updates, state = tx.update(batch, state, w)
        w = optax.apply_updates(w, updates)
    return w, state[0].previous


DOUBLE = optax.scale(2.0)


def no_state(params):
    return ()


def own_update(g, state, params=None):
    return jax.tree.map(lambda x: 0.1 * jnp.tanh(x), g), state


SETTINGS: dict[str, Callable[[float], tuple[Any, ...]]] = {
    "l2, dp_sgd": lambda k: (2 * k, bam.clip_by_l2_norm(k), bam.dp_sgd(squared), 0.1 * k, False),
    "normalize, dp_sat": lambda k: (
        2 * k, bam.normalize(k, 0.1 * k), bam.dp_sat(squared, 0.1 * k), 0.1 * k, True,
    ),
    "per_layer, bam_sam": lambda k: (
        2 * k, bam.clip_per_layer(k), bam.bam_sam(squared, 0.1 * k, 0.2 * k), 0.1 * k, False,
    ),
    "chain, bam_sam": lambda k: (
        2 * k, bam.chain(DOUBLE, bam.clip_by_l2_norm(k)), bam.bam_sam(squared, 0.1 * k),
        0.1 * k, False,
    ),
    "own, bam_exact": lambda k: (
        2 * k, bam.BoundedTransformation(no_state, own_update, k), bam.bam_exact(squared, 0.1 * k),
        0.1 * k, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", thoroughly(SETTINGS, "normalize, dp_sat"))
def test_a_private_training_of_other_numbers_compiles_nothing(name):
    check_shared(looped, SETTINGS[name](1.0), SETTINGS[name](1.7))


# Sums and transforms outside of runs.

CLIPS: dict[str, Callable[..., Any]] = {
    "l2": lambda c, gamma=0.1: bam.clip_by_l2_norm(c),
    "l2 with slots": lambda c, gamma=0.1: bam.clip_by_l2_norm(c, slack=2),
    "normalize": bam.normalize,
    "per_layer": lambda c, gamma=0.1: bam.clip_per_layer(c),
    "per_layer of a tree": lambda c, gamma=0.1: bam.clip_per_layer({"a": c, "b": gamma}),
    "chain": lambda c, gamma=0.1: bam.chain(DOUBLE, bam.normalize(c, gamma)),
    "own": lambda c, gamma=0.1: bam.BoundedTransformation(no_state, own_update, c),
}
NUMBERS = {"c": 1.0, "gamma": 0.1, "sigma": 1.0, "size": 4.0, "radius": 0.1, "mix": 0.5}
OTHERS = {"c": 0.3, "gamma": 2.0, "sigma": 4.0, "size": 9.0, "radius": 2.0, "mix": 0.9}


def summed(name, numbers):
    clip = CLIPS[name](numbers["c"], numbers["gamma"])
    noisy = bam.gaussian_noise(clip, numbers["sigma"], KEY, step=1)
    oracle = bam.bam_sam(squared, numbers["radius"], numbers["mix"])
    return bam.clipped_sum(oracle.grad, clip, P, TREES, mask=None, microbatch_size=2, noise=noisy)


def privatized(name, strategy, numbers):
    clip = CLIPS[name](numbers["c"], numbers["gamma"])
    tx = bam.privatize(clip, numbers["sigma"], numbers["size"], np.array(KEY), strategy)
    first, state = tx.update(TREES, tx.init(P), mask=None)
    return first, tx.update(TREES, state, mask=None)[0]


@pytest.mark.parametrize("name", thoroughly(CLIPS, "per_layer", "own"))
def test_sums_and_private_means_of_other_numbers_compile_nothing(name):
    check_shared(functools.partial(summed, name), NUMBERS, OTHERS)
    check_shared(functools.partial(privatized, name, (1.0,)), NUMBERS, OTHERS)


def test_noise_of_another_deviation_compiles_nothing():
    def drawn(sigma):
        noisy = bam.gaussian_noise(bam.clip_by_l2_norm(sigma), sigma, KEY)
        return noisy.draws_of_device(3) * noisy.spacing

    check_shared(drawn, 1.0, 2.0)


@pytest.mark.parametrize("changed", thoroughly(NUMBERS, "c", "sigma"))
def test_one_other_number_alone_is_not_that_of_the_run_before(changed):
    numbers = NUMBERS | {changed: OTHERS[changed]}
    if changed != "size":
        check_shared(functools.partial(summed, "normalize"), NUMBERS, numbers)
    if changed not in ("radius", "mix"):
        banded = functools.partial(privatized, "normalize", (1.0, 0.5))
        check_shared(banded, NUMBERS, numbers)


def test_another_strategy_is_not_that_of_the_transform_before():
    numbers = functools.partial(privatized, "l2", numbers=NUMBERS)
    expected = alone(numbers, (1.0, 0.25))
    numbers((1.0, 0.5))
    assert same(numbers((1.0, 0.25)), expected)
    assert not same(numbers((1.0, 0.5)), expected)  # the control


KEPT: dict[str, float] = {}


def impure_update(g, state, params=None):
    return jax.tree.map(lambda x: KEPT["c"] * jnp.tanh(x), g), state


def test_a_number_that_a_program_keeps_or_that_is_structure_is_found():  # the controls
    def total(c, update):
        KEPT["c"] = c
        clip = bam.BoundedTransformation(no_state, update(c), 2.0)
        return bam.clipped_sum(given, clip, W, ROWS, mask=None)

    kept = functools.partial(total, update=lambda c: impure_update)
    with pytest.raises(AssertionError, match="a number of the run before"):
        check_shared(kept, 1.0, 0.5)
    anew = functools.partial(total, update=lambda c: lambda *args: impure_update(*args))
    with pytest.raises(AssertionError, match="compiled again"):
        check_shared(anew, 1.0, 0.5)


# The bound, of numbers that the compiler does not know.


def to_length(c):
    """A clip of one's own: to a length that may be above C in its last bits, or far above."""

    def update(g, state, params=None):
        norm = clipping.pytree.l2_norm(g)
        factor = jnp.where(norm < 1e3 * c, 1, 1.5)  # beyond, it breaks its promise
        return jax.tree.map(lambda x: (x * (factor * c / norm)).astype(x.dtype), g), state

    return bam.BoundedTransformation(no_state, update, c)


BOUNDS: dict[str, tuple[Callable[[Any], Any], Callable[[float], float]]] = {
    "l2": (bam.clip_by_l2_norm, lambda c: c),
    "l2 with slots": (lambda c: bam.clip_by_l2_norm(c, slack=3), lambda c: c),
    "normalize": (lambda c: bam.normalize(c, 1e-6 * c + 1e-12), lambda c: c),
    "per_layer": (bam.clip_per_layer, lambda c: c),
    "per_layer of a tree": (
        lambda c: bam.clip_per_layer({"b": c, "w": 0.5 * c}), lambda c: math.hypot(c, 0.5 * c)
    ),
    "chain": (lambda c: bam.chain(DOUBLE, bam.clip_by_l2_norm(c)), lambda c: c),
    "own": (to_length, lambda c: c),
}  # fmt: skip


def trials(num):
    """Clip norms, noise multipliers and rows of all magnitudes, of two dtypes."""
    rng = np.random.default_rng(3)
    for _ in range(num):
        c, sigma = (np.float32(10.0 ** rng.uniform(*x)) for x in ((-10, 10), (-2, 2)))
        lengths = [10.0 ** rng.uniform(-30, 18, (4, 1)), c * 10.0 ** rng.uniform(-2, 3, (4, 1))]
        rows = np.concatenate(lengths) * rng.normal(size=(8, 9)) * 10.0 ** rng.uniform(-3, 0, 9)
        rows = np.clip(rows, -1e18, 1e18)
        rows = {"b": jnp.asarray(rows[:, :4], jnp.bfloat16), "w": jnp.asarray(rows[:, 4:])}
        yield c, sigma, jax.tree.map(np.asarray, rows), int(rng.integers(8))


def as_bits(total, spacing, dtype):
    """In place of `grid.to_float`: the integer itself."""
    whole = total.high * 2**grid.LIMB_BITS + total.low
    return jax.lax.bitcast_convert_type(whole, jnp.float32)


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [(name, 1) for name in BOUNDS]
    + [("l2", 8)]
    + [pytest.param(name, 8, marks=pytest.mark.thorough) for name in BOUNDS if name != "l2"],
)
def test_a_row_moves_integers_by_less_than_the_noise_is_for(name, num_devices, monkeypatch):
    monkeypatch.setattr(grid, "to_float", as_bits)
    make, sensitivity = BOUNDS[name]
    mesh = mesh_of(num_devices) if num_devices > 1 else None

    @jax.jit
    def integers(c, sigma, rows, mask, key):
        clip = make(c)
        noisy = bam.gaussian_noise(clip, sigma, key)
        options = {"mask": mask, "microbatch_size": 2, "mesh": mesh, "noise": noisy}
        total, _ = bam.clipped_sum(given, clip, None, rows, **options)
        return total, noisy.std, noisy.spacing

    most = 0.0
    for c, sigma, rows, removed in trials(60):
        masks = np.ones(8, bool), np.arange(8) != removed
        (whole, std, spacing), (without, *_) = (integers(c, sigma, rows, m, KEY) for m in masks)
        whole, without = (
            np.concatenate([np.asarray(x).view(np.int32) for x in jax.tree.leaves(t)])
            for t in (whole, without)
        )
        assert max(np.abs(whole).max(), np.abs(without).max()) < 2**30  # none is NaN
        moved = np.linalg.norm(whole.astype(np.float64) - without)
        planned, bound = float(sigma) * sensitivity(float(c)), sensitivity(float(c)) * (1 + 1e-5)
        assert np.float32(spacing) * np.float32(2**20) == std  # to the bit
        assert float(std) >= planned
        assert moved <= 2**20 / float(sigma)
        assert moved <= bound / float(spacing) * (1 + 3e-7)
        most = max(most, moved * float(sigma) / 2**20)
    assert most > 0.99  # so that a bound that is 1 % smaller would not hold


NUM_ROWS = 10_000


def first_in_two(total, spacing, dtype):
    """In place of `grid.to_float`: both parts of the first entry, of two."""
    return jax.lax.bitcast_convert_type(jnp.stack([total.high[0], total.low[0]]), jnp.float32)


def a_little_longer(g, state, params=None):
    return jax.tree.map(lambda x: x * np.float32(1.0000035), g), state


def check_no_overflow(sigma, microbatch_size):
    """AssertionError unless the sum of many rows as long as may be is exact."""
    clip = bam.BoundedTransformation(no_state, a_little_longer, 1.0)
    noisy = bam.gaussian_noise(clip, sigma, KEY)
    rows = jnp.tile(jnp.array([[1.0, 0.0]]), (NUM_ROWS, 1))
    totals = []
    for mask in (np.ones(NUM_ROWS, bool), np.zeros(NUM_ROWS, bool)):
        options = {"mask": jnp.asarray(mask), "microbatch_size": microbatch_size, "noise": noisy}
        total, _ = bam.clipped_sum(given, clip, W, rows, **options)
        high, low = np.asarray(total).view(np.int32).tolist()
        totals.append(high * 2**grid.LIMB_BITS + low)
    row_units = int(jax.jit(grid.cut)(jnp.float32(1.0000035), noisy.spacing))
    assert row_units >= 2**20 / sigma * (1 - 7e-6) - 1
    assert totals[0] - totals[1] == NUM_ROWS * row_units


SIGMAS = (0.01, 0.0311, 0.26, 1.0, 100.0)


@pytest.mark.parametrize("microbatch_size", thoroughly([1, 16, 137, 2048], 137))
def test_no_rows_overflow_32_bits_for_any_noise(microbatch_size, monkeypatch):
    monkeypatch.setattr(grid, "to_float", first_in_two)
    for sigma in SIGMAS:
        check_no_overflow(sigma, microbatch_size)


@pytest.mark.parametrize("microbatch_size", thoroughly([1, 16], 16))
def test_twice_as_many_rows_between_carries_would_overflow(microbatch_size, monkeypatch):
    monkeypatch.setattr(grid, "to_float", first_in_two)  # the control
    rows_per_sum = grid.rows_per_sum

    def doubled(*given):
        most, in_range = rows_per_sum(*given)
        return 2 * most, in_range

    check_no_overflow(0.01, microbatch_size)
    monkeypatch.setattr(grid, "rows_per_sum", doubled)
    with pytest.raises(AssertionError):
        check_no_overflow(0.01, microbatch_size)


def test_rows_that_fit_for_the_host_fit_in_the_program():
    """Otherwise the sum of a run that its door let pass would be NaN."""
    traced = jax.jit(lambda s, std, num: grid.rows_per_sum(s, std, num), static_argnums=2)
    rng, at_the_edge = np.random.default_rng(0), 0
    for size in [2**k for k in range(11)] + [3, 100, 1000]:
        for near in rng.uniform(-3e-5, 3e-5, 40):
            s = 10.0 ** rng.uniform(-3, 3)
            std = noise.noise_std(size * 2**20 / grid.MOST_OF_SUM * (1 + near), s)
            fits = grid.rows_per_sum(s, std, 1000)[0] if std * 400 > s else 0
            most, in_range = traced(s, std, 1000)
            assert not fits or (in_range and int(most) >= min(fits, size))
            at_the_edge += (fits >= size) != (int(most) >= size)
    assert at_the_edge > 0  # a little more is refused by the host
    for num in (1000, 2**20, 2**23 + 1):  # and what all rows may be together, or one
        for near in rng.uniform(-3e-5, 3e-5, 40):
            std = noise.noise_std(max(1 / 512, num * 2**20 / grid.MOST_OF_ALL) * (1 + near), 1.0)
            try:
                grid.rows_per_sum(1.0, std, num)
            except bam.InputError:
                continue
            assert traced(1.0, std, num)[1]


# Numbers that cannot be.


BAD = {
    "zero": 0.0, "negative": -1.0, "nan": math.nan, "inf": math.inf, "-inf": -math.inf,
    "subnormal": 1e-40, "tiny": 1e-20, "huge": 1e39,
}  # fmt: skip
SMALL = {"zero", "subnormal", "tiny"}


def sum_of(clip, key, sigma=1.0, noise_of=bam.gaussian_noise, grad=given, at=P):
    noisy = noise_of(clip, sigma, key)
    return bam.clipped_sum(grad, clip, at, TREES, mask=None, microbatch_size=2, noise=noisy)[0]


def sum_by(oracle, key):
    at = oracle.ascend(P, {"a": W[1:], "b": W[:1]})
    return sum_of(bam.clip_by_l2_norm(1.0), key, grad=oracle.grad, at=at)


def mean_of(sigma, size, key):
    tx = bam.privatize(bam.clip_by_l2_norm(1.0), sigma, size, key)
    return tx.update(TREES, tx.init(P), mask=None)[0]


class Door(NamedTuple):
    """Where a number is given.

    Attributes:
      release: what is made of the number and a key.
      right: names of those in `BAD` that are right, if they are concrete.
      right_if_traced: the same of traced ones.
      otherwise: what a traced one gives that is not: NaN, or "noise", without any example.
    """

    release: Callable[[Any, Any], Any]
    right: Collection[str] = ()
    right_if_traced: Collection[str] = ()
    otherwise: str = "nan"


DOORS = {
    "clip_by_l2_norm": Door(lambda x, key: sum_of(bam.clip_by_l2_norm(x), key), {"zero"}),
    "normalize": Door(lambda x, key: sum_of(bam.normalize(x, 0.1), key), {"zero"}),
    "gamma": Door(lambda x, key: sum_of(bam.normalize(1.0, x), key)),
    "clip_per_layer": Door(lambda x, key: sum_of(bam.clip_per_layer(x), key), {"zero"}),
    "clip_per_layer of a tree": Door(
        lambda x, key: sum_of(bam.clip_per_layer({"a": x, "b": 1.0}), key), {"zero"}, {"zero"}
    ),
    "sensitivity": Door(
        lambda x, key: sum_of(bam.BoundedTransformation(no_state, own_update, x), key), {"zero"}
    ),
    "chain": Door(
        lambda x, key: sum_of(bam.chain(DOUBLE, bam.clip_by_l2_norm(x)), key), {"zero"}
    ),
    "gaussian_noise": Door(lambda x, key: sum_of(bam.clip_by_l2_norm(1.0), key, x)),
    "GaussianNoise": Door(
        lambda x, key: sum_of(
            bam.clip_by_l2_norm(1.0), key, x, noise_of=lambda _, x, key: bam.GaussianNoise(key, x)
        ),
        {"zero"},
    ),
    "privatize": Door(lambda x, key: mean_of(x, 4.0, key), {"zero"}),
    "expected_batch_size": Door(lambda x, key: mean_of(1.0, x, key), {"tiny"}, {"tiny"}),
    "dp_sat": Door(lambda x, key: sum_by(bam.dp_sat(squared, x), key), SMALL, SMALL, "noise"),
    "bam_sam": Door(lambda x, key: sum_by(bam.bam_sam(squared, x), key), SMALL, SMALL, "noise"),
    "mix": Door(lambda x, key: sum_by(bam.bam_sam(squared, 0.1, x), key), SMALL, SMALL, "noise"),
    "bam_exact": Door(lambda x, key: sum_by(bam.bam_exact(squared, x), key), SMALL, SMALL, "noise"),
}  # fmt: skip


def outcome(release, *args):
    """What a release is: refused, in one line, not finite, "noise" without examples, or right."""
    try:
        result = np.concatenate([np.ravel(x) for x in jax.tree.leaves(release(*args))])
    except bam.InputError as error:
        assert "\n" not in str(error)
        return "refused"
    if not np.isfinite(result).any():
        return "nan"
    assert np.isfinite(result).all()
    noisy = bam.gaussian_noise(bam.clip_by_l2_norm(1.0), 1.0, args[1])
    alone = np.asarray(noisy.draws_of_device(3))[:3] * np.float32(noisy.spacing)
    return "noise" if np.allclose(result, alone, rtol=1e-6, atol=0) else "right"


@pytest.mark.parametrize(
    "name",
    thoroughly(
        DOORS,
        *("clip_by_l2_norm", "gamma", "sensitivity", "gaussian_noise"),
    ),
)
def test_a_number_that_cannot_be_is_refused_or_nothing_is_released(name):
    door = DOORS[name]
    traced = jax.jit(door.release)
    for name, value in BAD.items():
        result = outcome(door.release, value, bam.seeded_key(1))
        if name in door.right:
            assert result == "right", name
        else:  # what 32 bits take for 0 may be found out in the program
            later = {"nan", "noise"} if name == "subnormal" else set()
            assert result in {"refused"} | later, (name, result)
        with np.errstate(over="ignore"):
            value = np.float64(value).astype(np.float32)
        result = outcome(traced, value, bam.seeded_key(1))
        right = {"right"} if name in door.right_if_traced else {door.otherwise}
        if name == "subnormal" and "zero" in door.right_if_traced:
            right.add("right")
        assert result in right, (name, result)
    for value in (0.5, jnp.float32(0.5)):  # the control
        assert outcome(door.release, value, bam.seeded_key(1)) == "right"
    assert outcome(traced, np.float32(0.5), bam.seeded_key(1)) == "right"


def test_a_traced_noise_multiplier_that_hides_little_is_refused():
    release = jax.jit(DOORS["gaussian_noise"].release)
    assert outcome(release, jnp.float32(0.0099), KEY) == "nan"
    assert outcome(release, jnp.float32(0.01), KEY) == "right"  # the control


def test_a_traced_bound_that_cannot_be_gives_nan_without_noise_too():
    @jax.jit
    def total(c):
        return bam.clipped_sum(given, bam.clip_by_l2_norm(c), P, TREES, mask=None)[0]

    for c in (-1.0, 1e-20, math.nan):
        assert np.isnan(total(c)["a"]).all()
    assert np.isfinite(total(0.5)["a"]).all()  # the control


@pytest.mark.parametrize("key", ["optimizer.learning_rate", "clip_norm", "epsilon"])
def test_a_config_with_a_number_that_cannot_be_is_refused(key):
    for name in ("zero", "negative", "nan", "inf", "-inf"):
        config = tiny_digits(expected_batch_size=12, microbatch_size=4, delta=1e-3)
        config.update_from_flattened_dict({key: BAD[name]})
        refused(key.rpartition(".")[2], loop.build, config, DATA)


# Objects of one's own, as docs/extending.md describes them.


@dataclasses.dataclass(frozen=True)
class Shrink:
    sensitivity: float

    def init(self, params):
        return ()

    def update(self, grads, state, params=None):
        scale = self.sensitivity / (self.sensitivity + optax.tree.norm(grads))
        return jax.tree.map(lambda g: scale * g, grads), state


@dataclasses.dataclass(frozen=True)
class Ahead:
    radius: float
    loss_fn: Callable[..., Any] = dataclasses.field(default=squared, metadata={"static": True})

    def ascend(self, params, previous):
        return params

    def grad(self, params, example):
        at = jax.tree.map(lambda p: p + self.radius, params)
        return jax.grad(self.loss_fn)(at, example)


class KnownShrink(Shrink):
    """JAX knows it."""


class KnownAhead(Ahead):
    """JAX knows it."""


for known in (KnownShrink, KnownAhead):
    jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(known))


def summed_by_own(shrink, ahead, numbers):
    clip, oracle = shrink(numbers["c"]), ahead(numbers["radius"])
    noisy = bam.gaussian_noise(clip, numbers["sigma"], KEY, step=1)
    return bam.clipped_sum(oracle.grad, clip, P, TREES, mask=None, microbatch_size=2, noise=noisy)


def test_objects_of_ones_own_that_jax_knows_compile_nothing_for_other_numbers():
    check_shared(functools.partial(summed_by_own, KnownShrink, KnownAhead), NUMBERS, OTHERS)
    total = summed_by_own(Shrink, Ahead, NUMBERS)  # which JAX does not know
    assert close(total, summed_by_own(KnownShrink, KnownAhead, NUMBERS))
    run = lambda k: (2 * k, KnownShrink(k), KnownAhead(0.1 * k), 0.1 * k, False)  # noqa: E731
    check_shared(looped, run(1.0), run(1.7))
    assert compilations(lambda: summed_by_own(Shrink, Ahead, OTHERS)) > 0  # the control


def test_objects_of_ones_own_are_measured_and_chained():
    clip = KnownShrink(1.0)
    assert not clipping.as_declared(clip).is_proved
    assert bam.chain(optax.scale(2.0), clip).sensitivity == 1.0
    for small, large in ((bam.chain(clip, bam.clip_by_l2_norm(0.5)), 0.5), (clip, 1.0)):
        clipped = small.update(jax.tree.map(lambda x: 1e6 * x, P), small.init(P))[0]
        assert 0.9 * large < norm64(clipped) <= large * clipping.ROUNDING


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unmarked:
    loss_fn: Callable[..., Any]

    def ascend(self, params, previous):
        return params

    def grad(self, params, example):
        return jax.grad(self.loss_fn)(params, example)


def test_a_function_among_the_numbers_of_an_object_is_one_line():
    total = functools.partial(bam.clipped_sum, clip=bam.clip_by_l2_norm(1.0), params=W, batch=ROWS)
    refused("a function among its numbers", lambda: total(Unmarked(squared).grad, mask=None))


# Numbers of a clip, in the place of others.


def changed(clip, change):
    return jax.tree.map(change, clip)


@pytest.mark.parametrize("name", ["l2", "normalize", "per_layer", "per_layer of a tree"])
def test_a_proved_clip_of_other_numbers_has_their_bound(name):
    clip = CLIPS[name](1.0)
    wide = changed(clip, lambda x: 100 * x)
    many = jax.tree.unflatten(jax.tree.structure(clip), [100.0] * len(jax.tree.leaves(clip)))
    for other in (wide, many):
        assert other.is_proved and clip.sensitivity < other.sensitivity <= 100 * math.sqrt(2)
        clipped = other.update(jax.tree.map(lambda x: 1e6 * x, P), ())[0]
        assert clip.sensitivity < norm64(clipped) <= other.sensitivity * clipping.ROUNDING
        assert bam.gaussian_noise(other, 1.0, KEY).std >= other.sensitivity
    for bad in (-1.0, 1e-20, math.nan, math.inf):
        cannot_be = changed(clip, lambda x, bad=bad: bad)
        refused("sensitivity|not bounded", bam.gaussian_noise, cannot_be, 1.0, KEY)
        assert outcome(sum_of, cannot_be, KEY, 1.0, lambda *_: NOISE) != "right"


def test_a_clip_of_narrow_numbers_keeps_its_bound():
    rows = {str(i): jnp.full(4, 100.0) for i in range(3)}
    for name in ("l2", "normalize", "per_layer"):
        clip = changed(CLIPS[name](1.1), lambda x: jnp.asarray(x, jnp.bfloat16))
        clipped = jax.jit(lambda clip: clip.update(rows, ())[0])(clip)
        assert 0.9 < norm64(clipped) <= float(clip.sensitivity) * clipping.ROUNDING


def test_a_clip_of_ones_own_that_is_given_other_numbers_is_measured():
    clip = bam.BoundedTransformation(no_state, Partial(times, 0.1), 1.0)
    assert jax.tree.leaves(clip) == [0.1, 1.0] and not clip.is_proved
    lying = jax.tree.unflatten(jax.tree.structure(clip), [100.0, 1.0])
    assert lying.sensitivity == 1.0 and not lying.is_proved
    rows = jax.tree.map(lambda x: 0.01 * x, TREES)
    for noise_to_add in (None, NOISE):
        options = {"mask": None, "noise": noise_to_add}
        total, norms = bam.clipped_sum(given, lying, P, rows, **options)
        assert not np.isfinite(norms).any()  # all are longer than 1
        none, _ = bam.clipped_sum(given, clip, P, jax.tree.map(jnp.zeros_like, rows), **options)
        assert close(total, none)
        total, norms = bam.clipped_sum(given, clip, P, rows, **options)
        assert not close(total, none) and np.isfinite(norms).all()  # the control


def times(factor, g, state, params=None):
    return jax.tree.map(lambda x: factor * x, g), state


# What worked before.

NOISE = bam.GaussianNoise(KEY, 1.0)


def noised(c, sigma, key, step=0):
    clip = bam.clip_by_l2_norm(c)
    noisy = bam.gaussian_noise(clip, sigma, key, step)
    oracle = bam.bam_sam(squared, 0.1 * c, 0.5)
    options = {"mask": None, "microbatch_size": 2, "noise": noisy}
    return bam.clipped_sum(oracle.grad, clip, P, TREES, **options)


def close(one, other):
    return all(np.allclose(x, y, rtol=1e-5, atol=1e-5) for x, y in zip(
        jax.tree.leaves(one), jax.tree.leaves(other), strict=True
    ))  # fmt: skip


def test_a_program_of_ones_own_makes_its_clip_and_noise_of_traced_numbers():
    traced = jax.jit(noised)
    for c, sigma in ((1.0, 2.0), (0.2, 0.5)):
        assert close(traced(c, sigma, KEY), noised(c, sigma, KEY))
    assert not close(traced(1.0, 2.0, KEY), noised(0.2, 0.5, KEY))  # the control
    assert compilations(lambda: traced(3.0, 4.0, KEY)) == 0


def test_a_scan_over_clip_norms_has_the_sums_of_a_loop():
    norms = jnp.array([1.0, 0.2, 3.0])

    @jax.jit
    def scanned(norms, key):
        steps = jnp.arange(3, dtype=jnp.uint32)
        return jax.lax.scan(lambda _, x: (None, noised(x[0], 2.0, key, x[1])), None, (norms, steps))

    totals = scanned(norms, KEY)[1]
    for i, c in enumerate(norms.tolist()):
        assert close(jax.tree.map(lambda x, i=i: x[i], totals), noised(c, 2.0, KEY, i))


@pytest.mark.thorough
def test_sums_are_the_same_with_debug_nans_and_nearly_so_with_64_bits_and_without_jit():
    expected = noised(0.5, 2.0, KEY)
    with jax.debug_nans(True):
        assert_same_bits(noised(0.5, 2.0, KEY), expected)
        with pytest.raises(ValueError, match="clip_norm must be"):  # the control
            jax.jit(noised)(-0.5, 2.0, KEY)  # gives NaN, and JAX looks where that comes from
    with jax.enable_x64(True):
        assert close(noised(0.5, 2.0, KEY), expected)
        assert compilations(lambda: noised(0.7, 3.0, KEY)) == 0
    with jax.disable_jit():
        assert close(noised(0.5, 2.0, KEY), expected)


def test_weights_that_are_donated_leave_the_numbers_of_a_clip_and_an_optimizer():
    clip, optimizer = bam.clip_by_l2_norm(0.5), Partial(scaled_by, 0.5)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(w, clip, optimizer, noise):
        total, _ = bam.clipped_sum(given, clip, w, TREES, mask=None, noise=noise)
        return jax.tree.map(jnp.add, w, optimizer(total))

    w = jax.tree.map(jnp.copy, P)
    first = step(w, clip, optimizer, NOISE)
    assert all(x.is_deleted() for x in jax.tree.leaves(w))
    assert_same_bits(step(jax.tree.map(jnp.copy, P), clip, optimizer, NOISE), first)
    assert compilations(lambda: step(first, changed(clip, lambda x: 2 * x), optimizer, NOISE)) == 0


def scaled_by(factor, tree):
    return jax.tree.map(lambda x: factor * x, tree)


# Strict promotion of dtypes, which a user may ask JAX for.


def strictly(fn, *args):
    """What `fn` gives under strict promotion, compared with what it gives otherwise."""
    with jax.numpy_dtype_promotion("strict"):
        strict = fn(*args)
    assert_same_bits(strict, fn(*args))
    return strict


ORACLES = {
    "dp_sgd": bam.dp_sgd,
    "dp_sat": functools.partial(bam.dp_sat, radius=0.1),
    "bam_sam": functools.partial(bam.bam_sam, radius=0.1, mix=0.5),
    "bam_exact": functools.partial(bam.bam_exact, penalty=0.1, ascent_mask=pytree.name_mask("a")),
}
STRICT_CLIPS = [
    bam.clip_by_l2_norm(1.0), bam.normalize(1.0, 0.1), bam.clip_per_layer({"a": 0.5, "b": 1.0}),
    bam.chain(optax.scale(2.0), bam.clip_by_l2_norm(1.0)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ORACLES)
def test_a_sum_has_the_same_bits_under_strict_promotion(name, dtype):
    oracle = ORACLES[name](squared)
    params, rows = jax.tree.map(lambda x: x.astype(dtype), (P, TREES))
    for clip in STRICT_CLIPS if name == "dp_sgd" and dtype == jnp.float32 else STRICT_CLIPS[:1]:
        added = bam.gaussian_noise(clip, 1.0, KEY)
        total = functools.partial(bam.clipped_sum, oracle.grad, clip, mask=None, noise=added)
        strictly(lambda w, x, total=total: total(oracle.ascend(w, w), x), params, rows)


@pytest.mark.parametrize("strategy", [(1.0,), (1.0, -0.5)])
@pytest.mark.parametrize("mesh", [None, mesh_of(2)])
def test_a_private_mean_has_the_same_bits_under_strict_promotion(strategy, mesh):
    clip, mask = STRICT_CLIPS[0], jnp.arange(6) < 4

    def mean(sigma, size, key):
        tx = bam.privatize(clip, sigma, size, key, strategy)
        added = bam.gaussian_noise(clip, sigma, key, 1)
        shared = bam.clipped_sum(given, clip, P, TREES, mask=mask, mesh=mesh, noise=added)
        return tx.update(TREES, tx.init(P), P, mask=mask)[0], shared

    strictly(jax.jit(mean), jnp.float32(1.0), jnp.float32(4.0), KEY)  # traced numbers, too


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trainable": "a"},
        {"mesh": mesh_of(2)},
        {"mechanism": {"name": "banded", "bands": 2}},
        {"num_examples": 10, "groups": np.arange(20) // 2, "group_size": 2},
    ],
)
def test_a_training_has_the_same_bits_under_strict_promotion(changes):
    plan = {"num_examples": 20, "expected_batch_size": 4, "num_epochs": 1, "accountant": "rdp"}
    plan |= {"epsilon": 3.0, "delta": 1e-3, "clip": STRICT_CLIPS[0], "seed": 1} | changes
    data = jax.tree.map(lambda x: np.resize(np.asarray(x), (20, *x.shape[1:])), TREES)

    def trained():
        private, params = bam.PrivateTraining(**plan), P
        tx = optax.chain(private.gradient(ORACLES["dp_sat"](squared)), optax.sgd(0.1))
        state = tx.init(params)
        for batch in private.batches(data):
            updates, state = tx.update(batch, state, params)
            params = optax.apply_updates(params, updates)
        private.close()
        return params

    strictly(trained)


def test_strict_promotion_still_holds_in_the_users_own_loss():  # the control
    mixed = bam.dp_sgd(lambda w, x: jnp.sum((w - x) ** 2) * jnp.arange(2)[1])
    total = functools.partial(bam.clipped_sum, mixed.grad, STRICT_CLIPS[0], mask=None)
    total(W, ROWS)
    with (
        jax.numpy_dtype_promotion("strict"),
        pytest.raises(ValueError, match="have no available implicit dtype"),
    ):
        total(W, ROWS)
