"""What JAX traces now, and what it compiles: once for each set of shapes, and never a key.

Whoever calls a function of this library outside of `jax.jit` runs programs that are compiled at
the first call and kept. Whoever traces one gets its operations, as part of a program of his own;
that must be given the key of its noise, or it adds the same noise whenever it runs.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NoReturn

import jax
from jaxtyping import PyTree

MOST_PROGRAMS = 64


def being_traced() -> bool:
    """Whether JAX traces a function now, or maps or differentiates one."""
    from jax._src import core  # nothing public tells a `vmap` from an ordinary call

    return not core.trace_state_clean()


def compiled_once(fn: Callable[..., Any], /, **static: Any) -> Callable[..., Any]:
    """`fn` with these keyword arguments, compiled once for each set of shapes of the others.

    As with `jax.jit`, functions among the arguments must be pure, and the same function must be the
    same object in each call. The last 64 programs are kept: one that is made anew in each call is
    compiled in each, but the process does not grow. While JAX traces, nothing is compiled apart.
    """
    if being_traced():
        return functools.partial(fn, **static)
    try:
        return _program(fn, **static)
    except TypeError:  # one of them has no hash
        return jax.jit(functools.partial(fn, **static))


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _program(fn: Callable[..., Any], /, **static: Hashable) -> Callable[..., Any]:
    return jax.jit(functools.partial(fn, **static))


def check_is_argument(key: PyTree, others: PyTree = None) -> None:
    """Refuses a key, with its step, that would be the same in all runs of what is traced.

    ValueError if JAX traces and the key is a constant, or if what is summed (`others`) is mapped by
    `vmap` and the key is not: noise that is added twice is the difference of two sums.
    """
    if not being_traced():
        return
    key, *_ = leaves = jax.tree.leaves(key)
    if not isinstance(key, jax.core.Tracer):
        _refuse("is a constant of the program, which JAX may also write to disk: pass the key, or")
    if _are_mapped(others) and not _are_mapped(leaves):
        _refuse("is one for all that vmap maps over: map over keys, too, or over")


def _are_mapped(tree: PyTree) -> bool:
    from jax._src.interpreters.batching import BatchTracer

    return any(isinstance(leaf, BatchTracer) for leaf in jax.tree.leaves(tree))


def _refuse(why: str) -> NoReturn:
    raise ValueError(
        f"the same noise would be added more than once: its key {why} the state that holds it, as "
        "an argument of the traced function"
    )
