"""Imports point one way: into the core, which knows nothing of what is built on it."""

import ast
import graphlib
from pathlib import Path

import pytest

import bam
from bam.cli import options
from tests.conftest import THOROUGH

ROOT = Path(__file__).parents[1]
# A folder imports those before it, and itself. Nothing imports the last two.
ORDER = (
    *("core", "privacy", "data", "images", "models", "features", "training"),
    *("sweep", "release", "audit"),
)
ENDS = ("testing", "cli")
SHARED = {
    "bam.compiler",
    "bam.extras",
    "bam.files",
    "bam.memory",
    "bam.named",
    "bam.part_table",
    "bam.provenance",
    "bam.tables",
    "bam.text",
    "bam.waits",
}  # of every folder but the core; import each other alone
# What any command line is made of, for the commands and for scripts.
COMMAND_LINES = {
    *("command", "command_line", "help_text", "jax_setup", "main", "options", "run_lines"),
    *("screen", "signals"),
}


def modules(*folders):
    """Name -> file of every module."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    named = {}
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return named


def imports(name, text, known):
    """Returns which of the known modules a module imports, anywhere in it.

    `from PACKAGE import MODULE` imports the module alone, not the package.
    """
    wanted = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            wanted |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            modules_in_it = inner & known
            # `from bam.core import pytree` imports bam.core.pytree, and nothing else of bam.
            wanted |= modules_in_it
            if len(modules_in_it) < len(inner):
                wanted.add(node.module)
    return (wanted & known) - {name}


def graph(*folders):
    named = modules(*folders)
    return {name: imports(name, file.read_text(), set(named)) for name, file in named.items()}


def test_no_import_is_part_of_a_cycle():
    order = list(graphlib.TopologicalSorter(graph("bam", "configs", "scripts")).static_order())
    assert "bam.training.step" in order
    with pytest.raises(graphlib.CycleError):  # the control: what it looks for, it sees
        broken = graph("bam")
        broken["bam.core.pytree"] |= {"bam.training.loop"}
        graphlib.TopologicalSorter(broken).prepare()


def wrong_imports(imported):
    """Pairs of modules of bam, of which the first must not import the second."""
    for name, others in imported.items():
        if name == "bam.__main__":  # the command
            continue
        folder = name.split(".")[1] if "." in name else ""
        for other in others - ({"bam"} if folder in (*ENDS, "release", "audit") else set()):
            theirs = other.split(".")[1] if "." in other else ""
            if other == "bam.errors":
                allowed = True
            elif name in SHARED:
                allowed = other in SHARED
            elif folder == "":
                allowed = theirs in ("core", "privacy", "compiler") or other == "bam.models"
            elif other in SHARED:
                allowed = folder != "core"
            elif folder in ENDS:
                allowed = theirs in (*ORDER, folder)
            else:
                allowed = theirs in ORDER[: ORDER.index(folder) + 1]
            if theirs == "images" and folder != "images":
                allowed = folder == "cli" or name == "bam.release.predict"
            if not allowed:
                yield name, other


def test_a_folder_imports_only_those_before_it():
    imported = graph("bam")
    folders = {name.split(".")[1] for name in imported if name.count(".") > 1}
    assert folders <= {*ORDER, *ENDS} and imported.keys() >= SHARED
    assert list(wrong_imports(imported)) == []
    for name, other in (  # the control
        ("bam.core.engine", "bam.training.step"),
        ("bam.core.engine", "bam.files"),
        ("bam.files", "bam.core.pytree"),
        ("bam.tables", "bam.cli.screen"),
        ("bam.data.users", "bam.training.devices"),
        ("bam.training.loop", "bam.audit.canary"),
        ("bam.training.loop", "bam.testing.common"),
        ("bam.training.loading", "bam.images.pixels"),
        ("bam.release.load", "bam.images.pixels"),
        ("bam", "bam.training.loop"),
    ):
        assert list(wrong_imports({name: {other}})) == [(name, other)]


def test_nothing_in_bam_imports_what_uses_it():
    for name, others in graph("bam", "configs", "scripts").items():
        if name.startswith("bam"):
            assert not any(other.startswith(("configs", "scripts")) for other in others), name


def test_commands_hold_flags_and_printing_alone_and_scripts_take_no_more():
    folder = ROOT / "bam/cli"
    modules_of_it = {file.stem for file in folder.glob("*.py")} - {"__init__"}
    assert modules_of_it == {*options.COMMANDS, *COMMAND_LINES}

    def taken(imported):
        return {
            (name, other)
            for name, others in imported.items()
            for other in others
            if other.startswith("bam.cli.") and other.rpartition(".")[2] not in COMMAND_LINES
        }

    of_scripts = graph("bam", "configs", "scripts", "examples")
    assert not taken({k: v for k, v in of_scripts.items() if not k.startswith("bam")})
    wrong = ("scripts.demo", "bam.cli.sweep")  # the control
    assert taken({wrong[0]: {wrong[1], "bam.cli.command"}}) == {wrong}


def test_type_checkers_see_what_bam_exports():
    tree = ast.parse((ROOT / "bam/__init__.pyi").read_text())
    of_stub = {
        (node.module, alias.asname or alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    exported = {(f"bam.{module}", x) for module, names in bam._EXPORTED.items() for x in names}
    assert of_stub == exported | {("bam", "privacy")}


def test_the_files_that_make_test_leaves_out_exist():
    """A renamed file would otherwise run with every change again."""
    assert [name for name in THOROUGH if not (ROOT / f"tests/test_{name}.py").exists()] == []
