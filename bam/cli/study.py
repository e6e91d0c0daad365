"""A study: groups of runs, each set beside a baseline, as one kind of table and of JSON."""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from bam import files
from bam.cli import console, stats, sweeps, tables
from bam.privacy.accounting import rounded_up
from bam.training import devices, provenance

# What every row has of its runs' summary.
FACTS = (
    "epsilon", "delta", "noise_multiplier", "sensitivity", "num_steps", "expected_batch_size",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Study:
    """What is trained, and what is set beside what.

    Attributes:
      groups: label -> config, of any seed; `--num_seeds` runs of each are trained.
      baseline: label -> the label whose runs of the same seeds a group is paired with; a group that
        has none, or itself, gains nothing.
      columns: of the table, besides those that every study has.
      facts: `(label, runs) -> {name: value}`, for these columns and the JSON file.
      first_seed: of the runs.
    """

    groups: Mapping[str, ConfigDict]
    baseline: Callable[[str], str | None]
    columns: tables.Columns = dataclasses.field(default_factory=dict)
    facts: Callable[[str, Sequence[sweeps.Run]], dict[str, Any]] = lambda label, runs: {}
    first_seed: int = 0


def carry_out(study: Study, out: Path) -> list[dict[str, Any]]:
    """Trains what is missing, writes `OUT.json` and `OUT.md`, prints the table; returns its rows.

    Runs are trained seed by seed, go on where they were stopped, and may be shared by processes.
    A study that is not finished is written as far as it is, and ends the command with exit status
    3. Accuracies are in %, gains in points, paired by seed.
    """
    found = train(study)
    rows = [_row(study, label, found) for label, runs in found.items() if runs]
    out.parent.mkdir(parents=True, exist_ok=True)
    made = {"device": devices.name(), "commit": provenance.git_commit()}
    files.write_json(
        out.with_name(f"{out.name}.json"), made | {"versions": provenance.versions(), "rows": rows}
    )
    paired = any(study.baseline(label) not in (None, label) for label in study.groups)
    columns: tables.Columns = {
        "group": lambda row: row["label"],
        "ε": lambda row: "–" if row["epsilon"] is None else rounded_up(row["epsilon"], ".3g"),
        **study.columns,
        "seeds": lambda row: str(len(row["seeds"])),
        "accuracy, %": lambda row: tables.interval(row["accuracy"], ".2f"),
        **(tables.gain("gain", lambda row: row["gain"] is None) if paired else {}),
    }
    tables.show(columns, rows, keep=out.with_name(f"{out.name}.md"))
    if any(len(runs) < sweeps.NUM_SEEDS.value for runs in found.values()):
        sys.exit(console.STOPPED)
    return rows


def train(study: Study, num_seeds: int = 0) -> dict[str, dict[int, sweeps.Run]]:
    """Label -> seed -> run, of what is finished once time is up or all is trained.

    `num_seeds` other than 0 takes the place of `--num_seeds`.
    """
    return sweeps.run_missing(
        {
            label: sweeps.of_seeds(_folder(label), config, study.first_seed, num_seeds)
            for label, config in study.groups.items()
        }
    )


def _folder(label: str) -> str:
    return "".join(c if c.isalnum() or c in "._-=" else "_" for c in label)


def _row(study: Study, label: str, found: Mapping[str, Mapping[int, sweeps.Run]]) -> dict[str, Any]:
    runs, baseline = found[label], study.baseline(label)
    first = next(iter(runs.values()))
    accuracies = sweeps.percent(runs)
    accuracy, gain = stats.estimate(list(accuracies.values())), None
    if baseline not in (None, label):
        gain = stats.paired_difference(accuracies, sweeps.percent(found[str(baseline)]))
    return {
        "label": label,
        "method": first.method,
        **{key: first.summary[key] for key in FACTS},
        **study.facts(label, list(runs.values())),
        "seeds": list(accuracies),
        "accuracies": list(accuracies.values()),
        "accuracy": accuracy and accuracy._asdict(),
        "baseline": baseline,
        "gain": gain and gain._asdict(),
        "p": gain and stats.p_value(gain),
        "minimum_detectable_effect": gain and stats.detectable(gain),
    }
