"""Numbers of a caller, read when they are given: what changes later changes nothing.

A NumPy array of no axes, or a float of somebody's own class, can be another number tomorrow. A
bound that was read from it once, and is read again in each step, would then be two bounds. So what
a public function keeps are numbers of Python's own, which nobody can change.
"""

import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from bam.errors import InputError

# A float, or what JAX traces of one: an argument of a program.
Number: TypeAlias = float | Float[Array, ""]

LARGEST = float(np.finfo(np.float32).max)
KINDS = ((np.bool_, bool), (np.integer, int), (np.floating, float))


def number(name: str, value: Any) -> int | float:
    """`value` as an int or a float of Python's own, as it is one or the other.

    It may be Python's, NumPy's or JAX's, or an array of no axes. An InputError, in one line that
    begins with `name`, refuses all else: bools, text, complex numbers, longer arrays, and what JAX
    traces.

    Examples:
      >>> import numpy as np
      >>> number("radius", np.array(0.5)), number("bands", np.int64(3))
      (0.5, 3)
    """
    read = _read(name, value)
    if isinstance(read, bool) or not isinstance(read, int | float):
        raise _wrong(name, float, value)
    return read


def real(name: str, value: Any) -> float:
    """The same as a float."""
    read = number(name, value)
    try:
        return float(read)
    except OverflowError:
        raise InputError(f"{name} is an integer beyond what floats hold") from None


def argument(name: str, value: Any) -> Number:
    """`real`, if 32-bit floats hold it; or what JAX traces of a float, whose value nobody can see.

    What is made of one that is out of range is NaN: see `bam.core.engine`.
    """
    if not isinstance(value, jax.core.Tracer):
        read = real(name, value)
        if LARGEST < abs(read) < math.inf:
            raise InputError(f"{name} must be a number that 32-bit floats hold, got {read}")
        return read
    if value.shape or not jnp.issubdtype(value.dtype, jnp.floating):
        raise InputError(f"{name} must be one float, got {value.dtype}{list(value.shape)}")
    is_narrow = jnp.finfo(value.dtype).bits < 32
    return value.astype(jnp.float32) if is_narrow else value


def is_known(*values: Any) -> bool:
    """Whether these are numbers of Python's, and not what JAX traces."""
    return not any(isinstance(value, jax.core.Tracer) for value in values)


def whole(name: str, value: Any) -> int:
    """The same of what is an integer; a float is refused, too."""
    read = _read(name, value)
    if isinstance(read, bool) or not isinstance(read, int):
        raise _wrong(name, int, value)
    return read


def count(name: str, value: Any) -> int:
    """The same of what is an integer, or a float that is equal to one."""
    read = number(name, value)
    if not (math.isfinite(read) and read == int(read)):
        raise InputError(f"{name} must be an integer, got {read}")
    return int(read)


def flag(name: str, value: Any) -> bool:
    """The same of True and False alone."""
    read = _read(name, value)
    if not isinstance(read, bool):
        raise _wrong(name, bool, value)
    return read


def option(name: str, value: Any) -> bool | int | float | str | None:
    """The same of whatever one value of a config may be."""
    if isinstance(value, str):
        return "".join(value)  # of Python's own class
    read = _read(name, value)
    if not (read is None or isinstance(read, bool | int | float)):
        raise InputError(f"{name} must be a number, a text or None, got {value!r}")
    return read


def unchanging(value: Any) -> Any:
    """A copy of an array of NumPy's that cannot be written to; anything else as it is."""
    if isinstance(value, np.ndarray):
        value = value.copy()
        value.flags.writeable = False
    return value


def _read(name: str, value: Any) -> Any:
    """A number or a bool as Python's own; what is neither as it is."""
    if isinstance(value, jax.core.Tracer):
        raise InputError(
            f"{name} must be a number, not traced: privacy and compiled programs rest on its value"
        )
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        if value.shape:
            raise InputError(f"{name} must be one number, got an array of shape {value.shape}")
        for dtype, kind in KINDS:
            if jnp.issubdtype(value.dtype, dtype):
                return kind(np.asarray(value))
        return value
    for _, kind in KINDS:
        if isinstance(value, kind):
            return kind(value)
    return value


def _wrong(name: str, kind: type, value: Any) -> InputError:
    return InputError(f"{name} must be of type {kind.__name__}, got {value!r}")
