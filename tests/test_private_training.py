"""The object that couples sampler, clip, noise and ε: what cannot be done wrong with it."""

import copy
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bam
from bam.privacy.plan import BudgetExhaustedError
from tests.cases import recomputed

N, DATA = 60, np.linspace(-1, 1, 120, dtype=np.float32).reshape(60, 2)
ORACLE = bam.dp_sgd(lambda w, x: 0.5 * jnp.sum((w - x) ** 2))


def training(**changes):
    settings = {
        "num_examples": N, "expected_batch_size": 12, "num_epochs": 1, "epsilon": 3.0,
        "delta": 1e-3, "clip": bam.clip_by_l2_norm(1.0), "seed": 0,
    }  # fmt: skip
    return bam.PrivateTraining(**(settings | changes))


def begun(**changes):
    private = training(**changes)
    tx = private.gradient(ORACLE)
    return private, tx, tx.init(jnp.zeros(2)), private.batches(DATA)


def test_a_step_is_the_sum_that_the_library_makes_of_the_plans_batch():
    private, tx, state, batches = begun()
    batch, plan, clip = next(batches), private.plan, bam.clip_by_l2_norm(1.0)
    expected = plan.batch(0, 1)
    np.testing.assert_array_equal(batch.mask, expected.mask)
    np.testing.assert_array_equal(
        batch.examples[expected.mask], DATA[expected.indices[expected.mask]]
    )
    assert not batch.examples[~expected.mask].any()
    noise = bam.gaussian_noise(clip, plan.noise_multiplier, bam.seeded_key(0), 0)
    noised, _ = bam.clipped_sum(
        ORACLE.grad, clip, jnp.zeros(2), batch.examples, mask=jnp.asarray(batch.mask), noise=noise
    )
    found, _ = tx.update(batch, state, jnp.zeros(2))
    np.testing.assert_array_equal(found, noised / 12)


def test_rows_of_jax_and_of_numpy_are_the_same_and_epsilon_is_that_of_the_batches_drawn():
    private, other = training(), training()
    assert private.epsilon_spent == 0
    for ours, theirs in zip(private.batches(DATA), other.batches(jnp.asarray(DATA)), strict=True):
        np.testing.assert_array_equal(ours.examples, theirs.examples)
    assert private.steps_begun == private.plan.num_steps == 5
    assert private.epsilon_spent == private.plan.epsilon <= 3
    with pytest.raises(BudgetExhaustedError, match="covers 5 steps"):
        private.batches(DATA)


def test_a_secret_training_is_never_the_same_twice():
    found = set()
    for _ in range(4):
        _, tx, state, batches = begun(seed=None)
        found.add(np.asarray(tx.update(next(batches), state, jnp.zeros(2))[0]).tobytes())
    assert len(found) == 4


def used_twice(tx, state, batches):
    batch = next(batches)
    return batch, tx.update(batch, state, jnp.zeros(2))[1]


def started_over(tx, state, batches):
    used_twice(tx, state, batches)
    return next(batches), state


def of_another_training(tx, state, batches):
    return next(training(seed=1).batches(DATA)), state


@pytest.mark.parametrize("wrong", [used_twice, started_over, of_another_training])
def test_what_would_repeat_noise_or_spend_elsewhere_is_an_error_and_nan_where_traced(wrong):
    _, tx, state, batches = begun()
    batch, state = wrong(tx, state, batches)
    with pytest.raises(ValueError, match="another training, or not the next one"):
        tx.update(batch, state, jnp.zeros(2))
    assert np.isnan(jax.jit(tx.update)(batch, state, jnp.zeros(2))[0]).all()


def test_what_is_in_order_is_finite_where_traced_and_equal():  # the control
    _, tx, state, batches = begun()
    step, other, params = jax.jit(tx.update), state, jnp.zeros(2)
    for batch in batches:
        gradient, state = step(batch, state, params)
        eager, other = tx.update(batch, other, params)
        np.testing.assert_array_equal(gradient, eager)
        assert np.isfinite(gradient).all()


def test_a_batch_is_used_once_whatever_the_state_and_a_state_is_made_once():
    private, tx, state, batches = begun()
    with pytest.raises(RuntimeError, match="a second one has the same noise"):
        tx.init(jnp.zeros(2))
    batch = next(batches)
    _, after = tx.update(batch, state, jnp.zeros(2))
    with pytest.raises(ValueError, match="the batch of step 1 was used before"):
        tx.update(batch, state, jnp.ones(2))  # at other weights: the difference has no noise
    tx.update(next(batches), after, jnp.zeros(2))  # the control
    assert private.steps_begun == 2


def test_noise_that_a_vmap_over_weights_would_add_twice_is_refused():
    _, tx, state, batches = begun()
    batch = next(batches)
    with pytest.raises(ValueError, match="the same noise would be added more than once"):
        jax.vmap(tx.update, (None, None, 0))(batch, state, jnp.ones((2, 2)))
    constant = jax.jit(lambda w: tx.update(batch, state, w)[0])
    with pytest.raises(ValueError, match="the same noise would be added more than once"):
        constant(jnp.zeros(2))


def test_a_state_cannot_be_made_again_or_traced_and_a_training_not_copied_or_transformed_twice():
    private, tx, _, batches = begun()
    with pytest.raises(RuntimeError, match="outside of jit"):
        jax.jit(tx.init)(jnp.zeros(2))
    next(batches)
    with pytest.raises(RuntimeError, match="started over after 1 steps"):
        tx.init(jnp.zeros(2))
    with pytest.raises(RuntimeError, match="makes one transform"):
        private.gradient(ORACLE)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            copied(private)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_examples": 12, "expected_batch_size": 60}, "from 1 to the number"),  # l for N
        ({"epsilon": math.inf}, "epsilon must be positive and finite"),
        ({"delta": 0.5}, "below 1/N"),
        ({"clip": optax.identity()}, "declares no bound"),
        ({"num_epochs": 0}, "num_steps"),
        ({"mechanism": "shuffle"}, "unknown mechanism"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_drawn(changes, message):
    with pytest.raises(ValueError, match=message):
        training(**changes)


def test_data_of_another_size_and_batches_of_ones_own_are_refused(without_the_tests_type_checks):
    private, tx, state, _ = begun()
    with pytest.raises(ValueError, match="plan is for 60 examples"):
        private.batches(DATA[:59])
    for batch in (DATA, bam.sampling.PaddedBatch(np.arange(3, dtype=np.int32), np.ones(3, bool))):
        with pytest.raises(TypeError, match=r"PrivateTraining\.batches"):
            tx.update(batch, state, jnp.zeros(2))
    assert private.steps_begun == 0


@pytest.mark.parametrize("mechanism", ["banded", "full_batch", "random_allocation"])
def test_every_mechanism_of_batches_trains(mechanism):
    size = N if mechanism == "full_batch" else 12
    options = {"bands": 2} if mechanism == "banded" else {}
    private, tx, state, batches = begun(
        mechanism=mechanism, mechanism_options=options, accountant="pld",
        expected_batch_size=size, num_epochs=2,
    )  # fmt: skip
    for batch in batches:
        gradient, state = tx.update(batch, state, jnp.zeros(2))
        assert np.isfinite(gradient).all()
    assert private.epsilon_spent == private.plan.epsilon


def test_sat_ascends_along_the_last_private_gradient():
    private = training()
    tx = private.gradient(bam.dp_sat(lambda w, x: 0.5 * jnp.sum((w - x) ** 2), radius=0.5))
    params = jnp.zeros(2)
    state = tx.init(params)
    batches = private.batches(DATA)
    first, state = tx.update(next(batches), state, params)
    np.testing.assert_array_equal(state.previous, first)
    second, _ = tx.update(next(batches), state, params)
    _, plain, other, drawn = begun()
    _, other = plain.update(next(drawn), other, params)
    assert not np.array_equal(second, plain.update(next(drawn), other, params)[0])


def test_the_statement_can_be_recomputed_and_says_of_a_seed_that_it_protects_nobody(tmp_path):
    private = training()
    private.write_statement(tmp_path / "PRIVACY.md", "sixty points")
    text = (tmp_path / "PRIVACY.md").read_text(encoding="utf-8")
    assert "trained on sixty points" in text and "nominal" in text
    assert f"{private.plan.noise_multiplier}" in text and "steps begun" in text
    assert "this folder" not in text
    assert recomputed(text) == pytest.approx(private.plan.epsilon, rel=1e-6)
    secret = training(seed=None)
    secret.write_statement(tmp_path / "secret.md", "sixty points")
    assert "nominal" not in (tmp_path / "secret.md").read_text(encoding="utf-8")
