"""Data sets that tensorflow-datasets prepared as array_record files, read without TensorFlow.

tensorflow-datasets itself would import the modules that a folder's `features.json` names, and read
the files that its `dataset_info.json` names. Here neither is used: what a row holds is known.
"""

import hashlib
import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bam.data.common import DataError, Split, check_labels, check_size, decode_images, read_file
from bam.data.sources import archives
from bam.data.stream import StoredImages
from bam.extras import needs


class _Stock(NamedTuple):
    """How tensorflow-datasets names a data set, and where its official files are."""

    folder: str
    version: str
    test_split: str
    shape: tuple[int, int, int]
    num_classes: int
    url: str


STOCK = {
    "cifar10": _Stock(
        "cifar10", "3.0.2", "test", (32, 32, 3), 10,
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    ),
    "cifar100": _Stock(
        "cifar100", "3.0.2", "test", (32, 32, 3), 100,
        "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    ),
    "imagenet32": _Stock(
        "imagenet_resized/32x32", "0.1.0", "validation", (32, 32, 3), 1000,
        "https://image-net.org/download-images.php",
    ),
    "mnist": _Stock(
        "mnist", "3.0.1", "test", (28, 28, 1), 10,
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
}  # fmt: skip

MAX_INFO = 2**20  # bytes of dataset_info.json
# Of records: reading ahead, array_record would unpack many that are too large at once.
ONE_BY_ONE = "readahead_buffer_size:0,max_parallelism:1"


def read(
    name: str, path: Path, stays: Callable[[int], bool] = lambda num_bytes: False
) -> tuple[Split, Split]:
    """Training and test split of a set in STOCK, in the stored order, from tfds's `data_dir`.

    The test split of ImageNet32 is its validation split. DataError if it is not prepared there as
    array_record, or damaged. If `stays(bytes of the decoded training images)`, images are
    `StoredImages`.
    """
    stock = _stock(name)
    named = {x.parent.name: x.parent for x in (path / stock.folder).glob("*/dataset_info.json")}
    versions = [name for name in named if re.fullmatch(r"\d+(\.\d+)*", name, re.ASCII)]
    if not versions:
        raise DataError(
            f"{path}: {stock.folder} is not prepared here; without tensorflow-datasets, fetch "
            f"{stock.url} and set dataset.source=archive dataset.path=FILE_OR_FOLDER"
        )
    folder = named[max(versions, key=lambda name: [int(n) for n in name.split(".")])]
    content = read_file(folder / "dataset_info.json", MAX_INFO)
    try:
        info = json.loads(content)
        file_format = info.get("fileFormat") or "tfrecord"
        rows = {s["name"]: [int(n) for n in s["shardLengths"]] for s in info["splits"]}
    # Which error a damaged description gives depends on where it is damaged.
    except Exception as error:
        raise DataError(f"{folder}: not a prepared data set: {error!r:.200}") from error
    if file_format != "array_record":
        raise DataError(
            f"{folder}: prepared as {file_format!s:.20}, not array_record: prepare it again with "
            "file_format=array_record"
        )
    stay = stays(sum(rows.get("train") or []) * math.prod(stock.shape))
    train, test = (
        _read_split(stock, folder, split, rows.get(split), official, stay)
        for split, official in zip(("train", stock.test_split), archives.ROWS[name], strict=True)
    )
    return train, test


def _stock(name: str) -> _Stock:
    if name not in STOCK:
        raise DataError(f"source tfds has no data set {name!r}; choose from {', '.join(STOCK)}")
    return STOCK[name]


def _read_split(
    stock: _Stock, folder: Path, split: str, shards: list[int] | None, official: int, stay: bool
) -> Split:
    """Reads the shards of a split, whose numbers of rows are given, in order.

    If the images are to stay in the files, they are read, but not kept.
    """
    with needs("data"):  # both here: below, what fails is the files' fault
        from array_record.python.array_record_module import ArrayRecordReader
        from tensorflow_datasets.proto import tf_example_pb2

    where = f"{folder}: {split}"
    if not shards:
        raise DataError(f"{where}: no such split")
    if sum(shards) > official:
        raise DataError(f"{where}: {sum(shards)} rows, the official split has {official}")
    encoded, labels, paths = [], [], []
    digest = hashlib.blake2b(digest_size=16)
    limit = 2 * math.prod(stock.shape) + 2**16
    stem = f"{stock.folder.partition('/')[0]}-{split}.array_record"
    try:
        for shard, num_rows in enumerate(shards):
            file = folder / f"{stem}-{shard:05d}-of-{len(shards):05d}"
            paths.append(file)
            for record in _records(ArrayRecordReader, file, num_rows, limit):
                row = tf_example_pb2.Example.FromString(record).features.feature
                image = row["image"].bytes_list.value[0]
                if stay:
                    digest.update(image)
                else:
                    encoded.append(image)
                labels.append(row["label"].int64_list.value[0])
    # array_record raises what its C++ reader met, as one of several types.
    except Exception as error:
        raise DataError(f"{where}: damaged files: row {len(labels)}: {error}") from error
    numbers = check_labels(np.array(labels, np.int64), stock.num_classes, where)
    if not stay:
        return Split(decode_images(encoded, where, stock.shape), numbers)
    ends, locks = np.cumsum(shards), [threading.Lock() for _ in shards]
    readers = [ArrayRecordReader(str(file), options=ONE_BY_ONE) for file in paths]

    def place(row: int) -> str:
        return f"{where}: row {row}"

    def one(row: int) -> bytes:
        shard = int(np.searchsorted(ends, row, side="right"))
        try:
            with locks[shard]:
                [record] = readers[shard].read([row - int(ends[shard]) + shards[shard]])
            image = tf_example_pb2.Example.FromString(record).features.feature["image"]
            return bytes(image.bytes_list.value[0])
        except Exception as error:  # as above
            raise DataError(f"{place(row)}: damaged files: {error}") from error

    rows = np.arange(len(numbers))
    return Split(StoredImages(one, stock.shape, rows, place, digest.digest), numbers)


def _records(open_reader: Any, file: Path, num_rows: int, limit: int) -> Iterator[bytes]:
    """The records, of `limit` bytes at most, of a file that should have so many."""
    reader = open_reader(str(file), options=ONE_BY_ONE)
    try:
        if reader.num_records() != num_rows:
            raise ValueError(f"{reader.num_records()} rows in {file.name}, not {num_rows}")
        for _ in range(num_rows):
            record = reader.read()
            check_size(len(record), limit, file.name)
            yield record
    finally:
        reader.close()
