"""Timing of compiled functions: medians with spread, compilation apart."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from bam import files, provenance
from bam.core import sampling
from bam.files import JsonMapping, JsonObject
from bam.training import ahead, devices, trainer
from scripts.benchmarks.cold_case import Numbers


class Timing(NamedTuple):
    """Seconds per call: median and quartiles; and of tracing and compiling, once."""

    median: float
    low: float
    high: float
    compile_seconds: float


def compiled_step(built: trainer.Trainer, batch: int) -> tuple[Any, float, PyTree, PyTree]:
    """A training step of `batch` examples, the seconds it took to compile, and its arguments.

    They are the state, which the step's own result replaces, and the others, which stay: the
    training examples on the devices, and the batch.
    """
    train = built.place(built.dataset.train)
    state, others = built.init(0), (train, sampling.pad(np.arange(batch), batch, 0, 0))
    compiled, seconds = ahead.compile_timed(built.step, state, *others, donate=(0,))
    return compiled, seconds, state, others


def step_of(built: trainer.Trainer, batch: int) -> tuple[Callable[[], PyTree], float]:
    """A call that does a training step of `batch` examples, and the seconds it took to compile."""
    compiled, seconds, state, others = compiled_step(built, batch)

    def call() -> PyTree:
        nonlocal state
        state = compiled(state, *others)
        return state.step

    return call, seconds


def measure(
    calls: Mapping[str, Callable[[], PyTree]], trials: int, repeats: int
) -> dict[str, list[float]]:
    """Times several calls in turn, so that what else the machine does meets all of them.

    Each of `trials` rounds calls everything `repeats` times in a row and notes the mean seconds. A
    first, untimed round warms up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for trial in range(trials + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            for _ in range(repeats):
                jax.block_until_ready(call())
            if trial > 0:
                seconds[name].append((time.perf_counter() - started) / repeats)
    return seconds


def keep(path: Path, facts: JsonMapping) -> None:
    """Writes a measurement as JSON, with what it was made on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    where = {"device": devices.name(), "num_devices": jax.device_count()}
    files.write_json(path, {**where, "versions": provenance.versions(), **facts})


def summarize(seconds: list[float], compile_seconds: float) -> Timing:
    """Median and quartiles of the observations."""
    low, median, high = (float(x) for x in np.quantile(seconds, (0.25, 0.5, 0.75)))
    return Timing(median, low, high, compile_seconds)


def summarize_cold(facts: Sequence[JsonObject]) -> JsonObject:
    """Median and quartiles of the seconds, and medians of what XLA does, of a case's rounds.

    `changes` are the seconds to the first step of another value of a number, with what is built.
    """
    observed = [x["phases"] for x in facts]

    def seconds(values: list[float]) -> JsonObject:
        median, low, high, _ = summarize(values, 0.0)
        return {"median": median, "low": low, "high": high}

    phases = {
        phase: seconds([x[phase]["seconds"] for x in observed])
        | {
            name: statistics.median(x[phase][name] for x in observed)
            for name in ("compilations", "xla_seconds")
        }
        for phase in observed[0]
    }
    changes = {
        name: seconds([x[name]["seconds"] + x[f"{name}_build"]["seconds"] for x in observed])
        for name in Numbers._fields
        if name in phases
    }
    first = seconds([x["seconds_to_first_step"] for x in facts])
    return {"to_first_step": first, "changes": changes, "phases": phases}
