"""Tables on a terminal."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from bam import files
from bam.cli import console
from bam.tables import Columns, Row, is_left, markdown


def show(
    columns: Columns,
    rows: Sequence[Row],
    title: str = "",
    left: Sequence[str] = (),
    kept: Path | None = None,
) -> None:
    """Prints a table; if a file has all of it, a terminal that is too narrow the first columns."""
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
            justify: Literal["left", "right"] = "left" if is_left(columns, name, left) else "right"
            table.add_column(cell(name), justify=justify, no_wrap=True)
        for row in rows:
            table.add_row(*(cell(columns[name](row)) for name in shown))
        if num_shown < 3 or not kept or screen.measure(table).maximum <= screen.width:
            break
    screen.print(table)
    if len(shown) < len(columns):
        console.say(f"{', '.join(list(columns)[len(shown) :])}: {kept}")
