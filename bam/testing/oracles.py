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
from bam.testing.common import MIXED, close, compiled, norm64, require, row, shapes

# Examples whose gradients are evaluated without a compiler, too, where Python's code runs at every
# call and can draw random numbers. The third such gradient is the one that is zero.
NUM_EAGER = 2


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
    * `ascend` keeps structure, shapes and dtypes, also before the first step, where the previous
      private gradient is zeros, as in training.

    `is_dp_sgd` makes the oracle with the parameter value where it must be DP-SGD to the bit, such
    as a radius of zero.
    """
    params, batch = _network()
    rows = [row(batch, i) for i in range(4)]
    oracle = make_oracle(_loss)
    ascend = compiled(oracle.ascend, "its ascend does not run compiled, in jax.jit")
    for previous in (jax.tree.map(jnp.zeros_like, params), params):
        moved = ascend(params, previous)
        require(shapes(moved) == shapes(params), "ascend does not return something like the params")
        require(math.isfinite(norm64(moved)), "ascend returns values that are not finite")
    eager = [oracle.grad(params, example) for example in rows[:NUM_EAGER]]
    one = compiled(oracle.grad, "its gradient does not run compiled, in jax.jit")
    alone = [one(params, example) for example in rows]
    for example, grads, as_compiled in zip(rows, eager, alone, strict=False):
        require(
            pytree.same_structure(grads, params),
            "its gradient has another structure than the parameters",
        )
        require(shapes(grads) == shapes(params), "its gradient has other shapes or dtypes")
        require(math.isfinite(norm64(grads)), "its gradient is not finite")
        require(close(as_compiled, grads), "compiled it gives something else")
        require(
            close(oracle.grad(params, example), grads, 0.0),
            "called twice it gives two gradients: it keeps something, or draws random numbers "
            'from elsewhere than example["key"]',
        )
    together = compiled(
        jax.vmap(oracle.grad, (None, 0)),
        "its gradient does not run for a batch of examples, in jax.vmap",
    )
    batched = together(params, batch)
    for i, grads in enumerate(alone):
        require(math.isfinite(norm64(grads)), "its gradient is not finite")
        require(close(row(batched, i), grads), MIXED)
    at_minimum = make_oracle(_loss_at_minimum).grad(params, rows[0])
    require(
        math.isfinite(norm64(at_minimum)), "where the gradient is zero it is not finite any more"
    )
    if is_dp_sgd is not None:
        plain, same = oracles.dp_sgd(_loss), is_dp_sgd(_loss)
        for example in rows[:NUM_EAGER]:
            grads = same.grad(same.ascend(params, params), example)
            require(
                close(grads, plain.grad(params, example), 0.0),
                "where it must be DP-SGD it is another gradient",
            )


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
    logits = hidden @ params["out"]["kernel"] + params["out"]["bias"][None]
    label = jnp.broadcast_to(example["label"], logits.shape[:-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, label))


def _loss_at_minimum(params: Params, example: dict[str, Array]) -> Array:
    """Smallest at `_network`'s parameters, where its gradient is zero."""
    del example
    squares = jax.tree.map(lambda x, x0: jnp.sum((x - x0) ** 2), params, _network()[0])
    return 0.5 * optax.tree.sum(squares)
