r"""Features learned without any photograph: a fixed map with weights from generated images.

An image with sides from 28 to 256 is resized to 32×32. Its features have four parts.

"fine" has the responses of filters on the image. Each patch x has its mean subtracted and is
divided by its deviation. Spherical k-means learned filters $d_k$ from whitened patches of dead
leaves (`scripts/drawn.py`). The response is $r = \max(0, d_k^\top Z (x - \mu) - 1.5)$, and the
features are

$$\sqrt{\overline{r}_\text{quarter}}, \qquad \sqrt{\overline{S x}_\text{sixteenth}}$$

"coarse" is the same on the image at half its size, and "scattering" is the second formula for the
scattering transform S at every second pixel (`bam.features.scattering`). The square root
(Hellinger's) reduces the weight of the strong responses of edges. The fourth part is a network, a
ResNet-9 of width 32. It learned to give two views of a drawn image similar outputs, and to tell the
image's kind and factors. Its features are the means of five layers' activations over quarters or
sixteenths.

The means of filters and scattering are also over eight views: the image and its mirror image, moved
by two pixels along the four diagonals. The network has four of these views, and is averaged over
left and right. So an image and its mirror image have equal features, and a small move of an object
changes features little.
Each part, and each layer of the network, is whitened by its moments in drawn images,
$(R + \lambda I)^{-1/2} (\cdot - \mu)/s$, and scaled in each image to mean 0 and equal variance,
each of the four parts to norm 5.

At last the largest variances in drawn images are reduced. With the k largest eigenvalues $w_i$ of
the covariance of all features there, and their eigenvectors $u_i$,

$$x \leftarrow (x - m) - \sum_{i \le k} \big(1 - (w_k / w_i)^{2/5}\big) \, u_i u_i^\top (x - m),$$

and all features of an image are scaled to L2 norm 10. The directions in which images differ most
then take less of this length, and a clipped gradient tells more of the others.

Source: Coates, Lee and Ng 2011 (k-means features); Perronnin, Sánchez and Mensink 2010 (square
root); Tang et al. 2023, arXiv 2306.06076 (random processes as a prior for private training); Chen
et al. 2020 (contrast of views). `scripts/prior.py` makes the weights.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from bam.data.common import DataError
from bam.extras import needs
from bam.features import PRIOR_SHA256
from bam.features.extraction import FeatureMap
from bam.features.scattering import scatter
from bam.models import finetune
from bam.models.layers import mish
from bam.models.resnet9 import ResNet9

with needs("train"):
    import safetensors.numpy

FILE = Path(__file__).with_name("prior.safetensors")
SIDE, LEAST, MOST = 32, 28, 256
MOVE = 2  # pixels along both axes by which a view is moved, and by which an image is widened
PATCH = 6
FLOOR = 10 / 255**2  # added to a patch's variance, so that flat ones stay flat
THRESHOLD = 1.5
LENGTH = 10.0  # L2 norm of an image's features: short enough for Adam at usual learning rates
OUTPUTS = 144  # of the network: 128 for the contrast of views, 16 for kinds and factors
# Activations of the network that are features, and their places along a side.
LAYERS = {"GroupNorm_1": 2, "GroupNorm_3": 2, "GroupNorm_4": 2, "GroupNorm_5": 2, "GroupNorm_7": 4}
# Each part's share of the squared length of an image's features.
SHARES = dict.fromkeys(("fine", "coarse", "scattering"), 0.25) | dict.fromkeys(LAYERS, 0.05)

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
      (1, 1, 1, 9488)
    """
    weights = load()
    if digest not in ("", PRIOR_SHA256):
        raise DataError(
            f"the model was trained with other weights of features.name=prior ({digest}): use the "
            "version of bam that trained it"
        )
    return with_weights(weights)


def load() -> Weights:
    """Returns this version's weights by name. DataError if their file is damaged."""
    content = FILE.read_bytes() if FILE.is_file() else b""
    if hashlib.sha256(content).hexdigest() != PRIOR_SHA256:
        raise DataError(f"{FILE} is damaged: install it again from a clone")
    return safetensors.numpy.load(content)


def with_weights(weights: Weights) -> FeatureMap:
    """The map with these weights, called `CHANNELS/PART/…` and `network/…` (`scripts/prior.py`)."""
    weights = {name: np.asarray(value, np.float32) for name, value in weights.items()}

    @jax.jit
    def features(images: Float[np.ndarray | Array, "n h w c"]) -> Float[Array, "n 1 1 f"]:
        n, height, width, channels = images.shape
        if not (LEAST <= min(height, width) <= max(height, width) <= MOST and channels in (1, 3)):
            raise DataError(
                f"features.name=prior takes images of {LEAST} to {MOST} pixels a side with 1 or 3 "
                f"channels, got {height} × {width} × {channels}"
            )
        pixels = jnp.asarray(images, jnp.float32)
        pixels = jax.image.resize(pixels, (n, SIDE, SIDE, channels), "linear")
        rows = whiten_parts(raw(pixels, weights), weights, channels)
        centre, directions = (weights[f"{channels}/all/{k}"] for k in ("centre", "directions"))
        rows = rows - centre
        rows = rows - (rows @ directions.T) @ directions
        rows = rows * LENGTH / (jnp.linalg.norm(rows, axis=1, keepdims=True) + 1e-6)
        return rows[:, None, None]

    return features


def raw(
    images: Float[np.ndarray | Array, "n s s c"], weights: Weights
) -> dict[str, Float[Array, "n places k"]]:
    """Each part's features before whitening, of images of 32 × 32 pixels: means over their views.

    Images are mapped one by one, so that the responses of one stay in the processor's cache.
    """

    def map_image(image: Float[Array, "s s c"]) -> dict[str, Float[Array, "places k"]]:
        wide = jnp.pad(image, ((MOVE, MOVE), (MOVE, MOVE), (0, 0)), mode="reflect")
        both = jnp.stack([wide, wide[:, ::-1]])
        each = jax.lax.map(functools.partial(_parts, weights=weights), both)
        parts = {part: x.mean(axis=0) for part, x in each.items()}
        roots = ("fine", "coarse", "scattering")
        return parts | {part: jnp.sqrt(jnp.maximum(parts[part], 0)) for part in roots}

    return jax.lax.map(map_image, jnp.asarray(images, jnp.float32))


def whiten_parts(
    parts: Mapping[str, Float[Array, "n places k"]], weights: Weights, channels: int
) -> Float[Array, "n f"]:
    """Returns parts side by side, each whitened and scaled to its share of the squared length."""
    columns = []
    for part, share in SHARES.items():
        centre, matrix = (weights[f"{channels}/{part}/{k}"] for k in ("centre", "matrix"))
        rows = (parts[part] - centre) @ matrix
        rows = rows.reshape(rows.shape[0], -1)
        columns.append(jax.nn.standardize(rows) * LENGTH * (share / rows.shape[1]) ** 0.5)
    return jnp.concatenate(columns, axis=1)


def _parts(wide: Float[Array, "s s c"], weights: Weights) -> dict[str, Float[Array, "places k"]]:
    """Returns each part's means over the four views that an image, wider by `MOVE`, contains."""
    channels, parts = wide.shape[-1], {}
    scattered = jnp.moveaxis(scatter(wide[None], stride=2)[0], 0, -1)
    parts["scattering"] = _means_of_views(scattered, SIDE // 2, 4)
    for part, pixels in (("fine", wide), ("coarse", squares(wide, len(wide) // 2))):
        mean, projection = (weights[f"{channels}/{part}/{k}"] for k in ("mean", "projection"))
        responses = jnp.maximum((patches(pixels) - mean) @ projection - THRESHOLD, 0)
        view = len(pixels) * SIDE // len(wide) - PATCH + 1
        parts[part] = _means_of_views(responses, view, 2)
    # Two views are enough for the network, which takes the most time.
    views = jnp.stack([wide[:SIDE, :SIDE], wide[-SIDE:, :SIDE]])
    layers = jax.vmap(functools.partial(_activations, weights=weights))(views)
    return parts | {layer: x.mean(axis=0) for layer, x in layers.items()}


def _means_of_views(planes: Float[Array, "s s k"], view: int, num: int) -> Float[Array, "places k"]:
    """Returns means over `num`² equal squares of a view, averaged over the views in the corners.

    The views share what they have in common, so that each place is computed once, and counts by its
    places in them.
    """
    side = len(planes)
    weights = np.zeros((num, side), np.float32)
    edges = [view * k // num for k in range(num + 1)]
    for first in (0, side - view):
        for row, low, high in zip(weights, edges, edges[1:], strict=False):
            row[first + low : first + high] += 0.5 / (high - low)
    return jnp.asarray(np.kron(weights, weights)) @ planes.reshape(side * side, -1)


def encoder() -> ResNet9:
    """The network that learned from drawn images."""
    return ResNet9(OUTPUTS, width=32)


def save_network(path: str | Path) -> None:
    """Writes the encoder's weights, from which training may begin, into a safetensors file.

    They are for pixels in [0, 1] less 0.5, as in `configs/cifar10_prior_network.py`. DataError if
    bam's own file is damaged.
    """
    finetune.save(encoder_params(load()), Path(path))


def encoder_params(weights: Weights) -> PyTree[Float[np.ndarray, "..."]]:
    """Returns the encoder's float32 parameters among all weights."""
    named = flax.traverse_util.unflatten_dict(dict(weights), sep="/")["network"]
    return jax.tree.map(lambda x: np.asarray(x, np.float32), named)


def _activations(
    image: Float[Array, "s s c"], weights: Weights
) -> dict[str, Float[Array, "places k"]]:
    """Returns the means of `LAYERS` over places and over left and right.

    The network sees a grey image as three equal channels.
    """
    pixels = jnp.broadcast_to(image, (*image.shape[:2], 3))[None] - 0.5
    params = {"params": jax.tree.map(jnp.asarray, encoder_params(weights))}
    _, kept = encoder().apply(params, pixels, capture_intermediates=True)
    means = {}
    for layer, side in LAYERS.items():
        planes = squares(mish(kept["intermediates"][layer]["__call__"][0][0]), side)
        left = (planes + planes[:, ::-1])[:, : side // 2] / 2
        means[layer] = left.reshape(-1, left.shape[-1])
    return means


def squares(planes: Float[AnyArray, "*n h w k"], side: int) -> Float[AnyArray, "*n s s k"]:
    """Means over each of `side`² equal squares."""
    *n, height, width, channels = planes.shape
    each = planes.reshape(*n, side, height // side, side, width // side, channels)
    return each.mean(axis=(-4, -2))


def patches(image: Float[Array, "h w c"]) -> Float[Array, "h2 w2 p"]:
    """All patches of an image, each after `normalise`."""
    height, width = (side - PATCH + 1 for side in image.shape[:2])
    shifted = [image[i : i + height, j : j + width] for i in range(PATCH) for j in range(PATCH)]
    return normalise(jnp.concatenate(shifted, axis=-1), jnp.sqrt)


def normalise(
    rows: Float[AnyArray, "*places p"], sqrt: Callable[[AnyArray], AnyArray]
) -> Float[AnyArray, "*places p"]:
    """Returns `(x - mean) / sqrt(variance + FLOOR)` for each patch.

    `sqrt` is that of NumPy or JAX.
    """
    rows = rows - rows.mean(axis=-1, keepdims=True)
    return rows / sqrt(rows.var(axis=-1, keepdims=True) + FLOOR)
