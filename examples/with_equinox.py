"""An Equinox model: its arrays are the parameters, everything else stays with the loss.

python -m examples.with_equinox
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import bam
from bam.data import datasets


def main() -> tuple[float, float]:
    """Takes ten BAM steps on 64 digits; returns the loss before and after. No noise is added."""
    model = eqx.nn.MLP(in_size=64, out_size=10, width_size=32, depth=1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, example):
        image, label = example
        logits = eqx.combine(params, static)(image)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    train = datasets.load("digits").train
    batch = (
        jnp.asarray(train.images[:64].reshape(64, 64) / 16.0, jnp.float32),
        jnp.asarray(train.labels[:64]),
    )
    oracle, clip = bam.bam_sam(loss, radius=0.02), bam.clip_by_l2_norm(1.0)
    tx = optax.sgd(1.0)
    mean_loss = jax.jit(lambda params: jnp.mean(jax.vmap(loss, (None, 0))(params, batch)))
    before, state = float(mean_loss(params)), tx.init(params)

    @jax.jit
    def step(params, state):
        total, _ = bam.clipped_sum(oracle.grad, clip, params, batch, microbatch_size=16)
        # For a private step give it noise=bam.GaussianNoise(key, σ · clip.sensitivity), with a
        # secret key that no other step has.
        updates, state = tx.update(jax.tree.map(lambda g: g / 64, total), state)
        return optax.apply_updates(params, updates), state

    for _ in range(10):
        params, state = step(params, state)
    return before, float(mean_loss(params))


if __name__ == "__main__":
    print("loss before and after ten clipped steps: {:.3f}, {:.3f}".format(*main()))
