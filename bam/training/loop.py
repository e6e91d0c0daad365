"""Private training by a config: a `PrivateRun` with rows of metrics and files."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from bam import waits
from bam.core import processes, sampling
from bam.core.pytree import Params
from bam.core.sampling import PaddedBatch
from bam.data import datasets, stream
from bam.files import JsonObject
from bam.models import finetune, lora
from bam.privacy.ledger import lost_in_words
from bam.privacy.run import Digests, PrivateRun
from bam.provenance import git_commit
from bam.training import devices
from bam.training.rundir import RunFiles, finite
from bam.training.step import TrainState
from bam.training.summary import summarize
from bam.training.trainer import Trainer, build

__all__ = [
    "Result", "StoppedError", "TrainState", "Trainer", "build", "estimate_seconds", "evaluate",
    "not_private", "train", "whole_model",
]  # fmt: skip


Rows: TypeAlias = np.ndarray | jax.Array
LONG = 5.0  # seconds from which on a step has a line while it runs
LARGE_IMAGE = 64 * 64  # pixels from which on fewer than 1000 images are judged at once


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
    judged: bool = True,
) -> Result:
    """Takes the planned steps, from the start or after an earlier call's checkpoint.

    With several processes (`jax.distributed`), all of them call it with the same arguments, and
    only the first writes; `workdir` must be one folder that all of them see.

    Args:
      trainer: from `bam.training.trainer.build`, with the plan that an earlier run in `workdir` has
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
      judged: whether the weights are judged on the test split.

    Returns:
      A `Result`.

    Raises:
      StoppedError: if `should_stop` ended the run early.
      FileExistsError: if the run in `workdir` is finished.
      InputError: if the run in `workdir` has another config, plan or data set, or other initial
        weights; if its checkpoint cannot be read or belongs to another step; or if its ledger or
        its list of processes is incomplete.
      BlockingIOError: if another process is training in `workdir`.
      OSError: if `workdir` cannot be written, or before the first step, if there is no room for a
        checkpoint.
    """
    git_commit()  # read now, because the files may have changed by the first step
    config = trainer.config.copy_and_resolve_references()
    config.seed = seed
    num_devices = trainer.mesh.size if trainer.mesh else 1
    run, files = PrivateRun(trainer.plan, seed, num_devices), RunFiles(workdir, config)
    with contextlib.closing(run), files:
        if workdir is not None:
            run.open(workdir, trainer.record, _digests(trainer), at_least=files.steps_begun)
            files.begin()
        if run.lost:
            log(lost_in_words(run.plan, run.lost, run.end))
        # Without a seed, `restore` replaces the noise key of this seed by the run's secret key.
        state = run.restore(trainer.init(_seed_from_system() if seed is None else seed))
        if config.checkpoint.every:
            run.check_room(state)
        if run.is_resumed and run.step < run.end:
            log(f"goes on from step {run.step} of {run.end}")
        files.start_after(run.step if run.is_resumed else -1)
        # Training data are placed once; each step gets row numbers, or rows that are read ahead.
        feed = Feed(trainer)
        watch = _Watch(trainer, run, files, feed, on_row, should_stop, judged, log)
        if not run.is_resumed:  # the bias before the first step
            watch.look(state)
        batches = feed.batches(run.batch, range(run.step + 1, run.end + 1))
        # A step is counted, and its batch is drawn, while the devices still compute the one before.
        for _ in run.steps():
            rows = next(batches)
            watch.wait(state)
            state = watch.take(state, rows)
            watch.look(state)
        return watch.finish(state)


class Feed:
    """The training examples of a run, for `Trainer.step` and `Trainer.diagnose`.

    They are in the devices' memory, or in files that are read ahead.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Places the data on the devices, unless they are streamed."""
        self._trainer, self._split = trainer, trainer.dataset.train
        self._all = None
        if not datasets.streams(trainer.dataset):
            padded = datasets.padded(self._split, trainer.plan.num_examples)
            # Padded to N of the plan, so that shapes do not tell how many rows there are.
            self._all = trainer.place(padded)

    def batches(
        self, batch_of: Callable[[int], PaddedBatch], steps: range
    ) -> Iterator[tuple[datasets.Split, PaddedBatch]]:
        """Yields the examples and the batch `batch_of(step)` of each step, in order."""
        num_rows = len(self._split.labels)
        only = lambda step: batch_of(step).within(num_rows)  # noqa: E731
        if self._all is not None:
            for step in steps:
                yield self._all, only(step)
            return
        capacity = self._trainer.plan.capacity
        for examples, batch in stream.ahead(self._split, only, capacity, steps):
            yield self._trainer.place(examples), batch

    def of(self, indices: Rows, mask: Rows | None = None) -> datasets.Split:
        """The split that holds these rows: all data, or these rows alone if they are streamed."""
        if self._all is not None:
            return self._all
        return self._trainer.place(
            stream.rows_of(
                self._split, np.asarray(indices), None if mask is None else np.asarray(mask)
            )
        )


class _Watch:
    """Measures, shows and saves a run between its steps."""

    def __init__(
        self,
        trainer: Trainer,
        run: PrivateRun,
        files: RunFiles,
        feed: Feed,
        on_row: Callable[[JsonObject], None],
        should_stop: Callable[[], bool],
        judged: bool,
        log: Callable[[str], None],
    ) -> None:
        self._trainer, self._run, self._files, self._feed = trainer, run, files, feed
        self._on_row, self._should_stop, self._judged = on_row, should_stop, judged
        self._log, self._step_seconds = log, math.inf  # until one was timed
        self._running: tuple[int, float] | None = None  # the step on the devices, and its start
        self._outputs: np.ndarray | None = None  # outputs of the last state for test images
        run.more.setdefault("seconds", 0.0)
        self._is_training = False
        self._train()

    def take(
        self, state: TrainState, rows: tuple[datasets.Split, sampling.PaddedBatch]
    ) -> TrainState:
        """Starts a step on the devices; the first one of a process is compiled."""
        is_first = math.isinf(self._step_seconds)
        with waits.compiling(self._log, "the step") if is_first else contextlib.nullcontext():
            state = self._trainer.take_step(state, *rows)
        self._running = self._run.step, time.perf_counter()
        return state

    def wait(self, state: TrainState) -> None:
        """Waits for the running step, with a line in the log if it is long."""
        if self._running is None:
            return
        (step, began), seconds, self._running = self._running, self._step_seconds, None
        what, about = f"step {step} of {self._run.end}", seconds if seconds < math.inf else 0.0
        awaited = waits.awaited(self._log, what, about, stays=False)
        with awaited if seconds > LONG else contextlib.nullcontext():
            jax.block_until_ready(state.step)
        self._step_seconds = time.perf_counter() - began

    def look(self, state: TrainState) -> None:
        """Measures, shows and saves what is due after a step; StoppedError if asked to stop."""
        config, step, end = self._trainer.config, self._run.step, self._run.end
        is_end, self._outputs = step == end, None
        judges = is_end or (step > 0 and _due(step, config.eval.every))
        diagnoses = _due(step, config.diagnostics.every)
        every = config.checkpoint.every
        saves = every > 0 and (is_end or (step > 0 and _due(step, every)))
        if judges or diagnoses or saves:
            self._pause(state)
        measured = self._judge(state) if judges else {}
        if diagnoses:
            with waits.awaited(self._log, "measuring the clipping bias"):
                measured |= not_private(self._trainer, state, self._feed)
        if measured:
            self._on_row(self._add_row(measured))
        # All processes must stop at the same step.
        stops = step < end and processes.any_of(self._should_stop())
        if stops and self._is_training:
            self._pause(state)
        if stops or saves:
            self._run.save(state)
        if stops:
            raise StoppedError(f"stopped after step {step} of {end}")
        self._train()

    def _pause(self, state: TrainState) -> None:
        """Waits for the step; the time until `_train` does not count as training."""
        self.wait(state)
        self._run.more["seconds"] = time.perf_counter() - self._started
        self._is_training = False

    def _train(self) -> None:
        if not self._is_training:
            self._started = time.perf_counter() - self._run.more["seconds"]
            self._is_training = True

    def _judge(self, state: TrainState) -> dict[str, float]:
        """The figures of the weights on test data; {} if they are not judged."""
        if not self._judged:
            return {}
        judged, self._outputs = judge(self._trainer, whole_model(state), self._log)
        return judged

    def _add_row(self, measured: dict[str, float]) -> JsonObject:
        """Adds a row to `metrics.jsonl`; its ε is that of the steps begun, None if not private.

        A measurement that is not finite, such as the loss of a diverged run, becomes None.
        """
        run = self._run
        spent = run.epsilon_spent if run.plan.private else None
        row: JsonObject = {"step": run.step, "steps_begun": run.steps_begun, "epsilon": spent}
        row = finite(row | measured | {"seconds": run.more["seconds"]})
        self._files.add_row(row)
        return row

    def finish(self, state: TrainState) -> Result:
        """Writes the summary, and a last row if it is missing or counts fewer steps."""
        run, rows = self._run, self._files.rows
        last = rows[-1] if rows else {"step": -1}
        if (last["step"], last.get("steps_begun")) != (run.end, run.steps_begun):
            last = self._add_row(self._judge(state))
        elif self._outputs is None:  # resumed after the last step
            self._judge(state)
        summary = summarize(self._trainer, run.seed, last, self._outputs, run.processes)
        # From here on nothing in the folder confirms a guess at the data.
        run.finish()
        self._files.finish(summary)
        return Result(state, rows, summary)


def _digests(trainer: Trainer) -> Digests:
    """Digests of the weights and data with which a run began, and must continue."""
    init_from, digest = trainer.config.init_from, trainer.weights.digest
    if (how := trainer.normalisation) and (how.source or how.given):
        digest += f" {how._replace(source='')!r}"
    weights = {f"weights than those in {init_from} now": digest} if init_from else {}
    return lambda key: weights | {"training data": datasets.fingerprint(key, trainer.dataset.train)}


def estimate_seconds(trainer: Trainer) -> float:
    """An estimate of the seconds that a whole run trains on this device, from a few timed steps.

    A step costs a fixed part (noise, optimizer) and a part for each example. It is timed with one
    microbatch, and then with more examples until it takes a second or has the expected number. The
    state is thrown away, so nothing is released and no budget is spent. Evaluation, diagnostics and
    compilation are not counted.
    """
    plan, num_devices = trainer.plan, trainer.mesh.size if trainer.mesh else 1
    feed, state = Feed(trainer), trainer.init(0)

    def timed(num_rows: int) -> float:
        nonlocal state
        batch = sampling.pad(np.arange(num_rows), plan.capacity, 0, num_rows)
        batch = batch.within(len(trainer.dataset.train.labels))
        train = feed.of(batch.indices, batch.mask)
        started = time.perf_counter()
        state = jax.block_until_ready(trainer.take_step(state, train, batch))
        return time.perf_counter() - started

    # One microbatch for every device.
    fewest = min(trainer.config.microbatch_size * num_devices, plan.num_examples)
    timed(fewest)  # compiles
    num_rows, least = fewest, timed(fewest)
    seconds = least
    while seconds < 1 and num_rows < plan.expected_batch_size:
        num_rows = min(2 * num_rows, plan.expected_batch_size)
        seconds = timed(num_rows)
    # The difference of two timings is the cost of the further examples.
    per_example = max(0.0, seconds - least) / max(1, num_rows - fewest)
    missing = max(0, plan.expected_batch_size - fewest)
    return (least + missing * per_example) * plan.training_steps


def evaluate(trainer: Trainer, params: Params) -> dict[str, float]:
    """The mean `test_loss`, `test_accuracy` in [0, 1] and the loss's metrics on the test split.

    An image whose loss is not finite counts as wrong; then the mean loss and the metrics are not
    finite either.
    """
    return judge(trainer, params)[0]


def judge(
    trainer: Trainer, params: Params, log: Callable[[str], None] = lambda line: None
) -> tuple[dict[str, float], np.ndarray]:
    """The figures of `evaluate`, and the outputs that they judge."""
    images, labels = trainer.dataset.test
    totals, outputs, criterion = np.zeros(2), [], trainer.criterion
    together = max(1, min(1000, 1000 * LARGE_IMAGE // math.prod(images.shape[1:3])))
    with waits.awaited(log, f"judging {len(labels):,} test images") as wait:
        for start in range(0, len(labels), together):
            wait.share = start / len(labels)
            chunk = slice(start, start + together)
            rows = devices.share_rows((images[chunk], labels[chunk]), trainer.mesh)
            *sums, output = trainer.evaluate(params, *rows)
            totals += np.asarray(sums)
            outputs.append(np.asarray(output))
    # Sums over chunks, so that no chunk counts more than another.
    accuracy, loss = (totals / len(labels)).tolist()
    predicted, diverged = np.concatenate(outputs), not math.isfinite(loss)
    judged = {"test_accuracy": accuracy} if criterion.right else {}
    if criterion.metrics:
        # Zeros give the metrics' names where outputs are not finite; their values become NaN.
        defined = np.zeros_like(predicted) if diverged else predicted
        in_units = functools.partial(datasets.in_units, trainer.dataset)
        own = criterion.metrics(in_units(defined), in_units(np.asarray(labels)))
        judged |= dict.fromkeys(own, math.nan) if diverged else own
    return judged | {"test_loss": loss}, predicted


def not_private(trainer: Trainer, state: TrainState, feed: Feed) -> dict[str, float]:
    """Clipping bias and other diagnostics on evenly spaced training examples. NOT PRIVATE.

    Names begin with `not_private/`. They are those of `trainer.diagnose`, and `num_nonfinite`.
    """
    num_examples = len(trainer.dataset.train.labels)
    num = min(trainer.config.diagnostics.num_examples, num_examples)
    rows = np.linspace(0, num_examples - 1, num).astype(np.int32)
    measured = trainer.diagnose(state, feed.of(rows), rows)
    named = {f"not_private/{k}": float(v) for k, v in measured.items()}
    return named | {"not_private/num_nonfinite": float(state.num_nonfinite)}


def whole_model(state: TrainState) -> Params:
    """The whole model's averaged weights, with low-rank factors folded in, as they are released."""
    return lora.folded(finetune.merge(state.averaged, state.frozen))


def _seed_from_system() -> int:
    """256 random bits of the operating system."""
    return int.from_bytes(processes.random_bits(8).tobytes())


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
