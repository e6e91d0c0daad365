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
    spared: Sequence[str] = (),
) -> None:
    """Prints a table. If a file has all of it, a narrow terminal gets as many columns as fit whole.

    Columns are left out from the last to the first, but for the first one and those `spared`.
    """
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
    shown, optional = list(columns), [x for x in list(columns)[1:] if x not in spared]
    while True:
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
        # A console measures no wider than it is, so a wide one is asked.
        if not (optional and kept) or Console(width=4096).measure(table).maximum <= screen.width:
            break
        shown.remove(optional.pop())
    screen.print(table)
    if missing := [x for x in columns if x not in shown]:
        console.say(f"{', '.join(missing)}: {kept}")
