"""A network of any depth whose compile time does not grow with it, for timing."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float


class _Block(nn.Module):
    """x + tanh(W x + b) / √depth."""

    width: int
    depth: int

    @nn.compact
    def __call__(self, x: Array, _: None) -> tuple[Array, None]:
        return x + nn.tanh(nn.Dense(self.width)(x)) / jnp.sqrt(float(self.depth)), None


class DeepResidual(nn.Module):
    """dense → `depth` − 2 identical residual layers, scanned → dense; `width` units each.

    The residual layers' weights are stacked along one axis and their code is compiled once.
    """

    num_classes: int
    width: int = 32
    depth: int = 10

    @nn.compact
    def __call__(self, inputs: Float[Array, "n ..."]) -> Float[Array, "n classes"]:
        """Logits of a batch of inputs of any shape."""
        if self.depth < 2:
            raise ValueError(f"deep_residual needs a depth of at least 2, got {self.depth}")
        x = nn.tanh(nn.Dense(self.width)(inputs.reshape(inputs.shape[0], -1)))
        if self.depth > 2:
            scanned = nn.scan(
                _Block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.depth - 2,
            )
            x, _ = scanned(self.width, self.depth)(x, None)
        return nn.Dense(self.num_classes)(x)
