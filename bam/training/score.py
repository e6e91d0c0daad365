"""The score of a trial: the number of correctly classified images, with noise, in integers.

If one example is added, removed or exchanged, the number of correct predictions changes by at most
1, on training images and on held-out ones (`datasets.hold_out`). So the sensitivity is 1. One
compiled program classifies each image alone, so the rounding of an image's logits depends neither
on other images nor on their number.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from bam.core import gaussian
from bam.core.pytree import Params
from bam.data.datasets import Split
from bam.data.stream import StoredImages
from bam.training import devices
from bam.training.trainer import Trainer

TOGETHER = 4096  # images that are read from files at once


def unit_of(noise_multiplier: float) -> int:
    """u, the weight of one image in a noised score: the largest integer with 2^20 / u ≥ τ."""
    # Rounded down: a larger unit would have less noise than τ.
    return math.floor(gaussian.NOISE_STD / noise_multiplier)


def num_correct(trainer: Trainer, params: Params, split: Split) -> int:
    """Returns the number of images of a split that are classified correctly. NOT PRIVATE."""

    @jax.jit
    def count(params: Params, rows: Split) -> Array:
        def one(row: Split) -> Array:
            images, labels = (x[None] for x in row)
            return trainer.score_images(params, images, labels)[0]

        # `lax.map` takes the images one by one; a batch's size would change how logits are rounded.
        return jnp.sum(jax.lax.map(one, rows))

    if not isinstance(split.images, StoredImages):
        return int(count(params, devices.replicate(split, trainer.mesh)))
    total = 0
    for start in range(0, len(split.labels), TOGETHER):
        rows = Split(*(x[start : start + TOGETHER] for x in split))
        total += int(count(params, devices.replicate(rows, trainer.mesh)))
    return total


def noised_count(num_correct: int, noise_multiplier: float, key: UInt32[Array, "8"]) -> int:
    """Returns the noised count n·u + round(Z), with u = `unit_of(τ)` and Z ~ N(0, 2^40).

    If one example changes n by at most 1, this is a rounding of the Gaussian mechanism with noise
    multiplier 2^20 / u ≥ τ. The noise is as exact as that of training (`bam.core.gaussian`).

    Args:
      num_correct: n.
      noise_multiplier: τ, from 0.01 to 2^20.
      key: as from `bam.secret_key()`; it must not be used for anything else.
    """
    unit = unit_of(noise_multiplier)
    return num_correct * unit + int(gaussian.GaussianNoise(key, 1.0).draws_of_device(1)[0])
