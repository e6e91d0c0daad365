"""How a step is computed fastest on this device: convolution formulation and microbatch size.

Both change a step's speed and memory, and its result only by float rounding. They are chosen by
timing the per-example gradient sum on blank images, so no private data is read.
"""

import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, PyTree

from bam import devices, models, parts
from bam.data import datasets
from bam.engine import clipped_sum, plain_sum
from bam.extras import needs
from bam.files import write_json
from bam.models import layers
from bam.transforms import clip_by_l2_norm
from bam.tree import Grads, Params

with needs("train"):
    from ml_collections import ConfigDict

# Growing the microbatch stops once a size is not faster per example by this factor.
WORTH_IT = 0.95
# Microbatch sizes to try in turn; the first decides between formulations.
CPU_SIZES, ACCELERATOR_SIZES = (1, 8), (16, 64, 256, 1024)


class Choice(NamedTuple):
    """How a step is computed: "matmul" or "xla", and examples whose gradients exist at once."""

    convolution: str
    microbatch_size: int


def check_microbatch_size(size: object, num_examples: int) -> None:
    """Raises ValueError for what cannot be a config's `microbatch_size`."""
    if size != "auto" and (type(size) is not int or not 1 <= size <= num_examples):
        raise ValueError(
            f'microbatch_size {size} must be "auto" or from 1 to the number of training examples, '
            f"{num_examples}"
        )


def tuned(
    config: ConfigDict, dataset: datasets.Dataset, mesh: jax.sharding.Mesh | None
) -> ConfigDict:
    """A copy of a config with what will run as `microbatch_size` and `convolution`, if "auto".

    Of the data only the number, the shape and the classes of the examples are read. Raises
    ValueError if the least microbatch size does not fit the memory.
    """
    config = config.copy_and_resolve_references()
    num_examples, shape = len(dataset.train.labels), dataset.train.images.shape[1:]
    if config.microbatch_size == "auto":
        on_cpu = jax.default_backend() == "cpu"
        forms = ("matmul",) if on_cpu else ("xla", "matmul")
        forms = forms if config.convolution == "auto" else (config.convolution,)
        largest = min(num_examples, config.expected_batch_size)
        tried = CPU_SIZES if on_cpu else ACCELERATOR_SIZES
        sizes = [size for size in tried if size <= largest] or [largest]
        sections = [config[key].to_dict() for key in ("model", "method", "augment")]
        choice = fastest(
            functools.partial(_timed_sum, config, dataset.num_classes, shape, mesh),
            [*sections, config.precision, dataset.num_classes, shape],
            {form: sizes for form in forms},
            mesh.size if mesh else 1,
        )
        with config.ignore_type():  # a number takes the place of "auto"
            config.update(choice._asdict())
    config.convolution = layers.formulation(config.convolution)
    return config


def _timed_sum(
    config: ConfigDict,
    num_classes: int,
    shape: tuple[int, ...],
    mesh: jax.sharding.Mesh | None,
    convolution: str,
    size: int,
) -> Callable[[int], Grads]:
    """The sum that a step spends its time on, over random images."""
    module = parts.make_model(config.model, num_classes)
    model = models.as_functions(module, shape, precision=config.precision, convolution=convolution)
    oracle = parts.make_oracle(config.method, model.loss)
    params = devices.replicate(model.init(jax.random.key(0)), mesh)
    how: dict[str, Any] = {"microbatch_size": size, "mesh": mesh}

    def example(index: Array) -> dict[str, Array]:
        key = jax.random.fold_in(jax.random.key(1), index)
        views = jax.random.normal(key, (config.augment.views, *shape))
        return {"image": views, "label": index % num_classes, "key": key}

    @jax.jit
    def total(params: Params, indices: Array) -> Grads:
        if config.method.name == "non_private":
            return plain_sum(lambda p, i: model.loss(p, example(i)), params, indices, **how)
        grad_fn = lambda p, i: oracle.grad(p, example(i))  # noqa: E731
        return clipped_sum(grad_fn, clip_by_l2_norm(1.0), params, indices, **how)[0]

    return lambda num_examples: total(params, np.arange(num_examples))


def fastest(
    make_step: Callable[[str, int], Callable[[int], PyTree]],
    facts: Sequence[object],
    candidates: Mapping[str, Sequence[int]],
    num_devices: int = 1,
) -> Choice:
    """The `Choice` with the least time per example.

    It is timed once, and kept in memory and, if there is one, on disk: the file is `tuning.json` in
    JAX's compilation cache folder. What does not fit the device's memory is passed over; if nothing
    does, a ValueError says so.

    `make_step(convolution, microbatch size)` is a step; `step(number of examples)` computes on so
    many and returns arrays to wait for. The answer depends on `facts`, JSON values, and on JAX's
    version and the devices, `num_devices` of which share the examples. `candidates` are formulation
    -> microbatch sizes, growing.
    """
    asked = [facts, candidates, devices.name(), num_devices, jax.__version__]
    key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    if key not in _chosen:
        _chosen.update({k: Choice(*v) for k, v in _read().items()})
    forms = list(candidates)
    known = _chosen.get(key)
    mine = np.array([forms.index(known.convolution), known.microbatch_size] if known else [-1, 0])
    form, size = (int(x) for x in devices.from_first(mine))
    if form >= 0:
        _chosen[key] = Choice(forms[form], size)
    else:
        _chosen[key] = _measure(make_step, candidates, num_devices)
        if devices.writes():
            _write(key, _chosen[key])
    return _chosen[key]


_chosen: dict[str, Choice] = {}


def _measure(
    make_step: Callable[[str, int], Callable[[int], PyTree]],
    candidates: Mapping[str, Sequence[int]],
    num_devices: int,
) -> Choice:
    first = {
        Choice(form, sizes[0]): _seconds_per_example(make_step, form, sizes[0], num_devices)
        for form, sizes in candidates.items()
    }
    best = min(first, key=lambda choice: first[choice])
    seconds = first[best]
    if seconds == float("inf"):
        raise ValueError(
            f"not even {best.microbatch_size} examples at once fit the memory of {devices.name()}; "
            "set --config.microbatch_size to fewer"
        )
    for size in candidates[best.convolution][1:]:
        larger = _seconds_per_example(make_step, best.convolution, size, num_devices)
        if larger > WORTH_IT * seconds:
            break
        best, seconds = Choice(best.convolution, size), larger
    return best


def _seconds_per_example(
    make_step: Callable[[str, int], Callable[[int], PyTree]], form: str, size: int, num_devices: int
) -> float:
    """The least of three timings; infinite if it does not fit the memory."""
    num_examples = max(8, 2 * size) * num_devices  # two microbatches for each, or more
    try:
        step = make_step(form, size)
        jax.block_until_ready(step(num_examples))
        timings = []
        for _ in range(3):
            started = time.perf_counter()
            jax.block_until_ready(step(num_examples))
            timings.append(time.perf_counter() - started)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return float("inf")
    return float(devices.from_first(np.float32(min(timings) / num_examples)))


def _file() -> Path | None:
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    return Path(folder) / "tuning.json" if folder and "://" not in folder else None


def _read() -> dict[str, Any]:
    path = _file()
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}  # not there, or broken off: it is timed again


def _write(key: str, choice: Choice) -> None:
    path = _file()
    if path is not None:
        os.makedirs(path.parent, exist_ok=True)
        write_json(path, _read() | {key: list(choice)})
