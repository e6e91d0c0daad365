"""ResNet-9, the network that the BAM authors train on CIFAR-10 and CIFAR-100."""

import flax.linen as nn
from jaxtyping import Array, Float

from bam.errors import InputError
from bam.models.layers import Conv, GroupNorm, average_pool, group_norm, mish
from bam.models.symmetries import ORDERS, invariant


class ResNet9(nn.Module):
    """Eight convolutions and a linear layer, with 2,447,946 parameters for 10 classes at width 64.

    conv w → conv 2w + pool → residual(2 × conv 2w) → [ScaleNorm] → conv 4w + pool →
    conv 4w + pool → residual(2 × conv 4w) → [ScaleNorm] → average-pool to 2×2 → linear, where
    conv is conv 3×3 → GroupNorm(32) → Mish and pool averages 2×2. No activation follows the
    additions, and ScaleNorm is an affine GroupNorm. If 32 does not divide the channels, GroupNorm
    has fewer groups. `norm_last` orders layers as TAN does: conv → Mish → GroupNorm (Sander et al.
    2023).

    With `symmetries`, logits are equal for an image and its mirror image (2), for the four turns of
    a square image (4), or for both (8). Channels are then fields with one number for each symmetry;
    a field has one kernel, scale and bias (Hölzl et al. 2023, arXiv 2301.13104). A step costs as
    much as without symmetries, and the parameters are nearly 2, 4 or 8 times fewer.

    Source: arXiv 2308.12018 and its authors' code.
    """

    num_classes: int
    width: int = 64
    scale_norm: bool = False
    weight_standardisation: str = "none"
    norm_last: bool = False
    symmetries: int = 1

    def __post_init__(self) -> None:
        """Checks the symmetries.

        InputError if they are not a group's order or do not divide the width.
        """
        if self.symmetries not in ORDERS or self.width % self.symmetries:
            raise InputError(
                f"--config.model.symmetries must be 1, 2, 4 or 8 and divide model.width, got "
                f"{self.symmetries} and {self.width}"
            )
        super().__post_init__()

    @nn.compact
    def __call__(self, images: Float[Array, "n h w c"]) -> Float[Array, "n classes"]:
        """Returns the logits of a batch of images whose sides are multiples of 16."""
        if images.shape[1] % 16 or images.shape[2] % 16:
            raise InputError(
                f"resnet9 needs images with sides that are multiples of 16, got {images.shape[1:]}"
            )
        w = self.width
        x = self._block(images, w, lifting=True)
        x = average_pool(self._block(x, 2 * w))
        x = self._residual(x, 2 * w)
        x = average_pool(self._block(x, 4 * w))
        x = average_pool(self._block(x, 4 * w))
        x = self._residual(x, 4 * w)
        n, height, width, channels = x.shape
        x = x.reshape(n, 2, height // 2, 2, width // 2, channels).mean(axis=(2, 4))
        x = invariant(x, self.symmetries)
        linear = nn.Dense(self.num_classes, kernel_init=nn.initializers.xavier_normal())
        return linear(x.reshape(n, -1))

    def _block(self, x: Array, features: int, lifting: bool = False) -> Array:
        x = Conv(
            features,
            weight_standardisation=self.weight_standardisation,
            symmetries=self.symmetries,
            lifting=lifting,
        )(x)
        norm = self._norm(features)
        return norm(mish(x)) if self.norm_last else mish(norm(x))

    def _residual(self, x: Array, features: int) -> Array:
        x = x + self._block(self._block(x, features), features)
        return self._norm(features)(x) if self.scale_norm else x

    def _norm(self, features: int) -> GroupNorm:
        return group_norm(32, features, fibre=self.symmetries)
