"""Layers that the models share.

A convolution has several formulations, which agree up to float rounding and differ greatly in speed
when each example has its own gradient. Models use `Conv`; this file chooses the formulation.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from bam.core.pytree import at_least_float32
from bam.core.tracing import own_weights
from bam.errors import InputError
from bam.models.symmetries import tied

WEIGHT_STANDARDISATIONS = ("none", "centre", "standardise")
FORMULATIONS = ("matmul", "xla", "tpu")

# The default formulation of a platform; "xla" on others.
OF_PLATFORM = {"cpu": "matmul", "tpu": "tpu"}

_NHWC = ("NHWC", "HWIO", "NHWC")
_formulation = contextvars.ContextVar("convolution formulation", default="")


@contextlib.contextmanager
def convolutions_as(name: str) -> Iterator[None]:
    """Chooses the formulation of the layers, for code that is traced inside.

    "matmul": a convolution is one matrix product of shifted copies of the image, and sums over
    pixels are products, too. "xla": XLA's own convolution. "tpu": XLA's convolution, with pooling
    and normalisation written so that a TPU fuses them with it. "": "matmul" on CPU, "tpu" on TPU
    and "xla" elsewhere, chosen when the code is traced.
    """
    if name and name not in FORMULATIONS:
        raise InputError(
            f"unknown convolution {name!r}; choose from {', '.join(FORMULATIONS)}, or '': by the "
            "platform"
        )
    token = _formulation.set(name)
    try:
        yield
    finally:
        _formulation.reset(token)


def formulation(name: str) -> str:
    """The named formulation, or for "" this platform's default."""
    return name or OF_PLATFORM.get(jax.default_backend(), "xla")


def _computed() -> str:
    return formulation(_formulation.get())


def conv2d(
    images: Float[Array, "n h w c"],
    kernel: Float[Array, "kh kw c f"],
    stride: int = 1,
    symmetric: bool = False,
) -> Float[Array, "n h2 w2 f"]:
    """Two-dimensional convolution, zero padding to "same" size, no bias.

    With a stride, XLA may pad less before an axis than after it; `symmetric` pads both sides by
    half of an odd kernel, as PyTorch's networks do. `convolutions_as` chooses the formulation. A
    matrix product keeps its speed inside loops and under `vmap`, where XLA's CPU convolution
    becomes slow.
    """
    sides, strides = kernel.shape[:2], (stride, stride)
    padding = [(side // 2, side // 2) for side in sides]
    if not symmetric:
        padding = jax.lax.padtype_to_pads(images.shape[1:3], sides, strides, "SAME")
    if _computed() == "matmul":
        return _conv2d_as_matmul(images, kernel, stride, padding)
    return jax.lax.conv_general_dilated(images, kernel, strides, padding, dimension_numbers=_NHWC)


def _conv2d_as_matmul(
    images: Array, kernel: Array, stride: int, padding: Sequence[tuple[int, int]]
) -> Array:
    kernel_height, kernel_width, channels, features = kernel.shape
    _, height, width, _ = images.shape
    padded = jnp.pad(images, ((0, 0), *padding, (0, 0)))
    shifted = [
        padded[:, i : i + height : stride, j : j + width : stride]
        for i in range(kernel_height)
        for j in range(kernel_width)
    ]
    patches = jnp.concatenate(shifted, axis=-1)
    # One axis of rows, because with several XLA transposes the output's gradient for the kernel's.
    rows = patches.reshape(-1, kernel_height * kernel_width * channels)
    return (rows @ kernel.reshape(-1, features)).reshape(*patches.shape[:-1], features)


def standardise_weights(
    kernel: Float[Array, "kh kw c f"], how: str, gain: Float[Array, "#f"] | float = 1.0
) -> Float[Array, "kh kw c f"]:
    r"""Weight standardisation, per output feature, over the kernel's other axes.

    "none": $w$; "centre": $w - \mathrm{mean}(w)$; "standardise":
    $(w - \mathrm{mean}(w)) / \sqrt{\max(\mathrm{var}(w) \cdot \text{fan-in}, 10^{-4})}$; each times
    the features' gains. It involves the weights alone, so it mixes no examples.

    Source: Qiao et al. 2019; the floor and fan-in of De et al. 2022; "centre" as in the BAM
    authors' code.
    """
    if how == "none":
        return gain * kernel
    if how == "centre":
        return gain * (kernel - jnp.mean(kernel, axis=(0, 1, 2)))
    # Each sum over a gradient is a pass over every example's gradient, so no sum waits for another.
    # Subtracting a constant changes neither the variance nor its derivatives, and keeps the digits
    # of the mean from cancellation.
    near = kernel - jax.lax.stop_gradient(jnp.mean(kernel, axis=(0, 1, 2)))
    mean = jnp.mean(near, axis=(0, 1, 2))
    variance = jnp.mean(jnp.square(near), axis=(0, 1, 2)) - jnp.square(mean)
    fan_in = kernel.shape[0] * kernel.shape[1] * kernel.shape[2]
    factor = gain * jax.lax.rsqrt(jnp.maximum(variance * fan_in, 1e-4))
    return factor * near - factor * mean


class Conv(nn.Module):
    """Convolution with same padding and a square kernel, which begins as N(0, 1/fan-in).

    `gain_and_bias` learns a gain (a factor of the weights, from 1) and a bias (from 0) for each
    channel; `use_bias` learns a bias alone. `symmetric` is as in `conv2d`. `symmetries` is the
    order of a group over which the kernel is tied, see `symmetries.tied`; gains, biases and the
    fan-in then belong to fields.
    """

    features: int
    kernel_size: int = 3
    stride: int = 1
    weight_standardisation: str = "none"
    gain_and_bias: bool = False
    use_bias: bool = False
    symmetric: bool = False
    symmetries: int = 1
    lifting: bool = False
    kernel_init: nn.initializers.Initializer = nn.initializers.variance_scaling(
        1.0, "fan_in", "normal"
    )

    @nn.compact
    def __call__(self, images: Float[Array, "n h w c"]) -> Float[Array, "n h2 w2 f"]:
        """Convolves a batch of images."""
        fields = self.features // self.symmetries
        shape = (self.kernel_size, self.kernel_size, images.shape[-1], fields)
        kernel = self.param("kernel", self.kernel_init, shape)
        gain: Array | float = 1.0
        if self.gain_and_bias:
            gain = self.param("gain", nn.initializers.ones, (fields,))
        kernel = standardise_weights(kernel, self.weight_standardisation, gain)
        kernel = tied(kernel, self.symmetries, self.lifting)
        convolved = conv2d(images, kernel, self.stride, self.symmetric)
        if self.gain_and_bias or self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (fields,))
            convolved += jnp.repeat(bias, self.symmetries)
        return convolved


@jax.custom_jvp
def mish(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    r"""Mish activation, $x \tanh(\log(1 + e^x))$ (Misra 2019), differentiable any number of times.

    With $n = e^x (e^x + 2)$ the hyperbolic tangent is $n / (n + 2)$. That needs one exponential,
    where the textbook form and its derivative need several: a sixth of a small ResNet-9's CPU time.
    """
    n, _ = _mish_terms(x)
    return x * (n * (1 / (n + 2)))


@mish.defjvp
def _mish_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    n, bend = _mish_terms(x)
    reciprocal = 1 / (n + 2)
    # Backwards, the division comes last. XLA on CPU keeps a quotient for all operations that use
    # it, but computes a product, with the cheap steps before it, again for each.
    return x * (n * reciprocal), tangent / (n + 2) * (n + bend * reciprocal)


def _mish_terms(x: Array) -> tuple[Array, Array]:
    """`n` and `bend` of the slope `(n + bend / (n + 2)) / (n + 2)`.

    Beyond 20 the slope is 1 up to float64's rounding.
    """
    x = jnp.minimum(x, 20)
    exp = jnp.exp(x)
    return exp * (exp + 2), 4 * x * exp * (exp + 1)


class GroupNorm(nn.Module):
    r"""Group normalisation, $\gamma (x - \mu_g) / \sqrt{\sigma_g^2 + 10^{-5}} + \beta$, per image.

    Sums run over the pixels of each channel first, and then over the few channels of a group, which
    XLA's CPU backend vectorises. Flax's layer has the same parameters and results, but takes
    several times as long there. Statistics are float32 for any input dtype. The number of groups
    must divide that of the channels. Each `fibre` of channels has one scale and one bias.

    Source: Wu and He 2018.
    """

    num_groups: int
    fibre: int = 1

    @nn.compact
    def __call__(self, x: Float[Array, "n h w c"]) -> Float[Array, "n h w c"]:
        """Normalises each image of a batch separately."""
        n, channels = x.shape[0], x.shape[-1]
        per_group = channels // self.num_groups
        fields = (channels // self.fibre,)
        scale = jnp.repeat(self.param("scale", nn.initializers.ones, fields), self.fibre)
        bias = jnp.repeat(self.param("bias", nn.initializers.zeros, fields), self.fibre)

        def group_mean(images: Array) -> Array:
            means = _sum_of_pixels(images) / (x.shape[1] * x.shape[2])
            if _computed() == "tpu":
                # One small product, because taking groups of lanes apart is slow on a TPU.
                share = jnp.repeat(jnp.repeat(jnp.eye(self.num_groups), per_group, 0), per_group, 1)
                return jnp.matmul(_apart(means), share / per_group, precision="highest")
            groups = means.reshape(n, self.num_groups, per_group)
            return jnp.repeat(jnp.mean(groups, axis=2), per_group, axis=1)

        x32 = at_least_float32(x)
        mean = group_mean(x32)
        variance = jnp.maximum(group_mean(jnp.square(x32)) - jnp.square(mean), 0)
        factor = scale * jax.lax.rsqrt(variance + 1e-5)
        offset = bias - mean * factor
        # If `x32` were used here, too, a TPU would write it to memory, in twice the bytes.
        images = x if _computed() == "tpu" else x32
        normalised = images * _at_pixels(factor, images) + _at_pixels(offset, images)
        return normalised.astype(x.dtype)


def _apart(statistic: Float[Array, "n c"]) -> Float[Array, "n c"]:
    """The same numbers behind an optimization barrier.

    Without it, XLA merges a gradient's sum over pixels with the following sum over views, which
    costs another pass over the images.
    """
    return jax.lax.optimization_barrier(statistic)


def _sum_of_pixels(images: Float[Array, "n h w c"]) -> Float[Array, "n c"]:
    """Sums over the pixels of each channel; with "matmul", as a product with a row of ones.

    XLA's sums on CPU are slow, and repeat the cheap steps that lead to their arguments.
    """
    if _computed() != "matmul":
        return jnp.sum(images, axis=(1, 2))
    rows = images.reshape(images.shape[0], -1, images.shape[-1])
    return jnp.einsum("np,npc->nc", _ones(images), rows)


def _at_pixels(
    statistic: Float[Array, "n c"], images: Float[Array, "n h w c"]
) -> Float[Array, "n h w c"]:
    """A number per channel at every pixel of the images; its gradient is a `_sum_of_pixels`."""
    if _computed() == "tpu":
        everywhere = jnp.broadcast_to(_apart(statistic)[:, None, None], images.shape)
        return everywhere.astype(images.dtype)
    if _computed() == "matmul":
        return _at_pixels_by_product(statistic, images)
    return jnp.broadcast_to(statistic[:, None, None], images.shape)


@jax.custom_jvp
def _at_pixels_by_product(statistic: Array, images: Array) -> Array:
    """A number per channel at every pixel; its derivative and its transpose are products."""
    return jnp.broadcast_to(statistic[:, None, None], images.shape)


@_at_pixels_by_product.defjvp
def _at_pixels_by_product_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (statistic, images), (tangent, _) = primals, tangents
    rows = jnp.einsum("np,nc->npc", _ones(images), tangent)
    return _at_pixels_by_product(statistic, images), rows.reshape(images.shape)


def _ones(images: Float[Array, "n h w c"]) -> Float[Array, "n hw"]:
    """A one for each pixel, computed from the pixels, because XLA rewrites products with 1."""
    pixels = jax.lax.stop_gradient(images[..., 0])
    return 1 + 0 * pixels.reshape(images.shape[0], -1)


def group_norm(
    num_groups: int, num_channels: int, name: str | None = None, fibre: int = 1
) -> GroupNorm:
    """A `GroupNorm` with at most `num_groups` groups of whole fibres, a divisor of their number."""
    return GroupNorm(math.gcd(num_groups, num_channels // fibre), fibre, name=name)


def average_pool(x: Float[Array, "n h w c"]) -> Float[Array, "n h2 w2 c"]:
    """Means over 2×2 pixels; an odd last row or column is left out.

    On a TPU it is a convolution of each channel alone, which XLA fuses with the operations before
    and after it, forwards and backwards. If each example has its own weights (`own_weights`), XLA
    fuses only sums over windows.
    """
    n, height, width, channels = x.shape
    if _computed() != "tpu":
        x = x[:, : height // 2 * 2, : width // 2 * 2]
        return x.reshape(n, height // 2, 2, width // 2, 2, channels).mean(axis=(2, 4))
    if own_weights.get():
        window = (1, 2, 2, 1)
        # A constant zero in the images' dtype, because other starts have no derivative.
        zero = np.zeros((), x.dtype)
        return jax.lax.reduce_window(x * 0.25, zero, jax.lax.add, window, window, "VALID")
    quarter = jnp.full((2, 2, 1, channels), 0.25, x.dtype)
    return jax.lax.conv_general_dilated(
        x, quarter, (2, 2), "VALID", dimension_numbers=_NHWC, feature_group_count=channels
    )
