"""BAM at first, DP-SGD later: a gradient-norm penalty whose strength falls to zero.

    λ_t = λ (1 − t / t_end) for t < t_end, 0 after

The step number is public, so a schedule costs no privacy. Time is BAM's throughout: every example
takes both gradients.

Source of the penalty: Knolle et al. 2023 (arXiv 2308.12018), with a constant λ; the schedule is an
experiment of this project.

Config: `config.method = ConfigDict({"name": "examples.penalty_schedule:oracle", "radius": 0.02,
"last_step": 100})`
"""

import jax
import jax.numpy as jnp

import bam
from bam.core import pytree


def oracle(loss_fn, radius, last_step):
    """`example["step"]` is the number of steps taken."""
    if not radius >= 0 or last_step < 1:
        raise ValueError("radius must be at least 0, last_step at least 1")

    def grad(params, example):
        gradient = jax.grad(loss_fn)
        now = radius * jnp.maximum(0.0, 1 - example["step"] / last_step)
        direction = pytree.unit(gradient(params, example))
        moved = jax.tree.map(lambda p, v: (p + now * v).astype(p.dtype), params, direction)
        return gradient(moved, example)

    return bam.Oracle(ascend=lambda params, previous: params, grad=grad)
