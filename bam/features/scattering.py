r"""The wavelet scattering transform of order 2: fixed features of one image.

$$S x = \big(x * \phi, \; |x * \psi_{1\theta}| * \phi, \; ||x * \psi_{1\theta}| * \psi_{2\theta'}| *
\phi\big)$$

with Morlet wavelets ψ of two scales and eight angles and a Gaussian φ of the larger scale, sampled
at every fourth pixel. The constants are those of Oyallon and Mallat 2015 (see also Bruna and Mallat
2013). A private linear model of these features is as accurate as a private deep network of the
pixels (Tramèr and Boneh, arXiv 2011.11660).
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
# Coefficients of a channel: order 0, order 1, and order 2 from the smaller to the larger scale.
COEFFICIENTS = 1 + SCALES * ANGLES + ANGLES * ANGLES


def scattering(
    groups: int = 0, whiten: float = 0.0, mirror: bool = False
) -> Callable[[Float[np.ndarray | Array, "n h w c"]], Float[Array, "n h2 w2 c2"]]:
    """The transform of images whose sides are multiples of 4 and at least 8, in float32.

    An image with c channels has 81 c features at each place, those of channel k from 81 k on: order
    0, order 1 by scale and angle, order 2 by the angle of the first wavelet, then of the second.
    Images are reflected at the border, and the values are those of `kymatio.Scattering2D(J=2)`.
    Each image is transformed on its own.

    With `mirror`, the features are the mean over the image and its mirror image. It is for classes
    without a left and a right; a linear model then need not learn this symmetry under noise.

    With `whiten` = r, the vector x of the 81 c features at a place becomes
    (R + r·I)^{-1/2} (x - μ)/s. The means μ, deviations s and correlations R are those in public
    photographs (`bam.features.photographs`). Fine structure, which varies little, then counts as
    much as coarse structure.

    With `groups`, the 81 c features are then divided into `groups` groups of neighbours, and the
    values of each group in an image are scaled to mean 0 and variance 1: GroupNorm without weights.

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
        planes = scatter(images)
        if mirror:
            planes = (planes + scatter(images[:, :, ::-1])) / 2
        if whiten:
            centre, matrix = _whitening(channels, whiten)
            planes = planes - centre[:, None, None]
            planes = jnp.einsum("kj,njrs->nkrs", matrix, planes, precision="highest")
        return jnp.moveaxis(_standardise(planes, groups) if groups else planes, 1, -1)

    return features


@functools.cache
def _whitening(channels: int, ridge: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean `[k]` and (R + ridge·I)^{-1/2} diag(1/s) `[k, k]` of the features of photographs."""
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


def _standardise(planes: Float[Array, "n k h w"], groups: int) -> Float[Array, "n k h w"]:
    """Brings each group of channels of an image to mean 0 and variance 1."""
    if groups < 0 or planes.shape[1] % groups:
        raise InputError(f"features.groups must divide {planes.shape[1]} channels, got {groups}")
    grouped = planes.reshape(planes.shape[0], groups, -1)
    return jax.nn.standardize(grouped, axis=-1, epsilon=1e-5).reshape(planes.shape)


def scatter(
    images: Float[np.ndarray | Array, "n h w c"], stride: int = STRIDE
) -> Float[Array, "n k h2 w2"]:
    """Returns the transform at every `stride`-th pixel, with channels before rows and columns."""
    number, height, width, channels = images.shape
    planes = jnp.moveaxis(jnp.asarray(images, jnp.float32), -1, 1).reshape(-1, height, width)
    shape = number, channels * COEFFICIENTS, height // stride, width // stride
    return _scattered_planes(planes, stride).reshape(shape)


def _scattered_planes(planes: Float[Array, "n h w"], stride: int) -> Float[Array, "n k h2 w2"]:
    """The transform of single channels, k = `COEFFICIENTS`."""
    padded = jnp.pad(planes, ((0, 0), (STRIDE, STRIDE), (STRIDE, STRIDE)), mode="reflect")
    fine, coarse = _wavelets(*padded.shape[1:])
    spectrum = jnp.fft.fft2(padded)[:, None]
    first = jnp.abs(jnp.fft.ifft2(spectrum * fine))  # [n, angles, h, w]
    # Every second pixel is enough for the larger scale; folding a spectrum subsamples its image.
    first_coarse = jnp.abs(jnp.fft.ifft2(_fold(spectrum * coarse)))
    second = jnp.abs(jnp.fft.ifft2(_fold(jnp.fft.fft2(first)[:, :, None] * coarse)))
    second = second.reshape(planes.shape[0], ANGLES * ANGLES, *second.shape[-2:])
    orders = padded[:, None], first, first_coarse, second
    return jnp.concatenate([_smooth(order, planes.shape[1:], stride) for order in orders], axis=1)


def _fold(spectrum: Complex[Array, "*n h w"]) -> Complex[Array, "*n h/2 w/2"]:
    """Returns the spectrum of every second pixel of an image."""
    *n, height, width = spectrum.shape
    return spectrum.reshape(*n, 2, height // 2, 2, width // 2).mean(axis=(-4, -2))


def _smooth(
    planes: Float[Array, "n k h w"], size: tuple[int, ...], stride: int
) -> Float[Array, "n k h2 w2"]:
    """Planes smoothed by φ, at every `stride`-th pixel of the image without its padding."""
    step = (size[0] + 2 * STRIDE) // planes.shape[-2]  # distance of the planes' pixels
    rows, columns = (_gaussian(side, step, stride) for side in size)
    return jnp.einsum("ri,nkij,sj->nkrs", rows, planes, columns, precision="highest")


@functools.cache
def _gaussian(side: int, step: int, stride: int) -> np.ndarray:
    """Weights [side/stride, padded side/step] of a periodic Gaussian around the pixels."""
    sigma, padded = 0.8 * 2 ** (SCALES - 1), side + 2 * STRIDE
    centre = STRIDE + np.arange(0, side, stride)[:, None]
    distance = centre - np.arange(0, padded, step)
    shifts = padded * np.arange(-2, 3)[:, None, None]  # periods before and after
    weights = np.exp(-((distance + shifts) ** 2) / (2 * sigma**2)).sum(0)
    return (step * weights / np.sqrt(2 * np.pi) / sigma).astype(np.float32)


@functools.cache
def _wavelets(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The real spectra [angles, h, w] of the wavelets of the small and the large scale."""
    angles = (ANGLES // 2 - 1 - np.arange(ANGLES)) * np.pi / ANGLES
    fine, coarse = (
        np.stack([_wavelet(height, width, scale, angle) for angle in angles])
        for scale in range(SCALES)
    )
    return fine, coarse


def _wavelet(height: int, width: int, scale: int, angle: float) -> np.ndarray:
    """The spectrum of a Morlet wavelet: a wave under a Gaussian, minus a Gaussian for mean 0."""
    sigma, frequency, slant = 0.8 * 2**scale, 0.75 * np.pi / 2**scale, 4 / ANGLES
    periods = np.arange(-2, 3)  # the wavelet is periodic, like the FFT
    y = (np.arange(height) + height * periods[:, None])[:, None, :, None]
    x = (np.arange(width) + width * periods[:, None])[None, :, None, :]
    along, across = y * np.cos(angle) + x * np.sin(angle), x * np.cos(angle) - y * np.sin(angle)
    gaussian = np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
    wave = gaussian * np.exp(1j * frequency * along)
    gaussian, wave = gaussian.sum((0, 1)), wave.sum((0, 1))
    morlet = (wave - wave.sum() / gaussian.sum() * gaussian) * slant / (2 * np.pi * sigma**2)
    return np.real(np.fft.fft2(morlet)).astype(np.float32)
