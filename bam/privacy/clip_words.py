"""The words that identify a clip in the record of a training."""

import dataclasses
import hashlib
import types
from typing import Any

import jax
import numpy as np

from bam.files import JsonMapping


def in_words(value: Any) -> str:
    """Describes a clip by its numbers and the names of its functions, alike in every process.

    For example "bam.core.clipping.ClipByL2Norm(clip_norm=1.0)". An array is described by a digest.
    The code of a function, and the numbers that it keeps, are not part of the text; those of a
    partial function, and of the object of a method, are.
    """
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        if not array.shape:
            return repr(array.item())
        return (
            f"{array.dtype}{list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
        )
    if isinstance(value, tuple | list):
        return f"({', '.join(map(in_words, value))})"
    if isinstance(value, dict):
        return _call_in_words("dict", value)
    if hasattr(value, "keywords"):  # a partial function, of Python or JAX
        arguments = {str(i): x for i, x in enumerate(value.args)} | value.keywords
        return _call_in_words(in_words(value.func), arguments)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {x.name: getattr(value, x.name) for x in dataclasses.fields(value)}
        return _call_in_words(in_words(type(value)), fields)
    if isinstance(value, types.MethodType):
        return f"{in_words(value.__self__)}.{value.__name__}"
    if not callable(value) and type(value).__repr__ is not object.__repr__:
        return repr(value)
    definition: Any = value if hasattr(value, "__qualname__") else type(value)
    return f"{definition.__module__}.{definition.__qualname__}"


def _call_in_words(name: str, arguments: JsonMapping) -> str:
    return f"{name}({', '.join(f'{key}={in_words(x)}' for key, x in arguments.items())})"
