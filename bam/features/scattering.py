r"""The wavelet scattering transform of order 2: fixed features of one image, which learn nothing.

$$S x = \big(x * \phi, \; |x * \psi_{1\theta}| * \phi, \; ||x * \psi_{1\theta}| * \psi_{2\theta'}| *
\phi\big)$$

with Morlet wavelets ψ of two scales and eight angles and a Gaussian φ of the larger scale, read at
every fourth pixel (Bruna and Mallat 2013; Oyallon and Mallat 2015, whose constants these are). A
private linear model of them is as accurate as a private deep network of the pixels (Tramèr and
Boneh, arXiv 2011.11660).
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex, Float

from bam.errors import InputError
from bam.features import photographs

SCALES, ANGLES = 2, 8
STRIDE = 2**SCALES
# Coefficients of each channel: of order 0, of order 1, and of order 2, where scales grow.
COEFFICIENTS = 1 + SCALES * ANGLES + ANGLES * ANGLES


def scattering(
    groups: int = 0, whiten: float = 0.0, mirror: bool = False
) -> Callable[[Float[np.ndarray | Array, "n h w c"]], Float[Array, "n h2 w2 c2"]]:
    """The transform of images with sides that are multiples of 4, from 8; float32.

    Of the 81 c features of a place, channel k has those from 81 k: order 0, order 1 by scale and
    angle, order 2 by the angle of the first wavelet, then of the second. Images are reflected at
    the border, as kymatio does; values are those of `kymatio.Scattering2D(J=2)`. Each image is
    transformed on its own.

    With `mirror`, they are the mean of those of the image and of its mirror image, for classes to
    which left and right are the same: a linear model need not learn that under noise.

    With `whiten` = r, the vector x of the channels of a place becomes (R + r·I)^{-1/2} (x - μ)/s
    for the means μ, deviations s and correlations R that it has in public photographs
    (`bam.features.photographs`): fine structure, which varies little, counts as much as coarse.

    With `groups`, the c·81 channels are then divided into so many groups of neighbours, and each
    group's values in an image brought to mean 0 and variance 1: GroupNorm without weights.

    Examples:
      >>> scattering()(jnp.zeros((1, 32, 32, 3))).shape
      (1, 8, 8, 243)
    """
    if not 0 <= whiten < math.inf:
        raise InputError(f"features.whiten must be finite and not negative, got {whiten}")

    def features(images: Float[np.ndarray | Array, "n h w c"]) -> Float[Array, "n h2 w2 c2"]:
        _, height, width, channels = images.shape
        if min(height, width) < 2 * STRIDE or height % STRIDE or width % STRIDE:
            raise InputError(
                f"scattering needs images with sides that are multiples of {STRIDE}, from "
                f"{2 * STRIDE}, got {height} × {width}"
            )
        planes = _scattered(images)
        if mirror:
            planes = (planes + _scattered(images[:, :, ::-1])) / 2
        if whiten:
            centre, matrix = _whitening(channels, whiten)
            planes = planes - centre[:, None, None]
            planes = jnp.einsum("kj,njrs->nkrs", matrix, planes, precision="highest")
        return jnp.moveaxis(_standardised(planes, groups) if groups else planes, 1, -1)

    return features


@functools.cache
def _whitening(channels: int, ridge: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean `[k]` and matrix `[k, k]` = (R + ridge·I)^{-1/2} diag(1/s) of photographs' features."""
    with jax.ensure_compile_time_eval():
        features = jax.jit(scattering())(photographs.crops(channels=channels))
    rows = np.asarray(features, np.float64).reshape(-1, channels * COEFFICIENTS)
    deviation = rows.std(axis=0)
    root = inverse_root(np.asarray(np.corrcoef(rows, rowvar=False)), ridge)
    return rows.mean(axis=0).astype(np.float32), (root / deviation).astype(np.float32)


def inverse_root(matrix: np.ndarray, ridge: float) -> np.ndarray:
    """(M + ridge·I)^{-1/2} `[k, k]` of a covariance M."""
    values, vectors = np.linalg.eigh(matrix)
    return np.asarray((vectors / np.sqrt(values + ridge)) @ vectors.T)


def _standardised(planes: Float[Array, "n k h w"], groups: int) -> Float[Array, "n k h w"]:
    if groups < 0 or planes.shape[1] % groups:
        raise InputError(f"features.groups must divide {planes.shape[1]} channels, got {groups}")
    grouped = planes.reshape(len(planes), groups, -1)
    return jax.nn.standardize(grouped, axis=-1, epsilon=1e-5).reshape(planes.shape)


def _scattered(images: Float[np.ndarray | Array, "n h w c"]) -> Float[Array, "n k h2 w2"]:
    """The transform, channels first."""
    number, height, width, channels = images.shape
    planes = jnp.moveaxis(jnp.asarray(images, jnp.float32), -1, 1).reshape(-1, height, width)
    shape = number, channels * COEFFICIENTS, height // STRIDE, width // STRIDE
    return _scattered_planes(planes).reshape(shape)


def _scattered_planes(planes: Float[Array, "n h w"]) -> Float[Array, "n k h2 w2"]:
    padded = jnp.pad(planes, ((0, 0), (STRIDE, STRIDE), (STRIDE, STRIDE)), mode="reflect")
    fine, coarse = _wavelets(*padded.shape[1:])
    spectrum = jnp.fft.fft2(padded)[:, None]
    first = jnp.abs(jnp.fft.ifft2(spectrum * fine))  # [n, angles, h, w]
    # Of the larger scale every second pixel is enough: a spectrum folded is an image subsampled.
    first_coarse = jnp.abs(jnp.fft.ifft2(_folded(spectrum * coarse)))
    second = jnp.abs(jnp.fft.ifft2(_folded(jnp.fft.fft2(first)[:, :, None] * coarse)))
    second = second.reshape(len(planes), ANGLES * ANGLES, *second.shape[-2:])
    orders = padded[:, None], first, first_coarse, second
    return jnp.concatenate([_smooth(order, planes.shape[1:]) for order in orders], axis=1)


def _folded(spectrum: Complex[Array, "*n h w"]) -> Complex[Array, "*n h/2 w/2"]:
    """The spectrum of an image's every second pixel."""
    *n, height, width = spectrum.shape
    return spectrum.reshape(*n, 2, height // 2, 2, width // 2).mean(axis=(-4, -2))


def _smooth(planes: Float[Array, "n k h w"], size: tuple[int, ...]) -> Float[Array, "n k h2 w2"]:
    """φ of planes at every fourth pixel of the image itself, without its padding."""
    step = (size[0] + 2 * STRIDE) // planes.shape[-2]  # how far apart the planes' pixels are
    rows, columns = (_gaussian(side, step) for side in size)
    return jnp.einsum("ri,nkij,sj->nkrs", rows, planes, columns, precision="highest")


@functools.cache
def _gaussian(side: int, step: int) -> np.ndarray:
    """Weights [side/4, padded side/step] of a Gaussian around every fourth pixel, going round."""
    sigma, padded = 0.8 * 2 ** (SCALES - 1), side + 2 * STRIDE
    centre = STRIDE + np.arange(0, side, STRIDE)[:, None]
    distance = centre - np.arange(0, padded, step)
    turns = padded * np.arange(-2, 3)[:, None, None]
    weights = np.exp(-((distance + turns) ** 2) / (2 * sigma**2)).sum(0)
    return (step * weights / np.sqrt(2 * np.pi) / sigma).astype(np.float32)


@functools.cache
def _wavelets(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Spectra [angles, h, w] of the wavelets of both scales, which are real."""
    angles = (ANGLES // 2 - 1 - np.arange(ANGLES)) * np.pi / ANGLES
    fine, coarse = (
        np.stack([_wavelet(height, width, scale, angle) for angle in angles])
        for scale in range(SCALES)
    )
    return fine, coarse


def _wavelet(height: int, width: int, scale: int, angle: float) -> np.ndarray:
    """A Morlet wavelet's spectrum: a wave under a Gaussian, less what gives it a mean of 0."""
    sigma, frequency, slant = 0.8 * 2**scale, 0.75 * np.pi / 2**scale, 4 / ANGLES
    turns = np.arange(-2, 3)
    y = (np.arange(height) + height * turns[:, None])[:, None, :, None]
    x = (np.arange(width) + width * turns[:, None])[None, :, None, :]
    along, across = y * np.cos(angle) + x * np.sin(angle), x * np.cos(angle) - y * np.sin(angle)
    gaussian = np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
    wave = gaussian * np.exp(1j * frequency * along)
    gaussian, wave = gaussian.sum((0, 1)), wave.sum((0, 1))
    morlet = (wave - wave.sum() / gaussian.sum() * gaussian) * slant / (2 * np.pi * sigma**2)
    return np.real(np.fft.fft2(morlet)).astype(np.float32)
