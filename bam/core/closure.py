"""Functions that JAX compiles once for all values of their numbers.

A program depends on structure and on numbers. *Structure* (a loss, the branches, the shapes) is
compiled. *Numbers* (a clip norm, a radius, a learning rate) are arguments of the program, so other
values compile nothing. A `Closure` is a function that keeps the two apart; it is a pytree whose
leaves are the numbers.
"""

import dataclasses
import types
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Closure:
    """`fn(*structure, *numbers, *args)` as a function of `args`.

    Attributes:
      fn: a function defined at module level, so that two closures of it share a program.
      structure: values that are compiled into the program; `StaticValue` says which of them are
        equal.
      numbers: pytrees of floats or of tracers.

    Examples:
      >>> import jax
      >>> double, treble = (Closure(lambda factor, x: factor * x, (), (k,)) for k in (2.0, 3.0))
      >>> double(5.0), jax.tree.leaves(treble)
      (10.0, [3.0])
    """

    fn: Callable[..., Any]
    structure: tuple[Any, ...] = ()
    numbers: tuple[Any, ...] = ()

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Calls the function."""
        return self.fn(*self.structure, *self.numbers, *args, **options)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple["StaticValue", ...]]:
        """The numbers, and the rest, which is equal for two closures of one program."""
        return self.numbers, (StaticValue(self.fn), *map(StaticValue, self.structure))

    @classmethod
    def tree_unflatten(cls, same: tuple["StaticValue", ...], numbers: tuple[Any, ...]) -> "Closure":
        """The same function with other numbers."""
        fn, *structure = (x.value for x in same)
        return cls(fn, tuple(structure), tuple(numbers))


def register(numbers: tuple[str, ...], structure: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """A decorator that makes a frozen dataclass a pytree whose leaves are the fields `numbers`.

    JAX may put other objects in place of a leaf, such as a shape; they are not checked.
    """

    def as_pytree(cls: Any) -> Any:
        def flatten(record: Any) -> tuple[tuple[Any, ...], tuple[StaticValue, ...]]:
            values = lambda names: (getattr(record, name) for name in names)  # noqa: E731
            return tuple(values(numbers)), tuple(map(StaticValue, values(structure)))

        def unflatten(same: tuple[StaticValue, ...], values: tuple[Any, ...]) -> Any:
            # Without `__post_init__`, whose checks would read a tracer's value.
            record = object.__new__(cls)
            names = (*numbers, *structure)
            for name, value in zip(names, (*values, *(x.value for x in same)), strict=True):
                object.__setattr__(record, name, value)
            return record

        jax.tree_util.register_pytree_node(cls, flatten, unflatten)
        return cls

    return as_pytree


def as_closure(fn: Callable[..., Any]) -> Closure:
    """The function as a closure; a user's function is all structure and has no numbers."""
    return fn if isinstance(fn, Closure) else Closure(fn)


class StaticValue(Hashable):
    """A value, compared as a compiled program needs it: an object only equals itself.

    Numbers (NumPy's too), texts, meshes, and tuples, lists and dicts of these are compared by
    value, and a method by its object and its function.
    """

    __slots__ = ("identity", "value")

    def __init__(self, value: Any) -> None:
        """Keeps the value alive, because its identity is compared."""
        self.value = value.item() if isinstance(value, np.generic) else value
        if type(value) in (list, dict):  # a copy, because the caller can change the original
            self.value = jax.tree.map(lambda x: x, value)
        self.identity = _identity(self.value)

    def __eq__(self, other: object) -> bool:
        """Whether a program that was compiled for one value serves the other."""
        return isinstance(other, StaticValue) and self.identity == other.identity

    def __hash__(self) -> int:
        """The hash of the compared identity."""
        return hash(self.identity)


def _identity(value: Any) -> Hashable:
    if isinstance(value, bool | int | float | str | jax.sharding.Mesh | None):
        return type(value), value
    if isinstance(value, types.MethodType):
        return "method", id(value.__self__), id(value.__func__)
    if isinstance(value, Closure):
        return "closure", *map(StaticValue, (value.fn, value.structure, value.numbers))
    if type(value) in (tuple, list) or type(value).__bases__ == (tuple,):  # a plain NamedTuple
        return type(value), *map(StaticValue, value)
    if type(value) is dict:
        return "dict", tuple((key, StaticValue(x)) for key, x in value.items())
    # `StaticValue` keeps the object alive, so its id belongs to no other.
    return "object", id(value)
