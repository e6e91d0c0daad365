"""Converts arguments to plain Python numbers, which cannot change later, and checks their type."""

import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from bam.core.pytree import is_key
from bam.errors import InputError

# A float, or the tracer of one: an argument of a program.
Number: TypeAlias = float | Float[Array, ""]

LARGEST = float(jnp.finfo(jnp.float32).max)


def number(name: str, value: Any) -> int | float:
    """Returns `value` as a plain Python int or float, whichever it is.

    It may come from Python, NumPy or JAX, or be an array without axes. Anything else (bools, text,
    complex numbers, longer arrays, tracers) is an InputError, in one line that begins with `name`.

    Examples:
      >>> import numpy as np
      >>> number("radius", np.array(0.5)), number("bands", np.int64(3))
      (0.5, 3)
    """
    return _read(name, value, int, float)


def real(name: str, value: Any) -> float:
    """Returns as a float what `number` returns."""
    try:
        return float(number(name, value))
    except OverflowError:
        raise InputError(f"{name} is too large for a float") from None


def argument(name: str, value: Any) -> Number:
    """Returns `value` as a float that float32 does not overflow, or the tracer of a float.

    Infinity and NaN pass. A tracer is in at least float32. InputError for anything else. A
    tracer's value cannot be checked here. An S, σ or l out of range makes a sum NaN. A radius, mix
    or penalty out of range makes each gradient NaN, so a sum is noise alone.
    """
    if is_known(value):
        read = real(name, value)
        if LARGEST < abs(read) < math.inf:
            raise InputError(f"{name} must be a number that 32-bit floats hold, got {read}")
        return read
    if value.shape or not jnp.issubdtype(value.dtype, jnp.floating):
        raise InputError(f"{name} must be one float, got {value.dtype}{list(value.shape)}")
    is_narrow = jnp.finfo(value.dtype).bits < 32  # the proofs of bounds count float32 roundings
    return value.astype(jnp.float32) if is_narrow else value


def is_known(*values: Any) -> bool:
    """Returns whether none of the values is a tracer."""
    return not any(isinstance(value, jax.core.Tracer) for value in values)


def whole(name: str, value: Any) -> int:
    """Returns an integer as an int.

    A float is refused even if it is a whole number.
    """
    return _read(name, value, int)


def count(name: str, value: Any) -> int:
    """Returns an integer, or a float without a fractional part, as an int."""
    read = number(name, value)
    if not (math.isfinite(read) and read == int(read)):
        raise InputError(f"{name} must be an integer, got {read}")
    return int(read)


def flag(name: str, value: Any) -> bool:
    """Returns a value that is True or False, and refuses any other."""
    return _read(name, value, bool)


def _read(name: str, value: Any, *kinds: type) -> Any:
    """Returns a plain Python value of one of the types.

    InputError for another value.
    """
    if not is_known(value):
        raise InputError(
            f"{name} must be a number, not a tracer, because privacy or the compiled program "
            "depends on its value: pass it from outside of jit"
        )
    if shape := getattr(value, "shape", ()):
        raise InputError(f"{name} must be one number, got an array of shape {shape}")
    is_array = isinstance(value, np.ndarray | np.generic | jax.Array) and not is_key(value)
    read = value.item() if is_array else value
    read = float(read) if isinstance(read, np.floating) else read  # of more than 64 bits
    for kind in kinds:
        if isinstance(read, kind) and isinstance(read, bool) == (kind is bool):
            return kind(read)
    raise InputError(f"{name} must be of type {kinds[-1].__name__}, got {value!r}")
