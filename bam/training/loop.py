"""Private training by a config: a `PrivateTraining` with rows of metrics and files."""

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from bam import waits
from bam.data import datasets
from bam.files import JsonObject
from bam.privacy import processes
from bam.privacy.ledger import lost_in_words
from bam.privacy.private_gradient import DrawnBatch
from bam.privacy.run import Digests, PrivateRun
from bam.training.build import build
from bam.training.evaluation import (
    as_metrics,
    diagnosed_rows,
    evaluate,
    evaluate_outputs,
    gradient_norms,
    not_private,
    whole_model,
)
from bam.training.rundir import RunFiles, finite
from bam.training.step import TrainState
from bam.training.summary import summarize
from bam.training.trainer import Trainer

__all__ = [
    "Result", "StoppedError", "TrainState", "Trainer", "build", "evaluate", "train", "whole_model",
]  # fmt: skip


FIRST_STEPS = 3  # after them, a run whose gradients were never finite says so
LONG = 5.0  # seconds from which on a step has a line while it runs


class Result(NamedTuple):
    """The result of a run in memory: the final state, the metrics rows, the summary.

    The state holds the noise key. Release `state.params` or `state.averaged`, with the `frozen`
    weights if there are any, and never the whole state.
    """

    state: TrainState
    rows: list[JsonObject]
    summary: JsonObject


class StoppedError(Exception):
    """A run stopped before its end, as it was asked to, with a checkpoint in its workdir."""


def train(
    trainer: Trainer,
    seed: int | None,
    workdir: Path | None = None,
    on_row: Callable[[JsonObject], None] = lambda row: None,
    should_stop: Callable[[], bool] = lambda: False,
    log: Callable[[str], None] = lambda line: None,
    evaluates: bool = True,
    on_step: Callable[[int], None] = lambda step: None,
) -> Result:
    """Takes the planned steps, from the start or after an earlier call's checkpoint.

    With several processes (`jax.distributed`), all of them call it with the same arguments, and
    only the first writes. All of them must see the folder `workdir`.

    Args:
      trainer: from `bam.training.build.build`, with the plan that an earlier run in `workdir` has
        recorded, if there is one.
      seed: of weights, batches, views and noise. The same seed gives the same run, stopped and
        resumed or not. Runs of different methods with one seed share batches and noise, which pairs
        them for comparison; never release two of them. Anyone who knows the seed can remove the
        noise. None, for a run to release, uses the operating system's randomness, new in every
        process and never saved. Steps that a crash lost are then repeated with new batches and
        noise, so they count (see `bam.privacy.ledger`), and the run may end before its last step.
      workdir: folder for the run's files (see the README); None writes nothing. An unfinished run
        of the same config continues after its last checkpoint.
      on_row: called with each new metrics row.
      should_stop: asked after every step; True ends the run there, with a checkpoint.
      log: called with a line if lost steps count, and one if the run continues. A log that can draw
        (see `bam.waits`) also gets lines on long waits.
      evaluates: whether the weights are evaluated on the test split.
      on_step: called with each step that the devices have finished.

    Returns:
      A `Result`.

    Raises:
      StoppedError: if `should_stop` ended the run early.
      FileExistsError: if the run in `workdir` is finished.
      InputError: if a step does not fit the memory; if the run in `workdir` has another config,
        plan or data set, or other initial weights; if its checkpoint cannot be read or belongs to
        another step; or if its ledger or its list of processes is incomplete.
      BlockingIOError: if another process is training in `workdir`.
      OSError: if `workdir` cannot be written, or before the first step, if there is no room for a
        checkpoint.
    """
    config = trainer.config.copy_and_resolve_references()
    config.seed = seed
    private, files = trainer.training(seed), RunFiles(workdir, config)
    trainer.load()  # which may take minutes if they are features
    run = private.run
    with contextlib.closing(private), files:
        if workdir is not None:
            # The metrics count steps, too: a ledger that says fewer was replaced or cut.
            run.open(workdir, trainer.record, _digests(trainer), at_least=files.steps_begun)
            files.check_again()
        if run.lost:
            log(lost_in_words(run.plan, run.lost, run.end))
        # Without a seed, `adopt` replaces the noise key of this seed by the run's secret key.
        state = private.adopt(trainer.init(processes.random_seed() if seed is None else seed))
        if config.checkpoint.every:
            run.check_room(state)
        # Data in memory are placed once; a step takes its rows from them, or from files read ahead.
        rows = trainer.place_rows()
        diagnosed = diagnosed_rows(trainer) if config.diagnostics.every else None
        if run.step < run.end:
            with waits.compiling(log, "the step"):
                trainer.check_step(state, rows, keeps_size=run.is_resumed)
                if diagnosed:
                    trainer.check_diagnostics(state, diagnosed, keeps_size=run.is_resumed)
        # From here on, another config is refused in this folder.
        files.begin()
        if run.is_resumed and run.step < run.end:
            log(f"continues from step {run.step} of {run.end}")
        files.start_after(run.step if run.is_resumed else -1)
        watch = _Watch(trainer, run, files, diagnosed, on_row, should_stop, evaluates, log, on_step)
        if not run.is_resumed:  # the bias before the first step
            watch.look(state)
        batches = rows.read(run.batch, range(run.step + 1, run.end + 1))
        # A step is counted, and its batch is drawn, while the devices still compute the one before.
        for batch in private.draw(lambda step: next(batches)):  # this is the only loop over it
            watch.wait(state)
            state = watch.take(state, batch)
            watch.look(state)
        return watch.finish(state)


class _Watch:
    """Evaluates, reports and saves a run between its steps."""

    def __init__(
        self,
        trainer: Trainer,
        run: PrivateRun,
        files: RunFiles,
        diagnosed: PyTree,
        on_row: Callable[[JsonObject], None],
        should_stop: Callable[[], bool],
        evaluates: bool,
        log: Callable[[str], None],
        on_step: Callable[[int], None],
    ) -> None:
        self._trainer, self._run, self._files = trainer, run, files
        self._diagnosed, self._on_step = diagnosed, on_step
        self._on_row, self._should_stop, self._evaluates = on_row, should_stop, evaluates
        self._log, self._step_seconds = log, math.inf  # infinite before the first timed step
        self._running: tuple[int, float] | None = None  # the step on the devices, and its start
        self._num_drawn = 0  # rows of a new run's first steps
        self._outputs: np.ndarray | None = None  # outputs of the last state for test images
        # The checkpoint carries the seconds, so that a resumed run adds to them.
        run.more.setdefault("seconds", 0.0)
        self._is_training = False
        self._train()

    def take(self, state: TrainState, batch: DrawnBatch) -> TrainState:
        """Starts a step on the devices."""
        state = self._trainer.step(state, batch)
        if self._run.step <= FIRST_STEPS:
            self._num_drawn += int(np.sum(batch.mask))
        # JAX returns at once, while the devices still compute.
        self._running = self._run.step, time.perf_counter()
        return state

    def wait(self, state: TrainState) -> None:
        """Waits for the running step, with a line in the log if it is long."""
        if self._running is None:
            return
        (step, began), seconds, self._running = self._running, self._step_seconds, None
        task, about = f"step {step} of {self._run.end}", seconds if seconds < math.inf else 0.0
        awaited = waits.awaited(self._log, task, about, stays=False)
        with awaited if seconds > LONG else contextlib.nullcontext():
            jax.block_until_ready(state.step)
        self._step_seconds = time.perf_counter() - began
        self._on_step(step)
        # One number, once, of a step that has ended: it holds up no device.
        is_due = step == min(FIRST_STEPS, self._run.end) and not self._run.is_resumed
        if is_due and 0 < self._num_drawn == int(state.private.num_nonfinite):
            self._log(
                f"NOT PRIVATE: no gradient of the first {step} steps was finite, so all were left "
                "out and the weights follow noise alone: look for NaN and infinities in the data "
                "and in the loss"
            )

    def look(self, state: TrainState) -> None:
        """Evaluates, diagnoses and saves if it is due after a step.

        StoppedError to stop early.
        """
        config, step, end = self._trainer.config, self._run.step, self._run.end
        is_end, self._outputs = step == end, None
        evaluates = is_end or (step > 0 and _due(step, config.eval.every))
        diagnoses = _due(step, config.diagnostics.every)
        every = config.checkpoint.every
        saves = every > 0 and (is_end or (step > 0 and _due(step, every)))
        if evaluates or diagnoses or saves:
            self._pause(state)
        figures = self._evaluate(state) if evaluates else {}
        if diagnoses:
            with waits.awaited(self._log, "measuring the clipping bias"):
                figures |= not_private(self._trainer, state, self._diagnosed)
        if figures:
            self._on_row(self._add_row(figures, state))
        # `should_stop` may differ between processes, but a sum waits for all of them.
        stops = step < end and processes.any_of(self._should_stop())
        if stops and self._is_training:
            self._pause(state)
        if stops or saves:
            self._run.save(state)
        if stops:
            raise StoppedError(f"stopped after step {step} of {end}")
        self._train()

    def _pause(self, state: TrainState) -> None:
        """Waits for the running step. The time until `_train` does not count as training."""
        self.wait(state)
        self._run.more["seconds"] = time.perf_counter() - self._started
        self._is_training = False

    def _train(self) -> None:
        if not self._is_training:
            self._started = time.perf_counter() - self._run.more["seconds"]
            self._is_training = True

    def _evaluate(self, state: TrainState) -> dict[str, float]:
        """Returns the figures of the weights on the test split, or {} without evaluation."""
        if not self._evaluates:
            return {}
        figures, self._outputs = evaluate_outputs(self._trainer, whole_model(state), self._log)
        return figures

    def _add_row(self, figures: dict[str, float], state: TrainState) -> JsonObject:
        """Adds a row to `metrics.jsonl`.

        Its ε is that of the steps begun, or None if the run is not private.
        With slots in the clip it also has the shares of gradients by norm, which ε covers.
        A figure that is not finite, such as the loss of a diverged run, becomes None.
        """
        run = self._run
        # Steps begun, not taken: the ledger counts a step before its noise exists.
        spent = run.epsilon_spent if run.plan.private else None
        row: JsonObject = {"step": run.step, "steps_begun": run.steps_begun, "epsilon": spent}
        figures = as_metrics(gradient_norms(self._trainer, state)) | figures
        row = finite(row | figures | {"seconds": run.more["seconds"]})
        self._files.add_row(row)
        return row

    def finish(self, state: TrainState) -> Result:
        """Writes the summary, and a last row if it is missing or counts fewer steps."""
        run, rows = self._run, self._files.rows
        last = rows[-1] if rows else {"step": -1}
        # Steps that a crash lost since that row count, too.
        if (last["step"], last.get("steps_begun")) != (run.end, run.steps_begun):
            last = self._add_row(self._evaluate(state), state)
        elif self._outputs is None:  # resumed after the last step: the summary needs outputs
            self._evaluate(state)
        summary = summarize(self._trainer, run.seed, last, self._outputs, run.processes)
        if norms := gradient_norms(self._trainer, state, of_all_steps=True):
            summary["gradient_norms"] = {name: list(share) for name, share in norms.items()}
        # Deletes data_key: the digests can no longer be used to test guesses about the data.
        run.finish()
        self._files.finish(summary)
        return Result(state, rows, summary)


def _digests(trainer: Trainer) -> Digests:
    """Returns digests of the weights and data with which a run began, and must continue.

    The digest of the data depends on a secret key of the run: without it, a digest confirms no
    guess at the data.
    """
    init_from, digest = trainer.config.init_from, trainer.weights.digest
    # The same weights with another normalisation are another network. The source is a path.
    if (inputs := trainer.normalisation) and (inputs.source or inputs.given):
        digest += f" {inputs._replace(source='')!r}"
    weights = {f"weights than those in {init_from} now": digest} if init_from else {}
    return lambda key: weights | {"training data": datasets.fingerprint(key, trainer.dataset.train)}


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
