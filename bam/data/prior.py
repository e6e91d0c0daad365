r"""Features that no photograph paid for: a fixed map whose weights come from drawn images alone.

An image of any size from 28 to 256 is resized to 32×32, 22×22 and 16×16. A patch x of it, less its
mean and over its deviation, answers to the filters that spherical k-means learned from whitened
patches of dead leaves (`bam.data.dead_leaves`), $r = \max(0, d_k^\top Z (x - \mu) - 1.5)$; patches
are those of the black squares of a chessboard. Features are

$$\sqrt{\overline{r}_\text{quarter}}, \qquad \sqrt{\overline{S x}_\text{sixteenth}}$$

for filters of each size, for those of the image in grey, and for the scattering transform S
(`bam.data.scattering`); means are over these places, and over the image and its mirror image. Each
part is whitened by its moments in dead leaves, $(R + \lambda I)^{-1/2} (\cdot - \mu)/s$, and
brought to mean 0 and equal variance within an image; all are 10 long together, and each has the
same share of that. The square root (Hellinger's) makes the strong answers of edges count less.

Source: Coates, Lee and Ng 2011 (features of k-means); Perronnin, Sánchez and Mensink 2010 (square
root); Tang et al. 2023, arXiv 2306.06076 (random processes as a prior of private training).
`scripts/prior.py` makes the weights.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from bam.data.common import DataError
from bam.data.features import FeatureMap
from bam.data.scattering import scattering
from bam.extras import needs

with needs("train"):
    import safetensors.numpy

FILE = Path(__file__).with_name("prior.safetensors")
SHA256 = "8d1dba1599fc9b8dc6e6d9ee60e7d1622af73849bc3ea9497ef77a5a466a1532"  # of FILE
LEAST, MOST = 28, 256
PATCH = 6
FLOOR = 10 / 255**2  # added to a patch's variance, so that flat ones stay flat
THRESHOLD = 1.5
LENGTH = 10.0  # of an image's features: short enough for Adam, at usual rates
SIDES = {"fine": 32, "middle": 22, "coarse": 16, "scattering": 32}  # of images
PARTS = (*SIDES, "grey")

Weights = Mapping[str, Float[np.ndarray, "..."]]


def prior(digest: str = "") -> FeatureMap:
    """The map of images, grey or of three channels, to float32 `[n, 1, 1, features]`.

    Args:
      digest: SHA-256 of the weights that a model was trained with; "": of this version's.

    Raises:
      DataError: for weights that are not those; by the map, for images of other sizes and channels.

    Examples:
      >>> prior()(jnp.zeros((1, 28, 40, 1))).shape
      (1, 1, 1, 10896)
    """
    content = FILE.read_bytes() if FILE.is_file() else b""
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise DataError(f"{FILE} is not the weights of this release: install bam-dp again")
    if digest not in ("", SHA256):
        raise DataError(f"the model has other weights of features.name=prior: {digest}")
    return with_weights(safetensors.numpy.load(content))


def with_weights(named: Weights, parts: Sequence[str] = PARTS) -> FeatureMap:
    """The map by weights, whose names are `CHANNELS/PART/…`, as `scripts/prior.py` makes them."""
    named = {name: np.asarray(value, np.float32) for name, value in named.items()}

    def features(images: Float[np.ndarray | Array, "n h w c"]) -> Float[Array, "n 1 1 f"]:
        _, height, width, channels = images.shape
        if not (LEAST <= min(height, width) <= max(height, width) <= MOST and channels in (1, 3)):
            raise DataError(
                f"features.name=prior takes images of {LEAST} to {MOST} pixels a side, grey or of "
                f"three channels, got {height} × {width} × {channels}"
            )
        images = jnp.asarray(images, jnp.float32)
        grey = images.mean(axis=-1, keepdims=True)
        each = [
            _whitened(grey, "fine", named) if part == "grey" else _whitened(images, part, named)
            for part in parts
            if channels == 3 or part != "grey"
        ]
        each = [part * LENGTH / (len(each) * part.shape[1]) ** 0.5 for part in each]
        return jnp.concatenate(each, axis=1)[:, None, None]

    return features


def _whitened(images: Float[Array, "n h w c"], part: str, named: Weights) -> Float[Array, "n f"]:
    centre, matrix = (named[f"{images.shape[-1]}/{part}/{k}"] for k in ("centre", "matrix"))
    planes = (raw(images, part, named) - centre) @ matrix
    return jax.nn.standardize(planes.reshape(len(images), -1))


def raw(
    images: Float[np.ndarray | Array, "n h w c"], part: str, named: Weights
) -> Float[Array, "n places k"]:
    """A part's answers before they are whitened: square roots of what is averaged over places.

    Images are mapped one by one: the answers of one stay in the processor's cache.
    """

    def scattered(image: Array) -> Array:
        planes = scattering(mirror=True)(image[None])
        return planes.reshape(4, 2, 4, 2, -1).mean(axis=(1, 3)).reshape(16, -1)

    def filtered(image: Array) -> Array:
        filters = (named[f"{image.shape[-1]}/{part}/{k}"] for k in ("mean", "projection"))
        return _pooled(image, *filters)

    answer = scattered if part == "scattering" else filtered
    return jnp.sqrt(jnp.maximum(jax.lax.map(answer, resized(images, part)), 0))


def resized(images: Float[np.ndarray | Array, "n h w c"], part: str) -> Float[Array, "n s s c"]:
    """The images at the size of a part."""
    n, *_, channels = images.shape
    shape = (n, SIDES[part], SIDES[part], channels)
    return jax.image.resize(jnp.asarray(images, jnp.float32), shape, "linear")


def patches(image: Float[Array, "h w c"]) -> Float[Array, "places p"]:
    """All patches, less their means and over their deviations."""
    height, width = (side - PATCH + 1 for side in image.shape[:2])
    shifted = [image[i : i + height, j : j + width] for i in range(PATCH) for j in range(PATCH)]
    rows = jnp.concatenate(shifted, axis=-1).reshape(height * width, -1)
    rows = rows - rows.mean(axis=-1, keepdims=True)
    return rows / jnp.sqrt(rows.var(axis=-1, keepdims=True) + FLOOR)


def _pooled(
    image: Float[Array, "s s c"], mean: np.ndarray, projection: np.ndarray
) -> Float[Array, "4 k"]:
    """Means over quarters, and over the image and its mirror image, of what is over 1.5."""
    side = len(image) - PATCH + 1
    later = np.arange(side) >= side // 2
    halves = np.stack([~later, later])
    quarters = np.kron(halves, halves)[:, ::2].astype(np.float32)  # a side is odd: a chessboard
    quarters /= quarters.sum(axis=1, keepdims=True)

    def pool(view: Array) -> Array:
        rows = patches(view)[::2]
        return quarters @ jnp.maximum((rows - mean) @ projection - THRESHOLD, 0)

    return (pool(image) + pool(image[:, ::-1])) / 2
