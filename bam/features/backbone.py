"""Features of a frozen network with public weights: the inputs of its last layer.

Training a linear model on them is private training of the network's last layer. The network itself
is computed once for each image, not once for each step.
"""

from collections.abc import Sequence
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
    model: str,
    weights: str,
    size: int | Sequence[int] | None = None,
    mean: Any = None,
    std: Any = None,
    interpolation: str | None = None,
    digest: str = "",
) -> FeatureMap:
    """The feature map of a network of `bam.models`, `[n, h, w, c] -> [n, 1, 1, features]`.

    The file beside the weights says how images are resized, and the size, mean and std that are not
    given (`bam.models.normalisation`). Without this file they are bilinear, 224, 0.5 and 0.5.

    Args:
      model: a Vision Transformer or a ResNet, such as "vit_s16".
      weights: a safetensors file by this library, timm or transformers. It must be public: if it
        was trained on the private images, no ε covers that.
      size: side in pixels of the squares that images are resized to, or height and width. A grey
        image is repeated in three channels.
      mean: the mean of pixels in [0, 1] that the weights were trained with, for all colours or one
        a colour.
      std: the standard deviation, as the mean.
      interpolation: the method of `RESIZING` that resizes images.
      digest: SHA-256 of the weights that a model was trained with; "" for any.

    Raises:
      InputError: for another model, and weights with another digest; also as `finetune.load` and
        `normalisation_of`.
    """
    if not model.startswith(("vit_", "resnet18", "resnet50")):
        needed = "must be a vision transformer or a ResNet"
        raise InputError(f"--config.features.model={model!r} {needed}, such as vit_s16")
    if not weights:
        raise InputError("features.name=backbone needs weights: add --config.features.weights=FILE")
    pixels = normalisation_of(weights, mean=mean, std=std, size=size, interpolation=interpolation)
    shape = (*(pixels.size or (224, 224)), COLOURS)
    network = models.as_functions(models.create(model, 2, 64), shape)
    like = jax.eval_shape(network.init, jax.random.key(0))
    # Before the names are matched, which another network's weights lack.
    if digest and (actual := finetune.digest(weights)) != digest:
        raise InputError(
            f"{finetune.file_of(weights)} has SHA-256 {actual}, but the model was trained with "
            f"weights of SHA-256 {digest}: give that file"
        )
    params = finetune.begin({}, finetune.load(weights, "^head", like, shape))
    headless = models.MODELS[model].make(0, 64)
    method = IN_JAX[pixels.interpolation]
    # A scalar if all colours share one number, so that the program stays as in earlier versions.
    centre, scale = (
        x[0] if len({*x}) == 1 else np.array(x, np.float32) for x in (pixels.mean, pixels.std)
    )

    def features(images: Float[np.ndarray | Array, "n h w c"]) -> Float[Array, "n 1 1 f"]:
        n, *_, channels = images.shape
        resized = jax.image.resize(images, (n, *shape[:2], channels), method)
        if method in ("cubic", "lanczos3"):  # they overshoot, which pixels of 8 bits cannot
            resized = jnp.clip(resized, 0, 1)
        if channels == 1:
            resized = jnp.broadcast_to(resized, (n, *shape))
        outputs: Array = headless.apply({"params": params}, (resized - centre) / scale)
        return outputs[:, None, None]

    return features


def normalisation_of(weights: str, **options: Any) -> Normalisation:
    """Returns the normalisation that weights expect: the given options, else the file beside them.

    Raises:
      InputError: as `normalisation.expected_by`.
    """
    given = {key: value for key, value in options.items() if value != ""}
    return normalisation.expected_by(finetune.file_of(weights), given, "features.", DEFAULT)
