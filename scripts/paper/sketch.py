"""Pictures in two dimensions: Theorem 1's decomposition of a batch (figure 7), and descents."""

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
# Of the descents, all without noise.
DESCENT_START = (1.0, 1.5)
DESCENT_CLIP_NORM, DESCENT_PENALTY, DESCENT_RATE, DESCENT_STEPS = 0.5, 0.5, 0.5, 400


def draw(path: Path) -> list[dict[str, Any]]:
    """Draws gradients, clipped gradients and their means, and returns the numbers.

    The model is logistic regression of the breast-cancer data on two features, standardised.

    Args:
      path: without extension; PNG and SVG are written.

    Returns:
      A row per arrow: its name and its two coordinates.
    """
    batch = _batch()
    theta, clip = jnp.array(THETA), bam.clip_by_l2_norm(CLIP_NORM)
    gradients = jax.vmap(jax.grad(_loss), (None, 0))(theta, batch)
    clipped = jax.vmap(lambda g: clip.update(g, clip.init(theta))[0])(gradients)
    means = diagnostics.means(jax.grad(_loss), clip, theta, batch)
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


def draw_descent(path: Path) -> list[dict[str, Any]]:
    """Draws where gradient descent, DP-SGD and BAM go on that batch, all without noise.

    Args:
      path: without extension; PNG and SVG are written.

    Returns:
      A row per method: its last weights, its mean loss, the share of gradients that are clipped
      there, ‖bias‖ and ‖ĝ‖.
    """
    batch, clip = _batch(), bam.clip_by_l2_norm(DESCENT_CLIP_NORM)
    unclipped = bam.clip_by_l2_norm(1e6)
    methods = {
        "not clipped": (bam.dp_sgd(_loss), unclipped),
        "DP-SGD": (bam.dp_sgd(_loss), clip),
        f"BAM, λ = {DESCENT_PENALTY:g}": (bam.bam_exact(_loss, DESCENT_PENALTY), clip),
    }
    paths, clouds, rows = {}, {}, []
    for name, (oracle, bound) in methods.items():
        sum_of = jax.jit(lambda t, o=oracle, b=bound: bam.clipped_sum(o.grad, b, t, batch)[0])
        theta = jnp.array(DESCENT_START)
        thetas = [theta]
        for _ in range(DESCENT_STEPS):
            theta = theta - DESCENT_RATE * sum_of(theta) / NUM_EXAMPLES
            thetas.append(theta)
        paths[name] = np.asarray(thetas)
        clouds[name] = np.asarray(jax.vmap(jax.grad(_loss), (None, 0))(theta, batch))
        means = diagnostics.means(jax.grad(_loss), clip, theta, batch)
        bias = diagnostics.bias(means.clipped, means.gradient)
        rows.append(
            {
                "method": name,
                "first": float(theta[0]),
                "second": float(theta[1]),
                "loss": float(_mean_loss(theta, batch)),
                "fraction_clipped": float(means.fraction_clipped),
                "bias": float(bias.bias_norm),
                "gradient": float(bias.gradient_norm),
            }
        )
    side = np.linspace(-3.5, 2, 80), np.linspace(-2.5, 2, 80)
    grid = np.stack(np.meshgrid(*side), axis=-1)
    losses = jax.vmap(jax.vmap(lambda t: _mean_loss(t, batch)))(jnp.asarray(grid))
    for suffix in (".png", ".svg"):
        plotting.descents(
            grid, np.asarray(losses), paths, clouds, DESCENT_CLIP_NORM, path.with_suffix(suffix)
        )
    return rows


def _batch() -> tuple[jax.Array, jax.Array]:
    """Examples of the breast-cancer data: two features, standardised, and the label."""
    data = datasets.load_breast_cancer()
    columns = [list(data.feature_names).index(name) for name in FEATURES]
    features = data.data[:, columns]
    features = (features - features.mean(axis=0)) / features.std(axis=0)
    chosen = np.random.default_rng(0).choice(len(features), NUM_EXAMPLES, replace=False)
    return jnp.asarray(features[chosen]), jnp.asarray(data.target[chosen], float)


def _loss(theta: jax.Array, example: Any) -> jax.Array:
    x, y = example
    return jax.nn.softplus(x @ theta) - y * (x @ theta)


def _mean_loss(theta: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean(jax.vmap(_loss, (None, 0))(theta, batch))
