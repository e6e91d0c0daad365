"""What optax's own tests ask of every transform, asked of a private gradient.

The questions are those of `alias_test.py`, `combining_test.py`, `clipping_test.py` and
`contrib/_privacy_test.py` in optax.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bam
from tests.cases import assert_close, refused
from tests.own_loop import DATA, PLAN

CLIP = bam.clip_by_l2_norm(1.0)
PARAMS = {"a": jnp.array([0.5, -1.0]), "b": jnp.array(2.0)}
GRADS = jax.tree.map(lambda x: jnp.arange(1.0, 7.0).reshape(6, *[1] * x.ndim) * x, PARAMS)
OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "nadam": optax.nadam(0.1),
    "adafactor": optax.adafactor(0.1),
    "lion": optax.lion(0.1),
    "masked": optax.masked(optax.adam(0.1), {"a": True, "b": False}),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=optax.constant_schedule(0.1)),
    "partition": optax.partition({"x": optax.sgd(0.1), "y": optax.adam(0.1)}, {"a": "x", "b": "y"}),
}


def private(seed=0, sigma=1.0):
    return bam.privatize(CLIP, sigma, 6, bam.seeded_key(seed))


def facts(tree):
    return [(name, x.shape, x.dtype) for name, x in jax.tree_util.tree_leaves_with_path(tree)]


# Every optimizer after a private gradient.


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_chain_keeps_its_state_and_is_the_same_in_a_scan(name):
    tx = optax.chain(private(), OPTIMIZERS[name])

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(GRADS, state, params, mask=None)
        return (optax.apply_updates(params, updates), state), None

    start = PARAMS, tx.init(PARAMS)
    eager, _ = step(step(start, None)[0], None)
    assert facts(eager) == facts(start)  # structure, shapes and dtypes
    scanned, _ = jax.jit(lambda start: jax.lax.scan(step, start, length=2))(start)
    assert_close(scanned, eager, rtol=1e-5, atol=1e-6)
    assert np.abs(eager[0]["b"] - PARAMS["b"]) > 1e-3  # the control: it moved


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_map_params_finds_every_array_of_the_parameters_shape_and_no_other(name):
    tx = optax.chain(private(), OPTIMIZERS[name])
    state = tx.init(PARAMS)
    mark = functools.partial(optax.tree.map_params, tx, lambda _: "parameter", state)
    is_leaf = {"is_leaf": lambda x: isinstance(x, optax.MaskedNode)}
    marks = mark(transform_non_params=lambda _: "other", **(is_leaf if "masked" in name else {}))
    assert set(jax.tree.leaves(marks[0])) == {"other"}  # of the noise: its key and its step
    alone = OPTIMIZERS[name]
    expected = optax.tree.map_params(
        alone, lambda _: "parameter", alone.init(PARAMS),
        transform_non_params=lambda _: "other", **(is_leaf if "masked" in name else {}),
    )  # fmt: skip
    assert jax.tree.leaves(marks[1]) == jax.tree.leaves(expected)


def test_a_training_in_a_loop_keeps_its_state_and_maps_over_its_parameters():
    training = bam.PrivateTraining(**PLAN)
    oracle = bam.dp_sat(lambda w, x: 0.5 * jnp.sum((w - x) ** 2), radius=0.1)
    tx, weights = optax.chain(training.gradient(oracle), optax.nadam(0.1)), jnp.zeros(2)
    state = tx.init(weights)
    doubled = optax.tree.map_params(tx, lambda x, w: w + 1, state, weights)
    assert (doubled[0].previous == 1).all() and facts(doubled) == facts(state)
    for batch in training.batches(DATA):
        updates, after = tx.update(batch, state, weights)
        assert facts(after) == facts(state) and updates.dtype == weights.dtype
        state = after


# Narrow parameters, and wrappers.


def test_a_state_begun_in_float32_keeps_its_dtypes_with_bfloat16_parameters():
    params, grads = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (PARAMS, GRADS))
    tx = optax.chain(private(), optax.nadam(0.1))

    def trained(state):
        def step(carry, _):
            updates, state = tx.update(grads, carry[1], carry[0], mask=None)
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(step, (params, state), length=2)[0]

    state = tx.init(params)
    with pytest.raises(TypeError, match="carry"):  # the control
        trained(state)
    wide = optax.tree.map_params(tx, lambda x: x.astype(jnp.float32), state)
    assert facts(trained(wide)) == facts((params, wide))


def test_hyperparameters_are_injected_into_the_optimizer_and_not_into_the_noise():
    injected = optax.inject_hyperparams(bam.privatize, static_args="clip")
    wrapped = injected(CLIP, 1.0, 6.0, bam.secret_key())
    refused("another transform was made with this key", wrapped.update, GRADS,
            wrapped.init(PARAMS), PARAMS, mask=None)  # fmt: skip


def test_a_derivative_through_a_noised_sum_is_refused_and_past_it_is_right():
    tx = private()
    state = tx.init(PARAMS)

    def loss(scale, state, stop=lambda x: x):
        grads = jax.tree.map(lambda g: stop(scale * g), GRADS)
        updates, _ = tx.update(grads, state, PARAMS, mask=None)
        return scale * updates["b"]

    one = jnp.array(1.0)
    refused(
        "a noised sum is of integers and has no derivative", jax.jit(jax.grad(loss)), one, state
    )
    stopped = functools.partial(loss, stop=jax.lax.stop_gradient)
    assert jax.jit(jax.grad(stopped))(one, state) == pytest.approx(float(loss(one, state)))


# Clipping.


@pytest.mark.parametrize("bound", [0.1, 3.0, 1e3])
def test_sums_of_clipped_gradients_are_those_of_optax(bound):
    zero = jax.tree.map(lambda x: jnp.concatenate([x, 0 * x[:1]]), GRADS)
    total = lambda clip: bam.clipped_sum(  # noqa: E731
        lambda _, row: row, clip, PARAMS, zero, mask=None, microbatch_size=3
    )
    ours, norms = total(bam.clip_by_l2_norm(bound))
    leaves, num_clipped = optax.per_example_global_norm_clip(jax.tree.leaves(zero), bound)
    assert_close(jax.tree.leaves(ours), leaves, rtol=1e-5, atol=1e-6)
    assert np.sum(np.asarray(norms) > bound) == num_clipped
    each = jax.vmap(lambda g: optax.clip_by_global_norm(bound).update(g, optax.EmptyState())[0])
    assert_close(ours, jax.tree.map(lambda x: x.sum(0), each(zero)), rtol=1e-5, atol=1e-6)
    by_layer, _ = optax.per_example_layer_norm_clip(jax.tree.leaves(zero), bound, uniform=True)
    layered, _ = total(bam.clip_per_layer(bound))
    assert_close(jax.tree.leaves(layered), by_layer, rtol=1e-5, atol=1e-6)
    # The control: where a gradient is clipped, the two kinds of bounds give other sums.
    assert bool(num_clipped) == (abs(layered["b"] - ours["b"]) > 1e-4)


def test_without_noise_the_private_mean_is_that_of_optax():
    theirs = optax.contrib.differentially_private_aggregate(1.0, 0.0, key=0)
    expected, _ = theirs.update(GRADS, theirs.init(PARAMS), PARAMS)
    tx = private(sigma=0.0)
    assert_close(tx.update(GRADS, tx.init(PARAMS), PARAMS, mask=None)[0], expected, rtol=1e-5)
