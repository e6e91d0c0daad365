"""Every command on a page exists, with its flags, its config and its keys."""

import importlib.util
import re
import runpy
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from absl import flags
from ml_collections import ConfigDict

from bam.cli import options
from bam.training import config as base
from bam.training import named_configs, rundir

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"```(?:console|bash)\n(.*?)```", re.DOTALL)
DEFINED = re.compile(r'(?:DEFINE_\w+|require)\(\s*"(\w+)"(?:, "(\w+)")?')
EVERYWHERE = {"config", "workdir", "debug", "help", "max_seconds"}  # of bam.cli


def commands(text: str) -> list[list[str]]:
    """The words of every command in a page's blocks."""
    blocks = [block for block in BLOCK.findall(text) if "# at " not in block]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    words = [shlex.split(x, comments=True) for x in lines if x.startswith((".venv/bin/", "make "))]
    return [[w.removeprefix(".venv/bin/") for w in line] for line in words]


def defined(rows: Sequence[options.Flag]) -> set[str]:
    """The names of a table's flags, aliases too."""
    values = flags.FlagValues()
    options.define(values, rows)
    return set(values)


def flags_of(module: str, seen: tuple[str, ...] = ()) -> set[str]:
    """The flags that a script defines, or takes over from modules that it imports."""
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(module)
    source = Path(found.origin).read_text(encoding="utf-8")
    names = {name for match in DEFINED.findall(source) for name in match if name}
    if "import many_runs" in source:  # which defines them
        names |= defined(options.MANY_RUNS)
    for adopted in re.findall(r"adopt_module_key_flags\((\w+)\)", source):
        for of in re.findall(rf"from ([\w.]+) import [^\n]*\b{adopted}\b", source):
            if f"{of}.{adopted}" not in seen:
                names |= flags_of(f"{of}.{adopted}", (*seen, module))
    return names


def mistakes(words: list[str]) -> list[str]:
    """What a command names that does not exist."""
    if words[0] == "make":
        targets = (ROOT / "Makefile").read_text(encoding="utf-8")
        return [w for w in words[1:] if "=" not in w and f"\n{w}:" not in targets]
    if words[0] == "bam" and len(words) > 1 and not words[1].startswith("-"):
        if words[1] not in options.COMMANDS:
            return [words[1]]
        known = defined(options.COMMANDS[words[1]].flags) | {"debug", "help"}
    elif words[:2] == ["python", "-m"] and words[2].split(".")[0] in ("bam", "scripts", "examples"):
        try:
            known = flags_of(words[2]) | EVERYWHERE
        except ModuleNotFoundError:
            return [words[2]]
    else:
        return []
    given = dict(re.findall(r"^--([\w.]+)=?(.*)$", w)[0] for w in words if w.startswith("--"))
    known |= {f"no{flag}" for flag in known}
    wrong = [f"--{flag}" for flag in given if "." not in flag and flag not in known]
    config = config_of(given.get("config", ""))
    keys = rundir.flat(config.to_dict()) if config else {}
    for flag, value in given.items():
        key = flag.removeprefix("config.")
        section = key.split(".")[0]
        # A function of one's own takes what options it likes.
        if keys and flag != key and key not in keys and ":" not in value:
            named = str(given.get(f"config.{section}.name", ""))
            if section not in config or not isinstance(config[section], ConfigDict) or not named:
                wrong.append(flag)
    return wrong


def config_of(named: str) -> ConfigDict | None:
    """The config that `--config` names; the base's where it is a placeholder or none."""
    name, _, method = named.partition(":")
    if not name or name.isupper() or name.startswith("my_"):
        return base.get_config("dp_sgd")
    get_config = runpy.run_path(named_configs.file_of(name))["get_config"]
    return get_config(method) if method and not method.isupper() else get_config()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_on_a_page_exists(page):
    found = {" ".join(c): mistakes(c) for c in commands(page.read_text(encoding="utf-8"))}
    assert {command: wrong for command, wrong in found.items() if wrong} == {}


def test_a_command_that_does_not_exist_is_seen():
    text = "```console\n.venv/bin/bam train --config=digits:dp_sgd \\\n  --config.{} --{}=w\n```\n"
    assert mistakes(commands(text.format("epsilon=2", "workdir"))[0]) == []
    assert mistakes(commands(text.format("epsilo=2", "workdir"))[0]) == ["config.epsilo"]
    assert mistakes(commands(text.format("epsilon=2", "workdi"))[0]) == ["--workdi"]
    assert mistakes(["bam", "trai"]) == ["trai"]
    assert mistakes(["make", "demos"]) == ["demos"]
    assert mistakes(["python", "-m", "scripts.nothing"]) == ["scripts.nothing"]
