"""Data sets that come with scikit-learn, without any download."""

import numpy as np

from bam.data.common import Split
from bam.extras import needs


def digits() -> tuple[Split, Split]:
    """Handwritten digits, 8×8 grey, 10 classes: 1437 for training, 360 for test."""
    with needs("train"):
        from sklearn import datasets

    pixels, labels = datasets.load_digits(return_X_y=True)
    images = np.round(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    return _split(images, labels.astype(np.int32), 360)


def breast_cancer() -> tuple[Split, Split]:
    """Wisconsin diagnostic breast cancer, 2 classes: 455 for training, 114 for test.

    Features keep their units, float32 `[N, 1, 1, 30]`; see `catalogue.BREAST_CANCER_BOUNDS`.
    """
    with needs("train"):
        from sklearn import datasets

    features, labels = datasets.load_breast_cancer(return_X_y=True)
    images = features.astype(np.float32).reshape(-1, 1, 1, features.shape[1])
    return _split(images, labels.astype(np.int32), 114)


def _split(images: np.ndarray, labels: np.ndarray, num_test: int) -> tuple[Split, Split]:
    """Training and test split with equal shares of classes, the same for all runs and seeds."""
    with needs("train"):
        from sklearn import model_selection

    train_images, test_images, train_labels, test_labels = model_selection.train_test_split(
        images, labels, test_size=num_test, random_state=0, stratify=labels
    )
    return Split(train_images, train_labels), Split(test_images, test_labels)


SPLITS = {"digits": digits, "breast_cancer": breast_cancer}
