"""The reference pages are what the code says, and their examples run."""

import doctest
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bam
from bam.release import export
from scripts.lib import pages

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
API = sorted(page.name for page in DOCS.glob("api_*.md"))


def test_the_generated_pages_are_what_the_code_says():
    """In a process of its own: commands define flags of the same names."""
    code = "import json; from scripts import reference; print(json.dumps(reference.tables()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for page, found in json.loads(done.stdout).items():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert pages.fill(text, found) == text, f"{page}: run python -m scripts.reference"


def test_the_page_of_files_names_what_a_release_holds():
    text = (DOCS / "files.md").read_text(encoding="utf-8")
    release = text.partition("## A release")[2]
    assert set(re.findall(r"^\| `([\w.]+)` \|", release, re.MULTILINE)) == set(export.FILES)


def test_the_architecture_page_names_files_that_exist():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    named = set(
        re.findall(r"`((?:bam|scripts|configs|examples|tests|docs|benchmarks)/[\w/.]*)`", text)
    )
    assert len(named) > 20
    assert {name for name in named if not (ROOT / name).exists()} == set()
    folders = {f"bam/{f.name}/" for f in (ROOT / "bam").iterdir() if (f / "__init__.py").exists()}
    assert folders <= named


@pytest.mark.parametrize("name", API)
def test_the_examples_of_an_api_page_run(name):
    text = (DOCS / name).read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert examples
    for code in examples:
        test = doctest.DocTestParser().get_doctest(code, {}, name, name, 0)
        assert test.examples
        failures: list[str] = []
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        runner.run(test, out=failures.append)
        assert failures == []


@pytest.mark.parametrize("name", API)
def test_what_an_api_page_shows_exists(name):
    shown = re.findall(r"^::: ([\w.]+)", (DOCS / name).read_text(encoding="utf-8"), re.MULTILINE)
    assert shown
    for path in shown:
        try:
            importlib.import_module(path)
        except ModuleNotFoundError:
            module, _, attribute = path.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), path


def test_the_api_pages_show_all_that_bam_exports():
    text = "".join((DOCS / name).read_text(encoding="utf-8") for name in API)
    shown = set(re.findall(r"^::: ([\w.]+)", text, re.MULTILINE))
    for name in bam.__all__:
        found = getattr(bam, name)
        if inspect.ismodule(found):
            assert any(path.startswith(found.__name__) for path in shown), name
        else:
            assert {found.__module__, f"{found.__module__}.{name}"} & shown, name
