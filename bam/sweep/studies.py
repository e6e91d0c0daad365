"""Carries out a study: trains the missing runs, with a progress bar, and writes the table."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bam import files, tables
from bam.extras import needs
from bam.files import JsonMapping, JsonObject
from bam.models.figures import LOWER_IS_BETTER
from bam.privacy.rounding import round_up
from bam.sweep import runs
from bam.sweep.comparison import Runs, Study, is_percent
from bam.text import plural
from bam.training import loop

with needs("train"):
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

# What the columns of every table mean; commands print it below the table.
LEGEND = (
    "±: the 95 % interval of a mean over seeds; seconds: the median time of training, without "
    "compiling and evaluating"
)
ONE_SEED = "one seed: a difference between single runs says nothing"
# Heading -> key of a diagnostic.
BIAS = {"‖bias‖": "bias_norm", "‖ĝ‖": "gradient_norm", "ratio": "relative_bias", "cosine": "cosine"}
GAIN: tables.Columns = {
    "paired gain": lambda row: tables.interval(row["gain"], f"+z{_form(row)}"),
    # A small p must not be printed as 0.
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
    """Trains the missing runs in `workdir`, and writes `OUT.json` and `OUT.md`.

    If `should_stop` ends it early, the files hold the finished runs, and another call continues.

    Returns:
      The rows of the table, and the finished runs.
    """
    trained = run_missing(study.configs(num_seeds), workdir, should_stop, log)
    result = study.result(trained)
    files.write_json(out.with_name(f"{out.name}.json"), result)
    rows = result["rows"]
    table = tables.markdown(columns(study.columns, rows), rows)
    notes = "".join(f"\n{line}\n" for line in remarks(rows))
    files.write_text(out.with_name(f"{out.name}.md"), table + notes)
    return rows, trained


def columns(more: tables.Columns, rows: Sequence[JsonMapping]) -> tables.Columns:
    """The columns of a study's table, with `more` after ε.

    Gains stand there if a group has a baseline, and diagnostics if a run has them.
    """
    paired = any(row["baseline"] not in (None, row["label"]) for row in rows)
    metric = next((row["metric"] for row in rows if "metric" in row), "accuracy")
    heading = metric.replace("_", " ") + ", %" * is_percent(metric)
    heading += " (lower is better)" * (metric in LOWER_IS_BETTER)
    bias = {heading: key for heading, key in BIAS.items() if any(row[key] for row in rows)}
    gain = {
        heading: lambda row, cell=cell: "–" if row["gain"] is None else cell(row)
        for heading, cell in GAIN.items()
    }
    return {
        "group": lambda row: row["label"],
        "ε": lambda row: "–" if row["epsilon"] is None else round_up(row["epsilon"], ".3g"),
        **more,
        "seeds": lambda row: str(len(row["seeds"])),
        heading: lambda row: (
            tables.interval(row[metric], _form(row)) if row[metric] else "diverged"
        ),
        **(gain if paired else {}),
        **{
            heading: lambda row, key=key: tables.number(row[key] and row[key]["mean"], ".3f")  # type: ignore[misc]
            for heading, key in bias.items()
        },
        "seconds": lambda row: f"{row['seconds']:.3g}",
    }


def remarks(rows: Sequence[JsonMapping]) -> list[str]:
    """Returns a line if a gain is the difference of two runs, or else []."""
    return [ONE_SEED] if any(row["gain"] and row["gain"]["num"] == 1 for row in rows) else []


def main_columns(headings: Iterable[str], rows: Sequence[JsonMapping]) -> list[str]:
    """Returns the columns that a comparison needs however narrow the terminal: metric, gain, p."""
    metric = next((row["metric"] for row in rows if "metric" in row), "accuracy")
    start = metric.replace("_", " ")
    return [x for x in headings if x in ("paired gain", "p") or x.startswith(start)]


def _form(row: JsonMapping) -> str:
    """Returns the number format of a row's metric.

    It has two decimals for %, and four significant digits for other metrics, which have any size.
    """
    return ".2f" if is_percent(row.get("metric", "accuracy")) else ".4g"


class BesideBar:
    """A log that names a wait beside a bar of progress, after the name of the run.

    Attributes:
      run: the name of the run that is trained.
    """

    def __init__(self, log: Callable[[str], None], describe: Callable[[str], None]) -> None:
        """Prints lines by `log`, and puts a text beside the bar by `describe`."""
        self.run, self._log, self._describe = "", log, describe

    def __call__(self, line: str) -> None:
        """Prints a line."""
        self._log(line)
        self._describe(self.run)

    def draw(self, line: str) -> None:
        """Names the run and the wait of an unfinished line, or for "" the run alone."""
        self._describe(": ".join(filter(None, (self.run, line.partition(" …")[0]))))

    def draws_in_place(self) -> bool:
        """Whether a line can be replaced, as on a terminal."""
        return True


def progress_bar(**options: Any) -> Progress:
    """Returns a bar of steps, whose text is cut first where the terminal is narrow."""
    text = TextColumn(
        "{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True)
    )
    parts = (text, BarColumn(12), MofNCompleteColumn(), "steps", TimeRemainingColumn())
    return Progress(*parts, transient=True, expand=True, **options)


def run_missing(
    groups: Mapping[str, runs.Configs],
    workdir: Path,
    should_stop: Callable[[], bool],
    log: Callable[[str], None],
) -> dict[str, dict[int, runs.FinishedRun]]:
    """Trains the missing runs, seed by seed, until all are finished or `should_stop` is true.

    A progress bar counts the steps of all runs. `log` is called with a line about each run, and one
    on each long wait.

    Returns:
      Group -> seed -> finished run.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    is_terminal = sys.stdout.isatty()
    with progress_bar(disable=not is_terminal) as bar:
        task = bar.add_task("reading finished runs", total=None)
        step: dict[str, int] = {}
        beside = BesideBar(log, lambda text: bar.update(task, description=text))
        beside.run = "planning"

        def on_built(built: Mapping[str, loop.Trainer]) -> None:
            total = sum(each.plan.training_steps for each in built.values())
            bar.update(task, total=total, visible=bool(built))

        def on_event(name: str, text: str) -> None:
            log(f"{time.strftime('%H:%M:%S')}  {name}  {text}")

        def on_step(name: str, num: int) -> None:
            step[name] = max(num, step.get(name, 0))
            if num == 0:  # it begins; later, a wait may be named beside it
                beside.run = name
                bar.update(task, description=name)
            bar.update(task, completed=sum(step.values()))

        # An unfinished line would break the bar.
        lines: Callable[[str], None] = beside if is_terminal else log
        runs.train(runs.in_turn(groups), workdir, should_stop, on_event, on_step, on_built, lines)
    trained = runs.by_seed(groups, workdir)
    if num_missing := sum(map(len, groups.values())) - sum(map(len, trained.values())):
        are, them = ("is", "it") if num_missing == 1 else ("are", "them")
        unfinished = f"{plural(num_missing, 'run')} {are} not finished"
        log(f"{unfinished}; the same command continues {them}")
    return trained


def is_finished(trained: Runs, num_seeds: int) -> bool:
    """Whether every group has `num_seeds` finished runs."""
    return all(len(by_seed) >= num_seeds for by_seed in trained.values())
