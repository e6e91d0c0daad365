"""The rows of a table of labels as people save it: CSV, Parquet, JSON lines or COCO."""

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

from bam import files
from bam.data.common import DataError
from bam.data.sources import parquet

Log: TypeAlias = Callable[[str], None]

SUFFIXES = (".csv", ".tsv", ".parquet", ".pq", ".jsonl", ".ndjson", ".json")
_COCO = ("images", "annotations", "categories")
_PLACES = ("bbox", "segmentation", "keypoints", "segments_info", "caption")  # in an annotation


class Rows(NamedTuple):
    """A table.

    Attributes:
      header: names of the columns.
      values: a row's, of any types; there may be fewer or more than names.
      first: the number of the first row, as a spreadsheet or an editor counts it.
      has_commas: values are not separated by commas, so that one may be in a number.
    """

    header: list[str]
    values: list[Sequence[object]]
    first: int = 1
    has_commas: bool = True


def read(table: Path, columns: Sequence[str], log: Log) -> Rows:
    """The rows of a file, by its suffix; anything else is CSV, whose separator `columns` tell.

    DataError for a file that is not there or not of its kind.
    """
    if not table.is_file():
        raise DataError(f"{table}: no such file")
    match table.suffix.lower():
        case ".parquet" | ".pq":
            with parquet.readable(table):
                whole = parquet.pq.read_table(table)
                values = zip(*(x.to_pylist() for x in whole.columns), strict=True)
                return Rows(whole.column_names, list(values))
        case ".jsonl" | ".ndjson":
            lines = _decoded(table, log).split("\n")
            objects = [_json(x, f"{table}: row {k}") for k, x in enumerate(lines, 1)]
            return _from_objects(table, objects)
        case ".json":
            return _from_json(table, log)
        case _:
            return _from_csv(table, [x.casefold() for x in columns], log)


def _from_csv(table: Path, columns: list[str], log: Log) -> Rows:
    whole = _decoded(table, log)
    content = whole.lstrip("\n")
    first = content.partition("\n")[0].replace('"', "").casefold()
    # The sniffer of `csv` guesses from the rows; here some names of the header are known.
    names = {x: {text(name) for name in first.split(x)} for x in ",;\t|"}
    separator = max(names, key=lambda x: (len(names[x].intersection(columns)), len(names[x])))
    opened = io.StringIO(content)
    lines = csv.reader(opened, delimiter=separator, skipinitialspace=True, strict=True)
    try:
        header, *values = list(lines) or [[]]
    except csv.Error as error:
        where = f"{table}: line {lines.line_num}"
        raise DataError(f"{where}: not a readable CSV file: {error}") from error
    return Rows(
        [text(x) for x in header], list(values), 2 + len(whole) - len(content), separator != ","
    )


def _from_json(table: Path, log: Log) -> Rows:
    """A list of objects; or COCO's images, each of the one category that annotations give it."""
    content = _json(_decoded(table, log), str(table))
    if isinstance(content, list):
        return _from_objects(table, content)
    parts: list[Any] = [content.get(x) if isinstance(content, dict) else None for x in _COCO]
    if not all(isinstance(x, list) and all(isinstance(y, dict) for y in x) for x in parts):
        raise DataError(f"{table}: neither a list of rows nor COCO's {', '.join(_COCO)}")
    images, annotations, categories = parts
    for kind, objects in ((_COCO[0], images), (_COCO[2], categories)):
        seen = set[str]()
        for number, one in enumerate(objects, 1):
            if not (own := text(one.get("id"))) or own in seen:
                raise DataError(f"{table}: {kind} {number} has no id, or that of another: {own!r}")
            seen.add(own)
    names = {text(x.get("id")): text(x.get("name")) for x in categories}
    labels: dict[str, str] = {}
    for number, one in enumerate(annotations, 1):
        where = f"{table}: annotation {number}"
        if more := [x for x in _PLACES if one.get(x)]:
            raise DataError(f"{where} has a {more[0]}: only labels of whole images are read")
        image, category = text(one.get("image_id")), text(one.get("category_id"))
        if category not in names:
            raise DataError(f"{where}: no category has the id {category!r}")
        if labels.setdefault(image, names[category]) != names[category]:
            raise DataError(
                f"{where}: image {image!r} is {labels[image]!r} and {names[category]!r}; for "
                "several labels of an image give a table with a column for each"
            )
    if more := sorted(labels.keys() - {text(x.get("id")) for x in images}):
        raise DataError(f"{table}: no image has the id {more[0]!r}, which an annotation names")
    return _from_objects(table, [{**x, "label": labels.get(text(x.get("id")), "")} for x in images])


def _json(content: str, where: str) -> Any:
    if not content.strip():
        return {}
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}") from error


def _from_objects(table: Path, objects: list[Any]) -> Rows:
    if wrong := [k for k, x in enumerate(objects, 1) if not isinstance(x, dict)]:
        raise DataError(f"{table}: row {wrong[0]} is not an object: {{…}}")
    header = list(dict.fromkeys(key for row in objects for key in row))
    return Rows(header, [[row.get(key) for key in header] for row in objects])


def _decoded(table: Path, log: Log) -> str:
    """A text in UTF-8, UTF-16 or Windows' encoding."""
    data = files.read_bytes(table)
    if data[:2] == b"PK":
        raise DataError(f"{table}: is a workbook or an archive: save it as CSV")
    wide = data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or data[1:2] == b"\0"
    for encoding in ["utf-16"] if wide else ["utf-8-sig", "cp1252", "latin-1"]:
        with contextlib.suppress(UnicodeDecodeError):
            content = io.StringIO(data.decode(encoding), newline=None).read()
            if encoding in ("cp1252", "latin-1"):
                log(f"{table} is not UTF-8: read as {encoding}")
            return re.sub(r"\A(\n*)sep=.\n", r"\1", content)  # a line of Excel's own
    raise DataError(f"{table}: not a readable CSV file: damaged UTF-16")


def column(table: Path, header: list[str], name: str) -> int:
    """The place of a column: of that name, or of the only one that differs in case alone."""
    places = [i for i, x in enumerate(header) if x == name]
    places = places or [i for i, x in enumerate(header) if x.casefold() == name.casefold()]
    if len(places) != 1:
        seen = files.one_line(files.listed(header))[:300]
        many = f"{len(places)} columns" if places else "no column"
        raise DataError(f"{table}: {many} {name} among {seen}")
    return places[0]


def text(value: object) -> str:
    """A value of a table as text: whole numbers without a point, "" for none."""
    if isinstance(value, bytes):
        value = value.decode(errors="backslashreplace")
    if isinstance(value, float):
        value = None if math.isnan(value) else int(value) if value.is_integer() else value
    return "" if value is None else normal(str(value)).strip()


def decimal(value: str) -> str:
    """A number with a point for its only comma, as "89.5" for "89,5"; any other text as it is."""
    return re.sub(r"^([+-]?\d+),(\d+)$", r"\1.\2", value)


def printable(path: str) -> str:
    r"""A path as text, in which `\udc…` stands for bytes that are not UTF-8."""
    return path.encode("utf-8", "backslashreplace").decode()


def normal(name: str) -> str:
    """Equal texts for names that look equal: composed characters."""
    return unicodedata.normalize("NFC", printable(name))
