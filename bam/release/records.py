"""Reads the records of a run, finished or not, from its folder, which may be untrusted."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bam.core.gaussian import check_std
from bam.errors import InputError
from bam.files import JsonObject, read_json
from bam.privacy import ledger
from bam.privacy.plan import PrivacyPlan
from bam.privacy.selection import CHOSEN
from bam.privacy.statement import is_searched
from bam.text import one_line
from bam.training import config as base
from bam.training import methods
from bam.training.rundir import as_json, read_rows

# Keys of `summary.json` that a release needs.
RECORDED = ("num_classes", "image_shape", "mean", "std", "noise", "sampling", "commit")
NOT_PRIVATE = "not_private/"  # prefix of the metrics of training examples
PRIVATE = "private/"  # prefix of those that ε covers


@dataclasses.dataclass(frozen=True)
class RunRecords:
    """The records of a run. Each text is one line, so that it cannot pass for a page's own words.

    Attributes:
      workdir: the folder.
      config: the contents of `config.json`.
      plan: the plan of `plan.json`.
      plan_record: the contents of `plan.json`.
      summary: the contents of `summary.json`; empty while the run is not finished.
      rows: the rows of `metrics.jsonl`, each with its finite numbers.
      diagnosed: whether the run has metrics that are not private.
      steps_begun: number of steps begun, lost ones included.
    """

    workdir: Path
    config: JsonObject
    plan: PrivacyPlan
    plan_record: JsonObject
    summary: JsonObject
    rows: Sequence[Mapping[str, float]]
    diagnosed: bool
    steps_begun: int

    @property
    def private(self) -> bool:
        """Whether plan and method are both private.

        In untrusted records they may disagree.
        """
        return self.plan.private and methods.is_private(self.config["method"]["name"])

    @property
    def nominal(self) -> bool:
        """Whether noise and batches come from a seed."""
        return self.summary.get("seed", self.config.get("seed")) is not None

    def check_chosen(self) -> None:
        """InputError for a trial of a private search, unless it is the chosen one."""
        if is_searched(self.plan) and not (self.workdir / CHOSEN).exists():
            raise InputError(
                f"the run in {self.workdir} is one trial of a private search, and not the chosen "
                "one: ε covers the chosen one alone; give --workdir=SEARCH/chosen"
            )

    def faults(self) -> Iterator[str]:
        """Contradictions to the ε of a finished private run in its records, a line each."""
        if missing := ", ".join(key for key in RECORDED if key not in self.summary):
            yield (
                f"it was trained by a version that did not record {missing} and "
                "whose noise falls short of its claim (docs/privacy.md); train again"
            )
        if any(self.summary.get(key) != value for key, value in self.plan_record.items()):
            yield "plan.json and summary.json disagree"
        steps_begun = self.summary.get("steps_begun", 0)
        if steps_begun > self.plan.num_steps:
            yield f"{steps_begun} steps were begun, but the plan covers {self.plan.num_steps}"
        if not ledger.are_processes(self.summary.get("processes", [])):
            yield "summary.json is damaged: processes does not list the commits that took the steps"
        try:
            _check_bound(self.plan_record)
            self.plan.check_epsilon()
        except ValueError as error:
            yield str(error)


def _check_bound(record: JsonObject) -> None:
    """InputError for a C or S in `plan.json` that a private run cannot have."""
    for key in ("clip_norm", "sensitivity"):
        if type(record.get(key)) is not float or not 0 < record[key] < math.inf:
            raise InputError(f"plan.json is damaged: its {key} is {record.get(key)!r}")
    check_std(record["noise_multiplier"] * record["sensitivity"])


def read(workdir: Path) -> RunRecords:
    """Reads the records of a run.

    InputError, in one line, if they are missing or damaged.
    """
    if not (workdir / "config.json").exists():
        raise InputError(f"{workdir} is not the folder of one run: it has no config.json")
    config, plan = (read_json(workdir / f"{name}.json") for name in ("config", "plan"))
    base_config = as_json(base.get_config("dp_sgd"))
    sections = [key for key, default in base_config.items() if isinstance(default, dict)]
    if wrong := [key for key in sections if not isinstance(config.get(key, {}), dict)]:
        raise InputError(f"{workdir}/config.json is damaged: {wrong[0]} is not a section")
    if missing := [key for key in sections if key not in config]:
        raise InputError(f"{workdir}/config.json is of an earlier version: it has no {missing[0]}")
    try:
        parsed = PrivacyPlan.from_json(plan)
    except ValueError as error:
        raise InputError(f"{workdir}/plan.json: {error}") from None
    summary = workdir / "summary.json"
    all_rows = read_rows(workdir)
    rows = [{one_line(k, ""): v for k, v in row.items() if _is_number(v)} for row in all_rows]
    rows = [row for row in rows if "step" in row]
    # The largest number that the ledger, the rows and the checkpoints show: the ledger, which has a
    # byte for each step begun, may be missing.
    counts = [int(row.get("steps_begun", row["step"])) for row in rows]
    counts += [int(x.name) for x in (workdir / "checkpoints").glob("*") if x.name.isdecimal()]
    ledger = workdir / "steps_begun"
    counts += [ledger.stat().st_size] if ledger.exists() else []
    return RunRecords(
        workdir=workdir,
        config=one_line(config, without=""),  # bars stay: `trainable` is a regular expression
        plan=parsed,
        plan_record=one_line(plan),
        summary=one_line(read_json(summary)) if summary.exists() else {},
        rows=rows,
        diagnosed=any(key.startswith(NOT_PRIVATE) for row in all_rows for key in row),
        steps_begun=min(max(counts, default=0), parsed.num_steps),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
