"""The records of a run, finished or not, as its folder holds them; they may be a stranger's."""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bam.files import JsonObject, one_line, read_json
from bam.privacy.accounting import PoissonSteps
from bam.privacy.plan import PrivacyPlan
from bam.release import export
from bam.training import config as base
from bam.training.rundir import as_json, flat, read_rows

_NUMBERS = (
    "num_examples", "expected_batch_size", "sampling_prob", "num_steps", "noise_multiplier",
    "delta",
)  # fmt: skip


class Run(NamedTuple):
    """The records of a run.

    Attributes:
      name: of its folder.
      config, plan, summary: the files, in texts of one line each; the summary is empty while the
        run is not finished.
      rows: of `metrics.jsonl`, each with its finite numbers.
      begun: steps begun, lost ones included.
    """

    name: str
    config: JsonObject
    plan: JsonObject
    summary: JsonObject
    rows: Sequence[Mapping[str, float]]
    begun: int

    @property
    def private(self) -> bool:
        """Whether it has a finite ε."""
        return export.is_private(self.config, self.plan)

    @property
    def nominal(self) -> bool:
        """Whether noise and batches came from a seed."""
        return self.summary.get("seed", self.config.get("seed")) is not None

    def epsilon_after(self, num_steps: int) -> float:
        """ε once so many steps are begun, by the run's own accountant."""
        return PrivacyPlan.from_json(self.plan).epsilon_after(num_steps)

    def dp_event_after(self, num_steps: int) -> PoissonSteps | None:
        """Poisson-sampled Gaussians that dominate so many steps, if any are known."""
        return PrivacyPlan.from_json(self.plan).dp_event_after(num_steps)


def read(workdir: Path) -> Run:
    """The records of a run; a ValueError, in one line, for a folder that holds none."""
    if not (workdir / "config.json").exists():
        raise ValueError(f"{workdir} is not the folder of one run: it has no config.json")
    config, plan = (read_json(workdir / f"{name}.json") for name in ("config", "plan"))
    for section in filter(None, export.SETTINGS):
        if not isinstance(config.setdefault(section, {}), dict):
            raise ValueError(f"{workdir}/config.json is damaged: {section} is no section")
    wrong = [key for key in _NUMBERS if not _is_number(plan.get(key))]
    wrong += [key for key in ("epsilon", "clip_norm") if not _is_number(plan.get(key) or 0)]
    if wrong:
        raise ValueError(f"{workdir}/plan.json is damaged: {', '.join(wrong)}")
    summary = workdir / "summary.json"
    rows = [{k: v for k, v in row.items() if _is_number(v)} for row in read_rows(workdir)]
    rows = [row for row in rows if "step" in row]
    # The ledger has the steps begun; without one, at least those that the other files know of.
    begun = [int(row.get("steps_begun", row["step"])) for row in rows]
    begun += [int(x.name) for x in (workdir / "checkpoints").glob("*") if x.name.isdecimal()]
    ledger = workdir / "steps_begun"
    begun += [ledger.stat().st_size] if ledger.exists() else []
    return Run(
        name=workdir.resolve().name,
        config=one_line(config, without=""),  # with the bars of regular expressions
        plan=one_line(plan),
        summary=one_line(read_json(summary)) if summary.exists() else {},
        rows=rows,
        begun=min(max(begun, default=0), int(plan["num_steps"])),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def command_of(config: JsonObject) -> tuple[str, list[str]]:
    """The command for a recorded config, and its keys that the base config does not have."""
    method = config["method"]["name"]
    file = method if method in base.METHODS else "dp_sgd"
    known = flat(as_json(base.get_config(file)))
    other = {k: v for k, v in flat(config).items() if k not in known or known[k] != v}
    arguments = [f"--config=base:{file}", "--workdir=NEW_FOLDER"]
    arguments += [f"--config.{key}={value}" for key, value in other.items() if key in known]
    quoted = [shlex.quote(argument) for argument in arguments]
    return " \\\n  ".join(["bam train", *quoted]), sorted(other.keys() - known.keys())
