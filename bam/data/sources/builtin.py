"""Data sets that come inside scikit-learn: nothing to download."""

import numpy as np
from jaxtyping import Float32

from bam.data.common import Split
from bam.extras import needs

# Public assumption: the range [0, b] in which each measurement of a cell nucleus is expected, in
# the order of scikit-learn's columns (radius, texture, perimeter, area, smoothness, compactness,
# concavity, concave points, symmetry, fractal dimension). Round numbers chosen from the features'
# definitions, not from the data: a radius up to 30 pixels, hence perimeters near 2π·30 and areas
# near π·30²; texture is a deviation of grey levels, the rest are ratios below one.
_MEAN_BOUNDS = (30, 50, 200, 3000, 0.25, 0.5, 0.5, 0.25, 0.5, 0.2)
# A standard error is taken to stay below a tenth of its measurement's bound ...
_ERROR_BOUNDS = tuple(b / 10 for b in _MEAN_BOUNDS)
# ... and the mean of a picture's three worst nuclei below one and a half times it. These only set
# a scale: a value beyond its bound stays as it is.
_WORST_BOUNDS = tuple(b * 1.5 for b in _MEAN_BOUNDS)
BREAST_CANCER_BOUNDS = np.array(_MEAN_BOUNDS + _ERROR_BOUNDS + _WORST_BOUNDS, np.float32)


def digits() -> tuple[Split, Split]:
    """Handwritten digits, 8×8 grey, 10 classes: 1437 to train, 360 to test."""
    with needs("train"):
        from sklearn import datasets

    pixels, labels = datasets.load_digits(return_X_y=True)
    images = np.round(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    return _split(images, labels.astype(np.int32), 360)


def breast_cancer() -> tuple[Split, Split]:
    """Wisconsin diagnostic breast cancer, 2 classes: 455 to train, 114 to test.

    Features are in their own units, float32 `[N, 1, 1, 30]`; `breast_cancer_scale` normalises them.
    """
    with needs("train"):
        from sklearn import datasets

    features, labels = datasets.load_breast_cancer(return_X_y=True)
    images = features.astype(np.float32).reshape(-1, 1, 1, features.shape[1])
    return _split(images, labels.astype(np.int32), 114)


def breast_cancer_scale() -> tuple[Float32[np.ndarray, " 30"], Float32[np.ndarray, " 30"]]:
    """Mean and deviation that map each feature's public range to [-2, 2], as for pixels."""
    return BREAST_CANCER_BOUNDS * 0.5, BREAST_CANCER_BOUNDS * 0.25


def _split(images: np.ndarray, labels: np.ndarray, num_test: int) -> tuple[Split, Split]:
    """Training and test split with equal class shares, the same for every seed of every run."""
    with needs("train"):
        from sklearn import model_selection

    train_images, test_images, train_labels, test_labels = model_selection.train_test_split(
        images, labels, test_size=num_test, random_state=0, stratify=labels
    )
    return Split(train_images, train_labels), Split(test_images, test_labels)


SPLITS = {"digits": digits, "breast_cancer": breast_cancer}
