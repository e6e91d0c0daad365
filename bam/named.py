"""Functions that a config names: imported, and called with the options of its section."""

import importlib
import inspect
from typing import Any


def imported(what: str, name: str) -> Any:
    """What a "MODULE:FUNCTION" names; a ValueError, with its cause, if there is no such thing."""
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{what} {name!r} cannot be imported: {error}") from error


def call(what: str, function: Any, /, *given: Any, **options: Any) -> Any:
    """What a function returns; what it raises itself is raised as it is.

    ValueError, which begins with `what`, if it does not take these arguments.
    """
    try:
        inspect.signature(function).bind(*given, **options)
    except (TypeError, ValueError) as error:  # a builtin function may have no signature
        raise ValueError(f"{what} does not take {options}: {error}") from error
    return function(*given, **options)
