"""Configs by their names: `--config=digits:bam_sam` is `configs/digits.py:bam_sam`."""

import contextlib
import difflib
import importlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from bam import files, named
from bam.errors import InputError
from bam.extras import MissingExtraError

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 2**20  # bytes of a config file


def shipped() -> dict[str, Path]:
    """Name -> file of every config that comes with bam: those of the checkout, or of the wheel."""
    folders = (ROOT.parent / "configs", ROOT / "_shipped" / "configs")
    folder = next((f for f in folders if (f / "cifar10.py").exists()), folders[0])
    named_files = {file.stem: file for file in folder.glob("[a-z]*.py")}
    return named_files | {"base": ROOT / "training" / "config.py"}


def with_files(argv: Sequence[str]) -> tuple[list[str], str]:
    """Arguments whose `--config=NAME:METHOD` has the file of the shipped config NAME instead.

    Returns them and that file, "" without a `--config`.
    """
    arguments, value_follows, file = [], False, ""
    for argument in argv:
        flag, equals, value = argument.partition("=")
        if flag in ("--config", "-config") and equals:
            file = file_of(value)
            argument = f"{flag}={file}"
        elif value_follows:
            argument = file = file_of(argument)
        value_follows = argument in ("--config", "-config")
        arguments.append(argument)
    return arguments, file.partition(":")[0]


def file_of(value: str) -> str:
    """FILE:METHOD of what `--config` is given; InputError for no file and no shipped config."""
    name, colon, method = value.partition(":")
    known = shipped()
    if name.endswith(".py") or "/" in name:
        if not name.endswith(".py"):
            raise InputError(f"{name} is no config: a config is a Python file, as FILE.py:METHOD")
        files.read_bytes(Path(name), LIMIT)
        own = Path(name).resolve().parent
        is_package = own.name == "configs" and (own / "__init__.py").exists()
        _import_configs(own if is_package else known["cifar10"].parent)
        return value
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else "name a file, or"
        raise InputError(f"there is no config {name!r}: {hint} one of {', '.join(sorted(known))}")
    _import_configs(known["cifar10"].parent)
    return f"{known[name]}{colon}{method}"


@contextlib.contextmanager
def one_line_errors(file: str) -> Iterator[None]:
    """Turns what a config file's own code raises into an InputError with its file and line.

    Bad input that bam refuses on its behalf is raised as it is, and so is what arose elsewhere.
    """
    try:
        yield
    except Exception as error:
        # A parser of flags wraps it in an exception of its own.
        cause: BaseException | None = error
        while file and cause is not None and not (where := _place(cause, file)):
            cause = cause.__cause__ or cause.__context__
        if not file or cause is None:
            raise
        raise InputError(where) from error


def _place(error: BaseException, file: str) -> str:
    """Where a config file's own code failed; "" for what is no error of it."""
    if isinstance(error, (ValueError, OSError, MissingExtraError)):
        raised = traceback.extract_tb(error.__traceback__)[-1:]
        if any(Path(frame.filename).is_relative_to(ROOT) for frame in raised):
            return ""
    return named.place(error, file)


def _import_configs(folder: Path) -> None:
    """Imports the package `configs` from this folder, where configs import each other from.

    Only this import looks there first: no package of that name elsewhere is taken for it, and
    nothing beside the folder for some other package.
    """
    sys.path.insert(0, str(folder.parent))
    try:
        importlib.import_module("configs")
    finally:
        sys.path.remove(str(folder.parent))
