"""What JAX traces now, and what it compiles: once for each set of shapes, and never a key.

Whoever calls a function of this library outside of `jax.jit` runs programs that are compiled at
the first call and kept. Whoever traces one gets its operations, as part of a program of his own;
that must be given the key of its noise, or it adds the same noise whenever it runs.
"""

import contextvars
import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import custom_batching
from jaxtyping import Array, Bool, PyTree

from bam.core.closure import Same
from bam.errors import InputError

MOST_PROGRAMS = 32

Traced = TypeVar("Traced", bound=Callable[..., PyTree])

# True while a loss is traced at weights that differ between examples, as BAM's shifted ones do.
# Under `vmap` a convolution then has a kernel for each example, which a layer may compute in
# another way.
own_weights = contextvars.ContextVar("weights of each example's own", default=False)


def being_traced() -> bool:
    """Whether JAX traces a function now, or maps or differentiates one."""
    from jax._src import core  # nothing public tells a `vmap` from an ordinary call

    return not core.trace_state_clean()


def at_own_weights(fn: Traced) -> Traced:
    """The same function, traced with `own_weights` set."""

    @functools.wraps(fn)
    def traced(*args: Any) -> PyTree:
        token = own_weights.set(True)
        try:
            return fn(*args)
        finally:
            own_weights.reset(token)

    return cast(Traced, traced)


def compiled_once(
    fn: Callable[..., Any], /, *parts: PyTree, donate: tuple[int, ...] = (), **structure: Any
) -> Callable[..., Any]:
    """`fn(*parts, …, **structure)`, compiled once for the structure, and shapes of the others.

    Parts are pytrees of numbers, such as `Closure`s: other numbers compile nothing. As with
    `jax.jit`, functions must be pure, and the same function must be the same object in each call.
    The last 32 programs are kept: one that is made anew in each call is compiled in each, but the
    process does not grow. While JAX traces a program, this is part of it. `donate` are those
    arguments, counted after the parts, whose memory the result may take.
    """
    numbers, tree = jax.tree.flatten(parts)
    named = {name: Same(value) for name, value in structure.items()}
    return functools.partial(_program(fn, tree, donate, **named), numbers)


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _program(
    fn: Callable[..., Any],
    parts: jax.tree_util.PyTreeDef,
    donate: tuple[int, ...],
    /,
    **structure: Same,
) -> Callable[..., Any]:
    values = {name: same.value for name, same in structure.items()}

    @functools.wraps(fn)
    def program(numbers: list[Any], *args: Any) -> Any:
        return fn(*jax.tree.unflatten(parts, numbers), *args, **values)

    return jax.jit(program, inline=True, donate_argnums=tuple(1 + i for i in donate))


def check_keys(key: PyTree, step: PyTree = 0) -> None:
    """Refuses, with an InputError, a noise key that a program would use more than once.

    That is a constant of the program that JAX traces now, and one of equal keys that `vmap` maps
    over, with equal steps, where their values can be seen. A program that computes its key from
    constants cannot be told from one that is given it.
    """
    key, *_ = jax.tree.leaves(key)
    if not being_traced():
        return
    if not isinstance(key, jax.core.Tracer):
        _refuse(
            "is a constant of what JAX traces, or one for all that it maps over: pass the key, or"
        )
    keys, steps = _mapped_values(key), _mapped_values(step)
    if keys is None or steps is None or steps.shape not in ((), keys.shape[:-1]):
        return  # where they are equal, `with_noise_of_its_own` gives NaN when the program runs
    keys, steps = keys.reshape(-1, keys.shape[-1]), steps.reshape(-1, 1)
    draws = np.hstack([keys, np.broadcast_to(steps, (len(keys), 1))])
    if len(np.unique(draws, axis=0)) < len(draws):
        _refuse("is the same for several of what vmap maps over: map over different keys, or over")


def check_one_program(what: str) -> None:
    """Refuses, with an InputError, to be traced for each of several devices by itself."""
    if axes := jax.sharding.get_abstract_mesh().manual_axes:
        raise InputError(
            f"the same noise would be added more than once: shard_map or pmap over {axes} runs "
            f"{what} on every device; give it mesh=, which shares out the rows of one sum"
        )


@custom_batching.custom_vmap
def with_noise_of_its_own(total: PyTree, key: Array, step: Array) -> PyTree:
    """A noised sum, checked to be the only one with this key and step.

    If two sums share one noise draw, subtracting them removes it. `vmap` over anything that the sum
    depends on, arguments or not, but neither over key nor step, does just that: InputError. Where
    it maps over equal keys, or devices under `shard_map` or `pmap` have equal ones, the sums are
    NaN: their values are known only when the program runs.
    """
    if axes := jax.sharding.get_abstract_mesh().manual_axes:
        key, step = jax.lax.all_gather((key, jnp.asarray(step)), axes)
        return _nan_where(_has_equal_rows(_draws(key, step)), total)
    return total


@with_noise_of_its_own.def_vmap
def _map_noise(
    size: int, is_mapped: PyTree, total: PyTree, key: Array, step: Array
) -> tuple[PyTree, PyTree]:
    total_is_mapped, key_is_mapped, step_is_mapped = is_mapped
    if not (key_is_mapped or step_is_mapped):
        _refuse("is one for all that vmap maps over: map over keys, too, or over")
    key = key if key_is_mapped else jnp.broadcast_to(key, (size, *key.shape))
    step = step if step_is_mapped else jnp.broadcast_to(step, (size, *jnp.shape(step)))
    total = _nan_where(_has_equal_rows(_draws(key, step)), total)
    return with_noise_of_its_own(total, key, step), total_is_mapped  # for a vmap around this one


@custom_batching.custom_vmap
def never_mapped(tree: PyTree) -> PyTree:
    """The same tree; InputError where `vmap` maps over anything that it depends on."""
    return tree


@never_mapped.def_vmap
def _refuse_map(size: int, is_mapped: PyTree, tree: PyTree) -> NoReturn:
    raise InputError(
        "the same noise would be added more than once: vmap cannot map over a PrivateTraining, or "
        "over what its gradient depends on; make a PrivateTraining for each"
    )


def _draws(key: Array, step: Array) -> Array:
    """What tells draws of noise apart, a row for each: the key's words and the step."""
    key = jnp.reshape(key, (-1, key.shape[-1]))
    return jnp.concatenate([key, jnp.reshape(step, (-1, 1)).astype(jnp.uint32)], axis=1)


def _has_equal_rows(rows: Array) -> Bool[Array, ""]:
    rows = rows[jnp.lexsort(rows.T)]
    return jnp.any(jnp.all(rows[1:] == rows[:-1], axis=1))


def _nan_where(repeated: Array, total: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.where(repeated, jnp.nan, x), total)


def _mapped_values(x: Any) -> np.ndarray | None:
    """Values that `vmap` maps over, outermost axis first; None where another transform traces."""
    from jax._src.interpreters.batching import BatchTracer

    axes = []
    while isinstance(x, BatchTracer):
        axes.append(x.batch_dim)
        x = x.val
    if isinstance(x, jax.core.Tracer):
        return None
    values = np.asarray(x)
    for place, axis in enumerate(axis for axis in reversed(axes) if axis is not None):
        values = np.moveaxis(values, axis + place, place)
    return values


def _refuse(why: str) -> NoReturn:
    raise InputError(
        f"the same noise would be added more than once: its key {why} the state that holds it, as "
        "an argument of the traced function"
    )
