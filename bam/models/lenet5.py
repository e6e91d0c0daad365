"""LeNet-5, for MNIST."""

import flax.linen as nn
from jaxtyping import Array, Float

from bam.models.layers import Conv, average_pool


class LeNet5(nn.Module):
    """conv 5×5, 6 → pool → conv 5×5, 16 → pool → 120 → 84 → classes, with tanh.

    Tanh and average pooling are LeCun's own, and bounded activations suit private training. Both
    convolutions pad to the same size (the original's second does not), with bias.
    """

    num_classes: int

    @nn.compact
    def __call__(self, images: Float[Array, "n h w c"]) -> Float[Array, "n classes"]:
        """Logits of a batch of images."""
        x = images
        for features in (6, 16):
            x = nn.tanh(Conv(features, kernel_size=5, gain_and_bias=True)(x))
            x = average_pool(x)
        x = x.reshape(x.shape[0], -1)
        for features in (120, 84):
            x = nn.tanh(nn.Dense(features)(x))
        return nn.Dense(self.num_classes)(x)
