"""Reads data sets in Parquet with the column layout of Hugging Face image data sets."""

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from bam.data.common import (
    MANIFEST,
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
from bam.errors import InputError
from bam.extras import needs
from bam.files import JsonObject
from bam.privacy.user_ids import read_id

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
    """The training split, test split and number of classes of a folder of Parquet files.

    The files are `train.parquet` and `test.parquet`, or shards such as
    `train-00000-of-00002.parquet`, all of them present. The image column (`image` or `img`) is a
    struct whose `bytes` hold an encoded image; its `path` is ignored and never followed. The label
    column (`label` or `fine_label`) holds integers, or for other losses numbers or lists of one
    length (fixed_size_list).

    Args:
      path: the folder.
      shape: `(height, width, channels)` of every image; None takes that of the first training
        image.
      num_classes: the number of classes; 0 takes that in the schema metadata of the first training
        file. It is public, so it is never counted from the private labels.
      stays: `bytes of the decoded training images -> whether images stay in their files`, as
        `StoredImages` that decode rows when they are read.

    Raises:
      DataError: for a missing split or column, for a file of a split that the manifest of an import
        does not list, for a damaged file, image or label, with file and
        row, and for a number of classes that is missing or not that of the metadata.
    """
    _check_listed(path)
    paths = [_paths(path, split) for split in ("train", "test")]  # before a file is read
    train, test = map(_Files, paths)
    in_metadata = _num_classes(train.schema)
    if in_metadata and num_classes and in_metadata != num_classes:
        raise DataError(f"{train.paths[0]}: has {in_metadata} classes, expected {num_classes}")
    num_classes = num_classes or in_metadata
    if not num_classes:
        raise DataError(
            f"{train.paths[0]}: the number of classes is not counted from the private labels: name "
            "the classes in the schema metadata (Hugging Face's ClassLabel), or add "
            "--config.dataset.num_classes=K (for `bam clip_norm`: --num_classes=K)"
        )
    shape = shape or train.first_shape()
    streamed = stays(train.num_rows * math.prod(shape))
    splits = [files.split(shape, num_classes, streamed) for files in (train, test)]
    return splits[0], splits[1], num_classes


def describe(path: Path) -> tuple[tuple[str, ...], JsonObject | None]:
    """Reads `Dataset.classes` and `Dataset.preprocessing` from the manifest or the first file."""
    first = _paths(path, "train")[0]
    with readable(first):
        names = _class_names(pq.read_schema(first))
    record, preprocessing = manifest(path), None
    if record.get("preprocessing"):
        preprocessing = Preprocessing.from_json(record["preprocessing"]).as_json()
        names = record["classes"] if isinstance(record.get("classes"), list) else names
    return tuple(map(str, names)), preprocessing


def read_ids(path: Path, column: str, split: str = "train") -> Int64[np.ndarray, " n"]:
    """The user id of each row of a split, in the order of `read`: a column of numbers or texts.

    Ids are equal as `bam.privacy.user_ids.user_id` says. If all are in columns of numbers and fit
    into 64 bits, an id is its number; otherwise it is 64 bits of its text's BLAKE2. DataError, with
    file and row, for a column that is missing or has another type, and for an id that is missing or
    refused.
    """
    return _ids_alike(path, column, (split,))[0]


def read_all_ids(path: Path, column: str) -> list[Int64[np.ndarray, " n"]]:
    """Returns the ids of the training rows and of the test rows, as `read_ids` has them."""
    return _ids_alike(path, column, ("train", "test"))


def _ids_alike(path: Path, column: str, splits: Sequence[str]) -> list[np.ndarray]:
    """The ids of each of these splits, all as numbers or all as digests."""
    paths = [(split, file) for split in splits for file in _paths(path, split)]
    are_text = [_has_texts(file, column) for _, file in paths]
    try:
        parts = [(split, part) for split, file in paths for part in _file_ids(file, column)]
    except InputError as error:
        raise DataError(str(error)) from error
    names = {name for _, part in parts for name in part.names if name}
    as_texts = any(are_text) or not all(-(2**63) <= int(x) < 2**63 for x in names)
    number = {x: _digest(x) if as_texts else int(x) for x in names} | {"": 0}
    ids = {split: [np.zeros(0, np.int64)] for split in splits}
    for split, part in parts:
        ids[split].append(np.array([number[x] for x in part.names], np.int64)[part.rows])
    return [np.concatenate(ids[split]) for split in splits]


def _digest(name: str) -> int:
    """64 bits of a `user_id`, the first of its BLAKE2, as a signed integer."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


def _has_texts(file: Path, column: str) -> bool:
    """Returns whether a column of ids holds texts, not numbers.

    DataError for anything else.
    """
    with readable(file):
        schema = pq.read_schema(file)
        kind = schema.field(_column(schema, (column,), file)).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_ = pa.types
    if any(is_kind(kind) for is_kind in (is_.is_integer, is_.is_floating, is_.is_decimal)):
        return False
    texts = (is_.is_string, is_.is_large_string, is_.is_string_view, is_.is_binary)
    if not any(is_kind(kind) for is_kind in (*texts, is_.is_large_binary)):
        raise DataError(f"{file}: column {column} is {kind}, neither numbers nor text")
    return True


def has_column(path: Path, column: str, split: str) -> bool:
    """Whether a file of a split has a column of that name."""
    with readable(path):
        return any(column in pq.read_schema(file).names for file in _paths(path, split))


class _Ids(NamedTuple):
    """The ids of some rows: different `user_id`s, "" for one that no row has, and each row's."""

    names: list[str]
    rows: np.ndarray


def _file_ids(file: Path, column: str) -> list[_Ids]:
    """Yields the ids in a file, in parts.

    InputError for a row without a user, or whose id is refused.
    """
    ids, row = [], 0
    with readable(file), pq.ParquetFile(file, read_dictionary=[column], pre_buffer=False) as table:
        for group in range(table.num_row_groups):
            for part in table.read_row_group(group, columns=[column])[column].chunks:
                coded = part.dictionary_encode()
                # The place behind the names of a dictionary is that of a null.
                indices = np.asarray(coded.indices.fill_null(len(coded.dictionary)))
                # As NumPy's scalars, which tell how many bits a float has.
                values = [*coded.dictionary.to_numpy(zero_copy_only=False), None]
                used, first = np.unique(indices, return_index=True)
                names = [""] * len(values)
                for code, place in zip(used.tolist(), (row + first).tolist(), strict=True):
                    location = f"{file}: row {place}: column {column}"
                    names[code] = read_id(values[code], location)
                ids.append(_Ids(names, indices))
                row += len(part)
    return ids


class _Files:
    """The files of a split, whose footers are read and checked."""

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
        """Returns the split with labels in memory.

        Images stay in the files if `streamed`.
        """
        labels = [self._labels(number, num_classes) for number in range(len(self.paths))]
        if streamed:
            rows = np.arange(self.num_rows)
            images: Any = StoredImages(self._read_image, shape, rows, self._place, self._digest)
        else:
            images = _join(
                [
                    decode_images(self._read_images(number, math.prod(shape)), str(file), shape)
                    for number, file in enumerate(self.paths)
                ]
            )
        return Split(images, _join(labels))

    def first_shape(self) -> tuple[int, int, int]:
        """Returns the shape of the first image.

        DataError without one.
        """
        first = [self._read_image(0)] if self.num_rows else []
        return decode_images(first, str(self.paths[0])).shape[1:]

    def _labels(self, number: int, num_classes: int) -> np.ndarray:
        """Returns labels as a loss takes them.

        Class labels are checked and become int32.
        """
        file, (_, label) = self.paths[number], self._columns[number]
        with readable(file):
            column = pq.read_table(file, columns=[label])[label]
        numbers = _numbers(column, f"{file}: row")
        is_class = numbers.dtype == np.int64
        return check_labels(numbers, num_classes, str(file)) if is_class else numbers

    def _read_images(self, number: int, bytes_per_image: int) -> list[bytes | None]:
        """Returns the encoded images of a file."""
        file, footer, (image, _) = self.paths[number], self._footers[number], self._columns[number]
        # 64 more bytes a row, for its label and for pointers to its image.
        check_memory(footer.num_rows * (bytes_per_image + 64), str(file))
        with readable(file), pq.ParquetFile(file, pre_buffer=False) as table:
            batches = table.iter_batches(512, columns=[f"{image}.bytes"])
            columns = (pc.struct_field(batch.column(image), "bytes") for batch in batches)
            return [encoded for column in columns for encoded in column.to_pylist()]

    def _read_image(self, row: int) -> bytes | None:
        """Returns the encoded image of a row, for which Parquet reads the complete row group."""
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
        """A hash of all bytes of the files, because footers do not depend on the images."""
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
    """Returns the file of a split, or all its shards in order.

    DataError if one is missing.
    """
    single = folder / f"{split}.parquet"
    if single.is_file():
        return [single]
    shards = sorted(folder.glob(f"{split}-*-of-*.parquet"))
    if not shards:
        raise DataError(
            f"{folder}: no {split}.parquet; expected train.parquet and test.parquet, which "
            "`bam data import` writes for a folder of images"
        )
    declared = re.search(r"-of-(\d+)\.parquet$", shards[0].name)
    if declared is None or int(declared[1]) != len(shards):
        num = f"{len(shards)} {split} shard{'s' * (len(shards) > 1)}"
        raise DataError(f"{folder}: has {num}, not as many as {shards[0].name} says")
    return shards


def _check_listed(folder: Path) -> None:
    """DataError for a file of a split that the manifest of an imported folder does not list.

    A file of another import may hold the same images once more.
    """
    listed = manifest(folder).get("files")
    if isinstance(listed, dict):
        present = {x.name for x in folder.glob("*.parquet")}
        others = {x for x in present if re.match(r"(train|test)[.-]", x)}.difference(listed)
        if others:
            raise DataError(
                f"{folder / min(others)} is not in {MANIFEST}: remove it, or import again into "
                "another folder"
            )


def _join(parts: list[np.ndarray]) -> np.ndarray:
    """Returns the concatenated arrays, for a moment in twice the memory.

    A single array is unchanged.
    """
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _numbers(column: Any, location: str) -> np.ndarray:
    """The labels of a column: int64 or float32, or for lists int32 or float32 with two axes."""
    missing = np.flatnonzero(column.is_null().to_numpy())
    if missing.size:
        raise DataError(f"{location} {missing[0]}: no label")
    if not pa.types.is_fixed_size_list(column.type):
        numbers, integer = column.to_numpy(), "int64"
    else:
        flat, integer = column.combine_chunks().flatten(), "int32"
        if flat.null_count:
            raise DataError(f"{location}: a list of labels lacks a value")
        numbers = flat.to_numpy().reshape(len(column), column.type.list_size)
    return numbers.astype(integer if np.issubdtype(numbers.dtype, np.integer) else np.float32)


def _columns(schema: Any, file: Path) -> tuple[str, str]:
    """Returns the names of the image column and the label column.

    DataError for a wrong type.
    """
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
    """Returns the first of these names that is a column.

    DataError if none is.
    """
    for name in names:
        if name in schema.names:
            return name
    raise DataError(f"{file}: no column {' or '.join(names)} among {', '.join(schema.names)}")


def _num_classes(schema: Any) -> int:
    """Returns the number of class names in the schema metadata, or of labels in a list.

    1 for numbers, 0 for classes without names.
    """
    kind = next(schema.field(name).type for name in LABEL_COLUMNS if name in schema.names)
    if pa.types.is_fixed_size_list(kind) or pa.types.is_floating(kind):
        return int(getattr(kind, "list_size", 1))
    return len(_class_names(schema))


def _class_names(schema: Any) -> list[Any]:
    """Returns the names in Hugging Face's ClassLabel of the schema metadata, [] without them."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = next(features[name]["names"] for name in LABEL_COLUMNS if name in features)
        return names if isinstance(names, list) else []
    except (KeyError, TypeError, ValueError, StopIteration, RecursionError):
        return []
