"""The arithmetic of a function, counted in its trace."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree


def matrix_flops(fn: Callable[..., PyTree], *args: PyTree) -> int:
    """Multiplications and additions in the matrix products and convolutions of `fn(*args)`.

    It is traced, not run; the body of a `scan` counts once per turn.
    """
    return _matrix_flops(jax.make_jaxpr(fn)(*args).jaxpr)


def _matrix_flops(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        size = math.prod(equation.outvars[0].aval.shape) if equation.outvars else 0
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * size * math.prod(left[axis] for axis in contracted)
        elif equation.primitive.name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
            total += 2 * size * math.prod(kernel) // features
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                turns = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
                total += turns * _matrix_flops(inner)
    return total
