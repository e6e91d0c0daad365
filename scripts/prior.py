r"""Makes the weights of `features.name=prior` from drawn images alone.

python -m scripts.prior --out=bam/features/prior.safetensors

The network learns for two hours from images of eight kinds (`scripts/drawn.py`): two views of an
image shall have similar outputs (NT-Xent, Chen et al. 2020), and a linear layer tells the image's
kind and factors. The filters come from 2,000 images of dead leaves, in colour and in grey: for each
size of patch, 240,000 patches are whitened, and spherical k-means finds directions. Moments of
drawn images whiten each part, and reduce the largest variances of all features. The file's metadata
name the commit, and `bam/features/__init__.py` has the file's SHA-256. On another processor, or
with another number of threads, sums may differ in the last bits, and so may the file.
"""

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.numpy
from absl import flags
from jaxtyping import Array, Float, PyTree, UInt8

from bam import files, provenance, waits
from bam.cli import command, screen
from bam.features.prior import (
    LAYERS,
    PATCH,
    SHARES,
    SIDE,
    encoder,
    normalise,
    raw,
    squares,
    whiten_parts,
)
from bam.features.scattering import inverse_root
from bam.text import plural
from scripts import drawn

EACH, ROUNDS = 120, 15  # patches of an image, and rounds of k-means
RIDGES = dict.fromkeys(SHARES, 0.3) | {"scattering": 1.0}
MOMENTS = 8000  # images of eight kinds that whiten the network's activations, and all features
LARGEST, POWER = 100, 0.4  # variances that are reduced, and by which power of them
BATCH, RATE, TEMPERATURE, CONTRAST = 64, 2e-3, 0.2, 128
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.add_decayed_weights(1e-4)
)


def make(
    num_leaves: int = 2000,
    filters: int = 800,
    num_drawn: int = 60_000,
    steps: int = 4136,
    seed: int = 0,
) -> dict[str, Float[np.ndarray, "..."]]:
    """Weights by name, float16: the same bits for the same arguments on one machine."""
    with waits.awaited(screen.show, f"drawing {num_drawn} images"):
        images, factors = drawn.drawn_images(num_drawn, seed)
    params = learn(images, factors, steps, seed)
    weights = {f"network/{name}": value for name, value in params.items()}
    rng = np.random.default_rng(seed)
    with waits.awaited(screen.show, f"drawing {num_leaves} images of dead leaves"):
        colour = np.stack([drawn.dead_leaves(rng) for _ in range(num_leaves)])
    edge = (drawn.SIDE - SIDE) // 2
    kinds = images[:MOMENTS, edge:-edge, edge:-edge] / np.float32(255)
    for channels in (1, 3):
        leaves, others = (
            x if channels == 3 else x.mean(axis=-1, keepdims=True) for x in (colour, kinds)
        )
        for part, pixels in (("fine", leaves), ("coarse", squares(leaves, SIDE // 2))):
            name = f"{channels}/{part}"
            with waits.awaited(screen.show, f"learning the filters {name}"):
                mean, projection = directions(pixels, filters, np.random.default_rng(seed + 1))
            weights |= {f"{name}/mean": mean, f"{name}/projection": projection}
        weights = round_as_stored(weights)
        answers = jax.jit(functools.partial(raw, weights=weights))
        with waits.awaited(screen.show, f"whitening images with {plural(channels, 'channel')}"):
            parts = answers(others)
            layers = {part: parts[part] for part in LAYERS}
            for part, responses in (answers(leaves) | layers).items():
                name = f"{channels}/{part}"
                centre, matrix = whitening(np.asarray(responses), RIDGES[part])
                weights |= round_as_stored({f"{name}/centre": centre, f"{name}/matrix": matrix})
            rows = np.asarray(whiten_parts(parts, weights, channels))
            centre, reduction = reduce_largest(rows, LARGEST, POWER)
            weights |= {f"{channels}/all/centre": centre, f"{channels}/all/directions": reduction}
    return {name: np.asarray(value, np.float16) for name, value in weights.items()}


def round_as_stored(
    weights: Mapping[str, Float[np.ndarray, "..."]],
) -> dict[str, Float[np.ndarray, "..."]]:
    """Returns weights as the file has them: rounded to float16, in float32."""
    return {k: np.asarray(x, np.float16).astype(np.float32) for k, x in weights.items()}


def learn(
    images: UInt8[np.ndarray, "n s s 3"],
    factors: Float[np.ndarray, "n f"],
    steps: int,
    seed: int = 0,
) -> dict[str, Float[np.ndarray, "..."]]:
    """Trains by Adam at a rate that falls to 0 by half a cosine, and returns parameters by name.

    They are rounded to float16, as in the file, and float32.
    """
    params = encoder().init(jax.random.key(seed), jnp.zeros((1, SIDE, SIDE, 3)))
    state, rng, losses = OPTIMIZER.init(params), np.random.default_rng(seed), []
    with waits.awaited(screen.show, f"training the network, {steps} steps") as wait:
        for number in range(steps):
            rows = rng.choice(len(images), BATCH, replace=False)
            rows = np.concatenate([rows, rows])
            rate = RATE * min(1, (number + 1) / 50) * np.cos(number / steps * np.pi / 2) ** 2
            params, state, loss = _step(
                params, state, views(rng, images[rows]), factors[rows], rate
            )
            losses.append(float(loss))
            wait.share = (number + 1) / steps
            if (number + 1) % 50 == 0:
                took = waits.in_words(wait.seconds)
                screen.say(
                    f"step {number + 1} of {steps}, loss {np.mean(losses[-50:]):.3f}, {took}"
                )
    return round_as_stored(flax.traverse_util.flatten_dict(params["params"], sep="/"))


@jax.jit
def _step(
    params: PyTree, state: PyTree, pixels: Array, factors: Array, rate: Array
) -> tuple[PyTree, PyTree, Array]:
    """Parameters and Adam's state after a step, and the loss."""
    loss, grads = jax.value_and_grad(loss_of)(params, pixels, factors)
    updates, state = OPTIMIZER.update(grads, state, params)
    return jax.tree.map(lambda p, u: p - rate * u, params, updates), state, loss


def loss_of(
    params: PyTree, pixels: Float[Array, "2*n s s 3"], factors: Float[Array, "2*n f"]
) -> Float[Array, ""]:
    """NT-Xent of two views of each image, cross-entropy of kinds and squared error of factors."""
    outputs = jnp.asarray(encoder().apply(params, pixels - 0.5))
    z = outputs[:, :CONTRAST]
    z = z / (jnp.linalg.norm(z, axis=1, keepdims=True) + 1e-6)
    scores = z @ z.T / TEMPERATURE - 1e9 * jnp.eye(len(z))
    other = jnp.roll(jnp.arange(len(z)), len(z) // 2)  # the place of an image's other view
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    kinds, told = jnp.split(outputs[:, CONTRAST:], [len(drawn.KINDS)], axis=1)
    known = jnp.isfinite(factors[:, 1:])
    error = jnp.where(known, told - jnp.nan_to_num(factors[:, 1:]), 0)
    kind = cross_entropy(kinds, factors[:, 0].astype(int)).mean()
    return cross_entropy(scores, other).mean() + (kind + jnp.sum(error**2) / jnp.sum(known))


def views(
    rng: np.random.Generator, images: UInt8[np.ndarray, "n s s 3"]
) -> Float[np.ndarray, "n 32 32 3"]:
    """Returns random crops of images, resized and in other colours.

    A crop has a quarter of its image or more. Half of the crops are mirrored.
    """
    n, whole = len(images), images.shape[1]
    size = whole * np.sqrt(rng.uniform(0.25, 1, n))[:, None]
    centres = (np.arange(SIDE) + 0.5) / SIDE
    rows, columns = (
        rng.uniform(0, 1, (n, 1)) * (whole - size) + centres * size - 0.5 for _ in range(2)
    )
    columns = np.where(rng.random((n, 1)) < 0.5, columns[:, ::-1], columns)
    pixels = _between(images.astype(np.float32) / 255, rows)
    pixels = _between(pixels.swapaxes(1, 2), columns).swapaxes(1, 2)

    def draw(low: float, high: float) -> Float[np.ndarray, "n 1 1 1"]:
        return rng.uniform(low, high, (n, 1, 1, 1)).astype(np.float32)

    grey = pixels.mean(-1, keepdims=True)
    saturation = np.where(rng.random((n, 1, 1, 1)) < 0.2, 0, draw(0.4, 1.6))
    shift = 0.1 * rng.normal(size=(n, 1, 1, 3)).astype(np.float32)
    changed = (grey + saturation * (pixels - grey) - 0.5) * draw(0.5, 1.5) + 0.5 + shift
    return np.clip(changed, 0, 1)


def _between(
    pixels: Float[np.ndarray, "n s w c"], places: Float[np.ndarray, "n k"]
) -> Float[np.ndarray, "n k w c"]:
    """Rows of each image at places between its rows, by linear interpolation."""
    low = np.clip(np.floor(places), 0, pixels.shape[1] - 2).astype(int)
    part = np.clip(places - low, 0, 1).astype(np.float32)[:, :, None, None]
    each = np.arange(len(pixels))[:, None]
    return np.asarray((1 - part) * pixels[each, low] + part * pixels[each, low + 1])


def directions(
    images: Float[np.ndarray, "n s s c"], filters: int, rng: np.random.Generator
) -> tuple[Float[np.ndarray, " p"], Float[np.ndarray, "p filters"]]:
    """Mean of patches, and the matrix that whitens a patch and projects it to k-means' directions.

    k-means is spherical, and a patch counts by its length along its direction. It is written here
    because scikit-learn's threads add in varying order, so its last bits vary.
    """
    places = rng.integers(0, images.shape[1] - PATCH + 1, (EACH, 2))
    rows = np.concatenate(
        [images[:, i : i + PATCH, j : j + PATCH].reshape(len(images), -1) for i, j in places]
    )
    rows = normalise(rows, np.sqrt)
    mean = rows.mean(axis=0)
    whiten = inverse_root(np.cov(rows, rowvar=False), 0.1).astype(np.float32)
    white = (rows - mean) @ whiten
    axes = rng.normal(size=(white.shape[1], filters)).astype(np.float32)
    for _ in range(ROUNDS):
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


def reduce_largest(
    rows: Float[np.ndarray, "n f"], number: int, power: float
) -> tuple[Float[np.ndarray, " f"], Float[np.ndarray, "k f"]]:
    """Returns the mean m, and V so that x - V^T V x reduces the largest variances of x - m.

    With `k = min(number, n - 1)`, V has the eigenvectors of the k largest variances w, scaled by
    `sqrt(1 - (w_k / w_i)^power)`. They come from the products of rows, of which there are fewer
    than features.
    """
    rows = rows.astype(np.float64)
    mean = rows.mean(axis=0)
    rows -= mean
    values, vectors = np.linalg.eigh(rows @ rows.T)
    number = min(number, len(rows) - 1)
    values, vectors = values[::-1][:number], vectors[:, ::-1][:, :number]
    scales = np.sqrt((1 - (values[-1] / values) ** power) / values)
    return mean, scales[:, None] * (vectors.T @ rows)


def main() -> None:
    """Writes the file, and prints its SHA-256."""
    files.check_writable(_OUT.value)
    metadata = {"command": "python -m scripts.prior", "commit": provenance.git_commit()}
    content = safetensors.numpy.save(make(), metadata)
    files.write_bytes(Path(_OUT.value), content)
    screen.say(hashlib.sha256(content).hexdigest())


if __name__ == "__main__":  # here, because a module that imports this one may define --out, too
    _OUT = flags.DEFINE_string("out", "", "safetensors file to write")
    command.run_script(main, ["out"])
