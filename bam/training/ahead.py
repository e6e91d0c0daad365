"""A config's step compiled for TPUs and GPUs that are not there, and what its compiler says of it.

What a device has is from data sheets; nothing is run or measured.
"""

import importlib.util
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import PyTree

from bam import provenance
from bam.core import sampling
from bam.data import datasets
from bam.data.stream import select
from bam.errors import InputError
from bam.extras import needs
from bam.features import extraction
from bam.files import JsonObject
from bam.models import finetune, layers
from bam.training import arithmetic, examples, loading, parts, trainer

with needs("train"):
    from ml_collections import ConfigDict

GIB = 2**30
COLLECTIVE = r" = (.+?) (all-(?:reduce|gather|to-all)|reduce-scatter|collective-\w+)(-start)?\("


class Kind(NamedTuple):
    """A kind of device by its data sheet."""

    platform: str  # whose compiler it is: "tpu" or "cuda"
    memory_bytes: int
    spec: str = ""  # what a GPU's compiler asks for


# XLA's `GpuTargetConfigProto` in its text format.
GPU_SPEC = """gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536  shared_memory_per_block: 49152
  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448  fpus_per_core: 128
  device_memory_size: {}  memory_bandwidth: {:.0f}  core_count: {}  clock_rate_ghz: {}
  l2_cache_size: {}  cuda_compute_capability {{ major: {} feature_extension: ACCELERATED_FEATURES }}
  driver_version: "12.9.0"  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{}"
"""
GPUS = {
    "h100": (84_942_979_072, 3.352e12, 132, 1.98, 52_428_800, 9, "NVIDIA H100 80GB HBM3"),
    "h200": (151_397_597_184, 4.8e12, 132, 1.98, 52_428_800, 9, "NVIDIA H200"),
    "b200": (191_514_411_008, 7.672e12, 148, 1.965, 132_644_864, 10, "NVIDIA B200"),
}
KINDS = {
    "v5e": Kind("tpu", 16 * GIB),
    "v5p": Kind("tpu", 95 * GIB),
    "v6e": Kind("tpu", 32 * GIB),
    **{name: Kind("cuda", x[0], spec=GPU_SPEC.format(*x)) for name, x in GPUS.items()},
}


def kind_of(target: str) -> Kind:
    """The kind of a target's devices; an InputError for one that is not known."""
    name, _, shape = target.partition(":")
    kind = KINDS.get(name)
    shapes = {"tpu": r"[1-9]\d*(x[1-9]\d*){1,2}", "cuda": r"([1-9]\d*)?"}
    if kind is None or not re.fullmatch(shapes[kind.platform], shape):
        raise InputError(
            f"unknown target {target!r}; for example v5e:1x1 or h100:8, of {', '.join(KINDS)}"
        )
    return kind


def devices_of(target: str) -> list[jax.Device]:
    """The target's devices, to compile for, before JAX has started.

    It has JAX start on CPU, and sets what its compilers read from the environment. InputError if
    there are no devices of that shape, or if the compiler is not installed.
    """
    from jax.experimental import topologies

    kind, (name, _, shape) = kind_of(target), target.partition(":")
    jax.config.update("jax_platforms", "cpu")
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # it would ask the network where it is, so it is told
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # there is no device for two to fight over
    options: JsonObject
    if kind.platform == "tpu":
        sides = [int(side) for side in shape.split("x")]
        host = (2 - sides[0] % 2, 2 - sides[1] % 2, 1)  # up to 2 × 2 chips
        options = {"topology_name": target, "chips_per_host_bounds": host}
    else:
        known = os.environ.get("XLA_FLAGS", "")  # there is nothing to try kernels on
        os.environ["XLA_FLAGS"] = f"{known} --xla_gpu_autotune_level=0".strip()
        options = {"topology_name": name, "target_config": kind.spec}
        options["topology"] = f"1x1x{shape or 1}"
    try:
        return list(topologies.get_topology_desc(platform=kind.platform, **options).devices)
    except (RuntimeError, NotImplementedError) as error:
        needed = {"tpu": "libtpu", "cuda": "jax_cuda12_plugin"}[kind.platform]
        if not importlib.util.find_spec(needed):
            install = f"pip install '.[{kind.platform}]' in a clone of bam"
            raise InputError(f"the compiler for {name} is not installed: {install}") from None
        raise InputError(f"{target}: {' '.join(str(error).split())[:300]}") from None


def look(config: ConfigDict, target: str, hardware: list[jax.Device], size: int = 0) -> JsonObject:
    """All that the compiler says of a config's step on a target's devices.

    With a size, images are squares of so many pixels, which are streamed.
    """
    kind = kind_of(target)
    config = config.copy_and_resolve_references()
    config.convolution = config.convolution or layers.OF_PLATFORM.get(kind.platform, "xla")
    dataset = _dataset(config.dataset, size)
    if feature_map := parts.make_features(config.features):
        dataset = extraction.blank(dataset, feature_map)
    try:
        built, program, seconds = compile_step(config, dataset, hardware)
    except jax.errors.JaxRuntimeError as error:
        problem = " ".join(str(error).split())[:300]
        return {"target": target, "compiles": False, "problem": problem}
    needed = num_bytes_held(program)
    return {
        "target": target,
        "compiles": True,
        "config": f"{config.dataset.name}:{config.method.name}",
        "device": hardware[0].device_kind,
        "num_devices": len(hardware),
        "precision": config.precision,
        "compile_seconds": seconds,
        "memory_bytes": needed,
        "device_memory_bytes": kind.memory_bytes,
        "fits": needed <= kind.memory_bytes,
        "microbatch_size": config.microbatch_size,
        "num_steps": built.plan.num_steps,
        "expected_batch_size": built.plan.expected_batch_size,
        "num_params": built.num_params,
        "flop_per_step": flop_per_step(config, dataset),
        "collectives": collectives(program.as_text()),
        "commit": provenance.git_commit(),
        "versions": provenance.versions(),
    }


def _dataset(section: ConfigDict, size: int = 0) -> datasets.Dataset:
    """The data set, or blank images, as many, of a public one that need not be there."""
    facts = datasets.DATASETS.get(section.name)
    if not (facts and any(facts.rows)) or section.path:
        return loading.make_dataset(section)
    blank = datasets.stand_in(section.name, size)
    train = (select(x, np.s_[section.holdout :]) for x in blank.train)
    return blank._replace(train=datasets.Split(*train))


def compile_step(
    config: ConfigDict, dataset: datasets.Dataset, hardware: list[jax.Device]
) -> tuple[trainer.Trainer, PyTree, float]:
    """A config's run on devices, its step compiled for them, and the seconds that took."""
    built = trainer.build(config, dataset, hardware)
    sharding = NamedSharding(built.mesh, PartitionSpec()) if built.mesh else None
    everywhere = sharding or SingleDeviceSharding(hardware[0])
    capacity, rows = built.plan.capacity, built.dataset.train
    if datasets.streams(built.dataset):
        images = np.broadcast_to(np.uint8(0), (capacity, *rows.images.shape[1:]))
        rows = datasets.Split(images, np.broadcast_to(np.int32(0), capacity))
    given = (
        jax.eval_shape(lambda: built.init(0)),
        jax.eval_shape(lambda: built.place(rows)),
        sampling.pad(np.arange(0), capacity, 0, 0),
    )
    given = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), given
    )
    return built, *compile_timed(built.step, *given, donate=(0,))


def compile_timed(
    fn: Callable[..., PyTree], *args: PyTree, donate: tuple[int, ...] = ()
) -> tuple[PyTree, float]:
    """Compiles `fn` for `args` without running it; returns it and the seconds that took."""
    started = time.perf_counter()
    compiled = jax.jit(fn, donate_argnums=donate).lower(*args).compile()
    return compiled, time.perf_counter() - started


def num_bytes_held(program: PyTree) -> int:
    """Bytes of each device: arguments, what is held for a while, and new results."""
    planned = program.memory_analysis()
    new = planned.output_size_in_bytes - planned.alias_size_in_bytes
    return planned.argument_size_in_bytes + planned.temp_size_in_bytes + new


def flop_per_step(config: ConfigDict, dataset: datasets.Dataset) -> int:
    """Multiplications and additions of l examples' gradients, by the method's own arithmetic."""
    module = parts.make_model(config.model, dataset.num_classes)
    shape = dataset.train.images.shape[1:]
    model = trainer.models.as_functions(module, shape, convolution="xla")
    weights = finetune.split(jax.eval_shape(model.init, jax.random.key(0)), config.trainable)
    gradient = parts.make_gradient(config.method, model.loss)
    example = examples.example_like(config, shape)
    return config.expected_batch_size * arithmetic.matrix_flops(gradient, *weights, example)


def collectives(text: str) -> list[JsonObject]:
    """What a compiled program's devices exchange, the largest first; those in a loop count once."""
    counts = Counter[tuple[int, str]]()
    for shape, kind, start in re.findall(COLLECTIVE, text):
        # The result of one that starts lists what goes in and what comes out.
        twice = bool(start) and shape.startswith("((")
        counts[num_bytes(shape) // (1 + twice), kind] += 1
    return [
        {"kind": kind, "count": counts[size, kind], "bytes": size}
        for size, kind in sorted(counts, reverse=True)
    ]


def num_bytes(shape: str) -> int:
    """Bytes of an array, or of all arrays of a tuple, from its type as XLA writes it."""
    total = 0.0
    for dtype, sides in re.findall(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]", shape):
        bits = re.search(r"\d+", dtype)
        width = int(bits[0]) / 8 if bits else dtype == "pred"
        total += width * math.prod(int(side) for side in sides.split(",") if side)
    return int(total)
