"""Data sets by name and source: loading, normalisation, checks and a held-out split."""

import hashlib
import importlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Integer, Num

from bam import files
from bam.data import recognition
from bam.data.catalogue import DATASETS, FOLDER, Entry
from bam.data.common import DataError, Split, Stays, in_memory
from bam.data.preprocessing import Target
from bam.data.stream import StoredImages, content, select
from bam.errors import InputError
from bam.files import JsonObject
from bam.text import choose

__all__ = [
    "DATASETS", "DataError", "Dataset", "Split", "check", "fingerprint", "hold_out", "load",
    "normalize", "prepare", "stand_in",
]  # fmt: skip


# Source -> module of `bam.data.sources`.
READERS = {
    "sklearn": "builtin", "tfds": "prepared", "parquet": "parquet", "archive": "archives",
}  # fmt: skip


class Dataset(NamedTuple):
    """A data set and the public constants that normalise it.

    Attributes:
      name: the name for `load`, or for your own images the name of their folder.
      train: the private split; its images may stay in their files (`stream.StoredImages`).
      test: the held-out split, used for reporting only.
      num_classes: number of classes, or for other labels the number of outputs of a network.
      mean: `[channels]`, for pixel values scaled to [0, 1], or for float features unchanged. It is
        public: a published statistic of a well-known set or a round number, never computed from
        the files that are read. ε does not cover the information in a published statistic.
      std: `[channels]`, as the mean.
      users: `[N]`, the user id of each training row, or None. See `bam.data.users`.
      classes: names of the classes, or of several labels, in the order of the labels; () if they
        are unknown.
      preprocessing: a `bam.data.preprocessing.Preprocessing` as JSON, or None.
      test_users: `[M]`, the user id of each test row, or None. Intervals of test figures then draw
        users.
      mapped_from: shape and dtype of an image from which a feature map made those here; None
        without such a map.
    """

    name: str
    train: Split
    test: Split
    num_classes: int
    mean: Float32[np.ndarray, " c"]
    std: Float32[np.ndarray, " c"]
    users: Integer[np.ndarray, " n"] | None = None
    classes: tuple[str, ...] = ()
    preprocessing: JsonObject | None = None
    test_users: Integer[np.ndarray, " m"] | None = None
    mapped_from: jax.ShapeDtypeStruct | None = None


def in_units(dataset: Dataset, numbers: np.ndarray) -> np.ndarray:
    """Outputs or labels in the units of the files, without the offset and scale of the target."""
    target = (getattr(dataset, "preprocessing", None) or {}).get("target")
    return Target(*target).in_units(numbers) if target else numbers


def load(
    name: str,
    source: str | None = None,
    path: str | os.PathLike[str] | None = None,
    num_classes: int = 0,
    stays: Stays = in_memory,
) -> Dataset:
    """Loads a data set by name from one of its sources.

    It never downloads. For your own images use the name "folder" and the source "parquet". The
    first image decides size and channels, and every channel is normalised with a mean of 0.5 and a
    deviation of 0.25.

    Args:
      name: "digits", "breast_cancer", "mnist", "cifar10", "cifar100", "imagenet32" or "folder".
      source: "sklearn" for the first two, which come with scikit-learn. "tfds" for array_record
        files of tensorflow-datasets. "parquet" for a folder with `train.parquet` and
        `test.parquet`. "archive" for the official files as downloaded, see `archives.read`. None or
        "" takes the one whose files lie at `path`.
      path: the folder (or archive) to read. Without it, tensorflow-datasets' own folder is read:
        that of the environment variable TFDS_DATA_DIR, or else `~/tensorflow_datasets`.
      num_classes: number of classes for a "folder" whose files do not name the classes, see
        `parquet.read`; 0 takes the number in the files or in the catalogue.
      stays: `bytes of the decoded training images -> whether images stay in their files`, for the
        sources "parquet" and "tfds" (`bam.data.stream`).

    Raises:
      DataError: a `ValueError`, for an unknown name or source; for a path without files, or with
        those of two sources if none is named; for files that are missing, damaged or of another
        data set, with file and row; for a missing or wrong number of classes.

    Examples:
      >>> load("digits").train.images.shape
      (1437, 8, 8, 1)
    """
    entry = entry_of(name)
    if source and source not in entry.sources:
        raise DataError(f"{name} has no source {source!r}{choose(source, entry.sources)}")
    source = source_of(name, source, path)
    location = folder_of(name, source, path)
    if source != "sklearn" and location is None:
        hint = ": the folder that `bam data import` wrote" if name == "folder" else ""
        raise DataError(f"{name} from source {source} needs --config.dataset.path{hint}")
    if path and location:
        recognition.check_source(name, source, location)
    if entry.num_classes and num_classes not in (0, entry.num_classes):
        raise DataError(
            f"{name} has {entry.num_classes} classes, not {num_classes}: leave out "
            "--config.dataset.num_classes"
        )
    if num_classes < 0:
        raise DataError(f"--config.dataset.num_classes must be at least 0, got {num_classes}")
    location, num_classes = location or Path(), entry.num_classes or num_classes
    shape = None if entry is FOLDER else entry.shape
    described: tuple[tuple[str, ...], JsonObject | None] = ((), None)

    files_of = reader(source)
    if source == "sklearn":
        train, test = files_of.SPLITS[name]()
    elif source == "archive":
        train, test = files_of.read(name, location)
    elif source == "tfds":
        train, test = files_of.read(name, location, stays)
    else:
        train, test, num_classes = files_of.read(location, shape, num_classes, stays)
        described = files_of.describe(location)
    for split, images in (("train", train.images), ("test", test.images)):
        if shape and images.shape[1:] != shape:
            raise DataError(
                f"{location}: {split} images have shape {images.shape[1:]}, but {name} has {shape}"
            )
    mean, std = (np.full(train.images.shape[-1], x, np.float32) for x in entry[3:5])
    name = location.resolve().name if entry is FOLDER else name
    return Dataset(name, train, test, num_classes, mean, std, None, *described)


def reader(source: str) -> Any:
    """The module that reads a source, imported late because each needs other packages."""
    return importlib.import_module(f"bam.data.sources.{READERS[source]}")


def entry_of(name: str) -> Entry:
    """Returns the public properties of a data set.

    Raises DataError for an unknown name.
    """
    if name != "folder" and name not in DATASETS:
        raise DataError(f"unknown data set {name!r}{choose(name, [*DATASETS, 'folder'])}")
    return DATASETS.get(name, FOLDER)


def source_of(
    name: str, source: str | None = None, path: str | os.PathLike[str] | None = None
) -> str:
    """Returns the source that `load` reads for these arguments.

    Without a source, it is the one whose files lie at the path. DataError for an unknown name, and
    as `recognition.source_of`.
    """
    first = entry_of(name).sources[0]
    if source or not path or first == "sklearn":
        return source or first
    return recognition.source_of(name, files.user_path(path))


def folder_of(
    name: str, source: str | None = None, path: str | os.PathLike[str] | None = None
) -> Path | None:
    """Returns the folder or archive that `load` reads for these arguments, or None."""
    first = DATASETS.get(name, FOLDER).sources[0]
    if (source or first) == "tfds" and not path:
        path = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return files.user_path(path) if path and (source or first) != "sklearn" else None


def fingerprint(key: bytes, *splits: Split) -> str:
    """Keyed BLAKE2 of the splits' bytes. Only a holder of the key can use it to confirm a guess."""
    mac = hashlib.blake2b(key=key, digest_size=16)
    for array in itertools.chain(*splits):
        mac.update(content(array))
    return mac.hexdigest()


def streams(dataset: Dataset) -> bool:
    """Whether the training images stay in their files."""
    return isinstance(dataset.train.images, StoredImages)


def pad_split(split: Split, num_rows: int) -> Split:
    """Adds blank rows to a split, up to `num_rows` in all, which hide its number of rows."""
    missing = num_rows - len(split.labels)
    if not missing:
        return split
    return Split(*(np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for x in split))


def stand_in(name: str, size: int = 0) -> Dataset:
    """Blank images with the number and shape of those of a data set, which take no memory.

    If `size` is not 0, images are streamed squares with `size` pixels a side. It serves where only
    shapes matter, such as the compilation of a step. DataError for a data set of unknown size.
    """
    entry = DATASETS.get(name, FOLDER)
    if not any(entry.rows):
        names = ", ".join(key for key, value in DATASETS.items() if any(value.rows))
        raise DataError(f"the size of {name!r} is unknown; choose from {names}")
    shape = (size, size, entry.shape[-1])
    train, test = (
        Split(
            StoredImages(lambda row: None, shape, np.arange(number), str, bytes)
            if size
            else np.broadcast_to(np.zeros((), np.uint8), (number, *entry.shape)),
            np.broadcast_to(np.zeros((), np.int32), (number,)),
        )
        for number in entry.rows
    )
    mean, std = (np.asarray(x, np.float32) for x in (entry.mean, entry.std))
    return Dataset(name, train, test, entry.num_classes, mean, std)


def normalize(
    dataset: Dataset, images: Num[np.ndarray | Array, "*batch h w c"]
) -> Float32[np.ndarray | Array, "*batch h w c"]:
    """Returns normalised images, float32.

    `(x / 255 - mean) / std` for uint8 pixels, `(x - mean) / std` for float features.
    """
    return _normalize(images, dataset.mean, dataset.std)


def _normalize(images: Any, mean: Any, std: Any) -> Any:
    scale = 255 if images.dtype == np.uint8 else 1
    return (images.astype(np.float32) / scale - mean) / std


class Preparation(NamedTuple):
    """A map from images to the inputs of a network: normalised, then scaled to L2 norm at most b.

    Attributes:
      mean, std: one number for each channel, as in a `Dataset`.
      input_clip_norm: b; with 0 inputs are not scaled.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    input_clip_norm: float = 0.0

    def __call__(self, images: Num[np.ndarray | Array, "*b h w c"]) -> Float[Array, "*b h w c"]:
        """The inputs of images."""
        mean, std = (np.array(x, np.float32) for x in (self.mean, self.std))
        inputs = jnp.asarray(_normalize(images, mean, std))
        if self.input_clip_norm == 0:
            return inputs
        norm = jnp.sqrt(jnp.sum(jnp.square(inputs), axis=(-3, -2, -1), keepdims=True))
        return inputs / jnp.maximum(1.0, norm / self.input_clip_norm)


def preparation(dataset: Dataset, input_clip_norm: float = 0.0) -> Preparation:
    """The `Preparation` of a data set's images."""
    mean, std = (tuple(np.ravel(x).tolist()) for x in (dataset.mean, dataset.std))
    return Preparation(mean, std, input_clip_norm)


def prepare(
    dataset: Dataset, images: Num[np.ndarray | Array, "*b h w c"], input_clip_norm: float = 0.0
) -> Float[Array, "*b h w c"]:
    """The inputs of a network for images of a data set, see `Preparation`."""
    return preparation(dataset, input_clip_norm)(images)


def check(
    dataset: Dataset,
    check_labels: Callable[[np.ndarray, int], str] = lambda labels, num_classes: "",
) -> None:
    """Checks data for training, where a class may be empty.

    DataError for data that training cannot use. `check_labels` returns the error of labels, or "",
    as `bam.models.losses.Loss.check` does.
    """
    for name, (images, labels) in (("training", dataset.train), ("test", dataset.test)):
        if not (hasattr(images, "dtype") and hasattr(labels, "dtype")):
            raise DataError(f"{name} images and labels must be arrays")
        if len(images) != len(labels):
            raise DataError(f"{len(images)} {name} images but {len(labels)} labels")
        if len(labels) == 0:
            raise DataError(f"the {name} split is empty")
        if images.ndim != 4 or images.shape[1:] != dataset.train.images.shape[1:]:
            raise DataError(
                f"{name} images have shape {images.shape}; expected [N, height, width, channels], "
                "one size for all"
            )
        if fault := check_labels(np.asarray(labels), dataset.num_classes):
            raise DataError(f"{name} {fault}")
    for key, split in (("users", dataset.train), ("test_users", dataset.test)):
        ids, rows = getattr(dataset, key, None), split.labels.shape[:1]
        if ids is not None and not (
            np.shape(ids) == rows and np.issubdtype(np.asarray(ids).dtype, np.integer)
        ):
            raise DataError(
                f"user ids have type {np.asarray(ids).dtype} and shape {np.shape(ids)}; expected "
                f"{rows[0]} integers, one for each {'training' if key == 'users' else 'test'} "
                "example"
            )
    channels = dataset.train.images.shape[-1:]
    if not np.shape(dataset.mean) == np.shape(dataset.std) == channels:
        raise DataError(
            f"mean and std have shapes {np.shape(dataset.mean)} and {np.shape(dataset.std)}; "
            f"expected {channels}, a number for each channel"
        )
    if not (np.isfinite([dataset.mean, dataset.std]).all() and np.all(dataset.std > 0)):
        raise DataError(
            f"mean and std must be finite, and std above 0, got {dataset.mean} and {dataset.std}"
        )


def hold_out(dataset: Dataset, num_examples: int, of: Split | None = None) -> Dataset:
    """Moves the `num_examples` training examples with the smallest hashes to the test split.

    Adding one example to `dataset` adds exactly one example to `train`; `test` keeps its size, with
    at most one example exchanged. So the guarantee for adding or removing an example of `train`
    holds for `dataset`, too. The reason: a hash depends only on the example's image and label, not
    on its place or a seed. Equal examples have equal hashes and stay together, unless theirs is the
    last hash that is held out.

    The split serves to choose hyper-parameters without the test split, which is dropped. Such a
    choice reveals information about the held-out examples, and no ε here covers it. With `of`, its
    examples are hashed in place of `dataset.train`: for features, the images that they were
    computed from. InputError if no training example would remain.
    """
    total = len(dataset.train.labels)
    if num_examples == 0:
        return dataset
    if not 0 < num_examples < total:
        raise InputError(
            f"--config.dataset.holdout must be from 0 to {total - 1}, got {num_examples}"
        )
    is_held_out = np.zeros(total, bool)
    is_held_out[np.argsort(image_hashes(of or dataset.train), kind="stable")[:num_examples]] = True
    parts = (~is_held_out, is_held_out)
    train, test = (Split(*(select(x, rows) for x in dataset.train)) for rows in parts)
    split = dataset._replace(train=train, test=test)
    # A tuple of the user's own may lack the field.
    return split._replace(test_users=None) if hasattr(split, "test_users") else split


def image_hashes(split: Split) -> np.ndarray:
    """A 64-bit hash of each example, which depends only on the example."""
    labels = np.asarray(split.labels)
    labels = labels.reshape(len(labels), -1).astype(
        ">f8" if np.issubdtype(labels.dtype, np.floating) else ">i8"
    )
    digests = []
    for image, label in zip(split.images, labels, strict=True):
        first, rest = label.tobytes()[:8], label.tobytes()[8:]
        data = image.tobytes() + rest
        digests.append(
            hashlib.blake2b(data, digest_size=8, key=b"bam hold_out", salt=first).digest()
        )
    return np.frombuffer(b"".join(digests), ">u8")
