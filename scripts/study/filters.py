"""The package's features with filters and moments of the eight kinds of drawn images.

python -m scripts.study.filters --drawn=runs/study/drawn --data=FOLDER --out=runs/study/kinds
"""

import functools

import jax
import numpy as np
from absl import flags

from bam.cli import console
from bam.data import datasets
from bam.features import prior
from scripts.prior import RIDGES, directions, whitening

_DRAWN = flags.DEFINE_string("drawn", "", "path without extension of drawn images")
_DATA = flags.DEFINE_string("data", "", "folder with CIFAR-10 in Parquet")
_PATH = flags.DEFINE_string("path", "", "path for `_train.npy`")
_IMAGES = flags.DEFINE_integer("images", 2000, "number of drawn images")
_FILTERS = flags.DEFINE_integer("filters", 800, "directions of each size of patch")


def main() -> None:
    """Writes the features of the training images."""
    images = np.load(f"{_DRAWN.value}_images.npy", mmap_mode="r")[: _IMAGES.value, 4:36, 4:36]
    images, weights = images.astype(np.float32) / 255, {}
    for part, pixels in (("fine", images), ("coarse", prior.halved(images))):
        found = directions(pixels, _FILTERS.value, 15, np.random.default_rng(1))
        weights |= {f"3/{part}/{k}": x for k, x in zip(("mean", "projection"), found, strict=True)}
    for part in prior.PARTS:
        raw = jax.jit(functools.partial(prior.raw, part=part, weights=weights))
        answers = np.concatenate([raw(images[i : i + 250]) for i in range(0, len(images), 250)])
        moments = whitening(answers, RIDGES[part])
        weights |= {f"3/{part}/{k}": x for k, x in zip(("centre", "matrix"), moments, strict=True)}
    features = jax.jit(prior.with_weights(weights))
    data = datasets.load("cifar10", "parquet", _DATA.value).train.images
    chunks = range(0, len(data), 250)
    mapped = [features(data[i : i + 250].astype(np.float32) / 255) for i in chunks]
    mapped = np.concatenate([np.asarray(x, np.float16).reshape(len(x), -1) for x in mapped])
    np.save(f"{_PATH.value}_train.npy", mapped)


if __name__ == "__main__":
    console.require("drawn", "data", "path")
    console.run(main)
