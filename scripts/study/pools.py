"""The learned filters' responses, averaged over a finer grid than the package's quarters.

python -m scripts.study.pools --drawn=runs/study/drawn --data=FOLDER --out=runs/study/pools
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from absl import flags

from bam.cli import console
from bam.data import datasets
from bam.features import prior

_DRAWN = flags.DEFINE_string("drawn", "", "path without extension of drawn images")
_DATA = flags.DEFINE_string("data", "", "folder with CIFAR-10 in Parquet")
_OUT = flags.DEFINE_string("out", "", "path for `_PART_SPLIT.npy`")
_GRIDS = flags.DEFINE_list("grids", "4,3", "places along a side, of fine and coarse")


def main() -> None:
    """Writes the features of each part, for drawn images and for CIFAR-10."""
    weights = safetensors.numpy.load(prior.FILE.read_bytes())
    weights = {k: np.asarray(v, np.float32) for k, v in weights.items()}
    drawn = np.load(f"{_DRAWN.value}_images.npy", mmap_mode="r")[:10_000, 4:36, 4:36]
    images = datasets.load("cifar10", "parquet", _DATA.value).train.images
    for part, grid in zip(("fine", "coarse"), map(int, _GRIDS.value), strict=True):
        mean, projection = (weights[f"3/{part}/{k}"] for k in ("mean", "projection"))
        side = (32 if part == "fine" else 16) - prior.PATCH + 1
        edges = np.round(np.linspace(0, side, grid + 1)).astype(int)
        line = np.zeros((grid, side), np.float32)
        for k in range(grid):
            line[k, edges[k] : edges[k + 1]] = 1 / (edges[k + 1] - edges[k])
        places = jnp.asarray(np.kron(line, line))

        def pool(image, mean=mean, projection=projection, places=places):
            each = jnp.maximum((prior.patches(image) - mean) @ projection - prior.THRESHOLD, 0)
            return places @ each

        @jax.jit
        def raw(batch, part=part, pool=pool):
            pixels = batch.astype(jnp.float32) / 255
            pixels = prior.halved(pixels) if part == "coarse" else pixels
            both = jax.lax.map(lambda x: (pool(x) + pool(x[:, ::-1])) / 2, pixels)
            return jnp.sqrt(both).astype(jnp.float16)

        def mapped(rows, raw=raw):
            return np.concatenate([raw(rows[i : i + 250]) for i in range(0, len(rows), 250)])

        answers = mapped(drawn).astype(np.float32)
        centre, matrix = answers.mean(axis=0), weights[f"3/{part}/matrix"]

        @jax.jit
        def white(rows, centre=centre, matrix=matrix):
            planes = (rows.astype(jnp.float32) - centre) @ matrix
            return jax.nn.standardize(planes.reshape(len(rows), -1)).astype(jnp.float16)

        def whitened(rows, white=white):
            return np.concatenate([white(rows[i : i + 250]) for i in range(0, len(rows), 250)])

        np.save(f"{_OUT.value}_{part}_drawn.npy", whitened(answers))
        np.save(f"{_OUT.value}_{part}_train.npy", whitened(mapped(images)))


if __name__ == "__main__":
    console.require("drawn", "data", "out")
    console.run(main)
