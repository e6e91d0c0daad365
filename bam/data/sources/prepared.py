"""Reads data sets that tensorflow-datasets prepared as array_record files, without TensorFlow.

tensorflow-datasets itself would import the modules that a folder's `features.json` names, and read
the files that its `dataset_info.json` names. This reader does neither, because it knows the format
of the rows.
"""

import hashlib
import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bam.data.catalogue import DATASETS, Entry
from bam.data.common import (
    DataError,
    Split,
    Stays,
    check_labels,
    decode_images,
    in_memory,
)
from bam.data.stream import StoredImages
from bam.errors import InputError
from bam.extras import needs

ONE_BY_ONE = "readahead_buffer_size:0,max_parallelism:1"  # streaming reads rows in random order


def read(name: str, path: Path, stays: Stays = in_memory) -> tuple[Split, Split]:
    """The training and test split of a data set of the catalogue, in stored order.

    `path` is the `data_dir` of tensorflow-datasets. The test split of ImageNet32 is its validation
    split. If `stays(bytes of the decoded training images)` is True, images are `StoredImages`.
    DataError if the set is not prepared in `path` as array_record, or is damaged.
    """
    entry = DATASETS[name]
    folders = versions(entry, path)
    if not folders:
        raise DataError(
            f"{path}: {entry.tfds} is not prepared here; without tensorflow-datasets, download "
            f"{entry.url} and add --config.dataset.path=FILE_OR_FOLDER"
        )
    folder = folders[max(folders, key=lambda name: [int(n) for n in name.split(".")])]
    try:
        info = json.loads((folder / "dataset_info.json").read_bytes())
        file_format = info.get("fileFormat") or "tfrecord"
        rows = {s["name"]: [int(n) for n in s["shardLengths"]] for s in info["splits"]}
    # A damaged description may raise nearly any error.
    except Exception as error:
        raise DataError(f"{folder}: not a prepared data set: {error!r:.200}") from error
    if file_format != "array_record":
        raise DataError(
            f"{folder}: prepared as {file_format!s:.20}, not array_record: prepare it again with "
            "file_format=array_record"
        )
    for split in ("train", entry.test_split):  # before a split is read
        if not rows.get(split):
            raise DataError(f"{folder}: {split}: no such split")
    stay = stays(sum(rows["train"]) * math.prod(entry.shape))
    train, test = (
        _read_split(entry, folder, split, rows[split], official, stay)
        for split, official in zip(("train", entry.test_split), entry.rows, strict=True)
    )
    return train, test


def versions(entry: Entry, path: Path) -> dict[str, Path]:
    """Returns the prepared versions of a data set in a `data_dir`, each with its folder."""
    folders = {x.parent.name: x.parent for x in (path / entry.tfds).glob("*/dataset_info.json")}
    return {k: x for k, x in folders.items() if re.fullmatch(r"\d+(\.\d+)*", k, re.ASCII)}


def _read_split(
    entry: Entry, folder: Path, split: str, shards: list[int], official: int, stay: bool
) -> Split:
    """Returns the split in these shards, in order.

    `shards` has their numbers of rows. Every record is read for its label. If images `stay` in the
    files, memory does not hold them.
    """
    with needs("data"):  # imported here, so that a failure below is the files' fault
        import array_record.python.array_record_module  # noqa: F401
        from tensorflow_datasets.proto import tf_example_pb2  # noqa: F401

    location = f"{folder}: {split}"
    if sum(shards) > official:
        raise DataError(
            f"{location}: has {sum(shards)} rows, but the official split has {official}: prepare "
            "it again"
        )
    stem = f"{entry.tfds.partition('/')[0]}-{split}.array_record"
    files = [folder / f"{stem}-{i:05d}-of-{len(shards):05d}" for i in range(len(shards))]
    encoded, labels = [], []
    digest = hashlib.blake2b(digest_size=16)
    try:
        for file, num_rows in zip(files, shards, strict=True):
            for record in _records(file, num_rows):
                row = _features(record)
                image = row["image"].bytes_list.value[0]
                digest.update(image)
                encoded += [] if stay else [image]
                labels.append(row["label"].int64_list.value[0])
    # array_record raises several types of errors from its C++ reader.
    except Exception as error:
        raise DataError(f"{location}: damaged files: row {len(labels)}: {error}") from error
    numbers = check_labels(np.array(labels, np.int64), entry.num_classes, location)
    if not stay:
        return Split(decode_images(encoded, location, entry.shape), numbers)
    rows, one = np.arange(len(numbers)), _reader_of_rows(files, shards, location)
    place = lambda row: f"{location}: row {row}"  # noqa: E731
    return Split(StoredImages(one, entry.shape, rows, place, digest.digest), numbers)


def _reader_of_rows(files: list[Path], shards: list[int], location: str) -> Callable[[int], bytes]:
    """A function `row -> encoded image` that several threads may call."""
    ends, locks = np.cumsum(shards), [threading.Lock() for _ in shards]
    readers = [_open(file) for file in files]

    def one(row: int) -> bytes:
        shard = int(np.searchsorted(ends, row, side="right"))
        try:
            with locks[shard]:
                [record] = readers[shard].read([row - int(ends[shard]) + shards[shard]])
            return bytes(_features(record)["image"].bytes_list.value[0])
        except Exception as error:  # as in `_read_split`
            raise DataError(f"{location}: row {row}: damaged files: {error}") from error

    return one


def _records(file: Path, num_rows: int) -> Iterator[bytes]:
    """Yields the records of a file.

    InputError if their number is not `num_rows`.
    """
    reader = _open(file)
    try:
        if reader.num_records() != num_rows:
            raise InputError(f"{reader.num_records()} rows in {file.name}, not {num_rows}")
        for _ in range(num_rows):
            yield reader.read()
    finally:
        reader.close()


def _open(file: Path) -> Any:
    from array_record.python.array_record_module import ArrayRecordReader

    return ArrayRecordReader(str(file), options=ONE_BY_ONE)


def _features(record: bytes) -> Any:
    from tensorflow_datasets.proto import tf_example_pb2

    return tf_example_pb2.Example.FromString(record).features.feature
