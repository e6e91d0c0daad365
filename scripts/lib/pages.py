"""Puts tables into pages, between `<!-- NAME -->` and `<!-- end -->`.

python -m scripts.lib.pages

The command fills the places whose NAME is a file, with the text that is in this file now.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from bam import files
from bam.cli import command

FILE = re.compile(r"^<!-- ((?:docs|benchmarks)/\S+\.md) -->$", re.MULTILINE)


def main() -> None:
    """Rewrites the tables of every page."""
    for page in sorted(Path("docs").glob("*.md")):
        files.write_text(page, fill_page(page, Path()))


def fill_page(page: Path, root: Path) -> str:
    """A page with the current tables of the files under `root`."""
    text = page.read_text(encoding="utf-8")
    names = FILE.findall(text)
    return fill(text, {name: (root / name).read_text(encoding="utf-8") for name in names})


def fill(text: str, tables: Mapping[str, str]) -> str:
    """A page with the text between `<!-- NAME -->` and `<!-- end -->` replaced."""
    for name, table in tables.items():
        place = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not place.search(text):
            raise ValueError(f"the page has no place for {name}: <!-- {name} --> … <!-- end -->")
        text = place.sub(lambda m, table=table: f"{m[1]}\n{table}\n{m[2]}", text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    command.run_script(main)
