"""A study carried out: it trains what is missing, with a bar of all steps, and writes the table."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bam import files, tables
from bam.extras import needs
from bam.files import JsonMapping, JsonObject
from bam.models.figures import LOWER_IS_BETTER
from bam.privacy.rounding import rounded_up
from bam.sweep import runs
from bam.sweep.comparison import Runs, Study, is_percent
from bam.training import loop

with needs("train"):
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

# Heading -> what the diagnostics measure.
BIAS = {"‖bias‖": "bias_norm", "‖ĝ‖": "gradient_norm", "ratio": "relative_bias", "cosine": "cosine"}
GAIN: tables.Columns = {
    "paired gain": lambda row: tables.interval(row["gain"], f"+z{_form(row)}"),
    # A p that would be rounded to 0 is not 0.
    "p": lambda row: tables.number(row["p"], ".2f").replace("0.00", "< 0.01"),
    "min. detectable": lambda row: tables.number(row["minimum_detectable_effect"], _form(row)),
}


def carry_out(
    study: Study,
    num_seeds: int,
    workdir: Path,
    out: Path,
    should_stop: Callable[[], bool],
    log: Callable[[str], None],
) -> tuple[list[JsonObject], Runs]:
    """Trains what is missing in `workdir`, writes `OUT.json` and `OUT.md`; the rows and the runs.

    A study that is not finished is written as far as it is; whoever calls again goes on.
    """
    trained = run_missing(study.configs(num_seeds), workdir, should_stop, log)
    result = study.result(trained)
    files.write_json(out.with_name(f"{out.name}.json"), result)
    rows = result["rows"]
    table = tables.markdown(columns(study.columns, rows), rows)
    files.write_text(out.with_name(f"{out.name}.md"), table)
    return rows, trained


def columns(own: tables.Columns, rows: Sequence[JsonMapping]) -> tables.Columns:
    """A study's table: gains where something is paired, bias where it was measured."""
    paired = any(row["baseline"] not in (None, row["label"]) for row in rows)
    metric = next((row["metric"] for row in rows if "metric" in row), "accuracy")
    heading = metric.replace("_", " ") + ", %" * is_percent(metric)
    heading += " (lower is better)" * (metric in LOWER_IS_BETTER)
    measured = {heading: key for heading, key in BIAS.items() if any(row[key] for row in rows)}
    gain = {
        heading: lambda row, cell=cell: "–" if row["gain"] is None else cell(row)
        for heading, cell in GAIN.items()
    }
    return {
        "group": lambda row: row["label"],
        "ε": lambda row: "–" if row["epsilon"] is None else rounded_up(row["epsilon"], ".3g"),
        **own,
        "seeds": lambda row: str(len(row["seeds"])),
        heading: lambda row: (
            tables.interval(row[metric], _form(row)) if row[metric] else "diverged"
        ),
        **(gain if paired else {}),
        **{
            heading: lambda row, key=key: tables.number(row[key] and row[key]["mean"], ".3f")  # type: ignore[misc]
            for heading, key in measured.items()
        },
        "seconds": lambda row: f"{row['seconds']:.3g}",
    }


def _form(row: JsonMapping) -> str:
    """Of %, two digits; of any other metric, whose size is not known, four that count."""
    return ".2f" if is_percent(row.get("metric", "accuracy")) else ".4g"


def run_missing(
    groups: Mapping[str, runs.Configs],
    workdir: Path,
    should_stop: Callable[[], bool],
    log: Callable[[str], None],
) -> dict[str, dict[int, runs.Run]]:
    """Trains what is missing, seed by seed, until it is done or `should_stop`.

    It shows a bar of all steps. `log` is called with a line on each run. Returns group -> seed ->
    finished run.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    parts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), "steps")
    shown = sys.stdout.isatty()
    with Progress(*parts, TimeRemainingColumn(), transient=True, disable=not shown) as bar:
        task = bar.add_task("reading finished runs", total=None)
        step: dict[str, int] = {}

        def on_built(built: Mapping[str, loop.Trainer]) -> None:
            total = sum(each.plan.training_steps for each in built.values())
            bar.update(task, description="compiling", total=total, visible=bool(built))

        def on_event(name: str, text: str) -> None:
            log(f"{time.strftime('%H:%M:%S')}  {name}  {text}")

        def on_row(name: str, row: JsonMapping) -> None:
            step[name] = row["step"]
            bar.update(task, description=name, completed=sum(step.values()))

        runs.train(runs.in_turn(groups), workdir, should_stop, on_event, on_row, on_built)
    trained = runs.by_seed(groups, workdir)
    if num_missing := sum(map(len, groups.values())) - sum(map(len, trained.values())):
        are = "is" if num_missing == 1 else "are"
        log(f"{files.counted(num_missing, 'run')} {are} not finished; the same command continues")
    return trained


def finished(trained: Runs, num_seeds: int) -> bool:
    """Whether every group has all its runs."""
    return all(len(by_seed) >= num_seeds for by_seed in trained.values())
