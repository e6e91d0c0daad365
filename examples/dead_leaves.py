"""Features from images of no thing: filters learned from dead leaves, beside scattering.

Dead leaves are discs, bars and triangles of random sizes, colours and shades that cover one another
until nothing of the ground is left: like photographs, they have edges and flat parts at all scales.
Patches x of such images, less their mean μ and over their deviation, have a covariance Σ, whitening
Z = (Σ + 0.1 I)^{-1/2} and directions d_k by spherical k-means of Z x. An image's features are means
over its quarters, and over it and its mirror image, of

    max(0, d_kᵀ Z (x − μ) − 1.5)

for all its patches x. As vectors over k they are whitened by their own moments in dead leaves, and
stand beside the scattering transform with as much energy. No private image is read, and
photographs only for what whitens scattering: two public ones.

Source: Coates, Lee and Ng 2011 (features of k-means, there learned from the data themselves); Lee,
Mumford and Huang 2001 (dead leaves); Baradad et al. 2021, arXiv 2106.05963 (learning to see by
looking at noise); Tang et al. 2023, arXiv 2306.06076 (random processes as a prior of private
training).

Config: `config.features = ConfigDict({"name": "examples.dead_leaves:features", "filters": 800})`
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from bam.data.scattering import inverse_root, scattering

SIDE, PATCH, NUM_IMAGES, PATCHES_EACH, ROUNDS = 32, 6, 2000, 120, 15
FLOOR = 10 / 255**2  # added to a patch's variance, so that flat ones stay flat
THRESHOLD, RIDGE = 1.5, 0.3


def features(filters=800):
    """The map; float32 `[n, 1, 1, scattering's + 4 filters]`, mean 0 and variance 1 by part."""
    if filters < 1:
        raise ValueError(f"features.filters must be at least 1, got {filters}")
    beside = scattering(groups=1, whiten=1.0, mirror=True)

    def computed(images):
        theirs = beside(images).reshape(len(images), -1)
        with jax.ensure_compile_time_eval():
            centre, matrix = _whitening(filters, images.shape[-1])
        pooled = _pooled(images, *_learned(filters, images.shape[-1]))
        ours = jax.nn.standardize(((pooled - centre) @ matrix).reshape(len(images), -1))
        ours *= (theirs.shape[1] / ours.shape[1]) ** 0.5
        return jnp.concatenate([theirs, ours], axis=1)[:, None, None]

    return computed


def dead_leaves(rng):
    """One image `[32, 32, 3]`, pixels in [0, 1]; radii have a density of about r^-2.5."""
    image = np.zeros((SIDE, SIDE, 3), np.float32)
    bare = np.ones((SIDE, SIDE), bool)
    y, x = np.mgrid[:SIDE, :SIDE]
    while bare.any():
        radius = min(SIDE, 1 + 1.5 * rng.pareto(1.5))
        top, left = rng.uniform(-radius / 2, SIDE + radius / 2, 2)
        angle, aspect = rng.uniform(0, np.pi), rng.uniform(0.4, 1)
        u = np.cos(angle) * (x - left) + np.sin(angle) * (y - top)
        v = (np.cos(angle) * (y - top) - np.sin(angle) * (x - left)) / aspect
        shapes = (
            u**2 + v**2 < radius**2,
            np.maximum(abs(u), abs(v)) < radius,
            (v > -radius / 2) & (v < radius - 2 * abs(u)),
        )
        new = bare & shapes[rng.integers(3)]
        shade = 0.06 * u[new, None] / (radius + 1) * rng.normal(size=3)
        image[new] = _colour(rng) + shade
        bare &= ~new
    image += rng.uniform(0, 0.1) * _texture(rng, rng.uniform(0.8, 1.6))[..., None]
    soft = rng.uniform(0, 1)
    for axis in (0, 1):
        beside = np.roll(image, 1, axis) + np.roll(image, -1, axis)
        image = (1 - soft / 2) * image + soft / 4 * beside
    return np.clip(image, 0, 1).astype(np.float32)


def _colour(rng):
    """Brightness from 0 to 1, and a little colour."""
    colour = 0.12 * rng.normal(size=3)
    return rng.uniform(0, 1) + colour - colour.mean()


def _texture(rng, slope):
    """A random field `[32, 32]` with deviation 1 and an amplitude of frequency^-slope."""
    rows, columns = np.fft.fftfreq(SIDE)[:, None], np.fft.rfftfreq(SIDE)
    frequency = np.hypot(rows, columns)
    frequency[0, 0] = np.inf
    field = np.fft.irfft2(np.fft.rfft2(rng.normal(size=(SIDE, SIDE))) * frequency**-slope)
    return field / field.std()


@functools.cache
def _images(channels):
    rng = np.random.default_rng(0)
    images = np.stack([dead_leaves(rng) for _ in range(NUM_IMAGES)])
    return images if channels == 3 else images.mean(-1, keepdims=True)


def _normalised(patches, module=np):
    patches = patches - patches.mean(-1, keepdims=True)
    return patches / module.sqrt(patches.var(-1, keepdims=True) + FLOOR)


@functools.cache
def _learned(filters, channels):
    """Mean `[p]`, and `[p, filters]` that whitens a patch and projects it to the directions."""
    rng = np.random.default_rng(1)
    images = _images(channels)
    places = rng.integers(0, SIDE - PATCH + 1, (PATCHES_EACH, 2))
    patches = [
        images[:, top : top + PATCH, left : left + PATCH].reshape(NUM_IMAGES, -1)
        for top, left in places
    ]
    patches = _normalised(np.concatenate(patches))
    mean = patches.mean(axis=0)
    whiten = inverse_root(np.cov(patches, rowvar=False), 0.1).astype(np.float32)
    white = (patches - mean) @ whiten
    directions = rng.normal(size=(white.shape[1], filters)).astype(np.float32)
    for _ in range(ROUNDS):
        directions /= np.linalg.norm(directions, axis=0)
        scores = white @ directions
        best = scores.argmax(axis=1)
        weighted = scores[np.arange(len(white)), best, None] * white
        order = best.argsort(kind="stable")
        starts = np.searchsorted(best[order], np.arange(filters + 1))
        directions = np.stack(
            [
                weighted[order[a:b]].sum(axis=0) if a < b else white[rng.integers(len(white))]
                for a, b in itertools.pairwise(starts)
            ],
            axis=1,
        )
    directions /= np.linalg.norm(directions, axis=0)
    return mean, whiten @ directions


def _pooled(images, mean, projection):
    """Means over quarters of what exceeds the threshold, `[n, 4, filters]`."""

    def pool(image):
        height, width = (side - PATCH + 1 for side in image.shape[:2])
        shifted = [image[i : i + height, j : j + width] for i in range(PATCH) for j in range(PATCH)]
        patches = _normalised(jnp.concatenate(shifted, axis=-1), jnp)
        above = jnp.maximum((patches - mean) @ projection - THRESHOLD, 0)
        rows, columns = (
            (slice(0, height // 2), slice(height // 2, None)),
            (slice(0, width // 2), slice(width // 2, None)),
        )
        return jnp.stack([above[r, c].mean(axis=(0, 1)) for r in rows for c in columns])

    images = jnp.asarray(images, jnp.float32)
    return jax.lax.map(lambda x: (pool(x) + pool(x[:, ::-1])) / 2, images, batch_size=8)


@functools.cache
def _whitening(filters, channels):
    """Mean `[4, k]` and matrix `[k, k]` = diag(1/s) (R + ridge I)^{-1/2}, of dead leaves."""
    pooled = np.asarray(jax.jit(_pooled)(_images(channels), *_learned(filters, channels)))
    mean, deviation = pooled.mean(axis=0), pooled.std(axis=(0, 1)) + 1e-6
    rows = ((pooled - mean) / deviation).reshape(-1, filters)
    return mean, inverse_root(rows.T @ rows / len(rows), RIDGE) / deviation[:, None]
