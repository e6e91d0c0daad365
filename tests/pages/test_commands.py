"""What a page names is in a clone: commands, flags, config keys, scripts, files and commits."""

import fnmatch
import functools
import importlib
import importlib.util
import inspect
import os
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from absl import flags
from ml_collections import ConfigDict

import bam
from bam.cli import options
from bam.errors import InputError
from bam.part_table import SECTIONS
from bam.training import config as base
from bam.training import named_configs, rundir
from bam.training.keys import KEYS

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *(ROOT / "docs").glob("*.md"),
        ROOT / "docs/results/benchmark/checklist.md",  # a page of the site, too
    ]
)
FENCED = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
# What follows in a block needs another version of bam.
AT = re.compile(r"^# at (?:commit |tag )?([\w.-]+)", re.MULTILINE)
RUN = re.compile(r"(?:[\w.=/-]+ +)*?(?:\.venv/bin/)?(bam|make|python) ")
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
# A tag, unless a page tells how to make one. A clone may have none, so each is a mistake.
TAG = re.compile(r"(?<!such as `)(?<![\w./-])(?:[a-z]+-|v)\d+(?:\.\d+)+(?![\w/-])")
COMMIT = re.compile(r"(?<![\w./-])(?=[0-9a-f]*\d)(?=\d*[a-f])[0-9a-f]{7}(?:[0-9a-f]{33})?(?![\w-])")
FOLDERS = ("bam", "scripts", "examples", "configs", "tests", "docs", "benchmarks", ".github", ".ci")
FILE = re.compile(rf"(?<![\w./-])(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./*-]*")
MODULE = re.compile(r"(?<![\w./-])(?:bam|scripts|examples|configs|tests)(?:\.[A-Za-z_]\w*)+")
SUFFIXES = (".py", ".md", ".json", ".jsonl", ".npy", ".npz", ".csv", ".png")
ELSEWHERE = {"bam/jax"}  # a folder below a user's cache
DEFINED = re.compile(r'(?:DEFINE_\w+|require)\(\s*"(\w+)"(?:, "(\w+)")?')
EVERYWHERE = {"config", "workdir", "debug", "help", "max_seconds"}  # of bam.cli


def git(*arguments: str) -> list[str]:
    """The lines that a git command prints."""
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.splitlines()


@functools.cache
def files_of(revision: str = "") -> frozenset[str]:
    """Returns the files of a clone, or of a commit in it.

    A commit that the clone lacks has none.
    """
    if revision and not is_commit(revision):
        return frozenset()
    return frozenset(git("ls-tree", "-r", "--name-only", revision) if revision else git("ls-files"))


@functools.cache
def hashes() -> frozenset[str]:
    """The first seven digits of every commit that a clone has."""
    return frozenset(line[:7] for line in git("rev-list", "HEAD"))


def is_commit(revision: str) -> bool:
    """Whether a clone has this commit, named by its hash."""
    return bool(COMMIT.fullmatch(revision)) and revision[:7] in hashes()


def commands(text: str) -> list[tuple[list[str], str]]:
    """The words of each command in a page's blocks and spans, and the version that it needs."""
    found = []
    for language, block in FENCED.findall(text):
        revision = ""
        for line in block.replace("\\\n", " ").splitlines() * (language in ("console", "bash")):
            revision = "".join(AT.findall(line)) or revision
            found += [(line, revision)] * bool(RUN.match(line))
    spans = SPAN.findall(FENCED.sub("", text))
    found += [(span, "") for span in spans if RUN.match(span) and "…" not in span]
    return [(words_of(line), revision) for line, revision in found]


def words_of(line: str) -> list[str]:
    """The words of a command line, from bam, make or python on."""
    words = shlex.split(line, comments=True)
    while words[0].removeprefix(".venv/bin/") not in ("bam", "make", "python"):
        words = words[1:]
    return [words[0].removeprefix(".venv/bin/"), *words[1:]]


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


def mistakes(words: list[str], revision: str = "") -> list[str]:
    """What a command names that a clone lacks, there or at a revision."""
    if words[:3] == ["python", "-m", "bam"]:
        words = words[2:]
    if revision and not is_commit(revision):
        return [f"at {revision}"]
    if revision:
        return without_file(words[2:3] if words[:2] == ["python", "-m"] else [], files_of(revision))
    if words[0] == "make":
        targets = (ROOT / "Makefile").read_text(encoding="utf-8")
        return [w for w in words[1:] if "=" not in w and f"\n{w}:" not in targets]
    if words[0] == "bam" and len(words) > 1 and not words[1].startswith("-"):
        if words[1].isupper():  # a placeholder
            return []
        if words[1] not in options.COMMANDS:
            return [words[1]]
        known = defined(options.COMMANDS[words[1]].flags) | {"debug", "help"}
    elif words[:2] == ["python", "-m"] and len(words) > 2 and words[2].split(".")[0] in FOLDERS:
        try:
            known = flags_of(words[2]) | EVERYWHERE
        except ModuleNotFoundError:
            return [words[2]]
    else:
        return []
    given = dict(re.findall(r"^--([\w.]+)=?(.*)$", w)[0] for w in words if w.startswith("--"))
    known |= {f"no{flag}" for flag in known}
    wrong = [f"--{flag}" for flag in given if "." not in flag and flag not in known]
    try:
        config = config_of(given.get("config", ""))
    except InputError:
        return [*wrong, f"--config={given['config']}"]
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
    """Returns the config that `--config` names.

    For a placeholder, or no name, it is the base config.
    """
    name, _, method = named.partition(":")
    if not name or name.isupper() or name.startswith("my_"):
        return base.get_config("dp_sgd")
    get_config = runpy.run_path(named_configs.file_of(name))["get_config"]
    return get_config(method) if method and not method.isupper() else get_config()


def without_file(modules: Sequence[str], files: frozenset[str]) -> list[str]:
    """Returns the modules that have no file.

    Names inside a module may follow the module's name.
    """
    wrong = []
    for module in modules:
        parts = module.split(".")
        paths = ["/".join(parts[:k]) for k in range(1, len(parts) + 1)]
        if not any(f"{x}.py" in files for x in paths) and f"{paths[-1]}/__init__.py" not in files:
            wrong.append(module)
    return wrong


def is_there(path: str, files: frozenset[str]) -> bool:
    """Whether a clone has a file, a folder, or a file that fits a pattern with "*"."""
    if "*" in path:
        return bool(fnmatch.filter(files, path))
    return path in files or any(x.startswith(path.rstrip("/") + "/") for x in files)


def written_by(text: str) -> set[str]:
    """The files and folders that commands on a page write."""
    return set(re.findall(r"--(?:out|workdir)=([^\s`]+)", text))


def missing(text: str, folder: str = "") -> Iterator[str]:
    """What a page of that folder names, other than in commands, that a clone lacks."""
    files = files_of()
    yield from TAG.findall(text)
    for revision in [*AT.findall(text), *COMMIT.findall(text)]:
        if not is_commit(revision):
            yield f"at {revision}"
    # The files of a block that runs at a commit are there, and `mistakes` looks for its scripts.
    text = FENCED.sub(
        lambda block: "" if any(map(is_commit, AT.findall(block[0]))) else block[0], text
    )
    modules = [x for x in MODULE.findall(text) if not x.endswith(SUFFIXES)]
    yield from without_file([x for x in modules if not x.startswith("bam.")], files)
    yield from (x for x in modules if x.startswith("bam.") and not is_name(x))
    for path in {x.rstrip(".") for x in FILE.findall(text)} - written_by(text):
        name = path.rstrip("/").rpartition("/")[2].partition(".")[0]
        placeholder = name.isupper() or name.startswith("my_")
        if not (is_there(path, files) or placeholder or path in ELSEWHERE):
            yield path
    for target in LINK.findall(text):
        path = os.path.normpath(os.path.join(folder, target))
        if not is_there(path, files) and not is_there(path.replace(".md", ".ipynb"), files):
            yield target
    for span in SPAN.findall(FENCED.sub("", text)):
        if span.startswith("--") and not span.endswith("…"):
            names = re.findall(r"(?<![\w-])--([a-z][\w.]*)", span)
            yield from (f"--{x}" for x in names if x not in all_flags() and ".KEY" not in x)


def is_name(path: str) -> bool:
    """Whether bam has a module, or a name in a module, of this path."""
    found, name = bam, "bam"
    for part in path.split(".")[1:]:
        name += f".{part}"
        if hasattr(found, part):
            found = getattr(found, part)
        elif inspect.ismodule(found) and importlib.util.find_spec(name) is not None:
            found = importlib.import_module(name)
        else:
            return False
    return True


@functools.cache
def all_flags() -> frozenset[str]:
    """Every flag of a command or script, and every key of a config as `config.KEY`."""
    known = set(EVERYWHERE)
    for command in options.COMMANDS.values():
        known |= defined(command.flags)
    for file in files_of():
        if file.startswith(("scripts/", "examples/")) and file.endswith(".py"):
            known |= flags_of(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    known |= {f"config.{key.name}" for key in KEYS}
    for name, section in SECTIONS.items():
        options_of = [x for row in section.rows.values() for x in row.public_options]
        known |= {f"config.{name}.{option}" for option in options_of}
    return frozenset(known | {f"no{flag}" for flag in known})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_on_a_page_exists(page):
    found = {" ".join(c): mistakes(c, at) for c, at in commands(page.read_text(encoding="utf-8"))}
    assert {command: wrong for command, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_names_nothing_that_a_clone_lacks(page):
    folder = page.parent.relative_to(ROOT).as_posix()
    assert sorted(set(missing(page.read_text(encoding="utf-8"), folder))) == []


def test_a_command_that_does_not_exist_is_seen():
    text = "```console\n.venv/bin/bam train --config=digits:dp_sgd \\\n  --config.{} --{}=w\n```\n"
    assert mistakes(*commands(text.format("epsilon=2", "workdir"))[0]) == []
    assert mistakes(*commands(text.format("epsilo=2", "workdir"))[0]) == ["config.epsilo"]
    assert mistakes(*commands(text.format("epsilon=2", "workdi"))[0]) == ["--workdi"]
    assert mistakes(["bam", "trai"]) == ["trai"]
    assert mistakes(["make", "demos"]) == ["demos"]
    assert mistakes(["python", "-m", "scripts.nothing"]) == ["scripts.nothing"]
    assert mistakes(["bam", "train", "--config=cifar11:dp_sgd"]) == ["--config=cifar11:dp_sgd"]
    assert mistakes(["python", "-m", "bam", "train", "--workdi=w"]) == ["--workdi"]
    span = "Run `bam train --workdi=w` or `taskset -c 0 python -m scripts.nothing --out=x`."
    assert [mistakes(*each) for each in commands(span)] == [["--workdi"], ["scripts.nothing"]]


def test_a_command_of_another_version_is_looked_for_there():
    block = "```console\n# at {}\n.venv/bin/python -m scripts.paper.{} --old=1\n```\n"
    [early] = [line[:7] for line in git("rev-list", "--max-parents=0", "HEAD")]
    for revision, name, wrong in (
        ("archive-0.3", "reproduce", ["at archive-0.3"]),
        ("0000000a", "reproduce", ["at 0000000a"]),
        (f"commit {early}", "nothing", ["scripts.paper.nothing"]),
        (git("rev-parse", "--short=7", "HEAD")[0], "reproduce", []),
    ):
        [command] = commands(block.format(revision, name))
        assert mistakes(*command) == wrong


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It was made at `archive-0.3`.", ["archive-0.3"]),
        ("Look at the tag `v0.2.0`.", ["v0.2.0"]),
        ("Push a tag such as `v0.3.0`; jax 0.11.2, arXiv 2308.12018 and ImageNet32-1.", []),
        ("```console\n# at archive-0.3\nls\n```", ["archive-0.3", "at archive-0.3"]),
        ("| `a.json` | 0.2.0 | 0a0a0a0 |", ["at 0a0a0a0"]),
        ("`scripts.paper.nothing` and `scripts.paper.numbers.table_1`", ["scripts.paper.nothing"]),
        ("```python\nfrom scripts.gone import x\n```", ["scripts.gone"]),
        ("`examples.nothing:clip` and `examples.low_pass:clip`", ["examples.nothing"]),
        ("`bam.nothing`, `bam.dp_sgd`, `bam.Oracle.a`", ["bam.Oracle.a", "bam.nothing"]),
        ("`configs/cifar11.py` and `configs/cifar10.py:dp_sgd`", ["configs/cifar11.py"]),
        ("`examples/nothing/`, `examples/own_images/`", ["examples/nothing/"]),
        ("`docs/results/x*.json`, `docs/results/prior/*.json`", ["docs/results/x*.json"]),
        ("[a](docs/a.md#b), ![c](docs/figures/d.png)", ["docs/a.md", "docs/figures/d.png"]),
        ("[a](docs/paper.md#figures), [b](https://x.org/y.md), [c](#d)", []),
        ("Add `--workdi=w`, `--workdir=w`, `--config.epsilo=1`", ["--config.epsilo", "--workdi"]),
        ("`--config.method.radius=1`, `--config.KEY=VALUE`, `jupyter --execute`", []),
        ("`my_config.py`, `configs/NAME.py` and `--out=docs/results/mine`", []),
    ],
)  # fmt: skip
def test_what_a_clone_lacks_is_seen(text, found):
    assert sorted(set(missing(text))) == found
