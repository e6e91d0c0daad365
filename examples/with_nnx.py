"""A Flax NNX model, trained privately on all devices: `bam.as_functions` makes functions of it.

After a crash, the same command with a FOLDER resumes the run.

python -m examples.with_nnx [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import bam
from bam.data import datasets


class Mlp(nnx.Module):
    """Two layers in NNX."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 32, rngs=rngs)
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits `[n, 10]` of images `[n, 64]`."""
        return self.head(nnx.tanh(self.hidden(x)))


def main(folder: Path) -> tuple[float, float]:
    """Trains on digits for ten epochs, and returns the spent ε and the test accuracy."""
    train, test = datasets.load("digits")[1:3]
    flat = lambda images: jnp.asarray(images.reshape(len(images), 64) / 16.0, jnp.float32)  # noqa: E731
    model = bam.as_functions(Mlp(nnx.Rngs(0)), (64,))
    private = bam.PrivateTraining(
        num_examples=len(train.labels), expected_batch_size=256, num_epochs=10,
        epsilon=3.0, delta=1e-5, clip=bam.clip_by_l2_norm(1.0),
        mesh=jax.sharding.Mesh(jax.devices(), ("devices",)), folder=folder,
    )  # fmt: skip
    tx = optax.chain(private.gradient(bam.dp_sgd(model.loss)), optax.sgd(2.0))
    params = model.init(jax.random.key(0))
    params, state = private.restore((params, tx.init(params)))
    # An example's image is [views, features], here with one view.
    data = {"image": flat(train.images)[:, None], "label": jnp.asarray(train.labels)}
    for batch in private.batches(data):
        updates, state = tx.update(batch, state, params)
        params = optax.apply_updates(params, updates)
        if private.steps_begun % 5 == 0:
            private.save(folder, (params, state))
    private.save(folder, (params, state))
    right = model.logits(params, flat(test.images)).argmax(-1) == test.labels
    return private.epsilon_spent, float(right.mean())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as nowhere:
        path = Path(sys.argv[1] if len(sys.argv) > 1 else nowhere + "/run")
        print("epsilon {:.4f}, test accuracy {:.3f}".format(*main(path)))
