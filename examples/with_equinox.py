"""An Equinox model: its arrays are the parameters, and the loss keeps the rest of the model.

python -m examples.with_equinox
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import bam
from bam.data import datasets

NUM_STEPS = 10


def main() -> tuple[float, float]:
    """Takes ten private BAM steps on all digits, and returns the loss before and after."""
    model = eqx.nn.MLP(in_size=64, out_size=10, width_size=32, depth=1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, example):
        image, label = example
        logits = eqx.combine(params, static)(image)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    train = datasets.load("digits").train
    num_examples = len(train.labels)
    batch = (
        jnp.asarray(train.images.reshape(num_examples, 64) / 16.0, jnp.float32),
        jnp.asarray(train.labels),
    )
    sigma = bam.noise_multiplier(
        target_epsilon=3.0, delta=1e-5, sampling_prob=1.0, num_steps=NUM_STEPS
    )
    key = bam.secret_key()
    oracle, clip = bam.bam_sam(loss, radius=0.02), bam.clip_by_l2_norm(1.0)
    tx = optax.sgd(1.0)
    mean_loss = jax.jit(lambda params: jnp.mean(jax.vmap(loss, (None, 0))(params, batch)))
    before, state = float(mean_loss(params)), tx.init(params)

    @jax.jit
    def step(params, state, key, t):
        noise = bam.gaussian_noise(clip, sigma, key, step=t)
        total, _ = bam.clipped_sum(oracle.grad, clip, params, batch, mask=None, noise=noise)
        updates, state = tx.update(jax.tree.map(lambda g: g / num_examples, total), state)
        return optax.apply_updates(params, updates), state

    for t in range(NUM_STEPS):
        params, state = step(params, state, key, t)
    return before, float(mean_loss(params))


if __name__ == "__main__":
    print("loss before and after ten private steps: {:.3f}, {:.3f}".format(*main()))
