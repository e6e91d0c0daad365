"""How many examples' gradients are fastest to compute at once on this device.

That changes a step's speed and memory, and its result only by float rounding. A few sizes are timed
on blank images, so no private data is read.
"""

import math
import timeit
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from bam.core import clipping, engine, processes
from bam.errors import InputError
from bam.models import finetune
from bam.training import devices, examples
from bam.training.trainer import Trainer

WORTH_IT = 0.95  # a larger size is taken if an example needs no more than this share of the time


def fastest_size(trainer: Trainer) -> int:
    """The fastest `microbatch_size` of a run; InputError if not even one example fits."""
    return fastest(lambda size: _seconds(trainer, size), trainer.plan.expected_batch_size)


def sizes() -> tuple[int, ...]:
    """Those that are tried on this platform: few on a CPU, where larger ones gain nothing."""
    return (1, 8) if jax.default_backend() == "cpu" else (1, 8, 64, 512)


def fastest(seconds: Callable[[int], float], largest: int) -> int:
    """The size, up to `largest`, from which a larger one saves too few `seconds(size)`."""
    best, least = 0, math.inf
    for size in sizes():
        if size > largest or (needed := seconds(size)) >= WORTH_IT * least:
            break
        best, least = size, needed
    if best == 0:
        what = f"the gradient of one example does not fit the memory of {devices.name()}"
        raise InputError(f"{what}: take a smaller model or fewer views")
    return best


def _seconds(trainer: Trainer, size: int) -> float:
    """Seconds of an example in the sum that a step spends its time on; infinite: no memory."""
    mesh, dataset = trainer.mesh, trainer.dataset
    shape, label = dataset.train.images.shape[-3:], examples.label_of(dataset)
    like = examples.example_like(trainer.config, shape, label)
    num_examples = max(8, 2 * size) * (mesh.size if mesh else 1)  # two microbatches each, or more
    how: Any = {"microbatch_size": size, "mesh": mesh}
    blank = {name: jnp.ones((num_examples, *x.shape), x.dtype) for name, x in like.items()}

    @jax.jit
    def total(params: PyTree, frozen: PyTree, batch: PyTree) -> PyTree:
        if not trainer.plan.private:
            return engine.plain_sum(
                lambda params, example: trainer.loss(params, example | {"frozen": frozen}),
                params,
                batch,
                **how,
            )
        return engine.clipped_sum(
            lambda params, example: trainer.oracle.grad(params, example | {"frozen": frozen}),
            clipping.clip_by_l2_norm(1.0),
            params,
            batch,
            mask=None,
            **how,
        )[0]

    try:
        weights = finetune.split(trainer.model.init(jax.random.key(0)), trainer.config.trainable)
        given = (*devices.replicate(weights, mesh), devices.share_rows(blank, mesh))
        timings = timeit.repeat(lambda: jax.block_until_ready(total(*given)), number=1, repeat=4)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        timings = [math.inf]
    return float(processes.from_first(np.float32(min(timings) / num_examples)))
