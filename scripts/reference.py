"""Fills the pages that list every config key and every flag, from the tables in the code.

python -m scripts.reference
"""

import ast
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from bam import files
from bam.cli import command, options
from bam.part_table import SECTIONS
from bam.training import named_configs, parts
from bam.training.keys import KEYS
from scripts.lib import pages


def names_of(section: str) -> str:
    """A list of the names that a section accepts, with the options of each and their defaults."""
    rows = {name: parts.options_of(section, name) for name in SECTIONS[section].rows}
    if not any(rows.values()):
        return f"`{section}.name` accepts {', '.join(f'`{name}`' for name in rows)}.\n"
    lines = [f"- `{name}`{': ' if rows[name] else ''}{options_in(rows[name])}" for name in rows]
    return "\n".join([f"`{section}.name` accepts:", "", *lines, ""])


def options_in(defaults: Mapping[str, object]) -> str:
    """The options of a part, with their defaults."""
    needed = [f"`{k}`" for k, v in defaults.items() if v is inspect.Parameter.empty]
    given = {k: v for k, v in defaults.items() if v is not inspect.Parameter.empty}
    texts = [f"`{k}`" if v is None else f"`{k}={json.dumps(v)}`" for k, v in given.items()]
    return ", ".join([f"{' and '.join(needed)} must be set", *texts] if needed else texts)


def as_code(value: object) -> str:
    """A default in Markdown."""
    return "not set" if value is None else f"`{json.dumps(value)}`"


def items(rows: Iterable[tuple[str, str]]) -> str:
    """Returns a Markdown list of names and their meanings.

    Names of pages become links.
    """
    text = "".join(f"- {name}: {' '.join(meaning.split())}\n" for name, meaning in rows)
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", text)


def keys() -> str:
    """All keys, in a list for each section, with the names that it accepts."""
    rows: dict[str, list[tuple[str, str]]] = {}
    for key in KEYS:
        section = rows.setdefault(key.name.rpartition(".")[0], [])
        section.append((f"`{key.name}` ({as_code(key.default)})", key.help))
    return "\n".join(
        f"## {f'`{section}`' if section else 'The whole run'}\n\n"
        + items(section_rows)
        + (f"\n{names_of(section)}" if section in SECTIONS else "")
        for section, section_rows in rows.items()
    )


def commands() -> str:
    """All commands: purpose, examples and flags."""
    sections = []
    for name, row in options.COMMANDS.items():
        usage = "\n".join(re.findall(r"^bam .*(?:\n  +-.*)*", row.about, re.MULTILINE))
        usage = re.sub(" {3,}--", " \\\\\n  --", usage)
        heading = f"## bam {name}\n\n`bam {name}` {row.does}.\n\n```bash\n{usage}\n```\n\n"
        sections.append(heading + items(map(flag_row, row.flags)))
    return "\n".join(sections)


def statuses() -> str:
    """The meaning of each exit status."""
    return items((f"`{status}`", text) for status, text in options.STATUSES.items())


def flag_row(flag: options.Flag) -> tuple[str, str]:
    """A flag with its default, and its meaning, as `bam COMMAND --help` prints them."""
    choices = " or ".join(filter(None, flag.choices))
    return f"`{str(flag).removesuffix('=')}`", f"{choices}; {flag.help}" if choices else flag.help


def tables() -> dict[str, dict[str, str]]:
    """Page -> marker on the page -> text after the marker."""
    docs = {
        k: ast.get_docstring(ast.parse(f.read_text()))
        for k, f in named_configs.shipped_configs().items()
    }
    shipped = [(f"`{k}`", (doc or "").split("\n\n")[0]) for k, doc in sorted(docs.items())]
    config_tables = {
        "keys": keys(),
        "shipped": items(shipped),
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
