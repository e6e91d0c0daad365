"""The ledger of a run: how many steps it has begun, on disk, and never fewer.

Without a seed, a step that a crash lost is taken again with another batch and other noise; of the
lost one something may have been seen: a metrics row, TensorBoard, the terminal. So it counts. Every
step is written here, and forced to the disk, before it is taken. A run begins at most the steps of
its plan, `plan.num_steps`: the T that training takes, and the spare ones. Lost steps are made up
for out of the spare ones; without any left the run ends earlier by as many.

Noise that is correlated over b steps is kept in memory alone, as the key is, so a run that goes on
begins it anew, and draws its parts of the data anew. Then an example may take part twice within b
steps, of which the first is hidden by the old noise and the second by the new: together they are
what they would be if the old noise had gone on to the end of its b steps, the mechanism's period.
Those steps count as begun, unless the run has taken its last step: then nothing is drawn anew.

With a seed a step that is taken again repeats its batch and its noise, so nothing more is released:
the ledger is the number of steps taken. So it is in memory (no workdir), where nothing is resumed.

Beside the ledger `processes.jsonl` has a line for each process that took steps, with a seed or not:
the first step that it began, its code, libraries and devices. The line is on the disk before that
step begins, so a statement names every code that steps were taken by, and not the last alone.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TypeGuard

import jax
import numpy as np

from bam import files, provenance
from bam.core import processes
from bam.errors import InputError
from bam.files import JsonObject
from bam.privacy.plan import PrivacyPlan

PROCESSES = "processes.jsonl"


def create(path: Path) -> None:
    """Makes an empty ledger, a file of a byte for each step begun, and forces it to the disk.

    Raises InputError for one that has steps: they are of a run that is not known any more.
    """
    files.check_replaceable(path)
    if path.exists() and path.stat().st_size:
        raise InputError(f"{path} has steps of a run without a plan.json; choose another folder")
    path.touch()
    files.keep(path)


class Ledger:
    """Counts the steps a run begins, lost ones included: `begun`. One process of several writes."""

    def __init__(
        self,
        path: Path | None,
        plan: PrivacyPlan,
        step: int,
        at_least: int,
        before_first: Callable[[int], None] = lambda step: None,
    ) -> None:
        """Reads what was begun before.

        Args:
          path: the file, which `create` made; None where lost steps cost nothing.
          plan: the privacy plan.
          step: the step that the run goes on from; 0 for a fresh start.
          at_least: steps begun that some record knows of: a checkpoint, the metrics. A file that is
            missing, or has fewer, is refused with an InputError.
          before_first: called once, with the number of the first step that `begin` is about to
            count: that is where `add_process` belongs.
        """
        self._plan, self._path, self._file = plan, path, None
        self._before_first: Callable[[int], None] | None = before_first
        self.begun = step
        if path is None:
            return
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise InputError(f"{path} is damaged: it is no ordinary file; choose another folder")
        written = path.stat().st_size if path.exists() else -1
        written = int(processes.from_first(np.int32(written)))
        if written > 0 and path.read_bytes().strip(b".\0"):  # zeros are of a power cut
            raise InputError(f"{path} is damaged; choose another folder")
        if written < at_least:
            what = (
                "is missing"
                if written < 0
                else f"has {written} steps, the run's other records {at_least}"
            )
            raise InputError(
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
        """Counts one more step, on the disk; then it may be taken, and a power cut keeps the count.

        Raises BudgetExhaustedError if the plan does not cover it, BlockingIOError if another
        process counts in the same file, and OSError if it cannot be written.
        """
        self._plan.check_steps(self.begun + 1)
        if self._before_first:
            self._before_first(self.begun + 1)
            self._before_first = None
        self._count()
        self.force()

    def _count(self) -> None:
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
            self._count()  # of the process before: this one takes none of them
        self.force()

    def force(self) -> None:
        """Returns when all steps begun are on the disk, where a power cut keeps the count, too."""
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


def this_process(first_step: int, num_devices: int) -> JsonObject:
    """What is recorded of this process: its code, libraries and devices.

    Args:
      first_step: the first step that it begins, counted as the ledger counts them.
      num_devices: that share the examples of a step.
    """
    return {
        "first_step": first_step,
        "commit": provenance.git_commit(),
        "device": jax.devices()[0].device_kind,
        "num_devices": num_devices,
        "num_processes": jax.process_count(),
        "versions": provenance.versions(),
    }


def are_processes(value: object) -> TypeGuard[list[JsonObject]]:
    """Whether a value, which may be a stranger's, is a list of what `this_process` returns."""
    kinds = {"commit": str, "device": str, "versions": dict}
    counts = ("first_step", "num_devices", "num_processes")
    return isinstance(value, list) and all(
        isinstance(row, dict)
        and all(type(row.get(key)) is kind for key, kind in kinds.items())
        and all(type(row.get(key)) is int and 0 < row[key] < 2**31 for key in counts)
        for row in value
    )


def check_no_processes(folder: Path) -> None:
    """InputError for a folder where a run is to begin, and processes of another took steps."""
    if (folder / PROCESSES).exists():
        raise InputError(f"{folder} has {PROCESSES} of a run that is gone; choose another folder")


def read_processes(folder: Path | None, at_least: Sequence[JsonObject] = ()) -> list[JsonObject]:
    """The processes that took the steps of the run in a folder, the earliest first.

    Empty if the folder has no file of them, as a new one.

    Args:
      folder: of the run; None: there is none.
      at_least: those that another record of the run knows of, such as a checkpoint. An InputError
        refuses a file that is missing or does not begin with them, and one that is damaged.
    """
    path = folder and folder / PROCESSES
    if path is None:
        return []
    rows: object = []
    if path.exists():
        try:
            rows = [json.loads(line) for line in files.read_bytes(path).splitlines()]
        except (ValueError, RecursionError):
            rows = None
    unknown = "what took this run's steps is not known; put the file back, or choose another folder"
    if not are_processes(rows):
        raise InputError(f"{path} is damaged: {unknown}")
    if rows[: len(at_least)] != list(at_least):
        what = "has other lines than the run's other records" if path.exists() else "is missing"
        raise InputError(f"{path} {what}: {unknown}")
    return rows


def add_process(folder: Path | None, process: JsonObject) -> None:
    """Adds a process to a folder's file, on the disk when this returns; lines before it stay.

    To be called before the first step of the process begins (`before_first` of `Ledger`), after
    which it may be killed at any time. The file is replaced all or nothing, so no line is ever half
    there. One process of several writes, and none where there is no folder.
    """
    if folder is None or not processes.writes():
        return
    path = folder / PROCESSES
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    files.write_text(path, "\n".join([*lines, json.dumps(process)]) + "\n")
