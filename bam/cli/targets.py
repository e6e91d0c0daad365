"""Accelerators that need not be there: what JAX's compilers have to know of them.

What a device has is from data sheets; nothing here is measured.
"""

import os
import re
from typing import NamedTuple

import jax

from bam.files import JsonObject


class Kind(NamedTuple):
    """What the data sheet says of one device.

    Attributes:
      platform: "tpu" or "cuda".
      memory_bytes: of one device.
      peak_flops: floating-point operations a second in matrix products of bfloat16.
      bandwidth: bytes a second between the device and its memory.
      cycles: a second; 0 where the compiler estimates none.
      spec: of a GPU, what its compiler asks for.
      on_chip_bytes: of a TPU, the memory on the chip, in which its compiler places what it can.
    """

    platform: str
    memory_bytes: int
    peak_flops: float
    bandwidth: float
    cycles: float = 0
    spec: str = ""
    on_chip_bytes: int = 0


def _gpu(
    name: str, memory_bytes: int, peak_flops: float, bandwidth: float, *,
    cores: int, clock: float, l2_cache: int, capability: str, units: int = 128,
) -> Kind:  # fmt: skip
    """A GPU, with its specification in the text format of XLA's `GpuTargetConfigProto`."""
    feature = "NONE" if capability == "8" else "ACCELERATED_FEATURES"
    shared = 167_936 if capability == "8" else 233_472
    spec = f"""gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_block: 49152  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared - 1024}
  core_count: {cores}  fpus_per_core: {units}  clock_rate_ghz: {clock}
  memory_bandwidth: {bandwidth:.0f}  l2_cache_size: {l2_cache}
  device_memory_size: {memory_bytes}
  cuda_compute_capability {{ major: {capability} feature_extension: {feature} }}
  driver_version: "12.9.0"  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""
    return Kind("cuda", memory_bytes, peak_flops, bandwidth, spec=spec)


GIB = 2**30
KINDS = {
    "v4": Kind("tpu", 32 * GIB, 275e12, 1228e9, 1.05e9, on_chip_bytes=128 * 2**20),
    "v5e": Kind("tpu", 16 * GIB, 196.6e12, 819e9, 1.5e9, on_chip_bytes=128 * 2**20),
    "v5p": Kind("tpu", 95 * GIB, 459e12, 2765e9, 1.75e9, on_chip_bytes=128 * 2**20),
    "v6e": Kind("tpu", 32 * GIB, 918e12, 1640e9, 1.75e9, on_chip_bytes=128 * 2**20),
    "a100": _gpu(
        "NVIDIA A100-SXM4-80GB", 85_100_068_864, 312e12, 2.039e12,
        cores=108, clock=1.41, l2_cache=41_943_040, capability="8", units=64,
    ),
    "h100": _gpu(
        "NVIDIA H100 80GB HBM3", 84_942_979_072, 989e12, 3.352e12,
        cores=132, clock=1.98, l2_cache=52_428_800, capability="9",
    ),
    "h200": _gpu(
        "NVIDIA H200", 151_397_597_184, 989e12, 4.8e12,
        cores=132, clock=1.98, l2_cache=52_428_800, capability="9",
    ),
    "b200": _gpu(
        "NVIDIA B200", 191_514_411_008, 2250e12, 7.672e12,
        cores=148, clock=1.965, l2_cache=132_644_864, capability="10",
    ),
}  # fmt: skip
EXAMPLES = "v5e:1x1, v5e:2x4, v5e:16x16, v6e:2x2, v5p:2x2x1, v4:2x2x1, h100, h100:8, a100, b200"


def kind_of(target: str) -> Kind:
    """The kind of a target's devices; a ValueError for one that is not known."""
    name, _, shape = target.partition(":")
    kind = KINDS.get(name)
    shapes = {"tpu": r"[1-9]\d*(x[1-9]\d*){1,2}", "cuda": r"([1-9]\d*)?"}
    if kind is None or not re.fullmatch(shapes[kind.platform], shape):
        raise ValueError(f"unknown target {target!r}; for example {EXAMPLES}")
    return kind


def prepare(target: str) -> None:
    """Sets, before JAX starts, what its compilers read from the environment."""
    jax.config.update("jax_platforms", "cpu")
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # it would ask the network where it is, so it is told
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # there is no device for two to fight over
    if kind_of(target).platform == "cuda":  # there is nothing to try kernels on
        known = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{known} --xla_gpu_autotune_level=0".strip()


def devices_of(target: str) -> list[jax.Device]:
    """The target's devices, to compile for.

    ValueError if there are none of that shape, or if the compiler is not installed.
    """
    from jax.experimental import topologies

    kind, (name, _, shape) = kind_of(target), target.partition(":")
    options: JsonObject
    if kind.platform == "tpu":
        sides = [int(side) for side in shape.split("x")]
        # A host has up to 2 × 2 chips.
        host = (2 - sides[0] % 2, 2 - sides[1] % 2, 1)
        options = {"topology_name": target, "chips_per_host_bounds": host}
        if name == "v4":  # both cores of a chip are one device
            options["chip_config_name"] = "megacore"
    else:
        options = {"topology_name": name, "target_config": kind.spec}
        options["topology"] = f"1x1x{shape or 1}"
    platform = kind.platform
    try:
        described = topologies.get_topology_desc(platform=platform, **options)
    except (RuntimeError, NotImplementedError) as error:
        missing = {"tpu": "libtpu", "cuda": "jax_plugins.xla_cuda12"}[platform]
        if not _installed(missing):
            install = f"pip install '.[{platform}]' in a clone of bam"
            raise ValueError(f"the compiler for {name} is not installed: {install}") from None
        raise ValueError(f"{target}: {' '.join(str(error).split())[:300]}") from None
    return list(described.devices)


def _installed(module: str) -> bool:
    import importlib.util

    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False
