"""Tables for documents and for the terminal: first column to the left, the others to the right."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for documents."""
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def terminal(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> Table:
    """A table for the terminal."""
    table = Table(title=title or None, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def interval(estimate: Mapping[str, Any] | None, form: str) -> str:
    """A `bam.stats.Estimate`, as JSON has it, for a cell: "1.23 ± 0.45", or "not run"."""
    if estimate is None:
        return "not run"
    shown, half_width = format(estimate["mean"], form), estimate["half_width"]
    return shown if half_width is None else f"{shown} ± {format(half_width, form.lstrip('+'))}"
