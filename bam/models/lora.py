r"""Low-rank adaptation (LoRA): training of $W + A B$ through the small factors $A$ and $B$ only.

The output $x W$ of a linear layer becomes $x W + (x A) B$ with $A$ `[in, r]` and $B$ `[r, out]`;
$B$ begins at zero. The per-example gradients that are stored, clipped and noised are then those of
the factors: `r (in + out)` numbers instead of `in · out`. LoRA works for any Flax module with
`nn.Dense` layers.

Source: Hu et al. 2022 (arXiv 2106.09685), without its factor α/r, which is part of the learning
rate here.
"""

import re
import zlib
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util
from jaxtyping import Array

from bam.core.pytree import Params
from bam.errors import InputError

NAME = "lora"  # name of the factors in a model's parameters, for expressions like "lora|head"


def with_factors(params: Params, key: Array, rank: int, targets: str) -> Params:
    """Returns parameters with factors for each linear layer whose name matches `targets`.

    `targets` is a regular expression. A is normal with variance 1/in and B is zero, so the model
    does not change at first. InputError for a rank below 1, or if no layer matches.
    """
    if rank < 1:
        raise InputError(f"--config.lora.rank must be at least 1, or 0 without LoRA, got {rank}")
    leaves = traverse_util.flatten_dict(params, sep="/")
    layers = [
        name.removesuffix("/kernel")
        for name, x in leaves.items()
        if name.endswith("/kernel") and x.ndim == 2 and re.search(targets, name)
    ]
    if not layers:
        raise InputError(f"--config.lora.targets={targets} matches no linear layer")
    for name in layers:
        inputs, outputs = leaves[f"{name}/kernel"].shape
        # By the layer's name, so that a layer's A does not depend on the other layers.
        layer_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
        leaves[f"{NAME}/{name}/a"] = jax.random.normal(layer_key, (inputs, rank)) / jnp.sqrt(inputs)
        leaves[f"{NAME}/{name}/b"] = jnp.zeros((rank, outputs))
    return traverse_util.unflatten_dict(leaves, sep="/")


def add_factors(factors: Params) -> Callable[..., Any]:
    """Returns a function for `nn.intercept_methods` that adds (x A) B to layers with factors."""
    leaves = traverse_util.flatten_dict(factors, sep="/")

    def intercept(
        method: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        output = method(*args, **kwargs)
        name = "/".join(context.module.path)
        if f"{name}/a" not in leaves or context.method_name != "__call__":
            return output
        return output + (args[0] @ leaves[f"{name}/a"]) @ leaves[f"{name}/b"]

    return intercept


def fold(params: Params) -> Params:
    """Returns parameters with W + A B in place of W, A and B.

    Without factors they are unchanged.
    """
    if NAME not in params:
        return params
    leaves = traverse_util.flatten_dict({k: v for k, v in params.items() if k != NAME}, sep="/")
    factors = traverse_util.flatten_dict(params[NAME], sep="/")
    for name, a in factors.items():
        if name.endswith("/a"):
            kernel = name.removesuffix("a") + "kernel"
            leaves[kernel] = leaves[kernel] + a @ factors[name.removesuffix("a") + "b"]
    return traverse_util.unflatten_dict(leaves, sep="/")
