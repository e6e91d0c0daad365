"""The time that a run will take, from a few timed steps."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool

from bam import waits
from bam.core import sampling
from bam.core.sampling import PaddedBatch
from bam.privacy import processes
from bam.training.examples import Rows
from bam.training.trainer import Trainer

NUM_TIMED = 5  # steps whose times an estimate compares
SHORT = 2.0  # seconds of a step up to which an estimate times whole ones
ENOUGH = 20.0  # seconds of timed steps after which an estimate times no more
UNSURE = 1.25  # factor between timings and a run, for other work on the machine and its temperature


class Estimate(NamedTuple):
    """The seconds that a run will take: an estimate, and the range that its timings allow."""

    seconds: float
    least: float
    most: float

    def __str__(self) -> str:
        """For example "about 25 days (22 days to 29 days)"."""
        about, *ends = map(waits.in_words, self)
        return f"about {about} ({' to '.join(ends)})"


def estimate_seconds(trainer: Trainer, rows: Rows) -> Estimate:
    """Returns an estimate of the time of training of a whole run on this device, from timed steps.

    A step costs a fixed part (noise, optimizer) and a round for each microbatch on every device.
    The fixed part is timed alone, and then with one round. If a whole step takes at most `SHORT`,
    such steps are timed; otherwise as many rounds as take that, at least one, and the number of a
    step's rounds is counted. The range is that of the timings and `UNSURE` beyond it.

    The state is thrown away, so nothing is released and no budget is spent. Evaluation, diagnostics
    and compilation are not counted.
    """
    plan, num_devices = trainer.plan, trainer.num_devices
    state = trainer.init(0)
    size, num_rows = trainer.parts.gradient.microbatch_size, len(trainer.dataset.train.labels)
    # With a public N, places behind the data are drawn, too, and compute nothing.
    most = max(1, round(plan.expected_batch_size * num_rows / plan.num_examples))

    def time_step(padded: PaddedBatch) -> float:
        nonlocal state
        batch = jax.block_until_ready(trainer.batch(state, padded, rows))
        started = time.perf_counter()
        state = jax.block_until_ready(trainer.step(state, batch))
        # All processes decide alike what is timed next.
        return float(processes.from_first(np.float32(time.perf_counter() - started)))

    def in_order(num_rounds: int) -> PaddedBatch:
        rows = np.arange(plan.capacity)
        mask = rows < min(num_rounds * size * num_devices, most)
        return PaddedBatch(np.where(mask, rows, sampling.PADDING).astype(np.int32), mask)

    # Padded at random, as in a run, which decides the number of rounds.
    whole = [sampling.pad(np.arange(most), plan.capacity, 0, step) for step in range(NUM_TIMED)]
    rounds = [num_rounds(np.asarray(x.mask), size, num_devices, plan.private) for x in whole]
    time_step(in_order(0))  # compiles
    fixed, with_one = min(time_step(in_order(0)) for _ in range(3)), time_step(in_order(1))
    seconds_of_round = max(0.0, with_one - fixed)
    mean = sum(rounds) / len(rounds)
    if fixed + mean * seconds_of_round <= SHORT:
        seconds = [time_step(batch) for batch in whole]
    else:
        some = max(1, min(int(SHORT / max(seconds_of_round, 1e-9)), most // (size * num_devices)))
        timings = [with_one] if some == 1 else []
        while len(timings) < NUM_TIMED and sum(timings) < ENOUGH:
            timings.append(time_step(in_order(some)))
        seconds = [fixed + mean * max(0.0, x - fixed) / some for x in timings]
    about = float(np.median(seconds)), min(seconds) / UNSURE, max(seconds) * UNSURE
    return Estimate(*(x * plan.training_steps for x in about))


def drawn_batches(trainer: Trainer, num_batches: int) -> list[PaddedBatch]:
    """Returns batches as a run draws them: of its capacity, with random examples at random places.

    They are those of seed 0, so that timings can be compared. With a public N they may have row
    numbers beyond the data, whose number is not read.
    """
    return [trainer.plan.batch(0, step) for step in range(1, num_batches + 1)]


def rows_per_example(trainer: Trainer, batches: Sequence[PaddedBatch], size: int) -> float:
    """Returns how many rows are computed for each example of some batches with a microbatch size.

    A microbatch is computed as a whole, so its empty places take time, too.
    """
    masks = [np.asarray(x.mask) for x in batches]
    num_devices, is_private = trainer.num_devices, trainer.plan.private
    rounds = sum(num_rounds(mask, size, num_devices, is_private) for mask in masks)
    return rounds * size * num_devices / max(1, sum(int(mask.sum()) for mask in masks))


def num_rounds(
    mask: Bool[np.ndarray, " rows"], size: int, num_devices: int, is_private: bool
) -> int:
    """Returns the number of microbatches that each device runs for a batch.

    It is as in `bam.core.engine`.
    """
    if is_private:  # real rows move to the first microbatches, each at its place
        places = np.pad(mask, (0, -len(mask) % (size * num_devices)))
        used = int(places.reshape(-1, size).sum(axis=0).max())
    else:
        used = -(-int(mask.sum()) // size)
    return -(-used // num_devices)
