"""Tables for documents and for the terminal: first column to the left, the others to the right."""

from collections.abc import Sequence

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
