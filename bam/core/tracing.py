"""What JAX traces now, and what it compiles: once for each set of shapes, and never a key.

Whoever calls a function of this library outside of `jax.jit` runs programs that are compiled at
the first call and kept. Whoever traces one gets its operations, as part of a program of his own;
that must be given the key of its noise, or it adds the same noise whenever it runs.
"""

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any, NoReturn

import jax
from jax import custom_batching
from jaxtyping import Array, PyTree

MOST_PROGRAMS = 16


def being_traced() -> bool:
    """Whether JAX traces a function now, or maps or differentiates one."""
    from jax._src import core  # nothing public tells a `vmap` from an ordinary call

    return not core.trace_state_clean()


def compiled_once(fn: Callable[..., Any], /, **static: Any) -> Callable[..., Any]:
    """`fn` with these keyword arguments, compiled once for each set of shapes of the others.

    As with `jax.jit`, functions among the arguments must be pure, and the same function must be the
    same object in each call. The last 16 programs are kept: one that is made anew in each call is
    compiled in each, but the process does not grow. While JAX traces a program, this is part of it.
    """
    return _program(fn, **{name: _Same(value) for name, value in static.items()})


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _program(fn: Callable[..., Any], /, **static: "_Same") -> Callable[..., Any]:
    values = {name: same.value for name, same in static.items()}
    return jax.jit(functools.partial(fn, **values), inline=True)


class _Same(Hashable):
    """A value that is equal to itself alone: two clips of equal functions may have other bounds.

    Numbers and meshes are compared as such, and a method by its object and its function.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.identity: Hashable = ("object", id(value))
        if isinstance(value, int | float | jax.sharding.Mesh):
            self.identity = value
        elif isinstance(value, types.MethodType):
            self.identity = ("method", id(value.__self__), id(value.__func__))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)


def check_is_argument(key: PyTree) -> None:
    """Refuses, with a ValueError, a key that is a constant of the program that JAX traces now.

    What the program computes from constants cannot be told from its arguments.
    """
    key, *_ = jax.tree.leaves(key)
    if being_traced() and not isinstance(key, jax.core.Tracer):
        _refuse("is a constant of the program, which JAX may also write to disk: pass the key, or")


@custom_batching.custom_vmap
def own_key(key: Array, step: Array, summed: PyTree) -> Array:
    """The key of the noise of one sum; ValueError where `vmap` maps the sum, but not its key.

    Noise that is added twice is the difference of two sums. A `vmap` of a compiled function is seen
    too; a loop that adds up several sums with one key is not.
    """
    return key


@own_key.def_vmap
def _map_own_key(
    size: int, is_mapped: PyTree, key: Array, step: Array, summed: PyTree
) -> tuple[Array, bool]:
    key_is_mapped, step_is_mapped, summed_is_mapped = is_mapped
    if any(jax.tree.leaves(summed_is_mapped)) and not (key_is_mapped or step_is_mapped):
        _refuse("is one for all that vmap maps over: map over keys, too, or over")
    if step_is_mapped and not key_is_mapped:
        key = jax.numpy.broadcast_to(key, (size, *key.shape))
    return key, key_is_mapped or step_is_mapped


def _refuse(why: str) -> NoReturn:
    raise ValueError(
        f"the same noise would be added more than once: its key {why} the state that holds it, as "
        "an argument of the traced function"
    )
