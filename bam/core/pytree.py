"""Norms of pytrees, computed in at least float32.

The few lines here are shared by the oracles (unit directions), the transforms (clipping) and the
diagnostics, so that "the norm of a gradient" means one thing everywhere.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, PyTree

from bam.errors import InputError

# A static checker sees any tree; the run-time check in tests sees float leaves.
Grads: TypeAlias = PyTree[Float[Array, "..."]]
Params: TypeAlias = PyTree[Float[Array, "..."]]


def at_least_float32(x: Array) -> Array:
    """Returns `x` in float32, or in its own dtype if that is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def check_has_arrays(tree: PyTree, what: str = "parameters are") -> None:
    """InputError for a tree without an array: nothing of it could be trained."""
    if not jax.tree.leaves(tree):
        raise InputError(f"the {what} a tree without an array: there is nothing to train")


def l2_norm(tree: Grads) -> Float[Array, ""]:
    r"""Global L2 norm of a pytree, $\|g\|_2 = (\sum_j g_j^2)^{1/2}$, over all leaves together.

    Squares are accumulated in at least float32. A finite gradient whose squares overflow float32
    (norm above about 1.8e19) has norm `inf` here and is treated as non-finite by every transform;
    entries below about 1e-19 underflow and count as zero. The relative error is below 5e-6 for any
    entries at all: no square takes part in more than 150 additions. The norm of an empty
    pytree is 0, and float64 if a leaf is; TypeError for complex numbers and integers.
    """
    check_real(tree)
    squares = [jnp.square(at_least_float32(x)) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(_sum(*squares) if squares else jnp.zeros((), jnp.float32))


def _sum(*arrays: Float[Array, "..."]) -> Float[Array, ""]:
    """Sum of all entries: up to eight parts are added to one until few entries are left.

    Pairwise summation bounds the rounding, whatever the length; these additions of whole arrays are
    twice as fast on CPU, where they read as they go. On a TPU, where a row of all entries would
    have to be copied out of its tiles first, the parts are those of an axis after another.
    """
    return jax.lax.platform_dependent(*arrays, tpu=_sum_by_axes, default=_sum_of_rows)


def _sum_of_rows(*arrays: Array) -> Array:
    return _sum_in_a_row(jnp.stack([_sum_in_a_row(x) for x in arrays]))


def _sum_in_a_row(x: Array) -> Array:
    # Few long rows, as of a product of a column and a row, are computed as they are added up.
    x = jnp.sum(x, axis=0) if x.ndim == 2 and x.shape[0] <= 16 else x.ravel()
    while x.size > 16 * 16:
        x = _add_parts(x, 8)
    if x.size > 16:  # small leaves compile in half the time
        x = jnp.sum(jnp.pad(x, (0, -x.size % 16)).reshape(16, -1), axis=0)
    return jnp.sum(x)


def _sum_by_axes(*arrays: Array) -> Array:
    # One row of what is left of them: a sum costs 2,000 cycles, of however few entries.
    return _sum_in_a_row(jnp.concatenate([_row_of_sums(x) for x in arrays]))


def _row_of_sums(x: Array) -> Array:
    if x.ndim > 1 and x.shape[0] > 16 and x.shape[0] % 16 == 0:
        x = x.reshape(16, x.shape[0] // 16, *x.shape[1:])  # in one go: its layout may be any
    while x.ndim > 1 and x.size > 32:
        few = sum(math.prod(x.shape[: i + 1]) <= 16 for i in range(x.ndim))
        x = jnp.sum(x, tuple(range(few))) if few else x
        # Always between two sums, which XLA would make one of: a long one.
        x = _add_parts(x, min(8, x.shape[0])) if x.ndim > 1 else x
    return x.ravel()


def _add_parts(x: Array, num_parts: int) -> Array:
    """Adds up equal parts of the first axis, after zeros that make them equal."""
    padding = -x.shape[0] % num_parts
    x = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) if padding else x
    size = x.shape[0] // num_parts
    return functools.reduce(jnp.add, [x[i * size : (i + 1) * size] for i in range(num_parts)])


def check_real(tree: PyTree) -> None:
    """Refuses, with a TypeError, leaves that no bound holds for: complex, integer or bool."""
    for name, leaf in zip(names(tree), jax.tree.leaves(tree), strict=True):
        dtype = getattr(leaf, "dtype", type(leaf))
        if not jnp.issubdtype(dtype, jnp.floating):
            where = name or "the gradient"
            raise TypeError(f"{where} is of {dtype}: only real floating-point numbers are bounded")


def round_towards_zero(x: Float[Array, "*shape"], dtype: Any) -> Float[Array, "*shape"]:
    """Rounds to a float dtype narrower than float32, never to a larger magnitude; NaN stays NaN.

    By bits: a compiler may leave out a conversion to a narrow dtype and back, as XLA does on GPUs,
    so the excess of a rounding to nearest cannot be seen by converting back.
    """
    info, x = jnp.finfo(dtype), x.astype(jnp.float32)
    mask = jnp.uint32(2**32 - 2 ** (23 - info.nmant))
    rounded = jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(x, jnp.uint32) & mask, jnp.float32
    )
    smallest, step = float(info.smallest_normal), float(info.smallest_subnormal)
    if smallest > float(jnp.finfo(jnp.float32).smallest_normal):  # evenly spaced below it
        rounded = jnp.where(jnp.abs(x) < smallest, jnp.trunc(x / step) * step, rounded)
    return jnp.clip(rounded, float(info.min), float(info.max)).astype(dtype)


def unit(tree: Grads) -> Grads:
    """Direction `g / ‖g‖₂` of a pytree; zero if the norm is, so never NaN for finite input."""
    norm = l2_norm(tree)
    scale = jnp.where(norm > 0, 1.0 / jnp.where(norm > 0, norm, 1.0), 0.0)
    return jax.tree.map(lambda x: (scale * at_least_float32(x)).astype(x.dtype), tree)


def shift(tree: Params, distance: Any, direction: Grads) -> Params:
    """Moves `tree` by `distance · direction`, leaf by leaf, keeping each leaf's dtype."""
    return jax.tree.map(lambda x, v: (x + distance * v).astype(x.dtype), tree, direction)


def map_rows(row_fn: Callable[..., PyTree], num_rows: int) -> Callable[..., PyTree]:
    """`row_fn(params, *row)` for all rows, by `vmap`; for a single one without, which is faster."""
    if num_rows > 1:
        return lambda params, *rows: jax.vmap(functools.partial(row_fn, params))(*rows)

    def map_the_only_row(params: Params, *rows: PyTree) -> PyTree:
        return jax.tree.map(lambda y: y[None], row_fn(params, *jax.tree.map(lambda x: x[0], rows)))

    return map_the_only_row


def read_from_memory(
    read: Callable[[PyTree, PyTree], PyTree],
    values: PyTree,
    carry: PyTree,
    turns: Int32[Array, ""],
) -> PyTree:
    """`read(values, carry)`, where every reader of `values` reads the same numbers.

    A compiler may compute a value anew for each of its readers, rounded in other places, and XLA's
    CPU compiler drops `optimization_barrier` before it does so. What a loop is given is in memory,
    so `read` is the body of a loop. `turns`, 1 or 0 (which gives `carry`), is a number that the
    program is given: a loop that is known to run once would be no loop.
    """

    def turn(count: Array | int, carry: PyTree) -> PyTree:
        # In each turn other values, or what reads them would be computed before the loop. A factor,
        # not a choice, of which LLVM would make two loops.
        return read(jax.tree.map(lambda x: x * jnp.asarray(1 - count, x.dtype), values), carry)

    after: PyTree = jax.named_scope("from_memory")(jax.lax.fori_loop)(0, turns, turn, carry)
    return after


def as_vector(tree: PyTree) -> Array:
    """All entries of a tree in one row, `[entries]`, leaf by leaf."""
    rows = [x.ravel() for x in jax.tree.leaves(tree)]
    return rows[0] if len(rows) == 1 else jnp.concatenate(rows)


def from_vector(vector: Array, like: PyTree) -> PyTree:
    """The tree whose entries are a row's, with the shapes and dtypes of another."""
    leaves: list[Any] = jax.tree.leaves(like)
    ends = np.cumsum([math.prod(x.shape) for x in leaves])
    rows = [vector[end - math.prod(x.shape) : end] for x, end in zip(leaves, ends, strict=True)]
    parts = [row.reshape(x.shape).astype(x.dtype) for x, row in zip(leaves, rows, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), parts)


@functools.lru_cache(maxsize=64)  # the same mask is a program's structure
def matching(pattern: str) -> Callable[[Params], PyTree]:
    """A mask that chooses parameters by name, for `ascent_mask` or `optax.masked`.

    The regular expression, or an InputError, is searched for in each leaf's path, as
    `"GroupNorm_0/scale"`.

    Examples:
      >>> matching("Norm")({"Conv_0": {"kernel": 1.0}, "GroupNorm_0": {"scale": 1.0}})
      {'Conv_0': {'kernel': False}, 'GroupNorm_0': {'scale': True}}
    """
    try:
        find = re.compile(pattern).search
    except re.error as error:
        raise InputError(f"{pattern!r} is not a regular expression: {error}") from None
    return lambda params: jax.tree.unflatten(
        jax.tree.structure(params), [bool(find(name)) for name in names(params)]
    )


def same_structure(a: PyTree, b: PyTree) -> bool:
    """Whether two pytrees differ in their leaves at most."""
    structure: jax.tree_util.PyTreeDef = jax.tree.structure(a)
    return bool(structure == jax.tree.structure(b))


def is_key(leaf: object) -> bool:
    """Whether a leaf is a typed PRNG key, which is not a number and has no NumPy array."""
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def names(tree: PyTree) -> list[str]:
    """The name of each leaf, as `"GroupNorm_0/scale"`."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in named]


def num_params(tree: PyTree) -> int:
    """Number of scalar entries in all leaves of `tree`."""
    return sum(int(x.size) for x in jax.tree.leaves(tree))
