"""The ledger of a run: the number of steps that it has begun, on the disk.

Without a seed, a step that a crash lost is repeated with another batch and other noise. Something
of the lost step may have been seen: a metrics row, TensorBoard, the terminal. So it counts. Every
step is written here, and forced to the disk, before it is taken. A run begins at most
`plan.num_steps` steps: those of training, and the spare ones. Spare steps replace lost ones; once
they are used up, each further lost step ends the run one step earlier.

Noise that is correlated over b steps is kept in memory alone, as the key is. So when a run resumes,
its noise starts anew, and the parts of the data are drawn anew. An example can then be drawn twice
within b steps: once under the old noise, once under the new. The old noise hides the first draw and
the new noise the second, and each is charged to its own period (b steps in which an example is
drawn at most once). So the old period must count as finished (and so must an epoch of random
allocation, which is drawn anew): its missing steps count as begun, unless the run has taken its
last step and draws nothing anew.

With a seed, a repeated step repeats its batch and its noise, so nothing more is released, and the
ledger is the number of steps taken. The same holds in memory (no workdir), where nothing resumes.

Beside the ledger, `processes.jsonl` has a line for each process that took steps, with or without a
seed: its first step, code, libraries and devices. The line is on the disk before that step begins,
so a statement names all code that took steps, and not only the last.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TypeGuard

import jax
import numpy as np

from bam import files, provenance
from bam.errors import InputError
from bam.files import JsonObject
from bam.privacy import processes
from bam.privacy.plan import PrivacyPlan

PROCESSES = "processes.jsonl"


def create(path: Path) -> None:
    """Makes an empty ledger, a file with one byte for each begun step, and forces it to the disk.

    InputError if the file has steps already: their run is unknown.
    """
    files.check_replaceable(path)
    if path.exists() and path.stat().st_size:
        raise InputError(
            f"{path} counts steps, but its folder has no plan.json: choose another folder"
        )
    path.touch()
    files.keep(path)


class Ledger:
    """The file that counts the steps that a run begins, lost ones included.

    `begun` is their number. One process writes.
    """

    def __init__(
        self,
        path: Path | None,
        plan: PrivacyPlan,
        step: int,
        at_least: int,
        before_first: Callable[[int], None] = lambda step: None,
    ) -> None:
        """Reads the number of steps begun before.

        Args:
          path: the file that `create` made; None if lost steps cost nothing.
          plan: the privacy plan.
          step: the step after which the run continues; 0 for a fresh start.
          at_least: number of begun steps in another record: a checkpoint, the metrics. A missing
            file, or one with fewer steps, is an InputError.
          before_first: called once, with the number of the first step, before `begin` counts it;
            call `add_process` there.
        """
        self._plan, self._path, self._file = plan, path, None
        self._before_first: Callable[[int], None] | None = before_first
        self.begun = step
        if path is None:
            return
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise InputError(f"{path} is damaged: it is not a regular file; choose another folder")
        written = path.stat().st_size if path.exists() else -1
        # All processes must agree, also on whether to raise an error.
        written = int(processes.from_first(np.int32(written)))
        if written > 0 and path.read_bytes().strip(b".\0"):  # a power cut may leave zeros
            raise InputError(f"{path} is damaged; choose another folder")
        if written < at_least:
            what = (
                "is missing"
                if written < 0
                else f"has {written} steps, but other records have {at_least}"
            )
            raise InputError(
                f"{path} {what}, so the spent epsilon is unknown: restore the file, or choose "
                "another folder"
            )
        # The file may have one byte too many: `begin` writes it and then raises if another process
        # wrote, too.
        self.begun = min(written, plan.num_steps)
        if processes.writes():
            self._file = path.open("ab", buffering=0)

    def close(self) -> None:
        """Closes the file."""
        if self._file:
            self._file.close()

    def last_step(self, step: int) -> int:
        """Returns the last step of training from `step` on.

        It is the planned one, or less after lost steps.
        """
        return min(self._plan.training_steps, step + self._plan.num_steps - self.begun)

    def begin(self) -> None:
        """Counts one more step on the disk, where a power cut keeps it. Then it may be taken.

        Raises BudgetExhaustedError if the plan does not cover it, BlockingIOError if another
        process counts in the same file, and OSError if it cannot be written.
        """
        self._plan.check_steps(self.begun + 1)
        # The line of this process first: a crash after it leaves a line too many, never one too
        # few.
        if self._before_first:
            self._before_first(self.begun + 1)
            self._before_first = None
        self._count()
        self.force()

    def _count(self) -> None:
        if self._file and self._path:
            # A run that resumes reads the file at this path, so the count must be in that file.
            self._check_in_place(self._file, self._path)
            try:
                self._file.write(b".")
            except OSError as error:
                raise OSError(f"no step can be counted in {self._path}: {error.strerror}") from None
            # Opened for appending: another process's bytes would make the file longer.
            if os.fstat(self._file.fileno()).st_size != self.begun + 1:
                raise BlockingIOError(f"another process is training in {self._path.parent}")
        self.begun += 1

    @staticmethod
    def _check_in_place(file: IO[bytes], path: Path) -> None:
        """Raises OSError if the file was removed or replaced.

        A resumed run would read another count.
        """
        try:
            in_place = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except OSError:
            in_place = False
        if not in_place:
            raise OSError(
                f"no step can be counted: {path} was removed or replaced since training began"
            )

    def end_period(self, length: int) -> None:
        """Counts the missing steps of a period as begun, unless lost steps cost nothing."""
        if not self._path or not self.begun:
            return
        # A period begins with step 1, so it ends at a multiple of its length.
        while self.begun % length and self.begun < self._plan.num_steps:
            self._count()  # without `begin`: they belong to the process before this one
        self.force()

    def force(self) -> None:
        """Returns when all begun steps are on the disk, where a power cut keeps them."""
        if self._file:
            os.fsync(self._file.fileno())


def lost_in_words(plan: PrivacyPlan, lost: int, end: int) -> str:
    """Returns the consequence of lost steps for the run, in one line."""
    what = "1 step was lost in a crash and its privacy is"
    if lost > 1:
        what = f"{lost} steps were lost in a crash and their privacy is"
    if end == plan.training_steps:
        return f"{what} spent: {plan.spare_steps} spare steps were planned for that"
    return (
        f"{what} spent, so this run ends after step {end} of {plan.training_steps}; a new run can "
        f"plan for that with --config.spare_steps={lost}"
    )


def this_process(first_step: int, num_devices: int) -> JsonObject:
    """Returns the record of this process: its code, libraries and devices.

    Args:
      first_step: number of its first step in the ledger.
      num_devices: number of devices that share the examples of a step.
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
    """Returns whether an untrusted value is a list of records that `this_process` returns."""
    kinds = {"commit": str, "device": str, "versions": dict}
    counts = ("first_step", "num_devices", "num_processes")
    return isinstance(value, list) and all(
        isinstance(row, dict)
        and all(type(row.get(key)) is kind for key, kind in kinds.items())
        and all(type(row.get(key)) is int and 0 < row[key] < 2**31 for key in counts)
        for row in value
    )


def check_no_processes(folder: Path) -> None:
    """Checks that no process of another run took steps in a folder.

    InputError if one did, because a run is to begin there.
    """
    if (folder / PROCESSES).exists():
        raise InputError(f"{folder} has {PROCESSES}, but no run: choose another folder")


def read_processes(folder: Path | None, at_least: Sequence[JsonObject] = ()) -> list[JsonObject]:
    """Returns the processes that took the steps of the run in a folder, earliest first.

    The list is empty if the folder has no file of them, as a new folder.

    Args:
      folder: of the run, or None.
      at_least: processes in another record of the run, such as a checkpoint. A file that is
        missing, damaged, or does not begin with them is an InputError.
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
    unknown = (
        "so the code and devices of this run's steps are unknown: restore the file, or choose "
        "another folder"
    )
    if not are_processes(rows):
        raise InputError(f"{path} is damaged, {unknown}")
    if rows[: len(at_least)] != list(at_least):
        what = "differs from the run's other records" if path.exists() else "is missing"
        raise InputError(f"{path} {what}, {unknown}")
    return rows


def add_process(folder: Path | None, process: JsonObject) -> None:
    """Adds a process to a folder's file, which is on the disk when this returns.

    Earlier lines stay. Call it before the first step of the process begins (`before_first` of
    `Ledger`), because the process may be killed at any time after that. The file is replaced all or
    nothing, so a line is never incomplete. One process of several writes, and none without a
    folder.
    """
    if folder is None or not processes.writes():
        return
    path = folder / PROCESSES
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    files.write_text(path, "\n".join([*lines, json.dumps(process)]) + "\n")
