"""A hint to layers: whether each example has weights of its own, as at BAM's shifted weights.

Under `vmap` a convolution then has one kernel for each example, and a layer may choose another
formulation for it.
"""

import contextvars
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from jaxtyping import PyTree

Traced = TypeVar("Traced", bound=Callable[..., PyTree])

# True while a loss is traced at weights that differ between examples.
own_weights = contextvars.ContextVar("weights of each example's own", default=False)


def at_own_weights(fn: Traced) -> Traced:
    """Returns the same function, traced with `own_weights` set."""

    @functools.wraps(fn)
    def trace(*args: Any) -> PyTree:
        token = own_weights.set(True)
        try:
            return fn(*args)
        finally:
            own_weights.reset(token)

    return cast(Traced, trace)
