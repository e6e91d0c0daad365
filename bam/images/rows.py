"""Reads a table of labels as people save it: CSV, Parquet, JSON lines or COCO."""

import codecs
import contextlib
import csv
import io
import json
import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from bam import files
from bam.data.common import DataError
from bam.data.sources import parquet
from bam.text import one_line, short_list

Log: TypeAlias = Callable[[str], None]

SUFFIXES = (".csv", ".tsv", ".parquet", ".pq", ".jsonl", ".ndjson", ".json")
_COCO = ("images", "annotations", "categories")
# Names of columns that may name persons.
IDS = re.compile(r"(patient|person|subject|participant|user|client|owner)|(^|_)p?id$", re.I)
# Keys of annotations for a part of an image.
_PARTS = ("bbox", "segmentation", "keypoints", "segments_info")


class Rows(NamedTuple):
    """The content of a table.

    Attributes:
      header: names of the columns.
      values: the values of each row, of any types, possibly fewer or more than names.
      first: the number of the first row, as a spreadsheet or an editor counts it.
      separator: the character between values; "" for a format that needs none.
    """

    header: list[str]
    values: list[Sequence[object]]
    first: int = 1
    separator: str = ""

    @property
    def has_commas(self) -> bool:
        """Whether values may hold commas, because another character separates them."""
        return self.separator != ","


def read(table: Path, columns: Sequence[str], log: Log) -> Rows:
    """Reads the rows of a file in the format that its suffix says.

    A file with any other suffix is read as CSV. `columns` are names that the header should have;
    the separator of a CSV file follows from them. Of Parquet, values of other columns are read only
    if they may name persons (`IDS`); otherwise they are True, or None for a missing one. Raises
    DataError for a missing file, for a file that is not in the format of its suffix, and for a
    named column of Parquet that Python cannot hold.
    """
    if not table.is_file():
        raise DataError(f"{table}: no such file")
    names = [x.casefold() for x in columns]
    match table.suffix.lower():
        case ".parquet" | ".pq":
            return _from_parquet(table, names)
        case ".jsonl" | ".ndjson":
            lines = _read_text(table, log).split("\n")
            objects = [_json(x, f"{table}: row {k}") for k, x in enumerate(lines, 1)]
            return _from_objects(table, objects)
        case ".json":
            return _from_json(table, log)
        case _:
            return _from_csv(table, names, log)


def _from_parquet(table: Path, names: list[str]) -> Rows:
    with parquet.readable(table):
        content = parquet.pq.read_table(table)
        columns = zip(content.column_names, content.columns, strict=True)
        values = zip(*(_column_values(table, *x, names) for x in columns), strict=True)
        return Rows(content.column_names, list(values))


def _column_values(table: Path, name: str, column: Any, names: list[str]) -> list[object]:
    """The values of a column: short floats as NumPy's, which tell how far they were rounded."""
    is_named, types = name.casefold() in names, parquet.pa.types
    if not is_named and (types.is_temporal(column.type) or not IDS.search(name)):
        return [x or None for x in column.is_valid().to_pylist()]
    if types.is_float16(column.type) or types.is_float32(column.type):
        return list(column.to_numpy())
    try:
        values: list[object] = column.to_pylist()
        return values
    except (ValueError, OverflowError) as error:  # as of times in nanoseconds
        raise DataError(f"{table}: column {name}: {error}: save it as text in UTF-8") from error


def _from_csv(table: Path, columns: list[str], log: Log) -> Rows:
    decoded = _read_text(table, log)
    content = decoded.lstrip("\n")
    first = content.partition("\n")[0].replace('"', "").casefold()
    # Not the sniffer of `csv`, which guesses from the rows: some names of the header are known.
    names = {x: {text(name) for name in first.split(x)} for x in ",;\t|"}
    separator = max(names, key=lambda x: (len(names[x].intersection(columns)), len(names[x])))
    opened = io.StringIO(content)
    lines = csv.reader(opened, delimiter=separator, skipinitialspace=True, strict=True)
    try:
        header, *values = list(lines) or [[]]
    except csv.Error as error:
        location = f"{table}: line {lines.line_num}"
        raise DataError(f"{location}: not a readable CSV file: {error}") from error
    first_row = 2 + len(decoded) - len(content)
    return Rows([text(x) for x in header], list(values), first_row, separator)


def _from_json(table: Path, log: Log) -> Rows:
    """Reads a list of objects, or the images of COCO.

    An image of COCO has the one category of its annotations.
    """
    content = _json(_read_text(table, log), str(table))
    if isinstance(content, list):
        return _from_objects(table, content)
    parts: list[Any] = [content.get(x) if isinstance(content, dict) else None for x in _COCO]
    if not all(isinstance(x, list) and all(isinstance(y, dict) for y in x) for x in parts):
        raise DataError(f"{table}: neither a list of rows nor COCO ({', '.join(_COCO)})")
    images, annotations, categories = parts
    for kind, objects in ((_COCO[0], images), (_COCO[2], categories)):
        seen = set[str]()
        for number, one in enumerate(objects, 1):
            if not (identity := text(one.get("id"))) or identity in seen:
                why = f"has no id or a repeated one: {identity!r}"
                raise DataError(f"{table}: {kind} {number} {why}")
            seen.add(identity)
    names = {text(x.get("id")): text(x.get("name")) for x in categories}
    labels, of_parts = dict[str, str](), set[str]()
    for number, one in enumerate(annotations, 1):
        location = f"{table}: annotation {number}"
        if one.get("caption"):
            raise DataError(f"{location} has a caption: only categories are read")
        of_parts |= {x for x in _PARTS if one.get(x)}
        image, category = text(one.get("image_id")), text(one.get("category_id"))
        if category not in names:
            raise DataError(f"{location}: no category has the id {category!r}")
        if labels.setdefault(image, names[category]) != names[category]:
            raise DataError(
                f"{location}: image {image!r} has two labels, {labels[image]!r} and "
                f"{names[category]!r}: for several labels use a table with a column for each"
            )
    if of_parts:
        log(
            f"{table}: annotations are of parts of images ({', '.join(sorted(of_parts))}): the "
            "label of an image is the one category of its annotations"
        )
    if more := sorted(labels.keys() - {text(x.get("id")) for x in images}):
        raise DataError(f"{table}: an annotation names image {more[0]!r}, but no image has this id")
    return _from_objects(table, [{**x, "label": labels.get(text(x.get("id")), "")} for x in images])


def _json(content: str, location: str) -> Any:
    """Returns the value of a JSON text, or {} for a blank one.

    Raises DataError, at `location`, for any other text.
    """
    if not content.strip():
        return {}
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{location}: not JSON: {error}") from error


def _from_objects(table: Path, objects: list[Any]) -> Rows:
    if wrong := [k for k, x in enumerate(objects, 1) if not isinstance(x, dict)]:
        raise DataError(f"{table}: row {wrong[0]} is not an object: {{…}}")
    header = list(dict.fromkeys(key for row in objects for key in row))
    return Rows(header, [[row.get(key) for key in header] for row in objects])


def _read_text(table: Path, log: Log) -> str:
    """Reads the text of a file in UTF-8, UTF-16 or, as `log` then says, a Windows encoding."""
    data = files.read_bytes(table)
    if data[:2] == b"PK":
        raise DataError(f"{table}: is a workbook or an archive: save it as CSV")
    wide = data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or data[1:2] == b"\0"
    for encoding in ["utf-16"] if wide else ["utf-8-sig", "cp1252", "latin-1"]:
        with contextlib.suppress(UnicodeDecodeError):
            content = io.StringIO(data.decode(encoding), newline=None).read()
            if encoding in ("cp1252", "latin-1"):
                log(f"{table} is not UTF-8: read as {encoding}")
            return re.sub(r"\A(\n*)sep=.\n", r"\1", content)  # a line that only Excel reads
    raise DataError(f"{table}: not a readable CSV file: damaged UTF-16")


def column(table: Path, header: list[str], name: str) -> int:
    """The index of a column: by its name, or by the only name that differs in case alone."""
    indices = [i for i, x in enumerate(header) if x == name]
    indices = indices or [i for i, x in enumerate(header) if x.casefold() == name.casefold()]
    if len(indices) != 1:
        seen = one_line(short_list(header))[:300]
        many = f"{len(indices)} columns" if indices else "no column"
        raise DataError(f"{table}: {many} {name} among {seen}")
    return indices[0]


def text(value: object) -> str:
    """A value of a table as text: whole numbers without a point, None and NaN as ""."""
    if isinstance(value, bytes):
        value = value.decode(errors="backslashreplace")
    if isinstance(value, float | np.floating):
        value = float(value)
        value = None if math.isnan(value) else int(value) if value.is_integer() else value
    return "" if value is None else normal(str(value)).strip()


def decimal(value: str) -> str:
    """Writes the only comma of a number as a decimal point, "89,5" as "89.5".

    Any other text is unchanged.
    """
    return re.sub(r"^([+-]?\d+),(\d+)$", r"\1.\2", value)


def may_be_thousands(value: str) -> bool:
    """Whether the only comma or point of a number may mark thousands, as in "41.480"."""
    return re.fullmatch(r"[+-]?[1-9]\d{0,2}[.,]\d{3}", value) is not None


def without_thousands(value: str) -> str:
    """Leaves out the marks of thousands in a number, "1.234,5" as "1234.5".

    Any other text is unchanged.
    """
    whole = r"[+-]?\d{1,3}(?:([.,'’\s])\d{3})(?:\2\d{3})*"
    if not (match := re.fullmatch(rf"({whole})(?!\2)(?:[.,](\d+))?", value)):
        return value
    digits = re.sub(r"[.,'’\s]", "", match[1])
    return digits if match[3] is None else f"{digits}.{match[3]}"


def printable(path: str) -> str:
    r"""Returns a path as text that can be encoded.

    `\udc…` stands for bytes that are not UTF-8.
    """
    return path.encode("utf-8", "backslashreplace").decode()


def normal(name: str) -> str:
    """A name in composed characters, so that names that look equal are equal."""
    return unicodedata.normalize("NFC", printable(name))
