"""The check of a per-example transform."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from bam.core import pytree
from bam.core.clipping import ROUNDING, Clip, Transform, finish
from bam.core.engine import clipped_sum
from bam.core.pytree import Grads, Params
from bam.testing.common import MIXED, close, jit_or_fail, norm64, require, row, shapes

MAGNITUDES = (0.0, 1e-40, 1e-25, 1e-6, 0.1, 1.0, 30.0, 1e15, 1e19, 1e30, 3e38)
SPECIAL = (math.nan, math.inf, -math.inf)
# Noised means, with one value in every entry and step, which drive a state to its extremes.
EXTREME_MEANS = (0.0, 1.0, -1.0, 1e3, -1e3, 1e30, -1e30)
NUM_LATER_STEPS = 40
# Gradients that are also evaluated without jit, where Python code sees numbers and may keep them:
# one with norm zero, to divide by; one that a clip leaves as it is; one that it shortens.
EAGER = ("a gradient of size 0", "a gradient of size 0.1", "a gradient of size 30")


def check_transform(
    transform: Transform,
    params: Params | None = None,
    *,
    keeps_structure: bool = True,
) -> None:
    """Checks that a per-example transform meets the assumptions of the guarantee.

    * It declares a finite `sensitivity`, and its output never exceeds it: for gradients that are
      huge, tiny, denormal, NaN or infinite, in all leaves or one; for parameters in 1, 2, 3 or 20
      leaves, in float32 and bfloat16; and in later steps, whatever means `finish` got.
    * Its output is always finite, with the gradient's structure, shapes and dtypes.
    * Its output depends on one gradient alone: a second call returns the same bits, and `vmap` over
      a batch the same as each row alone.
    * Its output is the same with and without jit.
    * Masked rows add zero in `clipped_sum`, and one row changes the sum by at most the sensitivity.

    Each gradient is evaluated in jit, alone and in one `vmap`; three also without jit, twice each.

    Args:
      transform: the transform to check.
      params: your parameters, if it is made for one structure; None tries several structures.
      keeps_structure: False for a transform whose `finish` takes additional entries out of the sum.
        Then the result of `finish` must have the structure of the parameters.

    Raises:
      AssertionError: names the first fault.
    """
    more_params = () if params is not None else tuple(_shapes_to_try())
    if params is None:
        params = {"w": jnp.ones((2, 3)), "b": jnp.zeros(())}
    require(
        getattr(transform, "sensitivity", None) is not None,
        "it declares no sensitivity: return a bam.BoundedTransformation, not an optax one",
    )
    sensitivity = float(cast(Clip, transform).sensitivity)
    require(
        math.isfinite(sensitivity) and sensitivity >= 0,
        f"its sensitivity {sensitivity} is not a finite bound",
    )
    state = transform.init(params)
    names, rows = zip(*_gradients(params), strict=True)
    eager = _check_eager(transform, params, state, sensitivity, keeps_structure)

    def update(grads: Grads, state: PyTree) -> PyTree:
        return transform.update(grads, state, params)[0]

    one = jit_or_fail(update, "its update does not run compiled, in jax.jit")
    alone = [one(grads, state) for grads in rows]
    _check_norms(names, alone, sensitivity)
    for name, bounded in zip(names, alone, strict=True):
        require(
            name not in eager or close(bounded, eager[name]),
            f"its output for {name} differs between jax.jit and without it",
        )
    batch, batched = _stack(rows), _vmap_rows(update, len(rows))
    together = batched(batch, state)
    _check_norms(names, together, sensitivity)
    for in_batch, bounded in zip(together, alone, strict=True):
        require(close(in_batch, bounded), MIXED)
    _check_sums(transform, params, batch, len(rows), sensitivity)
    for description, each in more_params:
        _check_bound(transform, each, sensitivity, f" ({description})")
    if getattr(transform, "finish", None) is not None:
        step = jit_or_fail(
            lambda mean, state: finish(transform, mean, state)[1],
            "its finish does not run compiled, in jax.jit",
        )
        for value in EXTREME_MEANS:
            mean = jax.tree.map(lambda x, v=value: np.full(x.shape, v, np.float32), alone[0])
            later = state
            for _ in range(NUM_LATER_STEPS):
                later = step(mean, later)
            when = f" after {NUM_LATER_STEPS} steps with means of {value:g}"
            _check_norms(names, batched(batch, later), sensitivity, when)
    if not keeps_structure:
        private_grad, next_state = finish(transform, alone[0], state)
        require(
            shapes(private_grad) == shapes(params),
            "its finish returns other shapes or dtypes than the parameters",
        )
        require(
            pytree.same_structure(next_state, state),
            "its finish returns a state of another structure",
        )


def _check_eager(
    transform: Transform,
    params: Params,
    state: PyTree,
    sensitivity: float,
    keeps_structure: bool,
) -> dict[str, PyTree]:
    """Checks structure, bound and a second call without jit.

    It returns name -> output for the gradients that `EAGER` names.
    """
    gradients = dict(_gradients(params))
    tried = {name: jax.tree.map(jnp.asarray, gradients[name]) for name in EAGER}
    outputs = {}
    for name, grads in tried.items():
        bounded = outputs[name] = transform.update(grads, state, params)[0]
        if keeps_structure:
            require(
                pytree.same_structure(bounded, grads),
                "its output has another structure than the gradient; if its finish needs more "
                "entries in the sum, check it with keeps_structure=False",
            )
            require(
                shapes(bounded) == shapes(grads),
                f"shapes or dtypes change from {shapes(grads)} to {shapes(bounded)}",
            )
        _check_norm(bounded, sensitivity, name)
    for name, grads in tried.items():
        require(
            close(transform.update(grads, state, params)[0], outputs[name], 0.0),
            f"called twice with {name} it returns two results: it remembers earlier gradients",
        )
    return outputs


def _stack(rows: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def _vmap_rows(
    update: Callable[[Grads, PyTree], PyTree], num_rows: int
) -> Callable[[PyTree, PyTree], list[PyTree]]:
    """A function of a batch and a state that returns the output for each row, by one program."""
    program = jit_or_fail(
        jax.vmap(update, (0, None)), "its update does not run for a batch of rows, in jax.vmap"
    )

    def outputs(batch: PyTree, state: PyTree) -> list[PyTree]:
        bounded = jax.device_get(program(batch, state))
        return [row(bounded, i) for i in range(num_rows)]

    return outputs


def _check_bound(transform: Transform, params: Params, sensitivity: float, when: str) -> None:
    """Checks the bound for further parameters, with all gradients in one program."""
    names, rows = zip(*_gradients(params), strict=True)
    batched = _vmap_rows(lambda grads, state: transform.update(grads, state, params)[0], len(rows))
    bounded = batched(_stack(rows), transform.init(params))
    _check_norms(names, bounded, sensitivity, when)


def _check_norms(
    names: Sequence[str], outputs: Sequence[PyTree], sensitivity: float, when: str = ""
) -> None:
    for name, bounded in zip(names, outputs, strict=True):
        _check_norm(bounded, sensitivity, name, when)


def _check_norm(bounded: PyTree, sensitivity: float, name: str, when: str = "") -> None:
    norm = norm64(bounded)
    require(math.isfinite(norm), f"its output for {name} is not finite{when}")
    # The noise is scaled to the bound times ROUNDING, so this much above it is safe.
    require(
        norm <= sensitivity * ROUNDING + 1e-30,
        f"its output for {name} has norm {norm:.6g}, above its sensitivity {sensitivity:.6g}{when}",
    )


def _shapes_to_try() -> Iterator[tuple[str, Params]]:
    yield "one leaf", {"w": jnp.ones(4)}
    yield "three leaves", {str(i): jnp.ones((2, i + 1)) for i in range(3)}
    yield "twenty leaves", {str(i): jnp.ones(2) for i in range(20)}
    yield "three leaves of bfloat16", {str(i): jnp.ones(5, jnp.bfloat16) for i in range(3)}


def _check_sums(
    transform: Transform,
    params: Params,
    batch: PyTree,
    num_rows: int,
    sensitivity: float,
) -> None:
    """Checks that masked rows add zero to a sum, and that one row changes it within the bound."""

    @jax.jit
    def total(mask: jax.Array) -> PyTree:
        grad_fn = lambda params, grads: grads  # noqa: E731
        return clipped_sum(grad_fn, transform, params, batch, mask=mask, microbatch_size=3)[0]

    none = np.zeros(num_rows, bool)
    require(norm64(total(none)) == 0, "masked rows change the sum")
    total_of_all = total(~none)
    for i in range(num_rows):
        only = none.copy()
        only[i] = True
        moved = norm64(jax.tree.map(np.subtract, total_of_all, total(~only)))
        # 1e-4 above the bound, because a sum of many rows rounds more than one row.
        require(
            moved <= sensitivity * (1 + 1e-4) + 1e-30,
            f"one example moves the sum by {moved:.6g}, more than its sensitivity {sensitivity}",
        )


def _gradients(params: Params) -> Iterator[tuple[str, PyTree]]:
    """(name, gradient) like `params`: of every size, in all leaves or in one, and not finite."""
    rng = np.random.default_rng(0)
    leaves: list[Array] = jax.tree.leaves(params)
    structure: jax.tree_util.PyTreeDef = jax.tree.structure(params)
    directions = [np.asarray(rng.normal(size=x.shape), np.float64) for x in leaves]
    with np.errstate(over="ignore"):
        for size in MAGNITUDES:
            scaled = [_as(x.dtype, size * d) for d, x in zip(directions, leaves, strict=True)]
            yield f"a gradient of size {size:g}", structure.unflatten(scaled)
        for size in (1e-6, 1.0, 1e6):
            for hot in range(len(leaves)):
                tried = [
                    _as(x.dtype, (size if i == hot else 0.0) * np.ones(x.shape))
                    for i, x in enumerate(leaves)
                ]
                yield f"a gradient of size {size:g} in leaf {hot} alone", structure.unflatten(tried)
        for value in SPECIAL:
            for hot in range(len(leaves)):
                tried = [_as(x.dtype, d) for d, x in zip(directions, leaves, strict=True)]
                tried[hot] = np.full_like(tried[hot], value)
                yield f"a gradient with {value} in leaf {hot}", structure.unflatten(tried)


def _as(dtype: np.dtype, values: np.ndarray | np.float64) -> np.ndarray:
    limit = float(jnp.finfo(dtype).max)
    return np.asarray(np.clip(values, -limit, limit)).astype(dtype)
