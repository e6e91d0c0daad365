"""Says what a released model sees on images, without the data that it was trained on.

bam predict --release=release photograph.jpg
bam predict --release=release photographs --out=predictions.csv --top=3

Files become pixels as those of the training did; of a folder all images in it are read. The table
is CSV: file, class and its probability, then the probability of each class, or with --top=K the K
likeliest classes. A name that a spreadsheet would take for a formula has an apostrophe before it.
If the folders in a folder have the names of classes, the accuracy is printed. A file that cannot be
read has a row without a class, and the exit status is 2.
"""

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from rich.console import Console
from rich.progress import Progress

from bam import files
from bam.cli import console
from bam.data import pixels
from bam.data.common import DataError
from bam.errors import InputError
from bam.extras import MissingExtraError
from bam.release import load, predict

_RELEASE = flags.DEFINE_string("release", "", "folder that `bam export` wrote")
_OUT = flags.DEFINE_string("out", "", "CSV file to write, a new one; '': standard output")
_TOP = flags.DEFINE_integer("top", None, "likeliest classes to list; not set: a column for each", 1)
_OWN_MODEL = flags.DEFINE_string(
    "own_model", "", "MODULE:FUNCTION of its model, if that is none of bam's: code that you trust"
)
console.require("release")


def main(arguments: Sequence[str]) -> None:
    """Predicts, and writes the table."""
    with console.one_line_errors():
        if not arguments:
            raise InputError("bam predict --release=DIR FILE|FOLDER … [--out=FILE.csv]")
        if os.path.lexists(_OUT.value):
            raise FileExistsError(f"{_OUT.value} exists; choose another --out")
        released = load.load(_RELEASE.value, _OWN_MODEL.value)
        facts, preprocessing = released.facts, predict.preprocessing_of(released)
        predict.table(facts, [], _TOP.value)
        images = predict.images_of([files.user_path(x) for x in arguments])
        console.check_writable(_OUT.value)
        console.use_compilation_cache()
        if not facts["preprocessing"]:
            size = " × ".join(map(str, preprocessing.shape))
            _say(f"warning: the release says no more of its images than that they are {size}")
        try:
            if num := pixels.check_ranges([*images], preprocessing):
                _say(f"{num:,} files have several frames or pages: the first is used")
        except (DataError, MissingExtraError) as error:  # a picture may be dark by itself
            _say(f"warning: {error}")
        outputs = predict.outputs_of(released, preprocessing, [*images], os.cpu_count() or 1)
        with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
            what = f"{len(images):,} images"
            predicted = list(bar.track(outputs, len(images), description=what))
        for fault in (faults := [x for x in predicted if isinstance(x, DataError)]):
            _say(f"not read: {fault}")
        if num_read := len(images) - len(faults):
            header, *rows = predict.table(facts, predicted, _TOP.value)
            named = [[str(file), *row] for file, row in zip(images, rows, strict=True)]
            _write([["file", *header], *named])
            if header[0] == "class" and {*images.values()} <= {*facts["classes"]}:
                right = sum(x == row[0] for x, row in zip(images.values(), rows, strict=True))
                _say(
                    f"accuracy {right / num_read:.2%}, {right:,} of {num_read:,}, if the folders' "
                    "names are true; of private images it is NOT PRIVATE: no ε covers it"
                )
        if faults:
            raise DataError(f"{len(faults):,} of {len(images):,} files could not be read")


_say = functools.partial(console.say, error=True)  # standard output is the table


def _write(rows: Sequence[Sequence[str]]) -> None:
    if not _OUT.value and sys.stdout.isatty():
        rows = [list(map(files.visible, row)) for row in rows]
    content = files.csv_text(rows).encode(errors="backslashreplace")  # names need not be UTF-8
    if _OUT.value:
        files.write_bytes(Path(_OUT.value), content)
        console.say(f"{len(rows) - 1:,} images in {_OUT.value}")
    else:
        sys.stdout.buffer.write(content)


if __name__ == "__main__":
    console.run(main, positional=True)
