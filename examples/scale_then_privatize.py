"""Scale, then privatise: coordinates with large gradients so far get more of the noise.

Each coordinate of a gradient is divided by the size of the released gradients there. The scaled
gradient is clipped and noised, and then multiplied by the same sizes:

    s_t = 1 / (√v_{t−1} + floor),   ĝ_t = (1/l) (Σ clip(s_t ⊙ g_i) + noise) / s_t,
    v_t = decay · v_{t−1} + (1 − decay) ĝ_t²

v is computed from released means, so it costs no privacy. S = C, as for the plain clip. C is a norm
of scaled gradients, so choose it anew.

Source: arXiv 2507.01129, with Adam's second moment and without its bias correction.

Config: `name_part(config, "clip", "examples.scale_then_privatize:clip", floor=0.01)`
"""

import jax
import jax.numpy as jnp

import bam


def clip(plan, clip_norm, floor=0.01, decay=0.999):
    """Clips gradients that are scaled by the sizes of released ones.

    C is `clip_norm`.
    """
    floor, decay = float(floor), float(decay)
    if not (floor > 0 and 0 <= decay < 1):
        raise ValueError(f"floor must be positive and decay in [0, 1), got {floor} and {decay}")
    to_norm = bam.clip_by_l2_norm(clip_norm)

    def init(params):
        return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)

    def update(grads, moments, params=None):
        scaled = jax.tree.map(
            lambda g, v: g / (jnp.sqrt(v) + floor).astype(g.dtype), grads, moments
        )
        return to_norm.update(scaled, None)[0], moments

    def finish(mean, moments):
        grads = jax.tree.map(lambda m, v: m * (jnp.sqrt(v) + floor), mean, moments)
        after = jax.tree.map(lambda v, g: decay * v + (1 - decay) * g**2, moments, grads)
        return grads, after

    return bam.BoundedTransformation(init, update, clip_norm, finish)
