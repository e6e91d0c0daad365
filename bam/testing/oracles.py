"""The check of an oracle."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from bam.core import oracles, pytree
from bam.core.pytree import Params
from bam.testing.common import MIXED, close, jit_or_fail, norm64, require, row, shapes

# Examples whose gradients are also evaluated without jit, where Python code runs at every call and
# may draw random numbers. A third one, in `check_oracle`, is the gradient at a minimum.
NUM_EAGER = 2


def check_oracle(
    make_oracle: Callable[[oracles.LossFn], oracles.Method],
    *,
    is_dp_sgd: Callable[[oracles.LossFn], oracles.Method] | None = None,
) -> None:
    """Checks that an oracle's gradient depends on one example alone and can be trained with.

    * The gradient has the parameters' structure, shapes and dtypes, and finite values, also where
      the loss's gradient is zero.
    * It is the same with and without jit, and under `vmap` the same as for each example alone, so
      it depends on no other example.
    * A second call gives the same bits, so randomness comes from `example["key"]` alone.
    * `ascend` keeps shapes and dtypes, also before the first step, where the previous private
      gradient is zeros, as in training.

    Args:
      make_oracle: loss function -> the oracle to check.
      is_dp_sgd: loss function -> the oracle with the option, such as a radius of zero, at which it
        must equal DP-SGD to the bit.

    Raises:
      AssertionError: names the first fault.
    """
    params, batch = _network()
    rows = [row(batch, i) for i in range(4)]
    oracle = make_oracle(_loss)
    ascend = jit_or_fail(oracle.ascend, "its ascend does not run compiled, in jax.jit")
    for previous in (jax.tree.map(jnp.zeros_like, params), params):
        moved = ascend(params, previous)
        require(
            shapes(moved) == shapes(params),
            "ascend returns other shapes or dtypes than the parameters",
        )
        require(math.isfinite(norm64(moved)), "ascend returns values that are not finite")
    eager = [oracle.grad(params, example) for example in rows[:NUM_EAGER]]
    one = jit_or_fail(oracle.grad, "its gradient does not run compiled, in jax.jit")
    alone = [one(params, example) for example in rows]
    for example, grads, as_compiled in zip(rows, eager, alone, strict=False):
        require(
            pytree.same_structure(grads, params),
            "its gradient has another structure than the parameters",
        )
        require(shapes(grads) == shapes(params), "its gradient has other shapes or dtypes")
        require(math.isfinite(norm64(grads)), "its gradient is not finite")
        require(close(as_compiled, grads), "its gradient differs between jax.jit and without it")
        require(
            close(oracle.grad(params, example), grads, 0.0),
            "called twice it returns two gradients: it has a state, or draws random numbers that "
            'do not come from example["key"]',
        )
    together = jit_or_fail(
        jax.vmap(oracle.grad, (None, 0)),
        "its gradient does not run for a batch of examples, in jax.vmap",
    )
    batched = together(params, batch)
    for i, grads in enumerate(alone):
        require(math.isfinite(norm64(grads)), "its gradient is not finite")
        require(close(row(batched, i), grads), MIXED)
    at_minimum = make_oracle(_loss_at_minimum).grad(params, rows[0])
    require(
        math.isfinite(norm64(at_minimum)),
        "its gradient is not finite where the gradient is zero: guard the division by its norm",
    )
    if is_dp_sgd is not None:
        dp_sgd, oracle = oracles.dp_sgd(_loss), is_dp_sgd(_loss)
        for example in rows[:NUM_EAGER]:
            grads = oracle.grad(oracle.ascend(params, params), example)
            require(
                close(grads, dp_sgd.grad(params, example), 0.0),
                "the oracle that must be DP-SGD returns another gradient",
            )


def _network() -> tuple[Params, dict[str, Array]]:
    """Parameters of a small classifier, and four examples with the keys of the trainer's."""
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
    logits = hidden @ params["out"]["kernel"] + params["out"]["bias"][None]
    label = jnp.broadcast_to(example["label"], logits.shape[:-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, label))


def _loss_at_minimum(params: Params, example: dict[str, Array]) -> Array:
    """A loss with its minimum at `_network`'s parameters, where its gradient is zero."""
    del example
    squares = jax.tree.map(lambda x, x0: jnp.sum((x - x0) ** 2), params, _network()[0])
    return 0.5 * optax.tree.sum(squares)
