"""DP-AdamBC: Adam with the noise's variance subtracted from its second moment.

    m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²,   Φ = (σ S / l)²
    θ ← θ − η m̂ / √max(v̂ − Φ, γ²)

E[g²] is the squared gradient plus Φ, and Φ is public. Without the correction Adam divides by little
more than the noise, and becomes SGD with momentum.

Source: Tang, Shpilevskiy, Lécuyer 2024, "DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless You
Apply Bias Correction)" (arXiv 2312.14334), Algorithm 1.

Config: `name_part(config, "optimizer", "examples.dp_adam_bc:optimizer", learning_rate=2e-3)`
"""

import jax
import jax.numpy as jnp
import optax


def optimizer(plan, clip_norm, sensitivity, learning_rate, b1=0.9, b2=0.999, floor=5e-4):
    """Returns Adam with a bias-corrected second moment.

    `floor` is γ, the least divisor.
    """
    del clip_norm
    noise_variance = (plan.noise_multiplier * sensitivity / plan.expected_batch_size) ** 2

    def init(params):
        zeros = optax.tree.zeros_like(params)
        return {"count": jnp.zeros((), jnp.int32), "first": zeros, "second": zeros}

    def update(grads, state, params=None):
        count = state["count"] + 1
        first = optax.tree.update_moment(grads, state["first"], b1, 1)
        second = optax.tree.update_moment(grads, state["second"], b2, 2)
        mean = optax.tree.bias_correction(first, b1, count)
        square = optax.tree.bias_correction(second, b2, count)

        def step(m, v):
            return -learning_rate * m / jnp.sqrt(jnp.maximum(v - noise_variance, floor**2))

        updates = jax.tree.map(step, mean, square)
        return updates, {"count": count, "first": first, "second": second}

    return optax.GradientTransformation(init, update)
