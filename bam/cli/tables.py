"""Tables for documents and for the terminal: first column to the left, the others to the right."""

import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from bam import files
from bam.cli import console
from bam.files import JsonMapping

Row: TypeAlias = Any  # of any kind: its columns know it
Columns = Mapping[str, Callable[[Row], str]]  # heading -> what a row has in that column


def text(*headings: str) -> Columns:
    """Columns of rows that are lists of text."""
    return {heading: operator.itemgetter(i) for i, heading in enumerate(headings)}


def markdown(columns: Columns, rows: Iterable[Row], left: Sequence[str] = ()) -> str:
    """A table for documents; `left` are further columns that are set to the left."""
    marks = ["---" if _is_left(columns, name, left) else "---:" for name in columns]
    lines = ["| " + " | ".join(columns) + " |", "|" + "|".join(marks) + "|"]
    lines += ["| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows]
    return "\n".join(map(files.visible, lines)) + "\n"


def show(
    columns: Columns,
    rows: Sequence[Row],
    title: str = "",
    left: Sequence[str] = (),
    keep: Path | None = None,
) -> None:
    """Prints a table, and keeps it in a file for documents, whose folder is made.

    Of a table that is kept, a terminal that is too narrow shows the first columns.
    """
    if keep:
        keep.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(keep, markdown(columns, rows, left))
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError:  # an extra brings it
        console.show("\n\n".join(filter(None, (title, markdown(columns, rows, left)))))
        return
    cell = lambda text: Text(files.visible(text))  # noqa: E731 (brackets are no markup)
    screen = Console(width=None if sys.stdout.isatty() else 180)
    for num_shown in range(len(columns), 0, -1):
        shown = list(columns)[:num_shown]
        table = Table(
            title=cell(title) if title else None,
            box=box.SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
        )
        for name in shown:
            justify: Literal["left", "right"] = "left" if _is_left(columns, name, left) else "right"
            table.add_column(cell(name), justify=justify, no_wrap=True)
        for row in rows:
            table.add_row(*(cell(columns[name](row)) for name in shown))
        if num_shown < 3 or not keep or screen.measure(table).maximum <= screen.width:
            break
    screen.print(table)
    if len(shown) < len(columns):
        console.say(f"{', '.join(list(columns)[len(shown) :])}: {keep}")


def write_csv(path: Path, rows: Sequence[JsonMapping]) -> None:
    """Writes rows of one shape as CSV, numbers to six digits."""
    names = list(rows[0])
    short = (
        [f"{x:.6g}" if isinstance(x, float) else x for x in map(row.get, names)] for row in rows
    )
    path.write_text(files.csv_text([names, *short]), encoding="utf-8", newline="")


def number(value: float | None, form: str) -> str:
    """A number for a cell, or a dash."""
    return "–" if value is None else format(value, form)


def plus_minus(mean: float, spread: float | None, form: str) -> str:
    """For a cell: "1.23 ± 0.45", or "1.23" if the spread is not known."""
    shown = format(mean, form)
    return shown if spread is None else f"{shown} ± {format(spread, form.lstrip('+'))}"


def interval(estimate: JsonMapping | None, form: str) -> str:
    """A `comparison.Estimate`, as JSON has it, with its confidence interval, or "not run"."""
    if estimate is None:
        return "not run"
    return plus_minus(estimate["mean"], estimate["half_width"], form)


def _is_left(columns: Columns, name: str, left: Sequence[str]) -> bool:
    return name == next(iter(columns)) or name in left
