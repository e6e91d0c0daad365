"""Logistic regression."""

import flax.linen as nn
from jaxtyping import Array, Float


class Linear(nn.Module):
    """Multinomial logistic regression on flattened inputs, zero-initialised.

    The weight is `[classes, inputs]`, as PyTorch's, where a kernel of Flax is `[inputs, classes]`:
    an example's gradient, the product of a column and a row, is then never stored on CPU, but
    computed where it is read, a long row at a time.
    """

    num_classes: int

    @nn.compact
    def __call__(self, inputs: Float[Array, "n ..."]) -> Float[Array, "n classes"]:
        """Logits of a batch of inputs."""
        flat = inputs.reshape(inputs.shape[0], -1)
        shape = (self.num_classes, flat.shape[1])
        weight = self.param("weight", nn.initializers.zeros, shape)
        bias = self.param("bias", nn.initializers.zeros, (self.num_classes,))
        return flat @ weight.T + bias
