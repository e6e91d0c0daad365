"""The ledger of a run: how many steps it has begun, on disk, and never fewer.

Without a seed, a step that a crash lost is taken again with another batch and other noise; of the
lost one something may have been seen: a metrics row, TensorBoard, the terminal. So it counts. Every
step is written here before it is taken, and is forced to the disk before anything of it is shown or
saved. A run begins at most the steps of its plan, `plan.num_steps`: the T that training takes, and
the spare ones. Lost steps are made up for out of the spare ones; without any left the run ends
earlier by as many.

Noise that is correlated over b steps is kept in memory alone, as the key is, so a run that goes on
begins it anew, and draws its parts of the data anew. Then an example may take part twice within b
steps, of which the first is hidden by the old noise and the second by the new: together they are
what they would be if the old noise had gone on to the end of its b steps, the mechanism's period.
Those steps count as begun.

With a seed a step that is taken again repeats its batch and its noise, so nothing more is released:
the ledger is the number of steps taken. So it is in memory (no workdir), where nothing is resumed.
"""

import os
from pathlib import Path
from typing import IO

import numpy as np

from bam import files
from bam.core import processes
from bam.privacy.plan import PrivacyPlan


def create(path: Path) -> None:
    """Makes an empty ledger, a file of a byte for each step begun, and forces it to the disk.

    Raises ValueError for one that has steps: they are of a run that is not known any more.
    """
    if path.exists() and path.stat().st_size:
        raise ValueError(f"{path} has steps of a run without a config.json; choose another folder")
    path.touch()
    files.keep(path)


class Ledger:
    """Counts the steps a run begins, lost ones included: `begun`. One process of several writes."""

    def __init__(self, path: Path | None, plan: PrivacyPlan, step: int, at_least: int) -> None:
        """Reads what was begun before.

        Args:
          path: the file, which `create` made; None where lost steps cost nothing.
          plan: the privacy plan.
          step: the step that the run goes on from; 0 for a fresh start.
          at_least: steps begun that some record knows of: a checkpoint, the metrics. A file that is
            missing, or has fewer, is refused with a ValueError.
        """
        self._plan, self._path, self._file = plan, path, None
        self.begun = step
        if path is None:
            return
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is damaged: it is no file; choose another folder")
        written = path.stat().st_size if path.exists() else -1
        written = int(processes.from_first(np.int32(written)))
        if written > 0 and path.read_bytes().strip(b".\0"):  # zeros are of a power cut
            raise ValueError(f"{path} is damaged; choose another folder")
        if written < at_least:
            what = (
                "is missing"
                if written < 0
                else f"has {written} steps, the run's other records {at_least}"
            )
            raise ValueError(
                f"{path} {what}: what this run has spent is not known; choose another folder"
            )
        self.begun = min(written, plan.num_steps)  # one that was counted and then refused
        if processes.writes():
            self._file = path.open("ab", buffering=0)

    def close(self) -> None:
        """Closes the file."""
        if self._file:
            self._file.close()

    def last_step(self, step: int) -> int:
        """The step that training, from `step` on, ends after: T, or less if too many were lost."""
        return min(self._plan.training_steps, step + self._plan.num_steps - self.begun)

    def begin(self) -> None:
        """Counts one more step, which may then be taken. A process that is killed keeps the count.

        Raises BudgetExhaustedError if the plan does not cover it, BlockingIOError if another
        process counts in the same file, and OSError if it cannot be written.
        """
        self._plan.check_steps(self.begun + 1)
        if self._file and self._path:
            self._check_in_place(self._file, self._path)
            try:
                self._file.write(b".")
            except OSError as error:
                raise OSError(f"no step can be counted in {self._path}: {error.strerror}") from None
            if os.fstat(self._file.fileno()).st_size != self.begun + 1:
                raise BlockingIOError(f"another process is training in {self._path.parent}")
        self.begun += 1

    @staticmethod
    def _check_in_place(file: IO[bytes], path: Path) -> None:
        """OSError if the file was removed, or another took its place, which a resumed run reads."""
        try:
            in_place = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except OSError:
            in_place = False
        if not in_place:
            raise OSError(
                f"no step can be counted: {path} was removed or replaced since training began"
            )

    def end_period(self, length: int) -> None:
        """Counts as begun what is left of a period; none where lost steps cost nothing."""
        if not self._path or not self.begun:
            return
        while self.begun % length and self.begun < self._plan.num_steps:
            self.begin()

    def force(self) -> None:
        """Returns when all steps begun are on the disk, where a power cut keeps the count, too.

        To be called before anything of the last step is shown or saved; computing it meanwhile
        hides the time that this takes.
        """
        if self._file:
            os.fsync(self._file.fileno())


def lost_in_words(plan: PrivacyPlan, lost: int, end: int) -> str:
    """What lost steps mean for the run, in one line."""
    lost_steps = "1 step was lost and counts" if lost == 1 else f"{lost} steps were lost and count"
    if end == plan.training_steps:
        return f"{lost_steps}: {plan.spare_steps} spare steps were planned for that"
    return (
        f"{lost_steps}: the run ends after step {end} of {plan.training_steps}; a new run can plan "
        f"for that with --config.spare_steps={lost}"
    )
