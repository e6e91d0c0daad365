"""Functions that JAX compiles once for all values of the numbers in them.

What a program depends on is of two kinds. *Structure* (a loss, which branches there are, shapes) is
compiled; *numbers* (a clip norm, a radius, a learning rate) are arguments of what is compiled, so
that another value compiles nothing. A `Closure` is a function with both, told apart; it is a pytree
whose leaves are the numbers.
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
      fn: a function of a module: two closures of it share a program.
      structure: what is compiled: see `Same` for which of them are equal.
      numbers: pytrees of floats, or of what JAX traces.

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
        """What the function returns."""
        return self.fn(*self.structure, *self.numbers, *args, **options)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple["Same", ...]]:
        """The numbers, and what two closures of one program have in common."""
        return self.numbers, (Same(self.fn), *map(Same, self.structure))

    @classmethod
    def tree_unflatten(cls, same: tuple["Same", ...], numbers: tuple[Any, ...]) -> "Closure":
        """The same function of other numbers."""
        fn, *structure = (x.value for x in same)
        return cls(fn, tuple(structure), tuple(numbers))


def register(numbers: tuple[str, ...], structure: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """A decorator that makes a frozen dataclass a pytree, of which these fields are the leaves.

    What JAX puts in their places, such as a shape, is not checked again.
    """

    def as_pytree(cls: Any) -> Any:
        def flatten(record: Any) -> tuple[tuple[Any, ...], tuple[Same, ...]]:
            values = lambda names: (getattr(record, name) for name in names)  # noqa: E731
            return tuple(values(numbers)), tuple(map(Same, values(structure)))

        def unflatten(same: tuple[Same, ...], values: tuple[Any, ...]) -> Any:
            record = object.__new__(cls)
            names = (*numbers, *structure)
            for name, value in zip(names, (*values, *(x.value for x in same)), strict=True):
                object.__setattr__(record, name, value)
            return record

        jax.tree_util.register_pytree_node(cls, flatten, unflatten)
        return cls

    return as_pytree


def as_closure(fn: Callable[..., Any]) -> Closure:
    """A function as a closure: a user's has no numbers, just structure, which is itself."""
    return fn if isinstance(fn, Closure) else Closure(fn)


class Same(Hashable):
    """A value with what makes it another one: an object is equal to itself alone.

    Numbers, NumPy's too, texts, meshes, and tuples, lists and dicts of these are compared as such,
    and a method by its object and its function.
    """

    __slots__ = ("identity", "value")

    def __init__(self, value: Any) -> None:
        """Keeps the value alive, whose identity is compared."""
        self.value = value.item() if isinstance(value, np.generic) else value
        if type(value) in (list, dict):
            self.value = jax.tree.map(lambda x: x, value)  # others can write to theirs
        self.identity = _identity(self.value)

    def __eq__(self, other: object) -> bool:
        """Whether a program that was compiled of the one serves the other."""
        return isinstance(other, Same) and self.identity == other.identity

    def __hash__(self) -> int:
        """The hash of what is compared."""
        return hash(self.identity)


def _identity(value: Any) -> Hashable:
    if isinstance(value, bool | int | float | str | jax.sharding.Mesh | None):
        return type(value), value
    if isinstance(value, types.MethodType):
        return "method", id(value.__self__), id(value.__func__)
    if isinstance(value, Closure):
        return "closure", *map(Same, (value.fn, value.structure, value.numbers))
    if type(value) in (tuple, list) or type(value).__bases__ == (tuple,):  # a plain NamedTuple
        return type(value), *map(Same, value)
    if type(value) is dict:
        return "dict", tuple((key, Same(x)) for key, x in value.items())
    return "object", id(value)
