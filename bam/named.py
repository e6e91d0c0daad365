"""Functions that a config names: imported, and called with the options of its section."""

import importlib
import inspect
import os
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bam.errors import InputError

ROOT = Path(__file__).resolve().parent
FLAX = ("parent", "name")  # arguments of every Flax module
ANY = "**"


class Part(NamedTuple):
    """A row of a table of parts: what makes one that a config names.

    Attributes:
      source: a function of what bam gives it and of options by name; or its MODULE:FUNCTION, which
        is imported when the part is chosen.
      public_options: those that a release repeats. A config can have no other, beside its table's.
      words: what PRIVACY.md says of it; "": nothing that whoever trained does not declare.
    """

    source: Callable[..., Any] | str
    public_options: tuple[str, ...] = ()
    words: str = ""

    @property
    def make(self) -> Callable[..., Any]:
        """The function."""
        if not isinstance(self.source, str):
            return self.source
        function: Callable[..., Any] = imported("part", self.source)
        return function


def options_of(function: Any, num_given: int) -> dict[str, Any]:
    """The options of a function after what bam gives it, with their defaults.

    `inspect.Parameter.empty` is the default of one that must be given. A function that takes any
    has the option `ANY`, too. None are known of a builtin function without a signature.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())[num_given:]
    except ValueError:
        return {ANY: None}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    options = {x.name: x.default for x in parameters if x.kind in by_name and x.name not in FLAX}
    takes_any = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters)
    return options | ({ANY: None} if takes_any else {})


def imported(what: str, name: str) -> Any:
    """What a "MODULE:FUNCTION" names; an InputError, with its cause, if there is no such thing.

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
    except Exception as error:
        usual = isinstance(error, ImportError | AttributeError | TypeError | ValueError)
        reason = error if usual else place(error)
        raise InputError(f"{what} {name!r} cannot be imported: {reason}") from error
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def call(what: str, function: Any, /, *given: Any, **options: Any) -> Any:
    """What a function returns; what it raises itself is raised as it is, but for a ValueError.

    One of a function of a user's own becomes an InputError with its file and line.

    InputError, which begins with `what`, if it does not take these arguments, or is of Python's own
    library, as `os.system`: nothing there makes a part of an experiment.
    """
    kinds = (type, types.FunctionType, types.BuiltinFunctionType)  # and not a partial function
    module = str(getattr(function, "__module__", "")).partition(".")[0]
    if isinstance(function, kinds) and module in sys.stdlib_module_names:
        raise InputError(f"{what} is of Python's own library, which makes no such part")
    try:
        inspect.signature(function).bind(*given, **options)
    except (TypeError, ValueError) as error:  # a builtin function may have no signature
        known = ", ".join(options_of(function, len(given))) or "none"
        raise InputError(
            f"{what} does not take {options}: {error} (its options: {known})"
        ) from error
    try:
        return function(*given, **options)
    except ValueError as error:
        code = getattr(inspect.unwrap(function), "__code__", None)
        where = own_place(error, code.co_filename) if code else ""
        if not where:
            raise
        raise InputError(f"{what}: {where}") from error


def own_place(error: BaseException, file: str) -> str:
    """Where code of a user's own in `file` failed; "" for what it did not cause.

    That is what bam refused on its behalf, what the system did not do for bam, and whatever is
    raised by bam's own code or did not pass through `file`.
    """
    raised = traceback.extract_tb(error.__traceback__)[-1:]
    by_bam = any(Path(frame.filename).is_relative_to(ROOT) for frame in raised)
    if isinstance(error, InputError) or Path(file).is_relative_to(ROOT):
        return ""
    return "" if by_bam and isinstance(error, (ValueError, OSError)) else place(error, file)


def place(error: BaseException, file: str = "") -> str:
    """What an exception says, after its file and line: the last in `file`, "": where it arose.

    Without the lines themselves: a file that is named by mistake may hold anything. "" if it did
    not pass through `file`.
    """
    text = str(error).partition(" Other fields present")[0]
    text = text if text.endswith("'") else text.removeprefix("'")  # of a ConfigDict
    text = f"{type(error).__name__}: {' '.join(text.split())[:200]}".removesuffix(": ")
    if isinstance(error, SyntaxError):
        return f"{error.filename or file}, line {error.lineno or 1}: {error.msg}"
    frames = list(traceback.extract_tb(error.__traceback__))
    frames = [x for x in frames if os.path.isfile(x.filename)]  # not importlib's frozen ones
    if file:
        frames = [x for x in frames if os.path.samefile(x.filename, file)]
    if not frames:
        return "" if file else text
    return f"{frames[-1].filename}, line {frames[-1].lineno}: {text}"
