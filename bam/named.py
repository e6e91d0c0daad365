"""Imports the `MODULE:FUNCTION` of a config and calls it with the options of its section."""

import contextlib
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bam.errors import InputError

# Folders of bam's code and of other libraries; bam may be installed among these.
ROOT = Path(__file__).resolve().parent
_LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
FLAX = ("parent", "name")  # arguments of every Flax module, which are not options
ANY = "**"  # the option of a function that takes any option


def options_of(function: Any, num_given: int) -> dict[str, Any]:
    """The options of a function, after its first `num_given` arguments, with their defaults.

    The default of a required option is `inspect.Parameter.empty`. A function that takes any option
    also has the option `ANY`, and a builtin function without a signature has that alone.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())[num_given:]
    except ValueError:
        return {ANY: None}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    options = {x.name: x.default for x in parameters if x.kind in by_name and x.name not in FLAX}
    takes_any = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters)
    return options | ({ANY: None} if takes_any else {})


def import_function(role: str, name: str) -> Any:
    """Imports the function that a "MODULE:FUNCTION" names.

    Raises InputError, with its cause, if it cannot be imported. The message begins with `role`, for
    example "model". The current folder is searched last.
    """
    module, _, function = name.partition(":")
    # The folder is on the path for this import alone, and last: a file in it must not run in place
    # of a package that other code imports.
    here = "" if sys.flags.safe_path else os.getcwd()
    added = bool(here) and here not in sys.path
    try:
        if added:
            sys.path.append(here)
        return getattr(importlib.import_module(module), function)
    except Exception as error:
        usual = isinstance(error, ImportError | AttributeError | TypeError | ValueError)
        reason = error if usual else place(error)
        raise InputError(f"{role} {name!r} cannot be imported: {reason}") from error
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def call(role: str, function: Any, /, *args: Any, **options: Any) -> Any:
    """Calls a function that a config names.

    Args:
      role: the beginning of each error, for example "model convnet".
      function: the function.
      *args: bam's arguments.
      **options: the options of its section.

    Raises:
      InputError: if the function does not take these arguments; if it is from Python's standard
        library; or if the user's function raises a ValueError, with its file and line.
      Exception: any other exception of the function, unchanged.
    """
    # A config may be a stranger's, and no function like `os.system` makes a part of an experiment.
    # The type is checked because a partial function has the module of `functools`.
    kinds = (type, types.FunctionType, types.BuiltinFunctionType)
    module = str(getattr(function, "__module__", "")).partition(".")[0]
    if isinstance(function, kinds) and module in sys.stdlib_module_names:
        raise InputError(
            f"{role} is from Python's standard library, which makes no such part: name a function "
            "of your own"
        )
    try:
        inspect.signature(function).bind(*args, **options)
    except (TypeError, ValueError) as error:  # a builtin function may have no signature
        names = ", ".join(options_of(function, len(args))) or "none"
        raise InputError(
            f"{role} does not take {options}: {error} (its options: {names})"
        ) from error
    try:
        return function(*args, **options)
    except ValueError as error:
        code = getattr(inspect.unwrap(function), "__code__", None)
        location = user_place(error, code.co_filename) if code else ""
        if not location:
            raise
        raise InputError(f"{role}: {location}") from error


@contextlib.contextmanager
def refused_by(*parts: str) -> Iterator[None]:
    """Makes one line of an error in a library that one of a user's parts caused.

    `parts` are sections and names, as "model my:net"; a name of bam's has no colon. An error that a
    line of the user's code raised stays as it is: its traceback shows that line.
    """
    try:
        yield
    except (InputError, OSError, MemoryError):
        raise
    except Exception as error:
        own, frames = [x for x in parts if ":" in x], frames_of_callers(error)
        users = [x for x in frames if not _is_of_bam(x)]
        if not own or (frames and users and users[-1] is frames[-1]):
            raise
        location = f"{users[-1].filename}, line {users[-1].lineno}: " if users else ""
        raise InputError(f"{' or '.join(own)}: {location}{_in_line(error)}") from error


def fault_of_user(error: BaseException) -> str:
    """Returns the file and line of the user's code that raised an error, and its text.

    Returns "" if bam raised it. A library raises for the code that called it.
    """
    frames = frames_of_callers(error)
    if not frames or _is_of_bam(frames[-1]):
        return ""
    return f"{frames[-1].filename}, line {frames[-1].lineno}: {_in_line(error)}"


def frames_of_callers(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of an error that are of bam or of the user's code, and of no library."""
    frames = traceback.extract_tb(error.__traceback__)
    return [x for x in frames if _is_of_bam(x) or not _is_of_library(x)]


def _is_of_bam(frame: traceback.FrameSummary) -> bool:
    return Path(frame.filename).is_relative_to(ROOT)


def _is_of_library(frame: traceback.FrameSummary) -> bool:
    is_of = Path(frame.filename).is_relative_to
    return frame.filename.startswith("<frozen") or any(map(is_of, _LIBRARIES))


def user_place(error: BaseException, file: str) -> str:
    """The message of an error that the user's code in `file` caused, after its file and line.

    "" if that code did not cause it: for an InputError; for a ValueError or OSError that bam's code
    raised; if `file` is bam's; or if the error did not pass through `file`.
    """
    raised = traceback.extract_tb(error.__traceback__)[-1:]
    by_bam = any(Path(frame.filename).is_relative_to(ROOT) for frame in raised)
    if isinstance(error, InputError) or Path(file).is_relative_to(ROOT):
        return ""
    return "" if by_bam and isinstance(error, (ValueError, OSError)) else place(error, file)


def place(error: BaseException, file: str = "") -> str:
    """The type and message of an exception, after the file and line that it passed through last.

    With a `file`, the line is the last one in that file, and the result is "" if the exception did
    not pass through it. Without one, it is the line that raised.
    """
    # The text of the line is left out: a file that is named by mistake may hold secrets.
    text = _in_line(error)
    if isinstance(error, SyntaxError):  # the file did not run, so no frame is from it
        return f"{error.filename or file}, line {error.lineno or 1}: {error.msg}"
    frames = list(traceback.extract_tb(error.__traceback__))
    frames = [x for x in frames if os.path.isfile(x.filename)]  # without importlib's frozen ones
    if file:
        frames = [x for x in frames if os.path.samefile(x.filename, file)]
    if not frames:
        return "" if file else text
    return f"{frames[-1].filename}, line {frames[-1].lineno}: {text}"


def _in_line(error: BaseException) -> str:
    """The type and the message of an exception, in one line."""
    text = str(error).partition(" Other fields present")[0]  # of a ConfigDict, which lists all
    text = text if text.endswith("'") else text.removeprefix("'")
    return f"{type(error).__name__}: {' '.join(text.split())[:200]}".removesuffix(": ")
