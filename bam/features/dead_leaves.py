"""Draws dead leaves, images without a photograph.

Discs, bars and triangles of random sizes, colours and shades cover one another until nothing is
bare. Like photographs, such images have edges and flat parts at all scales.

Source: Lee, Mumford and Huang 2001; Baradad et al. 2021, arXiv 2106.05963 (learning to see by
looking at noise).
"""

import numpy as np
from jaxtyping import Float

SIDE = 32


def dead_leaves(rng: np.random.Generator) -> Float[np.ndarray, "32 32 3"]:
    """One image with pixels in [0, 1]. Radii are Pareto with a density of about r^-2.5."""
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


def _colour(rng: np.random.Generator) -> Float[np.ndarray, "3"]:
    """A grey level from 0 to 1, plus a small random colour with mean 0."""
    colour = 0.12 * rng.normal(size=3)
    return np.asarray(rng.uniform(0, 1) + colour - colour.mean())


def _texture(rng: np.random.Generator, slope: float) -> Float[np.ndarray, "32 32"]:
    """A Gaussian random field with deviation 1 and the amplitude spectrum frequency^-slope."""
    rows, columns = np.fft.fftfreq(SIDE)[:, None], np.fft.rfftfreq(SIDE)
    frequency = np.hypot(rows, columns)
    frequency[0, 0] = np.inf
    field = np.fft.irfft2(np.fft.rfft2(rng.normal(size=(SIDE, SIDE))) * frequency**-slope)
    return np.asarray(field / field.std())
