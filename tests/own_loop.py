"""A tiny training by a user's own loop, for tests.

As a command, it is a training that a test kills.

python -m tests.own_loop FOLDER
"""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

import bam

DATA = np.linspace(-1, 1, 120, dtype=np.float32).reshape(60, 2)
PLAN = {
    "num_examples": 60, "expected_batch_size": 12, "num_epochs": 2, "epsilon": 3.0, "delta": 1e-3,
    "accountant": "rdp", "clip": bam.clip_by_l2_norm(1.0),
}  # fmt: skip
NUM_STEPS = 10


def transform(private, loss=lambda w, x: 0.5 * jnp.sum((w - x) ** 2)):
    """The transform and `(params, state)` before the first step."""
    tx = optax.chain(private.gradient(bam.dp_sat(loss, radius=0.1)), optax.adam(0.1))
    return tx, (jnp.zeros(2), tx.init(jnp.zeros(2)))


def begin(**changes):
    """A training, its transform, and what it begins with."""
    private = bam.PrivateTraining(**(PLAN | changes))
    return private, *transform(private)


def resume(folder, restored=True, **changes):
    """The same of a folder."""
    private = bam.PrivateTraining.resume(folder, **(PLAN | changes))
    tx, tree = transform(private)
    return private, tx, private.restore(tree) if restored else tree


def take(private, tx, tree, num, noise=None):
    """Takes `num` steps, or as many as are left.

    The bytes of the gradients are appended to `noise`.
    """
    for _, batch in zip(range(num), private.batches(DATA), strict=False):
        params, state = tree
        updates, state = tx.update(batch, state, params)
        tree = optax.apply_updates(params, updates), state
        if noise is not None:
            noise.append(np.asarray(state[0].previous).tobytes())
    return tree


def main(folder):
    """Begins or resumes a training, and writes the noise of each step into a log.

    Every fourth step is saved.
    """
    plan = PLAN | {"num_epochs": 20}
    run = folder / "run"
    private = bam.PrivateTraining(**plan, folder=run)
    tx, tree = transform(private, lambda w, x: 0.0 * jnp.sum(w * x))
    tree = private.restore(tree)
    with (folder / "log").open("ab", buffering=0) as log:
        for batch in private.batches(DATA):
            params, state = tree
            updates, state = tx.update(batch, state, params)
            log.write(np.asarray(state[0].previous).tobytes())
            tree = optax.apply_updates(params, updates), state
            if batch.step % 4 == 0:
                private.save(run, tree)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
