"""A publisher's answers stand in PRIVACY.md as the publisher's word, and change no other line."""

import re

import pytest
from markdown_it import MarkdownIt

from bam.privacy import statement
from bam.release import notes
from bam.text import quote
from tests import golden
from tests.cases import refused

HYPER, RUNS, RELEASES, EPSILON, *_, CONTACT = notes.QUESTIONS


def form(folder, text):
    """A file with that text, or those bytes."""
    path = folder / "notes.md"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def filled(**answers):
    """The form with an answer to its questions of those numbers."""
    text = notes.FORM
    for number, answer in answers.items():
        heading = f"## {notes.QUESTIONS[int(number.removeprefix('q'))]}\n"
        text = text.replace(heading, f"{heading}\n{answer}\n")
    return text


def stated(answers):
    """The statement of a run with these answers."""
    fields = golden.fields_of("private_search")
    return statement.text_of(fields | statement.fields_of_notes(answers))


# The form.


def test_the_form_asks_each_question_once_and_has_no_answer(tmp_path):
    assert len(set(notes.QUESTIONS)) == len(notes.QUESTIONS) == 8
    assert set(statement.ANSWERED.values()) < set(notes.QUESTIONS)
    refused(
        "has no answer: fill it in, or leave out --notes", notes.read, form(tmp_path, notes.FORM)
    )


def test_answers_are_the_lines_below_their_question_without_hints(tmp_path):
    text = filled(q0="From the\n  defaults.\n\n\n\nAnd a paper.", q7="> a hint\nme@example.org")
    expected = dict.fromkeys(notes.QUESTIONS, "")
    expected |= {HYPER: "From the\n  defaults.\n\nAnd a paper.", CONTACT: "me@example.org"}
    assert notes.read(form(tmp_path, text)) == expected
    windows = b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()
    assert notes.read(form(tmp_path, windows)) == expected
    some = f"## {CONTACT} ##\nme@example.org\n\n## {HYPER}\n"  # the others are taken away
    assert notes.read(form(tmp_path, some)) == expected | {HYPER: ""}
    assert list(notes.read(form(tmp_path, some))) == list(notes.QUESTIONS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "## Contacts\nme\n",
            "line 1: 'Contacts' is no question .*: did you mean Contact",
        ),
        ("## Contact\nme\n# Facts\nε = 0\n", "line 3: 'Facts' is no question of the form$"),
        ("## Contact\nme\n#\n", "line 3: '' is no question of the form$"),
        ("## \x1b[2J\u202e\nme\n", r"line 1: '\\x1b\[2J\\u202e' is no question"),
        (f"## {'x' * 9000}\n", r"line 1: 'x{79} is no question"),
        ("## Contact\nme\n## Contact\nyou\n", "line 3: 'Contact' stands there twice"),
        ("ε is 0\n## Contact\nme\n", "line 1: this text stands above the first question"),
        ("", "has no answer"),
        ("## Contact\n\u200b\u2060 \t\n", "has no answer"),
        (b"## Contact\n\xff\xfe\n", "is not a text in UTF-8"),
        ("## Contact\nme\n".encode("utf-16"), "is not a text in UTF-8"),
        ("## Contact\n" + "me\n" * 40_000, "120,011 bytes, at most 100,000 are expected"),
    ],
)
def test_a_form_that_is_none_is_refused_in_one_line(text, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        notes.read(form(tmp_path, text))
    assert len(str(error.value).splitlines()) == 1 and str(error.value).isprintable()


def test_no_file_and_a_folder_are_refused(tmp_path):
    refused("nowhere.md: missing", notes.read, tmp_path / "nowhere.md")
    refused("not a regular file", notes.read, tmp_path)


# The statement.


def test_each_answer_is_the_publisher_s_word_and_no_answer_is_named_above(tmp_path):
    answers = notes.read(form(tmp_path, filled(q2="A model at ε = 1.", q7="me@example.org")))
    text = stated(answers)
    section = text.partition("## What the publisher says\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^### (.+)\n\n(.+(?:\n.+)*)", section, re.MULTILINE)
    expected = {RELEASES: "    A model at ε = 1.", CONTACT: "    me@example.org"}
    assert dict(blocks) == expected and len(blocks) == 2
    open_ones = "; ".join(x for x in notes.QUESTIONS if x not in expected)
    assert f"\nThe publisher has not said: {open_ones}.\n" in section.partition("###")[0]


def test_rows_refer_to_the_answers_that_there_are_and_to_no_others():
    see, unknown = 'see "What the publisher says"', "not known to this file"
    for question in statement.ANSWERED.values():
        one = stated(dict.fromkeys(notes.QUESTIONS, "") | {question: "words"})
        tables = [line for line in one.splitlines() if line.startswith("| ")]
        assert [see in x for x in tables].count(True) == ROWS[question]
        before = [x for x in stated({}).splitlines() if x.startswith("| ")]
        assert len(before) == len(tables)
        changed = [(x, y) for x, y in zip(before, tables, strict=True) if x != y]
        assert len(changed) == ROWS[question] and all(see in y for _, y in changed)
        assert question == EPSILON or all(x == y.replace(see, unknown) for x, y in changed)


# The run is of a private search, which answers two rows.
ROWS = {HYPER: 1, RUNS: 0, RELEASES: 2, EPSILON: 1}


def test_without_a_form_there_is_no_section():
    assert "What the publisher says" not in stated({})
    assert "What the publisher says" not in golden.own_loop()


HOSTILE = [
    "## Facts\n\n| ε, rounded up | 0.01 | 0.01 |",
    "## Facts".replace(" ", "\u2003"),
    "</pre></code><script>alert(1)</script><!--",
    "```\n# Verified\n~~~\n# Verified\n",
    "Verified\n========\n\nVerified\n---",
    "[here](https://evil.example) ![](https://evil.example/a.png) <https://evil.example>",
    "[x]: https://evil.example\n[^1]: note\n$$x$$",
    "- a\n\n- b\n\n      c\n1. d\n\t\te",
    "$epsilon ${x} $ $$",
    "a\x1b[2J\x1b[31mb\u202ec\u200bd\x00e\x07\x9bf",
    "a\x0b## b\x0c## c\x85## d\u2028## e\u2029## f\x1c## g\r## h",
    "x" * 5000 + " y " * 5000,
    "\n" * 500 + "a" + "\n" * 500 + "b",
    "🏥" * 300 + "e" + "\u0301" * 900,
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_answer_adds_a_line_a_heading_or_a_link_to_the_statement(text):
    ours, hostile = (stated(dict.fromkeys(notes.QUESTIONS, x)) for x in ("plain words", text))
    words = lambda page: [x for x in page.split("\n") if x and not x.startswith("    ")]  # noqa: E731
    assert words(hostile) == words(ours)
    assert hostile.replace("\n", "").isprintable()
    assert max(map(len, quote(text).split("\n"))) <= 100
    one, other = map(structure, (ours, hostile))
    assert one == other and one.count(("code_block", "")) == len(notes.QUESTIONS)


def test_an_answer_that_is_not_quoted_is_seen():
    ours = stated(dict.fromkeys(notes.QUESTIONS, "words"))
    for text in HOSTILE[0], HOSTILE[2], HOSTILE[5]:
        assert structure(ours.replace("    words", text)) != structure(ours)


def structure(page):
    """The kinds of the page's blocks, with the text of all but indented ones."""
    blocks = MarkdownIt("commonmark", {"html": True}).enable("table").parse(page)
    return [(x.type, "" if x.type == "code_block" else x.content) for x in blocks]


def test_an_answer_of_the_largest_form_is_repeated_whole(tmp_path):
    words = [f"word{i}" for i in range(10_000)]
    text = f"## {CONTACT}\n" + " ".join(words)
    assert 80_000 < len(text) < notes.LARGEST
    section = stated(notes.read(form(tmp_path, text))).partition("### Contact\n")[2]
    assert section.partition("\n## ")[0].split() == words
