"""The files that a run writes into its workdir, besides those of its `PrivateRun`."""

import json
import math
from pathlib import Path

from bam.errors import InputError
from bam.extras import needs
from bam.files import (
    JsonObject,
    as_object,
    check_replaceable,
    read_json,
    to_disk,
    write_json,
    write_text,
)
from bam.privacy import processes
from bam.privacy.recorded_plan import check_version
from bam.training.keys import CHANGEABLE, KEYS

with needs("train"):
    from ml_collections import ConfigDict
    from tensorboardX import SummaryWriter


class FinishedError(FileExistsError):
    """A folder holds a finished run."""


METRICS = "metrics.jsonl"


class RunFiles:
    """A context manager that writes the files of a run besides those of its `PrivateRun`.

    They are `config.json`, `metrics.jsonl` with the rows in `rows`, TensorBoard events, and at the
    end `summary.json`. With `workdir=None` it writes nothing. If there are several processes, only
    the first writes. The folder of a finished run or of another config is refused, so no result is
    overwritten.
    """

    def __init__(self, workdir: Path | None, config: ConfigDict) -> None:
        """Checks the workdir without writing to it.

        Raises the errors of `check_resumable`.
        """
        self.rows: list[JsonObject] = []
        self._workdir, self._config = workdir, config
        self._writes = workdir is not None and processes.writes()
        if workdir is not None:
            check_resumable(workdir, config)

    @property
    def steps_begun(self) -> int:
        """The largest number of begun steps in the rows of the metrics."""
        rows = read_rows(self._workdir) if self._workdir else []
        counts = [row.get("steps_begun", 0) for row in rows]
        if not all(type(x) is int for x in counts):
            raise InputError(f"{self._workdir}/{METRICS} is damaged: steps_begun is not an integer")
        return max(counts, default=0)

    def check_again(self) -> None:
        """Checks the workdir again, once the folder is locked.

        Raises the errors of `check_resumable`.
        """
        # Before the lock, another process may have finished the run.
        if self._workdir is not None and self._writes:
            check_resumable(self._workdir, self._config)

    def begin(self) -> None:
        """Writes the config, which from then on must stay the same in this folder."""
        if self._workdir is not None and self._writes:
            write_json(self._workdir / "config.json", as_json(self._config))

    def start_after(self, step: int) -> None:
        """Opens the metrics and drops rows after `step`.

        A step of -1 drops all rows.
        """
        if self._workdir is None:
            return
        rows = read_rows(self._workdir)
        # A resumed run takes the steps after its checkpoint again, and writes their rows again.
        self.rows = [row for row in rows if row.get("step", math.inf) <= step]
        if not self._writes:
            return
        path = self._workdir / METRICS
        write_text(path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self._metrics = path.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(self._workdir / "tensorboard"), purge_step=step + 1)

    def __enter__(self) -> "RunFiles":
        return self

    def __exit__(self, *unused: object) -> None:
        for name in ("_metrics", "_events"):
            if hasattr(self, name):
                getattr(self, name).close()

    def add_row(self, row: JsonObject) -> None:
        """Appends a row to `rows` and `metrics.jsonl`, and its numbers to TensorBoard."""
        self.rows.append(row)
        if not self._writes:
            return
        self._metrics.write(json.dumps(row, allow_nan=False) + "\n")
        # A row that a user sees must survive a crash, so it is on the disk before it is printed.
        to_disk(self._metrics)
        for name, value in row.items():
            if name != "step" and value is not None:
                self._events.add_scalar(name, value, row["step"])

    def finish(self, summary: JsonObject) -> None:
        """Writes `summary.json`, which marks the run as complete."""
        if self._workdir is not None and self._writes:
            write_json(self._workdir / "summary.json", summary)


def read_rows(workdir: Path) -> list[JsonObject]:
    """Returns the complete rows of a run's `metrics.jsonl`."""
    path = workdir / METRICS
    check_replaceable(path)  # reading a pipe would wait for a writer
    lines = path.read_bytes().splitlines() if path.exists() else []
    # A process that was killed while it wrote may have left part of a row.
    return [as_object(line, path) for line in lines if line.endswith(b"}")]


def finite(row: JsonObject) -> JsonObject:
    """Returns the row with None for NaN and infinity, which JSON lacks."""
    nonfinite = {k for k, x in row.items() if isinstance(x, float) and not math.isfinite(x)}
    return row | dict.fromkeys(nonfinite)


def divergence(row: JsonObject) -> str:
    """Returns a line if the test loss of a row or a summary is not finite, and "" otherwise."""
    # `finite` made it None. A row without an evaluation has no such key.
    if row.get("test_loss", 0.0) is None:
        return "training diverged: the test loss is not a finite number"
    return ""


def check_resumable(workdir: Path, config: ConfigDict) -> None:
    """Raises FinishedError for a finished run.

    InputError if a key that may not change differs, and for an unfinished run of another version.
    """
    # A folder with steps but without a config belongs to a run that cannot be checked.
    if not (workdir / "config.json").exists():
        ledger = workdir / "steps_begun"
        # A run that was refused before its first step leaves an empty folder of checkpoints.
        if any((workdir / "checkpoints").glob("*")) or (ledger.is_file() and ledger.stat().st_size):
            raise InputError(
                f"{workdir} holds steps of a run, but its config.json is missing; choose another "
                "--workdir"
            )
        return
    if not (workdir / "summary.json").exists():
        check_version(workdir)
    if differs := _difference(read_json(workdir / "config.json"), config):
        raise InputError(
            f"{workdir} holds a run with {differs}; choose another --workdir or delete that one"
        )
    if (workdir / "summary.json").exists():
        raise FinishedError(
            f"{workdir} already holds a finished run; choose another --workdir or delete that one"
        )


def _difference(recorded: JsonObject, config: ConfigDict) -> str:
    """Returns the first differing key that must not change, with both values.

    "" if all agree.
    """
    current = flat(as_json(config))
    # A key that a recorded section lacks had its default: configs replaced whole sections.
    unset = {key.name: key.default for key in KEYS if "." in key.name and key.name in current}
    recorded = unset | flat(recorded)
    # Names first: another method also has other options, and its name explains the difference.
    for key in sorted(recorded | current, key=lambda key: (not key.endswith(".name"), key)):
        if recorded.get(key) != current.get(key) and key not in CHANGEABLE:
            return f"{key} = {recorded.get(key)!r}, not {current.get(key)!r}"
    return ""


def as_json(config: ConfigDict) -> JsonObject:
    """Returns a config as in `config.json`.

    Infinity is the text "Infinity", which sets it again.
    """
    # `parse_constant` gets "Infinity" and "NaN", which strict JSON lacks.
    nested: JsonObject = json.loads(config.to_json_best_effort(), parse_constant=str)
    return nested


def flat(nested: JsonObject, prefix: str = "") -> JsonObject:
    """Returns `{"a": {"b": 1}}` as `{"a.b": 1}`."""
    flattened: JsonObject = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            flattened |= flat(value, f"{prefix}{key}.")
        else:
            flattened[prefix + key] = value
    return flattened
