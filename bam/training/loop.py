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
from bam.core import sampling
from bam.core.pytree import Params
from bam.core.sampling import PaddedBatch
from bam.data import datasets, stream
from bam.files import JsonObject
from bam.models import finetune, lora
from bam.privacy import processes
from bam.privacy.ledger import lost_in_words
from bam.privacy.run import Digests, PrivateRun
from bam.provenance import git_commit
from bam.training import devices
from bam.training import step as steps
from bam.training.rundir import RunFiles, finite
from bam.training.step import TrainState
from bam.training.summary import summarize
from bam.training.trainer import Trainer, build

__all__ = [
    "Estimate", "Result", "StoppedError", "TrainState", "Trainer", "build", "estimate_seconds",
    "evaluate", "not_private", "train", "whole_model",
]  # fmt: skip


Rows: TypeAlias = np.ndarray | jax.Array
FIRST_STEPS = 3  # after them, a run whose gradients were never finite says so
LONG = 5.0  # seconds from which on a step has a line while it runs
NUM_TIMED = 5  # steps whose times an estimate compares
SHORT = 2.0  # seconds of a step up to which an estimate times whole ones
ENOUGH = 20.0  # seconds from which on an estimate times two steps alone
UNSURE = 1.25  # factor between timings and a run, for other work on the machine and its temperature
LARGE_IMAGE = 64 * 64  # pixels from which on fewer than 1000 images are evaluated at once


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
) -> Result:
    """Takes the planned steps, from the start or after an earlier call's checkpoint.

    With several processes (`jax.distributed`), all of them call it with the same arguments, and
    only the first writes. All of them must see the folder `workdir`.

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
      evaluates: whether the weights are evaluated on the test split.

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
    git_commit()  # read now, because the files may have changed by the first step
    config = trainer.config.copy_and_resolve_references()
    config.seed = seed
    run, files = PrivateRun(trainer.plan, seed, trainer.num_devices), RunFiles(workdir, config)
    with contextlib.closing(run), files:
        if workdir is not None:
            # The metrics count steps, too: a ledger that says fewer was replaced or cut.
            run.open(workdir, trainer.record, _digests(trainer), at_least=files.steps_begun)
            files.check_again()
        if run.lost:
            log(lost_in_words(run.plan, run.lost, run.end))
        # Without a seed, `restore` replaces the noise key of this seed by the run's secret key.
        state = run.restore(trainer.init(_seed_from_system() if seed is None else seed))
        if config.checkpoint.every:
            run.check_room(state)
        # Training data are placed once; each step gets row numbers, or rows that are read ahead.
        feed = Feed(trainer)
        if run.step < run.end:
            with waits.compiling(log, "the step"):
                trainer.check_step(state, *feed.nothing(), keeps_size=run.is_resumed)
                if config.diagnostics.every:
                    measured = diagnosed(trainer, feed)
                    trainer.check_diagnostics(state, *measured, keeps_size=run.is_resumed)
        # From here on, another config is refused in this folder.
        files.begin()
        if run.is_resumed and run.step < run.end:
            log(f"continues from step {run.step} of {run.end}")
        files.start_after(run.step if run.is_resumed else -1)
        watch = _Watch(trainer, run, files, feed, on_row, should_stop, evaluates, log)
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
            # Padded to N of the plan, so that shapes do not reveal the number of rows.
            padded = datasets.padded(self._split, trainer.plan.num_examples)
            self._all = trainer.place(padded)

    def batches(
        self, batch_of: Callable[[int], PaddedBatch], steps: range
    ) -> Iterator[tuple[datasets.Split, PaddedBatch]]:
        """Yields the examples and the batch `batch_of(step)` of each step, in order."""
        num_rows = len(self._split.labels)
        # N of the plan may exceed the data, and a drawn row without data is an empty place.
        only = lambda step: batch_of(step).within(num_rows)  # noqa: E731
        if self._all is not None:
            for step in steps:
                yield self._all, only(step)
            return
        capacity = self._trainer.plan.capacity
        for examples, batch in stream.ahead(self._split, only, capacity, steps):
            yield self._trainer.place(examples), batch

    def nothing(self) -> tuple[datasets.Split, PaddedBatch]:
        """The examples and the batch of a step without examples, in the shapes of any step."""
        batch = sampling.pad(np.arange(0), self._trainer.plan.capacity, 0, 0)
        return self.of(batch.indices, batch.mask), batch

    def of(self, indices: Rows, mask: Rows | None = None) -> datasets.Split:
        """The split that holds these rows: all data, or only these rows if they are streamed."""
        if self._all is not None:
            return self._all
        return self._trainer.place(
            stream.rows_of(
                self._split, np.asarray(indices), None if mask is None else np.asarray(mask)
            )
        )


class _Watch:
    """Evaluates, reports and saves a run between its steps."""

    def __init__(
        self,
        trainer: Trainer,
        run: PrivateRun,
        files: RunFiles,
        feed: Feed,
        on_row: Callable[[JsonObject], None],
        should_stop: Callable[[], bool],
        evaluates: bool,
        log: Callable[[str], None],
    ) -> None:
        self._trainer, self._run, self._files, self._feed = trainer, run, files, feed
        self._on_row, self._should_stop, self._evaluates = on_row, should_stop, evaluates
        self._log, self._step_seconds = log, math.inf  # infinite before the first timed step
        self._running: tuple[int, float] | None = None  # the step on the devices, and its start
        self._num_drawn = 0  # rows of a new run's first steps
        self._outputs: np.ndarray | None = None  # outputs of the last state for test images
        # The checkpoint carries the seconds, so that a resumed run adds to them.
        run.more.setdefault("seconds", 0.0)
        self._is_training = False
        self._train()

    def take(
        self, state: TrainState, rows: tuple[datasets.Split, sampling.PaddedBatch]
    ) -> TrainState:
        """Starts a step on the devices."""
        state = self._trainer.step(state, *rows)
        if self._run.step <= FIRST_STEPS:
            self._num_drawn += int(np.sum(rows[1].mask))
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
        # One number, once, of a step that has ended: it holds up no device.
        is_due = step == min(FIRST_STEPS, self._run.end) and not self._run.is_resumed
        if is_due and 0 < self._num_drawn == int(state.num_nonfinite):
            self._log(
                f"NOT PRIVATE: no gradient of the first {step} steps was finite, so all were left "
                "out and the weights follow noise alone: look for NaN and infinities in the data "
                "and in the loss"
            )

    def look(self, state: TrainState) -> None:
        """Evaluates, diagnoses and saves if it is due after a step; StoppedError to stop early."""
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
                figures |= not_private(self._trainer, state, self._feed)
        if figures:
            self._on_row(self._add_row(figures))
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
        """The figures of the weights on the test split; {} if the run is not evaluated."""
        if not self._evaluates:
            return {}
        figures, self._outputs = evaluate_outputs(self._trainer, whole_model(state), self._log)
        return figures

    def _add_row(self, figures: dict[str, float]) -> JsonObject:
        """Adds a row to `metrics.jsonl`; its ε is that of the steps begun, None if not private.

        A figure that is not finite, such as the loss of a diverged run, becomes None.
        """
        run = self._run
        # Steps begun, not taken: the ledger counts a step before its noise exists.
        spent = run.epsilon_spent if run.plan.private else None
        row: JsonObject = {"step": run.step, "steps_begun": run.steps_begun, "epsilon": spent}
        row = finite(row | figures | {"seconds": run.more["seconds"]})
        self._files.add_row(row)
        return row

    def finish(self, state: TrainState) -> Result:
        """Writes the summary, and a last row if it is missing or counts fewer steps."""
        run, rows = self._run, self._files.rows
        last = rows[-1] if rows else {"step": -1}
        # Steps that a crash lost since that row count, too.
        if (last["step"], last.get("steps_begun")) != (run.end, run.steps_begun):
            last = self._add_row(self._evaluate(state))
        elif self._outputs is None:  # resumed after the last step: the summary needs outputs
            self._evaluate(state)
        summary = summarize(self._trainer, run.seed, last, self._outputs, run.processes)
        # From here on nothing in the folder confirms a guess at the data.
        run.finish()
        self._files.finish(summary)
        return Result(state, rows, summary)


def _digests(trainer: Trainer) -> Digests:
    """Digests of the weights and data with which a run began, and must continue.

    The digest of the data depends on a secret key of the run: without it, a digest confirms no
    guess at the data.
    """
    init_from, digest = trainer.config.init_from, trainer.weights.digest
    # The same weights with another normalisation are another network. The source is a path.
    if (inputs := trainer.normalisation) and (inputs.source or inputs.given):
        digest += f" {inputs._replace(source='')!r}"
    weights = {f"weights than those in {init_from} now": digest} if init_from else {}
    return lambda key: weights | {"training data": datasets.fingerprint(key, trainer.dataset.train)}


class Estimate(NamedTuple):
    """The seconds that a run will take: an estimate, and the range that its timings allow."""

    seconds: float
    least: float
    most: float

    def __str__(self) -> str:
        """For example "about 25 days (22 days to 29 days)"."""
        about, *ends = map(waits.in_words, self)
        return f"about {about} ({' to '.join(ends)})"


def estimate_seconds(trainer: Trainer) -> Estimate:
    """An estimate of the time of training of a whole run on this device, from timed steps.

    A step costs a fixed part (noise, optimizer) and a round for each microbatch on every device.
    The fixed part is timed alone, and then with one round. If a whole step takes at most `SHORT`,
    such steps are timed; otherwise as many rounds as take that, at least one, and the number of a
    step's rounds is counted. The range is that of the timings and `UNSURE` beyond it.

    The state is thrown away, so nothing is released and no budget is spent. Evaluation, diagnostics
    and compilation are not counted.
    """
    plan, num_devices = trainer.plan, trainer.num_devices
    feed, state = Feed(trainer), trainer.init(0)
    size, num_rows = trainer.parts.microbatch_size, len(trainer.dataset.train.labels)
    # With a public N, places behind the data are drawn, too, and compute nothing.
    most = max(1, round(plan.expected_batch_size * num_rows / plan.num_examples))

    def timed(batch: PaddedBatch) -> float:
        nonlocal state
        train = feed.of(batch.indices, batch.mask)
        started = time.perf_counter()
        state = jax.block_until_ready(trainer.step(state, train, batch))
        # All processes decide alike what is timed next.
        return float(processes.from_first(np.float32(time.perf_counter() - started)))

    def in_order(num_rounds: int) -> PaddedBatch:
        rows = np.arange(plan.capacity)
        mask = rows < min(num_rounds * size * num_devices, most)
        return PaddedBatch(np.where(mask, rows, sampling.PADDING).astype(np.int32), mask)

    # Padded at random, as in a run, which decides the number of rounds.
    whole = [sampling.pad(np.arange(most), plan.capacity, 0, step) for step in range(NUM_TIMED)]
    rounds = [num_rounds(batch, size, num_devices, plan.private) for batch in whole]
    timed(in_order(0))  # compiles
    fixed, with_one = min(timed(in_order(0)) for _ in range(3)), timed(in_order(1))
    of_round = max(0.0, with_one - fixed)
    mean = sum(rounds) / len(rounds)
    if fixed + mean * of_round <= SHORT:
        seconds = [timed(batch) for batch in whole]
    else:
        some = max(1, min(int(SHORT / max(of_round, 1e-9)), most // (size * num_devices)))
        timings = [with_one] if some == 1 else []
        while len(timings) < 2 or (len(timings) < NUM_TIMED and sum(timings) < ENOUGH):
            timings.append(timed(in_order(some)))
        seconds = [fixed + mean * max(0.0, x - fixed) / some for x in timings]
    about = float(np.median(seconds)), min(seconds) / UNSURE, max(seconds) * UNSURE
    return Estimate(*(x * plan.training_steps for x in about))


def num_rounds(batch: PaddedBatch, size: int, num_devices: int, is_private: bool) -> int:
    """The number of microbatches that each device runs for a batch, as `bam.core.engine` does."""
    empty = -len(batch.mask) % (size * num_devices)
    microbatches = np.pad(np.asarray(batch.mask), (0, empty)).reshape(-1, size)
    if is_private:  # real rows move to the first microbatches, each at its place
        used = microbatches.sum(axis=0).max()
    else:
        used = np.max(np.flatnonzero(microbatches.any(axis=1)), initial=-1) + 1
    return -(-int(used) // num_devices)


def evaluate(trainer: Trainer, params: Params) -> dict[str, float]:
    """The mean `test_loss`, `test_accuracy` in [0, 1] and the loss's metrics on the test split.

    An image whose loss is not finite counts as wrong; then the mean loss and the metrics are not
    finite either.
    """
    return evaluate_outputs(trainer, params)[0]


def num_evaluated(trainer: Trainer, params: Params) -> int:
    """The number of test images to evaluate at once; the memory is asked by the first call."""
    images, labels = trainer.dataset.test
    # Fewer at once if images are large, because their activations are in memory together.
    size = max(1, min(1000, 1000 * LARGE_IMAGE // math.prod(images.shape[1:3])))
    size = trainer.fitting.get(steps.evaluate, size)
    while size > 1 and steps.evaluate not in trainer.fitting:
        rows = devices.share_rows((images[:size], labels[:size]), trainer.parts.mesh)
        needed = devices.needs(trainer.evaluate, params, *rows)
        if needed is None or needed.fits:
            break
        size //= 2
    trainer.fitting[steps.evaluate] = size
    return size


def evaluate_outputs(
    trainer: Trainer, params: Params, log: Callable[[str], None] = lambda line: None
) -> tuple[dict[str, float], np.ndarray]:
    """The figures of `evaluate`, and the network's outputs for the test split."""
    images, labels = trainer.dataset.test
    totals, outputs, criterion = np.zeros(2), [], trainer.criterion
    with waits.awaited(log, f"evaluating {len(labels):,} test images") as wait:
        chunk_size = num_evaluated(trainer, params)
        for start in range(0, len(labels), chunk_size):
            wait.share = start / len(labels)
            chunk = slice(start, start + chunk_size)
            rows = devices.share_rows((images[chunk], labels[chunk]), trainer.parts.mesh)
            *sums, output = trainer.evaluate(params, *rows)
            totals += np.asarray(sums)
            outputs.append(np.asarray(output))
    # Sums over chunks, so that no chunk counts more than another.
    accuracy, loss = (totals / len(labels)).tolist()
    predicted, diverged = np.concatenate(outputs), not math.isfinite(loss)
    figures = {"test_accuracy": accuracy} if criterion.right else {}
    if criterion.metrics:
        # The metrics of zeros give their names. scikit-learn would refuse NaN, so the values of a
        # diverged run are NaN without a call on its outputs.
        defined = np.zeros_like(predicted) if diverged else predicted
        in_units = functools.partial(datasets.in_units, trainer.dataset)
        metrics = criterion.metrics(in_units(defined), in_units(np.asarray(labels)))
        figures |= dict.fromkeys(metrics, math.nan) if diverged else metrics
    return figures | {"test_loss": loss}, predicted


def not_private(trainer: Trainer, state: TrainState, feed: Feed) -> dict[str, float]:
    """Clipping bias and other diagnostics on evenly spaced training examples. NOT PRIVATE.

    The names are those of `trainer.diagnose` and `num_nonfinite`, after `not_private/`.
    """
    figures = trainer.diagnose(state, *diagnosed(trainer, feed))
    labelled = {f"not_private/{k}": float(v) for k, v in figures.items()}
    return labelled | {"not_private/num_nonfinite": float(state.num_nonfinite)}


def diagnosed(trainer: Trainer, feed: Feed) -> tuple[datasets.Split, np.ndarray]:
    """The training examples of the diagnostics, and their row numbers.

    They are the same each time, so that the figures of a run are comparable over its steps.
    """
    num_examples = len(trainer.dataset.train.labels)
    num = min(trainer.config.diagnostics.num_examples, num_examples)
    rows = np.linspace(0, num_examples - 1, num).astype(np.int32)
    return feed.of(rows), rows


def whole_model(state: TrainState) -> Params:
    """The weights to release: averaged, with the frozen ones, and low-rank factors folded in."""
    return lora.folded(finetune.merge(state.averaged, state.frozen))


def _seed_from_system() -> int:
    """256 random bits of the operating system."""
    return int.from_bytes(processes.random_words(8).tobytes())


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
