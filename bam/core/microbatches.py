"""What the engine does with a microbatch, and with one after the other, in constant memory."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from bam.core import fixed_point, pytree
from bam.core.pytree import Params

# `(params, what was made of an example) -> (summands, number)`.
Then = Callable[[Params, PyTree], tuple[PyTree, Float[Array, ""]]]


def wide(then: Then | None, params: Params, made: PyTree) -> tuple[PyTree, Float[Array, ""]]:
    """The summands of what was made of an example, float32 or wider, and its number."""
    summands, number = made if then is None else then(params, made)
    return jax.tree.map(pytree.at_least_float32, summands), number


def sum_of_group(
    fn: Callable[[Params, PyTree], PyTree],
    then: Then | None,
    spacing: float | None,
    group_size: int,
) -> Callable[[Params, PyTree, Array, PyTree], tuple[PyTree, Array]]:
    """`(params, examples, keep, total) -> (total with their sum, their numbers)`, of a microbatch.

    With a spacing, of noise, summands are cut to its grid and added as integers.
    """

    def of_example(params: Params, made: PyTree, keep: Bool[Array, ""]) -> tuple[PyTree, Array]:
        summands, number = wide(then, params, made)
        kept = jax.tree.map(lambda x: jnp.where(keep, x, 0), summands)
        if spacing is not None:
            kept = jax.tree.map(lambda x: fixed_point.cut(x, spacing), kept)
        return kept, jnp.where(keep, number, 0)

    def of_group(
        params: Params, examples: PyTree, keep: Bool[Array, " group"], total: PyTree
    ) -> tuple[PyTree, Array]:
        def add(made: PyTree, carry: tuple[PyTree, Array]) -> tuple[tuple[PyTree, Array], Array]:
            kept, numbers = pytree.of_rows(of_example, group_size)(params, made, keep)
            sums = jax.tree.map(lambda x: jnp.sum(x, axis=0, dtype=x.dtype), kept)
            total = jax.tree.map(jnp.add, carry[0], sums)
            return (total, numbers.astype(carry[1].dtype)), jnp.any(numbers > 1)

        made = pytree.of_rows(fn, group_size)(params, examples)
        carry = total, jnp.zeros(keep.shape, jnp.result_type(float))
        if then is None:
            return add(made, carry)[0]
        return pytree.once_in_memory(add, made, jnp.any(keep).astype(jnp.int32), carry)

    return of_group


def sum_over_groups(
    of_group: Callable[[Params, PyTree, Array, PyTree], tuple[PyTree, Array]],
    like: PyTree,
    params: Params,
    batch: PyTree,
    mask: Bool[Array, " batch"],
    group_size: int,
    rows_per_carry: int | None,
) -> tuple[PyTree, Array]:
    """Sums `of_group` over as many groups as hold a real row; its numbers, one for each padded row.

    Integers are carried over to their high part after every `rows_per_carry` rows.
    """

    def rows(tree_of_rows: PyTree, group: Array) -> PyTree:
        begin = group * group_size
        return jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, begin, group_size), tree_of_rows
        )

    batch_size = mask.shape[0]
    num_padding = -batch_size % group_size if batch_size else group_size
    padded_batch, padded_mask = pad_rows((batch, mask), num_padding)

    def add_group(group: Array, carry: PyTree) -> PyTree:
        total, norms = carry
        total, of_group_norms = of_group(
            params, rows(padded_batch, group), rows(padded_mask, group), total
        )
        begin = group * group_size
        return total, jax.lax.dynamic_update_slice_in_dim(norms, of_group_norms, begin, axis=0)

    row_numbers = jnp.arange(padded_mask.shape[0])
    rows_used = jnp.max(jnp.where(padded_mask, row_numbers + 1, 0), initial=0)
    num_groups = (rows_used + group_size - 1) // group_size
    norms = jnp.zeros(padded_mask.shape, jnp.result_type(float))
    over_groups = jax.named_scope("microbatches")(jax.lax.fori_loop)
    if rows_per_carry is None:
        total, norms = over_groups(0, num_groups, add_group, (optax.tree.zeros_like(like), norms))
        return total, norms

    groups_per_carry = rows_per_carry // group_size

    def add_groups(part: Array, carry: PyTree) -> PyTree:
        high, low, norms = carry
        begin = part * groups_per_carry
        end = jnp.minimum(begin + groups_per_carry, num_groups)
        low, norms = over_groups(begin, end, add_group, (low, norms))
        high = jax.tree.map(lambda h, x: h + (x >> fixed_point.LIMB_BITS), high, low)
        return high, jax.tree.map(lambda x: x & fixed_point.LIMB_MASK, low), norms

    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.int32), like)
    num_parts = (num_groups + groups_per_carry - 1) // groups_per_carry
    over_parts = jax.named_scope("carries")(jax.lax.fori_loop)
    high, low, norms = over_parts(0, num_parts, add_groups, (zero, zero, norms))
    return jax.tree.map(fixed_point.Total, high, low), norms


def pad_rows(tree_of_rows: PyTree, num_rows: int) -> PyTree:
    """Appends `num_rows` zero rows (False in a mask) to every leaf."""
    if num_rows == 0:
        return tree_of_rows
    return jax.tree.map(
        lambda x: jnp.concatenate([x, jnp.zeros((num_rows, *x.shape[1:]), x.dtype)]), tree_of_rows
    )
