"""Tables on a terminal."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from bam.cli import console
from bam.tables import Columns, Row, is_left, markdown
from bam.text import visible


def show(
    columns: Columns,
    rows: Sequence[Row],
    title: str = "",
    left: Sequence[str] = (),
    file: Path | None = None,
    always: Sequence[str] = (),
) -> None:
    """Prints a table. If `file` holds all of it, a narrow terminal gets the columns that fit.

    Columns are left out from the last to the first, except the first one and those in `always`.
    """
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError:  # the extra `train` brings rich
        console.show("\n\n".join(filter(None, (title, markdown(columns, rows, left)))))
        return
    cell = lambda text: Text(visible(text))  # noqa: E731 (rich reads brackets in a str as markup)
    screen = Console(width=None if sys.stdout.isatty() else 180)
    names, optional = list(columns), [x for x in list(columns)[1:] if x not in always]
    while True:
        table = Table(
            title=cell(title) if title else None,
            box=box.SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
        )
        for name in names:
            justify: Literal["left", "right"] = "left" if is_left(columns, name, left) else "right"
            table.add_column(cell(name), justify=justify, no_wrap=True)
        for row in rows:
            table.add_row(*(cell(columns[name](row)) for name in names))
        # A console never measures more than its own width, so a wide one measures the table.
        if not (optional and file) or Console(width=4096).measure(table).maximum <= screen.width:
            break
        names.remove(optional.pop())
    screen.print(table)
    if missing := [x for x in columns if x not in names]:
        console.say(f"{', '.join(missing)}: {file}")
