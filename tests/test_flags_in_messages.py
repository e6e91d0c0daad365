"""Each flag, key and command that a text of bam names is one that there is."""

import ast
import re
from pathlib import Path

import pytest

from bam.cli.help_text import HELP
from bam.cli.options import COMMANDS, DEBUG
from bam.part_table import SECTIONS
from bam.training.keys import BY_NAME

FLAG = re.compile(r"(?<![\w-])--([a-z][\w.-]*)(?:=([\w-]+))?")
# In backquotes, or with a flag in a line of its own, which a backslash at its end continues, or
# after a colon, comma or semicolon.
LINE = re.compile(r"(^|`|[:;,] )bam (\w+)((?:\\\n|[^`\n])*)", re.MULTILINE)
GENERAL = {DEBUG.name, *HELP}
ALIASES = {"seeds"}
OTHER_PROGRAMS = {
    "git": {"porcelain", "error-unmatch"},
    "XLA": {"xla_cpu_experimental_ynn_fusion_type"},
}


def texts(code):
    """Yields the strings of code, with `{}` for a value that is put into one."""
    inside = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(x) for x in node.values}
            yield "".join(x.value if isinstance(x, ast.Constant) else "{}" for x in node.values)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in inside
        ):
            yield node.value


def names_of(command):
    return {flag.name for flag in COMMANDS[command].flags} | GENERAL | ALIASES


ANY_FLAG = set().union(*map(names_of, COMMANDS), *OTHER_PROGRAMS.values(), {"version"})


def options_of(section):
    """Options of any part that a section can name."""
    rows = SECTIONS[section].rows.values() if section in SECTIONS else ()
    return {option for row in rows for option in row.public_options}


def missing(text):
    """What a text names that there is not."""
    lines = [x for x in LINE.finditer(text) if x[1] == "`" or re.match(r"[^;:,.]* --", x[3])]
    lines = [x for x in lines if x[2] != "COMMAND"]
    wrong = [f"bam {x[2]}" for x in lines if x[2] not in COMMANDS]
    for line in lines:
        if line[2] in COMMANDS:
            given = {name.partition(".")[0] for name, _ in FLAG.findall(line[3])}
            wrong += [f"bam {line[2]} --{x}" for x in sorted(given - names_of(line[2]))]
    for name, value in FLAG.findall(text):
        flag, _, key = name.rstrip(".-").partition(".")
        section, _, option = key.rpartition(".")
        if flag not in ANY_FLAG:
            wrong.append(f"--{flag}")
        elif key and not key.isupper() and key not in BY_NAME and option not in options_of(section):
            wrong.append(f"--{flag}.{key}")
        elif value.islower() and key in BY_NAME and BY_NAME[key].names:
            wrong += [f"--{name}={value}"] * (value not in BY_NAME[key].names)
    return wrong


@pytest.mark.parametrize("path", sorted(Path("bam").rglob("*.py")), ids=str)
def test_flags_keys_and_commands_that_a_text_names_exist(path):
    assert [x for text in texts(path.read_text(encoding="utf-8")) for x in missing(text)] == []


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("'give --sise=32'", ["--sise"]),
        ("f'{x}: give --sise={y}'", ["--sise"]),
        ("'add --config.metod.name=dp_sgd'", ["--config.metod.name"]),
        ("'add --config.model.symetries=2'", ["--config.model.symetries"]),
        ("'add --config.loss.name=bynary'", ["--config.loss.name=bynary"]),
        ("'see `bam tran`'", ["bam tran"]),
        ("'see `bam report --plan=x`'", ["bam report --plan"]),
        ("'it is chosen: bam report --plan=x'", ["bam report --plan"]),
        ("'bam report --workdir=x \\\\\\n  --plan=y'", ["bam report --plan"]),
        ("'bam COMMAND --help and `bam audit --config.KEY=VALUE --one_run`'", []),
        ("'bam computes ε; add --config.model.symmetries=2 or --config.epsilon.'", []),
        ("x - --y", []),
    ],
)
def test_what_there_is_not_is_noticed(code, wrong):
    assert [x for text in texts(code) for x in missing(text)] == wrong
