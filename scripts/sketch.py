"""Figure 7: Theorem 1's decomposition, of a real batch of a model with two parameters."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn import datasets

import bam
from bam import diagnostics, plotting

FEATURES = ("mean radius", "mean texture")
THETA = (-0.5, 0.5)
CLIP_NORM = 0.5
NUM_EXAMPLES = 24


def draw(path: Path) -> list[dict[str, Any]]:
    """Draws gradients, clipped gradients and their means, and returns the numbers.

    The model is logistic regression of the breast-cancer data on two features, standardised.

    Args:
      path: without extension; PNG and SVG are written.

    Returns:
      A row per arrow: its name and its two coordinates.
    """
    data = datasets.load_breast_cancer()
    columns = [list(data.feature_names).index(name) for name in FEATURES]
    features = data.data[:, columns]
    features = (features - features.mean(axis=0)) / features.std(axis=0)
    chosen = np.random.default_rng(0).choice(len(features), NUM_EXAMPLES, replace=False)
    batch = jnp.asarray(features[chosen]), jnp.asarray(data.target[chosen], float)

    def loss(theta: jax.Array, example: Any) -> jax.Array:
        x, y = example
        return jax.nn.softplus(x @ theta) - y * (x @ theta)

    theta, clip = jnp.array(THETA), bam.clip_by_l2_norm(CLIP_NORM)
    gradients = jax.vmap(jax.grad(loss), (None, 0))(theta, batch)
    clipped = jax.vmap(lambda g: clip.update(g, clip.init(theta))[0])(gradients)
    means = diagnostics.means(jax.grad(loss), clip, theta, batch)
    bias = diagnostics.bias(means.clipped, means.gradient)
    shortened = bias.magnitude * means.gradient
    arrows = {
        "ĝ": means.gradient,
        "ĝ_clip = a·ĝ + c": means.clipped,
        "a·ĝ": shortened,
        "c": means.clipped - shortened,
    }
    for suffix in (".png", ".svg"):
        plotting.decomposition(
            np.asarray(gradients),
            CLIP_NORM,
            {name: np.asarray(arrow) for name, arrow in arrows.items()},
            path.with_suffix(suffix),
            f"Clipping {NUM_EXAMPLES} gradients at C = {CLIP_NORM:g}: a = {bias.magnitude:.2f}, "
            f"‖bias‖ = {bias.relative_bias:.0%} of ‖ĝ‖, cos(ĝ_clip, ĝ) = {bias.cosine:.2f}",
        )
    rows = [(f"g_{i}", g) for i, g in enumerate(gradients)]
    rows += [(f"clip(g_{i})", g) for i, g in enumerate(clipped)]
    return [
        {"arrow": name, "first": float(arrow[0]), "second": float(arrow[1])}
        for name, arrow in [*rows, *arrows.items()]
    ]
