"""Features of a frozen network whose weights are public: what stands before its last layer.

Training a linear model on them is private training of the network's last layer, in which the
network itself is computed once for each image and not once for each step.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from bam import models
from bam.errors import InputError
from bam.features.extraction import FeatureMap
from bam.models import finetune


def backbone(
    model: str, weights: str, size: int = 224, mean: float = 0.5, std: float = 0.5
) -> FeatureMap:
    """The feature map of a network of `bam.models`, `[n, h, w, c] -> [n, 1, 1, features]`.

    Args:
      model: a Vision Transformer or a ResNet, such as "vit_s16".
      weights: a safetensors file, of this library, timm or transformers. It must be public: what
        it learned from the private images no ε covers.
      size: images are resized to squares of so many pixels, grey ones made of three channels.
      mean: of pixels in [0, 1], as the weights were trained with.
      std: likewise.

    Raises:
      InputError: for a model that is none of these, or as `finetune.load`.
    """
    if not model.startswith(("vit_", "resnet18", "resnet50")):
        raise InputError(f"features.model is a vision transformer or a ResNet, not {model!r}")
    if not (weights and size > 0 and std > 0):
        raise InputError("features.name=backbone needs weights, and a size and std above 0")
    shape = (size, size, 3)
    whole = models.as_functions(models.create(model, 2, 64), shape)
    like = jax.eval_shape(whole.init, jax.random.key(0))
    named = finetune.load(weights, "^head", like)
    params = finetune.begin({}, named)
    headless = models.MODELS[model].make(0, 64)

    def features(images: Float[np.ndarray | Array, "n h w c"]) -> Float[Array, "n 1 1 f"]:
        n, *_, channels = images.shape
        pixels = jax.image.resize(images, (n, size, size, channels), "bilinear")
        if channels == 1:
            pixels = jnp.broadcast_to(pixels, (n, *shape))
        outputs: Array = headless.apply({"params": params}, (pixels - mean) / std)
        return outputs[:, None, None]

    return features
