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
API = (DOCS / "api.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^::: ([\w.]+)", API, re.MULTILINE)
EXAMPLES = re.findall(r"^```python\n(.*?)^```", API, re.DOTALL | re.MULTILINE)


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


@pytest.mark.parametrize("section", ["Core", "Privacy", "Training", "Release, audit and testing"])
def test_each_section_of_the_api_page_has_an_example_and_shows_modules(section):
    text = API.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    assert "```python\n>>> " in text and "\n::: bam." in text


@pytest.mark.parametrize("code", EXAMPLES)
def test_the_examples_of_the_api_page_run(code):
    test = doctest.DocTestParser().get_doctest(code, {}, "api.md", "api.md", 0)
    assert test.examples
    failures: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(test, out=failures.append)
    assert failures == []


@pytest.mark.parametrize("path", SHOWN)
def test_what_the_api_page_shows_exists(path):
    try:
        importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, attribute = path.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute)


def test_the_api_page_shows_all_that_bam_exports():
    shown = set(SHOWN)
    for name in bam.__all__:
        found = getattr(bam, name)
        if inspect.ismodule(found):
            assert any(path.startswith(found.__name__) for path in shown), name
        else:
            assert {found.__module__, f"{found.__module__}.{name}"} & shown, name
