"""What tells one function from another in every process: its name and the values that it keeps."""

import contextlib
import functools
import hashlib
import inspect
import types
from typing import Any

import jax
import numpy as np

PLAIN = (bool, int, float, str, tuple, np.ndarray, np.generic, jax.Array)


def in_words(value: Any, above: tuple[int, ...] = ()) -> str:
    """A function, by its name and the values that it keeps, in words that every process gives.

    For example "bam.core.clipping.normalize.<locals>.update(bound=1.0, floor=0.01)". Kept are the
    values that it closes over, defaults and, in objects, attributes that are plain. Arrays stand by
    a digest; the function's lines are not told.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | int | float | str | bytes | None):
        return repr(value)
    if id(value) in above or len(above) > 20:  # a function that calls itself, a list in itself
        return type(value).__qualname__
    describe = functools.partial(in_words, above=(*above, id(value)))
    if isinstance(value, np.ndarray | jax.Array):
        array = np.asarray(value)
        content = repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
        return f"{array.dtype}{list(array.shape)} {hashlib.sha256(content).hexdigest()[:16]}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(describe, value))}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(describe, value)))}}}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{describe(key)}: {describe(x)}' for key, x in value.items())}}}"
    if isinstance(value, functools.partial):
        return describe([value.func, value.args, value.keywords])
    if isinstance(value, type | types.ModuleType):
        return value.__name__
    function = inspect.unwrap(value) if callable(value) else value
    kept = {}
    if isinstance(function, types.FunctionType):
        parameters = inspect.signature(function).parameters.values()
        kept = {x.name: x.default for x in parameters if x.default is not x.empty}
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            with contextlib.suppress(ValueError):  # an empty cell
                kept[name] = cell.cell_contents
    elif isinstance(function, types.MethodType):
        kept = {"self": function.__self__}
    elif isinstance(vars(type(function)).get("__dict__"), types.GetSetDescriptorType):
        kept = {k: x for k, x in sorted(vars(function).items()) if isinstance(x, PLAIN)}
    named: Any = function if hasattr(function, "__qualname__") else type(function)
    words = ", ".join(f"{key}={describe(x)}" for key, x in kept.items())
    return f"{named.__module__}.{named.__qualname__}({words})"
