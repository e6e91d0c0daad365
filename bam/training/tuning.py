"""How many examples' gradients a step computes at once on this device, if a config says "auto".

That changes a step's speed and memory, and its result only by float rounding. A few sizes are timed
on blank images, so no private data is read, and the fastest takes the place of "auto".
"""

import math
import timeit
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from bam import models
from bam.core import clipping, engine, processes
from bam.data import datasets
from bam.errors import InputError
from bam.extras import needs
from bam.models import finetune
from bam.training import devices, examples, registry

with needs("train"):
    from ml_collections import ConfigDict

WORTH_IT = 0.95  # a larger size is taken if an example needs no more than this share of the time
KEYS = "augment", "convolution", "lora", "loss", "method", "model", "precision", "trainable"


def check_microbatch_size(size: object, num_examples: int) -> None:
    """Raises InputError for what cannot be a config's `microbatch_size`."""
    if size != "auto" and (type(size) is not int or not 1 <= size <= num_examples):
        needed = f'must be "auto" or from 1 to the number of training examples, {num_examples}'
        raise InputError(f"microbatch_size {size} {needed}")


def microbatch_size(
    config: ConfigDict, model: models.Model, dataset: datasets.Dataset, mesh: Mesh | None,
    log: Callable[[str], None] = lambda line: None,
) -> int:  # fmt: skip
    """The config's `microbatch_size`, or if that is "auto" the fastest for its model.

    It is timed once in a process, as `log` is told. InputError if not even one example fits.
    """
    if config.microbatch_size != "auto":
        return int(config.microbatch_size)
    shape, label = dataset.train.images.shape[-3:], examples.label_of(dataset)
    like, largest = registry.example_like(config, shape, label), config.expected_batch_size
    asked = str([largest, like, mesh, *(config[key] for key in KEYS)])
    if asked not in _chosen:
        log(f"choosing how many examples at a time, on {devices.name()}")
        _chosen[asked] = fastest(lambda size: _seconds(config, model, like, mesh, size), largest)
    return _chosen[asked]


_chosen: dict[str, int] = {}


def fastest(seconds: Callable[[int], float], largest: int) -> int:
    """The size, up to `largest`, from which a larger one saves too few `seconds(size)`."""
    best, least = 0, math.inf
    for size in (1, 8) if jax.default_backend() == "cpu" else (1, 8, 64, 512):
        if size > largest or (needed := seconds(size)) >= WORTH_IT * least:
            break
        best, least = size, needed
    if best == 0:
        what = f"the gradient of one example does not fit the memory of {devices.name()}"
        raise InputError(f"{what}: take a smaller model or fewer views")
    return best


def _seconds(
    config: ConfigDict, model: models.Model, like: Mapping[str, jax.ShapeDtypeStruct],
    mesh: Mesh | None, size: int,
) -> float:  # fmt: skip
    """Seconds of an example in the sum that a step spends its time on; infinite: no memory."""
    num_examples = max(8, 2 * size) * (mesh.size if mesh else 1)  # two microbatches each, or more
    how: Any = {"microbatch_size": size, "mesh": mesh}
    blank = {name: jnp.ones((num_examples, *x.shape), x.dtype) for name, x in like.items()}

    @jax.jit
    def total(params: PyTree, frozen: PyTree, batch: PyTree) -> PyTree:
        loss = finetune.with_frozen(model.loss, frozen)
        if not registry.is_private(config.method.name):
            return engine.plain_sum(loss, params, batch, **how)
        grad, clip = registry.make_oracle(config.method, loss).grad, clipping.clip_by_l2_norm(1.0)
        return engine.clipped_sum(grad, clip, params, batch, mask=None, **how)[0]

    try:
        weights = finetune.split(model.init(jax.random.key(0)), config.trainable)
        given = (*devices.replicate(weights, mesh), devices.share_rows(blank, mesh))
        timings = timeit.repeat(lambda: jax.block_until_ready(total(*given)), number=1, repeat=4)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        timings = [math.inf]
    return float(processes.from_first(np.float32(min(timings) / num_examples)))
