"""Tables for documents and for the terminal: first column to the left, the others to the right."""

import csv
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bam import files
from bam.cli import stats

# Heading -> what a row has in that column.
Columns = Mapping[str, Callable[[Any], str]]


def text(*headings: str) -> Columns:
    """Columns of rows that are lists of text."""
    return {heading: operator.itemgetter(i) for i, heading in enumerate(headings)}


def markdown(columns: Columns, rows: Iterable[Any], left: Sequence[str] = ()) -> str:
    """A table for documents; `left` are further columns that are set to the left."""
    marks = ["---" if _is_left(columns, name, left) else "---:" for name in columns]
    lines = ["| " + " | ".join(columns) + " |", "|" + "|".join(marks) + "|"]
    lines += ["| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def show(
    columns: Columns,
    rows: Sequence[Any],
    title: str = "",
    left: Sequence[str] = (),
    keep: Path | None = None,
) -> None:
    """Prints a table, and keeps it in a file for documents, whose folder is made."""
    if keep:
        keep.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(keep, markdown(columns, rows, left))
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:  # an extra brings it
        print(*filter(None, (title, markdown(columns, rows, left))), sep="\n\n")
        return
    table = Table(title=title or None, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in columns:
        justify: Any = "left" if _is_left(columns, name, left) else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows of one shape as CSV, numbers to six digits."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def number(value: float | None, form: str) -> str:
    """A number for a cell, or a dash."""
    return "–" if value is None else format(value, form)


def plus_minus(mean: float, spread: float | None, form: str) -> str:
    """For a cell: "1.23 ± 0.45", or "1.23" if the spread is not known."""
    shown = format(mean, form)
    return shown if spread is None else f"{shown} ± {format(spread, form.lstrip('+'))}"


def percent(mean: float, sd: float | None) -> str:
    """A share ± its SD, in %, for a cell."""
    return plus_minus(100 * mean, sd and 100 * sd, ".1f")


def interval(estimate: Mapping[str, Any] | None, form: str) -> str:
    """A `stats.Estimate`, as JSON has it, with its confidence interval, or "not run"."""
    if estimate is None:
        return "not run"
    return plus_minus(estimate["mean"], estimate["half_width"], form)


def of_estimate(
    estimate: Mapping[str, Any] | None, fact: Callable[[stats.Estimate], float | None], form: str
) -> str:
    """A fact of a `stats.Estimate`, as JSON has it, such as its `stats.p_value`, or a dash."""
    return number(fact(stats.Estimate(**estimate)) if estimate else None, form)


def gain(key: str, is_baseline: Callable[[Any], bool]) -> Columns:
    """Columns of a gain over a baseline, paired by seed: `row[key]` is an estimate, as JSON has it.

    With it p of a paired t-test, and the smallest gain that so many seeds find with a power of 80 %
    if the spread is this one.
    """
    return {
        "paired gain": lambda row: "–" if is_baseline(row) else interval(row[key], "+.2f"),
        "p": lambda row: "–" if is_baseline(row) else _p_value(row[key]),
        "would be found": lambda row: (
            "–" if is_baseline(row) else of_estimate(row[key], stats.detectable, ".2f")
        ),
    }


def _p_value(estimate: Mapping[str, Any] | None) -> str:
    """P to two digits; one that would be rounded to 0 is not 0."""
    return of_estimate(estimate, stats.p_value, ".2f").replace("0.00", "< 0.01")


def mean_sd(values: Sequence[float], form: str) -> str:
    """Mean ± SD of values for a cell, or "not run"."""
    found = stats.estimate(values)
    return "not run" if found is None else plus_minus(found.mean, found.sd, form)


def _is_left(columns: Columns, name: str, left: Sequence[str]) -> bool:
    return name == next(iter(columns)) or name in left
