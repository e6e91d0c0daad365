"""SlaClip: C follows what clipping leaves over, which is released beside the gradient for nothing.

An example whose clipped gradient is shorter than C has a slack of C − ‖g‖. It is written into K
more coordinates: √K times the slack, laid out in pieces of at most λ = C/√K, one after the other,
the first coordinate first. Their squares add up to at most C (C − ‖g‖), so the longer vector is no
longer than C, and S stays C: no privacy is paid. The means of the first and of the last coordinate,
in units of λ, say how many gradients were shorter than C, and how many had nearly no length:

    ŝ₁, ŝ_K;    γ = 1 − β (1 − ŝ_K / C_t) in [0, 1];    C_{t+1} = C_t exp(η (γ − ŝ₁))

The first C_t is the config's `clip_norm`.

Source: Zou, Wang, Zhu, Li, Dong, Sassone, Wu 2026, "SlaClip: Gradient Norm Slacks can be Indicator
for Adaptive Clipping in DP-SGD" (ICML), and its authors' code.

Config: `config.clip = ConfigDict({"name": "examples.slaclip:clip", "num_slots": 50})`
"""

import math

import jax
import jax.numpy as jnp
import optax

import bam


def clip(plan, clip_norm, num_slots=50, learning_rate=0.2, beta=0.5, least=0.1, most=50.0):
    """Clips to a norm that adapts, between `least` and `most`; everything is in units of C_t."""
    num_slots, learning_rate, beta = int(num_slots), float(learning_rate), float(beta)
    least, most = float(least), float(most)
    if num_slots < 1 or not 0 < least <= most:
        raise ValueError("num_slots must be at least 1, and least above 0 and at most `most`")
    to_unit = bam.clip_by_l2_norm(1.0)
    piece = 1 / math.sqrt(num_slots)

    def init(params):
        return jnp.float32(clip_norm)

    def update(grads, bound, params=None):
        scaled = jax.tree.map(lambda g: g / bound.astype(g.dtype), grads)
        bounded, _ = to_unit.update(scaled, None)
        norm = optax.tree.norm(optax.tree.cast(bounded, jnp.float32))
        slack = jnp.maximum(1 - norm, 0) / piece
        slots = jnp.clip(slack - piece * jnp.arange(num_slots), 0, piece)
        # The clip at the end makes the bound hold after rounding, too.
        return to_unit.update({"grads": bounded, "slack": slots}, None)[0], bound

    def finish(mean, bound):
        first, last = mean["slack"][0] / piece, mean["slack"][-1] / piece
        wanted = jnp.clip(1 - beta * (1 - last / bound), 0, 1)
        grads = jax.tree.map(lambda g: bound * g, mean["grads"])
        moved = bound * jnp.exp(learning_rate * (wanted - first))
        return grads, jnp.clip(moved, least, most)

    return bam.BoundedTransformation(init, update, 1.0, finish)
