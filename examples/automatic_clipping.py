"""Automatic clipping (AUTO-S): every gradient is normalised, so C only scales the learning rate.

    g / (‖g‖ + γ) · C

Source: Bu, Wang, Zha, Karypis 2023, "Automatic Clipping: Differentially Private Deep Learning Made
Easier and Stronger" (arXiv 2206.07136).

Config: `name_part(config, "clip", "examples.automatic_clipping:clip", gamma=0.01)`
"""

import jax
import jax.numpy as jnp
import optax

import bam


def clip(plan, clip_norm, gamma=0.01):
    """Scales a gradient to a norm just below C.

    A gradient that is not finite becomes zero.
    """
    gamma = float(gamma)  # a copy, because the caller could change an array later

    def normalise(grads, state, params=None):
        norm = optax.tree.norm(grads)
        scale = clip_norm / (norm + gamma)
        keep = jnp.isfinite(norm)
        return jax.tree.map(lambda g: jnp.where(keep, scale * g, 0).astype(g.dtype), grads), state

    # Without the second clip, rounding in bfloat16 lifts the norm above the bound.
    scaled = optax.GradientTransformation(lambda params: optax.EmptyState(), normalise)
    return bam.chain(scaled, bam.clip_by_l2_norm(clip_norm))
