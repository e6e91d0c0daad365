"""Data sets as uint8 arrays in memory."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float32, Int32, UInt8


class Split(NamedTuple):
    """Images and labels of one split.

    Attributes:
      images: `[N, height, width, channels]` uint8.
      labels: `[N]` int32, from 0.
    """

    images: UInt8[np.ndarray | Array, "n h w c"]
    labels: Int32[np.ndarray | Array, " n"]


class Dataset(NamedTuple):
    """A data set and the public constants that normalise it.

    Attributes:
      name: as given to `load`.
      train: the private split.
      test: the held-out split, used for reporting only.
      num_classes: number of classes.
      mean: `[channels]`, of pixel values scaled to [0, 1]. Public, never computed from `train`.
      std: `[channels]`, likewise.
    """

    name: str
    train: Split
    test: Split
    num_classes: int
    mean: Float32[np.ndarray, " c"]
    std: Float32[np.ndarray, " c"]


def load(name: str) -> Dataset:
    """Loads a data set by name.

    Args:
      name: "digits": scikit-learn's 8×8 handwritten digits, 1437 to train and 360 to test.

    Returns:
      A `Dataset`.

    Raises:
      ValueError: for an unknown name.
    """
    if name != "digits":
        raise ValueError(f"unknown data set {name!r}; choose from digits")
    return _digits()


def _digits() -> Dataset:
    from sklearn import datasets, model_selection

    pixels, labels = datasets.load_digits(return_X_y=True)
    images = np.round(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    labels = labels.astype(np.int32)
    # A fixed split, the same for every seed of every run, with equal class shares.
    train_images, test_images, train_labels, test_labels = model_selection.train_test_split(
        images, labels, test_size=360, random_state=0, stratify=labels
    )
    # Round public constants: pen strokes cover roughly a third of a digit's box.
    return Dataset(
        "digits",
        Split(train_images, train_labels),
        Split(test_images, test_labels),
        num_classes=10,
        mean=np.array([0.3], np.float32),
        std=np.array([0.4], np.float32),
    )
