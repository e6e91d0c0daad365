"""Layers the models share.

A convolution can be computed in several ways that agree to float rounding and differ greatly in
speed once every example has its own gradient. Models only say `Conv`; the choice is made here.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def conv2d(
    images: Float[Array, "n h w c"], kernel: Float[Array, "kh kw c f"]
) -> Float[Array, "n h w f"]:
    """Two-dimensional convolution, stride 1, zero padding to the same size, no bias.

    Args:
      images: batch of images, channels last.
      kernel: odd-sized kernel, `[height, width, channels in, features out]`.

    Returns:
      Feature maps of the same height and width. On CPU the convolution is one matrix product of
      shifted copies of the image, which keeps its speed inside loops and under `vmap`, where
      XLA's own CPU convolution loses it; elsewhere it is XLA's.
    """
    if jax.default_backend() == "cpu":
        return _conv2d_as_matmul(images, kernel)
    return jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _conv2d_as_matmul(images: Array, kernel: Array) -> Array:
    kernel_height, kernel_width, channels, features = kernel.shape
    _, height, width, _ = images.shape
    top, left = (kernel_height - 1) // 2, (kernel_width - 1) // 2
    bottom, right = kernel_height - 1 - top, kernel_width - 1 - left
    padded = jnp.pad(images, ((0, 0), (top, bottom), (left, right), (0, 0)))
    shifted = [
        padded[:, i : i + height, j : j + width]
        for i in range(kernel_height)
        for j in range(kernel_width)
    ]
    patches = jnp.concatenate(shifted, axis=-1)
    return patches @ kernel.reshape(kernel_height * kernel_width * channels, features)


class Conv(nn.Module):
    """Convolution without bias, stride 1, same padding.

    Attributes:
      features: number of output channels.
      kernel_size: odd side of the square kernel.
      kernel_init: initialiser of the `[k, k, channels, features]` kernel.
    """

    features: int
    kernel_size: int = 3
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, images: Float[Array, "n h w c"]) -> Float[Array, "n h w f"]:
        """Convolves a batch of images."""
        shape = (self.kernel_size, self.kernel_size, images.shape[-1], self.features)
        return conv2d(images, self.param("kernel", self.kernel_init, shape))
