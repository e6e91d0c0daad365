"""A model of your own: any Flax module whose only variables are its parameters.

Config: `--config.model.name=examples.own_model:mlp --config.model.width=32`
"""

import flax.linen as nn


class Mlp(nn.Module):
    """A network with one hidden layer."""

    num_classes: int
    width: int

    @nn.compact
    def __call__(self, inputs):
        """Inputs `[n, ...]` -> logits `[n, classes]`."""
        hidden = nn.Dense(self.width)(inputs.reshape(len(inputs), -1))
        return nn.Dense(self.num_classes)(nn.relu(hidden))


def mlp(num_classes, width):
    """Returns the network for a config that names this function.

    The arguments are the number of classes and the keys of the config's section.
    """
    return Mlp(num_classes, width)
