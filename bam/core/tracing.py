"""Checks, while JAX traces a program, that it uses no noise key more than once.

A program must receive the noise key as an argument: with a constant key it would add the same noise
every time it runs.
"""

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import custom_batching
from jaxtyping import Array, PyTree

from bam.errors import InputError


def is_tracing() -> bool:
    """Returns whether JAX is tracing, mapping or differentiating a function at the moment."""
    from jax._src import core  # nothing public tells a `vmap` from an ordinary call

    return not core.trace_state_clean()


def check_keys(key: PyTree, step: PyTree = 0) -> None:
    """Raises an InputError for a noise key that a program would use more than once.

    Three cases are refused: a key that is a constant of the traced program, a key that `vmap` does
    not map over, and equal keys with equal steps that `vmap` maps over, if their values are
    visible. A key that a program computes from constants looks like a key that it was given, so it
    is not noticed.
    """
    key, *_ = jax.tree.leaves(key)
    if not is_tracing():
        return
    if not isinstance(key, jax.core.Tracer):
        _refuse(
            "the noise key is a constant of the traced function, or vmap does not map over it: "
            "pass the key, or the state that holds it, as an argument and map over it. A wrapper "
            "such as optax.apply_if_finite goes around the optimizer after the noise alone"
        )
    # Under `vmap` alone the values are there; `jit` and `grad` hide them.
    keys, steps = _mapped_values(key), _mapped_values(step)
    if keys is None or steps is None or steps.shape not in ((), keys.shape[:-1]):
        return  # if they are equal, `with_noise_of_its_own` gives NaN when the program runs
    keys, steps = keys.reshape(-1, keys.shape[-1]), steps.reshape(-1, 1)
    draws = np.hstack([keys, np.broadcast_to(steps, (len(keys), 1))])
    if len(np.unique(draws, axis=0)) < len(draws):
        _refuse(
            "vmap maps over several equal keys: map over different keys, or over the states that "
            "hold them"
        )


def check_one_program(what: str) -> None:
    """Raises an InputError if each of several devices would run the whole of `what`."""
    if axes := jax.sharding.get_abstract_mesh().manual_axes:
        raise InputError(
            f"the same noise would be added more than once: shard_map or pmap over {axes} runs "
            f"{what} on every device; give it mesh=, which shares out the rows of one sum"
        )


@custom_batching.custom_vmap
def with_noise_of_its_own(total: PyTree, key: Array, step: Array) -> PyTree:
    """Returns a noised sum whose key and step no other sum of one program may have.

    Such sums come from one vmap, shard_map or pmap. If two sums share one noise draw, subtracting
    them removes it. `vmap` over the sum but not over its key or step does just that, so it raises
    an InputError. Equal keys that `vmap` maps over, or that devices have under `shard_map` or
    `pmap`, are only seen when the program runs: then the sums are NaN.
    """
    if axes := jax.sharding.get_abstract_mesh().manual_axes:
        key, step = jax.lax.all_gather((key, jnp.asarray(step)), axes)
        return _nan_if_shared(total, key, step)
    return total


@with_noise_of_its_own.def_vmap
def _map_noise(
    size: int, is_mapped: PyTree, total: PyTree, key: Array, step: Array
) -> tuple[PyTree, PyTree]:
    total_is_mapped, key_is_mapped, step_is_mapped = is_mapped
    if not (key_is_mapped or step_is_mapped):
        _refuse(
            "vmap does not map over the key: map over keys, too, or over the states that hold them"
        )
    key = key if key_is_mapped else jnp.broadcast_to(key, (size, *key.shape))
    step = step if step_is_mapped else jnp.broadcast_to(step, (size, *jnp.shape(step)))
    total = _nan_if_shared(total, key, step)
    # Called again, so that a further `vmap` around this one is checked, too.
    return with_noise_of_its_own(total, key, step), total_is_mapped


@custom_batching.custom_vmap
def refuse_vmap(tree: PyTree) -> PyTree:
    """Returns the tree.

    InputError if `vmap` maps over anything that it depends on.
    """
    return tree


@refuse_vmap.def_vmap
def _refuse_map(size: int, is_mapped: PyTree, tree: PyTree) -> NoReturn:
    raise InputError(
        "the same noise would be added more than once: vmap cannot map over a PrivateTraining, or "
        "over what its gradient depends on; make a PrivateTraining for each"
    )


@jax.custom_jvp
def refuse_derivative(x: Array) -> Array:
    """Returns `x`.

    InputError if a derivative is taken of anything that it is computed from.
    """
    return x


@refuse_derivative.defjvp
def _refuse_derivative(primals: tuple[Array], tangents: tuple[Array]) -> NoReturn:
    raise InputError(
        "a noised sum is of integers and has no derivative: put jax.lax.stop_gradient around its "
        "arguments"
    )


def _nan_if_shared(total: PyTree, key: Array, step: Array) -> PyTree:
    """Returns the noised sums, or NaN if two of them have the same key and step.

    Such sums have the same noise.
    """
    steps = jnp.reshape(step, (-1, 1)).astype(jnp.uint32)
    draws = jnp.concatenate([jnp.reshape(key, (-1, key.shape[-1])), steps], axis=1)
    draws = draws[jnp.lexsort(draws.T)]  # sorted, equal rows are neighbours
    is_shared = jnp.any(jnp.all(draws[1:] == draws[:-1], axis=1))
    return jax.tree.map(lambda x: jnp.where(is_shared, jnp.nan, x), total)


def _mapped_values(x: Any) -> np.ndarray | None:
    """Returns the values that `vmap` maps over, outermost axis first.

    None if another transform traces them.
    """
    from jax._src.interpreters.batching import BatchTracer

    axes = []
    while isinstance(x, BatchTracer):
        axes.append(x.batch_dim)
        x = x.val
    if isinstance(x, jax.core.Tracer):
        return None
    values = np.asarray(x)
    for target, axis in enumerate(axis for axis in reversed(axes) if axis is not None):
        values = np.moveaxis(values, axis + target, target)
    return values


def _refuse(why: str) -> NoReturn:
    raise InputError(f"the same noise would be added more than once: {why}")
