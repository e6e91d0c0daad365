r"""Makes the weights of `features.name=prior` from drawn images alone.

python -m scripts.prior --out=bam/features/prior.safetensors

It draws 2,000 images of dead leaves, in colour and in grey. For each size of patch it whitens
240,000 patches and finds directions by spherical k-means; for each part it computes the moments
that whiten its responses. It takes minutes on two cores. The file's metadata have its command, and
`bam/features/prior.py` has its SHA-256. On another processor sums may differ in the last bits, and
so may the file.
"""

import functools
import hashlib
from pathlib import Path

import jax
import numpy as np
import safetensors.numpy
from absl import flags
from jaxtyping import Float

from bam import files, provenance
from bam.cli import console
from bam.features.dead_leaves import dead_leaves
from bam.features.prior import PARTS, PATCH, halved, normalised, raw
from bam.features.scattering import inverse_root

EACH = 120  # patches of an image
RIDGES = {"fine": 0.3, "coarse": 0.3, "scattering": 1.0}


def make(
    num_images: int, filters: int, rounds: int = 15, seed: int = 0
) -> dict[str, Float[np.ndarray, "..."]]:
    """Weights by name, float16: the same bits for the same arguments on one machine."""
    rng = np.random.default_rng(seed)
    colour = np.stack([dead_leaves(rng) for _ in range(num_images)])
    weights: dict[str, np.ndarray] = {}
    for images in (colour.mean(axis=-1, keepdims=True), colour):
        channels = images.shape[-1]
        for part, pixels in (("fine", images), ("coarse", halved(images))):
            mean, projection = directions(pixels, filters, rounds, np.random.default_rng(seed + 1))
            weights |= {
                f"{channels}/{part}/mean": mean,
                f"{channels}/{part}/projection": projection,
            }
        for part in PARTS:
            answers = np.asarray(
                jax.jit(functools.partial(raw, part=part, weights=weights))(images)
            )
            weights[f"{channels}/{part}/centre"], weights[f"{channels}/{part}/matrix"] = whitening(
                answers, RIDGES[part]
            )
    return {name: np.asarray(value, np.float16) for name, value in weights.items()}


def directions(
    images: Float[np.ndarray, "n s s c"], filters: int, rounds: int, rng: np.random.Generator
) -> tuple[Float[np.ndarray, " p"], Float[np.ndarray, "p filters"]]:
    """Mean of patches, and the matrix that whitens a patch and projects it to k-means' directions.

    k-means is spherical, and a patch counts by its length along its direction. It is written here
    because scikit-learn's threads add in varying order, so its last bits vary.
    """
    places = rng.integers(0, images.shape[1] - PATCH + 1, (EACH, 2))
    rows = np.concatenate(
        [images[:, i : i + PATCH, j : j + PATCH].reshape(len(images), -1) for i, j in places]
    )
    rows = normalised(rows, np.sqrt)
    mean = rows.mean(axis=0)
    whiten = inverse_root(np.cov(rows, rowvar=False), 0.1).astype(np.float32)
    white = (rows - mean) @ whiten
    axes = rng.normal(size=(white.shape[1], filters)).astype(np.float32)
    for _ in range(rounds):
        axes /= np.linalg.norm(axes, axis=0)
        scores = white @ axes
        best = scores.argmax(axis=1)
        weighted = scores[np.arange(len(white)), best, None] * white
        order = best.argsort(kind="stable")
        starts = np.searchsorted(best[order], np.arange(filters))
        sums = np.add.reduceat(weighted[order], np.minimum(starts, len(white) - 1), axis=0)
        empty = np.bincount(best, minlength=filters) == 0
        sums[empty] = white[rng.integers(len(white), size=empty.sum())]
        axes = sums.T
    return mean, whiten @ (axes / np.linalg.norm(axes, axis=0))


def whitening(
    answers: Float[np.ndarray, "n places k"], ridge: float
) -> tuple[Float[np.ndarray, "places k"], Float[np.ndarray, "k k"]]:
    """Mean of each place, and diag(1/s) (R + ridge·I)^{-1/2} of answers over all places."""
    answers = answers.astype(np.float64)
    mean, deviation = answers.mean(axis=0), answers.std(axis=(0, 1)) + 1e-6
    rows = ((answers - mean) / deviation).reshape(-1, answers.shape[-1])
    return mean, inverse_root(rows.T @ rows / len(rows), ridge) / deviation[:, None]


def main() -> None:
    """Writes the file, and prints its SHA-256."""
    with console.one_line_errors():
        console.check_writable(_OUT.value)
        options = {f.name: f.value for f in (_IMAGES, _FILTERS, _ROUNDS)}
        command = " ".join(["python -m scripts.prior", *(f"--{k}={v}" for k, v in options.items())])
        metadata = {"command": command, "seed": "0", "commit": provenance.git_commit()}
        weights = make(_IMAGES.value, _FILTERS.value, _ROUNDS.value)
        content = safetensors.numpy.save(weights, metadata)
        files.write_bytes(Path(_OUT.value), content)
        print(hashlib.sha256(content).hexdigest())


if __name__ == "__main__":  # here, because a module that imports this one may define --out, too
    _OUT = flags.DEFINE_string("out", "", "safetensors file to write")
    _IMAGES = flags.DEFINE_integer("images", 2000, "drawn images", 1)
    _FILTERS = flags.DEFINE_integer("filters", 800, "directions of each size of patch", 1)
    _ROUNDS = flags.DEFINE_integer("rounds", 15, "rounds of k-means; 0: random directions", 0)
    console.require("out")
    console.run(main)
