"""Data sets in Parquet, in the column layout of Hugging Face image data sets.

Equal images are stored once in such a file, and held once while it is read: a small file cannot
fill the memory by repeating a large image. Within a row group a file that lies about its sizes can
still take what the format allows: 2 GiB for a page, and 2 GiB for different images.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from bam.data.common import DataError, Split, check_labels, check_memory, check_size, decode_images
from bam.data.stream import StoredImages
from bam.extras import needs

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label")
MAX_ROW_GROUP = 2**30  # bytes of encoded images; Hugging Face writes 100 or 1000 rows


def read(
    path: Path,
    shape: tuple[int, int, int] | None = None,
    num_classes: int = 0,
    stays: Callable[[int], bool] = lambda num_bytes: False,
) -> tuple[Split, Split, int]:
    """Training split, test split and number of classes of `train.parquet` and `test.parquet`.

    An image column (`image` or `img`) is a struct whose `bytes` hold an encoded image (its `path`
    is ignored, never followed); a label column (`label` or `fine_label`) holds integers, or for
    losses of other labels numbers or lists of one length (fixed_size_list). A split
    may also come in shards, `train-00000-of-00002.parquet` and so on, all of them present.

    Every image has the shape `(height, width, channels)`; None: that of the first training image.
    0 classes: as many as the schema metadata of the first training file names. Their number is
    public, so it is never counted from the labels, which are not. If `stays(bytes of the decoded
    training images)`, images are `StoredImages`, of which each read decodes what it needs.

    DataError for a missing split or column, a damaged file, image or label, naming file and row; if
    the number of classes is neither given nor named, or both and not the same.
    """
    files = {split: _files(path, split) for split in ("train", "test")}
    named = _num_classes(files["train"][0])
    if named and num_classes and named != num_classes:
        raise DataError(f"{files['train'][0]}: has {named} classes, expected {num_classes}")
    num_classes = num_classes or named
    if not num_classes:
        raise DataError(
            f"{files['train'][0]}: how many classes there are is public and not counted from the "
            "labels: name them in the schema metadata (Hugging Face's ClassLabel), or set "
            "--config.dataset.num_classes (of public data: --config.public_clip.num_classes)"
        )
    stored = _Stored(files["train"])
    shape = shape or stored.first_shape()
    if stays(stored.num_rows * math.prod(shape)):
        both = stored, _Stored(files["test"])
        train, test = (each.split(shape, num_classes) for each in both)
        return train, test, num_classes
    splits = []
    for split in ("train", "test"):
        images, labels = [], []
        for file in files[split]:
            encoded, numbers = _table(file, math.prod(shape) if shape else 1)
            labels.append(_checked(numbers, num_classes, str(file)))
            images.append(decode_images(encoded, str(file), shape))
        whole = len(images) == 1  # else its shards are put together, in twice the memory
        splits.append(Split(*(x[0] if whole else np.concatenate(x) for x in (images, labels))))
    return splits[0], splits[1], num_classes


def read_ids(path: Path, column: str) -> Int64[np.ndarray, " n"]:
    """An id for each training row, in the order of `read`: a column of integers, or of text.

    A text becomes 64 bits of its BLAKE2. DataError for a column that is missing, of another type,
    has no value in a row, or is numbers in one file and text in another: of 7 and "7" nobody knows
    whether they are one user, and taken for two they would have the guarantee of two.
    """
    with needs("data"):
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

    ids, kinds = [np.zeros(0, np.int64)], set[bool]()
    for file in _files(path, "train"):
        try:
            schema = pq.read_schema(file)
            kind = schema.field(_column(schema, (column,), file)).type
            kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            if not (pa.types.is_integer(kind) or pa.types.is_string(kind)):
                raise DataError(f"{file}: column {column} is {kind}, neither an integer nor text")
            kinds.add(pa.types.is_string(kind))
            if len(kinds) > 1:
                raise DataError(
                    f"{file}: column {column} is {kind}, in other files numbers or text"
                )
            with pq.ParquetFile(file, read_dictionary=[column], pre_buffer=False) as table:
                for group in range(table.num_row_groups):
                    declared = table.metadata.row_group(group).total_byte_size
                    check_size(declared, MAX_ROW_GROUP, f"{file}: row group {group}")
                    for part in table.read_row_group(group, columns=[column])[column].chunks:
                        if part.null_count:
                            raise DataError(f"{file}: column {column} has rows without a value")
                        coded = (
                            part
                            if pa.types.is_dictionary(part.type)
                            else pc.dictionary_encode(part)
                        )
                        different = np.array([_number(x) for x in coded.dictionary.to_pylist()])
                        ids.append(different.astype(np.int64)[coded.indices.to_numpy()])
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file}: not a readable Parquet file: {error}") from error
    return np.concatenate(ids)


def _number(value: int | str) -> np.int64:
    """An integer as it is; a text's first 64 bits of BLAKE2."""
    if isinstance(value, str):
        value = int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest())
    return np.uint64(value % 2**64).astype(np.int64)


def _files(folder: Path, split: str) -> list[Path]:
    whole = folder / f"{split}.parquet"
    if whole.is_file():
        return [whole]
    shards = sorted(folder.glob(f"{split}-*-of-*.parquet"))
    if not shards:
        raise DataError(f"{folder}: no {split}.parquet; expected train.parquet and test.parquet")
    declared = re.search(r"-of-(\d+)\.parquet$", shards[0].name)
    if declared is None or int(declared[1]) != len(shards):
        raise DataError(f"{folder}: {len(shards)} shards of {split} found; {shards[0].name} is one")
    return shards


def _table(file: Path, bytes_per_image: int) -> tuple[list[bytes | None], np.ndarray]:
    """Encoded images, equal ones the same object where the file repeats one, and labels."""
    with needs("data"):
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

    encoded: list[bytes | None] = []
    numbers: list[np.ndarray] = []
    try:
        schema = pq.read_schema(file)
        image, label = _columns(schema, file)
        column = f"{image}.bytes"
        with pq.ParquetFile(file, read_dictionary=[column], pre_buffer=False) as table:
            # 64 more of every row for its label and for what points to its image.
            check_memory(table.metadata.num_rows * (bytes_per_image + 64), str(file))
            num_bytes = 0
            for group in range(table.num_row_groups):
                declared = table.metadata.row_group(group).total_byte_size
                check_size(declared, MAX_ROW_GROUP, f"{file}: row group {group}")
                rows = table.read_row_group(group, columns=[column, label])
                numbers.append(_numbers(rows[label], f"{file}: row", len(encoded)))
                for part in pc.struct_field(rows[image], "bytes").chunks:
                    num_bytes += part.nbytes
                    check_memory(num_bytes, str(file))
                    different = part.dictionary.to_pylist()
                    encoded += [
                        None if i is None else different[i] for i in part.indices.to_pylist()
                    ]
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a readable Parquet file: {error}") from error
    return encoded, np.concatenate(numbers) if numbers else np.zeros(0, np.int64)


def _numbers(column: Any, where: str, first: int = 0) -> np.ndarray:
    """Labels of a column: int64, float32 or, of lists, int32 or float32 of two axes."""
    import pyarrow as pa

    missing = np.flatnonzero(column.is_null().to_numpy())
    if missing.size:
        raise DataError(f"{where} {first + missing[0]}: no label")
    if not pa.types.is_fixed_size_list(column.type):
        found = column.to_numpy()
        return found.astype(np.int64 if np.issubdtype(found.dtype, np.integer) else np.float32)
    flat = column.combine_chunks().flatten()
    if flat.null_count:
        raise DataError(f"{where}: a list of labels lacks a value")
    found = flat.to_numpy().reshape(len(column), column.type.list_size)
    return found.astype(np.int32 if np.issubdtype(found.dtype, np.integer) else np.float32)


def _checked(numbers: np.ndarray, num_classes: int, where: str) -> np.ndarray:
    """Labels as the loss is given them; those of classes are checked."""
    return check_labels(numbers, num_classes, where) if numbers.dtype == np.int64 else numbers


class _Stored:
    """The rows of a split's files, each of which can be read by itself."""

    def __init__(self, paths: list[Path]) -> None:
        with needs("data"):
            import pyarrow as pa
            import pyarrow.parquet as pq

        self._paths, self._footers = paths, list[Any]()
        groups = []
        for number, file in enumerate(paths):
            try:
                footer = pq.read_metadata(file)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{file}: not a readable Parquet file: {error}") from error
            self._footers.append(footer)
            for group in range(footer.num_row_groups):
                declared = footer.row_group(group)
                check_size(declared.total_byte_size, MAX_ROW_GROUP, f"{file}: row group {group}")
                groups.append((number, group, declared.num_rows))
        self._groups = np.array(groups, np.int64).reshape(-1, 3)
        self._ends = np.cumsum(self._groups[:, 2])
        self.num_rows = int(self._groups[:, 2].sum())
        self._columns = _columns(self._footers[0].schema.to_arrow_schema(), paths[0])

    def first_shape(self) -> tuple[int, int, int]:
        where = str(self._paths[0])
        first = decode_images([self.encoded(0)] if self.num_rows else [], where)
        return first.shape[1:]

    def place(self, row: int) -> str:
        """A row as errors name it: its file, and its row in it, from 0."""
        number = int(self._groups[np.searchsorted(self._ends, row, side="right"), 0])
        before = int(self._groups[self._groups[:, 0] < number, 2].sum())
        return f"{self._paths[number]}: row {row - before}"

    def digest(self) -> bytes:
        """Of the files, all bytes of each: a footer alone does not tell two images apart."""
        total = hashlib.blake2b(digest_size=32)
        for file in self._paths:
            with file.open("rb") as opened:
                total.update(hashlib.file_digest(opened, hashlib.blake2b).digest())
        return total.digest()

    def encoded(self, row: int) -> bytes | None:
        """The image of a row, as its file has it; a row group is read for it."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        part = int(np.searchsorted(self._ends, row, side="right"))
        number, group, rows = self._groups[part].tolist()
        file, image = self._paths[number], self._columns[0]
        try:
            with pq.ParquetFile(file, metadata=self._footers[number], pre_buffer=False) as table:
                read = table.read_row_group(group, columns=[f"{image}.bytes"], use_threads=False)
            found = read[image][row - int(self._ends[part]) + rows].as_py()
        except (pa.ArrowException, OSError, IndexError) as error:
            raise DataError(f"{file}: not a readable Parquet file: {error}") from error
        return found and found["bytes"]

    def split(self, shape: tuple[int, int, int], num_classes: int) -> Split:
        """Labels in memory, images in the files."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        labels = []
        for file in self._paths:
            try:
                column = pq.read_table(file, columns=[self._columns[1]])[self._columns[1]]
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{file}: not a readable Parquet file: {error}") from error
            labels.append(_checked(_numbers(column, f"{file}: row"), num_classes, str(file)))
        rows = np.arange(self.num_rows)
        images = StoredImages(self.encoded, shape, rows, self.place, self.digest)
        return Split(images, np.concatenate(labels))


def _columns(schema: Any, file: Path) -> tuple[str, str]:
    """The names of the columns of images and labels, if their types are right."""
    import pyarrow as pa

    image, label = _column(schema, IMAGE_COLUMNS, file), _column(schema, LABEL_COLUMNS, file)
    image_type, label_type = schema.field(image).type, schema.field(label).type
    if not pa.types.is_struct(image_type) or image_type.get_field_index("bytes") < 0:
        raise DataError(f"{file}: column {image} is {image_type}, not a struct with bytes")
    of_each = label_type.value_type if pa.types.is_fixed_size_list(label_type) else label_type
    if not (pa.types.is_integer(of_each) or pa.types.is_floating(of_each)):
        raise DataError(f"{file}: column {label} is {label_type}, not an integer or a number")
    return image, label


def _column(schema: Any, names: tuple[str, ...], file: Path) -> str:
    for name in names:
        if name in schema.names:
            return name
    raise DataError(f"{file}: no column {' or '.join(names)} among {', '.join(schema.names)}")


def _num_classes(file: Path) -> int:
    """The number of class names that a file's schema metadata give, or of labels; 0: not known."""
    with needs("data"):
        import pyarrow as pa
        import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a readable Parquet file: {error}") from error
    metadata = schema.metadata or {}
    kind = next((schema.field(x).type for x in LABEL_COLUMNS if x in schema.names), None)
    if kind is not None and (pa.types.is_fixed_size_list(kind) or pa.types.is_floating(kind)):
        return int(getattr(kind, "list_size", 1))
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        names = next(features[name]["names"] for name in LABEL_COLUMNS if name in features)
        return len(names) if isinstance(names, list) else 0
    except (KeyError, TypeError, ValueError, StopIteration, RecursionError):
        return 0
