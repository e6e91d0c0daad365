"""A caller's numbers, read once when they are given, so that later changes have no effect.

A NumPy array without axes, or a float of a user's own class, can change its value later. A bound
that is read from it once, and again in each step, would then be two bounds. So public functions
keep plain Python numbers, which nobody can change.
"""

import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from bam.errors import InputError

# A float, or the tracer of one: an argument of a program.
Number: TypeAlias = float | Float[Array, ""]

LARGEST = float(np.finfo(np.float32).max)
KINDS = ((np.bool_, bool), (np.integer, int), (np.floating, float))


def number(name: str, value: Any) -> int | float:
    """Returns `value` as a plain Python int or float, whichever it is.

    It may come from Python, NumPy or JAX, or be an array without axes. Anything else (bools, text,
    complex numbers, longer arrays, tracers) is an InputError, in one line that begins with `name`.

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
    """Returns `value` as a float; otherwise as `number`."""
    read = number(name, value)
    try:
        return float(read)
    except OverflowError:
        raise InputError(f"{name} is too large for a float") from None


def argument(name: str, value: Any) -> Number:
    """Returns `value` as a float that float32 does not overflow, or the tracer of a float.

    Infinity and NaN pass. A tracer is in at least float32. InputError for anything else. A tracer's
    value cannot be checked here. If it is out of range, the results are NaN: see `bam.core.engine`.
    """
    if not isinstance(value, jax.core.Tracer):
        read = real(name, value)
        if LARGEST < abs(read) < math.inf:
            raise InputError(f"{name} must be a number that 32-bit floats hold, got {read}")
        return read
    if value.shape or not jnp.issubdtype(value.dtype, jnp.floating):
        raise InputError(f"{name} must be one float, got {value.dtype}{list(value.shape)}")
    is_narrow = jnp.finfo(value.dtype).bits < 32  # the proofs of bounds count float32 roundings
    return value.astype(jnp.float32) if is_narrow else value


def is_known(*values: Any) -> bool:
    """Whether none of the values is a tracer."""
    return not any(isinstance(value, jax.core.Tracer) for value in values)


def whole(name: str, value: Any) -> int:
    """Returns an integer as an int; a float is refused even if it is a whole number."""
    read = _read(name, value)
    if isinstance(read, bool) or not isinstance(read, int):
        raise _wrong(name, int, value)
    return read


def count(name: str, value: Any) -> int:
    """Returns an integer, or a float without a fractional part, as an int."""
    read = number(name, value)
    if not (math.isfinite(read) and read == int(read)):
        raise InputError(f"{name} must be an integer, got {read}")
    return int(read)


def flag(name: str, value: Any) -> bool:
    """Returns True or False; anything else is refused."""
    read = _read(name, value)
    if not isinstance(read, bool):
        raise _wrong(name, bool, value)
    return read


def option(name: str, value: Any) -> bool | int | float | str | None:
    """Returns a value that a config may hold: a number, a bool, a text or None."""
    if isinstance(value, str):
        return "".join(value)  # of Python's own class
    read = _read(name, value)
    if not (read is None or isinstance(read, bool | int | float)):
        raise InputError(f"{name} must be a number, a text or None, got {value!r}")
    return read


def unchanging(value: Any) -> Any:
    """Returns a read-only copy of a NumPy array, and anything else as it is."""
    if isinstance(value, np.ndarray):
        value = value.copy()
        value.flags.writeable = False
    return value


def _read(name: str, value: Any) -> Any:
    """Returns a number or a bool as a plain Python one, and anything else as it is."""
    if isinstance(value, jax.core.Tracer):
        raise InputError(
            f"{name} must be a number, not a tracer, because privacy or the compiled program "
            "depends on its value: pass it from outside of jit"
        )
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        if value.shape:
            raise InputError(f"{name} must be one number, got an array of shape {value.shape}")
        # `issubdtype` of JAX, which also knows bfloat16.
        for dtype, kind in KINDS:
            if jnp.issubdtype(value.dtype, dtype):
                return kind(np.asarray(value))
        # Complex numbers and objects: the caller refuses them.
        return value
    for _, kind in KINDS:
        if isinstance(value, kind):
            return kind(value)
    return value


def _wrong(name: str, kind: type, value: Any) -> InputError:
    return InputError(f"{name} must be of type {kind.__name__}, got {value!r}")
