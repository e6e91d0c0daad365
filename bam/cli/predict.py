"""Says what a released model sees on images, without the data that it was trained on.

bam predict --release=release photograph.jpg
bam predict --release=release photographs scans/0001.png --out=predictions.csv --top=3

Files become pixels as those of the training did. The table has a row for each image, in CSV: its
file, its class and the class's probability, then the probability of each class, or with --top=K
the K likeliest classes; of several labels the probability of each, of numbers these. Of a folder
all images in it are read; if they lie in folders with the names of the classes, the accuracy is
printed, too. A file that cannot be read has a row without a class, and the exit status is 2.
"""

import csv
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from rich.console import Console
from rich.progress import Progress

from bam import files
from bam.cli import console
from bam.data.common import DataError
from bam.files import JsonObject
from bam.release import load, predict

_RELEASE = flags.DEFINE_string("release", "", "folder that `bam export` wrote")
_OUT = flags.DEFINE_string("out", "", "CSV file to write, a new one; '': standard output")
_TOP = flags.DEFINE_integer("top", None, "likeliest classes to list; not set: a column for each", 1)
_OWN_MODEL = flags.DEFINE_string(
    "own_model", "", "MODULE:FUNCTION of the model, if it is none of bam's; it is imported"
)
_BACKBONE = flags.DEFINE_string(
    "backbone", "", "file of the public weights of its features, if it is of a frozen network's"
)
console.require("release")


def main(arguments: Sequence[str]) -> None:
    """Predicts, and writes the table."""
    with console.one_line_errors():
        if not arguments:
            raise ValueError("bam predict --release=DIR FILE|FOLDER … [--out=FILE.csv]")
        if os.path.lexists(_OUT.value):
            raise FileExistsError(f"{_OUT.value} exists; choose another --out")
        released = load.load(_RELEASE.value, _OWN_MODEL.value, _BACKBONE.value)
        table = predict.table(released.facts, _TOP.value)
        preprocessing, assumed = predict.preprocessing_of(released.facts)
        images = predict.images_of([files.user_path(x) for x in arguments])
        console.check_writable(_OUT.value)
        console.use_compilation_cache()
        if assumed:
            print(f"warning: {assumed}", file=sys.stderr)
        outputs = predict.outputs_of(released, preprocessing, images, os.cpu_count() or 1)
        with Progress(transient=True, console=Console(stderr=True)) as bar:
            what = f"{len(images):,} images"
            predicted = list(bar.track(outputs, len(images), description=what))
        faults = [x for x in predicted if isinstance(x, DataError)]
        for fault in faults:
            print(f"not read: {fault}", file=sys.stderr)
        if len(faults) < len(images):
            cells = [table.cells(x) for x in predicted]
            rows = zip(images, cells, strict=True)
            _write([["file", *table.header], *([str(x.file), *row] for x, row in rows)])
            _print_accuracy(released.facts, [x.label for x in images], [x[0] for x in cells])
        if faults:
            raise DataError(f"{len(faults):,} of {len(images):,} files could not be read")


def _write(rows: Sequence[Sequence[str]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    content = text.getvalue().encode(errors="backslashreplace")  # names need not be UTF-8
    if _OUT.value:
        files.write_bytes(Path(_OUT.value), content)
        print(f"{len(rows) - 1:,} images in {_OUT.value}")
    else:
        sys.stdout.buffer.write(content)


def _print_accuracy(facts: JsonObject, labels: Sequence[str], predicted: Sequence[str]) -> None:
    """Of images in folders with the names of classes."""
    if set(labels) <= set(facts["classes"]):
        pairs = [(label, name) for label, name in zip(labels, predicted, strict=True) if name]
        right = sum(label == name for label, name in pairs)
        print(
            f"accuracy {right / len(pairs):.2%}, {right:,} of {len(pairs):,}, if the folders' names "
            "are true: no ε covers it, so of private images it is NOT PRIVATE",
            file=sys.stdout if _OUT.value else sys.stderr,
        )


if __name__ == "__main__":
    console.run(main, positional=True)
