"""A small GroupNorm network for small images: the demo's model."""

import flax.linen as nn
from jaxtyping import Array, Float

from bam.models.layers import Conv, average_pool, group_norm


class ConvNet(nn.Module):
    """Two blocks of conv 3×3 → GroupNorm → ReLU → average pool, then a linear layer.

    The first block has `width` channels, a multiple of 4, the second twice as many.
    """

    num_classes: int
    width: int = 16

    @nn.compact
    def __call__(self, images: Float[Array, "n h w c"]) -> Float[Array, "n classes"]:
        """Logits of a batch of images."""
        x = images
        for features in (self.width, 2 * self.width):
            x = Conv(features)(x)
            x = group_norm(4, x.shape[-1])(x)
            x = nn.relu(x)
            x = average_pool(x)
        return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))
