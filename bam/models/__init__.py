"""Networks, each turned into a `Model`: three pure functions, which all other code uses."""

from bam import named
from bam.errors import InputError
from bam.extras import needs
from bam.named import Part

with needs("train"):  # here, because each module of this package needs Flax
    import flax.linen as nn

from bam.models.functions import PRECISIONS, Model, Network, as_functions
from bam.models.layers import WEIGHT_STANDARDISATIONS

__all__ = [
    "MODELS", "PRECISIONS", "Model", "Network", "as_functions", "create",
]  # fmt: skip

# Name -> the maker `(num_classes, width, **options) -> Flax module`, imported when it is called.
MODELS = {
    "convnet": Part("bam.models.small:ConvNet"),
    "deep_residual": Part("bam.models.small:DeepResidual", ("depth",)),
    "lenet5": Part("bam.models.small:LeNet5"),
    "linear": Part("bam.models.small:Linear"),
    "resnet18": Part("bam.models.resnet:ResNet", ("bottleneck",)),
    "resnet50": Part("bam.models.resnet:resnet50", ("bottleneck",)),
    "resnet9": Part(
        "bam.models.resnet9:ResNet9",
        ("scale_norm", "weight_standardisation", "norm_last", "symmetries"),
    ),
    "tanh_cnn": Part("bam.models.small:TanhCNN"),
    "vit_ti16": Part("bam.models.vision_transformer:vit_ti16", ("depth",)),
    "vit_s16": Part("bam.models.vision_transformer:vit_s16", ("depth",)),
    "vit_b16": Part("bam.models.vision_transformer:vit_b16", ("depth",)),
    "wide_resnet": Part(
        "bam.models.wide_resnet:WideResNet",
        ("depth", "weight_standardisation", "shortcut_norm_first"),
    ),
    "wide_resnet_bam": Part(
        "bam.models.wide_resnet:WideResNetBam", ("depth", "scale_norm", "weight_standardisation")
    ),
}


def create(name: str, num_classes: int, width: int, **options: object) -> nn.Module:
    """The Flax module called `name`, which maps a batch of inputs to logits.

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
        raise InputError(f"unknown model {name!r}; choose from {', '.join(sorted(MODELS))}")
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
