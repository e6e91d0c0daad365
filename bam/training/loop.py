"""Private training: take the planned steps of an experiment, and not one more."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from bam.core import sampling
from bam.core.pytree import Params
from bam.data import datasets
from bam.files import JsonObject
from bam.privacy.plan import PrivacyPlan
from bam.training import devices, finetune
from bam.training.checkpoint import Checkpoints
from bam.training.provenance import git_commit, versions
from bam.training.rundir import RunFiles, check_plan
from bam.training.step import TrainState, with_noise_key, without_noise_key
from bam.training.trainer import Experiment, build

__all__ = [
    "Experiment", "Result", "StoppedError", "TrainState", "build", "estimate_seconds", "evaluate",
    "not_private", "summarize", "train", "whole_model",
]  # fmt: skip

# What a release says of the randomness; a run records it, so that it is that of the code that ran.
NOISE = (
    "Gaussian, rounded to whole multiples of a grid on which the bounded gradients lie too, so "
    "that no rounding depends on the data; reaches 10 standard deviations; random numbers by "
    "ChaCha20 with a key of 256 bits"
)


class Result(NamedTuple):
    """What a run leaves in memory: the final state, the metrics rows, the summary.

    The state holds the noise key: release `state.params` or `state.averaged`, with the `frozen`
    weights if there are any, never all of it.
    """

    state: TrainState
    rows: list[JsonObject]
    summary: JsonObject


class StoppedError(Exception):
    """A run was asked to stop before its end, and did, leaving a checkpoint in its workdir."""


def train(
    experiment: Experiment,
    seed: int | None,
    workdir: Path | None = None,
    on_row: Callable[[JsonObject], None] = lambda row: None,
    should_stop: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda line: None,
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
        process and never saved. Steps that a crash lost are taken again with new batches and noise,
        so they count (see `bam.training.ledger`), and the run may end before its last step.
      workdir: folder for the run's files (see the README); None writes nothing. An unfinished run
        of the same config goes on from its last checkpoint.
      on_row: called with each metrics row as it is made.
      should_stop: asked after every step; True ends the run there, with a checkpoint.
      say: called with one line if steps of this run were lost and count, and with one if its plan
        is not what the accountant would choose here.

    Returns:
      A `Result`.

    Raises:
      StoppedError: if `should_stop` ended the run early.
      FileExistsError: if the run in `workdir` is finished.
      ValueError: if the run in `workdir` is of another config, plan or data set, or began from
        other weights, the ε of its plan does not hold when it is computed again, its checkpoint
        cannot be read or is of another step, or its ledger is not whole.
      BlockingIOError: if another process is training in `workdir`.
      OSError: if `workdir` cannot be written; also before the first step, should there be no room
        for a checkpoint.
    """
    plan, dataset = experiment.plan, experiment.dataset
    git_commit()  # now: by the end the files may be others
    config = experiment.config.copy_and_resolve_references()
    config.seed = seed
    on_device = experiment.place(dataset.train)
    from_system = seed is None
    first_seed, sampling_seed = (_seed_from_system() if seed is None else seed for _ in range(2))
    state = experiment.init(first_seed)
    done, seconds, saved = -1, 0.0, 0  # at step 0 there is only the bias to measure

    with RunFiles(workdir, config, plan) as files, Checkpoints(files.checkpoints) as checkpoints:
        if files.plan != plan:
            say(_as_recorded(files.plan, plan))
            experiment, plan = experiment.with_plan(files.plan), files.plan
        data = datasets.fingerprint(files.data_key(), dataset.train) if workdir else None
        identity = {"plan": plan.to_json(), "data": data, "init": experiment.init_digest}
        restored = checkpoints.restore(state)
        if restored is not None:
            done, state, facts = restored
            check_plan(files.checkpoints, facts["identity"]["plan"], plan)
            seconds, saved = facts["seconds"], facts["steps_begun"]
            if int(state.step) != done:
                raise ValueError(
                    f"{files.checkpoints}/{done} is renamed: it is of step {state.step}"
                )
            if facts["identity"].get("init", "") != experiment.init_digest:
                raise ValueError(
                    f"{files.checkpoints} is of a run that began from other weights than those in "
                    f"{config.init_from} now; choose another --workdir"
                )
        taken = max(0, done)
        ledger = files.open_ledger(taken, saved)
        ledger.end_period(plan.drawing.period)
        end = ledger.last_step(taken)
        if restored is not None and taken < end and facts["identity"]["data"] != data:
            raise ValueError(
                f"{files.checkpoints} is of a run on other training data, or the run's data_key is "
                "gone; choose another --workdir"
            )
        if ledger.begun > taken:
            say(_lost(plan, ledger.begun - taken, end))
        if from_system:
            state = with_noise_key(state, devices.random_bits(8))
        if config.checkpoint.every:
            checkpoints.check_room(state)
        rows, batch = files.start_after(done), plan.batch(sampling_seed, taken + 1)
        for step in range(done + 1, end + 1):
            if step > 0:
                started = time.perf_counter()
                ledger.begin()
                state = experiment.step(state, on_device, batch)
                if step < end:  # while the devices are busy
                    batch = plan.batch(sampling_seed, step + 1)
                ledger.force()
                jax.block_until_ready(state.step)
                seconds += time.perf_counter() - started
            last = step == end
            measurements: dict[str, float] = {}
            if last or (step > 0 and _due(step, config.eval.every)):
                measurements |= evaluate(experiment, whole_model(state))
            if _due(step, config.diagnostics.every):
                measurements |= not_private(experiment, state, on_device)
            if measurements:
                rows.append(_row(plan, step, ledger.begun, measurements, seconds))
                files.add_row(rows[-1])
                on_row(rows[-1])
            stopping = not last and devices.any_of(should_stop())
            save = last or (step > 0 and _due(step, config.checkpoint.every))
            if stopping or (config.checkpoint.every and save):
                to_save = without_noise_key(state) if from_system else state
                facts = {"seconds": seconds, "identity": identity, "steps_begun": ledger.begun}
                checkpoints.save(step, to_save, facts)
            if stopping:
                raise StoppedError(f"stopped after step {step} of {end}")

        # The last row was lost between checkpoint and summary, or steps that count were.
        if not rows or (rows[-1]["step"], rows[-1]["steps_begun"]) != (end, ledger.begun):
            measurements = evaluate(experiment, whole_model(state))
            rows.append(_row(plan, end, ledger.begun, measurements, seconds))
            files.add_row(rows[-1])
        summary = summarize(experiment, seed, rows[-1])
        files.finish(summary)
    return Result(state, rows, summary)


def estimate_seconds(experiment: Experiment) -> float:
    """Seconds that a whole run trains on this device, roughly, from some timed steps.

    A step costs a part of its own, of noise and optimizer, and one for each example: it is timed
    with one microbatch, then with ever more examples until it takes a second or has all that are
    expected. The state is thrown away: nothing is released, no budget is spent. Evaluation,
    diagnostics and compilation are not counted.
    """
    plan, num_devices = experiment.plan, experiment.mesh.size if experiment.mesh else 1
    on_device = experiment.place(experiment.dataset.train)
    state = experiment.init(0)

    def timed(num_rows: int) -> float:
        nonlocal state
        batch = sampling.pad(np.arange(num_rows), plan.capacity, 0, num_rows)
        started = time.perf_counter()
        state = jax.block_until_ready(experiment.step(state, on_device, batch))
        return time.perf_counter() - started

    # A microbatch for every device.
    fewest = min(experiment.config.microbatch_size * num_devices, plan.num_examples)
    timed(fewest)  # compiles
    num_rows, least = fewest, timed(fewest)
    seconds = least
    while seconds < 1 and num_rows < plan.expected_batch_size:
        num_rows = min(2 * num_rows, plan.expected_batch_size)
        seconds = timed(num_rows)
    per_example = max(0.0, seconds - least) / max(1, num_rows - fewest)
    missing = max(0, plan.expected_batch_size - fewest)
    return (least + missing * per_example) * plan.training_steps


def evaluate(experiment: Experiment, params: Params) -> dict[str, float]:
    """On the test split: `test_accuracy` in [0, 1], mean cross-entropy `test_loss` in nats."""
    images, labels = experiment.dataset.test
    totals = np.zeros(2)
    for start in range(0, len(labels), 1000):
        chunk = slice(start, start + 1000)
        rows = devices.share_rows((images[chunk], labels[chunk]), experiment.mesh)
        totals += np.asarray(experiment.evaluate(params, *rows))
    accuracy, loss = totals / len(labels)
    return {"test_accuracy": float(accuracy), "test_loss": float(loss)}


def summarize(experiment: Experiment, seed: int | None, last_row: JsonObject) -> JsonObject:
    """The facts of a finished run as `summary.json` keeps them; ε and C are None if not private."""
    plan = experiment.plan.to_json()
    return {
        "method": experiment.config.method.name,
        "dataset": experiment.dataset.name,
        "num_classes": experiment.dataset.num_classes,
        "image_shape": list(experiment.dataset.train.images.shape[-3:]),
        "mean": experiment.dataset.mean.tolist(),
        "std": experiment.dataset.std.tolist(),
        "features": experiment.config.features.name,
        "model": experiment.config.model.name,
        "num_params": experiment.num_params,
        "num_frozen": experiment.num_frozen,
        "init_digest": experiment.init_digest,
        **{k: experiment.config[k] for k in ("microbatch_size", "convolution", "precision")},
        **plan,
        "clip": experiment.config.clip.name,
        "sensitivity": experiment.sensitivity,
        "seed": seed,
        "noise_key": "operating system" if seed is None else "seed",
        "noise": NOISE + _correlation(experiment.plan.drawing.strategy),
        "sampling": experiment.plan.drawing.sampling,
        "steps_taken": last_row["step"],
        "steps_begun": last_row["steps_begun"],
        "test_accuracy": last_row["test_accuracy"],
        "seconds": last_row["seconds"],
        "device": devices.name(),
        "num_devices": experiment.mesh.size if experiment.mesh else 1,
        "num_processes": jax.process_count(),
        "versions": versions(),
        "commit": git_commit(),
    }


def not_private(
    experiment: Experiment, state: TrainState, train: datasets.Split
) -> dict[str, float]:
    """Clipping bias and more on evenly spaced training examples. NOT PRIVATE, and named so.

    `not_private/…` is what `experiment.diagnose` says of them, and the `num_nonfinite` so far.
    """
    num_examples = experiment.plan.num_examples
    num = min(experiment.config.diagnostics.num_examples, num_examples)
    rows = np.linspace(0, num_examples - 1, num).astype(np.int32)
    measured = experiment.diagnose(state, train, rows)
    named = {f"not_private/{k}": float(v) for k, v in measured.items()}
    return named | {"not_private/num_nonfinite": float(state.num_nonfinite)}


def whole_model(state: TrainState) -> Params:
    """The whole model's weights as they are judged and released."""
    return finetune.merge(state.averaged, state.frozen)


def _row(
    plan: PrivacyPlan, step: int, begun: int, measurements: dict[str, float], seconds: float
) -> JsonObject:
    """A row of `metrics.jsonl`; ε is that of the steps begun, None for a non-private run."""
    spent = plan.epsilon_after(begun) if plan.private else None
    row = {"step": step, "steps_begun": begun, "epsilon": spent}
    return row | measurements | {"seconds": seconds}


def _as_recorded(recorded: PrivacyPlan, plan: PrivacyPlan) -> str:
    """That a run goes on by its own plan, in one line."""
    return (
        f"this run goes on with its own noise multiplier, {recorded.noise_multiplier}, whose "
        "epsilon still holds; other versions of dp-accounting or SciPy chose it than those here, "
        f"which choose {plan.noise_multiplier}"
    )


def _lost(plan: PrivacyPlan, lost: int, end: int) -> str:
    """What lost steps mean for the run, in one line."""
    lost_steps = "1 step was lost and counts" if lost == 1 else f"{lost} steps were lost and count"
    if end == plan.training_steps:
        return f"{lost_steps}: {plan.spare_steps} spare steps were planned for that"
    return (
        f"{lost_steps}: the run ends after step {end} of {plan.training_steps}; a new run can plan "
        f"for that with --config.spare_steps={lost}"
    )


def _correlation(strategy: Sequence[float]) -> str:
    """What is to be said of noise that is not independent, after what is said of all noise."""
    if len(strategy) == 1:
        return ""
    weights = ", ".join(str(c) for c in strategy[1:])
    return (
        f"; a step's is fresh noise less the whole part of the last {len(strategy) - 1} steps' "
        f"noise times {weights}"
    )


def _seed_from_system() -> int:
    """256 bits that nobody can know."""
    return int.from_bytes(devices.random_bits(8).tobytes())


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
