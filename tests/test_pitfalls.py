"""Pitfalls of `docs/pitfalls.md` that no other file tests."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bam
from tests.cases import distance, refused

CLIP = bam.clip_by_l2_norm(1.0)


def private_adam(learning_rate, key):
    noised = bam.privatize(CLIP, 1.0, expected_batch_size=4, key=key)
    return optax.chain(noised, optax.adam(learning_rate))


def test_privatize_inside_inject_hyperparams_is_refused():
    """Each step would make a transform with the same key, and so add the same noise."""
    params, rows, mask = jnp.zeros(3), jnp.ones((4, 3)), jnp.ones(4, bool)
    key = bam.secret_key()
    tx = optax.inject_hyperparams(lambda rate: private_adam(rate, key))(rate=0.1)
    state = tx.init(params)
    refused("both would add the same noise", tx.update, rows, state, params, mask=mask)

    # The control: injected into the optimizer alone.
    tx = optax.chain(
        bam.privatize(CLIP, 1.0, expected_batch_size=4, key=bam.secret_key()),
        optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    )
    updates, _ = tx.update(rows, tx.init(params), params, mask=mask)
    assert np.isfinite(updates).all()


def test_scanned_steps_of_bfloat16_parameters_need_a_state_in_float32():
    params = jnp.zeros(3, jnp.bfloat16)
    rows, mask = jnp.ones((4, 3)), jnp.ones(4, bool)
    tx = private_adam(0.1, bam.secret_key())
    state = tx.init(params)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(rows, state, params, mask=mask)
        return (optax.apply_updates(params, updates), state), None

    with pytest.raises(TypeError, match=r"bfloat16\[3\] .* float32\[3\]"):
        jax.lax.scan(step, (params, state), length=2)
    state = optax.tree.map_params(tx, lambda x: x.astype(jnp.float32), state)
    (params, _), _ = jax.lax.scan(step, (params, state), length=2)
    assert params.dtype == jnp.bfloat16 and np.isfinite(params.astype(np.float32)).all()


def test_rows_that_are_mixed_move_the_sum_beyond_the_sensitivity():
    """Each row is added to the next, so that two gradients change with one example."""
    rows = np.zeros((4, 5), np.float32)
    rows[1] = 1.0
    without = rows.copy()
    without[1] = 0.0
    mask = jnp.ones(4, bool)

    def moved(change):
        changed = [jnp.asarray(change(x)) for x in (rows, without)]
        given = lambda _, row: row  # noqa: E731
        totals = [bam.clipped_sum(given, CLIP, jnp.zeros(5), x, mask=mask) for x in changed]
        return distance(*(total for total, _ in totals))

    assert moved(lambda x: x + np.roll(x, 1, axis=0)) > 1.99
    assert moved(lambda x: x + x) <= 1 + 1e-5  # the control: each row by itself
