"""A config's step compiled for TPUs and GPUs that are not there, and what its compiler says of it.

What a device has is from data sheets; nothing is run or measured.
"""

import importlib.util
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import PyTree
from ml_collections import ConfigDict

from bam import provenance
from bam.cli import timing
from bam.core import sampling
from bam.core.fixed_point import rows_per_sum
from bam.data import datasets, features
from bam.data.stream import select
from bam.files import JsonObject
from bam.models import layers
from bam.privacy.plan import PrivacyPlan
from bam.training import finetune, loading, registry, trainer

GIB = 2**30
COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
# For a microbatch_size of "auto": so many images at once, of so many examples at most. A TPU is
# fastest, by its compiler's estimate, at few, which stay in memory on the chip.
AT_ONCE = {"tpu": (64, 16), "cuda": (1024, 1024)}


class Kind(NamedTuple):
    """What the data sheet says of one device.

    Attributes:
      memory_bytes: of one device.
      peak_flops: floating-point operations a second in matrix products of bfloat16.
      cycles: a second, of a TPU, whose compiler counts them.
      spec: of a GPU, what its compiler asks for.
    """

    memory_bytes: int
    peak_flops: float
    cycles: float = 0
    spec: str = ""

    @property
    def platform(self) -> str:
        """Whose compiler it is: "tpu" or "cuda"."""
        return "cuda" if self.spec else "tpu"


# XLA's `GpuTargetConfigProto` in its text format.
GPU_SPEC = """gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_block: 49152  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared_by_choice}
  core_count: {cores}  fpus_per_core: {units}  clock_rate_ghz: {clock}
  memory_bandwidth: {bandwidth:.0f}  l2_cache_size: {l2_cache}
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {capability} feature_extension: {extension} }}
  driver_version: "12.9.0"  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""


def _gpu(name: str, memory: int, peak_flops: float, **spec: float) -> Kind:
    old = spec["capability"] == 8
    shared = 167_936 if old else 233_472
    text = GPU_SPEC.format(
        name=name, memory=memory, **spec, units=64 if old else 128, shared=shared,
        shared_by_choice=shared - 1024, extension="NONE" if old else "ACCELERATED_FEATURES",
    )  # fmt: skip
    return Kind(memory, peak_flops, spec=text)


KINDS = {
    "v4": Kind(32 * GIB, 275e12, 1.05e9),
    "v5e": Kind(16 * GIB, 196.6e12, 1.5e9),
    "v5p": Kind(95 * GIB, 459e12, 1.75e9),
    "v6e": Kind(32 * GIB, 918e12, 1.75e9),
    "a100": _gpu(
        "NVIDIA A100-SXM4-80GB", 85_100_068_864, 312e12, bandwidth=2.039e12,
        cores=108, clock=1.41, l2_cache=41_943_040, capability=8,
    ),
    "h100": _gpu(
        "NVIDIA H100 80GB HBM3", 84_942_979_072, 989e12, bandwidth=3.352e12,
        cores=132, clock=1.98, l2_cache=52_428_800, capability=9,
    ),
    "h200": _gpu(
        "NVIDIA H200", 151_397_597_184, 989e12, bandwidth=4.8e12,
        cores=132, clock=1.98, l2_cache=52_428_800, capability=9,
    ),
    "b200": _gpu(
        "NVIDIA B200", 191_514_411_008, 2250e12, bandwidth=7.672e12,
        cores=148, clock=1.965, l2_cache=132_644_864, capability=10,
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


def devices_of(target: str) -> list[jax.Device]:
    """The target's devices, to compile for, before JAX has started.

    It sets what JAX's compilers read from the environment. ValueError if there are no devices of
    that shape, or if the compiler is not installed.
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
        # A host has up to 2 × 2 chips.
        host = (2 - sides[0] % 2, 2 - sides[1] % 2, 1)
        options = {"topology_name": target, "chips_per_host_bounds": host}
        if name == "v4":  # both cores of a chip are one device
            options["chip_config_name"] = "megacore"
    else:
        known = os.environ.get("XLA_FLAGS", "")  # there is nothing to try kernels on
        os.environ["XLA_FLAGS"] = f"{known} --xla_gpu_autotune_level=0".strip()
        options = {"topology_name": name, "target_config": kind.spec}
        options["topology"] = f"1x1x{shape or 1}"
    try:
        described = topologies.get_topology_desc(platform=kind.platform, **options)
    except (RuntimeError, NotImplementedError) as error:
        needed = {"tpu": "libtpu", "cuda": "jax_cuda12_plugin"}[kind.platform]
        if not importlib.util.find_spec(needed):
            install = f"pip install '.[{kind.platform}]' in a clone of bam"
            raise ValueError(f"the compiler for {name} is not installed: {install}") from None
        raise ValueError(f"{target}: {' '.join(str(error).split())[:300]}") from None
    return list(described.devices)


class Compiled(NamedTuple):
    """A step that compiled, or the reason why it did not."""

    experiment: trainer.Trainer
    program: PyTree
    problem: str
    seconds: float


def look(
    config: ConfigDict, target: str, hardware: list[jax.Device], size: int = 0
) -> tuple[JsonObject, str]:
    """All that the compiler says of a config's step on a target's devices; the program's text.

    With a size, images are squares of so many pixels, which are streamed.
    """
    kind = kind_of(target)
    config = config.copy_and_resolve_references()
    if config.convolution == "auto":
        config.convolution = layers.OF_PLATFORM.get(kind.platform, "xla")
    dataset = _dataset(config.dataset, size)
    if feature_map := registry.make_features(config.features):
        dataset = features.blank(dataset, feature_map)
    rows, is_auto = config.microbatch_size, config.microbatch_size == "auto"
    if is_auto:
        images, examples = AT_ONCE[kind.platform]
        rows = max(1, min(examples, images // registry.num_inputs(config)))
        rows = min(rows, config.expected_batch_size, len(dataset.train.labels))
    while True:
        with config.ignore_type():
            config.microbatch_size = rows
        compiled = compile_step(config, dataset, hardware)
        usage = {} if compiled.problem else memory(compiled.program)
        fits = bool(usage) and usage["total"] <= kind.memory_bytes
        if fits or rows == 1 or not is_auto:
            break
        rows = max(1, rows // 8)
    plan, text = compiled.experiment.plan, ""
    answer = {
        "config": f"{config.dataset.name}:{config.method.name}",
        "target": target,
        "device": hardware[0].device_kind,
        "num_devices": len(hardware),
        "method": config.method.to_dict(),
        "precision": config.precision,
        "compiles": not compiled.problem,
        "problem": compiled.problem,
        "compile_seconds": compiled.seconds,
        "fits": fits,
        "device_memory_bytes": kind.memory_bytes,
        "microbatch_size": rows,
        "num_steps": plan.num_steps,
        "expected_batch_size": plan.expected_batch_size,
        "num_params": compiled.experiment.num_params,
        "flop_per_step": flop_per_step(config, dataset),
        "commit": provenance.git_commit(),
        "versions": provenance.versions(),
    }
    if usage:
        text = compiled.program.as_text()
        answer |= {
            "memory_bytes": usage["total"],
            "argument_bytes": usage["arguments"],
            "temporary_bytes": usage["temporary"],
            **_read(compiled, Program(text), kind, len(hardware), answer["flop_per_step"]),
        }
    return answer, text


def _dataset(section: ConfigDict, size: int = 0) -> datasets.Dataset:
    """The data set, or blank images, as many, of a public one that need not be there."""
    facts = datasets.DATASETS.get(section.name)
    if not (facts and any(facts.rows)) or section.path:
        return loading.make_dataset(section)
    blank, holdout = datasets.stand_in(section.name, size), section.holdout
    if holdout >= len(blank.train.labels):
        return datasets.hold_out(blank, holdout)  # says what is wrong
    train, test = (
        datasets.Split(*(select(x, np.s_[:n]) for x in blank.train))
        for n in (-holdout or None, holdout)
    )
    return blank._replace(train=train, test=test if holdout else blank.test)


def compile_step(
    config: ConfigDict, dataset: datasets.Dataset, hardware: list[jax.Device]
) -> Compiled:
    """The step of a config, compiled for devices."""
    built = trainer.build(config, dataset, hardware)
    sharding = NamedSharding(built.mesh, PartitionSpec()) if built.mesh else None
    everywhere = sharding or SingleDeviceSharding(hardware[0])
    capacity, rows = built.plan.capacity, built.dataset.train
    if datasets.streams(built.dataset):
        rows = datasets.Split(
            np.broadcast_to(np.uint8(0), (capacity, *rows.images.shape[1:])),
            np.broadcast_to(np.int32(0), capacity),
        )
    given = (
        jax.eval_shape(lambda: built.init(0)),
        jax.eval_shape(lambda: built.place(rows)),
        sampling.pad(np.arange(0), capacity, 0, 0),
    )
    given = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), given
    )
    started = time.perf_counter()
    try:
        program, problem = built.step.lower(*given).compile(), ""  # type: ignore[attr-defined]
    except jax.errors.JaxRuntimeError as error:
        program, problem = None, " ".join(str(error).split())[:300]
    return Compiled(built, program, problem, time.perf_counter() - started)


def memory(program: PyTree) -> dict[str, int]:
    """Bytes of each device: arguments, what is held for a while, and all of it."""
    planned = program.memory_analysis()
    arguments, temporary = planned.argument_size_in_bytes, planned.temp_size_in_bytes
    new = planned.output_size_in_bytes - planned.alias_size_in_bytes
    return {"arguments": arguments, "temporary": temporary, "total": arguments + temporary + new}


def flop_per_step(config: ConfigDict, dataset: datasets.Dataset) -> int:
    """Multiplications and additions of l examples' gradients, by the method's own arithmetic."""
    module = registry.make_model(config.model, dataset.num_classes)
    shape = dataset.train.images.shape[1:]
    model = trainer.models.as_functions(module, shape, convolution="xla")
    weights = finetune.split(jax.eval_shape(model.init, jax.random.key(0)), config.trainable)
    gradient = registry.make_gradient(config.method, model.loss)
    example = registry.example_like(config, shape)
    return config.expected_batch_size * timing.matrix_flops(gradient, *weights, example)


def turns_of_draws(plan: PrivacyPlan, num_devices: int, size: int) -> np.ndarray:
    """Groups of `size` rows that a device runs in a step: of 500 draws.

    With noise, whose rows have random places, as many as the rows at the fullest place of a
    microbatch, shared by the devices.
    """
    random = np.random.default_rng(0)
    seats = -(-plan.capacity // (size * num_devices)) * num_devices  # of each place
    drawn = np.full(500, plan.capacity)
    if plan.mechanism_name == "poisson":
        drawn = np.minimum(random.binomial(plan.num_examples, plan.sampling_prob, 500), drawn)
    if not plan.private:
        return np.ceil(np.ceil(drawn / num_devices) / size)
    at_places = [random.multivariate_hypergeometric([seats] * size, rows).max() for rows in drawn]
    return np.ceil(np.array(at_places) / num_devices)


def _read(
    compiled: Compiled, program: "Program", kind: Kind, num_devices: int, flop_per_step: int
) -> JsonObject:
    """What devices exchange in a step and, for a TPU, its cycles."""
    built, plan = compiled.experiment, compiled.experiment.plan
    size, rows_per_carry = built.config.microbatch_size, math.inf
    if plan.private:
        noise_std = plan.noise_multiplier * built.sensitivity
        rows_per_carry = rows_per_sum(built.sensitivity, noise_std, plan.capacity)
    at_once = int(min(rows_per_carry, size))
    drawn = turns_of_draws(plan, num_devices, at_once)
    groups, carries = np.mean(drawn), np.mean(np.ceil(drawn / (rows_per_carry // at_once)))
    uncounted = set()

    def turns(scope: str) -> float:
        if scope.endswith("carries/while"):
            return float(carries)
        if scope.endswith("microbatches/while"):
            return float(groups / carries if "carries" in scope else groups)
        if not scope.endswith("from_memory/while"):  # see `bam.core.pytree.read_from_memory`
            uncounted.add(scope)
        return 1

    cycles = sum(times * step.cycles for step, times in program.walk(turns))
    facts = {"collectives": program.collectives(turns), "loops_counted_once": sorted(uncounted)}
    if kind.platform != "tpu":
        return facts
    seconds = cycles / kind.cycles
    hours = plan.num_steps * seconds / 3600
    return facts | {
        "estimated_cycles_per_step": cycles,
        "estimated_seconds_per_step": seconds,
        "estimated_share_of_peak": flop_per_step / num_devices / kind.peak_flops / seconds,
        "estimated_hours_per_run": hours,
        "estimated_device_hours_per_run": num_devices * hours,
    }


class Instruction(NamedTuple):
    """One line of a computation: `%name = SHAPE opcode(rest`."""

    name: str
    shape: str
    opcode: str
    rest: str

    def attribute(self, pattern: str) -> str:
        """The first group of a pattern in the rest; "" if it is not there."""
        match = re.search(pattern, self.rest)
        return match[1] if match else ""

    @property
    def cycles(self) -> int:
        """What the TPU compiler expects of it."""
        return int(self.attribute(r'"estimated_cycles":"(\d+)"') or 0)


class Program:
    """A compiled program, from its text, which lists an instruction inside a loop once.

    `turns(scope)` says how often a loop runs that does not count up to a constant.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = name = ""
        for line in text.splitlines():
            if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                name = head[2]
                self.computations[name] = []
                self.entry = name if head[1] else self.entry
            elif step := re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)", line):
                self.computations[name].append(Instruction(*step.groups()))
        if not self.entry:
            raise ValueError("this is not the text of a compiled program")

    def walk(
        self, turns: Callable[[str], float], name: str = "", times: float = 1
    ) -> Iterator[tuple[Instruction, float]]:
        """Every instruction that runs, and how often."""
        for step in self.computations[name or self.entry]:
            called, inner = list[str](), times
            if step.opcode == "while":
                called = re.findall(r"(?:body|condition)=%([\w.\-]+)", step.rest)
                inner *= self._known_turns(step) or turns(step.attribute(r'op_name="([^"]*)"'))
            elif step.opcode in ("call", "conditional"):
                one = r"(?:to_apply|true_computation|branch_computations)=\{?%([\w.\-]+)"
                called = [step.attribute(one)]
            else:
                yield step, times
            for computation in filter(None, called):
                yield from self.walk(turns, computation, inner)

    def _known_turns(self, loop: Instruction) -> int:
        """How often a loop runs, by the compiler or by its condition "less than N"; 0: unknown."""
        if known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
            return int(known)
        condition = self.computations.get(loop.attribute(r"condition=%([\w.\-]+)"), [])
        last = condition[-1] if condition else loop
        if last.opcode != "compare" or "direction=LT" not in last.rest:
            return 0
        limit = last.attribute(r"^[^)]*, %([\w.\-]+)\)")
        constants = [x for x in condition if x.name == limit and x.opcode == "constant"]
        return int(constants[0].attribute(r"^(\d+)\)") or 0) if constants else 0

    def collectives(self, turns: Callable[[str], float]) -> list[JsonObject]:
        """What devices exchange in a step, the largest first; several arrays may be one."""
        counts: dict[tuple[int, str], float] = {}
        for step, times in self.walk(turns):
            kind = step.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                size = num_bytes(step.shape)
                if step.opcode.endswith("-start") and step.shape.startswith("(("):
                    size //= 2  # its result lists what goes in and what comes out
                counts[size, kind] = counts.get((size, kind), 0) + times
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
