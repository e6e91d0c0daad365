"""Wide ResNets: De et al.'s (the default) and the BAM authors' variant."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from bam.models.layers import Conv, group_norm, mish


class WideResNet(nn.Module):
    """WRN-16-4 as De et al. 2022 train it privately; 2,753,818 parameters for 10 classes.

    Every layer is ReLU → GroupNorm(16) → weight-standardised conv with gain and bias, the
    projection of the first block of each stage included; then ReLU → GroupNorm → global mean →
    linear. `width` is the widening factor; `depth` is 6n + 4. `shortcut_norm_first` makes the
    projections GroupNorm → ReLU → conv: order 3 of TAN (Sander et al. 2023, arXiv 2210.03403).

    Source: De et al. 2022, "Unlocking High-Accuracy Differentially Private Image Classification".
    """

    num_classes: int
    width: int = 4
    depth: int = 16
    weight_standardisation: str = "standardise"
    shortcut_norm_first: bool = False

    @nn.compact
    def __call__(self, images: Float[Array, "n h w c"]) -> Float[Array, "n classes"]:
        """Logits of a batch of images."""
        x = self._conv(images, 16)
        for stage, stride in enumerate((1, 2, 2)):
            features = 16 * 2**stage * self.width
            for block in range(_blocks_per_stage(self.depth)):
                first_stride = stride if block == 0 else 1
                skip = x
                if block == 0:
                    ahead = _norm_relu(x) if self.shortcut_norm_first else _relu_norm(x)
                    skip = self._conv(ahead, features, first_stride, kernel_size=1)
                x = self._conv(_relu_norm(x), features, first_stride)
                x = self._conv(_relu_norm(x), features) + skip
        return nn.Dense(self.num_classes)(jnp.mean(_relu_norm(x), axis=(1, 2)))

    def _conv(self, x: Array, features: int, stride: int = 1, kernel_size: int = 3) -> Array:
        conv = Conv(features, kernel_size, stride, self.weight_standardisation, gain_and_bias=True)
        return conv(x)


def _relu_norm(x: Array) -> Array:
    return group_norm(16, x.shape[-1])(nn.relu(x))


def _norm_relu(x: Array) -> Array:
    return nn.relu(group_norm(16, x.shape[-1])(x))


def _blocks_per_stage(depth: int) -> int:
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(f"the depth of a wide ResNet is 6n + 4 (10, 16, 22, …), got {depth}")
    return (depth - 4) // 6


class WideResNetBam(nn.Module):
    """The BAM authors' WRN-16-4: GroupNorm(≤ 32) → Mish → conv, ScaleNorm after each block.

    `width` and `depth` as in `WideResNet`; ScaleNorm is an affine GroupNorm after the addition.
    """

    num_classes: int
    width: int = 4
    depth: int = 16
    scale_norm: bool = True
    weight_standardisation: str = "none"

    @nn.compact
    def __call__(self, images: Float[Array, "n h w c"]) -> Float[Array, "n classes"]:
        """Logits of a batch of images."""
        x = self._conv(images, 16)
        for stage, stride in enumerate((1, 2, 2)):
            features = 16 * 2**stage * self.width
            for block in range(_blocks_per_stage(self.depth)):
                first_stride = stride if block == 0 else 1
                ahead = _norm_mish(x)
                skip = self._conv(ahead, features, first_stride, 1) if block == 0 else x
                x = self._conv(ahead, features, first_stride)
                x = self._conv(_norm_mish(x), features) + skip
                if self.scale_norm:
                    x = group_norm(32, features)(x)
        return nn.Dense(self.num_classes)(jnp.mean(_norm_mish(x), axis=(1, 2)))

    def _conv(self, x: Array, features: int, stride: int = 1, kernel_size: int = 3) -> Array:
        return Conv(features, kernel_size, stride, self.weight_standardisation)(x)


def _norm_mish(x: Array) -> Array:
    return mish(group_norm(32, x.shape[-1])(x))
