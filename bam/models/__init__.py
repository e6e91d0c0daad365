"""Networks, each turned into a `Model`: three pure functions, which all other code uses."""

from bam import named
from bam.errors import InputError
from bam.extras import needs
from bam.part_table import MODELS
from bam.text import choose

with needs("train"):  # here, because each module of this package needs Flax
    import flax.linen as nn

from bam.models.functions import PRECISIONS, Model, Network, as_functions
from bam.models.layers import WEIGHT_STANDARDISATIONS

__all__ = [
    "MODELS", "PRECISIONS", "Model", "Network", "as_functions", "create",
]  # fmt: skip


def create(name: str, num_classes: int, width: int, **options: object) -> nn.Module:
    """Returns the Flax module called `name`, which maps a batch of inputs to logits.

    Args:
      name: a name of `MODELS`.
      num_classes: the number of logits.
      width: channels of the first layer, or the widening factor of a wide ResNet. Models without a
        width ignore it.
      **options: options of this model, see `MODELS`.

    Raises:
      InputError: for an unknown name or option, and for `num_classes` or `width` below 1.
    """
    if name not in MODELS:
        raise InputError(f"unknown model {name!r}{choose(name, sorted(MODELS))}")
    if num_classes < 1:
        raise InputError(f"a network needs at least one output, got {num_classes}")
    if width < 1:
        raise InputError(f"--config.model.width must be at least 1, got {width}")
    standardisation = options.get("weight_standardisation", "none")
    if standardisation not in WEIGHT_STANDARDISATIONS:
        raise InputError(
            f"unknown model.weight_standardisation {standardisation!r}; choose from "
            f"{', '.join(WEIGHT_STANDARDISATIONS)}"
        )
    module: nn.Module = named.call(
        f"model {name}", MODELS[name].make, num_classes, width, **options
    )
    return module
