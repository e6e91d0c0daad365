"""A small convolutional network with tanh, for private training on features."""

import flax.linen as nn
from jaxtyping import Array, Float

from bam.models.layers import Conv


class TanhCNN(nn.Module):
    """conv 3×3 → tanh → max pool 2 → conv 3×3 → tanh → linear, with biases.

    Both convolutions have `width` channels. The network of Tramèr and Boneh (arXiv 2011.11660) for
    scattering features of colour images, where `width` is 64.
    """

    num_classes: int
    width: int = 64

    @nn.compact
    def __call__(self, features: Float[Array, "n h w c"]) -> Float[Array, "n classes"]:
        """Logits of a batch of features."""
        x = nn.tanh(Conv(self.width, use_bias=True)(features))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.tanh(Conv(self.width, use_bias=True)(x))
        return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))
