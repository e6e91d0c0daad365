"""The sum of bounded per-example gradients, in constant memory.

`clipped_sum` is the whole engine. Its seams, each a few lines of their own:

* what is computed for one example: `one_example` (gradient, then clip);
* how examples are grouped: `one_group` (a `vmap` over a microbatch, or no `vmap` for one example);
* how sums are reduced: `_sum_over_groups`, which runs only as many groups as hold an example;
* how devices share them, and the noise: `_sum_over_devices`, a sum of the devices' sums.

`plain_sum` is ordinary training's sum over the same groups, for non-private baselines.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from bam import tree
from bam.tree import Grads, Params


def clipped_sum(
    grad_fn: Callable[[Params, Any], Grads],
    clip: optax.GradientTransformation,
    params: Params,
    batch: Any,
    *,
    mask: Bool[Array, " batch"] | None = None,
    microbatch_size: int = 16,
    mesh: jax.sharding.Mesh | None = None,
    noise: Any = None,
    clip_state: Any = None,
) -> tuple[Any, Float[Array, " batch"]]:
    r"""Sums bounded per-example gradients, $\sum_i m_i\, clip(g_i)$, a microbatch at a time.

    One compilation serves every realised batch size: pad the batch to a fixed number of rows and
    say which are real with `mask`. Groups after the last real row are not run. Memory is that of
    one microbatch's per-example gradients, whatever the batch size. The sum changes by at most
    the sensitivity of `clip` when one example is added or removed: rows never mix, a masked row
    counts for exactly zero whatever it holds, and so does an example whose gradient is not finite.

    Args:
      grad_fn: `(params, example) -> grads`, for example `bam_sam(loss_fn, 0.02).grad`.
      clip: a bounded per-example transform; see `bam.transforms`.
      params: pytree of arrays, the point at which gradients are taken.
      batch: pytree of arrays `[B, ...]`; `example` is one row of each.
      mask: `[B]`, True for real examples; None means all are.
      microbatch_size: rows per `vmap`, at least 1. One runs without `vmap`. Any size gives the
        same sum up to float rounding; it trades memory for parallelism.
      mesh: devices that share the rows, along the mesh's only axis; each example is clipped where
        it lies and the devices' sums are added. None computes everything where `params` are.
      noise: a pytree like the sum, to add to it: each device adds a slice of it to its own
        sum, before the devices' sums are added, so none of them holds the total without noise.
      clip_state: state of `clip`; None for that of its first step.

    Returns:
      The pair `(total, norms)`. `total` is a pytree like `params`, float32 or wider: NOT private
      until noise is added. `norms` is `[B]`: the L2 norm of each example's gradient before
      clipping, not finite where the gradient was not, 0 in masked rows. NOT private at all.

    Raises:
      ValueError: if `clip` declares no `sensitivity`, `microbatch_size` is below 1, or the rows
        of `batch` and `mask` disagree.

    Examples:
      >>> import jax.numpy as jnp
      >>> from bam import clip_by_l2_norm
      >>> grad_fn = lambda w, x: x  # gradients given directly
      >>> rows = jnp.array([[3.0, 4.0], [0.0, 0.5], [9.0, 9.0]])
      >>> total, norms = clipped_sum(grad_fn, clip_by_l2_norm(1.0), jnp.zeros(2), rows,
      ...                            mask=jnp.array([True, True, False]))
      >>> print(total, norms)
      [0.6 1.3] [5.  0.5 0. ]
    """
    if getattr(clip, "sensitivity", None) is None:
        raise ValueError(
            "clipped_sum needs a bounded transform, one with a `sensitivity`: "
            "clip_by_l2_norm, normalize, clip_per_layer, or a bam.chain that ends in one"
        )
    batch_size, group_size, mask = _groups(batch, mask, microbatch_size, mesh)
    clip_state = clip.init(params) if clip_state is None else clip_state

    def one_example(
        params: Params, example: Any, keep: Bool[Array, ""]
    ) -> tuple[Grads, Float[Array, ""]]:
        grads = grad_fn(params, example)
        norm = tree.l2_norm(grads)
        bounded, _ = clip.update(grads, clip_state, params)
        keep_grads = keep & jnp.isfinite(norm)
        wide = jax.tree.map(tree.at_least_float32, bounded)
        return jax.tree.map(lambda x: jnp.where(keep_grads, x, 0), wide), jnp.where(keep, norm, 0)

    def one_group(params: Params, examples: Any, keep: Bool[Array, " group"]) -> Any:
        if group_size == 1:
            total, norm = one_example(params, jax.tree.map(lambda x: x[0], examples), keep[0])
            return total, norm[None]
        bounded, norms = jax.vmap(one_example, (None, 0, 0))(params, examples, keep)
        return jax.tree.map(lambda x: jnp.sum(x, axis=0), bounded), norms

    total, norms = _sum_over_devices(one_group, params, batch, mask, group_size, mesh, noise)
    return total, norms[:batch_size]


def plain_sum(
    loss_fn: Callable[[Params, Any], Float[Array, ""]],
    params: Params,
    batch: Any,
    *,
    mask: Bool[Array, " batch"] | None = None,
    microbatch_size: int = 16,
    mesh: jax.sharding.Mesh | None = None,
) -> Grads:
    r"""Sums gradients without bounding any, $\sum_i m_i \nabla L_i$: NOT private, and cannot be.

    What ordinary training computes: one backward pass per microbatch, whose examples share the
    weights, so no per-example gradient ever exists.

    Args:
      loss_fn: `(params, example) -> scalar loss of one example`.
      params: pytree of arrays, the point at which gradients are taken.
      batch: pytree of arrays `[B, ...]`; `example` is one row of each.
      mask: `[B]`, True for real examples; None means all are.
      microbatch_size: rows per backward pass, at least 1.
      mesh: as in `clipped_sum`.

    Returns:
      A pytree like `params`.

    Raises:
      ValueError: if `microbatch_size` is below 1, or the rows of `batch` and `mask` disagree.
    """
    _, group_size, mask = _groups(batch, mask, microbatch_size, mesh)

    def one_group(params: Params, examples: Any, keep: Bool[Array, " group"]) -> Any:
        def total_loss(params: Params) -> Float[Array, ""]:
            return jnp.sum(jnp.where(keep, jax.vmap(loss_fn, (None, 0))(params, examples), 0))

        return jax.grad(total_loss)(params), jnp.zeros(group_size)

    return _sum_over_devices(one_group, params, batch, mask, group_size, mesh)[0]


def _groups(
    batch: Any, mask: Any, microbatch_size: int, mesh: jax.sharding.Mesh | None
) -> tuple[int, int, Array]:
    """Checked number of rows, rows per group, and the mask as an array."""
    if microbatch_size < 1:
        raise ValueError(f"microbatch_size must be at least 1, got {microbatch_size}")
    batch_size = _num_rows(batch, mask)
    mask = jnp.ones(batch_size, bool) if mask is None else jnp.asarray(mask, bool)
    rows_of_each = -(-batch_size // (mesh.size if mesh else 1))
    return batch_size, max(1, min(microbatch_size, rows_of_each)), mask


def _sum_over_devices(
    one_group: Callable[[Params, Any, Array], tuple[Grads, Array]],
    params: Params,
    batch: Any,
    mask: Bool[Array, " batch"],
    group_size: int,
    mesh: jax.sharding.Mesh | None,
    noise: Any = None,
) -> tuple[Any, Array]:
    """`_sum_over_groups` of every device's share of the rows, and of the noise, added up.

    Rows are dealt like cards, so that real rows, which stand first, are shared evenly.
    """
    if mesh is None or mesh.size == 1:
        total, norms = _sum_over_groups(one_group, params, batch, mask, group_size)
        return total if noise is None else jax.tree.map(jnp.add, total, noise), norms
    (axis,) = mesh.axis_names
    batch_size = mask.shape[0]

    def deal(x: Array) -> Array:  # [rows, …] -> [devices, rows of each, …]
        return jnp.swapaxes(x.reshape(-1, mesh.size, *x.shape[1:]), 0, 1)

    def add_slice(total: Array, own_slice: Array) -> Array:
        flat = jnp.ravel(total)
        begin = jax.lax.axis_index(axis) * own_slice.size
        index = begin + jnp.arange(own_slice.size)
        return flat.at[index].add(own_slice, mode="drop").reshape(total.shape)

    def share_of_one(params: Params, batch: Any, mask: Array, noise: Any) -> tuple[Grads, Array]:
        batch, mask, noise = jax.tree.map(lambda x: x[0], (batch, mask, noise))
        total, norms = _sum_over_groups(one_group, params, batch, mask, group_size)
        if noise is not None:
            total = jax.tree.map(add_slice, total, noise)
        return jax.tree.map(lambda x: jax.lax.psum(x, axis), total), norms[None, : mask.shape[0]]

    hands = jax.tree.map(deal, _pad_rows((batch, mask), -batch_size % mesh.size))
    slices = jax.tree.map(functools.partial(_slices, num_slices=mesh.size), noise)
    split, same = jax.sharding.PartitionSpec(axis), jax.sharding.PartitionSpec()
    sum_of_shares: Callable[..., tuple[Grads, Array]] = jax.shard_map(
        share_of_one,
        mesh=mesh,
        in_specs=(same, split, split, split),
        out_specs=(same, split),
        check_vma=False,
    )
    total, norms = sum_of_shares(params, *hands, slices)
    return total, norms.swapaxes(0, 1).reshape(-1)[:batch_size]


def _slices(x: Array, num_slices: int) -> Array:
    """All entries in order, and zeros to make the slices equal: `[num_slices, …]`."""
    flat = jnp.ravel(x)
    return jnp.pad(flat, (0, -flat.size % num_slices)).reshape(num_slices, -1)


def _sum_over_groups(
    one_group: Callable[[Params, Any, Array], tuple[Grads, Array]],
    params: Params,
    batch: Any,
    mask: Bool[Array, " batch"],
    group_size: int,
) -> tuple[Grads, Array]:
    """Sums `one_group(params, examples, keep)` over as many groups as hold a real row.

    Returns the total and the groups' numbers, one for each row of the padded batch.
    """

    def rows(tree_of_rows: Any, group: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, group * group_size, group_size),
            tree_of_rows,
        )

    batch_size = mask.shape[0]
    num_padding = -batch_size % group_size if batch_size else group_size
    padded_batch, padded_mask = _pad_rows((batch, mask), num_padding)
    total_shape, norm_shape = jax.eval_shape(
        one_group, params, *_abstract_rows((padded_batch, padded_mask), group_size)
    )

    def add_group(group: Any, carry: tuple[Grads, Array]) -> tuple[Grads, Array]:
        total, norms = carry
        group_total, group_norms = one_group(
            params, rows(padded_batch, group), rows(padded_mask, group)
        )
        total = jax.tree.map(jnp.add, total, group_total)
        return total, jax.lax.dynamic_update_slice_in_dim(
            norms, group_norms, group * group_size, axis=0
        )

    zero_total = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), total_shape)
    zero_norms = jnp.zeros(padded_mask.shape, norm_shape.dtype)
    row_numbers = jnp.arange(padded_mask.shape[0])
    rows_used = jnp.max(jnp.where(padded_mask, row_numbers + 1, 0), initial=0)
    num_groups = (rows_used + group_size - 1) // group_size
    return jax.lax.fori_loop(0, num_groups, add_group, (zero_total, zero_norms))


def _num_rows(batch: Any, mask: Any) -> int:
    """The common length of the leading axes."""
    sizes: set[int] = {x.shape[0] if x.ndim else -1 for x in jax.tree.leaves((batch, mask))}
    if len(sizes) != 1 or -1 in sizes:
        raise ValueError(
            "every array of batch, and mask, needs the same number of rows; got shapes "
            f"{[x.shape for x in jax.tree.leaves((batch, mask))]}"
        )
    return sizes.pop()


def _pad_rows(tree_of_rows: Any, num_rows: int) -> Any:
    """Appends `num_rows` zero rows (False in a mask) to every leaf."""
    if num_rows == 0:
        return tree_of_rows

    return jax.tree.map(
        lambda x: jnp.concatenate([x, jnp.zeros((num_rows, *x.shape[1:]), x.dtype)]), tree_of_rows
    )


def _abstract_rows(tree_of_rows: Any, num_rows: int) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype), tree_of_rows
    )
