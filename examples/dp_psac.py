"""DP-PSAC: gradients are normalised, but small ones stay shorter than large ones.

    C g / (‖g‖ + r / (‖g‖ + r))

Automatic clipping's weight C / (‖g‖ + γ) grows without limit as ‖g‖ and γ shrink. This weight is at
most about C / √r, near ‖g‖ = √r, and C for the smallest gradients.

Source: Xia, Shen, Yao, Fu, Xu, Xu, Fu 2023, "Differentially Private Learning with Per-Sample
Adaptive Clipping" (arXiv 2212.00328), Algorithm 1.

Config: `name_part(config, "clip", "examples.dp_psac:clip", r=0.1)`
"""

import jax
import jax.numpy as jnp
import optax

import bam


def clip(plan, clip_norm, r=0.1):
    """Scales a gradient to a norm below C.

    A gradient that is not finite becomes zero.
    """
    r = float(r)
    if not r > 0:
        raise ValueError(f"r must be positive, got {r}")

    def weigh(grads, state, params=None):
        norm = optax.tree.norm(optax.tree.cast(grads, jnp.float32))
        scale = clip_norm / (norm + r / (norm + r))
        keep = jnp.isfinite(norm)
        return jax.tree.map(lambda g: jnp.where(keep, scale * g, 0).astype(g.dtype), grads), state

    weighed = optax.GradientTransformation(lambda params: optax.EmptyState(), weigh)
    return bam.chain(weighed, bam.clip_by_l2_norm(clip_norm))
