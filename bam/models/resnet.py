"""ResNet-18 and ResNet-50 with GroupNorm that compute the same as those of timm."""

import functools
from collections.abc import Sequence

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from bam.models.layers import Conv, group_norm


class ResNet(nn.Module):
    """A ResNet for images of ImageNet's size: a stem of stride 4 and four stages.

    GroupNorm(32) replaces BatchNorm, which mixes examples. A block has two 3×3 convolutions; with
    `bottleneck` it has 1×1, 3×3 and 1×1, with four times the features at its end. `width` is the
    number of features of the stem. With 0 classes there is no head, and the mean over the pixels
    of the last stage is returned.

    Source: He et al. 2016; Wu and He 2018 (GroupNorm); timm's `resnet50_gn`.
    """

    num_classes: int
    width: int = 64
    blocks: Sequence[int] = (2, 2, 2, 2)
    bottleneck: bool = False

    @nn.compact
    def __call__(self, images: Float[Array, "n h w c"]) -> Float[Array, "n classes"]:
        """Returns the logits of a batch of images."""
        x = nn.relu(self._conv("stem", self.width, 7, 2)(images))
        around = ((0, 0), (1, 1), (1, 1), (0, 0))
        x = jnp.pad(x, around)  # zeros never win the maximum, because activations are at least 0
        x = nn.max_pool(x, (3, 3), (2, 2))
        for stage, num_blocks in enumerate(self.blocks):
            for block in range(num_blocks):
                stride = 2 if stage and not block else 1
                x = self._block(f"layer{stage + 1}_{block}", x, self.width * 2**stage, stride)
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(self.num_classes, name="head")(x) if self.num_classes else x

    def _block(self, name: str, x: Array, features: int, stride: int) -> Array:
        """Applies a residual block.

        As in PyTorch, the 3×3 convolution has the stride, not the 1×1.
        """
        out = 4 * features if self.bottleneck else features
        layers = [(features, 3, stride), (out, 3, 1)]
        if self.bottleneck:
            layers = [(features, 1, 1), (features, 3, stride), (out, 1, 1)]
        y = x
        for i, (width, size, step) in enumerate(layers):
            y = nn.relu(y) if i else y
            y = self._conv(f"{name}_{i + 1}", width, size, step)(y)
        if stride > 1 or x.shape[-1] != out:
            x = self._conv(f"{name}_skip", out, 1, stride)(x)
        return nn.relu(y + x)

    def _conv(self, name: str, features: int, size: int, stride: int) -> nn.Module:
        return _ConvNorm(features, size, stride, name=name)


class _ConvNorm(nn.Module):
    """A convolution without bias, then GroupNorm(32)."""

    features: int
    kernel_size: int
    stride: int

    @nn.compact
    def __call__(self, x: Float[Array, "n h w c"]) -> Float[Array, "n h2 w2 f"]:
        conv = Conv(self.features, self.kernel_size, self.stride, symmetric=True, name="conv")
        return group_norm(32, self.features, name="norm")(conv(x))


resnet50 = functools.partial(ResNet, blocks=(3, 4, 6, 3), bottleneck=True)
