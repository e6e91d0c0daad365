"""Compiling an experiment's step ahead of time, for devices that are not there, and reading it."""

import math
import time
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import PyTree
from ml_collections import ConfigDict

from bam import provenance
from bam.cli import targets, timing
from bam.cli.program import Instruction, Program
from bam.core import sampling
from bam.core.fixed_point import rows_per_sum
from bam.data import datasets, features
from bam.data.stream import select
from bam.files import JsonObject
from bam.models import layers
from bam.privacy.plan import PrivacyPlan
from bam.training import finetune, loading, registry, trainer, tuning


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
    kind = targets.kind_of(target)
    config = config.copy_and_resolve_references()
    if config.convolution == "auto":
        config.convolution = layers.OF_PLATFORM.get(kind.platform, "xla")
    dataset = _dataset(config.dataset, size)
    if feature_map := registry.make_features(config.features):
        dataset = features.blank(dataset, feature_map)
    sizes = [config.microbatch_size]
    if sizes == ["auto"]:
        platform = "tpu" if kind.platform == "tpu" else "gpu"
        first = tuning.accelerator_sizes(platform, registry.num_inputs(config))[0]
        first = min(first, config.expected_batch_size, len(dataset.train.labels))
        sizes = [first, *tuning.smaller(first)]
    for size in sizes:
        with config.ignore_type():
            config.microbatch_size = size
        compiled = compile_step(config, dataset, hardware)
        fits = not compiled.problem and memory(compiled.program)["total"] <= kind.memory_bytes
        if fits:
            break
    plan = compiled.experiment.plan
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
        "microbatch_size": config.microbatch_size,
        "num_steps": plan.num_steps,
        "expected_batch_size": plan.expected_batch_size,
        "num_params": compiled.experiment.num_params,
        "flop_per_step": flop_per_step(config, dataset),
        "commit": provenance.git_commit(),
        "versions": provenance.versions(),
    }
    if compiled.problem:
        return answer, ""
    text = compiled.program.as_text()
    return answer | _facts(compiled, text, kind, len(hardware), answer["flop_per_step"]), text


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
    everywhere = (
        NamedSharding(built.mesh, PartitionSpec())
        if built.mesh
        else SingleDeviceSharding(hardware[0])
    )

    def placed(x: PyTree) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)

    batch = sampling.pad(np.arange(0), built.plan.capacity, 0, 0)
    rows = built.dataset.train
    if datasets.streams(built.dataset):
        num, shape = built.plan.capacity, rows.images.shape[1:]
        rows = datasets.Split(
            np.broadcast_to(np.uint8(0), (num, *shape)), np.broadcast_to(np.int32(0), num)
        )
    train = jax.eval_shape(lambda: built.place(rows))
    arguments = (jax.eval_shape(lambda: built.init(0)), train, batch)
    started = time.perf_counter()
    try:
        program = built.step.lower(*jax.tree.map(placed, arguments)).compile()  # type: ignore[attr-defined]
        problem = ""
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


def _facts(
    compiled: Compiled, text: str, kind: targets.Kind, num_devices: int, flop_per_step: int
) -> JsonObject:
    """What is read from the compiled program."""
    built, program = compiled.experiment, Program(text)
    plan, size = built.plan, built.config.microbatch_size
    rows_each = math.ceil(plan.expected_batch_size / num_devices)
    rows_per_carry = math.inf
    if plan.private:
        noise_std = plan.noise_multiplier * built.sensitivity
        rows_per_carry = rows_per_sum(built.sensitivity, noise_std, plan.capacity)
    at_once = int(min(rows_per_carry, size))
    turns_of = turns_of_draws(plan, num_devices, at_once)
    groups = float(np.mean(turns_of))
    parts_of_sum = float(np.mean(np.ceil(turns_of / (rows_per_carry // at_once))))

    uncounted = set()

    def turns(scope: str) -> float:
        if scope.endswith("carries/while"):
            return parts_of_sum
        if scope.endswith("microbatches/while"):
            return groups / parts_of_sum if "carries" in scope else groups
        if scope.endswith("from_memory/while"):  # see `bam.core.pytree.read_from_memory`
            return 1
        uncounted.add(scope)
        return 1

    bytes_held = memory(compiled.program)
    free = kind.memory_bytes - bytes_held["total"] + bytes_held["temporary"]
    collectives = [
        {"kind": c.kind, "count": c.count, "bytes": c.num_bytes} for c in program.collectives(turns)
    ]
    # What a microbatch needs may lie on the chip, where nobody says how much it is.
    needed = bytes_held["temporary"] + kind.on_chip_bytes
    largest = int(size * max(0, free) // max(1, needed))
    facts: JsonObject = {
        "memory_bytes": bytes_held["total"],
        "argument_bytes": bytes_held["arguments"],
        "temporary_bytes": bytes_held["temporary"],
        "largest_microbatch_at_least": min(largest, rows_each),
        "collectives": collectives,
    }
    peak = flop_per_step / num_devices / kind.peak_flops
    if kind.cycles:
        places: dict[str, float] = {}
        for step, times, loop in program.walk(turns):
            name = place(program, step, loop)
            places[name] = places.get(name, 0) + times * step.cycles
        cycles = sum(places.values())
        seconds = cycles / kind.cycles
        facts |= {
            "estimate": "cycles, by the compiler",
            "estimated_cycles_per_step": cycles,
            "cycles_by_place": {
                name: round(places[name]) for name in sorted(places, key=lambda x: -places[x])
            },
        }
    else:
        kernels, traffic = program.traffic(turns)
        seconds = max(peak, traffic / kind.bandwidth)
        facts |= {
            "estimate": "bound: the longer of arithmetic and memory traffic",
            "kernels_per_step": kernels,
            "memory_traffic_bytes_per_step": traffic,
        }
    return facts | {
        "loops_counted_once": sorted(uncounted),
        "estimated_seconds_per_step": seconds,
        "estimated_share_of_peak": peak / seconds,
        "estimated_hours_per_run": plan.num_steps * seconds / 3600,
        "estimated_device_hours_per_run": num_devices * plan.num_steps * seconds / 3600,
    }


def place(program: Program, step: Instruction, loop: str) -> str:
    """The part of a step that an instruction belongs to."""
    if "microbatches" not in loop:
        return "once per step"
    if program.holds(step, ("convolution", "dot")):
        return "convolutions and products"
    if "GroupNorm" in step.scope:
        return "normalisation"
    if not step.scope or step.opcode.startswith("copy"):
        return "copies"
    return "activations, pooling, loss" if "jvp" in step.scope else "views, clipping, sums"
