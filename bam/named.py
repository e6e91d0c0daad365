"""Functions that a config names: imported, and called with the options of its section."""

import importlib
import inspect
import os
import sys
from typing import Any


def imported(what: str, name: str) -> Any:
    """What a "MODULE:FUNCTION" names; a ValueError, with its cause, if there is no such thing.

    The current folder is looked in last, and for this import alone: a file that lies there is not
    run in place of a package that something else tries to import.
    """
    module, _, function = name.partition(":")
    here = "" if sys.flags.safe_path else os.getcwd()
    added = bool(here) and here not in sys.path
    try:
        if added:
            sys.path.append(here)
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{what} {name!r} cannot be imported: {error}") from error
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def call(what: str, function: Any, /, *given: Any, **options: Any) -> Any:
    """What a function returns; what it raises itself is raised as it is.

    ValueError, which begins with `what`, if it does not take these arguments.
    """
    try:
        inspect.signature(function).bind(*given, **options)
    except (TypeError, ValueError) as error:  # a builtin function may have no signature
        raise ValueError(f"{what} does not take {options}: {error}") from error
    return function(*given, **options)
