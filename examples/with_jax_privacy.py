"""BAM's gradient inside jax-privacy: its `clipped_fun` clips and sums the gradients of our oracle.

python -m examples.with_jax_privacy
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax_privacy import clipping

import bam


def main() -> float:
    """Returns the largest difference between jax-privacy's sum and ours, over the sum's size."""
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(5, 3)), jnp.float32), "b": jnp.zeros(3)}
    batch = (
        jnp.asarray(rng.normal(size=(8, 5)), jnp.float32),
        jnp.asarray(rng.normal(size=(8, 3)), jnp.float32),
    )

    def loss(params, example):
        x, y = example
        return 0.5 * jnp.sum((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)

    oracle = bam.bam_sam(loss, radius=0.05)
    theirs = clipping.clipped_fun(
        oracle.grad, batch_argnums=1, keep_batch_dim=False, l2_clip_norm=0.7
    )(params, batch)
    ours, _ = bam.clipped_sum(oracle.grad, bam.clip_by_l2_norm(0.7), params, batch, mask=None)
    largest = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(ours))
    differences = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), theirs, ours)
    return max(jax.tree.leaves(differences)) / largest


if __name__ == "__main__":
    print(f"jax-privacy's sum and ours differ by {main():.1e} of the sum's size")
