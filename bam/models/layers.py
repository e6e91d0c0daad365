"""Layers that the models share.

A convolution has several formulations, which agree up to float rounding. Their speed differs
greatly when each example has its own gradient. Models use `Conv`, and this module chooses the
formulation.
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

from bam.core.own_weights import own_weights
from bam.core.pytree import at_least_float32
from bam.errors import InputError
from bam.models import grouped
from bam.models.symmetries import tied_kernel

WEIGHT_STANDARDISATIONS = ("none", "centre", "standardise")
FORMULATIONS = ("matmul", "xla", "grouped", "tpu")

# Platform -> its default formulation; "xla" on other platforms.
OF_PLATFORM = {"cpu": "matmul", "tpu": "tpu"}

_formulation = contextvars.ContextVar("convolution formulation", default="")


@contextlib.contextmanager
def convolutions_as(name: str) -> Iterator[None]:
    """Chooses the formulation of the layers for code that is traced inside.

    "matmul": a convolution is one matrix product with shifted copies of the image, and sums over
    pixels are products, too. "xla": the convolution of XLA. "grouped": the same, but on a GPU the
    kernel gradients of a microbatch's examples are one grouped convolution (`bam.models.grouped`).
    "tpu": the convolution of XLA, with pooling and normalisation in a form that a TPU fuses with
    it. "": "matmul" on CPU, "tpu" on TPU and "xla" elsewhere, chosen when the code is traced. GPUs
    keep "xla" until one has measured both.
    """
    if name and name not in FORMULATIONS:
        raise InputError(
            f"unknown convolution {name!r}; choose from {', '.join(FORMULATIONS)}, or '' for the "
            "platform's default"
        )
    token = _formulation.set(name)
    try:
        yield
    finally:
        _formulation.reset(token)


def formulation(name: str) -> str:
    """Returns the formulation `name`, or for "" the default of this platform."""
    return name or OF_PLATFORM.get(jax.default_backend(), "xla")


def _current() -> str:
    """Returns the formulation that `convolutions_as` chose."""
    return formulation(_formulation.get())


def conv2d(
    images: Float[Array, "n h w c"],
    kernel: Float[Array, "kh kw c f"],
    stride: int = 1,
    symmetric: bool = False,
) -> Float[Array, "n h2 w2 f"]:
    """Convolves in two dimensions without bias, with zero padding to "same" size.

    With a stride, XLA may pad less before an axis than after it. `symmetric` pads both sides by
    half of an odd kernel, as networks in PyTorch do. `convolutions_as` chooses the formulation: a
    matrix product keeps its speed inside loops and under `vmap`, where the CPU convolution of XLA
    becomes slow.
    """
    sides, strides = kernel.shape[:2], (stride, stride)
    padding = [(side // 2, side // 2) for side in sides]
    if not symmetric:
        pads = jax.lax.padtype_to_pads(images.shape[1:3], sides, strides, "SAME")
        padding = [(int(low), int(high)) for low, high in pads]  # older versions return NumPy's
    if _current() == "matmul":
        return _conv2d_as_matmul(images, kernel, stride, padding)
    if _current() == "grouped":
        return grouped.convolve(images, kernel, stride, padding)
    return jax.lax.conv_general_dilated(
        images, kernel, strides, padding, dimension_numbers=grouped.NHWC
    )


def _conv2d_as_matmul(
    images: Array, kernel: Array, stride: int, padding: Sequence[tuple[int, int]]
) -> Array:
    """Computes `conv2d` as a product of patches `[n·h2·w2, kh·kw·c]` and kernel `[kh·kw·c, f]`."""
    kernel_height, kernel_width, channels, features = kernel.shape
    _, height, width, _ = images.shape
    padded = jnp.pad(images, ((0, 0), *padding, (0, 0)))
    shifted = [
        padded[:, i : i + height : stride, j : j + width : stride]
        for i in range(kernel_height)
        for j in range(kernel_width)
    ]
    patches = jnp.concatenate(shifted, axis=-1)
    # One axis of rows: with several, XLA transposes the output's gradient for the kernel's.
    rows = patches.reshape(-1, kernel_height * kernel_width * channels)
    return (rows @ kernel.reshape(-1, features)).reshape(*patches.shape[:-1], features)


def standardise_weights(
    kernel: Float[Array, "kh kw c f"], kind: str, gain: Float[Array, "#f"] | float = 1.0
) -> Float[Array, "kh kw c f"]:
    r"""Standardises the weights of each output feature, over the other axes of the kernel.

    "none": $w$; "centre": $w - \mathrm{mean}(w)$; "standardise":
    $(w - \mathrm{mean}(w)) / \sqrt{\max(\mathrm{var}(w) \cdot \text{fan-in}, 10^{-4})}$.
    The result is multiplied by the gain of each feature. It does not mix examples, because it
    reads only weights.

    Source: Qiao et al. 2019; De et al. 2022 (floor and fan-in); the BAM authors' code ("centre").
    """
    if kind == "none":
        return gain * kernel
    if kind == "centre":
        return gain * (kernel - jnp.mean(kernel, axis=(0, 1, 2)))
    # Each sum over a gradient is a pass over every example's gradient, so the sums below do not
    # depend on each other. Subtracting the mean as a constant changes neither the variance nor its
    # derivatives, and avoids cancellation in mean(w²) - mean(w)².
    near = kernel - jax.lax.stop_gradient(jnp.mean(kernel, axis=(0, 1, 2)))
    mean = jnp.mean(near, axis=(0, 1, 2))
    variance = jnp.mean(jnp.square(near), axis=(0, 1, 2)) - jnp.square(mean)
    fan_in = kernel.shape[0] * kernel.shape[1] * kernel.shape[2]
    factor = gain * jax.lax.rsqrt(jnp.maximum(variance * fan_in, 1e-4))
    return factor * near - factor * mean


class Conv(nn.Module):
    """Convolution with "same" padding and a square kernel, whose weights begin as N(0, 1/fan-in).

    `gain_and_bias` learns a gain (a factor of the weights, initially 1) and a bias (initially 0)
    for each channel; `use_bias` learns a bias only. `symmetric` is as in `conv2d`. `symmetries` is
    the order of a group over which the kernel is tied, see `symmetries.tied_kernel`; each field
    then has one gain and one bias.
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
        kernel = tied_kernel(kernel, self.symmetries, self.lifting)
        convolved = conv2d(images, kernel, self.stride, self.symmetric)
        if self.gain_and_bias or self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (fields,))
            convolved += jnp.repeat(bias, self.symmetries)
        return convolved


@jax.custom_jvp
def mish(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    r"""Mish activation, $x \tanh(\log(1 + e^x))$ (Misra 2019), differentiable any number of times.

    With $n = e^x (e^x + 2)$ the hyperbolic tangent is $n / (n + 2)$. That needs one exponential;
    the textbook form and its derivative need several: a sixth of a small ResNet-9's CPU time.
    """
    n, _ = _mish_terms(x)
    return x * (n * (1 / (n + 2)))


@mish.defjvp
def _mish_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    n, bend = _mish_terms(x)
    reciprocal = 1 / (n + 2)
    # In the backward pass the division comes last. XLA on CPU stores a quotient once, but it
    # computes a product, and the cheap steps before it, again for every operation that uses it.
    return x * (n * reciprocal), tangent / (n + 2) * (n + bend * reciprocal)


def _mish_terms(x: Array) -> tuple[Array, Array]:
    """Returns `n` and `bend` of the slope `(n + bend / (n + 2)) / (n + 2)`.

    Above 20 the slope is 1 up to rounding in float64, so x is cut there and `exp` cannot overflow.
    """
    x = jnp.minimum(x, 20)
    exp = jnp.exp(x)
    return exp * (exp + 2), 4 * x * exp * (exp + 1)


class GroupNorm(nn.Module):
    r"""Group normalisation, $\gamma (x - \mu_g) / \sqrt{\sigma_g^2 + 10^{-5}} + \beta$, per image.

    Sums run over the pixels of each channel first and then over the few channels of a group, which
    XLA vectorises on CPU. The layer of Flax has the same parameters and results, but takes several
    times as long there. Statistics are float32 for any input dtype. `num_groups` must divide the
    number of channels. Each `fibre` neighbouring channels share one scale and one bias.

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
            if _current() == "tpu":
                # One small product, because a TPU is slow at separating groups of lanes.
                share = jnp.repeat(jnp.repeat(jnp.eye(self.num_groups), per_group, 0), per_group, 1)
                return jnp.matmul(_apart(means), share / per_group, precision="highest")
            groups = means.reshape(n, self.num_groups, per_group)
            return jnp.repeat(jnp.mean(groups, axis=2), per_group, axis=1)

        x32 = at_least_float32(x)
        mean = group_mean(x32)
        variance = jnp.maximum(group_mean(jnp.square(x32)) - jnp.square(mean), 0)
        factor = scale * jax.lax.rsqrt(variance + 1e-5)
        offset = bias - mean * factor
        # A second use of `x32` would make a TPU write it to memory, in twice the bytes of `x`.
        images = x if _current() == "tpu" else x32
        normalised = images * _at_pixels(factor, images) + _at_pixels(offset, images)
        return normalised.astype(x.dtype)


def _apart(statistic: Float[Array, "n c"]) -> Float[Array, "n c"]:
    """Returns the same numbers behind an optimization barrier.

    Without it, XLA merges a gradient's sum over pixels with the following sum over views, which
    costs another pass over the images.
    """
    return jax.lax.optimization_barrier(statistic)


def _sum_of_pixels(images: Float[Array, "n h w c"]) -> Float[Array, "n c"]:
    """Sums over the pixels of each channel.

    With "matmul" this is a product with a row of ones. On CPU, sums by XLA are slow, and they
    repeat the cheap steps that lead to their arguments.
    """
    if _current() != "matmul":
        return jnp.sum(images, axis=(1, 2))
    rows = images.reshape(images.shape[0], -1, images.shape[-1])
    return jnp.einsum("np,npc->nc", _ones(images), rows)


def _at_pixels(
    statistic: Float[Array, "n c"], images: Float[Array, "n h w c"]
) -> Float[Array, "n h w c"]:
    """Returns the statistic of each channel at every pixel.

    Its gradient is a `_sum_of_pixels`.
    """
    if _current() == "tpu":
        everywhere = jnp.broadcast_to(_apart(statistic)[:, None, None], images.shape)
        return everywhere.astype(images.dtype)
    if _current() == "matmul":
        return _at_pixels_by_product(statistic, images)
    return jnp.broadcast_to(statistic[:, None, None], images.shape)


@jax.custom_jvp
def _at_pixels_by_product(statistic: Array, images: Array) -> Array:
    """Does the same as `_at_pixels`, with matrix products as derivative and transpose."""
    return jnp.broadcast_to(statistic[:, None, None], images.shape)


@_at_pixels_by_product.defjvp
def _at_pixels_by_product_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (statistic, images), (tangent, _) = primals, tangents
    rows = jnp.einsum("np,nc->npc", _ones(images), tangent)
    return _at_pixels_by_product(statistic, images), rows.reshape(images.shape)


def _ones(images: Float[Array, "n h w c"]) -> Float[Array, "n hw"]:
    """Returns a one for each pixel, computed from the pixels.

    XLA would rewrite products with a constant 1.
    """
    pixels = jax.lax.stop_gradient(images[..., 0])
    return 1 + 0 * pixels.reshape(images.shape[0], -1)


def group_norm(
    num_groups: int, num_channels: int, name: str | None = None, fibre: int = 1
) -> GroupNorm:
    """Returns a `GroupNorm` with gcd(`num_groups`, number of fibres) groups."""
    return GroupNorm(math.gcd(num_groups, num_channels // fibre), fibre, name=name)


def average_pool(x: Float[Array, "n h w c"]) -> Float[Array, "n h2 w2 c"]:
    """Returns means over 2×2 pixels, without an odd last row or column.

    On a TPU it is a convolution of each channel, which XLA fuses with the operations before and
    after it, in both directions. If each example has its own weights (`own_weights`), XLA fuses
    only sums over windows.
    """
    n, height, width, channels = x.shape
    if _current() != "tpu":
        x = x[:, : height // 2 * 2, : width // 2 * 2]
        return x.reshape(n, height // 2, 2, width // 2, 2, channels).mean(axis=(2, 4))
    if own_weights.get():
        window = (1, 2, 2, 1)
        # Zero as a constant in the images' dtype: with another start JAX has no derivative.
        zero = np.zeros((), x.dtype)
        return jax.lax.reduce_window(x * 0.25, zero, jax.lax.add, window, window, "VALID")
    quarter = jnp.full((2, 2, 1, channels), 0.25, x.dtype)
    return jax.lax.conv_general_dilated(
        x, quarter, (2, 2), "VALID", dimension_numbers=grouped.NHWC, feature_group_count=channels
    )
