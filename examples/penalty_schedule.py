"""BAM first, DP-SGD later: a gradient-norm penalty that ends at a step, or falls to zero by then.

    λ_t = λ for t < t_end, 0 after;    linear: λ_t = λ (1 − t / t_end) for t < t_end, 0 after

The step number is public, so a schedule costs no privacy. It is the same for the whole batch, so
`cond` stays a branch under `vmap`: after t_end the second gradient is not computed.

Source of the penalty: Knolle et al. 2023 (arXiv 2308.12018), with a constant λ; the schedule is an
experiment of this project.

Config: `name_part(config, "method", "examples.penalty_schedule:oracle", radius=0.02, last_step=100,
linear=False)`
"""

import jax

import bam
from bam.core import pytree


def oracle(loss_fn, radius, last_step, linear=True):
    """`example["step"]` is the number of steps before this one."""
    radius, last_step = float(radius), int(last_step)
    if not radius >= 0 or last_step < 1:
        raise ValueError("radius must be at least 0, last_step at least 1")
    if radius == 0:
        return bam.dp_sgd(loss_fn)
    gradient = jax.grad(loss_fn)

    def gradient_ahead(params, example):
        current = radius * (1 - example["step"] / last_step)
        direction = pytree.unit(gradient(params, example))
        moved = jax.tree.map(lambda p, v: (p + current * v).astype(p.dtype), params, direction)
        return gradient(moved, example)

    penalised = gradient_ahead if linear else bam.bam_sam(loss_fn, radius).grad

    def grad(params, example):
        is_first = example["step"] < last_step
        return jax.lax.cond(is_first, penalised, gradient, params, example)

    return bam.Oracle(ascend=lambda params, previous: params, grad=grad)
