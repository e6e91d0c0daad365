"""The files a run writes into its workdir."""

import json
import math
from pathlib import Path

from bam.core import processes
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
from bam.privacy import run
from bam.privacy.plan import PrivacyPlan
from bam.training import methods
from bam.training.keys import CHANGEABLE

with needs("train"):
    from ml_collections import ConfigDict
    from tensorboardX import SummaryWriter


class FinishedError(FileExistsError):
    """A folder holds a finished run."""


METRICS = "metrics.jsonl"


class RunFiles:
    """Writes what a run of a config leaves beside its `PrivateRun`; a context manager.

    That is `config.json`, `metrics.jsonl`, whose rows are its `rows`, TensorBoard events and at the
    end `summary.json`. With `workdir=None` it writes nothing, and of several processes only the
    first does. The folder of a finished run and of another config are refused, so no result is ever
    overwritten.
    """

    def __init__(self, workdir: Path | None, config: ConfigDict) -> None:
        """Looks at the workdir, and writes nothing; raises as `check_resumable`."""
        self.rows: list[JsonObject] = []
        self._workdir, self._config = workdir, config
        self._writes = workdir is not None and processes.writes()
        if workdir is not None:
            check_resumable(workdir, config)

    @property
    def steps_begun(self) -> int:
        """The most steps begun that a row of the metrics knows of."""
        rows = read_rows(self._workdir) if self._workdir else []
        counts = [row.get("steps_begun", 0) for row in rows]
        if not all(type(x) is int for x in counts):
            raise InputError(f"{self._workdir}/{METRICS} is damaged: steps_begun is no number")
        return max(counts, default=0)

    def begin(self) -> None:
        """Writes the config into a folder that this process alone has; raises as `__init__`."""
        if self._workdir is not None and self._writes:
            check_resumable(self._workdir, self._config)  # it may have been finished meanwhile
            write_json(self._workdir / "config.json", as_json(self._config))

    def start_after(self, step: int) -> None:
        """Opens the metrics after `step` (-1: a fresh start) and drops later rows."""
        if self._workdir is None:
            return
        rows = read_rows(self._workdir)
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
        """Appends a row to `rows`, `metrics.jsonl` and, but for what is None, to TensorBoard."""
        self.rows.append(row)
        if not self._writes:
            return
        self._metrics.write(json.dumps(row, allow_nan=False) + "\n")
        to_disk(self._metrics)
        for name, value in row.items():
            if name != "step" and value is not None:
                self._events.add_scalar(name, value, row["step"])

    def finish(self, summary: JsonObject) -> None:
        """Writes `summary.json`, which marks the run as complete."""
        if self._workdir is not None and self._writes:
            write_json(self._workdir / "summary.json", summary)


def read_rows(workdir: Path) -> list[JsonObject]:
    """The rows of a run's `metrics.jsonl`, without one that a killed process has half written."""
    path = workdir / METRICS
    check_replaceable(path)  # a pipe would be waited for
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [as_object(line, path) for line in lines if line.endswith(b"}")]


def finite(row: JsonObject) -> JsonObject:
    """A row in which None stands for numbers that are not finite, as JSON has none."""
    none = {k for k, x in row.items() if isinstance(x, float) and not math.isfinite(x)}
    return row | dict.fromkeys(none)


def divergence(row: JsonObject) -> str:
    """What there is to say of a row or a summary whose test loss is no finite number, or ""."""
    if row.get("test_loss", 0.0) is None:
        return "training diverged: the test loss is not a finite number"
    return ""


def check_resumable(workdir: Path, config: ConfigDict) -> None:
    """Refuses a folder whose run is finished, or differs in a key that is not changeable."""
    if not (workdir / "config.json").exists():
        ledger = workdir / "steps_begun"
        if (workdir / "checkpoints").exists() or (ledger.is_file() and ledger.stat().st_size):
            raise InputError(
                f"{workdir} has steps of a run but no config.json; choose another --workdir"
            )
        return
    if differs := _difference(read_json(workdir / "config.json"), config):
        raise InputError(
            f"{workdir} holds a run with {differs}; choose another --workdir or delete that one"
        )
    if (workdir / "summary.json").exists():
        raise FinishedError(
            f"{workdir} already holds a finished run; choose another --workdir or delete that one"
        )


def _difference(recorded: JsonObject, config: ConfigDict) -> str:
    """The first key that is not changeable, in which a recorded config differs; "" if none does."""
    recorded, wanted = flat(recorded), flat(as_json(config))
    # Names first: with another method other keys differ, too, which say less.
    for key in sorted(recorded | wanted, key=lambda key: (not key.endswith(".name"), key)):
        if recorded.get(key) != wanted.get(key) and key not in CHANGEABLE:
            return f"{key} = {recorded.get(key)!r}, not {wanted.get(key)!r}"
    return ""


def recorded_plan(workdir: Path, config: ConfigDict) -> PrivacyPlan | None:
    """The plan that an unfinished run of a config goes on by, see `bam.privacy.run`."""
    return run.recorded_plan(
        workdir, config.epsilon if methods.is_private(config.method.name) else None
    )


def as_json(config: ConfigDict) -> JsonObject:
    """A config as `config.json` has it; an infinite number is the word that sets it again."""
    nested: JsonObject = json.loads(config.to_json_best_effort(), parse_constant=str)
    return nested


def flat(nested: JsonObject, prefix: str = "") -> JsonObject:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`."""
    flattened: JsonObject = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            flattened |= flat(value, f"{prefix}{key}.")
        else:
            flattened[prefix + key] = value
    return flattened
