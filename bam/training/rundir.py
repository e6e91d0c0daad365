"""The files a run writes into its workdir."""

import contextlib
import json
import math
import re
import secrets
from pathlib import Path

import numpy as np

from bam.core import processes
from bam.errors import InputError
from bam.extras import needs
from bam.files import (
    JsonObject,
    as_object,
    lock,
    make_folder,
    read_json,
    to_disk,
    write_json,
    write_text,
)
from bam.privacy import ledger
from bam.privacy.plan import PrivacyPlan, check_same
from bam.training import registry

with needs("train"):
    from ml_collections import ConfigDict
    from tensorboardX import SummaryWriter


class FinishedError(FileExistsError):
    """A folder holds a finished run."""


# What may differ when a run is resumed: when it is looked at and saved, never what is computed.
CHANGEABLE = ("eval.", "checkpoint.", "diagnostics.", "dry_run")
# What a run settles for itself where the config says "auto", and keeps when it is resumed.
AUTOMATIC = ("microbatch_size", "convolution")
METRICS = "metrics.jsonl"


class RunFiles:
    """Writes the files of one run, whose metrics are its `rows`; a context manager.

    They are `config.json`, `plan.json`, the ledger `steps_begun` (without a seed), the `processes`
    that took its steps (`processes.jsonl`), `metrics.jsonl`, TensorBoard events, checkpoints,
    `data_key` until the end, and then `summary.json`. A folder that it makes is its owner's alone,
    as `data_key` is in any; one that was there keeps its permissions. With `workdir=None` it writes
    nothing, and of several processes only the first does: the others check and read. The folder of
    a finished run, of another run and of one that is going on are refused, so that no result is
    ever overwritten.
    """

    def __init__(
        self, workdir: Path | None, config: ConfigDict, plan: PrivacyPlan, record: JsonObject
    ) -> None:
        """Creates the workdir and writes config and record, or enters an unfinished run's.

        The record is `Trainer.record`: the plan with C and S of the clip. Raises InputError, which
        says what differs, for a run of another config or record, `FinishedError`, and
        BlockingIOError if another process is writing there.
        """
        self.rows: list[JsonObject] = []
        self.processes: list[JsonObject] = []
        self._workdir = workdir
        self._plan, self._record = plan, record
        self._writes = workdir is not None and processes.writes()
        self.checkpoints = workdir and workdir / "checkpoints"
        lost_steps_count = config.seed is None and plan.private
        self._ledger_path = workdir / "steps_begun" if workdir and lost_steps_count else None
        if workdir is None:
            return
        self._check(workdir, config)
        if not self._writes:
            return
        make_folder(workdir, mode=0o700)
        with contextlib.ExitStack() as on_error:
            self._lock = on_error.enter_context(lock(workdir))
            self._check(workdir, config)  # once more: it may have begun or finished meanwhile
            if not (workdir / "config.json").exists():
                if self._ledger_path:
                    ledger.create(self._ledger_path)  # first: a run without its ledger is refused
                ledger.check_no_processes(workdir)
            write_json(workdir / "config.json", as_json(config))
            write_json(workdir / "plan.json", record)
            on_error.pop_all()

    def _check(self, workdir: Path, config: ConfigDict) -> None:
        check_resumable(workdir, config)
        path = workdir / "plan.json"
        if path.exists():
            check_same(path, read_json(path), self._record)

    def open_ledger(
        self, step: int, at_least: int, processes: list[JsonObject], num_devices: int
    ) -> ledger.Ledger:
        """The run's ledger, as `Ledger` takes them; it has a file if lost steps count.

        It must have as many steps as any row of the metrics knows of, later than `step` or not, and
        the list of processes those that a checkpoint knows of. This one joins them before its first
        step, with its number of devices.
        """
        rows = read_rows(self._workdir) if self._workdir else []
        at_least = max(at_least, *(row.get("steps_begun", 0) for row in rows), 0)
        self.processes = ledger.read_processes(self._workdir, processes)

        def join(first_step: int) -> None:
            process = ledger.this_process(first_step, num_devices)
            ledger.add_process(self._workdir, process)
            self.processes.append(process)

        self._ledger = ledger.Ledger(self._ledger_path, self._plan, step, at_least, join)
        return self._ledger

    def data_key(self) -> bytes:
        """32 secret bytes of this run, the same in every process, gone when the run is finished.

        Checkpoints hold a fingerprint of the training data under it, which means nothing without.
        """
        key = bytes(32)
        if self._workdir is not None and self._writes:
            path = self._workdir / "data_key"
            if not path.exists():
                write_text(path, secrets.token_hex(32), mode=0o600)
            text = path.read_text(encoding="utf-8", errors="replace")
            if not re.fullmatch("[0-9a-f]{64}", text):
                raise InputError(f"{path} is damaged: choose another --workdir")
            key = bytes.fromhex(text)
        return processes.from_first(np.frombuffer(key, np.uint32)).tobytes()

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
        for name in ("_metrics", "_events", "_ledger", "_lock"):
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
        """Removes `data_key`, then writes `summary.json`, which marks the run as complete."""
        if self._workdir is not None and self._writes:
            (self._workdir / "data_key").unlink(missing_ok=True)
            write_json(self._workdir / "summary.json", summary)


def read_rows(workdir: Path) -> list[JsonObject]:
    """The rows of a run's `metrics.jsonl`, without one that a killed process has half written."""
    path = workdir / METRICS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [as_object(line, path) for line in lines if line.endswith("}")]


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
    """Refuses a folder whose run is finished, or differs in a key that is not `CHANGEABLE`."""
    if not (workdir / "config.json").exists():
        if (workdir / "checkpoints").exists():
            raise InputError(
                f"{workdir} has checkpoints but no config.json; choose another --workdir"
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
    """The first key, not `CHANGEABLE`, in which a recorded config differs; "" if none does."""
    config = config.copy_and_resolve_references()
    config.model = registry.model_section(config)
    recorded, wanted = flat(recorded), flat(as_json(config))
    # Names first: with another method other keys differ, too, which say less.
    for key in sorted(recorded | wanted, key=lambda key: (not key.endswith(".name"), key)):
        settled = key in AUTOMATIC and wanted.get(key) == "auto"
        settled |= key == "clip_norm" and bool(wanted.get("public_clip.quantile"))
        same = recorded.get(key) == wanted.get(key)
        if not (same or settled or key.startswith(CHANGEABLE)):
            return f"{key} = {recorded.get(key)!r}, not {wanted.get(key)!r}"
    return ""


def recorded_plan(workdir: Path, config: ConfigDict) -> PrivacyPlan | None:
    """The plan that an unfinished run in `workdir` goes on by; None if there is none.

    Another version of the accountant may choose another σ today, so the plan is not made anew; but
    its ε must hold when it is computed again, and be at most the config's: InputError in one line
    otherwise, and for what is no plan.
    """
    path = workdir / "plan.json"
    if not path.exists():
        return None
    try:
        plan = PrivacyPlan.from_json(read_json(path))
        if registry.is_private(config.method.name):
            plan.check_target(config.epsilon)
        plan.check_epsilon()
    except ValueError as error:
        raise InputError(f"{path}: {error}; choose another --workdir") from None
    return plan


def with_recorded(config: ConfigDict, workdir: Path) -> ConfigDict:
    """A config whose "auto" keys, and whose C if it was measured, are those of a run's folder."""
    path = workdir / "config.json"
    return with_settled(config, read_json(path)) if path.exists() else config


def with_settled(config: ConfigDict, recorded: JsonObject) -> ConfigDict:
    """A config whose "auto" keys, and measured C, are what a recorded one has, where it has any."""
    settled = [key for key in AUTOMATIC if config[key] == "auto"]
    settled += ["clip_norm"] if config.public_clip.quantile else []
    config = config.copy_and_resolve_references()
    with config.ignore_type():
        config.update({key: recorded.get(key, config[key]) for key in settled})
    return config


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
