"""Data sets in memory: one function for every name and source."""

import hashlib
import importlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Integer, Num

from bam import files
from bam.data.catalogue import DATASETS, FOLDER
from bam.data.common import DataError, Split, Stays, in_memory
from bam.data.preprocessing import Target
from bam.data.stream import StoredImages, content, select
from bam.errors import InputError
from bam.files import JsonObject

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
      name: as given to `load`, or the folder's name for a user's own set.
      train: the private split; its images may stay in their files (`stream.StoredImages`).
      test: the held-out split, used for reporting only.
      num_classes: number of classes, or for other labels the number of outputs of a network.
      mean: `[channels]`, of pixel values scaled to [0, 1], or of float features as they are. It is
        public: a published statistic of a well-known set or a round number, never computed from
        the files that are read. ε does not cover what a published one reveals about its data.
      std: `[channels]`, as the mean.
      users: `[N]`, the user id of each training row, or None. See `bam.data.users`.
      classes: names of the classes, or of several labels, in the order of the labels; () if
      unknown.
      preprocessing: a `bam.data.preprocessing.Preprocessing` as JSON, or None.
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


def in_units(dataset: Dataset, numbers: np.ndarray) -> np.ndarray:
    """Numbers (outputs or labels) in the units of the files, with the target's scale undone."""
    target = (getattr(dataset, "preprocessing", None) or {}).get("target")
    return Target(*target).in_units(numbers) if target else numbers


def load(
    name: str,
    source: str | None = None,
    path: str | os.PathLike[str] | None = None,
    num_classes: int = 0,
    stays: Stays = in_memory,
) -> Dataset:
    """Loads a data set by name from one of its sources. It never downloads anything.

    For your own images use the name "folder" and the source "parquet". The first image decides size
    and channels, and every channel is normalised with a mean of 0.5 and a deviation of 0.25.

    Args:
      name: "digits", "breast_cancer", "mnist", "cifar10", "cifar100", "imagenet32" or "folder".
      source: "sklearn" for the first two, which come with scikit-learn. "tfds" for array_record
        files of tensorflow-datasets, the default of the others. "parquet" for a folder with
        `train.parquet` and `test.parquet`, the default of "folder". "archive" for the official
        files as downloaded, see `archives.read`. None or "" takes the default.
      path: the folder (or archive) to read. With source "tfds", None or "" takes the environment
        variable TFDS_DATA_DIR, or else `~/tensorflow_datasets`.
      num_classes: of a "folder" whose files do not name the classes, see `parquet.read`; 0 takes
        the named or known number.
      stays: `bytes of the decoded training images -> whether images stay in their files`, for the
        sources "parquet" and "tfds" (`bam.data.stream`).

    Raises:
      DataError: a `ValueError`, for an unknown name or source; for files that are missing, damaged
        or of another data set, naming file and row; for a number of classes that is missing or
        wrong.

    Examples:
      >>> load("digits").train.images.shape
      (1437, 8, 8, 1)
    """
    facts = FOLDER if name == "folder" else DATASETS.get(name)
    if facts is None:
        raise DataError(f"unknown data set {name!r}; choose from {', '.join(DATASETS)}, folder")
    source = source or facts.sources[0]
    if source not in facts.sources:
        raise DataError(f"no source {source!r} of {name}; choose from {', '.join(facts.sources)}")
    where = folder_of(name, source, path)
    if source != "sklearn" and where is None:
        hint = ": the folder that `bam data import` wrote" if name == "folder" else ""
        raise DataError(f"{name} from source {source} needs --config.dataset.path{hint}")
    if facts.num_classes and num_classes not in (0, facts.num_classes):
        raise DataError(
            f"{name} has {facts.num_classes} classes, dataset.num_classes says {num_classes}"
        )
    if num_classes < 0:
        raise DataError(f"dataset.num_classes must be at least 0, got {num_classes}")
    where, num_classes = where or Path(), facts.num_classes or num_classes
    shape = None if facts is FOLDER else facts.shape
    described: tuple[tuple[str, ...], JsonObject | None] = ((), None)

    files_of = reader(source)
    if source == "sklearn":
        train, test = files_of.SPLITS[name]()
    elif source == "archive":
        train, test = files_of.read(name, where)
    elif source == "tfds":
        train, test = files_of.read(name, where, stays)
    else:
        train, test, num_classes = files_of.read(where, shape, num_classes, stays)
        described = files_of.described(where)
    for split, images in (("train", train.images), ("test", test.images)):
        if shape and images.shape[1:] != shape:
            raise DataError(
                f"{where}: {split} images are {images.shape[1:]}, those of {name} {shape}"
            )
    mean, std = (np.full(train.images.shape[-1], x, np.float32) for x in facts[3:5])
    name = where.resolve().name if facts is FOLDER else name
    return Dataset(name, train, test, num_classes, mean, std, None, *described)


def reader(source: str) -> Any:
    """The module that reads a source. It is imported here, because each needs other packages."""
    return importlib.import_module(f"bam.data.sources.{READERS[source]}")


def folder_of(
    name: str, source: str | None = None, path: str | os.PathLike[str] | None = None
) -> Path | None:
    """The folder or archive that `load` reads for these arguments; None without files or path."""
    source = source or DATASETS.get(name, FOLDER).sources[0]
    if source == "tfds" and not path:
        path = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return files.user_path(path) if path and source != "sklearn" else None


def fingerprint(key: bytes, *splits: Split) -> str:
    """Keyed BLAKE2 of the splits' bytes. Without the key, it confirms no guess at a row."""
    mac = hashlib.blake2b(key=key, digest_size=16)
    for array in itertools.chain(*splits):
        mac.update(content(array))
    return mac.hexdigest()


def streams(dataset: Dataset) -> bool:
    """Whether the training images stay in their files."""
    return isinstance(dataset.train.images, StoredImages)


def padded(split: Split, num_rows: int) -> Split:
    """The split with blank rows at its end, `num_rows` in all, which hide how many it had."""
    missing = num_rows - len(split.labels)
    if not missing:
        return split
    return Split(*(np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for x in split))


def stand_in(name: str, size: int = 0) -> Dataset:
    """A data set of blank images, with the number and shape of the named one, without memory.

    With a size, images are squares with so many pixels a side, and streamed. It serves where only
    sizes matter, such as the compilation of a step. DataError for a data set of unknown size.
    """
    facts = DATASETS.get(name, FOLDER)
    if not any(facts.rows):
        known = ", ".join(known for known, facts in DATASETS.items() if any(facts.rows))
        raise DataError(f"the size of {name!r} is not known; those of {known} are")
    shape = (size, size, facts.shape[-1])
    train, test = (
        Split(
            StoredImages(lambda row: None, shape, np.arange(number), str, bytes)
            if size
            else np.broadcast_to(np.zeros((), np.uint8), (number, *facts.shape)),
            np.broadcast_to(np.zeros((), np.int32), (number,)),
        )
        for number in facts.rows
    )
    mean, std = (np.asarray(x, np.float32) for x in (facts.mean, facts.std))
    return Dataset(name, train, test, facts.num_classes, mean, std)


def normalize(
    dataset: Dataset, images: Num[np.ndarray | Array, "*batch h w c"]
) -> Float32[np.ndarray | Array, "*batch h w c"]:
    """`(x / 255 - mean) / std` of uint8 pixels, `(x - mean) / std` of float features; float32."""
    return _normalized(images, dataset.mean, dataset.std)


def _normalized(images: Any, mean: Any, std: Any) -> Any:
    scale = 255 if images.dtype == np.uint8 else 1
    return (images.astype(np.float32) / scale - mean) / std


class Preparation(NamedTuple):
    """The inputs that a network gets: normalised images, scaled to L2 norm at most b.

    Attributes:
      mean, std: one number for each channel, as in a `Dataset`.
      input_clip_norm: b; 0 means no scaling.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    input_clip_norm: float = 0.0

    def __call__(self, images: Num[np.ndarray | Array, "*b h w c"]) -> Float[Array, "*b h w c"]:
        """The inputs of images."""
        mean, std = (np.array(x, np.float32) for x in (self.mean, self.std))
        inputs = jnp.asarray(_normalized(images, mean, std))
        if self.input_clip_norm == 0:
            return inputs
        norm = jnp.sqrt(jnp.sum(jnp.square(inputs), axis=(-3, -2, -1), keepdims=True))
        return inputs / jnp.maximum(1.0, norm / self.input_clip_norm)


def preparation(dataset: Dataset, input_clip_norm: float = 0.0) -> Preparation:
    """The preparation of a data set's images."""
    mean, std = (tuple(np.ravel(x).tolist()) for x in (dataset.mean, dataset.std))
    return Preparation(mean, std, input_clip_norm)


def prepare(
    dataset: Dataset, images: Num[np.ndarray | Array, "*b h w c"], input_clip_norm: float = 0.0
) -> Float[Array, "*b h w c"]:
    """The inputs that a network gets from a data set's images, see `Preparation`."""
    return preparation(dataset, input_clip_norm)(images)


def check(
    dataset: Dataset,
    check_labels: Callable[[np.ndarray, int], str] = lambda labels, num_classes: "",
) -> None:
    """DataError for data that cannot be trained on; a class may be empty.

    `check_labels` returns what is wrong with labels, or "", as a `bam.models.losses.Loss` does.
    """
    for name, (images, labels) in (("training", dataset.train), ("test", dataset.test)):
        if not (hasattr(images, "dtype") and hasattr(labels, "dtype")):
            raise DataError(f"{name} images and labels must be arrays")
        if len(images) != len(labels):
            raise DataError(f"{len(images)} {name} images but {len(labels)} labels")
        if len(labels) == 0:
            raise DataError(f"there are no {name} examples")
        if images.ndim != 4 or images.shape[1:] != dataset.train.images.shape[1:]:
            raise DataError(
                f"{name} images of shape {images.shape}; expected [N, height, width, channels], "
                "one size for all"
            )
        if wrong := check_labels(np.asarray(labels), dataset.num_classes):
            raise DataError(f"{name} {wrong}")
    ids = getattr(dataset, "users", None)
    rows = dataset.train.labels.shape[:1]
    if ids is not None and not (
        np.shape(ids) == rows and np.issubdtype(np.asarray(ids).dtype, np.integer)
    ):
        raise DataError(
            f"ids of users of {np.asarray(ids).dtype} and shape {np.shape(ids)}; expected an "
            f"integer for each of the {rows[0]} training examples"
        )
    channels = dataset.train.images.shape[-1:]
    if not np.shape(dataset.mean) == np.shape(dataset.std) == channels:
        raise DataError(
            f"mean of shape {np.shape(dataset.mean)} and std of shape {np.shape(dataset.std)}; "
            f"expected {channels}, a number for each channel"
        )
    if not (np.isfinite([dataset.mean, dataset.std]).all() and np.all(dataset.std > 0)):
        raise DataError(
            f"mean {dataset.mean} and std {dataset.std}: both must be finite, and std above 0"
        )


def hold_out(dataset: Dataset, num_examples: int, of: Split | None = None) -> Dataset:
    """Sets `num_examples` training examples with the smallest hashes aside, as the test split.

    Adding one example to `dataset` adds exactly one example to `train`; `test` keeps its size, with
    at most one example exchanged. So the guarantee for adding or removing an example of `train`
    holds for `dataset`, too. The reason: a hash depends only on the example's image and label, not
    on its place or a seed. Equal examples have equal hashes and stay together, unless theirs is the
    last hash that is set aside.

    It serves to choose hyper-parameters without the test split. A choice on held-out examples
    reveals something about them, which no ε here covers. If `of` is given, its examples are hashed
    in place of `dataset.train`, for example the images from which the data set's features were
    computed. InputError if no training example would remain.
    """
    total = len(dataset.train.labels)
    if num_examples == 0:
        return dataset
    if not 0 < num_examples < total:
        raise InputError(f"dataset.holdout must be from 0 to {total - 1}, got {num_examples}")
    aside = np.zeros(total, bool)
    aside[np.argsort(image_hashes(of or dataset.train), kind="stable")[:num_examples]] = True
    train, test = (Split(*(select(x, rows) for x in dataset.train)) for rows in (~aside, aside))
    return dataset._replace(train=train, test=test)


def image_hashes(split: Split) -> np.ndarray:
    """A 64-bit hash of each example, which depends only on the example."""
    labels = np.asarray(split.labels)
    labels = labels.reshape(len(labels), -1).astype(
        ">f8" if np.issubdtype(labels.dtype, np.floating) else ">i8"
    )
    digests = []
    for image, label in zip(split.images, labels, strict=True):
        first, others = label.tobytes()[:8], label.tobytes()[8:]
        data = image.tobytes() + others
        digests.append(
            hashlib.blake2b(data, digest_size=8, key=b"bam hold_out", salt=first).digest()
        )
    return np.frombuffer(b"".join(digests), ">u8")
