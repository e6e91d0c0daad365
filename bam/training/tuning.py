"""The fastest `microbatch_size` on this device: the number of gradients computed at once.

It changes a step's speed and memory, and its result only by float rounding. A few sizes are timed
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

from bam import memory
from bam.core import clipping, engine
from bam.errors import InputError
from bam.models import finetune
from bam.privacy import processes
from bam.training import devices, duration, examples
from bam.training.trainer import Trainer

# A larger size takes more memory, so it must save more than 5 % of the time of an example.
WORTH_IT = 0.95
NUM_BATCHES = 20  # batches whose empty places are counted


def fastest_size(trainer: Trainer) -> int:
    """Returns the `microbatch_size` with the least time for a drawn example of a run.

    A large microbatch has many empty places in a small batch, which are computed, too. InputError
    if even one example does not fit.
    """
    batches = duration.drawn_batches(trainer, NUM_BATCHES)

    def seconds(size: int) -> float:
        return _seconds(trainer, size) * duration.rows_per_example(trainer, batches, size)

    return fastest(seconds, trainer.plan.expected_batch_size)


def sizes() -> tuple[int, ...]:
    """Returns the sizes to time on this platform."""
    # On a CPU, larger sizes gain nothing, and each size costs a compilation.
    return (1, 8) if jax.default_backend() == "cpu" else (1, 8, 64, 512)


def fastest(seconds: Callable[[int], float], largest: int) -> int:
    """Returns the last of `sizes`, up to `largest`, before one that is not `WORTH_IT`.

    `seconds(size)` is the time of an example, infinite if the memory is too small for the size.
    InputError if it is infinite for one example.
    """
    best, least = 0, math.inf
    for size in sizes():
        if size > largest or (needed := seconds(size)) >= WORTH_IT * least:
            break
        best, least = size, needed
    if best == 0:
        raise InputError(
            f"the gradient of one example does not fit the memory of {devices.name()}: "
            f"{memory.SMALLER}"
        )
    return best


def _seconds(trainer: Trainer, size: int) -> float:
    """Returns the seconds for a row in the sum, the longest part of a step.

    A size that does not fit the memory takes infinite time: it is not run, and has a line in the
    trainer's log.
    """
    parts, dataset, mesh = trainer.parts, trainer.listing, trainer.mesh
    oracle: Any = parts.gradient.oracle
    shape, label = dataset.train.images.shape[-3:], examples.label_of(dataset)
    like = examples.example_like(trainer.config, shape, label)
    num_examples = max(8, 2 * size) * trainer.num_devices  # two microbatches each, or more
    sharing: Any = {"microbatch_size": size, "mesh": mesh}
    blank = {name: jnp.ones((num_examples, *x.shape), x.dtype) for name, x in like.items()}

    @jax.jit
    def total(params: PyTree, frozen: PyTree, batch: PyTree) -> PyTree:
        if not parts.is_private:
            return engine.plain_sum(
                lambda params, example: parts.loss(params, example | {"frozen": frozen}),
                params,
                batch,
                **sharing,
            )
        # Without noise, because its time does not depend on the size.
        return engine.clipped_sum(
            lambda params, example: oracle.grad(params, example | {"frozen": frozen}),
            clipping.clip_by_l2_norm(1.0),
            params,
            batch,
            mask=None,
            **sharing,
        )[0]

    try:
        weights = finetune.split(parts.model.init(jax.random.key(0)), trainer.config.trainable)
        arguments = (*devices.replicate(weights, mesh), devices.share_rows(blank, mesh))
        needed = devices.needs(total, *arguments)
        if needed and not needed.fits:
            trainer.log(f"microbatch_size={size} {needed}: left out")
            return math.inf
        # The first of the four loads the program. The minimum leaves it out, and interruptions too.
        timings = timeit.repeat(
            lambda: jax.block_until_ready(total(*arguments)), number=1, repeat=4
        )
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        timings = [math.inf]
    # Processes time differently, and must agree on the size.
    return float(processes.from_first(np.float32(min(timings) / num_examples)))
