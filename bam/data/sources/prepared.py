"""Data sets prepared by tensorflow-datasets, read and written without TensorFlow.

Reading needs array_record files: `scripts/prepare_data.py` makes them from an official archive.

tensorflow-datasets itself would import the modules that a folder's `features.json` names, and read
the files that its `dataset_info.json` names. Here neither is used: what a row holds is known.
"""

import io
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bam.data.common import DataError, Split, check_labels, check_size, decode_images, read_file
from bam.data.sources import archives
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


def read(name: str, path: Path) -> tuple[Split, Split]:
    """Training and test split of a set in STOCK, in the stored order, from tfds's `data_dir`.

    The test split of ImageNet32 is its validation split. DataError if it is not prepared there as
    array_record, or damaged.
    """
    stock = _stock(name)
    versions = sorted((path / stock.folder).glob("*/dataset_info.json"))
    if not versions:
        raise DataError(
            f"{path}: {stock.folder} is not prepared here; run "
            f"python -m scripts.prepare_data --name={name} --path={path} --archive=FILE"
        )
    folder = versions[-1].parent
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
            f"{folder}: prepared as {file_format!s:.20}, not array_record; prepare it again in "
            "another folder with scripts/prepare_data.py"
        )
    train, test = (
        _read_split(stock, folder, split, rows.get(split), official)
        for split, official in zip(("train", stock.test_split), archives.ROWS[name], strict=True)
    )
    return train, test


def write(name: str, train: Split, test: Split, path: Path) -> Path:
    """Writes a data set in STOCK as array_record files, as if tensorflow-datasets had prepared it.

    `path` is the folder that tensorflow-datasets calls `data_dir`; returns the data set's own,
    `path/NAME/VERSION`, of which nothing is to be seen before it is whole. DataError if it is
    there.
    """
    with needs("data"):
        import tensorflow_datasets as tfds

    stock = _stock(name)
    base, _, config = stock.folder.partition("/")
    splits = {"train": train, stock.test_split: test}
    features = tfds.features.FeaturesDict(
        {
            "id": tfds.features.Text(),
            "image": tfds.features.Image(shape=train.images.shape[1:]),
            "label": tfds.features.ClassLabel(num_classes=stock.num_classes),
        }
    )

    def examples(split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        for row, (image, label) in enumerate(zip(*splits[split], strict=True)):
            encoded = io.BytesIO(_png(image))
            yield row, {"id": f"{split}_{row:05d}", "image": encoded, "label": int(label)}

    # tfds.dataset_builders.store_as_tfds_dataset would import TensorFlow; this class does not.
    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
        VERSION = tfds.core.Version(stock.version)
        BUILDER_CONFIGS = (
            [tfds.core.BuilderConfig(name=config, version=stock.version)] if config else []
        )

        def _info(self) -> Any:
            return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            del dl_manager
            return {split: examples(split) for split in splits}

        def _generate_examples(self) -> None:
            """Never called: the splits are given as iterators."""

    Builder.name = base

    def make(partial: Path) -> None:
        Builder(data_dir=partial, file_format="array_record").download_and_prepare()

    return _in_one_move(path, stock.folder, make)


def _stock(name: str) -> _Stock:
    if name not in STOCK:
        raise DataError(f"source tfds has no data set {name!r}; choose from {', '.join(STOCK)}")
    return STOCK[name]


def _read_split(
    stock: _Stock, folder: Path, split: str, shards: list[int] | None, official: int
) -> Split:
    """Reads the shards of a split, whose numbers of rows are given, in order."""
    with needs("data"):  # both here: below, what fails is the files' fault
        from array_record.python.array_record_module import ArrayRecordReader
        from tensorflow_datasets.proto import tf_example_pb2

    where = f"{folder}: {split}"
    if not shards:
        raise DataError(f"{where}: no such split")
    if sum(shards) > official:
        raise DataError(f"{where}: {sum(shards)} rows, the official split has {official}")
    encoded, labels = [], []
    limit = 2 * math.prod(stock.shape) + 2**16
    stem = f"{stock.folder.partition('/')[0]}-{split}.array_record"
    try:
        for shard, num_rows in enumerate(shards):
            file = folder / f"{stem}-{shard:05d}-of-{len(shards):05d}"
            for record in _records(ArrayRecordReader, file, num_rows, limit):
                row = tf_example_pb2.Example.FromString(record).features.feature
                encoded.append(row["image"].bytes_list.value[0])
                labels.append(row["label"].int64_list.value[0])
    # array_record raises what its C++ reader met, as one of several types.
    except Exception as error:
        raise DataError(f"{where}: damaged files: row {len(labels)}: {error}") from error
    numbers = check_labels(np.array(labels, np.int64), stock.num_classes, where)
    return Split(decode_images(encoded, where, stock.shape), numbers)


def _records(open_reader: Any, file: Path, num_rows: int, limit: int) -> Iterator[bytes]:
    """The records, of `limit` bytes at most, of a file that should have so many."""
    # One after the other: reading ahead, it would unpack many that are too large at once.
    options = "readahead_buffer_size:0,max_parallelism:1"
    reader = open_reader(str(file), options=options)
    try:
        if reader.num_records() != num_rows:
            raise ValueError(f"{reader.num_records()} rows in {file.name}, not {num_rows}")
        for _ in range(num_rows):
            record = reader.read()
            check_size(len(record), limit, file.name)
            yield record
    finally:
        reader.close()


def _in_one_move(path: Path, inner: str, make: Callable[[Path], object]) -> Path:
    """Makes `path/inner/VERSION` in a sibling folder of its own, then renames it into place."""
    if there := sorted((path / inner).glob("*/dataset_info.json")):
        raise DataError(f"{there[-1].parent}: is there already; remove it to prepare it again")
    path.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(suffix=".partial", dir=path))
    try:
        make(partial)
        made = next((partial / inner).glob("*/dataset_info.json")).parent
        target = path / inner / made.name
        target.parent.mkdir(parents=True, exist_ok=True)
        return made.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _png(image: np.ndarray) -> bytes:
    with needs("data"):
        from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(file, "PNG")
    return file.getvalue()
