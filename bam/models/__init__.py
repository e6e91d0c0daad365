"""Models in Flax Linen, each turned once into pure functions of one example.

Everything outside this package knows a model as a `Model`: three pure functions.
"""

import functools

from bam import named
from bam.errors import InputError
from bam.extras import needs
from bam.named import Part

with needs("train"):  # here for every module of this package
    import flax.linen as nn

from bam.models.functions import PRECISIONS, Model, Network, as_functions
from bam.models.layers import WEIGHT_STANDARDISATIONS
from bam.models.resnet import ResNet
from bam.models.resnet9 import ResNet9
from bam.models.small import ConvNet, DeepResidual, LeNet5, Linear, TanhCNN
from bam.models.vision_transformer import vit
from bam.models.wide_resnet import WideResNet, WideResNetBam

__all__ = [
    "MODELS", "PRECISIONS", "Model", "Network", "as_functions", "create",
]  # fmt: skip

# Each makes a Flax module of (number of classes, width, **its own options).
MODELS = {
    "convnet": Part(ConvNet),
    "deep_residual": Part(DeepResidual, ("depth",)),
    "lenet5": Part(lambda num_classes, width: LeNet5(num_classes)),
    "linear": Part(lambda num_classes, width: Linear(num_classes)),
    "resnet18": Part(ResNet, ("bottleneck",)),
    "resnet50": Part(
        functools.partial(ResNet, blocks=(3, 4, 6, 3), bottleneck=True), ("bottleneck",)
    ),
    "resnet9": Part(ResNet9, ("scale_norm", "weight_standardisation", "norm_last", "symmetries")),
    "tanh_cnn": Part(TanhCNN),
    "vit_ti16": Part(vit(192, 3), ("depth",)),
    "vit_s16": Part(vit(384, 6), ("depth",)),
    "vit_b16": Part(vit(768, 12), ("depth",)),
    "wide_resnet": Part(WideResNet, ("depth", "weight_standardisation", "shortcut_norm_first")),
    "wide_resnet_bam": Part(WideResNetBam, ("depth", "scale_norm", "weight_standardisation")),
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
