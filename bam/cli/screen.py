"""What commands print: lines, unfinished lines of waits, and tables."""

import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bam.tables import Columns, Row, is_left, markdown
from bam.text import visible

# Reentrant: a thread draws waits, and a signal handler can print while the main thread prints.
_printing = threading.RLock()


class _Unended(NamedTuple):
    """An unfinished line on standard output: that of a wait, see `bam.waits`."""

    file: Any = None
    text: str = ""

    def end(self, begins: str = "") -> str:
        """Ends the line, and returns the part of the next line `begins` that is left to print.

        On a terminal it erases the line, and all of `begins` is left. In a file the next line
        continues it if it begins with the same text; otherwise it ends the line.
        """
        if not self.text or self.file is not sys.stdout:
            return begins
        if show.draws_in_place():
            self.file.write("\r\x1b[K")
        elif begins.startswith(self.text):
            return begins[len(self.text) :]
        else:
            self.file.write("\n")
        self.file.flush()
        return begins


_unended = _Unended()


def say(*lines: str, error: bool = False) -> None:
    """Prints lines, on standard error if `error`. Commands print only through this function.

    A line may hold file names of a stranger, so `visible` escapes line ends and control characters.
    """
    global _unended
    if not lines:
        return
    with _printing:
        text = "\n".join(map(visible, lines))
        text = _unended.end() + text if error else _unended.end(text)
        _unended = _Unended()
        print(text, file=sys.stderr if error else None, flush=True)


class _Log:
    """Prints a text of bam's own in several lines, such as a plan, each by `say`.

    A terminal gets lines that are no wider than it, cut between words.
    """

    def __call__(self, text: str) -> None:
        """Prints a text."""
        lines = text.split("\n")
        say(*(x for line in lines for x in wrap(line)) if self.draws_in_place() else lines)

    def draw(self, line: str) -> None:
        """Prints an unfinished line, which the next one continues (on a terminal: replaces)."""
        global _unended
        with _printing:
            line = visible(line)
            if self.draws_in_place():  # a wrapped line would be two, and only one is erased
                line = line[: shutil.get_terminal_size().columns - 1]
            print(_unended.end(line), end="", flush=True)
            _unended = _Unended(sys.stdout, line)

    def draws_in_place(self) -> bool:
        """Whether a line can be replaced, as on a terminal."""
        return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


show = _Log()


def wrap(line: str) -> list[str]:
    """Returns the lines of the terminal's width that a line takes, the later ones indented.

    A command stays on its line, so that it can be copied.
    """
    if line.lstrip().startswith(("bam ", "make ", "python ", ".venv/")):
        return [visible(line)]
    return textwrap.wrap(
        visible(line),
        max(20, shutil.get_terminal_size().columns),
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    ) or [line]


def table(
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
        say(*"\n\n".join(filter(None, (title, markdown(columns, rows, left)))).split("\n"))
        return
    cell = lambda text: Text(visible(text))  # noqa: E731 (rich reads brackets in a str as markup)
    screen = Console(width=None if sys.stdout.isatty() else 180)
    names, optional = list(columns), [x for x in list(columns)[1:] if x not in always]
    while True:
        drawn = Table(
            title=cell(title) if title else None,
            box=box.SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
        )
        for name in names:
            justify: Literal["left", "right"] = "left" if is_left(columns, name, left) else "right"
            drawn.add_column(cell(name), justify=justify, no_wrap=True)
        for row in rows:
            drawn.add_row(*(cell(columns[name](row)) for name in names))
        # A console never measures more than its own width, so a wide one measures the table.
        if not (optional and file) or Console(width=4096).measure(drawn).maximum <= screen.width:
            break
        names.remove(optional.pop())
    screen.print(drawn)
    if missing := [x for x in columns if x not in names]:
        say(f"{', '.join(missing)}: {file}")
