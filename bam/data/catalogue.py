"""The data sets that have a name here: shapes, classes, constants and sources of their files.

A further data set is a row here, its name in `bam/part_table.py` and a test. Official files in
another format also need a reader in `sources/archives.py`.
"""

from typing import NamedTuple

import numpy as np


class Entry(NamedTuple):
    """Public properties of a data set.

    Attributes:
      sources: names of the sources from which `datasets.load` can read it; without a path, the
        first is read.
      shape: `(height, width, channels)` of an image; zeros for `FOLDER`, whose first image decides.
      num_classes: number of classes; 0 for `FOLDER`, whose files name them.
      mean: one number for each channel, or one for all, as in `datasets.Dataset`.
      std: one number for each channel, or one for all.
      rows: numbers of rows of the official training and test split; zeros without official files.
      tfds: the folder, below `data_dir`, where tensorflow-datasets prepares it.
      test_split: the name that tensorflow-datasets gives to the test split.
      url: address of the official files.
    """

    sources: tuple[str, ...]
    shape: tuple[int, int, int]
    num_classes: int
    mean: tuple[float, ...] | np.ndarray
    std: tuple[float, ...] | np.ndarray
    rows: tuple[int, int] = (0, 0)
    tfds: str = ""
    test_split: str = "test"
    url: str = ""


_FILES = ("tfds", "parquet", "archive")

# Public assumption: the range [0, b] in which each measurement of a cell nucleus is expected, in
# the order of scikit-learn's columns (radius, texture, perimeter, area, smoothness, compactness,
# concavity, concave points, symmetry, fractal dimension). The round numbers follow from the
# features' definitions, not from the data: a radius up to 30 pixels, hence perimeters near 2π·30
# and areas near π·30²; texture is a deviation of grey levels, and the rest are ratios below one.
_MEAN_BOUNDS = (30, 50, 200, 3000, 0.25, 0.5, 0.5, 0.25, 0.5, 0.2)
# A standard error is assumed to stay below a tenth of its measurement's bound ...
_ERROR_BOUNDS = tuple(b / 10 for b in _MEAN_BOUNDS)
# ... and the mean of a picture's three worst nuclei below one and a half times it. These only set
# a scale: a value beyond its bound stays as it is.
_WORST_BOUNDS = tuple(b * 1.5 for b in _MEAN_BOUNDS)
BREAST_CANCER_BOUNDS = np.array(_MEAN_BOUNDS + _ERROR_BOUNDS + _WORST_BOUNDS, np.float32)

# Published constants of the public sets. Those of digits are round numbers, because pen strokes
# cover roughly a third of a digit's box.
DATASETS = {
    "digits": Entry(("sklearn",), (8, 8, 1), 10, (0.3,), (0.4,)),
    # Mean and deviation map each feature's public range to [-2, 2], as for pixels.
    "breast_cancer": Entry(
        ("sklearn",), (1, 1, 30), 2, BREAST_CANCER_BOUNDS * 0.5, BREAST_CANCER_BOUNDS * 0.25,
    ),
    "mnist": Entry(
        _FILES, (28, 28, 1), 10, (0.1307,), (0.3081,), (60_000, 10_000), "mnist",
        url="https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    "cifar10": Entry(
        _FILES, (32, 32, 3), 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616),
        (50_000, 10_000), "cifar10", url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    ),
    "cifar100": Entry(
        _FILES, (32, 32, 3), 100, (0.5074, 0.4867, 0.4411), (0.2011, 0.1987, 0.2025),
        (50_000, 10_000), "cifar100",
        url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    ),
    "imagenet32": Entry(
        _FILES, (32, 32, 3), 1000, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225),
        (1_281_167, 50_000), "imagenet_resized/32x32", "validation",
        "https://image-net.org/download-images.php",
    ),
}  # fmt: skip

# A user's own images. The constants map pixels to [-2, 2] and do not depend on the images.
FOLDER = Entry(("parquet",), (0, 0, 0), 0, (0.5,), (0.25,))
