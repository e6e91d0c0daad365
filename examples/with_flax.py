"""`bam.privatize` in a plain optax chain, in a Flax loop of ten lines.

python -m examples.with_flax
"""

import secrets

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import bam
from bam.core import sampling
from bam.data import datasets

BATCH, STEPS, DELTA, EPSILON = 256, 60, 1e-5, 3.0


def main() -> float:
    """Trains a small network on digits with DP-SGD, and returns its test accuracy."""
    data = datasets.load("digits")
    images = jnp.asarray(data.train.images.reshape(-1, 64) / 16.0)
    labels = jnp.asarray(data.train.labels)
    model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])

    def loss(params, image, label):
        logits = model.apply(params, image)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    q = BATCH / len(labels)
    sigma = bam.noise_multiplier(
        target_epsilon=EPSILON, delta=DELTA, sampling_prob=q, num_steps=STEPS, accountant="rdp"
    )
    params = model.init(jax.random.key(0), images[0])
    clip = bam.clip_by_l2_norm(1.0)
    # Secret, and new in every run, because whoever knows them can remove the noise.
    noise_key, sampling_seed = bam.secret_key(), secrets.randbits(256)
    capacity = sampling.usual_capacity(len(labels), q)
    tx = optax.chain(bam.privatize(clip, sigma, BATCH, key=noise_key), optax.adam(1e-2))
    state = tx.init(params)

    @jax.jit
    def step(params, state, batch):
        grads = jax.vmap(jax.grad(loss), (None, 0, 0))(params, *batch.take((images, labels)))
        updates, state = tx.update(grads, state, params, mask=batch.mask)
        return optax.apply_updates(params, updates), state

    for t in range(STEPS):
        rows = sampling.poisson_sample(sampling_seed, t, len(labels), q)
        batch = sampling.pad(rows, capacity, sampling_seed, t)
        params, state = step(params, state, batch)
    logits = model.apply(params, jnp.asarray(data.test.images.reshape(-1, 64) / 16.0))
    return float(np.mean(np.argmax(logits, axis=-1) == data.test.labels))


if __name__ == "__main__":
    print(f"({EPSILON}, {DELTA})-DP on digits: test accuracy {main():.1%}")
