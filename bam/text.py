"""Texts for people: plurals, short lists, and a stranger's characters made harmless."""

import csv
import difflib
import re
import textwrap
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any


def short_list(names: Sequence[str], most: int = 12) -> str:
    """The first `most` names, in their order, and the number of further ones.

    Examples:
      >>> short_list(["a", "b", "c"], most=2)
      'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def plural(num: int, noun: str, form: str = ",") -> str:
    """A number with its noun, which has the plural unless the number is 1.

    Examples:
      >>> plural(1, "image"), plural(3000, "class")
      ('1 image', '3,000 classes')
    """
    ending = "" if num == 1 else "es" if noun.endswith("s") else "s"
    return f"{num:{form}} {noun}{ending}"


def have(num: int, noun: str) -> str:
    """`plural` with its verb: `1 file has`, `3,000 files have`."""
    return f"{plural(num, noun)} {'has' if num == 1 else 'have'}"


# bam's word -> other words of the field for it, for hints. The first row that is possible where the
# hint is given counts. `SECTION.KEY` is a key of a config, and a comma begins a reason.
SYNONYMS = {
    "expected_batch_size": ("batch_size", "batchsize", "lot_size", "logical_batch_size"),
    "expected_batch_size, from which q = l/N follows": ("sampling_prob", "sample_rate", "q"),
    "microbatch_size": ("physical_batch_size", "max_physical_batch_size", "microbatches"),
    "num_epochs": ("epochs", "max_epochs"),
    "num_steps": ("steps", "max_steps", "train_steps", "iterations", "num_iterations"),
    "epsilon": ("target_epsilon", "eps"),
    "noise_multiplier": ("sigma", "noise_scale", "noise"),
    "delta": ("target_delta",),
    "clip_norm": ("max_grad_norm", "l2_norm_clip", "max_norm", "clipping_norm", "grad_clip"),
    "ema_decay": ("ema", "ema_rate"),
    "seed": ("random_seed", "rng_seed"),
    "method.radius": ("lambda", "rho", "strength"),
    "method.penalty": ("lambda", "rho", "strength"),
    "model.name": ("arch", "architecture", "network", "net"),
    "init_from": ("pretrained",),
    "dataset.path": ("data_dir", "data_path", "root", "dataset_path"),
    "optimizer.learning_rate": ("lr", "learning_rate", "step_size"),
    "optimizer.warmup_steps": ("warmup",),
    "augment.views": ("augmult", "num_augmentations", "augmentation_multiplicity"),
    # Values: sources of data, and methods.
    "parquet": ("hf", "huggingface", "hugging_face", "datasets"),
    "archive": ("torchvision", "official", "pickle", "npz", "idx"),
    "tfds": ("tensorflow_datasets", "array_record"),
    "dp_sgd": ("dpsgd",),
    "bam_sam": ("bam", "sam"),
    "non_private": ("none", "nonprivate"),
}


def synonyms(name: str, names: Iterable[str]) -> list[str]:
    """Returns those of `names` that the last part of a name is a word of the field for.

    Each has its reason behind a comma, if there is one.

    Examples:
      >>> synonyms("method.lambda", ["method.radius", "method.mix"])
      ['method.radius']
    """
    word, names = name.rpartition(".")[2].lower().replace("-", "_"), {*names}
    return [x for x, words in SYNONYMS.items() if word in words and x.partition(",")[0] in names]


def meant(name: str, names: Iterable[str]) -> str:
    """Returns which of `names` a name means, or "" if none is near.

    A word of the field counts more than a word that is spelt alike.

    Examples:
      >>> meant("batch_size", ["microbatch_size", "expected_batch_size"])
      'expected_batch_size'
    """
    names = list(names)
    alike = difflib.get_close_matches(name.lower(), names, 1)
    return next(iter(synonyms(name, names) or alike), "")


def did_you_mean(name: str, names: Iterable[str], before: str = "") -> str:
    """Returns the end of an error that asks for what `name` means, or "" if there is none.

    Examples:
      >>> did_you_mean("trian", ["train", "sweep"])
      ': did you mean train?'
    """
    near = meant(name, names)
    return f": did you mean {before}{near}?" if near else ""


def choose(name: str, names: Sequence[str], more: str = "") -> str:
    """Returns the end of an error about an unknown value: what it may mean, and all values.

    Examples:
      >>> choose("hf", ["parquet", "archive"])
      ': did you mean parquet? choose from parquet, archive'
    """
    return f"{did_you_mean(name, names) or ';'} choose from {', '.join(names)}{more}"


def one_line(value: Any, without: str = "`|") -> Any:
    """A JSON value whose texts and keys have spaces for unprintable characters and `without`.

    Records that go into Markdown may be a stranger's. A line break, a backtick or a bar could end a
    line, a code or a cell, and the text after it would pass for bam's.
    """
    if isinstance(value, dict):
        return {one_line(key, without): one_line(x, without) for key, x in value.items()}
    if isinstance(value, list):
        return [one_line(x, without) for x in value]
    if isinstance(value, str):
        return "".join(c if c.isprintable() and c not in without else " " for c in value)
    return value


def quote(text: str, width: int = 96) -> str:
    r"""Writes a text as an indented block, in which nothing counts as Markdown or HTML.

    Every line begins with four spaces, so none can pass for a line of the page around it.

    Examples:
      >>> quote("# none\n<b>*bold*</b>\x1b[2J")
      '    # none\n    <b>*bold*</b> [2J'
    """
    plain = (one_line(line.expandtabs(4), "").rstrip() for line in text.splitlines())
    lines = [
        piece
        for line in plain
        for piece in textwrap.wrap(line, width, break_on_hyphens=False) or [""]
    ]
    return "\n".join(line and f"    {line}" for line in lines)


def visible(text: str, keep: str = "") -> str:
    r"""A text with unprintable characters written as escapes, except those in `keep`.

    File, folder and class names may be a stranger's. An escape sequence in them could overwrite
    bam's text on a terminal, and a mark of direction could reverse it.

    Examples:
      >>> visible("scan\x1b[2J\u202egnp.exe\n")
      'scan\\x1b[2J\\u202egnp.exe\\n'
    """
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def literal(text: str) -> str:
    r"""A text that Matplotlib draws letter by letter, for titles and legends.

    Examples:
      >>> literal("$\\frac{$")
      '\\$\\frac{\\$'
    """
    text = visible(text).replace("$", r"\$")  # a bare `$` begins a formula
    return f" {text}" if text.startswith("_") else text  # which a legend would leave out


# The first character of a spreadsheet's formula, also in full width, unless a number follows.
_FORMULA = re.compile(r"(?![+-]?\d+(\.\d*)?(e[+-]?\d+)?\Z)[=+\-@\t\r\n＝＋－＠]", re.ASCII | re.I)


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    r"""Rows as CSV, with an apostrophe before each text that a spreadsheet would take as a formula.

    A name like `=HYPERLINK("http://…")` may be a stranger's, and opening the table would run it.
    Numbers, also in a text, stay as they are.

    Examples:
      >>> csv_text([["=1+1", "-1.5", -1.5, "a,b"]])
      '\'=1+1,-1.5,-1.5,"a,b"\n'
    """
    is_formula = lambda x: isinstance(x, str) and _FORMULA.match(x)  # noqa: E731
    # The writer quotes the characters of its line end. With "\n" alone, a bare "\r" in a text would
    # begin a new row.
    line = csv.writer(SimpleNamespace(write=str), lineterminator="\r\n").writerow
    safe = ([f"'{x}" if is_formula(x) else x for x in row] for row in rows)
    return "".join(str(line(row)).removesuffix("\r\n") + "\n" for row in safe)
