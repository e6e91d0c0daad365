"""A convolution whose kernel gradients, one for each example, are one grouped convolution.

The gradient with respect to a kernel is a convolution of the images with the gradient of the
output. For the gradients of many examples, `vmap` would make it a grouped forward convolution whose
window is as large as an image. Here `vmap` makes it the kernel gradient of one convolution with a
group for each example: on a GPU, a grouped "backward filter" convolution of cuDNN, with a window as
small as the kernel.

Both operations below are linear in each of their two arguments. They are primitives of JAX,
because a primitive can have a rule of its own for `vmap` and all derivatives. A function with
`custom_vjp` has no forward derivative, and one with `custom_vmap` cannot be transposed.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

NHWC = ("NHWC", "HWIO", "NHWC")
# For a CPU, XLA puts zeros between the examples in place of groups. A product of such a zero and
# NaN is NaN, so an example's NaN would leave its example, and the others would be clipped away.
PLATFORMS = ("cuda",)


class _Settings(NamedTuple):
    """What the operations know besides their arguments.

    Attributes:
      window: height and width of the kernel.
      stride: of both axes.
      padding: zeros before and after each axis.
      precision: of products; kept here, because the backward pass runs outside the context that
        chose it.
    """

    window: tuple[int, int]
    stride: int
    padding: tuple[tuple[int, int], ...]
    precision: str | None


def convolve(
    images: Float[Array, "n h w c"],
    kernel: Float[Array, "kh kw c f"],
    stride: int,
    padding: Sequence[tuple[int, int]],
) -> Float[Array, "n h2 w2 f"]:
    """Returns the convolution of XLA, whose kernel gradients are grouped under `vmap`."""
    height, width = kernel.shape[:2]
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    settings = _Settings((height, width), stride, tuple(padding), precision)
    return _convolution.bind(images, kernel, settings=settings)


def _convolve(images: Array, kernel: Array, *, settings: _Settings, groups: int = 1) -> Array:
    """Computes a convolution whose groups have equal shares of the channels and features."""
    return jax.lax.conv_general_dilated(
        images,
        kernel,
        (settings.stride, settings.stride),
        settings.padding,
        dimension_numbers=NHWC,
        feature_group_count=groups,
        precision=settings.precision,
    )


def _gradient_of_images(cotangent: Array, kernel: Array, like: Any, settings: _Settings) -> Array:
    """Returns the gradient with respect to images, which have the shape and dtype of `like`."""
    images = jax.ShapeDtypeStruct(like.shape, like.dtype)
    convolve = functools.partial(_convolve, kernel=kernel, settings=settings)
    return jax.linear_transpose(convolve, images)(cotangent)[0]


def _gradient_of_kernel(
    images: Array, cotangent: Array, *, settings: _Settings, groups: int = 1
) -> Array:
    """Returns the gradient with respect to the kernel, `[kh, kw, c / groups, f]`."""
    shape = (*settings.window, images.shape[-1] // groups, cotangent.shape[-1])
    kernel = jax.ShapeDtypeStruct(shape, images.dtype)
    convolve = functools.partial(_convolve, images, settings=settings, groups=groups)
    return jax.linear_transpose(lambda kernel: convolve(kernel), kernel)(cotangent)[0]


def _map_convolution(
    arguments: tuple[Array, Array], axes: tuple[int | None, int | None], *, settings: _Settings
) -> tuple[Array, int]:
    """Maps over images: with one kernel, all images are one batch."""
    images, kernel = arguments
    if axes[0] is None or axes[1] is not None:
        return jax.vmap(functools.partial(_convolve, settings=settings), axes)(images, kernel), 0
    images = jnp.moveaxis(images, axes[0], 0)
    together = images.reshape(math.prod(images.shape[:2]), *images.shape[2:])
    convolved = _convolution.bind(together, kernel, settings=settings)
    return convolved.reshape(*images.shape[:2], *convolved.shape[1:]), 0


def _map_gradient_of_kernel(
    arguments: tuple[Array, Array], axes: tuple[int | None, int | None], *, settings: _Settings
) -> tuple[Array, int]:
    """Maps over examples, on a GPU as the groups of one convolution."""
    (number,) = {x.shape[i] for x, i in zip(arguments, axes, strict=True) if i is not None}
    images, cotangents = (
        jnp.broadcast_to(x, (number, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(arguments, axes, strict=True)
    )
    one_by_one = jax.vmap(functools.partial(_gradient_of_kernel, settings=settings))
    by_groups = functools.partial(_gradients_by_groups, settings=settings)
    gradients = jax.lax.platform_dependent(
        images, cotangents, default=one_by_one, **dict.fromkeys(PLATFORMS, by_groups)
    )
    return gradients, 0


def _gradients_by_groups(images: Array, cotangents: Array, *, settings: _Settings) -> Array:
    """Returns the gradients of examples, `[examples, kh, kw, c, f]`, by one convolution."""
    number, features = len(images), cotangents.shape[-1]

    def side_by_side(x: Array) -> Array:
        """[examples, n, h, w, c] -> [n, h, w, examples · c]."""
        return jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], number * x.shape[4])

    gradients = _gradient_of_kernel(
        side_by_side(images), side_by_side(cotangents), settings=settings, groups=number
    )
    return jnp.moveaxis(gradients.reshape(*gradients.shape[:3], number, features), 3, 0)


def _primitive(
    name: str,
    compute: Callable[..., Array],
    gradient_of_first: Callable[..., Array],
    gradient_of_second: Callable[..., Array],
    map_over: Callable[..., tuple[Array, int]],
) -> Primitive:
    """Returns a primitive that is linear in each of its two arguments."""

    def shape(*arguments: Any, settings: _Settings) -> ShapedArray:
        result = jax.eval_shape(functools.partial(compute, settings=settings), *arguments)
        return ShapedArray(result.shape, result.dtype)

    primitive = Primitive(name)
    primitive.def_impl(compute)
    primitive.def_abstract_eval(shape)
    ad.defbilinear(primitive, gradient_of_first, gradient_of_second)
    batching.primitive_batchers[primitive] = map_over
    mlir.register_lowering(primitive, mlir.lower_fun(compute, multiple_results=False))
    return primitive


# In a rule, the argument whose gradient is asked for has a shape and a dtype, but no value.
_convolution: Primitive = _primitive(
    "convolution",
    _convolve,
    lambda cotangent, images, kernel, settings: _gradient_of_images(
        cotangent, kernel, images.aval, settings
    ),
    lambda cotangent, images, _, settings: _kernel_gradient.bind(
        images, cotangent, settings=settings
    ),
    _map_convolution,
)
_kernel_gradient: Primitive = _primitive(
    "kernel_gradient",
    _gradient_of_kernel,
    lambda kernel, images, cotangent, settings: _gradient_of_images(
        cotangent, kernel, images.aval, settings
    ),
    lambda kernel, images, _, settings: _convolution.bind(images, kernel, settings=settings),
    _map_gradient_of_kernel,
)
