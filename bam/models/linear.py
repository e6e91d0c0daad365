"""Logistic regression."""

import flax.linen as nn
from jaxtyping import Array, Float


class Linear(nn.Module):
    """Multinomial logistic regression on flattened inputs, zero-initialised."""

    num_classes: int

    @nn.compact
    def __call__(self, inputs: Float[Array, "n ..."]) -> Float[Array, "n classes"]:
        """Logits of a batch of inputs."""
        flat = inputs.reshape(inputs.shape[0], -1)
        return nn.Dense(self.num_classes, kernel_init=nn.initializers.zeros)(flat)
