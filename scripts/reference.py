"""Fills the pages that list every config key and every flag, from the tables in the code.

python -m scripts.reference
"""

import ast
import inspect
import json
import re
from collections.abc import Iterable
from pathlib import Path

from absl import flags

from bam import files
from bam.cli import command, options
from bam.part_table import SECTIONS
from bam.training import named_configs, parts
from bam.training.keys import KEYS
from scripts.lib import pages


def options_of(section: str, name: str) -> str:
    """The options of a method, model, clip, …, with their defaults."""
    options = parts.options_of(section, name).items()
    return ", ".join(f"`{k}` {as_code(v)}".strip() for k, v in options)


def as_code(value: object) -> str:
    """A default in Markdown; "" for an argument without one."""
    if value is inspect.Parameter.empty:
        return ""
    return "not set" if value is None else f"`{json.dumps(value)}`"


def table(*rows: Iterable[str]) -> str:
    """A Markdown table, its first row the head; names of pages become links."""
    cells = [[" ".join(x.split()).replace("|", "\\|") for x in row] for row in rows]
    lines = [cells[0], ["---"] * len(cells[0]), *cells[1:]]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", text)


def keys() -> str:
    """All keys, in a table for each section."""
    rows: dict[str, list[tuple[str, str, str]]] = {}
    for key in KEYS:
        section = rows.setdefault(key.name.rpartition(".")[0], [])
        section.append((f"`{key.name}`", as_code(key.default), key.help))
    return "\n".join(
        f"## {f'`{section}`' if section else 'The whole run'}\n\n"
        + table(("key", "default", "meaning"), *section_rows)
        for section, section_rows in rows.items()
    )


def commands() -> str:
    """All commands: purpose, examples and flags."""
    sections = []
    for name, row in options.COMMANDS.items():
        values = flags.FlagValues()
        options.define(values, row.flags)
        usage = "\n".join(re.findall(r"^bam .*(?:\n  +-.*)*", row.about, re.MULTILINE))
        usage = re.sub(" {3,}--", " \\\\\n  --", usage)
        rows = [(f"`--{x}`", as_code(values[x].default), readable(values[x].help)) for x in values]
        heading = f"## bam {name}\n\n`bam {name}` {row.does}.\n\n```bash\n{usage}\n```\n\n"
        sections.append(heading + table(("flag", "default", "meaning"), *rows))
    return "\n".join(sections)


def statuses() -> str:
    """The meaning of each exit status."""
    return table(("exit status", "meaning"), *((str(k), v) for k, v in options.STATUSES.items()))


def readable(text: str) -> str:
    """A flag's help with "a or b; " in place of the `<a|b>: ` that absl puts before it."""
    return re.sub(r"^<(.*?)>: ", lambda x: f"{x[1].replace('|', ' or ')}; ", text)


def tables() -> dict[str, dict[str, str]]:
    """Page -> marker on the page -> text after the marker."""
    rows = [(s, f"`{k}`", options_of(s, k)) for s, x in SECTIONS.items() for k in x.rows]
    docs = {
        k: ast.get_docstring(ast.parse(f.read_text())) for k, f in named_configs.shipped().items()
    }
    shipped = [(f"`{k}`", (doc or "").split("\n\n")[0]) for k, doc in sorted(docs.items())]
    config_tables = {
        "keys": keys(),
        "options": table(("section", "name", "options"), *rows),
        "shipped": table(("config", "what it trains"), *shipped),
    }
    return {
        "docs/config.md": config_tables,
        "docs/commands.md": {"statuses": statuses(), "commands": commands()},
    }


def main() -> None:
    """Rewrites the generated parts of the pages."""
    for page, texts in tables().items():
        text = Path(page).read_text(encoding="utf-8")
        files.write_text(Path(page), pages.fill(text, texts))


if __name__ == "__main__":
    command.run_script(main)
