"""A config's step compiled for TPUs and GPUs that this machine lacks, and its compiler's figures.

The sizes of devices are from data sheets. Nothing is run or timed.
"""

import importlib.util
import math
import os
import re
from collections import Counter
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import PyTree
from ml_collections import ConfigDict

from bam import provenance
from bam.core import sampling
from bam.data import datasets
from bam.data.stream import select
from bam.errors import InputError
from bam.features import extraction
from bam.files import JsonObject
from bam.models import layers
from bam.privacy import processes
from bam.privacy.private_gradient import batch_of
from bam.training import loading, loop, parts, trainer
from scripts.benchmarks import arithmetic, timing

GIB = 2**30
CONVOLUTION = re.compile(
    r"window={size=(\w+).*?(?:feature_group_count=(\d+).*)?custom_call_target=\"__cudnn\$conv(\w+)"
)
COLLECTIVE = r" = (.+?) (all-(?:reduce|gather|to-all)|reduce-scatter|collective-\w+)(-start)?\("


class Kind(NamedTuple):
    """A kind of device by its data sheet.

    Attributes:
      platform: "tpu" or "cuda", which decides the compiler.
      memory_bytes: memory of one device.
      spec: the description that a GPU's compiler needs; "" for a TPU.
    """

    platform: str
    memory_bytes: int
    spec: str = ""


# XLA's `GpuTargetConfigProto` in its text format: it stands for the GPU that XLA would ask.
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
    """Returns the kind of a target's devices.

    InputError for an unknown target.
    """
    name, _, shape = target.partition(":")
    kind = KINDS.get(name)
    shapes = {"tpu": r"[1-9]\d*(x[1-9]\d*){1,2}", "cuda": r"([1-9]\d*)?"}
    if kind is None or not re.fullmatch(shapes[kind.platform], shape):
        raise InputError(
            f"unknown target {target!r}: give KIND:SHAPE, as v5e:1x1 or h100:8, with a kind of "
            f"{', '.join(KINDS)}"
        )
    return kind


def devices_of(target: str) -> list[jax.Device]:
    """Returns the target's devices, for which to compile.

    Call it before JAX starts. It sets JAX's platform to the CPU and the environment variables of
    the compilers. InputError if a target has no devices of that shape, or if its compiler is not
    installed.
    """
    from jax.experimental import topologies

    kind, (name, _, shape) = kind_of(target), target.partition(":")
    # Otherwise JAX would start on an accelerator, if one is there, only to compile.
    jax.config.update("jax_platforms", "cpu")
    # Without these three, libtpu asks the network which machine it runs on.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # libtpu's lock guards a device against two processes; here it uses none.
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    options: JsonObject
    if kind.platform == "tpu":
        sides = [int(side) for side in shape.split("x")]
        host = (2 - sides[0] % 2, 2 - sides[1] % 2, 1)  # a host has at most 2 × 2 chips
        options = {"topology_name": target, "chips_per_host_bounds": host}
    else:
        # Autotuning runs kernels, for which a GPU is missing.
        user_flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{user_flags} --xla_gpu_autotune_level=0".strip()
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
    """The compiler's figures of a config's step on a target's devices, as a JSON object.

    They are the seconds to compile, memory, arithmetic, collective operations and a GPU's
    convolutions, beside the plan's numbers and the versions. If the step does not compile, the
    object holds the compiler's problem.

    Args:
      config: the config of the run.
      target: the devices, such as "h100:8".
      hardware: its devices, from `devices_of`.
      size: 0 takes the data set's images; otherwise images are streamed squares of so many pixels.
    """
    kind = kind_of(target)
    config = config.copy_and_resolve_references()
    # "" would choose by the platform of this process, which is a CPU.
    config.convolution = config.convolution or layers.OF_PLATFORM.get(kind.platform, "xla")
    dataset = _dataset(config.dataset, size)
    if feature_map := parts.make_features(config.features):
        dataset = extraction.blank(dataset, feature_map)
    try:
        built, program, seconds = compile_step(config, dataset, hardware)
    except jax.errors.JaxRuntimeError as error:
        problem = " ".join(str(error).split())[:300]
        return {"target": target, "compiles": False, "problem": problem}
    needed, text = num_bytes_held(program), program.as_text()
    return {
        "target": target,
        "compiles": True,
        "config": f"{config.dataset.name}:{config.method.name}",
        "device": hardware[0].device_kind,
        "num_devices": len(hardware),
        "precision": config.precision,
        "convolution": config.convolution,
        "compile_seconds": seconds,
        "memory_bytes": needed,
        "device_memory_bytes": kind.memory_bytes,
        "fits": needed <= kind.memory_bytes,
        "microbatch_size": config.microbatch_size,
        "num_steps": built.plan.num_steps,
        "expected_batch_size": built.plan.expected_batch_size,
        "num_params": built.num_params,
        "flop_per_step": arithmetic.flop_per_step(config, dataset),
        "collectives": collectives(text),
        "convolutions": convolutions(text),
        "commit": provenance.git_commit(),
        "versions": provenance.versions(),
    }


def _dataset(section: ConfigDict, size: int = 0) -> datasets.Dataset:
    """The data set, with blank images if it is a public one of known size without a path."""
    # A public set is not downloaded: only the number and shape of its images are compiled.
    row = datasets.DATASETS.get(section.name)
    if not (row and any(row.rows)) or section.path:
        return loading.make_dataset(section)
    blank = datasets.stand_in(section.name, size)
    train = (select(x, np.s_[section.holdout :]) for x in blank.train)
    return blank._replace(train=datasets.Split(*train))


def compile_step(
    config: ConfigDict, dataset: datasets.Dataset, hardware: list[jax.Device]
) -> tuple[trainer.Trainer, PyTree, float]:
    """A config's trainer for devices, its step compiled for them, and the seconds to compile."""
    built = loop.build(config, dataset, hardware)
    sharding = processes.everywhere(built.mesh)
    everywhere = sharding or SingleDeviceSharding(hardware[0])
    # Nothing is placed, because the devices may not be there.
    nothing = np.full(built.plan.capacity, sampling.PADDING, np.int32)
    rows = jax.eval_shape(lambda: built.rows(nothing))
    whole = {name: (built.plan.num_examples, *rows[name].shape[1:]) for name in ("image", "label")}
    data = {name: jax.ShapeDtypeStruct(shape, rows[name].dtype) for name, shape in whole.items()}
    numbers = {"row": rows["row"], "data": data}
    batch = batch_of(numbers, np.zeros(len(nothing), bool), 1, np.zeros(2, np.uint32))

    def on(sharding: Sharding, tree: PyTree) -> PyTree:
        # Shapes alone would be compiled for the default device.
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
        return jax.tree.map(shape, tree)

    batch = on(everywhere, batch)
    if datasets.streams(built.listing):
        shared = processes.of_rows(len(nothing), built.mesh) or everywhere
        batch = batch._replace(examples=on(shared, rows))
    arguments = (on(everywhere, jax.eval_shape(lambda: built.init(0))), batch)
    return built, *timing.compile_and_time(built.step, *arguments, donate=(0,))


def num_bytes_held(program: PyTree) -> int:
    """Bytes of each device: a step's arguments with all data, temporaries and new results."""
    planned = program.memory_analysis()
    # A donated argument lends its memory to a result, which then counts once.
    new = planned.output_size_in_bytes - planned.alias_size_in_bytes
    return int(planned.argument_size_in_bytes + planned.temp_size_in_bytes + new)


def collectives(text: str) -> list[JsonObject]:
    """The collective operations of a compiled program, the largest first.

    Each entry has the kind, the number of such operations, and the bytes of one. An operation in a
    loop counts once.
    """
    counts = Counter[tuple[int, str]]()
    for shape, kind, start in re.findall(COLLECTIVE, text):
        # The result type of an asynchronous start lists its inputs and its outputs.
        twice = bool(start) and shape.startswith("((")
        counts[num_bytes(shape) // (1 + twice), kind] += 1
    return [
        {"kind": kind, "count": counts[size, kind], "bytes": size}
        for size, kind in sorted(counts, reverse=True)
    ]


def convolutions(text: str) -> list[JsonObject]:
    """The convolutions by cuDNN in a program for a GPU.

    Each entry has cuDNN's kind, the groups, the window in pixels, and the number of such
    convolutions. One in a loop counts once.
    """
    calls = CONVOLUTION.findall(text)
    counts = Counter((kind, int(groups or 1), window) for window, groups, kind in calls)
    return [
        {"kind": kind, "groups": groups, "window": window, "count": count}
        for (kind, groups, window), count in sorted(counts.items())
    ]


def num_bytes(shape: str) -> int:
    """Bytes of an array, or of all arrays in a tuple, from XLA's text of its type."""
    total = 0.0
    for dtype, sides in re.findall(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]", shape):
        # The number in a type's name is its bits, as in bf16 and f8e4m3; "pred" takes a byte.
        bits = re.search(r"\d+", dtype)
        width = int(bits[0]) / 8 if bits else dtype == "pred"
        total += width * math.prod(int(side) for side in sides.split(",") if side)
    return int(total)
