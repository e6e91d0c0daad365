"""Where a run's steps take their examples from: the devices' memory, or files, read ahead."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import jax
import numpy as np

from bam.core.sampling import PaddedBatch
from bam.data import datasets, stream
from bam.training.trainer import Trainer

Rows: TypeAlias = np.ndarray | jax.Array


class Feed:
    """The training examples of a run, as `Trainer.step` and `Trainer.diagnose` read them."""

    def __init__(self, trainer: Trainer) -> None:
        """Places data that are kept in memory."""
        self._trainer, self._split = trainer, trainer.dataset.train
        self._all = None
        if not datasets.streams(trainer.dataset):
            padded = datasets.padded(self._split, trainer.plan.num_examples)
            self._all = trainer.place(padded)

    def batches(
        self, batch_of: Callable[[int], PaddedBatch], steps: range
    ) -> Iterator[tuple[datasets.Split, PaddedBatch]]:
        """The examples and the batch, `batch_of(step)`, of each of these steps, in order."""
        num_rows = len(self._split.labels)
        only = lambda step: batch_of(step).only(num_rows)  # noqa: E731
        if self._all is not None:
            for step in steps:
                yield self._all, only(step)
            return
        capacity = self._trainer.plan.capacity
        for examples, batch in stream.ahead(self._split, only, capacity, steps):
            yield self._trainer.place(examples), batch

    def of(self, indices: Rows, mask: Rows | None = None) -> datasets.Split:
        """What is read of these rows."""
        if self._all is not None:
            return self._all
        return self._trainer.place(
            stream.rows_of(
                self._split, np.asarray(indices), None if mask is None else np.asarray(mask)
            )
        )
