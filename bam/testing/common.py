"""Helpers of the checks: to raise, to compile and to compare."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from bam.core import pytree

MIXED = "its output under jax.vmap differs from that for each example alone: examples mix"


def require(holds: bool, message: str) -> None:
    """AssertionError with the message, unless `holds`."""
    if not holds:
        raise AssertionError(message)


def jit_or_fail(function: Callable[..., PyTree], failure: str) -> Callable[..., PyTree]:
    """Returns the compiled function.

    Its errors become an AssertionError that begins with `failure`.
    """
    program = jax.jit(function)

    def run(*arguments: PyTree) -> PyTree:
        try:
            return program(*arguments)
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            kind = type(error).__name__
            raise AssertionError(f"{failure}: {kind}: {first_line}") from error

    return run


def row(batch: PyTree, i: int) -> PyTree:
    """Row i of every leaf."""
    return jax.tree.map(lambda x: x[i], batch)


def shapes(tree: PyTree) -> list[tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of every leaf."""
    return [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(tree)]


def norm64(tree: PyTree) -> float:
    """The L2 norm in float64, which does not overflow for float32 gradients."""
    leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
    return float(np.linalg.norm(np.concatenate(leaves))) if leaves else 0.0


def close(a: PyTree, b: PyTree, rtol: float = 1e-4) -> bool:
    """Whether a and b differ by at most `rtol` times the norm of b.

    For `rtol` 0 they must not differ at all.
    """
    if not pytree.same_structure(a, b) or shapes(a) != shapes(b):
        return False
    difference = jax.tree.map(
        lambda x, y: np.asarray(x, np.float64) - np.asarray(y, np.float64), a, b
    )
    return norm64(difference) <= rtol * norm64(b) + (1e-12 if rtol else 0.0)
