"""What PRIVACY.md says: its words by goldens, its numbers as numbers, its choices as facts."""

import itertools
import math
import re

import pytest

from tests import golden
from tests.cases import recomputed

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def differing(text, other):
    """Lines of both that differ in a word, or in a number by more than late digits."""
    both = itertools.zip_longest(text.split("\n"), other.split("\n"), fillvalue="no line")
    return [pair for pair in both if not _same(*pair)]


def _same(line, other):
    numbers = zip(NUMBER.findall(line), NUMBER.findall(other), strict=False)
    close = all(math.isclose(float(a), float(b), rel_tol=1e-9) for a, b in numbers)
    return close and NUMBER.sub("0", line) == NUMBER.sub("0", other)


@pytest.fixture(scope="module", params=golden.PLANS)
def stated(request):
    """The name, the plan and the statement of one of six trainings."""
    return request.param, golden.plan_of(request.param), golden.of(request.param)


def test_a_statement_has_the_words_of_its_golden(stated):
    name, _, text = stated
    written = (golden.FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert differing(text, written) == [], "python -m tests.golden writes them again"


def test_another_word_number_or_line_is_seen():
    text = (golden.FOLDER / "example_poisson.md").read_text(encoding="utf-8")
    assert differing(text, text) == []
    for old, new in (
        ("secret and never saved", "**a seed** (see the top)"),
        ("4.55542494463676", "4.555425"),
        ("| S, sensitivity |", "| sensitivity |"),
        ("\n- *Test examples,*", " *Test examples,*"),
        ("word of whoever releases the model.\n", "word of whoever releases the model.\n\n"),
    ):
        assert old in text and differing(text, text.replace(old, new))
    assert not differing(text, text.replace("4.55542494463676", "4.55542494463677"))


def test_the_lines_of_every_golden_compute_its_epsilon(stated):
    _, plan, text = stated
    plan.check_epsilon()
    assert recomputed(text) == pytest.approx(plan.epsilon, rel=1e-9)
