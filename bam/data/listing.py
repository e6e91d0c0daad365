"""Which images there are, and what each one's label is: folders of classes, or a table."""

import collections
import csv
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from bam.data.common import DataError
from bam.data.sources import parquet

SUFFIXES = (  # the last ones are read by packages of extras
    ".png", ".jpg", ".jpeg", ".tif", ".tiff", ".webp", ".bmp", ".gif", ".jp2", ".j2k", ".avif",
    ".npy", ".dcm", ".dicom", ".ima", ".heic", ".heif", ".nii", ".nii.gz",
)  # fmt: skip
SPLITS = ("train", "test")


class Example(NamedTuple):
    """An image file, relative to the folder; "" where a table or a folder does not say.

    A label is the name of a class, a number, or of several labels zeros and ones: "0,1,1".
    """

    file: str
    label: str
    user: str = ""
    split: str = ""


def in_class_folders(folder: Path) -> list[Example]:
    """The images of FOLDER/CLASS/…, or of FOLDER/train/CLASS/… and FOLDER/test/CLASS/….

    DataError for a class without images or with one, which would be known to be in training.
    """
    below = _folders(folder)
    splits = {x.name: _folders(x) for x in below}
    given = set(splits) == set(SPLITS)
    examples = [
        Example(str(file.relative_to(folder)), name.name, split=split if given else "")
        for split, names in (splits.items() if given else [("", below)])
        for name in names
        for file in sorted(name.rglob("*"))
        if file.name.lower().endswith(SUFFIXES)
    ]
    names = {x.name for many in (splits.values() if given else [below]) for x in many}
    images = collections.Counter(example.label for example in examples)
    for name in sorted(names):
        if images[name] < 2:
            few = "no image" if not images[name] else "one image"
            raise DataError(f"{folder}: class {name} has {few}; a class needs two at least")
    if not examples:
        raise DataError(f"{folder}: no folder of a class with images in it")
    return examples


def in_table(
    folder: Path, table: Path, columns: dict[str, str], limit: int = 10_000_000
) -> list[Example]:
    """The images that a CSV or Parquet file names, by `columns`: of `Example`'s fields, its own.

    Several columns of labels are separated by commas, and so are their values then. DataError for
    a column or a file that is not there, a file named twice, a row without a value.
    """
    rows = _rows(table)
    examples = []
    for number, row in enumerate(rows, start=1):
        if number > limit:
            raise DataError(f"{table}: more than {limit:,} rows")
        named = {field: name.split(",") for field, name in columns.items()}
        if missing := [x for names in named.values() for x in names if x not in row]:
            raise DataError(f"{table}: no column {missing[0]} among {', '.join(map(str, row))}")
        if any(row[x] in (None, "") for names in named.values() for x in names):
            raise DataError(f"{table}: row {number} lacks a value")
        values = {field: ",".join(str(row[x]) for x in names) for field, names in named.items()}
        path = (folder / values["file"]).resolve()
        if not path.is_relative_to(folder.resolve()) or not path.is_file():
            raise DataError(f"{table}: row {number}: no file {values['file']} in {folder}")
        examples.append(Example(**values))
    if not examples:
        raise DataError(f"{table}: has no rows")
    [(file, times)] = collections.Counter(example.file for example in examples).most_common(1)
    if times > 1:
        raise DataError(f"{table}: {file} is there {times} times; an image has one label")
    return examples


def _folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    return sorted(x for x in folder.iterdir() if x.is_dir() and not x.name.startswith("."))


def _rows(table: Path) -> Iterable[dict[str, object]]:
    if not table.is_file():
        raise DataError(f"{table}: no such file")
    if table.suffix == ".parquet":
        with parquet.readable(table):
            rows: list[dict[str, object]] = parquet.pq.read_table(table).to_pylist()
        return rows
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            return list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{table}: not a readable CSV file: {error}") from error
