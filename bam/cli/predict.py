"""Says what a released model sees on images, without the data that it was trained on."""

import collections
import functools
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from rich.console import Console
from rich.progress import Progress

from bam import files
from bam.cli import console
from bam.data.common import DataError
from bam.data.preprocessing import Preprocessing
from bam.errors import InputError
from bam.extras import MissingExtraError
from bam.files import JsonObject
from bam.images import pixels
from bam.release import load, predict

MOST_SHOWN = 12  # classes whose recall is printed


def main(argv: Sequence[str]) -> int:
    """`bam predict` with these arguments; its exit status, of `options.STATUSES`."""
    return console.command("predict", argv, see)


def see(given: flags.FlagValues, arguments: Sequence[str]) -> None:
    """Predicts, and writes the table."""
    if not arguments:
        raise InputError("bam predict --release=DIR FILE|FOLDER|- … [--out=FILE.csv|FILE.json]")
    if os.path.lexists(given.out):
        raise FileExistsError(f"{given.out} exists; choose another --out")
    released = load.load(given.release, given.own_model)
    facts, preprocessing = released.facts, predict.preprocessing_of(released)
    predict.table(facts, [], given.top)
    paths: Sequence[str] = arguments
    if list(arguments) == ["-"]:  # names need not be UTF-8
        paths = os.fsdecode(sys.stdin.buffer.read()).replace("\r\n", "\n").split("\n")
    images = predict.images_of([files.user_path(x) for x in filter(None, paths)])
    if not images:
        raise InputError("standard input names no file")
    console.check_writable(given.out)
    console.use_compilation_cache()
    _warn(facts, preprocessing, [*images])
    empty, workers = list[Path](), os.cpu_count() or 1
    outputs = predict.outputs_of(released, preprocessing, [*images], workers, empty.append)
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        what = files.counted(len(images), "image")
        predicted = list(bar.track(outputs, len(images), description=what))
    if empty:
        fitted = " × ".join(map(str, preprocessing.shape))
        ends = "no window" if preprocessing.window is None else f"window {preprocessing.window}"
        _say(
            f"warning: {len(empty):,} of the images have one colour alone at the size ({fitted}) "
            f"and {ends} of the release, as {empty[0]}"
        )
    for fault in (faults := [x for x in predicted if isinstance(x, DataError)]):
        _say(f"not read: {fault}")
    if num_read := len(images) - len(faults):
        header, *rows = predict.table(facts, predicted, given.top)
        named = [[str(file), *row] for file, row in zip(images, rows, strict=True)]
        _write(given.out, [["file", *header], *named], given.format)
        if header[0] == "class" and {*images.values()} <= {*facts["classes"]}:
            judged = zip(images.values(), rows, predicted, strict=True)
            pairs = [(x, row[0]) for x, row, y in judged if not isinstance(y, DataError)]
            right = sum(own == seen for own, seen in pairs)
            _say(
                f"accuracy {right / num_read:.2%}, {right:,} of {num_read:,}, if the folders' "
                "names are true; of private images it is NOT PRIVATE: no ε covers it"
            )
            _say(_recall(facts["classes"], pairs))
    if faults:
        raise DataError(f"{len(faults):,} of {len(images):,} files could not be read")


def _warn(facts: JsonObject, preprocessing: Preprocessing, images: Sequence[Path]) -> None:
    """Lines on images that a release does not fit."""
    if not facts["preprocessing"]:
        size = " × ".join(map(str, preprocessing.shape))
        _say(f"warning: the release says no more of its images than that they are {size}")
    try:
        if num := pixels.check_ranges(images, preprocessing):
            _say(f"{files.have(num, 'file')} several frames or pages: the first is used")
    except pixels.WindowError as error:  # a picture may be dark by itself
        _say(f"warning: {error.what}: the release has no window")
    except (DataError, MissingExtraError) as error:
        _say(f"warning: {error}")


def _recall(classes: Sequence[str], pairs: Sequence[tuple[str, str]]) -> str:
    """The share of each class that is predicted right; pairs are true and predicted classes."""
    num = collections.Counter(own for own, _ in pairs)
    right = collections.Counter(own for own, seen in pairs if own == seen)
    there = sorted((name for name in classes if num[name]), key=lambda x: right[x] / num[x])
    each = [f"{x} {right[x] / num[x]:.2%} ({right[x]:,} of {num[x]:,})" for x in there]
    which = f"recall of the {MOST_SHOWN} worst classes" if each[MOST_SHOWN:] else "recall by class"
    without = [f"{name} –" for name in classes if not num[name]]
    return f"{which}: " + ", ".join(each[:MOST_SHOWN] + without[:MOST_SHOWN])


def _records(rows: Sequence[Sequence[str]]) -> list[dict[str, object]]:
    """Rows below their header as objects: names are texts, numbers numbers; null: not read."""
    (header, *rest), names = rows, re.compile(r"file|class(_\d+)?")
    read = lambda name, x: x if names.fullmatch(name) else float(x)  # noqa: E731
    return [
        {k: read(k, x) if x else None for k, x in zip(header, row, strict=True)} for row in rest
    ]


_say = functools.partial(console.say, error=True)  # standard output is the table


def _write(out: str, rows: Sequence[Sequence[str]], kind: str) -> None:
    is_json = (kind or Path(out).suffix.lower().lstrip(".")) == "json"
    if not out and sys.stdout.isatty():
        rows = [list(map(files.visible, row)) for row in rows]
    text = json.dumps(_records(rows), indent=1) + "\n" if is_json else files.csv_text(rows)
    content = text.encode(errors="backslashreplace")  # names need not be UTF-8
    if out:
        files.write_bytes(Path(out), content)
        console.say(f"{files.counted(len(rows) - 1, 'image')} in {out}")
    else:
        sys.stdout.buffer.write(content)
