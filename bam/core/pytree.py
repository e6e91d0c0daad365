"""Pytrees: norms in at least float32, rows under `vmap`, values read from memory, names.

The oracles (unit directions), the transforms (clipping) and the diagnostics share these lines, so
"the norm of a gradient" means one thing everywhere.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int32, PyTree

from bam.errors import InputError

# A static checker sees any tree; the run-time check in tests sees float leaves.
Grads: TypeAlias = PyTree[Float[Array, "..."]]
Params: TypeAlias = PyTree[Float[Array, "..."]]


def at_least_float32(x: Array) -> Array:
    """Returns `x` in float32, or in its dtype if that is wider."""
    return x.astype(common_dtype(x, jnp.float32))


def common_dtype(*values: Any) -> np.dtype:
    """Returns the dtype of a sum of values.

    It is the same where the user's `jax_numpy_dtype_promotion` is strict.
    """
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.result_type(*values))


@functools.cache
def _placeholder() -> type:
    types: list[type] = []
    # The class has no public name, but `map_params` gives it to any function.
    optax.tree.map_params(lambda params: types.append(type(params)), lambda x: x, None)
    return types[0]


def is_placeholder(tree: PyTree) -> bool:
    """Returns whether `optax.tree.map_params` put this in place of parameters.

    Optax does so to see a state's structure.
    """
    return isinstance(tree, _placeholder())


def check_has_arrays(tree: PyTree, what: str = "parameters are") -> None:
    """Raises InputError for a tree without an array, because there is nothing to train."""
    if not jax.tree.leaves(tree):
        raise InputError(f"the {what} a tree without arrays: there is nothing to train")


def l2_norm(tree: Grads) -> Float[Array, ""]:
    r"""Returns the L2 norm of a pytree, $\|g\|_2 = (\sum_j g_j^2)^{1/2}$, over all leaves together.

    Squares are accumulated in at least float32. A finite gradient whose squares overflow float32
    (norm above about 1.8e19) has norm `inf` here, and every transform treats it as non-finite.
    Entries below about 1e-19 underflow and count as zero. Apart from these, the relative error is
    below 5e-6, because no square takes part in more than 150 additions. The norm of an empty pytree
    is 0. The result is float64 if a leaf is. Complex numbers and integers are a TypeError.
    """
    check_real(tree)
    squares = [jnp.square(at_least_float32(x)) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(_sum(*squares) if squares else jnp.zeros((), jnp.float32))


def _sum(*arrays: Float[Array, "..."]) -> Float[Array, ""]:
    """Sum of all entries: up to eight equal parts are added, again and again, until few are left.

    Summation by a tree bounds the rounding for any length. On CPU, adding contiguous parts is twice
    as fast as one sum, because it reads memory in order. On a TPU, flattening an array would copy
    it out of its tiles, so there the parts are taken axis by axis.
    """
    return jax.lax.platform_dependent(*arrays, tpu=_sum_by_axes, default=_sum_flattened)


def _sum_flattened(*arrays: Array) -> Array:
    return _sum_one(jnp.stack([_sum_one(x) for x in arrays]))


def _sum_one(x: Array) -> Array:
    # A matrix of at most 16 rows (such as an outer product) is summed over its rows first: XLA then
    # computes it inside the sum.
    x = jnp.sum(x, axis=0) if x.ndim == 2 and x.shape[0] <= 16 else x.ravel()
    while x.size > 16 * 16:
        x = _add_parts(x, 8)
    if x.size > 16:  # small leaves compile in half the time
        x = jnp.sum(jnp.pad(x, (0, -x.size % 16)).reshape(16, -1), axis=0)
    return jnp.sum(x)


def _sum_by_axes(*arrays: Array) -> Array:
    # One sum over all arrays' rests, because each sum costs 2,000 cycles however few its entries.
    return _sum_one(jnp.concatenate([_partial_sums(x) for x in arrays]))


def _partial_sums(x: Array) -> Array:
    if x.ndim > 1 and x.shape[0] > 16 and x.shape[0] % 16 == 0:
        x = x.reshape(16, x.shape[0] // 16, *x.shape[1:])  # works for any layout of the array
    while x.ndim > 1 and x.size > 32:
        num_axes = sum(math.prod(x.shape[: i + 1]) <= 16 for i in range(x.ndim))
        x = jnp.sum(x, tuple(range(num_axes))) if num_axes else x
        # An addition between two sums, or XLA would merge them into one long sum.
        x = _add_parts(x, min(8, x.shape[0])) if x.ndim > 1 else x
    return x.ravel()


def _add_parts(x: Array, num_parts: int) -> Array:
    """Adds up equal parts of the first axis, padded with zeros to a multiple of their number."""
    padding = -x.shape[0] % num_parts
    x = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) if padding else x
    size = x.shape[0] // num_parts
    return functools.reduce(jnp.add, [x[i * size : (i + 1) * size] for i in range(num_parts)])


def check_real(tree: PyTree) -> None:
    """Raises a TypeError for complex, integer or bool leaves, for which no bound holds."""
    for name, leaf in zip(names(tree), jax.tree.leaves(tree), strict=True):
        dtype = getattr(leaf, "dtype", type(leaf))
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"{name or 'the gradient'} is of {dtype}: "
                "only real floating-point numbers are bounded"
            )


def round_towards_zero(x: Float[Array, "*shape"], dtype: Any) -> Float[Array, "*shape"]:
    """Rounds to a float dtype narrower than float32, never to a larger magnitude.

    NaN stays NaN. It works on bits. Converting to the narrow dtype and back would not show how far
    a rounding to nearest went, because a compiler may leave both conversions out, as XLA does on
    GPUs.
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
    """Returns the direction `g / ‖g‖₂` of a pytree, which is zero if the norm is zero."""
    norm = l2_norm(tree)
    # The inner choice keeps 1 / 0 out of the derivative, which would be NaN.
    scale = jnp.where(norm > 0, 1.0 / jnp.where(norm > 0, norm, 1.0), 0.0)
    return jax.tree.map(lambda x: (scale * at_least_float32(x)).astype(x.dtype), tree)


def shift(tree: Params, distance: Any, direction: Grads) -> Params:
    """Moves `tree` by `distance · direction`, leaf by leaf, keeping each leaf's dtype."""

    def shift_leaf(x: Array, v: Array) -> Array:
        dtype = common_dtype(x, v)
        return (x.astype(dtype) + (distance * v).astype(dtype)).astype(x.dtype)

    return jax.tree.map(shift_leaf, tree, direction)


def map_rows(row_fn: Callable[..., PyTree], num_rows: int) -> Callable[..., PyTree]:
    """Maps a function of one row over rows by `vmap`.

    A single row is called directly, which is faster.
    """
    if num_rows > 1:
        return lambda params, *rows: jax.vmap(functools.partial(row_fn, params))(*rows)

    def map_the_only_row(params: Params, *rows: PyTree) -> PyTree:
        return jax.tree.map(lambda y: y[None], row_fn(params, *jax.tree.map(lambda x: x[0], rows)))

    return map_the_only_row


def sum_of_real(
    loss_fn: Callable[..., Float[Array, ""]],
    params: Params,
    rows: PyTree,
    is_real: Bool[Array, " rows"],
) -> Float[Array, ""]:
    """Returns the sum of `loss_fn(params, row)` over the rows whose flag is True."""
    # A real row replaces each padded one, whose loss could have a NaN gradient.
    index = jnp.where(is_real, jnp.arange(len(is_real)), jnp.argmax(is_real))
    rows = jax.tree.map(lambda x: x[index], rows)
    losses = map_rows(loss_fn, len(is_real))(params, rows)
    return jnp.sum(jnp.where(is_real, losses, 0))


def read_from_memory(
    read: Callable[[PyTree, PyTree], PyTree],
    values: PyTree,
    carry: PyTree,
    num_iterations: Int32[Array, ""],
) -> PyTree:
    """`read(values, carry)`, where every operation in `read` sees the same numbers of `values`.

    A compiler may compute a value again for each operation that uses it, with other roundings, and
    XLA's CPU compiler drops `optimization_barrier` before it does so. The inputs of a loop are in
    memory, so `read` is the body of a loop. `num_iterations` is a traced 0 or 1. With a constant 1,
    XLA would inline the body and could fuse again. With 0 the result is `carry`.
    """

    def iterate(count: Array | int, carry: PyTree) -> PyTree:
        # The values depend on the count, or XLA would move `read` before the loop. The dependence
        # is a factor of 1 and not a `where`, which LLVM would split into two loops.
        return read(jax.tree.map(lambda x: x * jnp.asarray(1 - count, x.dtype), values), carry)

    return jax.named_scope("from_memory")(jax.lax.fori_loop)(0, num_iterations, iterate, carry)


def as_vector(tree: PyTree) -> Array:
    """Returns all entries of a tree in one vector, `[entries]`, leaf by leaf."""
    vectors = [x.ravel() for x in jax.tree.leaves(tree)]
    return vectors[0] if len(vectors) == 1 else jnp.concatenate(vectors)


def from_vector(vector: Array, like: PyTree) -> PyTree:
    """Returns the tree with a vector's entries, and the shapes and dtypes of `like`."""
    leaves: list[Any] = jax.tree.leaves(like)
    ends = np.cumsum([math.prod(x.shape) for x in leaves])
    vectors = [vector[end - math.prod(x.shape) : end] for x, end in zip(leaves, ends, strict=True)]
    parts = [v.reshape(x.shape).astype(x.dtype) for x, v in zip(leaves, vectors, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), parts)


@functools.lru_cache(maxsize=64)  # a program tells functions apart by identity
def name_mask(pattern: str) -> Callable[[Params], PyTree]:
    """Returns a mask that chooses parameters by name, for `ascent_mask` or `optax.masked`.

    The regular expression is searched for in each leaf's path, such as `"GroupNorm_0/scale"`.
    InputError if it is not a regular expression.

    Examples:
      >>> name_mask("Norm")({"Conv_0": {"kernel": 1.0}, "GroupNorm_0": {"scale": 1.0}})
      {'Conv_0': {'kernel': False}, 'GroupNorm_0': {'scale': True}}
    """
    try:
        find = re.compile(pattern).search
    except re.error as error:
        raise InputError(f"{pattern!r} is not a regular expression: {error}") from None
    return lambda params: jax.tree.unflatten(
        jax.tree.structure(params), [bool(find(name)) for name in names(params)]
    )


def choose(tree: PyTree, pattern: str) -> PyTree:
    """Returns the leaves whose names match a regular expression, with None for the others."""
    return jax.tree.map(lambda x, keep: x if keep else None, tree, name_mask(pattern)(tree))


def merge(chosen: PyTree, others: PyTree) -> PyTree:
    """Returns the leaves of `chosen`, and those of `others` where it has None."""
    return jax.tree.map(
        lambda x, other: other if x is None else x, chosen, others, is_leaf=lambda x: x is None
    )


def same_structure(a: PyTree, b: PyTree) -> bool:
    """Returns whether two pytrees have the same structure."""
    structure: jax.tree_util.PyTreeDef = jax.tree.structure(a)
    return bool(structure == jax.tree.structure(b))


def is_key(leaf: object) -> bool:
    """Returns whether a leaf is a typed PRNG key, which cannot become a NumPy array."""
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def names(tree: PyTree) -> list[str]:
    """Returns the name of each leaf, such as `"GroupNorm_0/scale"`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


def num_params(tree: PyTree) -> int:
    """Returns the number of scalar entries in all leaves of `tree`."""
    return sum(int(x.size) for x in jax.tree.leaves(tree))
