"""Adaptive clipping: C follows a quantile of the gradients' norms, estimated privately.

Each example adds its gradient, clipped to C_t and divided by C_t, and one bit: whether its norm was
at most C_t. Both are one vector of bounded length, noised once, so the run's (ε, δ) is that of its
plan. The cost is the longer vector: S = √(1 + w²/4) instead of 1, so the gradient's noise is S
times larger. The weight w follows from the noise that b̃ may have (`count_noise`).

    b̃ = ½ + (1/w l) (Σ w (1[‖g_i‖ ≤ C_t] − ½) + noise),    C_{t+1} = C_t exp(−η (b̃ − quantile))

The first C_t is the config's `clip_norm`, a public guess of a gradient's norm. The mean is divided
by C_t and multiplied by `clip_norm`, so the size of a step does not depend on C_t, which may change
a hundredfold in a run. The source clips changes of weights, and multiplies by C_t. With
`per_clip_norm=False` so does this clip, and then diagnostics of norms (bias, share clipped) hold.

Source: Andrew, Thakkar, McMahan, Ramaswamy 2021, "Differentially Private Learning with Adaptive
Clipping" (arXiv 1905.03871), Algorithm 1 and Theorem 1.

Config: `name_part(config, "clip", "examples.adaptive_clipping:clip", quantile=0.5)`
"""

import math

import jax
import jax.numpy as jnp
import optax

import bam


def clip(plan, clip_norm, quantile=0.5, learning_rate=0.2, count_noise=0.05, per_clip_norm=True):
    """Clips to a norm that adapts.

    `count_noise` is the standard deviation of the noise in b̃.
    """
    quantile, learning_rate = float(quantile), float(learning_rate)
    if not 0 < quantile < 1 or not count_noise > 0:
        raise ValueError("quantile must be between 0 and 1, count_noise positive")
    # σ S / (w l) = count_noise, with S² = 1 + w²/4
    ratio = plan.noise_multiplier / (count_noise * plan.expected_batch_size)
    if not ratio < 2:
        raise ValueError(
            f"count_noise {count_noise} is too small for this much noise and so small a batch"
        )
    weight = ratio / math.sqrt(1 - ratio**2 / 4)
    to_unit = bam.clip_by_l2_norm(1.0)

    def init(params):
        return jnp.float32(clip_norm)

    def update(grads, bound, params=None):
        scaled = jax.tree.map(lambda g: g / bound.astype(g.dtype), grads)
        bounded, _ = to_unit.update(scaled, None)
        below = optax.tree.norm(optax.tree.cast(scaled, jnp.float32)) <= 1
        return {"grads": bounded, "below": jnp.where(below, weight / 2, -weight / 2)}, bound

    def finish(mean, bound):
        below = jnp.clip(mean["below"] / weight + 0.5, 0, 1)
        scale = clip_norm if per_clip_norm else bound
        grads = jax.tree.map(lambda g: scale * g, mean["grads"])
        return grads, bound * jnp.exp(-learning_rate * (below - quantile))

    return bam.BoundedTransformation(init, update, math.hypot(1, weight / 2), finish)
