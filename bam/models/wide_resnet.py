"""Wide ResNets: that of De et al. (the default), and the variant of the BAM authors."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from bam.errors import InputError
from bam.models.layers import Conv, group_norm, mish


class WideResNet(nn.Module):
    """The private WRN-16-4 of De et al. 2022, with 2,753,818 parameters for 10 classes.

    Every layer is ReLU → GroupNorm(16) → weight-standardised conv with gain and bias, also the
    projection in the first block of each stage. The end is ReLU → GroupNorm → global mean → linear.
    `width` is the widening factor; `depth` is 6n + 4. With `shortcut_norm_first` the projections
    are GroupNorm → ReLU → conv: order 3 of TAN (Sander et al. 2023, arXiv 2210.03403).

    Source: De et al. 2022, "Unlocking High-Accuracy Differentially Private Image Classification".
    """

    num_classes: int
    width: int = 4
    depth: int = 16
    weight_standardisation: str = "standardise"
    shortcut_norm_first: bool = False

    @nn.compact
    def __call__(self, images: Float[Array, "n h w c"]) -> Float[Array, "n classes"]:
        """Returns the logits of a batch of images."""
        return _logits(self, images)

    def _activate(self, x: Array) -> Array:
        return group_norm(16, x.shape[-1])(nn.relu(x))

    def _conv(self, x: Array, features: int, stride: int = 1, kernel_size: int = 3) -> Array:
        conv = Conv(features, kernel_size, stride, self.weight_standardisation, gain_and_bias=True)
        return conv(x)

    def _block(self, x: Array, features: int, stride: int, project: bool) -> Array:
        skip = x
        if project:
            norm_first = self.shortcut_norm_first
            skip = nn.relu(group_norm(16, x.shape[-1])(x)) if norm_first else self._activate(x)
            skip = self._conv(skip, features, stride, kernel_size=1)
        x = self._conv(self._activate(x), features, stride)
        return self._conv(self._activate(x), features) + skip


class WideResNetBam(nn.Module):
    """The WRN-16-4 of the BAM authors: GroupNorm(≤ 32) → Mish → conv, ScaleNorm after each block.

    `width` and `depth` are as in `WideResNet`. ScaleNorm is an affine GroupNorm after the addition.
    """

    num_classes: int
    width: int = 4
    depth: int = 16
    scale_norm: bool = True
    weight_standardisation: str = "none"

    @nn.compact
    def __call__(self, images: Float[Array, "n h w c"]) -> Float[Array, "n classes"]:
        """Returns the logits of a batch of images."""
        return _logits(self, images)

    def _activate(self, x: Array) -> Array:
        return mish(group_norm(32, x.shape[-1])(x))

    def _conv(self, x: Array, features: int, stride: int = 1, kernel_size: int = 3) -> Array:
        return Conv(features, kernel_size, stride, self.weight_standardisation)(x)

    def _block(self, x: Array, features: int, stride: int, project: bool) -> Array:
        activated = self._activate(x)
        skip = self._conv(activated, features, stride, kernel_size=1) if project else x
        x = self._conv(activated, features, stride)
        x = self._conv(self._activate(x), features) + skip
        return group_norm(32, features)(x) if self.scale_norm else x


def _logits(network: WideResNet | WideResNetBam, images: Array) -> Array:
    """Conv 16 → three stages of blocks with 16, 32 and 64 · width features → mean → linear.

    The first block of each stage projects its shortcut and has stride 1, 2 and 2.
    """
    blocks, rest = divmod(network.depth - 4, 6)
    if blocks < 1 or rest:
        raise InputError(
            f"the depth of a wide ResNet must be 6n + 4 (10, 16, 22, …), got {network.depth}"
        )
    x = network._conv(images, 16)
    for stage, stride in enumerate((1, 2, 2)):
        features = 16 * 2**stage * network.width
        x = network._block(x, features, stride, project=True)
        for _ in range(blocks - 1):
            x = network._block(x, features, 1, project=False)
    return nn.Dense(network.num_classes)(jnp.mean(network._activate(x), axis=(1, 2)))
