"""All that bam prints and refuses with stands in one table, in plain words."""

import functools
import re

import numpy as np
import pytest
from PIL import Image

from bam.cli import options
from tests import golden, messages
from tests.cases import run_command

UNPLAIN = re.compile(
    r"^Of |, of |\b[Ww]hat (is|was|an?|the|it)\b|\blikewise\b|\bby itself\b|\bor else\b"
)
WORD = re.compile(r"(?!--).*[^\W\d_]{2}")


@pytest.fixture(scope="module")
def table():
    return messages.gathered()


def test_the_table_has_the_texts_of_the_code(table):
    written = (golden.FOLDER / "messages.md").read_text(encoding="utf-8")
    new = messages.table(table)
    assert new.splitlines() == written.splitlines(), "python -m tests.golden writes it again"


def test_texts_are_gathered_with_their_values_and_choices():
    code = """
LEAST = 3
def check(num, name):
    'Not a message.'
    if num < LEAST:
        raise InputError(f"{name} has {len(num)} images" + " of one kind" * bool(name))
    log(f"{plural(num, 'image')} in {'it' if num else name}: at least {LEAST}")
    return "put into another"
"""
    assert [(x.kind, str(x)) for x in messages.messages_of(code, "a.py")] == [
        ("refuses", "{name} has {num} images{ of one kind / }"),
        ("prints", "{num images} in {it / {name}}: at least 3"),
        ("part", "put into another"),
    ]


def test_each_text_is_plain_and_a_refusal_one_line(table):
    assert {str(x) for x in table if UNPLAIN.search(str(x))} == set()
    assert [str(x) for x in table if x.kind == "refuses" and "⏎" in str(x)] == []
    assert UNPLAIN.search("Of two, one") and UNPLAIN.search("say what the user is")  # the control


TRAIN = ("bam", "train", "--config=digits:dp_sgd", "--config.model.name=linear")
SHORT = ("--config.num_steps=2", "--config.accountant=rdp", "--workdir=run")
COMMANDS = [
    ("bam", "trian"),
    ("bam", "train"),
    ("bam", "train", "--config=digts:dp_sgd", "--workdir=w"),
    ("bam", "train", "--config=digits:bam", "--workdir=w"),
    (*TRAIN, "--workdir=w", "--config.epsilo=1"),
    (*TRAIN, "--workdir=w", "--config.model=linear"),
    (*TRAIN, "--workdir=w", "--workdir=v"),
    (*TRAIN, "--workdir=w", "--config.delta=1"),
    (*TRAIN, "--workdir=w", "--config.clip_norm=-1"),
    (*TRAIN, "--workdir=w", "--config.method.radius=1"),
    (*TRAIN, "--workdir=w", "--num_processes=2"),
    (*TRAIN, "--config.dry_run"),
    (*TRAIN, *SHORT),
    (*TRAIN, *SHORT),
    (*TRAIN, *SHORT, "--config.epsilon=2"),
    ("bam", "report", "--workdir=run"),
    ("bam", "report", "--workdir=missing"),
    ("bam", "export", "--workdir=run", "--out=release"),
    ("bam", "export", "--workdir=run", "--out=run"),
    ("bam", "predict", "--release=release", "images/test/ill/0.png", "--out=p.csv"),
    ("bam", "predict", "--release=missing", "a.png"),
    ("bam", "privacy", "--plan=run"),
    ("bam", "privacy", "--noise_multiplier=1", "--sampling_prob=2", "--num_steps=1"),
    ("bam", "data", "show"),
    ("bam", "data", "show", "missing"),
    ("bam", "data", "import", "missing", "--out=data"),
    ("bam", "data", "import", "images", "--out=data", "--size=x"),
    ("bam", "data", "import", "images", "--out=data", "--user_column=name"),
    ("bam", "data", "import", "images", "--out=data", "--size=8"),
    ("bam", "data", "show", "data"),
]


def printed(folder, patch):
    """Yields the lines of the commands, without those of a table, which begin with a space."""
    patch.chdir(folder)
    for number, place in enumerate(("train/ill", "train/well", "test/ill", "test/well") * 3):
        (folder / "images" / place).mkdir(parents=True, exist_ok=True)
        image = np.full((9, 9), number, np.uint8)
        Image.fromarray(image).save(folder / "images" / place / f"{number // 4}.png")
    for command in COMMANDS:
        done = run_command(*command)
        lines = (done.stdout + done.stderr).splitlines()
        yield from (x for x in lines if x.strip() and not x.startswith(" "))


def is_value(text):
    """Whether each name or number of a list has few words, but for flags."""
    return all(len([y for y in x.split() if WORD.match(y)]) < 4 for x in text.split(","))


def recogniser(table):
    """Says whether a line is a text of the table around values, or around other texts of it."""
    texts = {y for x in table for y in x.patterns()}
    texts |= {re.escape(y.help) for x in options.COMMANDS.values() for y in x.flags}
    patterns = [(re.compile(x), bool(re.search(r"[^\W\d_]", x))) for x in texts]

    @functools.cache
    def is_text(line):
        for pattern, has_words in patterns:
            if match := pattern.fullmatch(line):
                values = match.groups("")
                if all(map(fits, values)) and (has_words or any(map(is_text, values))):
                    return True
        return False

    @functools.cache
    def fits(value):
        ends = [(x.start(), y) for x in re.finditer(r"[,;:.] | (?=\()", value) for y in x.span()]
        return (
            is_value(value)
            or is_text(value)
            or any(x > 0 and fits(value[:x]) and fits(value[y:]) for x, y in ends)
        )

    return is_text


@pytest.mark.thorough
def test_each_line_of_a_command_is_in_the_table(table, tmp_path, monkeypatch):
    lines = [x.removeprefix("error: ") for x in printed(tmp_path, monkeypatch)]
    is_text = recogniser(table)
    assert [x for x in lines if not is_text(x)] == []
    # The controls: longer lines, and a table that lacks the texts of a module.
    assert not any(map(is_text, [f"{x}, and this line has some more words" for x in lines]))
    is_text = recogniser([x for x in table if x.file != "bam/cli/main.py"])
    assert [x for x in lines if not is_text(x)] == lines[:1]
