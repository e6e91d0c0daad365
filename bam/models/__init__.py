"""Models in Flax Linen, each turned once into pure functions of one example.

Everything outside this package knows a model as a `Model`: three pure functions.
"""

from bam import named
from bam.errors import InputError
from bam.extras import needs
from bam.named import Part

with needs("train"):  # here for every module of this package
    import flax.linen as nn

from bam.models.functions import PRECISIONS, Model, Network, as_functions
from bam.models.layers import WEIGHT_STANDARDISATIONS

__all__ = [
    "MODELS", "PRECISIONS", "Model", "Network", "as_functions", "create",
]  # fmt: skip

# Each makes a Flax module of (number of classes, width, **its own options), and is imported when it
# is named.
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
    """Makes the Flax module called `name`, from batches of inputs to logits.

    The width is the channels of the first layer, or a wide ResNet's widening factor (models without
    widths ignore it); the options are the model's own: `scale_norm`, `weight_standardisation`,
    `depth`, `norm_last`, `shortcut_norm_first`, `symmetries`. InputError for an unknown name or
    option, no class, or a width below 1.
    """
    if name not in MODELS:
        raise InputError(f"unknown model {name!r}; choose from {', '.join(sorted(MODELS))}")
    if num_classes < 1:
        raise InputError(f"a network makes at least one number of an image, got {num_classes}")
    if width < 1:
        raise InputError(f"model.width must be at least 1, got {width}")
    how = options.get("weight_standardisation", "none")
    if how not in WEIGHT_STANDARDISATIONS:
        raise InputError(
            f"unknown model.weight_standardisation {how!r}; choose from "
            f"{', '.join(WEIGHT_STANDARDISATIONS)}"
        )
    module: nn.Module = named.call(
        f"model {name}", MODELS[name].make, num_classes, width, **options
    )
    return module
