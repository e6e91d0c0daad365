"""Predicts labels of images with a released model, without its training data."""

import collections
import functools
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from absl.flags import FlagValues
from rich.console import Console
from rich.progress import Progress

from bam import files, waits
from bam.cli import command, jax_setup, screen
from bam.data.common import DataError
from bam.data.preprocessing import Preprocessing
from bam.errors import InputError
from bam.extras import MissingExtraError
from bam.files import JsonObject
from bam.images import pixels
from bam.release import load, predict
from bam.text import csv_text, have, plural, visible

MOST_LISTED = 12  # classes whose recall is printed


def main(argv: Sequence[str]) -> int:
    """Runs `bam predict` with these arguments and returns a status of `options.STATUSES`."""
    return command.run("predict", argv, see)


def see(flags: FlagValues, arguments: Sequence[str]) -> None:
    """Predicts, and writes the table."""
    if not arguments:
        raise InputError("bam predict --release=DIR FILE|FOLDER|- … [--out=FILE.csv|FILE.json]")
    if os.path.lexists(flags.out):
        raise FileExistsError(f"{flags.out} exists; choose another --out")
    released = load.load(flags.release, flags.own_model, flags.weights)
    metadata, preprocessing = released.facts, predict.preprocessing_of(released)
    predict.table(metadata, [], flags.top)  # refuses a wrong --top before any image is read
    paths: Sequence[str] = arguments
    if list(arguments) == ["-"]:  # bytes, because names need not be UTF-8
        paths = os.fsdecode(sys.stdin.buffer.read()).replace("\r\n", "\n").split("\n")
    bare = list[Path]()
    images = predict.images_of([files.user_path(x) for x in filter(None, paths)], bare.append)
    if not images:
        raise InputError("standard input has no file name: write one name a line")
    files.check_writable(flags.out)
    jax_setup.use_compilation_cache()
    if bare := sorted({*bare} - images.keys()):
        _say(f"ignored: {len(bare):,} without a suffix, as {bare[0]}: name such files one by one")
    _warn(metadata, preprocessing, [*images])
    empty, workers = list[Path](), os.cpu_count() or 1
    # Standard output has the rows, unless they go to a file.
    with waits.compiling(screen.show if flags.out else _say, "the network"):
        outputs = predict.outputs_of(released, preprocessing, [*images], workers, empty.append)
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        description = plural(len(images), "image")
        predicted = list(bar.track(outputs, len(images), description=description))
    if empty:
        fitted = " × ".join(map(str, preprocessing.shape))
        ends = "no window" if preprocessing.window is None else f"window {preprocessing.window}"
        _say(
            f"warning: {have(len(empty), 'image')} only one colour at the release's size "
            f"({fitted}) and {ends}: {empty[0]}"
        )
    for fault in (faults := [x for x in predicted if isinstance(x, DataError)]):
        _say(f"not read: {fault}")
    if num_read := len(images) - len(faults):
        header, *rows = predict.table(metadata, predicted, flags.top)
        lines = [[str(file), *row] for file, row in zip(images, rows, strict=True)]
        _write(flags.out, [["file", *header], *lines], flags.format)
        if header[0] == "class" and {*images.values()} <= {*metadata["classes"]}:
            results = zip(images.values(), rows, predicted, strict=True)
            pairs = [(x, row[0]) for x, row, y in results if not isinstance(y, DataError)]
            right = sum(true == guess for true, guess in pairs)
            _say(
                f"accuracy {right / num_read:.2%}, {right:,} of {num_read:,}, if the folders' "
                "names are true. For private images it is NOT PRIVATE: ε does not cover it"
            )
            _say(_recall(metadata["classes"], pairs))
    if faults:
        raise DataError(f"{len(faults):,} of {len(images):,} files could not be read")


def _warn(metadata: JsonObject, preprocessing: Preprocessing, images: Sequence[Path]) -> None:
    """Warns of images that do not fit the release, and of a release that says too little."""
    if not metadata["preprocessing"]:
        size = " × ".join(map(str, preprocessing.shape))
        _say(f"warning: the release records only the size of its images, {size}")
    try:
        types = {x: kind for x in images if (kind := pixels.dicom_type(x))}
        if types:
            first, num_files = next(iter(types)), plural(len(types), "DICOM file")
            kinds = ", ".join(sorted({*types.values()}))
            _say(
                f"warning: {num_files} of kinds that bam data import leaves out ({kinds}), as "
                f"{first}: their predictions may mean nothing"
            )
        if num := pixels.check_ranges(images, preprocessing):
            _say(f"{have(num, 'file')} several frames or pages: the first is used")
    except pixels.WindowError as error:  # only a warning: a picture may be dark
        _say(f"warning: {error.what}, and the release has no window")
    except (DataError, MissingExtraError) as error:
        _say(f"warning: {error}")


def _recall(classes: Sequence[str], pairs: Sequence[tuple[str, str]]) -> str:
    """Returns a line with the recall of each class.

    `pairs` are (true, predicted) classes.
    """
    num = collections.Counter(true for true, _ in pairs)
    right = collections.Counter(true for true, guess in pairs if true == guess)
    present = sorted((name for name in classes if num[name]), key=lambda x: right[x] / num[x])
    each = [f"{x} {right[x] / num[x]:.2%} ({right[x]:,} of {num[x]:,})" for x in present]
    is_long = len(each) > MOST_LISTED
    title = f"recall of the {MOST_LISTED} worst classes" if is_long else "recall by class"
    absent = [f"{name} –" for name in classes if not num[name]]
    return f"{title}: " + ", ".join(each[:MOST_LISTED] + absent[:MOST_LISTED])


def _records(rows: Sequence[Sequence[str]]) -> list[dict[str, object]]:
    """Returns the rows below the header as objects, with numbers as numbers.

    An empty cell becomes None.
    """
    (header, *rest), names = rows, re.compile(r"file|class(_\d+)?")
    read = lambda name, x: x if names.fullmatch(name) else float(x)  # noqa: E731
    return [
        {k: read(k, x) if x else None for k, x in zip(header, row, strict=True)} for row in rest
    ]


_say = functools.partial(screen.say, error=True)  # standard output is the table


def _write(out: str, rows: Sequence[Sequence[str]], kind: str) -> None:
    is_json = (kind or Path(out).suffix.lower().lstrip(".")) == "json"
    if not out and sys.stdout.isatty():
        rows = [list(map(visible, row)) for row in rows]
    text = json.dumps(_records(rows), indent=1) + "\n" if is_json else csv_text(rows)
    content = text.encode(errors="backslashreplace")  # file names need not be UTF-8
    if out:
        files.write_bytes(Path(out), content, mode=0o600)  # names of files may be of patients
        screen.say(f"{plural(len(rows) - 1, 'image')} in {out}")
    else:
        sys.stdout.buffer.write(content)
