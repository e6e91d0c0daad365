"""Networks of a few layers for small images, features and tables, and a deep one for timing."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from bam.errors import InputError
from bam.models.layers import Conv, average_pool, group_norm


class Linear(nn.Module):
    """Multinomial logistic regression on flattened inputs, zero-initialised.

    The weight is `[classes, inputs]`, as in PyTorch; a kernel of Flax would be `[inputs, classes]`.
    An example's gradient is the product of a column and a row. With this layout XLA never stores it
    on CPU, but computes it where it is read, in long rows.
    """

    num_classes: int
    width: int = 1  # ignored

    @nn.compact
    def __call__(self, inputs: Float[Array, "n ..."]) -> Float[Array, "n classes"]:
        """Returns the logits of a batch of inputs."""
        flat = inputs.reshape(inputs.shape[0], -1)
        shape = (self.num_classes, flat.shape[1])
        weight = self.param("weight", nn.initializers.zeros, shape)
        bias = self.param("bias", nn.initializers.zeros, (self.num_classes,))
        return flat @ weight.T + bias


class LeNet5(nn.Module):
    """conv 5×5, 6 → pool → conv 5×5, 16 → pool → 120 → 84 → classes, with tanh: for MNIST.

    Tanh and average pooling are those of the original, and bounded activations suit private
    training. Both convolutions have a bias and pad to the same size; the second of the original
    does not pad.
    """

    num_classes: int
    width: int = 1  # ignored

    @nn.compact
    def __call__(self, images: Float[Array, "n h w c"]) -> Float[Array, "n classes"]:
        """Returns the logits of a batch of images."""
        x = images
        for features in (6, 16):
            x = average_pool(nn.tanh(Conv(features, kernel_size=5, gain_and_bias=True)(x)))
        x = x.reshape(x.shape[0], -1)
        for features in (120, 84):
            x = nn.tanh(nn.Dense(features)(x))
        return nn.Dense(self.num_classes)(x)


class ConvNet(nn.Module):
    """The model of the demo: two blocks conv 3×3 → GroupNorm → ReLU → average pool, then linear.

    The first block has `width` channels, the second twice as many.
    """

    num_classes: int
    width: int = 16

    @nn.compact
    def __call__(self, images: Float[Array, "n h w c"]) -> Float[Array, "n classes"]:
        """Returns the logits of a batch of images."""
        x = images
        for features in (self.width, 2 * self.width):
            x = average_pool(nn.relu(group_norm(4, features)(Conv(features)(x))))
        return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))


class TanhCNN(nn.Module):
    """conv 3×3 → tanh → max pool 2 → conv 3×3 → tanh → linear, with biases.

    Both convolutions have `width` channels. With 64 it is the network of Tramèr and Boneh (arXiv
    2011.11660) for scattering features of colour images.
    """

    num_classes: int
    width: int = 64

    @nn.compact
    def __call__(self, features: Float[Array, "n h w c"]) -> Float[Array, "n classes"]:
        """Returns the logits of a batch of features."""
        x = nn.tanh(Conv(self.width, use_bias=True)(features))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.tanh(Conv(self.width, use_bias=True)(x))
        return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))


class DeepResidual(nn.Module):
    """dense → a scan over `depth` − 2 residual layers → dense, with `width` units in each.

    The compile time does not grow with the depth: the weights of the residual layers are stacked
    along one axis, and their code is compiled once.
    """

    num_classes: int
    width: int = 32
    depth: int = 10

    @nn.compact
    def __call__(self, inputs: Float[Array, "n ..."]) -> Float[Array, "n classes"]:
        """Returns the logits of a batch of inputs of any shape."""
        if self.depth < 2:
            raise InputError(f"deep_residual needs a depth of at least 2, got {self.depth}")
        x = nn.tanh(nn.Dense(self.width)(inputs.reshape(inputs.shape[0], -1)))
        if self.depth > 2:
            scanned = nn.scan(
                _Block,  # its name is part of the names of parameters in checkpoints
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.depth - 2,
            )
            x, _ = scanned(self.width, self.depth)(x, None)
        return nn.Dense(self.num_classes)(x)


class _Block(nn.Module):
    """x + tanh(W x + b) / √depth."""

    width: int
    depth: int

    @nn.compact
    def __call__(self, x: Array, _: None) -> tuple[Array, None]:
        return x + nn.tanh(nn.Dense(self.width)(x)) / jnp.sqrt(float(self.depth)), None
