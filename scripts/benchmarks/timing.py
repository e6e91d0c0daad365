"""Timing of compiled functions: medians and quartiles, with compilation timed separately."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from bam import files, provenance, waits
from bam.cli import screen
from bam.files import JsonMapping, JsonObject
from bam.privacy.private_gradient import batch_of
from bam.text import plural
from bam.training import devices, duration, trainer
from scripts.benchmarks.cold_case import Numbers

NUM_BATCHES = 4  # drawn batches that one timing takes in turn: their sizes differ


class Timing(NamedTuple):
    """Median and quartiles of the seconds per call, and the seconds of tracing and compiling.

    The last is None for a program that is not compiled.
    """

    median: float
    low: float
    high: float
    compile_seconds: float | None


def compile_and_time(
    fn: Callable[..., PyTree], *args: PyTree, donate: tuple[int, ...] = ()
) -> tuple[PyTree, float]:
    """Compiles `fn` for `args` without running it.

    It returns the program and the seconds that compiling took.
    """
    started = time.perf_counter()
    compiled = jax.jit(fn, donate_argnums=donate).lower(*args).compile()
    return compiled, time.perf_counter() - started


class Steps(NamedTuple):
    """A run's step for each of several batches, as the run draws them.

    Attributes:
      program: the compiled step.
      compile_seconds: the seconds of tracing and compiling.
      take: takes one step after another, each with another batch.
      drawn: the number of examples in each batch.
      capacity: the number of rows of a batch, with its empty places.
      rows_per_example: how many rows are computed for each example.
    """

    program: Any
    compile_seconds: float
    take: Callable[[], PyTree]
    drawn: list[int]
    capacity: int
    rows_per_example: float

    def ms_per_example(self, seconds: float) -> float:
        """Milliseconds for a drawn example if `take` takes these seconds."""
        return 1e3 * seconds / sum(self.drawn)


def steps_of(built: trainer.Trainer) -> Steps:
    """The steps of a run for `NUM_BATCHES` drawn batches."""
    state, rows = built.init(0), built.place_rows()
    tag, step = np.asarray(state.private.tag), 0
    padded = duration.drawn_batches(built, NUM_BATCHES)
    batches = [rows.of(x) for x in padded]
    first = batch_of(*batches[0], 1, tag)
    program, seconds = compile_and_time(built.step, state, first, donate=(0,))

    def take() -> PyTree:
        nonlocal state, step
        for batch in batches:
            step += 1
            state = program(state, batch_of(*batch, step, tag))
            jax.block_until_ready(state.step)  # as a run waits
        return state.step

    drawn = [int(mask.sum()) for _, mask in batches]
    size = built.parts.gradient.microbatch_size
    rows_per_example = duration.rows_per_example(built, padded, size)
    return Steps(program, seconds, take, drawn, built.plan.capacity, rows_per_example)


def measure(
    calls: Mapping[str, Callable[[], PyTree]], trials: int, repeats: int
) -> dict[str, list[float]]:
    """Times several calls in turn, so that other load of the machine meets all of them.

    Each of `trials` rounds calls every function `repeats` times in a row and records the mean
    seconds. A first round, without a clock, warms up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    task = f"timing {plural(len(calls), 'program')}, {plural(trials, 'round')}"
    with waits.awaited(screen.show, task) as wait:
        for trial in range(trials + 1):
            for name, call in calls.items():
                started = time.perf_counter()
                for _ in range(repeats):
                    jax.block_until_ready(call())
                if trial > 0:
                    seconds[name].append((time.perf_counter() - started) / repeats)
            wait.share = (trial + 1) / (trials + 1)
    return seconds


def keep(path: Path, results: JsonMapping) -> None:
    """Writes results as JSON, with their device and the versions of libraries."""
    path.parent.mkdir(parents=True, exist_ok=True)
    hardware = {"device": devices.name(), "num_devices": jax.device_count()}
    files.write_json(path, {**hardware, "versions": provenance.versions(), **results})


def summarize(seconds: list[float], compile_seconds: float | None) -> Timing:
    """Median and quartiles of the observations."""
    low, median, high = (float(x) for x in np.quantile(seconds, (0.25, 0.5, 0.75)))
    return Timing(median, low, high, compile_seconds)


def summarize_cold(rounds: Sequence[JsonObject]) -> JsonObject:
    """Median and quartiles of a case's seconds, and medians of XLA's counts and seconds.

    `changes` has, for each number, the seconds to the first step with another value of it; they
    include the time to build.
    """
    observed = [x["phases"] for x in rounds]

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
    first = seconds([x["seconds_to_first_step"] for x in rounds])
    return {"to_first_step": first, "changes": changes, "phases": phases}
