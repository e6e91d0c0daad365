"""Programs that are compiled once for all values of their numbers.

A program depends on structure and on numbers. *Structure* (a loss, the branches, the shapes) is
compiled. *Numbers* (a clip norm, a radius, a learning rate) are arguments of the program, so other
values compile nothing. The *parts* of a program are pytrees whose leaves are their numbers. A part
of your own is a frozen dataclass with `jax.tree_util.register_dataclass`, or a function with
`jax.tree_util.Partial`.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast, dataclass_transform

import jax
import numpy as np
import optax
from jax.tree_util import Partial
from jaxtyping import PyTree

from bam.errors import InputError

MOST_PROGRAMS = 32

Cls = TypeVar("Cls", bound=type)

# The metadata of a field that is structure, and is compared by `==`; the other fields are numbers.
# The mark is that of `jax.tree_util.register_dataclass`.
STATIC = {"static": True}


def compile_once(
    fn: Callable[..., Any], /, *parts: PyTree, donate: tuple[int, ...] = (), **structure: Hashable
) -> Callable[..., Any]:
    """Returns `fn(*parts, …, **structure)`, compiled once for its structure and the shapes.

    As with `jax.jit`, a function must be pure, and must be the same object in each call. The last
    32 programs are kept, so a function that is made anew in each call compiles each time, but the
    process does not grow (`jax.jit` alone would keep thousands). While JAX traces a program, the
    call becomes part of it. The result may reuse the memory of the arguments `donate`, which are
    counted after the parts.
    """
    numbers, tree = jax.tree.flatten(parts)
    return functools.partial(_program(fn, tree, donate, **structure), numbers)


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _program(
    fn: Callable[..., Any],
    tree: jax.tree_util.PyTreeDef,
    donate: tuple[int, ...],
    /,
    **structure: Hashable,
) -> Callable[..., Any]:
    @functools.wraps(fn)
    def program(numbers: list[Any], *args: Any) -> Any:
        return fn(*jax.tree.unflatten(tree, numbers), *args, **structure)

    return jax.jit(program, inline=True, donate_argnums=tuple(1 + i for i in donate))


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def record(cls: Cls) -> Cls:
    """Makes a class a frozen dataclass, and a pytree of its fields except those marked `STATIC`.

    A copy skips the constructor, unlike one of `jax.tree_util.register_dataclass`: JAX also fills
    the fields with shapes and axes, which `__post_init__` would refuse.
    """
    known: Any = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(known)
    structure = [x.name for x in fields if x.metadata.get("static")]
    numbers = [x.name for x in fields if x.name not in structure]

    def flatten(part: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        compiled = tuple(by_identity(getattr(part, x)) for x in structure)
        return tuple(getattr(part, x) for x in numbers), compiled

    def unflatten(compiled: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
        part: Any = object.__new__(known)
        vars(part).update(zip((*structure, *numbers), (*compiled, *arguments), strict=True))
        return part

    jax.tree_util.register_pytree_node(known, flatten, unflatten)
    return cast(Cls, known)


def is_part(value: object) -> bool:
    """Returns whether a value is an object of a dataclass that JAX knows as a pytree.

    InputError if a leaf is no number, such as a function in a field that is not marked as static.
    """
    if not dataclasses.is_dataclass(value) or jax.tree_util.all_leaves([value]):
        return False
    for leaf in jax.tree.leaves(value):
        if not isinstance(leaf, int | float | jax.Array | np.ndarray | np.generic):
            raise InputError(
                f"{type(value).__name__} has a {type(leaf).__name__} among its numbers: mark its "
                'field by dataclasses.field(metadata={"static": True})'
            )
    return True


def as_partial(fn: Callable[..., Any]) -> Partial:
    """Returns a function as a pytree.

    Its leaves are the floats of a `Partial`, or the numbers of the part that it is a method of.
    """
    if isinstance(fn, types.MethodType) and is_part(fn.__self__):
        return Partial(fn.__func__, fn.__self__)
    # Any other argument, such as a text or a count, may decide what is compiled.
    if isinstance(fn, Partial) and all(map(_is_float, jax.tree.leaves(fn))):
        return Partial(by_identity(fn.func), *fn.args, **fn.keywords)
    return Partial(by_identity(fn))


def _is_float(leaf: object) -> bool:
    return isinstance(leaf, float | jax.Array | np.ndarray)


def as_transform(transform: Any) -> Any:
    """Returns an optax transform as a pytree: a part as it is, a pair as its two functions."""
    if is_part(transform):
        return transform
    return optax.GradientTransformation(as_partial(transform.init), as_partial(transform.update))


def by_identity(value: Any) -> Any:
    """Returns what a program compares: of a function that says it equals others, its method."""
    is_own = callable(value) and type(value).__eq__ is not object.__eq__
    is_of_python = (
        isinstance(value, types.MethodType | type) or type(value).__module__ == Partial.__module__
    )
    # Python compares methods by the identity of their object.
    return value.__call__ if is_own and not is_of_python else value
