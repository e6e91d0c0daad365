r"""Features learned without any photograph: a fixed map with weights from generated images.

An image with sides from 28 to 256 is resized to 32×32. Each patch x has its mean subtracted and is
divided by its deviation. Spherical k-means learned filters $d_k$ from whitened patches of dead
leaves (`bam.features.dead_leaves`). The response is $r = \max(0, d_k^\top Z (x - \mu) - 1.5)$, and
the features are

$$\sqrt{\overline{r}_\text{quarter}}, \qquad \sqrt{\overline{S x}_\text{sixteenth}}$$

for filters on the image ("fine"), for filters on the image at half its size ("coarse"), and for the
scattering transform S (`bam.features.scattering`). Means are over the places in a quarter or a
sixteenth of the image, and over the image and its mirror image. Each of the three parts is whitened
by its moments in dead leaves, $(R + \lambda I)^{-1/2} (\cdot - \mu)/s$. Then each part of an image
is scaled to mean 0 and equal variance, so that all features have L2 norm 10 and each part an equal
share of it. The square root (Hellinger's) reduces the weight of the strong responses of edges.

Source: Coates, Lee and Ng 2011 (k-means features); Perronnin, Sánchez and Mensink 2010 (square
root); Tang et al. 2023, arXiv 2306.06076 (random processes as a prior for private training).
`scripts/prior.py` makes the weights.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from bam.data.common import DataError
from bam.extras import needs
from bam.features import PRIOR_SHA256
from bam.features.extraction import FeatureMap
from bam.features.scattering import scattering

with needs("train"):
    import safetensors.numpy

FILE = Path(__file__).with_name("prior.safetensors")
SIDE, LEAST, MOST = 32, 28, 256
PATCH = 6
FLOOR = 10 / 255**2  # added to a patch's variance, so that flat ones stay flat
THRESHOLD = 1.5
LENGTH = 10.0  # L2 norm of an image's features: short enough for Adam at usual learning rates
PARTS = ("fine", "coarse", "scattering")

AnyArray = TypeVar("AnyArray", np.ndarray, Array)
Weights = Mapping[str, Float[np.ndarray, "..."]]


def prior(digest: str = "") -> FeatureMap:
    """The map of images with one or three channels to float32 `[n, 1, 1, features]`.

    Args:
      digest: SHA-256 of the weights that a model was trained with; "" for those of this version.

    Raises:
      DataError: if `digest` or the file is of other weights. The map raises it for images of other
        sizes or channels.

    Examples:
      >>> prior()(jnp.zeros((1, 28, 40, 1))).shape
      (1, 1, 1, 7696)
    """
    content = FILE.read_bytes() if FILE.is_file() else b""
    if hashlib.sha256(content).hexdigest() != PRIOR_SHA256:
        raise DataError(f"{FILE} is damaged: install it again from a clone")
    if digest not in ("", PRIOR_SHA256):
        raise DataError(
            f"the model was trained with other weights of features.name=prior ({digest}): use the "
            "version of bam that trained it"
        )
    return with_weights(safetensors.numpy.load(content))


def with_weights(weights: Weights) -> FeatureMap:
    """The map with these weights, which are called `CHANNELS/PART/…` (`scripts/prior.py`)."""
    weights = {name: np.asarray(value, np.float32) for name, value in weights.items()}

    def features(images: Float[np.ndarray | Array, "n h w c"]) -> Float[Array, "n 1 1 f"]:
        _, height, width, channels = images.shape
        if not (LEAST <= min(height, width) <= max(height, width) <= MOST and channels in (1, 3)):
            raise DataError(
                f"features.name=prior takes images of {LEAST} to {MOST} pixels a side with 1 or 3 "
                f"channels, got {height} × {width} × {channels}"
            )

        def whitened(part: str) -> Float[Array, "n f"]:
            centre, matrix = (weights[f"{channels}/{part}/{k}"] for k in ("centre", "matrix"))
            planes = (raw(images, part, weights) - centre) @ matrix
            return jax.nn.standardize(planes.reshape(len(images), -1))

        each = [whitened(part) for part in PARTS]
        each = [part * LENGTH / (len(PARTS) * part.shape[1]) ** 0.5 for part in each]
        return jnp.concatenate(each, axis=1)[:, None, None]

    return features


def raw(
    images: Float[np.ndarray | Array, "n h w c"], part: str, weights: Weights
) -> Float[Array, "n places k"]:
    """The features of a part before whitening: square roots of means over places."""
    n, *_, channels = images.shape
    pixels = jnp.asarray(images, jnp.float32)
    pixels = jax.image.resize(pixels, (n, SIDE, SIDE, channels), "linear")
    if part == "scattering":
        planes = scattering(mirror=True)(pixels)
        answers = planes.reshape(n, 4, 2, 4, 2, -1).mean(axis=(2, 4)).reshape(n, 16, -1)
    else:
        if part == "coarse":
            pixels = halved(pixels)
        filters = (weights[f"{channels}/{part}/{k}"] for k in ("mean", "projection"))
        answers = _pooled(pixels, *filters)
    return jnp.sqrt(jnp.maximum(answers, 0))


def halved(images: Float[AnyArray, "n h w c"]) -> Float[AnyArray, "n h2 w2 c"]:
    """Images at half their size: means over squares of two by two pixels."""
    n, height, width, channels = images.shape
    return images.reshape(n, height // 2, 2, width // 2, 2, channels).mean(axis=(2, 4))


def patches(image: Float[Array, "h w c"]) -> Float[Array, "places p"]:
    """All patches of an image, `normalised`."""
    height, width = (side - PATCH + 1 for side in image.shape[:2])
    shifted = [image[i : i + height, j : j + width] for i in range(PATCH) for j in range(PATCH)]
    rows = jnp.concatenate(shifted, axis=-1).reshape(height * width, -1)
    return normalised(rows, jnp.sqrt)


def normalised(
    rows: Float[AnyArray, "places p"], sqrt: Callable[[AnyArray], AnyArray]
) -> Float[AnyArray, "places p"]:
    """`(x - mean) / sqrt(variance + FLOOR)` of each patch; `sqrt` is that of NumPy or JAX."""
    rows = rows - rows.mean(axis=-1, keepdims=True)
    return rows / sqrt(rows.var(axis=-1, keepdims=True) + FLOOR)


def _pooled(
    images: Float[Array, "n s s c"], mean: np.ndarray, projection: np.ndarray
) -> Float[Array, "n 4 k"]:
    """Responses above the threshold, averaged over each quarter and over image and mirror image.

    Images are mapped one by one, so that the responses of one stay in the processor's cache.
    """
    side = images.shape[1] - PATCH + 1
    halves = np.zeros((2, side), np.float32)
    halves[0, : side // 2] = 1 / (side // 2)
    halves[1, side // 2 :] = 1 / (side - side // 2)
    quarters = jnp.asarray(np.kron(halves, halves))

    def pool(image: Array) -> Array:
        return quarters @ jnp.maximum((patches(image) - mean) @ projection - THRESHOLD, 0)

    return jax.lax.map(lambda image: (pool(image) + pool(image[:, ::-1])) / 2, images)
