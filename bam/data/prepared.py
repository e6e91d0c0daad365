"""Data sets prepared by tensorflow-datasets, read and written without TensorFlow.

Reading needs array_record files: `scripts/prepare_data.py` makes them, from an official archive
with `write` or, where TensorFlow is installed, from the network with `download`.
"""

import importlib.util
import io
import shutil
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bam.data.common import DataError, Split, check_labels, decode_images


class _Stock(NamedTuple):
    """How tensorflow-datasets names a data set, and where its files come from."""

    folder: str
    version: str
    test_split: str
    num_classes: int
    url: str


STOCK = {
    "cifar10": _Stock(
        "cifar10", "3.0.2", "test", 10, "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
    ),
    "cifar100": _Stock(
        "cifar100", "3.0.2", "test", 100, "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"
    ),
    "imagenet32": _Stock(
        "imagenet_resized/32x32",
        "0.1.0",
        "validation",
        1000,
        "https://image-net.org/download-images.php",
    ),
    "mnist": _Stock(
        "mnist", "3.0.1", "test", 10, "https://storage.googleapis.com/cvdf-datasets/mnist/"
    ),
}

NETWORK_SECONDS = 5.0


def read(name: str, path: Path) -> tuple[Split, Split]:
    """Reads a prepared data set through tensorflow-datasets' data source.

    Args:
      name: a key of `STOCK`.
      path: the folder that tensorflow-datasets calls `data_dir`.

    Returns:
      Training and test split, in the stored order; uint8 images, labels from 0. The test split of
      ImageNet32 is its validation split.

    Raises:
      DataError: if it is not prepared there as array_record, or damaged.
    """
    stock = _stock(name)
    versions = sorted((path / stock.folder).glob("*/dataset_info.json"))
    if not versions:
        raise DataError(
            f"{path}: {stock.folder} is not prepared here; run "
            f"python -m scripts.prepare_data --name={name} --path={path}"
        )
    folder = versions[-1].parent

    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder_from_directory(folder)
    # Which error a damaged description gives depends on the parser that meets it.
    except Exception as error:
        raise DataError(f"{folder}: not a prepared data set: {error}") from error
    if builder.info.file_format.value != "array_record":
        raise DataError(
            f"{folder}: prepared as {builder.info.file_format.value}, not array_record; prepare it "
            "again in another folder with scripts/prepare_data.py"
        )
    return (
        _read_split(builder, folder, "train", stock.num_classes),
        _read_split(builder, folder, stock.test_split, stock.num_classes),
    )


def write(name: str, train: Split, test: Split, path: Path) -> Path:
    """Writes a data set as array_record files, as if tensorflow-datasets had prepared it.

    Nothing is to be seen at its place before it is whole.

    Args:
      name: a key of `STOCK`.
      train: the training split.
      test: the test split.
      path: the folder that tensorflow-datasets calls `data_dir`.

    Returns:
      The data set's own folder, `path/NAME/VERSION`.

    Raises:
      DataError: if the data set is there already.
    """
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


def download(name: str, path: Path) -> Path:
    """Lets tensorflow-datasets download and prepare a data set; this needs TensorFlow.

    Args:
      name: a key of `STOCK`.
      path: the folder that tensorflow-datasets calls `data_dir`.

    Returns:
      The data set's own folder, `path/NAME/VERSION`.

    Raises:
      DataError: if the data set is there already, TensorFlow is not installed, or the network does
        not answer within `NETWORK_SECONDS`: it says what to fetch by hand and where to put it.
    """
    stock = _stock(name)
    by_hand = (
        f"Download {stock.url} to FOLDER by hand and run "
        f"python -m scripts.prepare_data --name={name} --path={path} --archive=FOLDER"
    )
    if importlib.util.find_spec("tensorflow") is None:
        raise DataError(
            f"TensorFlow, which downloading {name} needs, is not installed. {by_hand}, which does "
            "without, or install the extra: pip install 'bam[prepare]'"
        )
    if not _answers(stock.url):
        raise DataError(f"{stock.url} does not answer. {by_hand}")

    import tensorflow_datasets as tfds

    def make(partial: Path) -> None:
        builder = tfds.builder(stock.folder, data_dir=partial, file_format="array_record")
        builder.download_and_prepare()

    return _in_one_move(path, stock.folder, make)


def _stock(name: str) -> _Stock:
    if name not in STOCK:
        raise DataError(f"source tfds has no data set {name!r}; choose from {', '.join(STOCK)}")
    return STOCK[name]


def _read_split(builder: Any, folder: Path, split: str, num_classes: int) -> Split:
    import tensorflow_datasets as tfds

    where = f"{folder}: {split}"
    if split not in builder.info.splits:
        raise DataError(f"{where}: no such split")
    shape = tuple(builder.info.features["image"].shape)
    try:
        source = builder.as_data_source(split=split, decoders={"image": tfds.decode.SkipDecoding()})
        rows = source.__getitems__(list(range(len(source))))
    # array_record raises what its C++ reader met, as one of several types.
    except Exception as error:
        raise DataError(f"{where}: damaged files: {error}") from error
    # Of a short file the reader returns empty records without a word.
    for number, row in enumerate(rows):
        if row["label"] is None or row["image"] is None:
            raise DataError(f"{where}: damaged files: row {number} is empty")
    labels = np.array([row["label"] for row in rows], np.int64)
    encoded = [row["image"] for row in rows]
    return Split(decode_images(encoded, where, shape), check_labels(labels, num_classes, where))


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
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(file, "PNG")
    return file.getvalue()


def _answers(url: str) -> bool:
    """Whether a server answers in time; a name look-up, which urllib does not time, included."""
    answered = threading.Event()

    def ask() -> None:
        request = urllib.request.Request(url, method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=NETWORK_SECONDS).close()
        except urllib.error.HTTPError as error:
            if error.code >= 500:
                return
        except OSError:
            return
        answered.set()  # a refusal is an answer too

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(NETWORK_SECONDS)
    return answered.is_set()
