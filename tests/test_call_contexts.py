"""Public functions are right however they are called: without `jit`, in a long loop, traced."""

import dataclasses
import functools
import gc
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.tree_util import Partial

import bam
from bam import models
from bam.core import program, pytree
from bam.core.engine import plain_sum
from bam.testing import check_oracle
from bam.training import diagnostics
from tests.cases import compilations

CLIP = bam.clip_by_l2_norm(1.0)
LOSS = lambda w, x: 0.5 * jnp.sum((w - x) ** 2)  # noqa: E731
ORACLE = bam.bam_sam(LOSS, 0.1)
ROWS = jnp.asarray(np.random.default_rng(0).normal(size=(20, 3)), jnp.float32)
W, MASK = jnp.zeros(3), jnp.arange(20) != 4


def own(fn):
    return bam.BoundedTransformation(lambda params: (), lambda g, s, p=None: (fn(g), s), 1.0)


CLIPS = {
    "clip_by_l2_norm": CLIP,
    "own": own(lambda g: jax.tree.map(lambda x: 0.5 * x, CLIP.update(g, ())[0])),
    "own, constant": own(lambda g: jax.tree.map(lambda x: jnp.full_like(x, 0.01), g)),
    "chain": bam.chain(optax.scale(3.0), CLIP),
}


def noised(step):
    noise = bam.gaussian_noise(CLIP, 1.0, bam.seeded_key(0), step=step)
    return bam.clipped_sum(ORACLE.grad, CLIP, W, ROWS, mask=MASK, noise=noise)


@functools.cache
def transforms():
    clips = {"of one's own": CLIPS["own"], "a chain": bam.chain(optax.scale(2.0), CLIP)}
    return {
        "privatize": (bam.privatize(CLIP, 1.0, 20, bam.secret_key()), {"mask": MASK}),
        "correlated": (
            bam.privatize(CLIP, 1.0, 20, bam.secret_key(), bam.strategy.square_root(2)),
            {"mask": MASK},
        ),
        **{
            f"privatize, {name}": (bam.privatize(clip, 1.0, 20, bam.secret_key()), {"mask": None})
            for name, clip in clips.items()
        },
    }


def by_transform(name, _):
    transform, more = transforms()[name]
    return transform.update(ROWS, transform.init(W), W, **more)


CALLS = {
    "clipped_sum": lambda _: bam.clipped_sum(ORACLE.grad, CLIP, W, ROWS, mask=MASK),
    "clipped_sum with noise": noised,
    "plain_sum": lambda _: plain_sum(LOSS, W, ROWS, mask=MASK),
    "means": lambda _: diagnostics.means(ORACLE.grad, CLIP, W, ROWS, mask=MASK),
    "oracle": lambda _: ORACLE.grad(W, ROWS[0]),
    "exact oracle": lambda _: bam.bam_exact(LOSS, 0.1).grad(W, ROWS[0]),
    "clip": lambda _: CLIP.update(ROWS[0], (), W),
    "share of noise": lambda t: bam.gaussian_noise(CLIP, 1.0, bam.seeded_key(0), t).draws_of_device(
        3
    ),
    "a drawn batch": lambda t: bam.sampling.pad(np.arange(3), 8, 0, t).take(ROWS),
    **{name: functools.partial(by_transform, name) for name in transforms()},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_public_function_compiles_at_its_first_call_alone(name):
    call = CALLS[name]
    for step in range(2):
        call(step)
    assert compilations(lambda: [call(step) for step in range(2, 52)]) == 0


def test_the_count_of_compilations_counts():  # the control
    assert compilations(lambda: [jax.jit(lambda x: x + 1)(jnp.ones(3)) for _ in range(3)]) >= 3


def training_of_its_own():
    private = bam.PrivateTraining(
        num_examples=20, expected_batch_size=2, num_epochs=6, epsilon=3.0, delta=1e-3, clip=CLIP
    )
    tx = optax.chain(private.gradient(ORACLE), optax.nadam(1e-3))
    state, w = tx.init(W), W
    for batch in private.batches(ROWS):
        updates, state = tx.update(batch, state, w)
        w = optax.apply_updates(w, updates)
        yield


def test_a_private_training_without_jit_compiles_in_its_first_steps_alone():
    steps = training_of_its_own()
    for _ in range(3):
        next(steps)
    assert compilations(lambda: list(steps)) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="memory maps are read from /proc")
def test_a_thousand_steps_without_jit_hold_no_more_memory_maps_than_ten():
    def num_maps():
        with open("/proc/self/maps", encoding="utf-8") as file:
            return len(file.readlines())

    private = bam.privatize(CLIP, 1.0, 4, bam.secret_key())
    tx = optax.chain(private, optax.nadam(1e-3))
    params, state = {"w": jnp.zeros(3)}, None
    state = tx.init(params)
    for step in range(1000):
        updates, state = tx.update({"w": ROWS[:4]}, state, params, mask=MASK[:4])
        params = optax.apply_updates(params, updates)
        if step == 10:
            gc.collect()
            before = num_maps()
    assert np.isfinite(params["w"]).all()
    gc.collect()
    assert num_maps() <= before + 50


def test_functions_made_anew_in_each_call_are_compiled_anew_and_forgotten():
    called, programs = (lambda fn, x: fn(x)), []
    for i in range(3 * program.MOST_PROGRAMS):
        compiled = program.compile_once(called, program.as_partial(lambda x, i=i: x + i))
        assert compiled(1) == 1 + i
        programs.append(weakref.ref(compiled))
    del compiled
    gc.collect()
    assert sum(kept() is not None for kept in programs) <= program.MOST_PROGRAMS


class Times:
    """A function, or a loss, with `==` of its own, as a callable tuple or dataclass has."""

    __hash__ = None

    def __init__(self, factor):
        self.factor = factor

    def __eq__(self, other):
        return True

    def __call__(self, w, x):
        return self.factor * (w @ x if jnp.ndim(w) and w is not x else x)


class HashableTimes(Times):
    __hash__ = object.__hash__


@pytest.mark.parametrize("kind", [Times, HashableTimes])
def test_a_function_that_says_it_equals_another_has_a_program_of_its_own(kind):
    clip = bam.clip_by_l2_norm(100.0)
    plain = bam.dp_sgd(kind(1.0))
    ways = {
        "oracle": lambda loss: bam.dp_sgd(loss).grad,
        "with_loss": lambda loss: plain.with_loss(lambda _: loss).grad,
        "replace": lambda loss: dataclasses.replace(plain, loss_fn=loss).grad,
        "own oracle": lambda loss: bam.Oracle(lambda p, _: p, jax.grad(loss)).grad,
    }
    for way, grad_of in ways.items():
        losses = [kind(2.0), kind(3.0)]
        sums = [bam.clipped_sum(grad_of(loss), clip, W, ROWS[:1], mask=None)[0] for loss in losses]
        assert np.allclose(sums[0] * 3, sums[1] * 2) and np.any(sums[0]), way
    loss = kind(2.0)
    again = lambda: bam.clipped_sum(bam.dp_sgd(loss).grad, clip, W, ROWS, mask=None)  # noqa: E731
    again()
    assert compilations(again) == 0
    assert plain.with_loss(lambda own: kind(own.factor * 5)).loss_fn.factor == 5


def given_factor(factor, w, x):
    return factor * x


def test_a_partial_function_whose_arguments_are_no_floats_is_compiled_as_it_is():
    def chosen(row, w, x):
        return x[row:] * 2 if row else x

    total = lambda fn: bam.clipped_sum(fn, CLIP, W, ROWS, mask=None)[0]  # noqa: E731
    assert total(Partial(chosen, 0)).shape == (3,) and total(Partial(chosen, 1)).shape == (2,)
    assert np.array_equal(
        total(Partial(lambda f, w, x: f(x), jnp.sin)), total(lambda w, x: jnp.sin(x))
    )
    total(Partial(given_factor, 2.0))
    assert compilations(lambda: total(Partial(given_factor, 3.0))) == 0  # the control


def test_transforms_with_the_same_functions_and_other_bounds_are_others():
    wide, narrow = (bam.BoundedTransformation(CLIP.init, CLIP.update, s) for s in (1.0, 0.5))
    assert wide != narrow and len({wide, narrow}) == 2
    sums = [bam.clipped_sum(ORACLE.grad, clip, W, ROWS, mask=None)[0] for clip in (wide, narrow)]
    assert not np.array_equal(*sums)  # of the narrow one those that are too long are dropped


# Whatever a compiler knows.


def constant_gradient(value):
    return lambda w, x: jax.tree.map(lambda leaf: jnp.full_like(leaf, value), w)


SHAPES = {"one entry": (1,), "a scalar": (), "64 entries": (64,), "two axes": (2, 3)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_gradient_that_is_a_constant_of_the_program_counts_as_any_other(num_rows, shape):
    """For all clips and sizes of a microbatch in one program, in which the noise is the same."""
    params, grad = jnp.ones(SHAPES[shape]), constant_gradient(0.3)
    rows, everyone = jnp.zeros((num_rows, 1)), jnp.ones(num_rows, bool)

    def sums(clip, key, mask, size):
        noise = bam.gaussian_noise(clip, 1e-2, key)
        return [
            bam.clipped_sum(grad, clip, params, rows, mask=mask, microbatch_size=size, noise=added)
            for added in (None, noise)
        ]

    @jax.jit
    def sums_by_clip(key, mask):  # where the compiler knows which rows are there, and not
        return {
            name: [sums(clip, key, here, size) for size in (1, 2) for here in (None, mask)]
            for name, clip in CLIPS.items()
        }

    for name, found in sums_by_clip(bam.seeded_key(0), everyone).items():
        one, _ = CLIPS[name].update(grad(params, None), CLIPS[name].init(params), params)
        for (plain, norms), (with_noise, norms_with_noise) in found:
            assert np.isfinite(norms).all() and np.isfinite(norms_with_noise).all(), name
            np.testing.assert_allclose(plain, num_rows * np.asarray(one), rtol=1e-5, err_msg=name)
            assert np.max(np.abs(with_noise - plain)) < 0.07, name  # seven deviations


def in_a_scan(fn, key):
    return jax.lax.scan(lambda carry, _: (carry, fn(carry)), key, None, length=2)[1][0]


WAYS = {
    "jit": lambda fn, key: jax.jit(fn)(key),
    "scan": in_a_scan,
    "jit of a scan": lambda fn, key: jax.jit(lambda key: in_a_scan(fn, key))(key),
    "map": lambda fn, key: jax.lax.map(fn, jnp.stack([key, key]))[0],
    "vmap over keys": lambda fn, key: jax.vmap(fn)(jnp.stack([key + 1, key]))[1],
    "checkpoint": lambda fn, key: jax.checkpoint(fn)(key),
    "cond": lambda fn, key: jax.jit(lambda k: jax.lax.cond(k[0] >= 0, fn, fn, k))(key),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("clip", [CLIP, CLIPS["own"]], ids=["own library's", "own"])
def test_a_sum_with_noise_is_the_same_in_any_program(way, clip):
    def total(key):
        noise = bam.gaussian_noise(clip, 1.0, key, step=3)
        return bam.clipped_sum(ORACLE.grad, clip, W, ROWS, mask=MASK, noise=noise)[0]

    key = bam.seeded_key(1)
    np.testing.assert_allclose(way(total, key), total(key), rtol=0, atol=4e-6)


SWITCHES = {
    "disable_jit": jax.disable_jit,
    "debug_nans": lambda: jax.debug_nans(True),
    "x64": lambda: jax.enable_x64(True),
    "no promotion of ranks": lambda: jax.numpy_rank_promotion("raise"),
}


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
def test_a_sum_with_noise_is_the_same_under_the_switches_of_jax(switch):
    rows = ROWS[:4]

    def total():
        noise = bam.gaussian_noise(CLIP, 1.0, bam.seeded_key(1), step=3)
        return bam.clipped_sum(
            ORACLE.grad, CLIP, W, rows, mask=MASK[:4], microbatch_size=2, noise=noise
        )[0]

    expected = total()
    with switch():
        np.testing.assert_allclose(total(), expected, rtol=0, atol=4e-6)
        transform = bam.privatize(CLIPS["own"], 1.0, 4, bam.secret_key())
        mean, _ = transform.update(rows, transform.init(W), W, mask=MASK[:4])
        assert np.isfinite(mean).all()


def test_everything_public_runs_where_ranks_are_not_promoted():
    with jax.numpy_rank_promotion("raise"):
        for call in CALLS.values():
            call(1)
        check_oracle(lambda loss: bam.bam_exact(loss, 0.1))
        for name in ("resnet9", "wide_resnet", "tanh_cnn"):
            model = models.as_functions(models.create(name, 10, 32), (32, 32, 3))
            weights = jax.eval_shape(model.init, jax.random.key(0))
            example = {"image": jnp.zeros((1, 32, 32, 3)), "label": jnp.int32(0)}
            jax.eval_shape(jax.grad(model.loss), weights, example)


def test_what_is_read_from_memory_is_read_once_or_not_at_all():
    add = lambda values, total: total + jnp.sum(values)  # noqa: E731
    read = functools.partial(pytree.read_from_memory, add, jnp.arange(4.0), jnp.float32(1))
    for turns in (0, 1):
        for fn in (read, jax.jit(read), lambda turns: jax.jit(lambda: read(turns))()):
            assert fn(jnp.int32(turns)) == 1 + 6 * turns


# A key is an argument, of all that is mapped.


def refused(fn, *args):
    with pytest.raises(ValueError, match="the same noise would be added more than once"):
        fn(*args)


def test_a_key_that_is_a_constant_of_a_program_is_refused_wherever_noise_is_made():
    key, rows = bam.secret_key(), ROWS
    refused(jax.jit(lambda t: bam.gaussian_noise(CLIP, 1.0, key, step=t).std), jnp.int32(0))
    noise = bam.gaussian_noise(CLIP, 1.0, key)
    refused(
        jax.jit(lambda w: bam.clipped_sum(ORACLE.grad, CLIP, w, rows, mask=None, noise=noise)), W
    )
    transform = bam.privatize(CLIP, 1.0, 20, key)
    state = transform.init(W)
    refused(jax.jit(lambda rows: transform.update(rows, state, W, mask=None)), rows)
    jax.jit(lambda rows, state: transform.update(rows, state, W, mask=None))(rows, state)


def test_noise_that_a_vmap_would_add_to_several_sums_is_refused():
    key, several = bam.secret_key(), jnp.stack([W, W + 1])
    noise = bam.gaussian_noise(CLIP, 1.0, key)
    total = lambda w, noise: bam.clipped_sum(  # noqa: E731
        ORACLE.grad, CLIP, w, ROWS, mask=None, noise=noise
    )
    refused(jax.vmap(total, (0, None)), several, noise)
    refused(jax.jit(jax.vmap(total, (0, None))), several, noise)
    transform = bam.privatize(CLIP, 1.0, 20, bam.secret_key())
    refused(
        jax.vmap(lambda rows, state: transform.update(rows, state, W, mask=None), (0, None)),
        jnp.stack([ROWS, ROWS]), transform.init(W),
    )  # fmt: skip
    # The control: a key for each.
    keys = jnp.stack([bam.secret_key(), bam.secret_key()])
    sums = jax.vmap(lambda w, key: total(w, bam.gaussian_noise(CLIP, 1.0, key))[0])(several, keys)
    assert sums.shape == (2, 3)


def test_a_seed_that_is_given_to_two_transforms_is_warned_of_while_both_exist():
    first = bam.privatize(CLIP, 1.0, 20, bam.seeded_key(7))
    with pytest.warns(RuntimeWarning, match="another transform has an equal key"):
        bam.privatize(CLIP, 1.0, 20, bam.seeded_key(7))
    bam.privatize(CLIP, 1.0, 20, bam.seeded_key(7, "another"))
    del first
    bam.privatize(CLIP, 1.0, 20, bam.seeded_key(7))


WAYS = {
    "vmap of jit": lambda fn: jax.vmap(jax.jit(fn), (0, None)),
    "vmap of checkpoint": lambda fn: jax.vmap(jax.checkpoint(fn), (0, None)),
    "jit of vmap of jit": lambda fn: jax.jit(jax.vmap(jax.jit(fn), (0, None))),
    "scan of vmap": lambda fn: (
        lambda ws, noise: jax.lax.scan(
            lambda c, _: (c, jax.vmap(fn, (0, None))(ws, noise)), 0, None, length=2
        )
    ),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_one_key_for_all_weights_is_refused_however_they_are_mapped(way):
    def total(w, noise):
        return bam.clipped_sum(ORACLE.grad, CLIP, w, ROWS, mask=None, noise=noise)[0]

    refused(way(total), jnp.stack([W, W + 1]), bam.gaussian_noise(CLIP, 1.0, bam.secret_key()))
    transform = bam.privatize(CLIP, 1.0, 20, bam.secret_key())
    update = lambda rows, state: transform.update(rows, state, W, mask=None)[0]  # noqa: E731
    refused(way(update), jnp.stack([ROWS, ROWS]), transform.init(W))


def test_a_private_training_refuses_a_vmap_of_its_compiled_update_over_weights():
    private = bam.PrivateTraining(
        num_examples=20, expected_batch_size=4, num_epochs=2, epsilon=2.0, delta=1e-3, clip=CLIP
    )
    tx = private.gradient(ORACLE)
    state, batch = tx.init(W), next(private.batches(ROWS))
    refused(jax.vmap(jax.jit(tx.update), (None, None, 0)), batch, state, jnp.stack([W, W + 1]))


def test_a_vmap_and_changing_noise_do_not_grow_the_process():
    keys = jnp.stack([bam.secret_key(), bam.secret_key()])
    mapped = jax.vmap(
        lambda key: bam.clipped_sum(
            ORACLE.grad, CLIP, W, ROWS, mask=None, noise=bam.gaussian_noise(CLIP, 1.0, key)
        )[0]
    )
    mapped(keys), mapped(keys)
    assert compilations(lambda: [mapped(keys) for _ in range(4)]) == 0

    # Another deviation is another program, of which the last few are kept: see above.
    def with_other_deviations():
        for step in range(3):
            noise = bam.gaussian_noise(CLIP, 1 + step / 100, keys[0], step)
            bam.clipped_sum(ORACLE.grad, CLIP, W, ROWS, mask=None, noise=noise)

    assert compilations(with_other_deviations) >= 2


def test_a_clip_that_declares_less_is_not_summed_by_the_program_of_an_equal_pair():
    class Declared(optax.GradientTransformation):
        """A pair with a bound, as `sensitivity_of` reads it of any transform."""

    def pair(sensitivity):
        clip = Declared(init, update)
        clip.sensitivity = sensitivity
        return clip

    init, update = (lambda params: ()), (lambda g, s, p=None: (g, s))
    rows, key = jnp.array([[0.9, 0, 0], [0, 0.9, 0]]), bam.secret_key()

    def noised_sum(clip, mask):
        noise = bam.gaussian_noise(clip, 1.0, key)
        return bam.clipped_sum(lambda w, x: x, clip, W, rows, mask=jnp.asarray(mask), noise=noise)[
            0
        ]

    longer, shorter = pair(1.0), pair(0.1)
    assert longer == shorter  # as the tuples that they are
    moved = noised_sum(longer, [True, True]) - noised_sum(longer, [True, False])
    assert float(jnp.linalg.norm(moved)) > 0.8
    moved = noised_sum(shorter, [True, True]) - noised_sum(shorter, [True, False])
    assert float(jnp.linalg.norm(moved)) <= 0.1 * (1 + 1e-5)
