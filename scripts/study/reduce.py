"""Maps features linearly to fewer dimensions: principal components of features of drawn images.

python -m scripts.study.reduce --drawn=runs/study/prior_drawn.npy \
  --mapped=runs/study/prior_train.npy --path=runs/study/pca --sizes=1000,2000,4000

A file for each size and each power p: components are divided by λ^(p/2), so 0 leaves them and 1
whitens them.
"""

import numpy as np
from absl import flags
from scipy import linalg

from bam.cli import console
from scripts.study.protocol import joined

_DRAWN = flags.DEFINE_string("drawn", "", "features of drawn images, [n, F]; parts joined by +")
_FEATURES = flags.DEFINE_string("mapped", "", "features to map, [m, F]; parts joined by +")
_PATH = flags.DEFINE_string("path", "", "path for `_SIZE_POWER.npy`")
_ROWS = flags.DEFINE_integer("rows", 20_000, "number of drawn images")
_SIZES = flags.DEFINE_list("sizes", "1000,2000,4000", "numbers of dimensions")
_POWERS = flags.DEFINE_list("powers", "0,0.5,1", "powers of the variances to divide by")


def components(drawn: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, variances and directions `[F, most]`, in falling order of variance."""
    mean = drawn.mean(axis=0)
    drawn = drawn - mean
    few = len(drawn) < drawn.shape[1]  # then the matrix of products of rows is smaller
    square = (drawn @ drawn.T if few else drawn.T @ drawn) / len(drawn)
    values, vectors = linalg.eigh(square, overwrite_a=True, driver="evd")
    values, vectors = values[::-1][:most], vectors[:, ::-1][:, :most]
    if few:
        vectors = drawn.T @ vectors / np.sqrt(len(drawn) * np.maximum(values, 1e-12))
    return mean, values, vectors


def main() -> None:
    """Writes the mapped features."""
    sizes = [int(k) for k in _SIZES.value]
    drawn = joined(_DRAWN.value)[: _ROWS.value].astype(np.float32)
    mean, values, vectors = components(drawn, max(sizes))
    del drawn
    features = joined(_FEATURES.value)
    mapped = np.concatenate(
        [(rows.astype(np.float32) - mean) @ vectors for rows in np.array_split(features, 100)]
    )
    for size in sizes:
        for power in map(float, _POWERS.value):
            scaled = mapped[:, :size] / (values[:size] + values[0] * 1e-4) ** (power / 2)
            np.save(f"{_PATH.value}_{size}_{power:g}.npy", scaled.astype(np.float16))


if __name__ == "__main__":
    console.require("drawn", "mapped", "path")
    console.run(main)
