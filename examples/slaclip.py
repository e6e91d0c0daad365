"""SlaClip: C follows the slack of the clipped norms, released beside the gradient at no cost.

A clipped gradient g that is shorter than C has a slack of C − ‖g‖. The clip writes √K times the
slack into K more coordinates, in pieces of at most λ = C/√K, the first coordinate first. Their
squares add up to at most C (C − ‖g‖), so the vector with them is not longer than C, and S stays C:
the slack costs no privacy. The means of the first and the last coordinate, in units of λ, tell how
many gradients were shorter than C, and how many were nearly zero:

    ŝ₁, ŝ_K;    γ = 1 − β (1 − ŝ_K / C_t) in [0, 1];    C_{t+1} = C_t exp(η (γ − ŝ₁))

The first C_t is the config's `clip_norm`.

Source: Zou, Wang, Zhu, Li, Dong, Sassone, Wu 2026, "SlaClip: Gradient Norm Slacks can be Indicator
for Adaptive Clipping in DP-SGD" (ICML), and its authors' code.

Config: `name_part(config, "clip", "examples.slaclip:clip", num_slots=50)`
"""

import math

import jax
import jax.numpy as jnp
import optax

import bam


def clip(plan, clip_norm, num_slots=50, learning_rate=0.2, beta=0.5, least=0.1, most=50.0):
    """Clips to a norm C_t that adapts between `least` and `most`.

    Sums are in units of C_t.
    """
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
        # The second clip keeps the bound after rounding.
        return to_unit.update({"grads": bounded, "slack": slots}, None)[0], bound

    def finish(mean, bound):
        first, last = mean["slack"][0] / piece, mean["slack"][-1] / piece
        target = jnp.clip(1 - beta * (1 - last / bound), 0, 1)
        grads = jax.tree.map(lambda g: bound * g, mean["grads"])
        moved = bound * jnp.exp(learning_rate * (target - first))
        return grads, jnp.clip(moved, least, most)

    return bam.BoundedTransformation(init, update, 1.0, finish)
