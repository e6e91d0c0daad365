"""Pages about the guarantee name tests and files that exist, and all pitfalls that are known."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TESTS = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
TWELVE = (
    "Division by batch size",
    "Sensitivity alignment",
    "Accounting and batch selection mismatch",
    "Public vs. private metadata",
    "Neighboring relation clarity",
    "Zero-sized batches and non-finite gradients",
    "Gradient accumulation",
    "Cross-example operations",
    "Auxiliary information",
    "Randomness and RNG injection",
    "Floating point robustness",
    "Finite-precision numerical error",
)


def missing(text):
    """Tests that a page names, and that do not exist."""
    return [name for name in re.findall(r"`(test_\w+)`", text) if f"def {name}(" not in TESTS]


def test_every_pitfall_names_a_test_that_exists_or_says_that_there_is_none():
    text = (DOCS / "pitfalls.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if re.match(r"\| .*\| (`test_\w+`|none) \|$", line)]
    assert len(rows) >= 25
    assert sum(row.endswith("| none |") for row in rows) <= 1
    assert missing(text) == []
    assert missing(text + "`test_that_is_not_there`") == ["test_that_is_not_there"]


def test_the_twelve_pitfalls_of_jax_privacy_are_answered_with_their_severity():
    text = (DOCS / "pitfalls.md").read_text(encoding="utf-8")
    part = text.partition("## The twelve pitfalls")[2].partition("\n## ")[0]
    rows = re.findall(
        r"^\| ([^|]+) \| (critical|theoretical|negligible) \|[^|]+\| `test_\w+` \|$", part, re.M
    )
    assert len(rows) == len(TWELVE)
    for (pitfall, _), name in zip(rows, TWELVE, strict=True):
        assert pitfall == name


@pytest.mark.parametrize("name", ["pitfalls", "privacy", "verification"])
def test_files_that_a_page_of_the_guarantee_names_exist(name):
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:bam/|tests/|core/|privacy/|training/)[\w/]+\.py)`", text)
    assert named
    for path in named:
        assert (ROOT / path).exists() or (ROOT / "bam" / path).exists(), path


def test_the_lines_of_a_statement_that_a_publisher_is_pointed_to_are_there():
    goldens = ROOT / "tests" / "golden"
    statement = (goldens / "example_poisson.md").read_text(encoding="utf-8")
    searched = (goldens / "private_search.md").read_text(encoding="utf-8")
    text = (DOCS / "release.md").read_text(encoding="utf-8")
    part = text.partition("\n## What to say about ε\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| [^|]+ \| ([^|]+) \| [^|]+ \|$", part, re.MULTILINE)
    quoted = {words for cell in cells for words in re.findall(r'"([^"]+)"', cell)}
    assert len(quoted) >= 8
    assert {words for words in quoted if words not in statement} == set()
    for fact in ("accountant", "sampling", "noise", "steps begun", "unit of privacy", "adjacency"):
        assert f"| {fact}" in statement
    assert "| E[K]" in searched and "| η" in searched
    for question in ("trust model", "side channels"):
        assert f"| {question} |" in statement
    assert statement.count("not known to this file") >= 3
