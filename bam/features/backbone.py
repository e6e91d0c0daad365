"""Features of a frozen network whose weights are public: what stands before its last layer.

Training a linear model on them is private training of the network's last layer, in which the
network itself is computed once for each image and not once for each step.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from bam import models
from bam.errors import InputError
from bam.features.extraction import FeatureMap
from bam.models import finetune, normalisation
from bam.models.normalisation import RESIZING, Normalisation

COLOURS = 3
DEFAULT = Normalisation((0.5,) * COLOURS, (0.5,) * COLOURS, (224, 224), "bilinear")
IN_JAX = dict(zip(RESIZING, ("nearest", "lanczos3", "linear", "cubic"), strict=True))


def backbone(
    model: str, weights: str, size: int | None = None, mean: Any = None, std: Any = None
) -> FeatureMap:
    """The feature map of a network of `bam.models`, `[n, h, w, c] -> [n, 1, 1, features]`.

    What is not given of size, mean and std, and how images are resized, is as the file beside the
    weights says (`bam.models.normalisation`); without one 224, 0.5, 0.5 and bilinear.

    Args:
      model: a Vision Transformer or a ResNet, such as "vit_s16".
      weights: a safetensors file, of this library, timm or transformers. It must be public: what
        it learned from the private images no ε covers.
      size: images are resized to squares of so many pixels, grey ones made of three channels.
      mean: of pixels in [0, 1], as the weights were trained with: one number, or one a colour.
      std: likewise.

    Raises:
      InputError: for a model that is none of these, or as `finetune.load` and `expected`.
    """
    if not model.startswith(("vit_", "resnet18", "resnet50")):
        raise InputError(f"features.model is a vision transformer or a ResNet, not {model!r}")
    if not weights:
        raise InputError("features.name=backbone needs weights: set features.weights")
    pixels = expected(weights, mean=mean, std=std, size=size)
    shape = (*(pixels.size or (224, 224)), COLOURS)
    whole = models.as_functions(models.create(model, 2, 64), shape)
    like = jax.eval_shape(whole.init, jax.random.key(0))
    named = finetune.load(weights, "^head", like, shape)
    params = finetune.begin({}, named)
    headless = models.MODELS[model].make(0, 64)
    way = IN_JAX[pixels.interpolation]
    # One number for all colours is a constant of the program, as it always was.
    centre, scale = (
        x[0] if len({*x}) == 1 else np.array(x, np.float32) for x in (pixels.mean, pixels.std)
    )

    def features(images: Float[np.ndarray | Array, "n h w c"]) -> Float[Array, "n 1 1 f"]:
        n, *_, channels = images.shape
        resized = jax.image.resize(images, (n, *shape[:2], channels), way)
        if way in ("cubic", "lanczos3"):  # as pixels have it
            resized = jnp.clip(resized, 0, 1)
        if channels == 1:
            resized = jnp.broadcast_to(resized, (n, *shape))
        outputs: Array = headless.apply({"params": params}, (resized - centre) / scale)
        return outputs[:, None, None]

    return features


def expected(weights: str, **given: Any) -> Normalisation:
    """What weights expect of images: `mean`, `std`, `size` as given, or by the file beside them.

    Raises:
      InputError: as `normalisation.expected_by`.
    """
    return normalisation.expected_by(finetune.file_of(weights), given, "features.", DEFAULT)
