"""The site is short enough to be read: a limit on its pages, on each page and on all of them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_PAGES, MOST_ON_A_PAGE, MOST_WORDS = 30, 1600, 32_000
NAV = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
# The README and CONTRIBUTING.md are index.md and contributing.md of the site.
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(
        path
        for name in re.findall(r": (\w+\.md)$", NAV, re.M)
        for path in (ROOT / "docs").glob(name)
    ),
]


def num_words(path: Path) -> int:
    """The words of a page as `wc -w` counts them."""
    return len(path.read_text(encoding="utf-8").split())


def faults(words: dict[str, int]) -> list[str]:
    """The limits that pages with these numbers of words exceed."""
    long = [f"{name}: {n} words" for name, n in words.items() if n > MOST_ON_A_PAGE]
    in_all = sum(words.values())
    return (
        long
        + [f"{len(words)} pages"] * (len(words) > MOST_PAGES)
        + [f"{in_all} words in all"] * (in_all > MOST_WORDS)
    )


def test_the_site_has_at_most_30_pages_of_1600_words_and_32000_in_all():
    assert faults({path.name: num_words(path) for path in PAGES}) == []


def test_every_page_is_counted():
    pages = {x for x in (ROOT / "docs").glob("*.md") if not x.name.startswith("audit")}
    assert pages == set(PAGES[2:])


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ({f"{i}": 1000 for i in range(30)}, []),
        ({f"{i}": 1000 for i in range(31)}, ["31 pages"]),
        ({"a": 1600, "b": 1601}, ["b: 1601 words"]),
        ({f"{i}": 1067 for i in range(30)}, ["32010 words in all"]),
    ],
)
def test_a_site_that_is_too_long_is_seen(words, found):
    assert faults(words) == found
