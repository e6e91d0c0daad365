"""HTML of tables, commands and the Markdown that `release/statement.py` writes, all escaped."""

import html
import re
from collections.abc import Callable, Iterable, Sequence


def table(
    heading: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Sequence[int] = (),
    cell: Callable[[str], str] = html.escape,
) -> str:
    """A table of text; `right` are columns that are set to the right."""

    def line(tag: str, cells: Sequence[str]) -> str:
        sides = [' class="right"' if i in right else "" for i in range(len(cells))]
        filled = zip(sides, cells, strict=True)
        return "".join(f"<{tag}{side}>{cell(text)}</{tag}>" for side, text in filled)

    body = "\n".join(f"<tr>{line('td', cells)}</tr>" for cells in rows)
    head = f"<thead><tr>{line('th', heading)}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>\n{body}\n</tbody></table></div>'


def code(text: str) -> str:
    """Text as a block to copy."""
    return f"<pre><code>{html.escape(text)}</code></pre>"


def markdown(text: str) -> str:
    """HTML of what Markdown `release/statement.py` uses; whatever else is in it is plain text."""
    return "\n".join(_block(block) for block in text.strip().split("\n\n"))


def _block(block: str) -> str:
    lines = block.split("\n")
    if block.startswith("## "):
        return f"<h2>{inline(block[3:])}</h2>"
    if block.startswith("```"):
        return code("\n".join(lines[1:-1]))
    if block.startswith("- "):
        items = "".join(f"<li>{inline(item)}</li>" for item in block[2:].split("\n- "))
        return f"<ul>{items}</ul>"
    if block.startswith("| "):
        heading, _, *rows = [line[2:-2].split(" | ") for line in lines]
        marks = lines[1].strip("|").split("|")
        right = [i for i, mark in enumerate(marks) if mark.endswith(":")]
        return table(heading, rows, right, inline)
    return f"<p>{inline(block)}</p>"


def inline(text: str) -> str:
    """Escaped text with its `code`, **strong** and *stressed* parts."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text, flags=re.DOTALL)
    return re.sub(r"\*(.+?)\*", r"<em>\1</em>", text, flags=re.DOTALL)
