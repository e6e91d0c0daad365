"""The form in which a publisher answers what no program can know of a release.

Each line that begins with `#` is a question of `FORM`, and the lines below it are its answer,
except those that begin with `>`. `PRIVACY.md` repeats the answers as the publisher's word.
"""

from pathlib import Path

from bam.errors import InputError
from bam.files import read_bytes
from bam.text import did_you_mean, one_line

FORM = Path(__file__).with_name("templates").joinpath("notes.md").read_text(encoding="utf-8")
QUESTIONS = tuple(x.removeprefix("## ") for x in FORM.splitlines() if x.startswith("#"))
LARGEST = 100_000  # bytes: far more than anybody reads


def read(path: Path) -> dict[str, str]:
    """Returns the answer to each question of the form, in the order of the form.

    A question without an answer has "". InputError, in one line, for a file that is missing, too
    large or not UTF-8, for another question than those of the form, one that is asked twice, a text
    above the first question, and a form without any answer.
    """
    try:
        text = read_bytes(path, LARGEST).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text in UTF-8: save it as one") from None
    answers: dict[str, list[str]] = {}
    question = ""
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path}, line {number}"
        if line.startswith("#"):
            question = line.strip("# \t")
            if question not in QUESTIONS:
                hint = did_you_mean(question, QUESTIONS)
                raise InputError(f"{where}: {question!r:.80} is no question of the form{hint}")
            if question in answers:
                raise InputError(f"{where}: {question!r} stands there twice")
            answers[question] = []
        elif one_line(line, "").strip() and not line.startswith(">"):
            if not question:
                raise InputError(f"{where}: this text stands above the first question")
            answers[question].append(line)
        elif question and answers[question][-1:] != [""]:
            answers[question].append("")
    found = {x: "\n".join(answers.get(x, [])).strip() for x in QUESTIONS}
    if not any(found.values()):
        raise InputError(f"{path} has no answer: fill it in, or leave out --notes")
    return found
