"""The records of a run, finished or not, as its folder holds them; they may be a stranger's."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bam.core.gaussian import check_std
from bam.errors import InputError
from bam.files import JsonObject, one_line, read_json
from bam.privacy import ledger
from bam.privacy.plan import PrivacyPlan
from bam.privacy.selection import CHOSEN
from bam.privacy.statement import is_searched
from bam.training import config as base
from bam.training import methods
from bam.training.rundir import as_json, read_rows

# What a run records for its release.
RECORDED = ("num_classes", "image_shape", "mean", "std", "noise", "sampling", "commit")
NOT_PRIVATE = "not_private/"  # begins the names of figures of training examples


@dataclasses.dataclass(frozen=True)
class Run:
    """The records of a run, in texts of one line each.

    Attributes:
      workdir: the folder.
      config: `config.json`.
      plan: what `plan.json` says.
      plan_record: the same as it stands there.
      summary: `summary.json`; empty while the run is not finished.
      rows: of `metrics.jsonl`, each with its finite numbers.
      diagnosed: whether there are figures that are not private.
      begun: steps begun, lost ones included.
    """

    workdir: Path
    config: JsonObject
    plan: PrivacyPlan
    plan_record: JsonObject
    summary: JsonObject
    rows: Sequence[Mapping[str, float]]
    diagnosed: bool
    begun: int

    @property
    def private(self) -> bool:
        """Whether it has a finite ε, by its plan and its method; a stranger's need not agree."""
        return self.plan.private and methods.is_private(self.config["method"]["name"])

    @property
    def nominal(self) -> bool:
        """Whether noise and batches came from a seed."""
        return self.summary.get("seed", self.config.get("seed")) is not None

    def check_chosen(self) -> None:
        """Refuses a trial of a private search that was not chosen: ε covers the chosen one."""
        if is_searched(self.plan) and not (self.workdir / CHOSEN).exists():
            raise InputError(
                f"the run in {self.workdir} is one trial of a private search, and not the chosen "
                "one: ε covers the chosen one alone"
            )

    def faults(self) -> Iterator[str]:
        """What in the records, if it is finished and private, speaks against its ε, a line each."""
        if missing := ", ".join(key for key in RECORDED if key not in self.summary):
            yield (
                f"it was trained by a version that did not record {missing} and "
                "whose noise falls short of its claim (docs/privacy.md); train again"
            )
        if any(self.summary.get(key) != value for key, value in self.plan_record.items()):
            yield "plan.json and summary.json disagree"
        begun = self.summary.get("steps_begun", 0)
        if begun > self.plan.num_steps:
            yield f"{begun} steps were begun, the plan pays for {self.plan.num_steps}"
        if not ledger.are_processes(self.summary.get("processes", [])):
            yield "summary.json is damaged: processes is no list of what took the steps"
        try:
            _check_bound(self.plan_record)
            self.plan.check_epsilon()
        except ValueError as error:
            yield str(error)


def _check_bound(record: JsonObject) -> None:
    """InputError for a C or an S of `plan.json` that no private run has."""
    for key in ("clip_norm", "sensitivity"):
        if type(record.get(key)) is not float or not 0 < record[key] < math.inf:
            raise InputError(f"plan.json is damaged: its {key} is {record.get(key)!r}")
    check_std(record["noise_multiplier"] * record["sensitivity"])


def read(workdir: Path) -> Run:
    """The records of a run; an InputError, in one line, for a folder that holds none."""
    if not (workdir / "config.json").exists():
        raise InputError(f"{workdir} is not the folder of one run: it has no config.json")
    config, plan = (read_json(workdir / f"{name}.json") for name in ("config", "plan"))
    base_config = as_json(base.get_config("dp_sgd"))
    sections = [key for key, default in base_config.items() if isinstance(default, dict)]
    if wrong := [key for key in sections if not isinstance(config.get(key, {}), dict)]:
        raise InputError(f"{workdir}/config.json is damaged: {wrong[0]} is no section")
    if missing := [key for key in sections if key not in config]:
        raise InputError(f"{workdir}/config.json is of an earlier version: it has no {missing[0]}")
    try:
        parsed = PrivacyPlan.from_json(plan)
    except ValueError as error:
        raise InputError(f"{workdir}/plan.json: {error}") from None
    summary = workdir / "summary.json"
    measured = read_rows(workdir)
    rows = [{one_line(k, ""): v for k, v in row.items() if _is_number(v)} for row in measured]
    rows = [row for row in rows if "step" in row]
    # The ledger has the steps begun; without one, at least those that the other files know of.
    begun = [int(row.get("steps_begun", row["step"])) for row in rows]
    begun += [int(x.name) for x in (workdir / "checkpoints").glob("*") if x.name.isdecimal()]
    ledger = workdir / "steps_begun"
    begun += [ledger.stat().st_size] if ledger.exists() else []
    return Run(
        workdir=workdir,
        config=one_line(config, without=""),  # with the bars of regular expressions
        plan=parsed,
        plan_record=one_line(plan),
        summary=one_line(read_json(summary)) if summary.exists() else {},
        rows=rows,
        diagnosed=any(key.startswith(NOT_PRIVATE) for row in measured for key in row),
        begun=min(max(begun, default=0), parsed.num_steps),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
