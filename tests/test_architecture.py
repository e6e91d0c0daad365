"""Imports point one way: into the core, which knows nothing of what is built on it."""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = {
    "bam.chacha", "bam.compiler", "bam.engine", "bam.grid", "bam.noise", "bam.oracles",
    "bam.places", "bam.sampling", "bam.strategy", "bam.transforms", "bam.tree",
}  # fmt: skip


def modules(*folders):
    """Name -> file of every module."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    named = {}
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return named


def imports(name, text, known):
    """What of the known modules a module imports, anywhere in it; a package by its name alone."""
    wanted = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            wanted |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            modules_in_it = inner & known
            # `from bam import tree` imports bam.tree, and nothing else of bam.
            wanted |= modules_in_it
            if len(modules_in_it) < len(inner):
                wanted.add(node.module)
    return (wanted & known) - {name}


def graph(*folders):
    named = modules(*folders)
    return {name: imports(name, file.read_text(), set(named)) for name, file in named.items()}


def test_no_import_is_part_of_a_cycle():
    order = list(graphlib.TopologicalSorter(graph("bam", "configs", "scripts")).static_order())
    assert "bam.step" in order
    with pytest.raises(graphlib.CycleError):  # the control: what it looks for, it sees
        broken = graph("bam")
        broken["bam.tree"] |= {"bam.train"}
        graphlib.TopologicalSorter(broken).prepare()


def test_the_core_imports_the_core_alone():
    imported = graph("bam")
    assert imported.keys() >= CORE
    for name in CORE:
        assert imported[name] <= CORE, name


def test_privacy_is_a_leaf_and_nothing_in_bam_imports_what_uses_it():
    for name, imported in graph("bam", "configs", "scripts").items():
        if name.startswith("bam.privacy"):  # the sampler stands in the record with its account
            others = imported - {"bam.named", "bam.sampling", "bam.strategy"}
            assert all(x.startswith("bam.privacy") for x in others), name
        if name.startswith("bam"):
            assert not any(other.startswith(("configs", "scripts")) for other in imported), name
        if name not in ("bam.audit", "scripts.audit") and not name.startswith("bam.audit."):
            assert not any(other.startswith("bam.audit") for other in imported), name


def test_no_file_of_the_library_is_longer_than_350_lines():
    lengths = {name: len(file.read_text().splitlines()) for name, file in modules("bam").items()}
    assert len(lengths) > 30
    assert {name: length for name, length in lengths.items() if length > 350} == {}
