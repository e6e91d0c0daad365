"""A training by a loop of one's own that is killed and resumed never spends more than its plan."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bam
from bam import files
from bam.privacy.ledger import Ledger

N, DATA = 60, np.linspace(-1, 1, 120, dtype=np.float32).reshape(60, 2)
PLAN = {
    "num_examples": N, "expected_batch_size": 12, "num_epochs": 2, "epsilon": 3.0, "delta": 1e-3,
    "accountant": "rdp", "clip": bam.clip_by_l2_norm(1.0),
}  # fmt: skip
ORACLE = bam.dp_sat(lambda w, x: 0.5 * jnp.sum((w - x) ** 2), radius=0.1)
STEPS = 10


class KilledError(BaseException):
    """Stands for the end of the process: nothing in `bam` handles it."""


def begin(folder, **changes):
    private = bam.PrivateTraining(**(PLAN | changes))
    return private, *started(private, folder)


def started(private, folder=None):
    tx = optax.chain(private.gradient(ORACLE), optax.adam(0.1))
    params = jnp.zeros(2)
    tree = params, tx.init(params)
    return tx, tree if folder is None else restored(private, tree, folder)


def restored(private, tree, folder):
    private.save(folder, tree)
    return tree


def resume(folder, **changes):
    private = bam.PrivateTraining.resume(folder, **(PLAN | changes))
    tx, tree = started(private)
    return private, tx, private.restore(tree)


def steps(private, tx, tree, num, seen=None):
    """Takes so many steps; returns the tree."""
    for _, batch in zip(range(num), private.batches(DATA)):
        params, state = tree
        updates, state = tx.update(batch, state, params)
        tree = optax.apply_updates(params, updates), state
        if seen is not None:
            seen.append(np.asarray(state[0].previous).tobytes())
    return tree


def test_a_seeded_training_resumes_to_the_same_bits(tmp_path):
    whole = steps(*begin(tmp_path / "whole", seed=3), STEPS)
    private, tx, tree = begin(tmp_path / "part", seed=3)
    tree = steps(private, tx, tree, 4)
    private.save(tmp_path / "part", tree)
    steps(private, tx, tree, 3)  # lost, and taken again
    private.close()
    private, tx, tree = resume(tmp_path / "part", seed=3)
    assert private.steps_begun == 4
    again = steps(private, tx, tree, STEPS)
    assert jax.tree.all(jax.tree.map(np.array_equal, whole, again))
