"""The number of arithmetic operations of a function or of a step, from its trace."""

import math
from collections.abc import Callable
from typing import Any

import jax
import optax
from jaxtyping import PyTree
from ml_collections import ConfigDict

from bam import models
from bam.data import datasets
from bam.models import finetune
from bam.training import examples, parts


def flop_per_step(config: ConfigDict, dataset: datasets.Dataset) -> int:
    """Multiplications and additions in the gradients of l examples, by the config's method."""
    module = parts.make_model(config.model, dataset.num_classes)
    shape = dataset.train.images.shape[1:]
    # In other formulations, sums over pixels are matrix products, too, and would be counted.
    model = models.as_functions(module, shape, convolution="xla")
    weights = finetune.split(jax.eval_shape(model.init, jax.random.key(0)), config.trainable)

    def gradient(trained: PyTree, frozen: PyTree, example: PyTree) -> PyTree:
        """The gradient of the trained parameters, as in a first step."""
        oracle = parts.make_oracle(config.method, finetune.with_frozen(model.loss, frozen))
        return oracle.grad(oracle.ascend(trained, optax.tree.zeros_like(trained)), example)

    example = examples.example_like(config, shape)
    return config.expected_batch_size * matrix_flops(gradient, *weights, example)


def matrix_flops(fn: Callable[..., PyTree], *args: PyTree) -> int:
    """Multiplications and additions in the matrix products and convolutions of `fn(*args)`.

    The function is traced, not run. The body of a `scan` counts once per iteration, that of a
    `while` loop once.
    """
    return _matrix_flops(jax.make_jaxpr(fn)(*args).jaxpr)


def _matrix_flops(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        size = math.prod(equation.outvars[0].aval.shape) if equation.outvars else 0
        # Each output entry is a sum of products over the contracted axes: a multiplication and an
        # addition for each product.
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * size * math.prod(left[axis] for axis in contracted)
        elif equation.primitive.name == "conv_general_dilated":
            # One entry reads the kernel of its own output feature, so groups need no extra case.
            kernel = equation.invars[1].aval.shape
            features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
            total += 2 * size * math.prod(kernel) // features
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                is_scan = equation.primitive.name == "scan"
                num_iterations = equation.params.get("length", 1) if is_scan else 1
                total += num_iterations * _matrix_flops(inner)
    return total
