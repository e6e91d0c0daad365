"""The help of the commands, which is printed at once, because nothing here imports JAX."""

import textwrap
from collections.abc import Iterable, Sequence

from absl.flags import FlagValues

from bam.cli import command_line, options
from bam.training import named_configs
from bam.training.keys import KEYS

WIDTH = 80  # columns, as wide as a terminal that nobody has resized
HELP = {"help", "h", "helpshort", "helpfull"}


def asks_for_help(argv: Sequence[str]) -> bool:
    """Whether an argument is a flag that prints the help."""
    return any(x.lstrip("-") in HELP and x.startswith("-") for x in argv)


def of_all(version: str) -> str:
    """The help of `bam`."""
    return "\n".join(
        [
            f"bam {version}: differentially private image classifiers, and a privacy statement",
            "that anyone can check",
            "",
            "  bam train --config=digits:bam_sam --workdir=runs/digits",
            "",
            *_rows((name, command.does) for name, command in options.COMMANDS.items()),
            "",
            "`bam COMMAND --help` prints the flags of a command. --debug prints the traceback",
            "of an error.",
            "",
            *_statuses(),
        ]
    )


def of(name: str) -> str:
    """The help of a command."""
    command = options.COMMANDS[name]
    lines = [
        *_wrap(f"bam {name} {command.does}.", ""),
        "",
        *command.about.splitlines(),
        "",
        "flags:",
    ]
    lines += _flag_lines((*command.flags, options.DEBUG))
    if any(flag.name == "config" for flag in command.flags):
        lines += ["", "configs for --config, beside Python files of your own:"]
        lines += _wrap(", ".join(sorted(named_configs.shipped_configs())), "  ")
        if name == "train":
            lines += ["", "keys for --config.KEY=VALUE, with their defaults:"]
            for key in KEYS:
                lines += _wrap(str(key), "  ", "    ")
                if key.names:
                    lines += _wrap(f"names: {', '.join(key.names)}", "    ", "      ")
        else:
            lines += ["", "names for --config.KEY=NAME (`bam train --help` lists all keys):"]
            lines += _rows((key.name, ", ".join(key.names)) for key in KEYS if key.names)
    return "\n".join([*lines, "", *_statuses()])


def of_script(about: str, values: FlagValues) -> str:
    """The help of a script: its docstring and its flags."""
    names = command_line.own_flags(values)
    rows = (options.Flag(x, values[x].default, values[x].help or "") for x in names)
    return "\n".join([about, *_flag_lines(rows)])


def _flag_lines(rows: Iterable[options.Flag]) -> list[str]:
    """Flags as the help prints them."""
    lines = []
    for row in rows:
        choices = f"{' or '.join(map(repr, row.choices))}; " if row.choices else ""
        required = " (required)" if row.required and not row.default else ""
        lines += _wrap(f"{row}  {choices}{row.help}{required}", "  ", "      ")
    return lines


def _statuses() -> list[str]:
    return [
        "exit status:",
        *_rows((str(status), text) for status, text in options.STATUSES.items()),
    ]


def _rows(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Two columns, the second wrapped."""
    pairs = list(pairs)
    width = max(len(first) for first, _ in pairs) + 2
    lines = []
    for first, second in pairs:
        lines += _wrap(f"{first:{width}}{second}", "  ", " " * (width + 2))
    return lines


def _wrap(text: str, first: str, rest: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
