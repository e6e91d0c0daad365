"""A new oracle: each example's gradient at a random point near the weights.

    g_i = ∇L(θ + r u_i; x_i, y_i),   u_i uniform on the unit sphere

Its expectation is the gradient of the loss smoothed over a sphere. The direction does not depend on
the data, so this is a control for BAM, whose direction is the example's gradient.

Source: Duchi, Bartlett, Wainwright 2012, "Randomized Smoothing for Stochastic Optimization"
(arXiv 1103.4296).

Config: `name_part(config, "method", "examples.random_smoothing:oracle", radius=0.02)`
"""

import jax
import optax

import bam


def oracle(loss_fn, radius):
    """`example["key"]` is a random key for this example, new in every step."""
    radius = float(radius)
    if not radius >= 0:
        raise ValueError(f"radius must be at least 0, got {radius}")

    def grad(params, example):
        direction = optax.tree.random_like(example["key"], params, jax.random.normal)
        scale = radius / optax.tree.norm(direction)
        moved = jax.tree.map(lambda p, u: (p + scale * u).astype(p.dtype), params, direction)
        return jax.grad(loss_fn)(moved, example)

    return bam.Oracle(ascend=lambda params, previous: params, grad=grad)
