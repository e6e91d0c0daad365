"""The score of a trial: how many images it classifies correctly, with noise, in integers.

One example more or less, there or exchanged, changes the number of correct predictions by at most
1, for images that were trained on and for held-out ones (`datasets.hold_out`): the sensitivity is
1. Each image is classified alone, by one compiled program, so that no other image, and not how many
there are, decides how its logits are rounded.
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

TOGETHER = 4096  # images that stay in files are read so many at a time


def unit_of(noise_multiplier: float) -> int:
    """u, what one image counts in a noised score: the largest number with 2^20 / u ≥ τ."""
    return math.floor(gaussian.NOISE_STD / noise_multiplier)


def num_correct(trainer: Trainer, params: Params, split: Split) -> int:
    """How many images of a split are classified correctly. NOT PRIVATE."""

    @jax.jit
    def count(params: Params, rows: Split) -> Array:
        def one(row: Split) -> Array:
            images, labels = (x[None] for x in row)
            return trainer.evaluate(params, images, labels)[0]

        return jnp.sum(jax.lax.map(one, rows))

    if not isinstance(split.images, StoredImages):
        return int(count(params, devices.replicate(split, trainer.mesh)))
    total = 0
    for start in range(0, len(split.labels), TOGETHER):
        rows = Split(*(x[start : start + TOGETHER] for x in split))
        total += int(count(params, devices.replicate(rows, trainer.mesh)))
    return total


def noised(num_correct: int, noise_multiplier: float, key: UInt32[Array, "8"]) -> int:
    """A number, which one example changes by at most 1, with Gaussian noise, times `unit_of` τ.

    n becomes n·u + round(Z), Z of standard deviation 2^20: a rounding of the Gaussian mechanism
    with noise multiplier 2^20 / u ≥ τ, exact as the noise of training is (`bam.core.gaussian`).

    Args:
      num_correct: n.
      noise_multiplier: τ, from 0.01 to 2^20.
      key: as `bam.secret_key()` makes it; nothing else uses it.
    """
    unit = unit_of(noise_multiplier)
    return num_correct * unit + int(gaussian.GaussianNoise(key, 1.0).draws_of_device(1)[0])
