"""A conformance kit for your own transforms and oracles: call it from pytest.

`check_transform` and `check_oracle` raise an `AssertionError` that says what is wrong. What they
cannot show is that a mistake is absent: they try gradients and examples that broke real code.

>>> import bam
>>> check_transform(bam.clip_by_l2_norm(1.0))
>>> check_oracle(lambda loss_fn: bam.bam_sam(loss_fn, 0.1))
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from bam import oracles, tree
from bam.engine import ROUNDING, clipped_sum
from bam.transforms import finish
from bam.tree import Grads, Params

MAGNITUDES = (0.0, 1e-40, 1e-25, 1e-6, 0.1, 1.0, 30.0, 1e15, 1e19, 1e30, 3e38)
SPECIAL = (math.nan, math.inf, -math.inf)
# What a noised mean may be, everywhere and in every step, before a state must stop to move with it.
EXTREME_MEANS = (0.0, 1.0, -1.0, 1e3, -1e3, 1e30, -1e30)
NUM_LATER_STEPS = 40
MIXED = "in a vmap over a batch it gives something else than one by one: examples mix"


def check_transform(
    transform: optax.GradientTransformation,
    params: Params | None = None,
    *,
    keeps_structure: bool = True,
) -> None:
    """Checks that a per-example transform keeps what the guarantee asks of it.

    * it declares a finite `sensitivity`, and no gradient gets past it: huge, tiny, denormal, NaN or
      infinite, in all leaves or one; of parameters in 1, 2, 3 or 20 leaves, float32 and bfloat16;
      and in later steps, whatever means its `finish` has seen;
    * structure, shapes and dtypes of the gradient are kept, and what is finite stays finite;
    * its output depends on the one gradient it is given: called again it is the same, its state
      does not remember an example, and `vmap` over a batch is a loop over its rows;
    * compiled and not compiled are the same;
    * masked rows count for nothing in `clipped_sum`, and one row more or less moves the sum by at
      most the sensitivity.

    Give your parameters if the transform is for one structure alone; by default several are tried.
    Give `keeps_structure=False` for a transform with a `finish` that adds more than the gradient to
    the sum; then what `finish` returns must have the gradient's structure.
    """
    others = () if params is not None else tuple(_shapes_to_try())
    if params is None:
        params = {"w": jnp.ones((2, 3)), "b": jnp.zeros(())}
    _require(
        getattr(transform, "sensitivity", None) is not None,
        "it declares no sensitivity: return a bam.BoundedTransformation, not an optax one",
    )
    sensitivity: float = transform.sensitivity
    _require(
        math.isfinite(sensitivity) and sensitivity >= 0,
        f"its sensitivity {sensitivity} is not a finite bound",
    )
    state = transform.init(params)
    jitted = jax.jit(lambda grads, state: transform.update(grads, state, params)[0])
    tried = list(_gradients(params))
    outputs = []
    for name, grads in tried:
        bounded, _ = transform.update(grads, state, params)
        outputs.append(bounded)
        if keeps_structure:
            _require(
                tree.same_structure(bounded, grads),
                "its output has another structure than the gradient; if it adds something to the "
                "sum for its finish, check it with keeps_structure=False",
            )
            _require(
                _shapes(bounded) == _shapes(grads),
                f"shapes or dtypes change from {_shapes(grads)} to {_shapes(bounded)}",
            )
        _check_norm(bounded, sensitivity, name)
        _require(
            _close(jitted(grads, state), bounded), f"compiled it gives something else for {name}"
        )
    for (name, grads), before in zip(tried, outputs, strict=True):
        again, _ = transform.update(grads, state, params)
        _require(
            _close(again, before, 0.0),
            f"called twice with {name} it gives two results: it remembers what it has seen",
        )
    _check_rows(transform, params, state, [grads for _, grads in tried], outputs, sensitivity)
    for description, other in others:
        _check_bound(transform, other, transform.init(other), sensitivity, f" ({description})")
    if getattr(transform, "finish", None) is not None:
        for mean in EXTREME_MEANS:
            later = _later_state(transform, state, outputs[0], mean)
            when = f" after {NUM_LATER_STEPS} steps with means of {mean:g}"
            _check_bound(transform, params, later, sensitivity, when)
    if not keeps_structure:
        private_grad, next_state = finish(transform, outputs[0], state)
        _require(
            _shapes(private_grad) == _shapes(params),
            "what its finish returns is not like the parameters",
        )
        _require(
            tree.same_structure(next_state, state),
            "its finish returns a state of another structure",
        )


def _check_bound(
    transform: optax.GradientTransformation,
    params: Params,
    state: PyTree,
    sensitivity: float,
    when: str,
) -> None:
    """The bound, for one kind of parameters and one state; all gradients in one call."""
    names, rows = zip(*_gradients(params), strict=True)
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
    bounded = jax.vmap(lambda grads: transform.update(grads, state, params)[0])(batch)
    for i, name in enumerate(names):
        _check_norm(_row(bounded, i), sensitivity, name, when)


def _check_norm(bounded: PyTree, sensitivity: float, name: str, when: str = "") -> None:
    norm = _norm64(bounded)
    _require(math.isfinite(norm), f"its output for {name} is not finite{when}")
    _require(
        norm <= sensitivity * ROUNDING + 1e-30,
        f"its output for {name} has norm {norm:.6g}, above its sensitivity {sensitivity:.6g}{when}",
    )


def _row(batch: PyTree, i: int) -> PyTree:
    return jax.tree.map(lambda x: x[i], batch)


def _later_state(
    transform: optax.GradientTransformation, state: PyTree, like: PyTree, value: float
) -> PyTree:
    """The state after many steps whose noised means had this value everywhere."""
    mean = jax.tree.map(lambda x: jnp.full(x.shape, value, jnp.float32), like)
    for _ in range(NUM_LATER_STEPS):
        state = finish(transform, mean, state)[1]
    return state


def _shapes_to_try() -> Iterator[tuple[str, Params]]:
    yield "one leaf", {"w": jnp.ones(4)}
    yield "three leaves", {str(i): jnp.ones((2, i + 1)) for i in range(3)}
    yield "twenty leaves", {str(i): jnp.ones(2) for i in range(20)}
    yield "three leaves of bfloat16", {str(i): jnp.ones(5, jnp.bfloat16) for i in range(3)}


def _check_rows(
    transform: optax.GradientTransformation,
    params: Params,
    state: PyTree,
    rows: list[Grads],
    outputs: list[PyTree],
    sensitivity: float,
) -> None:
    """The facts about batches: vmap is a loop, masked rows are inert, one row moves little."""
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
    batched = jax.vmap(lambda grads: transform.update(grads, state, params)[0])(batch)
    for i, alone in enumerate(outputs):
        _require(_close(_row(batched, i), alone), MIXED)

    @jax.jit
    def total(mask: jax.Array) -> PyTree:
        grad_fn = lambda params, grads: grads  # noqa: E731
        return clipped_sum(grad_fn, transform, params, batch, mask=mask, microbatch_size=3)[0]

    none = np.zeros(len(rows), bool)
    _require(_norm64(total(none)) == 0, "rows that are masked out count for something")
    for i in range(len(rows)):
        only = none.copy()
        only[i] = True
        moved = _norm64(jax.tree.map(jnp.subtract, total(~none), total(~only)))
        # Sums of many rows round more than one row does.
        _require(
            moved <= sensitivity * (1 + 1e-4) + 1e-30,
            f"one example moves the sum by {moved:.6g}, more than its sensitivity {sensitivity}",
        )


def check_oracle(
    make_oracle: Callable[[oracles.LossFn], oracles.Oracle],
    *,
    is_dp_sgd: Callable[[oracles.LossFn], oracles.Oracle] | None = None,
) -> None:
    """Checks that an oracle's gradient is one example's own, and usable in training.

    * structure, shapes and dtypes are those of the parameters, and values finite, also where the
      gradient is zero;
    * compiled and not compiled are the same, and `vmap` over a batch is a loop over its rows: an
      example's gradient depends on that example alone;
    * called again it is the same: randomness comes from `example["key"]` alone;
    * `ascend` keeps structure, shapes and dtypes, also before the first step.

    `is_dp_sgd` makes the oracle with the parameter value where it must be DP-SGD to the bit, such
    as a radius of zero.
    """
    params, batch = _network()
    rows = [_row(batch, i) for i in range(4)]
    oracle = make_oracle(_loss)
    for previous in (None, jax.tree.map(jnp.zeros_like, params), params):
        moved = oracle.ascend(params, previous)
        _require(
            _shapes(moved) == _shapes(params), "ascend does not return something like the params"
        )
        _require(math.isfinite(_norm64(moved)), "ascend returns values that are not finite")
    jitted = jax.jit(oracle.grad)
    alone = [oracle.grad(params, row) for row in rows]
    for row, grads in zip(rows, alone, strict=True):
        _require(
            tree.same_structure(grads, params),
            "its gradient has another structure than the parameters",
        )
        _require(_shapes(grads) == _shapes(params), "its gradient has other shapes or dtypes")
        _require(math.isfinite(_norm64(grads)), "its gradient is not finite")
        _require(_close(jitted(params, row), grads), "compiled it gives something else")
        _require(
            _close(oracle.grad(params, row), grads, 0.0),
            "called twice it gives two gradients: it keeps something, or draws random numbers "
            'from elsewhere than example["key"]',
        )
    batched = jax.vmap(oracle.grad, (None, 0))(params, batch)
    for i, grads in enumerate(alone):
        _require(_close(_row(batched, i), grads), MIXED)
    at_minimum = make_oracle(_loss_at_minimum).grad(params, rows[0])
    _require(
        math.isfinite(_norm64(at_minimum)), "where the gradient is zero it is not finite any more"
    )
    if is_dp_sgd is not None:
        plain, same = oracles.dp_sgd(_loss), is_dp_sgd(_loss)
        for row in rows:
            grads = same.grad(same.ascend(params, params), row)
            _require(
                _close(grads, plain.grad(params, row), 0.0),
                "where it must be DP-SGD it is another gradient",
            )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _gradients(params: Params) -> Iterator[tuple[str, Grads]]:
    """Named gradients like `params`: of every size, in all leaves or in one, and not finite."""
    rng = np.random.default_rng(0)
    leaves: list[Array] = jax.tree.leaves(params)
    structure: Any = jax.tree.structure(params)
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
                tried[hot] = jnp.full_like(tried[hot], value)
                yield f"a gradient with {value} in leaf {hot}", structure.unflatten(tried)


def _as(dtype: np.dtype, values: np.ndarray | np.float64) -> Array:
    limit = float(jnp.finfo(dtype).max)
    return jnp.asarray(np.asarray(np.clip(values, -limit, limit)).astype(dtype))


def _network() -> tuple[Params, dict[str, Array]]:
    """Parameters and four examples of a small classifier, as the trainer's examples look."""
    rng = np.random.default_rng(1)
    params = {
        "hidden": jnp.asarray(rng.normal(size=(6, 4)), jnp.float32),
        "out": {"kernel": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32), "bias": jnp.zeros(3)},
    }
    images = rng.normal(size=(4, 2, 6))  # two views each
    batch = {
        "image": jnp.asarray(images, jnp.float32),
        "label": jnp.arange(4, dtype=jnp.int32) % 3,
        "key": jax.random.split(jax.random.key(0), 4),
        "step": jnp.zeros(4, jnp.int32),
    }
    return params, batch


def _loss(params: Params, example: dict[str, Array]) -> Array:
    hidden = jnp.tanh(example["image"] @ params["hidden"])
    logits = hidden @ params["out"]["kernel"] + params["out"]["bias"]
    label = jnp.broadcast_to(example["label"], logits.shape[:-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, label))


def _loss_at_minimum(params: Params, example: dict[str, Array]) -> Array:
    """Smallest at `_network`'s parameters, where its gradient is zero."""
    del example
    squares = jax.tree.map(lambda x, x0: jnp.sum((x - x0) ** 2), params, _network()[0])
    return 0.5 * optax.tree.sum(squares)


def _shapes(of: PyTree) -> list[tuple[tuple[int, ...], np.dtype]]:
    return [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(of)]


def _norm64(of: PyTree) -> float:
    """Length in float64, which no float32 gradient overflows."""
    leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(of)]
    return float(np.linalg.norm(np.concatenate(leaves))) if leaves else 0.0


def _close(a: PyTree, b: PyTree, rtol: float = 1e-4) -> bool:
    """Equal up to float32 rounding of each tree's largest entries; to the bit for `rtol` 0."""
    if not tree.same_structure(a, b) or _shapes(a) != _shapes(b):
        return False
    difference = jax.tree.map(
        lambda x, y: np.asarray(x, np.float64) - np.asarray(y, np.float64), a, b
    )
    return _norm64(difference) <= rtol * _norm64(b) + (1e-12 if rtol else 0.0)
