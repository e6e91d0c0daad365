"""The sum of bounded per-example gradients, and its noise, in constant memory.

`clipped_sum` bounds each example's gradient and adds them up with noise; `plain_sum` is the sum of
ordinary training. Both call `per_example_sum`. Read from top to bottom:

1. `per_example_sum` gives each row a place that does not depend on other rows (`bam.core.places`);
2. `_sum_on_devices` gives each device its rows, and adds the noise to each device's sum;
3. `_sum_microbatches` runs microbatches up to the last one with a real row;
4. `_add_microbatch` bounds the gradients of one microbatch and adds them;
5. `_summand` is the contribution of one example.

With noise, both the sum and the noise are integers (`bam.core.grid`) until they have been added.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int32, PyTree

from bam.core import grid, places, pytree, scalars
from bam.core.chacha import check_step
from bam.core.clipping import Bound, Bounded, Transform, as_declared, bound_of, is_within
from bam.core.example_loss import guard_loss
from bam.core.gaussian import GaussianNoise
from bam.core.program import as_partial, compile_once
from bam.core.pytree import Grads, Params
from bam.core.tracing import check_keys, with_noise_of_its_own
from bam.errors import InputError

ONE_DEVICE = (
    "the gradient cannot be computed on one device of the mesh: leave sharding constraints out of "
    "the loss, since rows are shared out without them"
)


def clipped_sum(
    grad_fn: Callable[[Params, PyTree], Grads],
    clip: Transform,
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
    not depend on who was drawn, and mark the real rows with `mask`. Memory is that of one
    microbatch's per-example gradients. Rows never mix, and a masked row adds exactly zero whatever
    it holds. An example is dropped if its gradient is not finite, or if the clip returns more than
    it declared.

    To release the sum, let this function add the noise. Then bounded gradients are cut to the grid
    of the noise and added as integers, and the noise key draws each row's place in a microbatch.
    So adding or removing an example changes the sum by at most S (1 + 1e-5), to the last bit, for
    any number of rows, microbatch size and number of devices. Without noise the sum is of floats:
    its rounding depends on all rows, and noise that is added later does not cover that.

    Outside `jax.jit` this is compiled once for each `grad_fn`, kind of clip and set of shapes;
    another clip norm compiles nothing. A clip of your own counts as a new kind each time it is
    made. So make both once, before the loop, and keep `grad_fn` pure.

    Args:
      grad_fn: `(params, example) -> grads`, for example `bam_sam(loss_fn, 0.02).grad`.
      clip: a bounded per-example transform with sensitivity S; see `bam.core.clipping`.
      params: pytree of arrays, the point at which gradients are taken.
      batch: pytree of arrays `[B, ...]`; `example` is one row of each.
      mask: `[B]`, True for real examples; None if all rows are real. There is no default, because
        padding that counts is one example counted many times.
      microbatch_size: largest number of rows per `vmap`, at least 1. A single row runs without
        `vmap`. It trades memory for parallelism.
      mesh: devices that share the rows along the mesh's only axis. Each example is clipped on its
        device, and the devices' sums are added. None computes everything where `params` are.
      noise: Gaussian noise to add to the sum, or None. Each device draws and adds a slice of it
        before the devices' sums are added, so no device holds the total without noise.
      clip_state: state of `clip`; None means its first state.

    Returns:
      The pair `(total, norms)`. `total` is a pytree like `params`, float32 or wider: NOT private
      without noise. `norms` is `[B]`: the L2 norm of each example's gradient before clipping, not
      finite where the example was dropped, 0 in masked rows. NOT private at all.

    Raises:
      TypeError: if a gradient, or the clip's result, is not of real floating-point numbers.
      InputError: if `clip` declares no `sensitivity`, `grad_fn` returns a pair as
        `jax.value_and_grad` does, `microbatch_size` is below 1, the rows of `batch` and `mask`
        disagree, the mesh has more than one axis or an explicit one, or the noise is below S / 512
        (S · B / 2^26 for more than 131,072 rows), which could hide nothing.

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
    clip, microbatch_size = as_declared(clip), scalars.count("microbatch_size", microbatch_size)
    if not callable(grad_fn):
        raise InputError(
            f"grad_fn must be a function (params, example) -> gradient, got a "
            f"{type(grad_fn).__name__}: pass the `grad` of an oracle"
        )
    clip_state = clip.init(params) if clip_state is None else clip_state
    # Without noise the sum is of floats.
    if noise is not None and scalars.is_known(noise.std) and noise.std == 0:
        noise = None
    if noise is not None:
        check_step(noise.step)
        check_keys(noise.key, noise.step)
        # Known numbers are checked here, before anything is compiled. For traced ones,
        # `per_example_sum` makes the sum NaN instead.
        num_rows = max(1, *(len(x) if jnp.ndim(x) else 1 for x in jax.tree.leaves(batch)))
        size = min(microbatch_size, num_rows)
        most_rows, _ = grid.rows_per_sum(clip.sensitivity, noise.std, num_rows)
        microbatch_size = grid.fitting_size(size, most_rows)
    total = compile_once(
        _clipped_sum, as_partial(grad_fn), clip, microbatch_size=microbatch_size, mesh=mesh
    )
    return total(params, batch, mask, noise, clip_state)


def _clipped_sum(
    grad_fn: Callable[[Params, PyTree], Grads],
    clip: Bounded,
    params: Params,
    batch: PyTree,
    mask: Array | None,
    noise: GaussianNoise | None,
    clip_state: PyTree,
    *,
    microbatch_size: int,
    mesh: jax.sharding.Mesh | None,
) -> tuple[PyTree, Float[Array, " batch"]]:
    def gradient(params: Params, example: PyTree) -> Grads:
        grads = grad_fn(params, example)
        like: list[Any] = [jax.tree.structure(x) for x in (params, grads)]
        # A pair with a gradient in it would be clipped as one, the loss or the figures with it.
        is_pair = isinstance(grads, tuple) and len(grads) == 2 and like[0] != like[1]
        if is_pair and like[0] in map(jax.tree.structure, grads):
            raise InputError(
                "grad_fn returns a pair with a gradient in it, as jax.value_and_grad and has_aux "
                "do, and both would be clipped together: return the gradient alone, by jax.grad"
            )
        return grads

    return per_example_sum(
        gradient,
        params,
        batch,
        bound=bound_of(clip, clip_state),
        mask=mask,
        microbatch_size=microbatch_size,
        mesh=mesh,
        noise=noise,
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

    This is the sum of ordinary training: one backward pass per microbatch, whose examples share
    the weights, so per-example gradients never exist. Arguments and errors are those of
    `clipped_sum`, with `loss_fn: (params, example) -> scalar loss of one example`. Returns a pytree
    like `params`, float32 or wider.
    """
    microbatch_size = scalars.count("microbatch_size", microbatch_size)
    total = compile_once(
        _plain_sum, as_partial(loss_fn), microbatch_size=microbatch_size, mesh=mesh
    )
    return total(params, batch, mask)


def _plain_sum(
    loss_fn: Callable[[Params, PyTree], Float[Array, ""]],
    params: Params,
    batch: PyTree,
    mask: Array | None,
    *,
    microbatch_size: int,
    mesh: jax.sharding.Mesh | None,
) -> Grads:
    batch_size, size, is_row = _check_batch(batch, mask, microbatch_size, mesh)
    if mask is not None:  # real rows first, so that padding fills at most a part of a microbatch
        order = jnp.argsort(~is_row, stable=True)
        batch, is_row = jax.tree.map(lambda x: jnp.asarray(x)[order], (batch, is_row))

    def microbatch_grad(params: Params, microbatch: PyTree) -> tuple[Grads, Float[Array, ""]]:
        total_loss = functools.partial(pytree.sum_of_real, guard_loss(loss_fn))
        return jax.grad(total_loss)(params, *microbatch), jnp.zeros(())

    microbatches: PyTree = jax.tree.map(
        lambda x: x.reshape(x.shape[0] // size, size, *x.shape[1:]),
        pad_rows((batch, is_row), -batch_size % size),
    )
    is_real = jnp.any(microbatches[1], axis=1)
    return per_example_sum(
        microbatch_grad, params, microbatches, mask=is_real, microbatch_size=1, mesh=mesh
    )[0]


def per_example_sum(
    value_fn: Callable[[Params, PyTree], PyTree],
    params: Params,
    batch: PyTree,
    *,
    bound: Bound | None = None,
    mask: Bool[Array, " batch"] | None = None,
    microbatch_size: int = 16,
    mesh: jax.sharding.Mesh | None = None,
    noise: GaussianNoise | None = None,
    draw_places: bool = True,
) -> tuple[PyTree, Float[Array, " batch"]]:
    r"""Sums a function of one example, $\sum_i m_i f(\theta, x_i)$, and keeps a norm of each.

    Every sum over examples is one of these. Microbatches after the last real row are not run.
    Compile it as a whole with `jax.jit`, because each call makes its loops anew.

    Args, besides those of `clipped_sum`:
      value_fn: f. With a bound `(params, example) -> gradient`. Without one
        `(params, example) -> (summand, norm)`: a pytree of floats, and any scalar to keep.
      bound: the bound of that gradient, needed for noise. The engine puts the gradient in memory
        first, so the norm belongs to the very numbers that are scaled.
      draw_places: with noise, whether each row gets a random place (`bam.core.places`). Otherwise
        a row keeps its index in a microbatch, and real rows move to the first microbatches. The
        batch must then be padded at random, as by `sampling.pad`.

    Returns the sum, float32 or wider, and the norms `[B]`, 0 in masked rows.
    """
    num_rows, size, mask = _check_batch(batch, mask, microbatch_size, mesh)
    value_fn = jax.jit(value_fn, inline=True)  # so that it is traced once, for shapes and sum
    most_rows: int | Array | None = None
    is_valid: bool | Array = True
    if noise is None or (scalars.is_known(noise.std) and noise.std == 0):
        noise = None
    elif bound is None:
        raise InputError(
            "noise needs a bound on each row's gradient: pass a bounded clip, clip_by_l2_norm(C)"
        )
    else:
        check_step(noise.step)
        most_rows, is_valid = grid.rows_per_sum(bound.sensitivity, noise.std, num_rows)
        size = grid.fitting_size(size, most_rows)
        is_valid &= most_rows >= size  # a traced limit could not shrink the microbatch
        # A constant σ goes through a `where` on the key, or XLA would fold it into other constants,
        # with other bits. A key of zeros is no key: the sum is NaN.
        is_valid &= (is_key := jnp.any(noise.key != 0))
        std = jnp.where(is_key, noise.std, jnp.nan)
        noise = dataclasses.replace(noise, std=std, step=jnp.asarray(noise.step, jnp.uint32))
    row_at = None  # None: rows stay where they are
    num_devices = mesh.size if mesh else 1
    if noise is not None and num_rows > (0 if draw_places else size * num_devices):
        shared = mask, size, num_devices
        row_at = places.draw(noise, *shared) if draw_places else places.in_batch(*shared)
        batch = jax.tree.map(lambda x: jnp.asarray(x)[jnp.minimum(row_at, num_rows - 1)], batch)
        mask = mask.at[row_at].get(mode="fill", fill_value=False)

    # Tracing one row gives the shapes of a summand; nothing is computed.
    one_row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    traced, (like, _) = jax.make_jaxpr(
        lambda params, row: _summand(bound, None, params, value_fn(params, row)), return_shape=True
    )(params, one_row)
    # Inside `shard_map`, JAX reports a sharding constraint without naming the loss or the mesh.
    if mesh and " = sharding_constraint[" in str(traced):
        raise InputError(ONE_DEVICE)
    if bound is not None:
        pytree.check_has_arrays(like, "gradient is")
        is_valid &= jnp.logical_not(jnp.isnan(bound.sensitivity))
    spec = _SumSpec(value_fn, bound, like, size, most_rows)
    total, norms = _sum_on_devices(spec, params, batch, mask, noise, mesh)
    if noise is not None:
        total = _as_floats(total, noise, like, is_valid)
        total = with_noise_of_its_own(total, noise.key, noise.step)
    elif bound is not None:
        total = jax.tree.map(lambda x: jnp.where(is_valid, x, jnp.nan), total)
    if row_at is not None:  # back to the order of the batch
        norms = jnp.zeros(num_rows, norms.dtype).at[row_at].set(norms, mode="drop")
    return total, norms


def _as_floats(
    total: grid.Total, noise: GaussianNoise, like: PyTree, is_valid: bool | Bool[Array, ""]
) -> PyTree:
    """Returns a noised sum as floats with the shapes and dtypes of `like`.

    It is NaN unless `is_valid`. `cond` writes its result to memory. So no later operation is fused
    into this rounding and changes its bits, and an optimizer is compiled once for all leaves of a
    shape.
    """

    def to_floats(total: grid.Total) -> PyTree:
        widest = pytree.common_dtype(*jax.tree.leaves(like))
        floats = grid.to_float(grid.carry(total), noise.spacing, widest)
        return pytree.from_vector(floats, like)

    def to_nan(_: grid.Total) -> PyTree:
        return jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), like)

    return jax.lax.cond(is_valid, to_floats, to_nan, total)


class _SumSpec(NamedTuple):
    """The settings of a sum, none of which depends on a row.

    Attributes:
      value_fn: see `per_example_sum`.
      bound: see `per_example_sum`.
      like: the shapes and dtypes of a summand.
      size: rows of a microbatch.
      most_rows: number of rows whose integers add up without overflow in 32 bits, the same for any
        rows; None if floats are summed.
    """

    value_fn: Callable[[Params, PyTree], PyTree]
    bound: Bound | None
    like: PyTree
    size: int
    most_rows: int | Int32[Array, ""] | None


def _sum_on_devices(
    spec: _SumSpec,
    params: Params,
    batch: PyTree,
    mask: Bool[Array, " rows"],
    noise: GaussianNoise | None,
    mesh: jax.sharding.Mesh | None,
) -> tuple[PyTree, Array]:
    """Shares out the rows to devices, each of which adds its share of the noise to its sum."""
    num_devices = mesh.size if mesh else 1

    def sum_on_device(
        params: Params, batch: PyTree, mask: Array, noise: GaussianNoise | None
    ) -> tuple[PyTree, Array]:
        batch, mask = jax.tree.map(lambda x: x[0], (batch, mask))
        total, norms = _sum_microbatches(spec, params, batch, mask, noise)
        # The noise is added before `psum`, so no device holds the total without noise.
        if noise is not None:
            device = jax.lax.axis_index(mesh.axis_names[0]) if mesh else 0
            total = grid.add_share(noise, total, device, num_devices)
        if mesh:
            total = jax.tree.map(lambda x: jax.lax.psum(x, mesh.axis_names[0]), total)
        return total, norms[None, : mask.shape[0]]

    def share_out(x: Array) -> Array:
        # [rows, …] -> [devices, rows of each, …]. Devices take rows in turn, because real rows
        # stand first and are then shared evenly.
        return jnp.swapaxes(x.reshape(x.shape[0] // num_devices, num_devices, *x.shape[1:]), 0, 1)

    sum_on_each: Callable[..., tuple[PyTree, Array]] = sum_on_device
    if mesh:
        split, same = jax.sharding.PartitionSpec(*mesh.axis_names), jax.sharding.PartitionSpec()
        sum_on_each = jax.shard_map(
            sum_on_device,
            mesh=mesh,
            in_specs=(same, split, split, same),
            out_specs=(same, split),
            check_vma=False,
        )
    shares = jax.tree.map(share_out, pad_rows((batch, mask), -mask.shape[0] % num_devices))
    try:
        total, norms = sum_on_each(params, *shares, noise)
    except ValueError as error:  # a row alone could be traced above, but not one device's rows
        if mesh is None:
            raise
        reason = str(error).partition("\n")[0]
        raise InputError(f"{ONE_DEVICE} ({reason})") from error
    return total, norms.swapaxes(0, 1).reshape(-1)[: mask.shape[0]]


def _sum_microbatches(
    spec: _SumSpec,
    params: Params,
    batch: PyTree,
    mask: Bool[Array, " rows"],
    noise: GaussianNoise | None,
) -> tuple[PyTree, Array]:
    """Sums microbatches up to the last real row, and returns each row's norm.

    Padding has a norm, too, which is 0. With noise the sum is a `Total` of integers, `[entries]`.
    Its low part is carried over to its high part after at most `most_rows` rows, before it could
    overflow.
    """
    num_rows, size = mask.shape[0], spec.size
    batch, mask = pad_rows((batch, mask), -num_rows % size if num_rows else size)
    # The loop ends after the last microbatch with a real row. That number is traced, so one program
    # serves every realised batch size.
    is_used = jnp.any(mask.reshape(-1, size), axis=1)
    num_microbatches = jnp.max(jnp.where(is_used, jnp.arange(1, len(is_used) + 1), 0))

    def add_microbatch(i: Array | int, carry: PyTree) -> PyTree:
        total, norms = carry
        examples, is_real = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, i * size, size), (batch, mask)
        )
        total, new = _add_microbatch(spec, params, examples, is_real, total, noise)
        return total, jax.lax.dynamic_update_slice_in_dim(norms, new, i * size, axis=0)

    norms = jnp.zeros(mask.shape, jnp.result_type(float))
    loop = jax.named_scope("microbatches")(jax.lax.fori_loop)
    if spec.most_rows is None:
        total = optax.tree.zeros_like(spec.like)
        return loop(0, num_microbatches, add_microbatch, (total, norms))

    # The sum of `per_carry` microbatches fits 32 bits; then it is carried over.
    per_carry = jnp.maximum(1, jax.lax.div(jnp.asarray(spec.most_rows, jnp.int32), np.int32(size)))
    per_carry = per_carry.astype(num_microbatches.dtype)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.int32), spec.like)

    def add_and_carry(part: Array | int, carry: PyTree) -> PyTree:
        total, norms = carry
        begin = part * per_carry
        end = jnp.minimum(begin + per_carry, num_microbatches)
        some, norms = loop(begin, end, add_microbatch, (zeros, norms))
        return grid.carry(total._replace(low=total.low + pytree.as_vector(some))), norms

    zero = jnp.zeros(pytree.num_params(zeros), jnp.int32)
    num_parts = jax.lax.div(num_microbatches + per_carry - 1, per_carry)
    carries = jax.named_scope("carries")(jax.lax.fori_loop)
    return carries(0, num_parts, add_and_carry, (grid.Total(zero, zero), norms))


def _add_microbatch(
    spec: _SumSpec,
    params: Params,
    examples: PyTree,
    mask: Bool[Array, " microbatch"],
    total: PyTree,
    noise: GaussianNoise | None,
) -> tuple[PyTree, Array]:
    """Returns the total with a microbatch's summands added to it, and their norms.

    Gradients are put in memory before they are bounded. If the bound is not proved, the bounded
    ones are put in memory, too, before they are measured and added.
    """
    bound, size, spacing = spec.bound, spec.size, None if noise is None else noise.spacing
    by_row = functools.partial(pytree.map_rows, num_rows=size)
    # 0 or 1, which no compiler can know: no valid key is all zeros (a zero key gives NaN).
    num_iterations = jnp.any(mask) & (True if noise is None else jnp.any(noise.key != 0))
    from_memory = functools.partial(
        pytree.read_from_memory, num_iterations=num_iterations.astype(jnp.int32)
    )

    def summands(values: PyTree) -> tuple[PyTree, Array]:
        return by_row(functools.partial(_summand, bound, spacing))(params, values)

    def add(summands: tuple[PyTree, Array], carry: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
        terms, norms = summands
        # Masked rows add zero whatever they hold, NaN included.
        real = jax.tree.map(
            lambda x: jnp.where(mask.reshape(size, *(1,) * (x.ndim - 1)), x, 0), terms
        )
        sums = jax.tree.map(lambda x: jnp.sum(x, axis=0, dtype=x.dtype), real)
        new = jnp.where(mask, norms, 0).astype(carry[1].dtype)
        return jax.tree.map(jnp.add, carry[0], sums), new

    values = by_row(spec.value_fn)(params, examples)
    carry = total, jnp.zeros(size, jnp.result_type(float))
    if bound is None:
        return add(summands(values), carry)
    unbounded = scalars.is_known(bound.sensitivity) and math.isinf(bound.sensitivity)
    if bound.is_proved or unbounded:
        return from_memory(lambda values, carry: add(summands(values), carry), values, carry)
    # The measured numbers are the added ones, because both are read from memory.
    measure = by_row(functools.partial(_measure, bound, spacing))
    zeros = optax.tree.zeros_like(jax.eval_shape(summands, values))
    terms = from_memory(lambda values, _: summands(values), values, zeros)
    return from_memory(lambda terms, carry: add(measure(params, *terms), carry), terms, carry)


def _summand(
    bound: Bound | None, spacing: Any, params: Params, value: PyTree
) -> tuple[PyTree, Float[Array, ""]]:
    """Returns one example's bounded gradient (floats, or multiples of a spacing) and its norm."""
    terms, norm = value if bound is None else bound.bounded_grad(params, value)
    terms = jax.tree.map(pytree.at_least_float32, terms)
    if spacing is not None and bound is not None:
        # An entry beyond 2 S, or NaN, becomes 2 S: that fits an integer, and `_measure` drops the
        # example.
        beyond = 2 * bound.sensitivity
        if not bound.is_proved:
            terms = jax.tree.map(lambda x: jnp.where(jnp.abs(x) <= beyond, x, beyond), terms)
        terms = jax.tree.map(lambda x: grid.cut(x, spacing), terms)
    return terms, norm


def _measure(
    bound: Bound, spacing: Any, _: Params, terms: PyTree, norm: Float[Array, ""]
) -> tuple[PyTree, Float[Array, ""]]:
    """Returns the summand, and the gradient's norm before clipping.

    A summand that breaks the bound becomes zeros. The norm is not finite if the example is dropped.
    """
    # In multiples of the spacing, so that the measured integers are the added ones.
    within = is_within(terms, bound.sensitivity / (1 if spacing is None else spacing))
    bounded = jax.tree.map(lambda x: jnp.where(within, x, 0), terms)
    return bounded, jnp.where(within | ~jnp.isfinite(norm), norm, jnp.nan)


def pad_rows(tree_of_rows: PyTree, num_rows: int) -> PyTree:
    """Appends `num_rows` zero rows (False in a mask) to every leaf."""
    if num_rows == 0:
        return tree_of_rows
    return jax.tree.map(
        lambda x: jnp.concatenate([x, jnp.zeros((num_rows, *x.shape[1:]), x.dtype)]), tree_of_rows
    )


def _check_batch(
    batch: PyTree, mask: Array | None, microbatch_size: int, mesh: jax.sharding.Mesh | None
) -> tuple[int, int, Array]:
    """Returns the number of rows, rows per microbatch, and the mask as an array."""
    if microbatch_size < 1 or microbatch_size != int(microbatch_size):
        raise InputError(f"microbatch_size must be an integer from 1, got {microbatch_size}")
    if mesh and mesh.axis_types != (jax.sharding.AxisType.Auto,):
        raise InputError(
            "mesh must have one axis with AxisType.Auto, got axes "
            f"{dict(zip(mesh.axis_names, mesh.axis_types, strict=True))}: make it by "
            "bam.training.devices.mesh"
        )
    shapes = [x.shape for x in jax.tree.leaves((batch, mask))]
    sizes = {shape[0] if shape else -1 for shape in shapes}
    if len(sizes) != 1 or -1 in sizes:
        raise InputError(
            f"every array of batch, and mask, needs the same number of rows; got shapes {shapes}"
        )
    batch_size: int = sizes.pop()
    rows_of_each = -(-batch_size // (mesh.size if mesh else 1))
    if mask is not None and (jnp.ndim(mask) != 1 or jnp.result_type(mask) != jnp.bool_):
        raise InputError(
            f"mask must be bools with shape [rows], got {jnp.result_type(mask)}{jnp.shape(mask)}"
        )
    mask = jnp.ones(batch_size, bool) if mask is None else jnp.asarray(mask)
    return batch_size, max(1, min(int(microbatch_size), rows_of_each)), mask
