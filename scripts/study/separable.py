"""Fewer dimensions by small matrices: components of places times components of channels.

python -m scripts.study.separable --drawn=runs/study/prior_drawn.npy \
  --features=runs/study/prior_train.npy --path=runs/study/sep

A part's features are `[places, channels]`. Both axes are turned to their principal axes in drawn
images; the coefficients with the largest variances stay, divided by their variance^(p/2).
"""

import numpy as np
from absl import flags

from bam.cli import console

_DRAWN = flags.DEFINE_string("drawn", "", "features of drawn images, [n, F]")
_FEATURES = flags.DEFINE_string("features", "", "features to map, [m, F]")
_PATH = flags.DEFINE_string("path", "", "path for `_SIZE_POWER.npy`")
_SIZES = flags.DEFINE_list("sizes", "1000,2000,4000", "numbers of dimensions")
_POWERS = flags.DEFINE_list("powers", "0.5", "powers of the variances to divide by")
_SHAPES = flags.DEFINE_list("shapes", "4x800,4x800,16x243", "places x channels of each part")


def axes(rows: np.ndarray) -> np.ndarray:
    """Principal axes of rows, `[d, d]`, in falling order."""
    return np.linalg.eigh(rows.T @ rows / len(rows))[1][:, ::-1]


def main() -> None:
    """Writes the mapped features."""
    drawn, features = (np.load(x.value, mmap_mode="r") for x in (_DRAWN, _FEATURES))
    starts, parts, variances = 0, [], []
    for shape in _SHAPES.value:
        places, channels = map(int, shape.split("x"))
        columns = slice(starts, starts := starts + places * channels)
        block = np.asarray(drawn[:, columns], np.float32).reshape(-1, places, channels)
        mean = block.mean(axis=0)
        block = block - mean
        left = axes(block.transpose(0, 2, 1).reshape(-1, places))
        right = axes(block.reshape(-1, channels))
        turned = np.einsum("pq,npc->nqc", left, block @ right)
        parts.append((columns, mean, left, right))
        variances.append(turned.var(axis=0).ravel())
    every = np.concatenate(variances)
    mapped = []
    for rows in np.array_split(np.arange(len(features)), 100):
        each = []
        for columns, mean, left, right in parts:
            block = np.asarray(features[rows, columns], np.float32).reshape(-1, *mean.shape) - mean
            each.append(np.einsum("pq,npc->nqc", left, block @ right).reshape(len(rows), -1))
        mapped.append(np.concatenate(each, axis=1).astype(np.float16))
    whole = np.concatenate(mapped)
    order = np.argsort(-every)
    for size in map(int, _SIZES.value):
        kept = np.sort(order[:size])
        print(size, [int(np.isin(kept, np.arange(p[0].start, p[0].stop)).sum()) for p in parts])
        for power in map(float, _POWERS.value):
            scale = (every[kept] + every.max() * 1e-4) ** (-power / 2)
            np.save(
                f"{_PATH.value}_{size}_{power:g}.npy", (whole[:, kept] * scale).astype(np.float16)
            )


if __name__ == "__main__":
    console.require("drawn", "features", "path")
    console.run(main)
