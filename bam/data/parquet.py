"""Data sets in Parquet, in the column layout of Hugging Face image data sets."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from bam.data.common import DataError, Split, check_labels, decode_images

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label")


def read(
    path: Path, shape: tuple[int, int, int] | None = None, num_classes: int | None = None
) -> tuple[Split, Split, int]:
    """Reads a folder with `train.parquet` and `test.parquet`.

    An image column (`image` or `img`) is a struct whose `bytes` hold an encoded image (its `path`
    is ignored, never followed); a label column (`label` or `fine_label`) holds integers. A split
    may also come in shards, `train-00000-of-00002.parquet` and so on, all of them present.

    Args:
      path: the folder.
      shape: `(height, width, channels)` of every image; None: that of the first training image.
      num_classes: None: the number of class names in the schema metadata or, without such, the
        largest label plus one. The number of classes is public: name the classes in the metadata
        if the largest label of a private set is not.

    Returns:
      The training split, the test split, the number of classes.

    Raises:
      DataError: for a missing split or column, a damaged file, image or label, naming file and row.
    """
    files = {split: _files(path, split) for split in ("train", "test")}
    tables = {split: [_table(file) for file in files[split]] for split in files}
    named = _num_classes(tables["train"][0][2])
    if named and num_classes and named != num_classes:
        raise DataError(f"{files['train'][0]}: has {named} classes, expected {num_classes}")
    if num_classes is None:
        num_classes = named or 1 + max(
            int(labels.max(initial=0)) for parts in tables.values() for _, labels, _ in parts
        )
    splits = []
    for split in ("train", "test"):
        images, labels = [], []
        for file, (encoded, numbers, _) in zip(files[split], tables[split], strict=True):
            labels.append(check_labels(numbers, num_classes, str(file)))
            images.append(decode_images(encoded, str(file), shape))
            shape = shape or images[0].shape[1:]
        splits.append(
            Split(images[0], labels[0])
            if len(images) == 1
            else Split(np.concatenate(images), np.concatenate(labels))
        )
    return splits[0], splits[1], num_classes


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


def _table(file: Path) -> tuple[list[bytes | None], np.ndarray, dict[bytes, bytes]]:
    """Encoded images, labels and schema metadata of a file."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(file)
        image = _column(schema, IMAGE_COLUMNS, file)
        label = _column(schema, LABEL_COLUMNS, file)
        image_type, label_type = schema.field(image).type, schema.field(label).type
        if not pa.types.is_struct(image_type) or image_type.get_field_index("bytes") < 0:
            raise DataError(f"{file}: column {image} is {image_type}, not a struct with bytes")
        if not pa.types.is_integer(label_type):
            raise DataError(f"{file}: column {label} is {label_type}, not an integer")
        table = pq.read_table(file, columns=[image, label])
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a readable Parquet file: {error}") from error
    missing = np.flatnonzero(table[label].is_null().to_numpy())
    if missing.size:
        raise DataError(f"{file}: row {missing[0]}: no label")
    encoded = pc.struct_field(table[image], "bytes").to_pylist()
    return encoded, table[label].to_numpy().astype(np.int64), schema.metadata or {}


def _column(schema: Any, names: tuple[str, ...], file: Path) -> str:
    for name in names:
        if name in schema.names:
            return name
    raise DataError(f"{file}: no column {' or '.join(names)} among {', '.join(schema.names)}")


def _num_classes(metadata: dict[bytes, bytes]) -> int | None:
    """The number of class names that the schema metadata give, if they do."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        names = next(features[name]["names"] for name in LABEL_COLUMNS if name in features)
        return len(names) or None
    except (KeyError, TypeError, ValueError, StopIteration):
        return None
