"""Tables as text, for documents: the first column is aligned left, the others right."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from bam.files import JsonMapping
from bam.text import csv_text, visible

Row: TypeAlias = Any  # any type that the functions of the columns take
Columns = Mapping[str, Callable[[Row], str]]  # heading -> the function from a row to its cell


def text(*headings: str) -> Columns:
    """Columns of rows that are lists of text."""
    return {heading: operator.itemgetter(i) for i, heading in enumerate(headings)}


def markdown(columns: Columns, rows: Iterable[Row], left: Sequence[str] = ()) -> str:
    """Returns a table in Markdown.

    `left` names further columns that are aligned left.
    """
    marks = ["---" if is_left(columns, name, left) else "---:" for name in columns]
    lines = ["| " + " | ".join(columns) + " |", "|" + "|".join(marks) + "|"]
    lines += ["| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows]
    return "\n".join(map(visible, lines)) + "\n"


def write_csv(path: Path, rows: Sequence[JsonMapping]) -> None:
    """Writes rows with equal keys as CSV, floats to six digits."""
    names = list(rows[0])
    short = (
        [f"{x:.6g}" if isinstance(x, float) else x for x in map(row.get, names)] for row in rows
    )
    # With any other `newline`, Windows would write "\r\n".
    path.write_text(csv_text([names, *short]), encoding="utf-8", newline="")


def number(value: float | None, form: str) -> str:
    """A number for a cell, or a dash."""
    return "–" if value is None else format(value, form)


def plus_minus(mean: float, spread: float | None, form: str) -> str:
    """For a cell: "1.23 ± 0.45", or "1.23" if the spread is not known."""
    digits = format(mean, form)
    # A form such as "+.2f" gives a sign to the mean; a spread has none.
    return digits if spread is None else f"{digits} ± {format(spread, form.lstrip('+'))}"


def interval(estimate: JsonMapping | None, form: str) -> str:
    """Returns an estimate of `bam.sweep.comparison` with its confidence interval.

    Returns "not run" for None.
    """
    if estimate is None:
        return "not run"
    return plus_minus(estimate["mean"], estimate["half_width"], form)


def is_left(columns: Columns, name: str, left: Sequence[str]) -> bool:
    """Whether a column is aligned left: the first one, and those in `left`."""
    return name == next(iter(columns)) or name in left
