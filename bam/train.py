"""Private training: take the planned steps of an experiment, and not one more."""

import math
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from bam import devices, sampling
from bam.checkpoint import Checkpoints
from bam.data import datasets
from bam.experiment import (
    Experiment,
    TrainState,
    build,
    noise_key_from_system,
    with_noise_key,
    without_noise_key,
)
from bam.privacy.accounting import PrivacyPlan
from bam.report import RunFiles, device_name, git_commit, versions
from bam.tree import Params

__all__ = [
    "Experiment", "Result", "StoppedError", "TrainState", "build", "estimate_seconds", "evaluate",
    "not_private", "summarize", "train",
]  # fmt: skip

# What a release says of the randomness; a run records it, so that it is that of the code that ran.
NOISE = (
    "Gaussian in 32-bit floating point, by jax.random.normal (threefry-2x32, a key of 64 bits); "
    "not a cryptographic generator, and not made against attacks on floating-point noise"
)
SAMPLING = (
    "Poisson: each example is in each batch independently with probability q, by NumPy's PCG64; "
    "not a cryptographic generator"
)


class Result(NamedTuple):
    """What a run leaves in memory: the final state, the metrics rows, the summary.

    The state holds the noise key: release `state.params` or `state.averaged`, never all of it.
    """

    state: TrainState
    rows: list[dict[str, Any]]
    summary: dict[str, Any]


class StoppedError(Exception):
    """A run was asked to stop before its end, and did, leaving a checkpoint in its workdir."""


def train(
    experiment: Experiment,
    seed: int | None,
    workdir: Path | None = None,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Takes the planned steps, from the start or from where an earlier call stopped.

    With several processes (`jax.distributed`) all of them call it with the same arguments, and the
    first alone writes; `workdir` must be one folder that all of them see.

    Args:
      experiment: from `build`.
      seed: of weights, batches, views and noise; the same seed gives the same run, stopped and
        resumed or not. Runs of different methods with one seed share batches and noise, which
        pairs them for comparison: never release two of them. Whoever knows the seed can remove
        the noise. None, for a run to release: the operating system's randomness, new in every
        process and never saved. Steps taken again after a crash then have new batches and noise,
        so what was seen of the lost ones is a release that the plan does not count.
      workdir: folder for the run's files (see the README); None writes nothing. An unfinished run
        of the same config goes on from its last checkpoint.
      on_row: called with each metrics row as it is made.
      should_stop: asked after every step; True ends the run there, with a checkpoint.

    Returns:
      A `Result`.

    Raises:
      StoppedError: if `should_stop` ended the run early.
      FileExistsError: if the run in `workdir` is finished.
      ValueError: if the run in `workdir` is of another config, plan or data set, or its checkpoint
        cannot be read.
      BlockingIOError: if another process is training in `workdir`.
      OSError: if `workdir` cannot be written; also before the first step, should there be no room
        for a checkpoint.
    """
    plan, dataset = experiment.plan, experiment.dataset
    git_commit()  # now: by the end the files may be others
    config = experiment.config.copy_and_resolve_references()
    config.seed = seed
    on_device = devices.replicate(dataset.train, experiment.mesh)
    from_system = seed is None
    sampling_seed = _seed_from_system() if seed is None else seed
    first_seed = _seed_from_system() if seed is None else seed
    state = experiment.init(first_seed)
    identity = {"plan": plan.to_json(), "data": _fingerprint(dataset) if workdir else None}
    done, seconds = -1, 0.0  # step 0 is the evaluation before the first step

    with RunFiles(workdir, config, plan) as files, Checkpoints(files.checkpoints) as checkpoints:
        restored = checkpoints.restore(state)
        if restored is not None:
            done, state, facts = restored
            _check_same(files.checkpoints, facts["identity"], identity)
            seconds = facts["seconds"]
        if from_system:
            state = with_noise_key(state, noise_key_from_system())
        if config.checkpoint.every:
            checkpoints.check_room(state)
        rows = files.start_after(done)
        for step in range(done + 1, plan.num_steps + 1):
            if step > 0:
                plan.check_steps(step)
                started = time.perf_counter()
                indices = sampling.poisson_sample(
                    sampling_seed, step, plan.num_examples, plan.sampling_prob
                )
                state = experiment.step(
                    state, on_device, sampling.pad(indices, experiment.capacity)
                )
                jax.block_until_ready(state.step)
                seconds += time.perf_counter() - started
            last = step == plan.num_steps
            measurements: dict[str, float] = {}
            if _due(step, config.eval.every) or last:
                measurements |= evaluate(experiment, state.averaged)
            if _due(step, config.diagnostics.every):
                measurements |= not_private(experiment, state, on_device)
            if measurements:
                rows.append(_row(plan, step, measurements, seconds))
                files.add_row(rows[-1])
                on_row(rows[-1])
            stopping = not last and devices.any_of(should_stop())
            save = last or (step > 0 and _due(step, config.checkpoint.every))
            if stopping or (config.checkpoint.every and save):
                to_save = without_noise_key(state) if from_system else state
                checkpoints.save(step, to_save, {"seconds": seconds, "identity": identity})
            if stopping:
                raise StoppedError(f"stopped after step {step} of {plan.num_steps}")

        if not rows or rows[-1]["step"] != plan.num_steps:  # lost between checkpoint and summary
            measurements = evaluate(experiment, state.averaged)
            rows.append(_row(plan, plan.num_steps, measurements, seconds))
            files.add_row(rows[-1])
        summary = summarize(experiment, seed, rows[-1])
        files.finish(summary)
    return Result(state, rows, summary)


def estimate_seconds(experiment: Experiment) -> float:
    """Training time of a whole run on this device, from one timed microbatch.

    Compiles the step and takes it twice on a throw-away state, whose result is discarded: nothing
    is released, no budget is spent. Evaluation, diagnostics and compilation are not counted.

    Args:
      experiment: from `build`.

    Returns:
      Seconds, a rough estimate.
    """
    plan, microbatch_size = experiment.plan, experiment.config.microbatch_size
    on_device = devices.replicate(experiment.dataset.train, experiment.mesh)
    batch = sampling.pad(np.arange(microbatch_size), experiment.capacity)
    state = experiment.init(0)
    seconds = 0.0
    for _ in range(2):  # the first compiles
        started = time.perf_counter()
        state = experiment.step(state, on_device, batch)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - started
    return seconds * plan.num_steps * max(1, plan.expected_batch_size / microbatch_size)


def evaluate(experiment: Experiment, params: Params) -> dict[str, float]:
    """Accuracy and mean cross-entropy on the test split.

    Args:
      experiment: from `build`.
      params: the weights to judge.

    Returns:
      `test_accuracy` in [0, 1] and `test_loss` in nats.
    """
    images, labels = experiment.dataset.test
    totals = np.zeros(2)
    for start in range(0, len(labels), 1000):
        chunk = slice(start, start + 1000)
        rows = devices.share_rows((images[chunk], labels[chunk]), experiment.mesh)
        totals += np.asarray(experiment.evaluate(params, *rows))
    accuracy, loss = totals / len(labels)
    return {"test_accuracy": float(accuracy), "test_loss": float(loss)}


def summarize(experiment: Experiment, seed: int | None, last_row: dict[str, Any]) -> dict[str, Any]:
    """The facts of a finished run, as `summary.json` keeps them.

    Args:
      experiment: from `build`.
      seed: the run's seed, or None.
      last_row: its final metrics row.

    Returns:
      A JSON object; ε and C are None for a non-private run.
    """
    plan = experiment.plan.to_json()
    return {
        "method": experiment.config.method.name,
        "dataset": experiment.dataset.name,
        "num_classes": experiment.dataset.num_classes,
        "image_shape": list(experiment.dataset.train.images.shape[1:]),
        "mean": experiment.dataset.mean.tolist(),
        "std": experiment.dataset.std.tolist(),
        "model": experiment.config.model.name,
        "num_params": experiment.num_params,
        **{k: experiment.config[k] for k in ("microbatch_size", "convolution", "precision")},
        **plan,
        "clip": experiment.config.clip.name,
        "sensitivity": experiment.sensitivity,
        "seed": seed,
        "noise_key": "operating system" if seed is None else "seed",
        "noise": NOISE,
        "sampling": SAMPLING,
        "test_accuracy": last_row["test_accuracy"],
        "seconds": last_row["seconds"],
        "device": device_name(),
        "num_devices": experiment.mesh.size if experiment.mesh else 1,
        "num_processes": jax.process_count(),
        "versions": versions(),
        "commit": git_commit(),
    }


def not_private(
    experiment: Experiment, state: TrainState, train: datasets.Split
) -> dict[str, float]:
    """Clipping bias and more on evenly spaced training examples. NOT PRIVATE, and named so.

    Args:
      experiment: from `build`.
      state: where to measure; it is only read.
      train: the training split, on device.

    Returns:
      `not_private/…`: what `diagnostics.describe` says of `config.diagnostics.num_examples`
      examples, `not_private/plain/loss`, and `not_private/num_nonfinite` of the training so far.
    """
    num_examples = experiment.plan.num_examples
    num = min(experiment.config.diagnostics.num_examples, num_examples)
    rows = np.linspace(0, num_examples - 1, num).astype(np.int32)
    measured = experiment.diagnose(state, train, rows)
    found = {f"not_private/{k}": float(v) for k, v in measured.items()}
    return found | {"not_private/num_nonfinite": float(state.num_nonfinite)}


def _row(
    plan: PrivacyPlan, step: int, measurements: dict[str, float], seconds: float
) -> dict[str, Any]:
    """A row of `metrics.jsonl`; ε is None for a non-private run."""
    spent = plan.epsilon_after(step)
    row = {"step": step, "epsilon": None if spent == math.inf else spent}
    return row | measurements | {"seconds": seconds}


def _seed_from_system() -> int:
    """128 bits that nobody can know."""
    return int.from_bytes(devices.random_bits(4).tobytes())


def _fingerprint(dataset: datasets.Dataset) -> int:
    """CRC-32 of the training split. NOT PRIVATE: it is kept in checkpoints alone."""
    images, labels = (np.ascontiguousarray(x) for x in dataset.train)
    return zlib.crc32(labels.view(np.uint8).data, zlib.crc32(images.view(np.uint8).data))


def _check_same(where: Path | None, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuses a checkpoint of another plan or of other data: their ε would not be this run's."""
    if found["data"] != wanted["data"]:
        raise ValueError(f"{where} is of a run on other training data; choose another --workdir")
    for key in wanted["plan"]:
        if found["plan"].get(key) != wanted["plan"][key]:
            raise ValueError(
                f"{where} is of a run with the privacy plan's {key} = {found['plan'].get(key)!r}, "
                f"not {wanted['plan'][key]!r}; choose another --workdir"
            )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
