"""How many examples' gradients a step computes at once on this device, if a config says "auto".

That changes a step's speed and memory, and its result only by float rounding. It is chosen by
the compiler's plan of memory and by timing sums of per-example gradients on random images, so no
private data is read.
"""

import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from bam import models
from bam.core.clipping import clip_by_l2_norm
from bam.core.engine import clipped_sum, plain_sum
from bam.core.pytree import Grads, Params
from bam.data import datasets
from bam.extras import needs
from bam.files import JsonObject
from bam.training import devices, examples, finetune, registry

with needs("train"):
    from ml_collections import ConfigDict

# Growing the microbatch stops once a size is not faster per example by this factor.
WORTH_IT = 0.95
# Microbatch sizes to try in turn on CPU.
CPU_SIZES = 1, 8
# Elsewhere: to begin with at most so many images, of at most so many examples, or of so many that
# have one image each, and the factors to grow by. A TPU is fastest, by its compiler's estimate, at
# few images at once, which stay in memory on the chip, as each example's own weights have to; a GPU
# is given enough that starting kernels is not what takes the time.
BEGIN = {"tpu": (64, 16, 8), "gpu": (1024, 1024, 1024)}
GROW = {"tpu": (1, 4, 16), "gpu": (1, 4)}
# On CPU more examples at once save the time between operations. Examples whose loss takes this many
# floating-point operations do not notice it.
LARGE_EXAMPLE = 5e7

# Shapes and dtypes of an example.
Like = dict[str, jax.ShapeDtypeStruct]

# A step on so many examples, compiled, and what to call it with.
Step = tuple[PyTree, tuple[PyTree, ...]]


def check_microbatch_size(size: object, num_examples: int) -> None:
    """Raises ValueError for what cannot be a config's `microbatch_size`."""
    if size != "auto" and (type(size) is not int or not 1 <= size <= num_examples):
        raise ValueError(
            f'microbatch_size {size} must be "auto" or from 1 to the number of training examples, '
            f"{num_examples}"
        )


def microbatch_size(
    config: ConfigDict,
    model: models.Model,
    dataset: datasets.Dataset,
    mesh: jax.sharding.Mesh | None,
    log: Callable[[str], None] = lambda line: None,
) -> int:
    """The config's `microbatch_size`, or if that is "auto" the fastest for its model.

    Of the data only the number, the shape and the classes of the examples are read. `log` is called
    with a line for everything that takes time. Raises ValueError if not even one example fits the
    memory.
    """
    if config.microbatch_size != "auto":
        return int(config.microbatch_size)
    shape, largest = dataset.train.images.shape[-3:], config.expected_batch_size
    like = registry.example_like(config, shape, examples.label_of(dataset))
    platform = jax.default_backend()
    inputs = registry.num_inputs(config)
    tried = CPU_SIZES if platform == "cpu" else accelerator_sizes(platform, inputs)
    sizes = [size for size in tried if size <= largest] or [largest]
    if platform == "cpu" and _operations(model, like) > LARGE_EXAMPLE:
        sizes = sizes[:1]
    if platform == "cpu" and len(sizes) == 1:
        return sizes[0]
    sections = [config[key].to_dict() for key in ("model", "method", "augment", "lora")]
    how = [config.precision, config.convolution, config.trainable, config.loss.name]
    return fastest(
        functools.partial(_sum, config, model, dataset.num_classes, like, mesh),
        [*sections, *how, dataset.num_classes, shape, inputs],
        sizes,
        mesh.size if mesh else 1,
        log,
    )


def smaller(size: int) -> Iterator[int]:
    """What to try in turn if a size does not fit the memory, down to one example."""
    while size > 1:
        size = max(1, size // 8)
        yield size


def accelerator_sizes(platform: str, num_views: int) -> list[int]:
    """Microbatch sizes to try in turn on a "gpu" or "tpu", for examples of so many views."""
    kind = platform if platform in BEGIN else "gpu"
    images, examples, of_one_image = BEGIN[kind]
    first = max(1, min(images // num_views, of_one_image if num_views == 1 else examples))
    return [factor * first for factor in GROW[kind]]


def _example(num_classes: int, like: Like, index: Array) -> PyTree:
    key = jax.random.fold_in(jax.random.key(1), index)
    views = jax.random.normal(key, like["image"].shape)
    label = jnp.broadcast_to(index % num_classes, like["label"].shape).astype(like["label"].dtype)
    example = {"image": views, "label": label, "key": key, "step": jnp.zeros((), jnp.int32)}
    if "present" in like:
        example["present"] = jnp.ones(like["present"].shape, bool)
    return example


def _operations(model: models.Model, like: Like) -> float:
    """Of an example's loss, as it is written; nothing is compiled."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    counted = jax.jit(model.loss).lower(params, like).cost_analysis()
    return float((counted or {}).get("flops", 0))


def _sum(
    config: ConfigDict,
    model: models.Model,
    num_classes: int,
    like: Like,
    mesh: jax.sharding.Mesh | None,
    size: int,
    num_examples: int,
) -> Step:
    """The sum that a step spends its time on, over random images."""
    weights = finetune.split(model.init(jax.random.key(0)), config.trainable)
    how: JsonObject = {"microbatch_size": size, "mesh": mesh}
    example = functools.partial(_example, num_classes, like)

    @jax.jit
    def total(params: Params, frozen: Params, indices: Array) -> Grads:
        loss = finetune.with_frozen(model.loss, frozen)
        if not registry.is_private(config.method.name):
            return plain_sum(lambda p, i: loss(p, example(i)), params, indices, **how)
        oracle = registry.make_oracle(config.method, loss)
        grad_fn = lambda p, i: oracle.grad(p, example(i))  # noqa: E731
        return clipped_sum(grad_fn, clip_by_l2_norm(1.0), params, indices, mask=None, **how)[0]

    given = devices.replicate((*weights, np.arange(num_examples, dtype=np.int32)), mesh)
    return total.lower(*given).compile(), given


def fastest(
    make_step: Callable[[int, int], Step],
    facts: Sequence[object],
    sizes: Sequence[int],
    num_devices: int = 1,
    log: Callable[[str], None] = lambda line: None,
) -> int:
    """The microbatch size with the least time per example.

    It is found once in a process. What does not fit the device's memory by the compiler's plan is
    not run; if nothing fits, a ValueError says so.

    `make_step(microbatch size, number of examples)` compiles a step. The answer depends on `facts`,
    JSON values, and on the kind of the devices, `num_devices` of which share the examples. `sizes`
    grow.
    """
    key = json.dumps([facts, sizes, devices.name(), num_devices], sort_keys=True)
    if key not in _chosen:
        _chosen[key] = _measure(make_step, sizes, num_devices, log)
    return _chosen[key]


_chosen: dict[str, int] = {}


def _measure(
    make_step: Callable[[int, int], Step],
    sizes: Sequence[int],
    num_devices: int,
    log: Callable[[str], None],
) -> int:
    log(f"choosing how many examples at a time, on {devices.name()}")
    limit = float(devices.from_first(np.array(devices.memory())))
    best, seconds, memory = 0, math.inf, 0.0
    for size in sizes:
        # The memory of a microbatch grows as its size does, or less.
        if best and memory * size / best > limit:
            break
        found, planned = _seconds_per_example(make_step, size, num_devices, limit, log)
        if math.isinf(found) or found > WORTH_IT * seconds:
            break
        best, seconds, memory = size, found, planned
    for size in smaller(sizes[0]) if best == 0 else ():
        if _seconds_per_example(make_step, size, num_devices, limit, log)[0] < math.inf:
            best = size
            break
    if best == 0:
        raise ValueError(
            f"the gradient of one example does not fit the memory of {devices.name()}: take a "
            "smaller model or fewer views"
        )
    log(f"{best} at a time")
    return best


def _seconds_per_example(
    make_step: Callable[[int, int], Step],
    size: int,
    num_devices: int,
    limit: float,
    log: Callable[[str], None],
) -> tuple[float, float]:
    """The least of three timings, infinite if it does not fit the memory; the memory it takes."""
    num_examples = max(8, 2 * size) * num_devices  # two microbatches for each, or more
    started = time.perf_counter()
    try:
        step, given = make_step(size, num_examples)
        planned = step.memory_analysis().temp_size_in_bytes
        compiling = time.perf_counter() - started
        if planned > limit:
            log(f"  {size}: {planned / 1e9:.1f} GB do not fit")
            return math.inf, planned
        jax.block_until_ready(step(*given))
        timings = []
        for _ in range(3):
            started = time.perf_counter()
            jax.block_until_ready(step(*given))
            timings.append(time.perf_counter() - started)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        log(f"  {size}: does not fit the memory")
        return math.inf, math.inf
    seconds = float(devices.from_first(np.float32(min(timings) / num_examples)))
    log(f"  {size}: {1e3 * seconds:.3g} ms per example, compiled in {compiling:.0f} s")
    return seconds, planned
