r"""Low-rank adaptation: training $W + A B$ through the small factors $A$, $B$ alone.

A linear layer's $x W$ becomes $x W + (x A) B$ with $A$ `[in, r]` and $B$ `[r, out]`, which begins
at zero. So the per-example gradients that are stored, bounded and noised are those of the factors,
`r (in + out)` numbers instead of `in · out`. It works for any Flax module with `nn.Dense` layers.

Source: Hu et al. 2022 (arXiv 2106.09685), without its factor α/r, which belongs to the learning
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

NAME = "lora"  # the factors' name in a model's parameters, for expressions like "lora|head"


def with_factors(params: Params, key: Array, rank: int, targets: str) -> Params:
    """Parameters with factors for each linear layer whose name matches the expression.

    A is normal with variance 1/in, and B is zero, so the model is the same at first. InputError for
    a rank below 1, or if no layer matches.
    """
    if rank < 1:
        raise InputError(f"lora.rank must be at least 1, or 0 for none, got {rank}")
    named = traverse_util.flatten_dict(params, sep="/")
    layers = [
        name.removesuffix("/kernel")
        for name, x in named.items()
        if name.endswith("/kernel") and x.ndim == 2 and re.search(targets, name)
    ]
    if not layers:
        raise InputError(f"lora.targets {targets!r} is found in the name of no linear layer")
    for name in layers:
        inputs, outputs = named[f"{name}/kernel"].shape
        own = jax.random.fold_in(key, zlib.crc32(name.encode()))
        named[f"{NAME}/{name}/a"] = jax.random.normal(own, (inputs, rank)) / jnp.sqrt(inputs)
        named[f"{NAME}/{name}/b"] = jnp.zeros((rank, outputs))
    return traverse_util.unflatten_dict(named, sep="/")


def added(factors: Params) -> Callable[..., Any]:
    """An interceptor for `nn.intercept_methods`: linear layers with factors add their product."""
    named = traverse_util.flatten_dict(factors, sep="/")

    def intercept(
        method: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        output = method(*args, **kwargs)
        name = "/".join(context.module.path)
        if f"{name}/a" not in named or context.method_name != "__call__":
            return output
        return output + (args[0] @ named[f"{name}/a"]) @ named[f"{name}/b"]

    return intercept


def folded(params: Params) -> Params:
    """The same model without factors, with W + A B in their place; unchanged if it has none."""
    if NAME not in params:
        return params
    named = traverse_util.flatten_dict({k: v for k, v in params.items() if k != NAME}, sep="/")
    factors = traverse_util.flatten_dict(params[NAME], sep="/")
    for name, a in factors.items():
        if name.endswith("/a"):
            kernel = name.removesuffix("a") + "kernel"
            named[kernel] = named[kernel] + a @ factors[name.removesuffix("a") + "b"]
    return traverse_util.unflatten_dict(named, sep="/")
