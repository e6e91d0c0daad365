"""Models in Flax Linen, each turned once into pure functions of one example.

Everything outside this package knows a model as a `Model`: three pure functions.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Num, PyTree

from bam import named
from bam.core import pytree
from bam.extras import needs

with needs("train"):  # here for every module of this package
    import flax.linen as nn

from bam.core.pytree import Params
from bam.models.convnet import ConvNet
from bam.models.deep import DeepResidual
from bam.models.layers import WEIGHT_STANDARDISATIONS, convolutions_as
from bam.models.lenet5 import LeNet5
from bam.models.linear import Linear
from bam.models.resnet9 import ResNet9
from bam.models.tanh_cnn import TanhCNN
from bam.models.wide_resnet import WideResNet, WideResNetBam

# name -> Flax module from (number of classes, width, **its own options)
MODELS: dict[str, Callable[..., nn.Module]] = {
    "convnet": ConvNet,
    "deep_residual": DeepResidual,
    "lenet5": lambda num_classes, width: LeNet5(num_classes),
    "linear": lambda num_classes, width: Linear(num_classes),
    "resnet9": ResNet9,
    "tanh_cnn": TanhCNN,
    "wide_resnet": WideResNet,
    "wide_resnet_bam": WideResNetBam,
}

PRECISIONS = ("float32", "tensorfloat32", "bfloat16")


class Model(NamedTuple):
    """A network as pure functions.

    Attributes:
      init: `key -> params`.
      logits: `(params, inputs [n, ...]) -> [n, classes]`, rows independent.
      loss: `(params, example) -> scalar`, the cross-entropy of one example
        `{"image": [views, ...], "label": int}`, averaged over its views; of a user, with all views
        of its examples, a label for each, and `"present": [views]`, over those that are there.
    """

    init: Callable[[Array], Params]
    logits: Callable[[Params, PyTree], Float[Array, "n classes"]]
    loss: Callable[[Params, PyTree], Float[Array, ""]]


def create(name: str, num_classes: int, width: int, **options: object) -> nn.Module:
    """Makes the Flax module called `name`, from batches of inputs to logits.

    The width is the channels of the first layer, or a wide ResNet's widening factor (models without
    widths ignore it); the options are the model's own: `scale_norm`, `weight_standardisation`,
    `depth`. ValueError for an unknown name or option, fewer than two classes, or a width below 1.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; choose from {', '.join(sorted(MODELS))}")
    if num_classes < 2:
        raise ValueError(f"a classifier needs at least 2 classes, got {num_classes}")
    if width < 1:
        raise ValueError(f"model.width must be at least 1, got {width}")
    how = options.get("weight_standardisation", "none")
    if how not in WEIGHT_STANDARDISATIONS:
        raise ValueError(
            f"unknown model.weight_standardisation {how!r}; choose from "
            f"{', '.join(WEIGHT_STANDARDISATIONS)}"
        )
    module: nn.Module = named.call(f"model {name}", MODELS[name], num_classes, width, **options)
    return module


def as_functions(
    module: nn.Module,
    input_shape: tuple[int, ...],
    *,
    convolution: str = "auto",
    precision: str = "float32",
) -> Model:
    """Turns a Flax module into the pure functions that training uses; tracing alone checks it.

    Args:
      module: maps `[n, *input_shape]` to logits; its only variables are parameters.
      input_shape: the shape of one input, without batch axis.
      convolution: how convolutions are computed, see `bam.models.layers.convolutions_as`.
      precision: of the network's arithmetic, forwards and backwards. "float32": all of it;
        "tensorfloat32": matrix products and convolutions round their inputs to 10 bits of
        mantissa, where the hardware can; "bfloat16": weights and activations are rounded to
        bfloat16. Parameters, normalisation statistics, the loss, gradients as they leave the
        network, and all that follows (norms, clipping, sums, noise) are float32 in each.

    Raises:
      ValueError: if the module keeps state besides parameters (BatchNorm does), or for an unknown
        convolution or precision.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; choose from {', '.join(PRECISIONS)}")

    @contextlib.contextmanager
    def arithmetic() -> Iterator[None]:
        products = "tensorfloat32" if precision == "tensorfloat32" else "float32"
        with convolutions_as(convolution), jax.default_matmul_precision(products):
            yield

    one_input = jax.ShapeDtypeStruct((1, *input_shape), jnp.float32)
    with arithmetic():
        variables = jax.eval_shape(module.init, jax.random.key(0), one_input)
    extra = sorted(set(variables) - {"params"})
    if extra:
        raise ValueError(
            f"the model keeps state {extra} besides its parameters. BatchNorm mixes the examples "
            "of a batch, so no per-example gradient exists and clipping bounds nothing: "
            "use GroupNorm or LayerNorm"
        )

    def init(key: Array) -> Params:
        return module.init(key, jnp.zeros((1, *input_shape)))["params"]

    def logits(
        params: Params, inputs: Num[np.ndarray | Array, "n ..."]
    ) -> Float[Array, "n classes"]:
        if precision == "bfloat16":
            params, inputs = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, inputs))
        with arithmetic():
            output: Array = module.apply({"params": params}, inputs)  # type: ignore[assignment]
        return pytree.at_least_float32(output)

    def loss(params: Params, example: PyTree) -> Float[Array, ""]:
        views = logits(params, example["image"])
        labels = jnp.broadcast_to(example["label"], views.shape[:1])
        losses = optax.softmax_cross_entropy_with_integer_labels(views, labels)
        return jnp.mean(losses, where=example.get("present"))

    return Model(jax.jit(init), logits, loss)  # op by op, init would compile every layer
