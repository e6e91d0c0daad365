"""Data sets in Parquet, in the column layout of Hugging Face image data sets."""

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from bam.core.user_table import MISSING
from bam.data.common import (
    DataError,
    Split,
    Stays,
    check_labels,
    check_memory,
    decode_images,
    in_memory,
    manifest,
)
from bam.data.preprocessing import Preprocessing
from bam.data.stream import StoredImages
from bam.extras import needs
from bam.files import JsonObject

with needs("data"):
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label")


def read(
    path: Path,
    shape: tuple[int, int, int] | None = None,
    num_classes: int = 0,
    stays: Stays = in_memory,
) -> tuple[Split, Split, int]:
    """Training split, test split and number of classes of `train.parquet` and `test.parquet`.

    The image column (`image` or `img`) is a struct whose `bytes` hold an encoded image; its `path`
    is ignored and never followed. The label column (`label` or `fine_label`) holds integers, or for
    other losses numbers or lists of one length (fixed_size_list). A split may also come in shards,
    `train-00000-of-00002.parquet` and so on, all of them present.

    Every image must have the shape `(height, width, channels)`; None takes the shape of the first
    training image. 0 classes takes the number in the schema metadata of the first training file.
    The number is public, so it is never counted from the labels, which are private. If
    `stays(bytes of the decoded training images)` is True, images are `StoredImages`, and each read
    decodes the rows that it needs.

    DataError for a missing split or column, or a damaged file, image or label, naming file and row;
    also if the number of classes is neither given nor named, or if the two differ.
    """
    train, test = (_Files(_paths(path, split)) for split in ("train", "test"))
    named = _num_classes(train.schema)
    if named and num_classes and named != num_classes:
        raise DataError(f"{train.paths[0]}: has {named} classes, expected {num_classes}")
    num_classes = num_classes or named
    if not num_classes:
        raise DataError(
            f"{train.paths[0]}: how many classes there are is public and not counted from the "
            "labels: name them in the schema metadata (Hugging Face's ClassLabel), or set "
            "--config.dataset.num_classes (of `bam clip_norm`: --num_classes)"
        )
    shape = shape or train.first_shape()
    streamed = stays(train.num_rows * math.prod(shape))
    splits = [files.split(shape, num_classes, streamed) for files in (train, test)]
    return splits[0], splits[1], num_classes


def described(path: Path) -> tuple[tuple[str, ...], JsonObject | None]:
    """`Dataset.classes` and `preprocessing`, from the manifest or from the first file."""
    first = _paths(path, "train")[0]
    with readable(first):
        names = _class_names(pq.read_schema(first))
    facts, preprocessing = manifest(path), None
    if facts.get("preprocessing"):
        preprocessing = Preprocessing.from_json(facts["preprocessing"]).as_json()
        names = facts["classes"] if isinstance(facts.get("classes"), list) else names
    return tuple(map(str, names)), preprocessing


def read_ids(path: Path, column: str) -> Int64[np.ndarray, " n"]:
    """The user id of each training row, in the order of `read`, from a column of integers or texts.

    A text becomes 64 bits of its BLAKE2. DataError for a column that is missing, of another type,
    without a value in a row, or of integers in one file and texts in another: 7 and "7" may be one
    user, who would then be protected as two.
    """
    ids, are_text = [np.zeros(0, np.int64)], set[bool]()
    for file in _paths(path, "train"):
        with readable(file):
            schema = pq.read_schema(file)
            kind = schema.field(_column(schema, (column,), file)).type
            kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            if not (pa.types.is_integer(kind) or pa.types.is_string(kind)):
                raise DataError(f"{file}: column {column} is {kind}, neither an integer nor text")
            are_text.add(pa.types.is_string(kind))
            if len(are_text) > 1:
                raise DataError(
                    f"{file}: column {column} is {kind}, in other files numbers or text"
                )
            ids += _file_ids(file, column)
    return np.concatenate(ids)


def _file_ids(file: Path, column: str) -> list[np.ndarray]:
    ids = []
    with pq.ParquetFile(file, read_dictionary=[column], pre_buffer=False) as table:
        for group in range(table.num_row_groups):
            values = table.read_row_group(group, columns=[column])[column]
            if values.null_count:
                raise DataError(f"{file}: column {column} has rows without a value")
            for coded in (part.dictionary_encode() for part in values.chunks):
                names = coded.dictionary.to_pylist()
                if nobody := [x for x in names if isinstance(x, str) and x.strip() in MISSING]:
                    raise DataError(f"{file}: column {column} has rows of no user: {nobody[0]!r}")
                different = [_number(x) for x in names]
                ids.append(np.array(different, np.int64)[coded.indices.to_numpy()])
    return ids


def _number(value: int | str) -> np.int64:
    """An integer as it is, or the first 64 bits of a text's BLAKE2."""
    if isinstance(value, str):
        value = int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest())
    return np.uint64(value % 2**64).astype(np.int64)


class _Files:
    """The files of a split, with footers read and checked."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self._footers, self._columns, groups = [], [], []
        for number, file in enumerate(paths):
            with readable(file):
                footer = pq.read_metadata(file)
                self._columns.append(_columns(footer.schema.to_arrow_schema(), file))
            self._footers.append(footer)
            for group in range(footer.num_row_groups):
                groups.append((number, group, footer.row_group(group).num_rows))
        self.schema = self._footers[0].schema.to_arrow_schema()
        self._groups = np.array(groups, np.int64).reshape(-1, 3)
        self._ends = np.cumsum(self._groups[:, 2])
        self.num_rows = int(self._groups[:, 2].sum())

    def split(self, shape: tuple[int, int, int], num_classes: int, streamed: bool) -> Split:
        """The split, with labels in memory; images stay in the files if `streamed`."""
        labels = [self._labels(number, num_classes) for number in range(len(self.paths))]
        if streamed:
            rows = np.arange(self.num_rows)
            images: Any = StoredImages(self._encoded, shape, rows, self._place, self._digest)
        else:
            images = _joined(
                [
                    decode_images(self._all_encoded(number, math.prod(shape)), str(file), shape)
                    for number, file in enumerate(self.paths)
                ]
            )
        return Split(images, _joined(labels))

    def first_shape(self) -> tuple[int, int, int]:
        first = [self._encoded(0)] if self.num_rows else []
        return decode_images(first, str(self.paths[0])).shape[1:]

    def _labels(self, number: int, num_classes: int) -> np.ndarray:
        """Labels as a loss takes them; class labels are checked and become int32."""
        file, (_, label) = self.paths[number], self._columns[number]
        with readable(file):
            column = pq.read_table(file, columns=[label])[label]
        numbers = _numbers(column, f"{file}: row")
        is_class = numbers.dtype == np.int64
        return check_labels(numbers, num_classes, str(file)) if is_class else numbers

    def _all_encoded(self, number: int, bytes_per_image: int) -> list[bytes | None]:
        """The encoded images of a file."""
        file, footer, (image, _) = self.paths[number], self._footers[number], self._columns[number]
        # 64 more bytes a row, for its label and for the pointers to its image.
        check_memory(footer.num_rows * (bytes_per_image + 64), str(file))
        with readable(file), pq.ParquetFile(file, pre_buffer=False) as table:
            batches = table.iter_batches(512, columns=[f"{image}.bytes"])
            columns = (pc.struct_field(batch.column(image), "bytes") for batch in batches)
            return [encoded for column in columns for encoded in column.to_pylist()]

    def _encoded(self, row: int) -> bytes | None:
        """The encoded image of a row; its whole row group is read."""
        part = int(np.searchsorted(self._ends, row, side="right"))
        number, group, rows = self._groups[part].tolist()
        file, image = self.paths[number], self._columns[number][0]
        with (
            readable(file),
            pq.ParquetFile(file, metadata=self._footers[number], pre_buffer=False) as table,
        ):
            read = table.read_row_group(group, columns=[f"{image}.bytes"], use_threads=False)
            struct = read[image][row - int(self._ends[part]) + rows].as_py()
        return struct and struct["bytes"]

    def _place(self, row: int) -> str:
        """The name of a row in errors: its file, and its row in the file, from 0."""
        number = int(self._groups[np.searchsorted(self._ends, row, side="right"), 0])
        before = int(self._groups[self._groups[:, 0] < number, 2].sum())
        return f"{self.paths[number]}: row {row - before}"

    def _digest(self) -> bytes:
        """A hash of all bytes of the files, because a footer does not tell two images apart."""
        total = hashlib.blake2b(digest_size=32)
        for file in self.paths:
            with file.open("rb") as opened:
                total.update(hashlib.file_digest(opened, hashlib.blake2b).digest())
        return total.digest()


@contextlib.contextmanager
def readable(file: Path) -> Iterator[None]:
    """Turns errors of reading a Parquet file into a DataError that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError, IndexError) as error:
        raise DataError(f"{file}: not a readable Parquet file: {error}") from error


def _paths(folder: Path, split: str) -> list[Path]:
    whole = folder / f"{split}.parquet"
    if whole.is_file():
        return [whole]
    shards = sorted(folder.glob(f"{split}-*-of-*.parquet"))
    if not shards:
        raise DataError(
            f"{folder}: no {split}.parquet; expected train.parquet and test.parquet, which "
            "`bam data import` makes of a folder of images"
        )
    declared = re.search(r"-of-(\d+)\.parquet$", shards[0].name)
    if declared is None or int(declared[1]) != len(shards):
        raise DataError(f"{folder}: {len(shards)} shards of {split} found; {shards[0].name} is one")
    return shards


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """Several arrays as one, which takes twice the memory; a single array as it is."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _numbers(column: Any, where: str) -> np.ndarray:
    """The labels of a column: int64 or float32, or for lists int32 or float32 with two axes."""
    missing = np.flatnonzero(column.is_null().to_numpy())
    if missing.size:
        raise DataError(f"{where} {missing[0]}: no label")
    if not pa.types.is_fixed_size_list(column.type):
        numbers, integer = column.to_numpy(), "int64"
    else:
        flat, integer = column.combine_chunks().flatten(), "int32"
        if flat.null_count:
            raise DataError(f"{where}: a list of labels lacks a value")
        numbers = flat.to_numpy().reshape(len(column), column.type.list_size)
    return numbers.astype(integer if np.issubdtype(numbers.dtype, np.integer) else np.float32)


def _columns(schema: Any, file: Path) -> tuple[str, str]:
    """The names of the image column and the label column; DataError for a wrong type."""
    image, label = _column(schema, IMAGE_COLUMNS, file), _column(schema, LABEL_COLUMNS, file)
    image_type, label_type = schema.field(image).type, schema.field(label).type
    if not pa.types.is_struct(image_type) or image_type.get_field_index("bytes") < 0:
        raise DataError(f"{file}: column {image} is {image_type}, not a struct with bytes")
    is_list = pa.types.is_fixed_size_list(label_type)
    number = label_type.value_type if is_list else label_type
    if not (pa.types.is_integer(number) or pa.types.is_floating(number)):
        raise DataError(f"{file}: column {label} is {label_type}, not an integer or a number")
    return image, label


def _column(schema: Any, names: tuple[str, ...], file: Path) -> str:
    for name in names:
        if name in schema.names:
            return name
    raise DataError(f"{file}: no column {' or '.join(names)} among {', '.join(schema.names)}")


def _num_classes(schema: Any) -> int:
    """The number of class names in the schema metadata, or of labels; 0 if unknown."""
    kind = next(schema.field(name).type for name in LABEL_COLUMNS if name in schema.names)
    if pa.types.is_fixed_size_list(kind) or pa.types.is_floating(kind):
        return int(getattr(kind, "list_size", 1))
    return len(_class_names(schema))


def _class_names(schema: Any) -> list[Any]:
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = next(features[name]["names"] for name in LABEL_COLUMNS if name in features)
        return names if isinstance(names, list) else []
    except (KeyError, TypeError, ValueError, StopIteration, RecursionError):
        return []
