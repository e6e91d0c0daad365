"""Pictures in two dimensions: Theorem 1's decomposition of a batch (figure 7), and descents."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn import datasets

import bam
from bam.cli import plotting
from bam.cli.plotting import plt
from bam.training import diagnostics

FEATURES = ("mean radius", "mean texture")
THETA = (-0.5, 0.5)
CLIP_NORM = 0.5
NUM_EXAMPLES = 24
# Of the descents, all without noise.
DESCENT_START = (1.0, 1.5)
DESCENT_PENALTY, DESCENT_RATE, DESCENT_STEPS = 0.5, 0.5, 400


def draw(path: Path) -> list[dict[str, Any]]:
    """Draws gradients, clipped gradients and their means, and returns the numbers, by arrow.

    The model is logistic regression of the breast-cancer data on two features, standardised.
    """
    batch = _batch()
    theta, clip = jnp.array(THETA), bam.clip_by_l2_norm(CLIP_NORM)
    gradients = np.asarray(jax.vmap(jax.grad(_loss), (None, 0))(theta, batch))
    clipped = np.asarray(jax.vmap(lambda g: clip.update(g, clip.init(theta))[0])(gradients))
    means = diagnostics.means(jax.grad(_loss), clip, theta, batch)
    bias = diagnostics.bias(means.clipped, means.gradient)
    shortened = bias.magnitude * means.gradient
    arrows = {
        "ĝ": np.asarray(means.gradient),
        "ĝ_clip = a·ĝ + c": np.asarray(means.clipped),
        "a·ĝ": np.asarray(shortened),
        "c": np.asarray(means.clipped - shortened),
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.9), layout="constrained")
    grey, blue = (plotting.style_of(name)["color"] for name in ("non_private", "bam_sam"))
    for g, c in zip(gradients, clipped, strict=True):
        left.plot([c[0], g[0]], [c[1], g[1]], color=grey, linewidth=1, linestyle=(0, (2, 2)))
        left.plot([0, c[0]], [0, c[1]], color=blue, linewidth=1, alpha=0.5)
    left.scatter(*gradients.T, s=16, color=grey, label="gradient g_i", zorder=3)
    left.scatter(*clipped.T, s=16, color=blue, label="clipped", zorder=3)
    left.add_patch(plt.Circle((0, 0), CLIP_NORM, fill=False, label=f"norm C = {CLIP_NORM:g}"))
    left.set_title("a batch", fontsize=11)
    left.set_ylabel("second parameter")
    colors = ("#000000", blue, "#E69F00", "#CC79A7")
    for (name, arrow), width, color in zip(arrows.items(), (5, 5, 10, 5), colors, strict=True):
        start = arrows["a·ĝ"] if name == "c" else np.zeros(2)
        right.quiver(
            *start, *arrow, color=color, label=name, angles="xy", scale_units="xy", scale=1,
            width=width / 800, zorder=2 if width == 10 else 3,
        )  # fmt: skip
    ends = np.array([np.zeros(2), arrows["ĝ"], arrows["ĝ_clip = a·ĝ + c"]])
    right.scatter(*ends.T, s=0)  # arrows alone do not widen the axes
    right.margins(0.15)
    right.set_title("its mean, clipped: shorter (a) and turned (c)", fontsize=11)
    for axis in (left, right):
        axis.set_aspect("equal", adjustable="datalim")
        axis.legend(frameon=False, fontsize=9, loc="best")
        axis.set_xlabel("first parameter")
    title = f"Clipping {NUM_EXAMPLES} gradients at C = {CLIP_NORM:g}: a = {bias.magnitude:.2f}, "
    title += f"‖bias‖ = {bias.relative_bias:.0%} of ‖ĝ‖, cos(ĝ_clip, ĝ) = {bias.cosine:.2f}"
    figure.suptitle(title, fontsize=12)
    plotting.save(figure, path)
    rows = [(f"g_{i}", g) for i, g in enumerate(gradients)]
    rows += [(f"clip(g_{i})", g) for i, g in enumerate(clipped)]
    return [
        {"arrow": name, "first": float(arrow[0]), "second": float(arrow[1])}
        for name, arrow in [*rows, *arrows.items()]
    ]


def draw_descent(path: Path) -> list[dict[str, Any]]:
    """Draws where gradient descent, DP-SGD and BAM go on that batch, all without noise.

    Beside their paths over the loss stand the gradients where each one ends. Returns a row per
    method: its last weights, its mean loss, the share of gradients that are clipped there, ‖bias‖
    and ‖ĝ‖.
    """
    batch, clip = _batch(), bam.clip_by_l2_norm(CLIP_NORM)
    unclipped, exact = bam.clip_by_l2_norm(1e6), bam.bam_exact(_loss, DESCENT_PENALTY)
    methods = {
        "not clipped": (bam.dp_sgd(_loss), unclipped, "non_private"),
        "DP-SGD": (bam.dp_sgd(_loss), clip, "dp_sgd"),
        f"BAM, λ = {DESCENT_PENALTY:g}": (exact, clip, "bam_sam"),
    }
    figure, axes = plt.subplots(1, 4, figsize=(12.5, 3.9), layout="constrained")
    left, *right = axes
    side = np.linspace(-3.5, 2, 80), np.linspace(-2.5, 2, 80)
    grid = np.stack(np.meshgrid(*side), axis=-1)
    losses = np.asarray(jax.vmap(jax.vmap(lambda t: _mean_loss(t, batch)))(jnp.asarray(grid)))
    left.contour(grid[..., 0], grid[..., 1], losses, 18, colors="#999999", linewidths=0.6)
    rows, limit = [], 0.0
    for axis, (name, (oracle, bound, style)) in zip(right, methods.items(), strict=True):
        sum_of = jax.jit(
            lambda t, o=oracle, b=bound: bam.clipped_sum(o.grad, b, t, batch, mask=None)[0]
        )
        theta = jnp.array(DESCENT_START)
        thetas = [theta]
        for _ in range(DESCENT_STEPS):
            theta = theta - DESCENT_RATE * sum_of(theta) / NUM_EXAMPLES
            thetas.append(theta)
        cloud = np.asarray(jax.vmap(jax.grad(_loss), (None, 0))(theta, batch))
        limit = max(limit, 1.1 * float(np.abs(cloud).max()))
        color = plotting.style_of(style)["color"]
        left.plot(*np.asarray(thetas).T, color=color, linewidth=1.8, label=name)
        left.scatter(*np.asarray(theta), s=42, color=color, zorder=3)
        axis.scatter(*cloud.T, s=14, color=color)
        axis.add_patch(plt.Circle((0, 0), CLIP_NORM, fill=False, linewidth=1))
        share = np.mean(np.linalg.norm(cloud, axis=1) > CLIP_NORM)
        axis.set_title(f"{name}: gradients at its end,\n{share:.0%} longer than C", fontsize=10)
        axis.set_xlabel("first parameter")
        axis.set_aspect("equal")
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
    for axis in right:
        axis.set(xlim=(-limit, limit), ylim=(-limit, limit))
    left.set_title("weights, from one start,\nover the loss", fontsize=10)
    left.set_aspect("equal", adjustable="box")
    left.set(xlabel="first parameter", ylabel="second parameter")
    left.legend(fontsize=8, loc="upper left")
    right[0].set_ylabel("second parameter")
    plotting.save(figure, path)
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
