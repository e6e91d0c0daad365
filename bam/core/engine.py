"""The sum of bounded per-example gradients, and its noise, in constant memory.

`clipped_sum` bounds each example's gradient and adds them up with noise; `plain_sum` is ordinary
training's. Both are a `per_example_sum`, whose seams are a few lines each:

* where a row stands in its microbatch: `bam.core.places`, in which no other row has a say;
* how examples are grouped, and that no more groups run than hold one: `bam.core.microbatches`;
* how devices share them, and where the sum meets its noise: `sum_in_place`.

With noise, sum and noise are integers (`bam.core.fixed_point`) until they are added up.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from bam.core import fixed_point, places, pytree
from bam.core.chacha import check_step
from bam.core.clipping import bounded_by
from bam.core.fixed_point import GaussianNoise
from bam.core.microbatches import Then, pad_rows, sum_of_group, sum_over_groups, wide
from bam.core.pytree import Grads, Params


def clipped_sum(
    grad_fn: Callable[[Params, PyTree], Grads],
    clip: optax.GradientTransformation,
    params: Params,
    batch: PyTree,
    *,
    mask: Bool[Array, " batch"] | None,
    microbatch_size: int = 16,
    mesh: jax.sharding.Mesh | None = None,
    noise: GaussianNoise | None = None,
    clip_state: PyTree | None = None,
) -> tuple[PyTree, Float[Array, " batch"]]:
    r"""Sums bounded per-example gradients, $\sum_i m_i\, clip(g_i)$, a microbatch at a time.

    One compilation serves every realised batch size: pad the batch to a number of rows that does
    not depend on who was drawn, and say which rows are real with `mask`. Memory is that of one
    microbatch's per-example gradients. Rows never mix; a masked row counts for exactly zero
    whatever it holds. An example is dropped whose gradient is not finite, or that a clip makes
    longer than it declared.

    To release the sum, have the noise added here. Then bounded gradients are cut to the noise's
    grid and added as integers, and every row's place in a microbatch is drawn, with the noise's
    key: so adding or removing an example changes the sum by at most S (1 + 1e-5), to the last bit,
    for any number of rows, microbatch size and number of devices. Without noise sums are
    floating-point ones: their rounding depends on all rows, and noise added later does not cover
    that.

    Args:
      grad_fn: `(params, example) -> grads`, for example `bam_sam(loss_fn, 0.02).grad`.
      clip: a bounded per-example transform of sensitivity S; see `bam.core.clipping`.
      params: pytree of arrays, the point at which gradients are taken.
      batch: pytree of arrays `[B, ...]`; `example` is one row of each.
      mask: `[B]`, True for real examples; None says that all rows are. It has no default: padding
        that is counted is an example counted many times.
      microbatch_size: most rows per `vmap`, at least 1. One runs without `vmap`. It trades memory
        for parallelism.
      mesh: devices that share the rows, along the mesh's only axis; each example is clipped where
        it lies and the devices' sums are added. None computes everything where `params` are.
      noise: Gaussian noise to add to the sum; None for none. Each device draws and adds a slice of
        it before the devices' sums are added, so none of them holds the total without noise.
      clip_state: state of `clip`; None for that of its first step.

    Returns:
      The pair `(total, norms)`. `total` is a pytree like `params`, float32 or wider: NOT private
      without noise. `norms` is `[B]`: the L2 norm of each example's gradient before clipping, not
      finite where the example was dropped, 0 in masked rows. NOT private at all.

    Raises:
      TypeError: if a gradient, or what the clip makes of it, is not of real floating-point numbers.
      ValueError: if `clip` declares no `sensitivity`, `microbatch_size` is below 1, the rows of
        `batch` and `mask` disagree, the mesh has more than one axis or an explicit one, or the
        noise is below S / 500, where it could hide nothing.

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
    return per_example_sum(
        grad_fn,
        params,
        batch,
        then=bounded_by(clip, clip.init(params) if clip_state is None else clip_state),
        mask=mask,
        microbatch_size=microbatch_size,
        mesh=mesh,
        noise=noise,
        sensitivity=getattr(clip, "sensitivity", math.inf),
    )


def plain_sum(
    loss_fn: Callable[[Params, PyTree], Float[Array, ""]],
    params: Params,
    batch: PyTree,
    *,
    mask: Bool[Array, " batch"] | None = None,
    microbatch_size: int = 16,
    mesh: jax.sharding.Mesh | None = None,
) -> Grads:
    r"""Sums gradients without bounding any, $\sum_i m_i \nabla L_i$: NOT private, and cannot be.

    What ordinary training computes: one backward pass per microbatch, whose examples share the
    weights, so no per-example gradient ever exists. Arguments and errors are `clipped_sum`'s, with
    `loss_fn: (params, example) -> scalar loss of one example`; returns a pytree like `params`,
    float32 or wider.
    """
    batch_size, size, mask = _groups(batch, mask, microbatch_size, mesh)

    def group_grad(params: Params, group: PyTree) -> tuple[Grads, Float[Array, ""]]:
        def total_loss(params: Params) -> Float[Array, ""]:
            examples, keep = group
            return jnp.sum(jnp.where(keep, pytree.of_rows(loss_fn, size)(params, examples), 0))

        return jax.grad(total_loss)(params), jnp.zeros(())

    groups: PyTree = jax.tree.map(
        lambda x: x.reshape(x.shape[0] // size, size, *x.shape[1:]),
        pad_rows((batch, mask), -batch_size % size),
    )
    total, _ = per_example_sum(
        group_grad, params, groups, mask=jnp.any(groups[1], axis=1), microbatch_size=1, mesh=mesh
    )
    return total


def per_example_sum(
    fn: Callable[[Params, PyTree], PyTree],
    params: Params,
    batch: PyTree,
    *,
    then: Then | None = None,
    mask: Bool[Array, " batch"] | None = None,
    microbatch_size: int = 16,
    mesh: jax.sharding.Mesh | None = None,
    noise: GaussianNoise | None = None,
    sensitivity: float = math.inf,
) -> tuple[PyTree, Float[Array, " batch"]]:
    r"""Sums a function of one example, $\sum_i m_i f(\theta, x_i)$, and keeps a number of each.

    What all sums over examples are made of; it bounds nothing. Groups after the last real row are
    not run. With noise, the rows' places in the groups are drawn: `bam.core.places`.

    Args, besides those of `clipped_sum`:
      fn: `(params, example) -> (summands, number)`: a pytree of floats, and a scalar.
      then: `(params, made) -> (summands, number)` of what `fn` made, which is then in memory: all
        that is computed of it reads the same numbers.
      sensitivity: with noise, the most that the L2 norm of `summands` can be.

    Returns the sum, float32 or wider, and the numbers, `[B]`, 0 in masked rows.
    """
    num_rows, size, mask = _groups(batch, mask, microbatch_size, mesh)
    summed = functools.partial(
        sum_in_place, fn, params, then=then, mesh=mesh, noise=noise, sensitivity=sensitivity
    )
    if noise is None or noise.std == 0 or num_rows == 0:
        return summed(batch, mask=mask, microbatch_size=size)
    check_step(noise.step)
    size = min(size, fixed_point.rows_per_sum(sensitivity, noise.std, num_rows))
    rows = places.drawn(noise, mask, size, mesh.size if mesh else 1)
    batch = jax.tree.map(lambda x: jnp.asarray(x)[jnp.minimum(rows, num_rows - 1)], batch)
    mask = mask.at[rows].get(mode="fill", fill_value=False)
    total, numbers = summed(batch, mask=mask, microbatch_size=size)
    # Back to where the rows stand in the batch.
    return total, jnp.zeros(num_rows, numbers.dtype).at[rows].set(numbers, mode="drop")


def sum_in_place(
    fn: Callable[[Params, PyTree], PyTree],
    params: Params,
    batch: PyTree,
    *,
    then: Then | None,
    mask: Bool[Array, " batch"] | None,
    microbatch_size: int,
    mesh: jax.sharding.Mesh | None,
    noise: GaussianNoise | None,
    sensitivity: float,
) -> tuple[PyTree, Float[Array, " batch"]]:
    """`per_example_sum` of rows that stay at their places in the batch: the caller's law.

    Devices take rows in turn, so that real rows, which stand first, are shared evenly.
    """
    batch_size, group_size, mask = _groups(batch, mask, microbatch_size, mesh)
    num_devices, axis = (mesh.size, mesh.axis_names[0]) if mesh else (1, None)
    noise = noise if noise is not None and noise.std > 0 else None
    rows_per_carry = None
    if noise is not None:
        check_step(noise.step)
        noise = dataclasses.replace(noise, step=jnp.asarray(noise.step, jnp.uint32))
        rows_per_carry = fixed_point.rows_per_sum(sensitivity, noise.std, batch_size)
        group_size = min(group_size, rows_per_carry)
    of_group = sum_of_group(fn, then, None if noise is None else noise.spacing, group_size)

    def of_device(
        params: Params, batch: PyTree, mask: Array, noise: GaussianNoise | None
    ) -> tuple[PyTree, Array]:
        batch, mask = jax.tree.map(lambda x: x[0], (batch, mask))
        total, numbers = sum_over_groups(
            of_group, like, params, batch, mask, group_size, rows_per_carry
        )
        if noise is not None:
            device = jax.lax.axis_index(axis) if axis else 0
            total = fixed_point.add_share(noise, total, device, num_devices)
        if axis:
            total = jax.tree.map(lambda x: jax.lax.psum(x, axis), total)
        return total, numbers[None, : mask.shape[0]]

    def share_out(x: Array) -> Array:  # [rows, …] -> [devices, rows of each, …]
        return jnp.swapaxes(x.reshape(x.shape[0] // num_devices, num_devices, *x.shape[1:]), 0, 1)

    one_row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    like, _ = jax.eval_shape(lambda p, row: wide(then, p, fn(p, row)), params, one_row)
    shares = jax.tree.map(share_out, pad_rows((batch, mask), -batch_size % num_devices))
    sum_of_shares: Callable[..., tuple[PyTree, Array]] = of_device
    if mesh:
        split, same = jax.sharding.PartitionSpec(axis), jax.sharding.PartitionSpec()
        sum_of_shares = jax.shard_map(
            of_device,
            mesh=mesh,
            in_specs=(same, split, split, same),
            out_specs=(same, split),
            check_vma=False,
        )
    total, numbers = sum_of_shares(params, *shares, noise)
    if noise is not None:
        total = jax.tree.map(
            lambda x, t: fixed_point.to_float(fixed_point.carried(t), noise.spacing, x.dtype),
            like,
            total,
        )
        # What follows must not be merged into this rounding, or it would depend on what follows.
        total = jax.lax.optimization_barrier(total)
    return total, numbers.swapaxes(0, 1).reshape(-1)[:batch_size]


def _groups(
    batch: PyTree, mask: Array | None, microbatch_size: int, mesh: jax.sharding.Mesh | None
) -> tuple[int, int, Array]:
    """The number of rows, rows per group, and the mask as an array."""
    if microbatch_size < 1 or microbatch_size != int(microbatch_size):
        raise ValueError(f"microbatch_size must be an integer from 1, got {microbatch_size}")
    if mesh and mesh.axis_types != (jax.sharding.AxisType.Auto,):
        raise ValueError(
            "mesh must have one axis, of AxisType.Auto, as bam.training.devices.mesh makes it; got "
            f"{dict(zip(mesh.axis_names, mesh.axis_types, strict=True))}"
        )
    shapes = [x.shape for x in jax.tree.leaves((batch, mask))]
    sizes = {shape[0] if shape else -1 for shape in shapes}
    if len(sizes) != 1 or -1 in sizes:
        raise ValueError(
            f"every array of batch, and mask, needs the same number of rows; got shapes {shapes}"
        )
    batch_size: int = sizes.pop()
    rows_of_each = -(-batch_size // (mesh.size if mesh else 1))
    if mask is not None and (jnp.ndim(mask) != 1 or jnp.result_type(mask) != jnp.bool_):
        raise ValueError(f"mask must be [rows] bools, got {jnp.result_type(mask)}{jnp.shape(mask)}")
    mask = jnp.ones(batch_size, bool) if mask is None else jnp.asarray(mask)
    return batch_size, max(1, min(int(microbatch_size), rows_of_each)), mask
