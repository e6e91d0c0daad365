"""Configs by their names: `--config=digits:bam_sam` is `configs/digits.py:bam_sam`."""

import contextlib
import difflib
import importlib
import inspect
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from bam import files, named
from bam.errors import InputError
from bam.extras import MissingExtraError

if TYPE_CHECKING:
    from ml_collections import ConfigDict

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 2**20  # bytes of a config file


def shipped() -> dict[str, Path]:
    """Name -> file of every config that comes with bam: those of the checkout, or of the wheel."""
    folders = (ROOT.parent / "configs", ROOT / "_shipped" / "configs")
    folder = next((f for f in folders if (f / "cifar10.py").exists()), folders[0])
    named_files = {file.stem: file for file in folder.glob("[a-z]*.py")}
    return named_files | {"base": ROOT / "training" / "config.py"}


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


def load(value: str) -> "ConfigDict":
    """The config of what `--config` is given; InputError for a file that makes none."""
    from ml_collections import ConfigDict

    file, colon, method = file_of(value).partition(":")
    with one_line_errors(file):
        get_config = runpy.run_path(file).get("get_config")
        if not callable(get_config):
            raise InputError(f"{file} is no config: it has no function get_config(method)")
        given = [method] if colon else []
        try:
            inspect.signature(get_config).bind(*given)
        except TypeError as error:
            raise InputError(
                f"{file}: get_config of {given}: {error}; say FILE.py:METHOD"
            ) from None
        config = get_config(*given)
    if not isinstance(config, ConfigDict):
        what = type(config).__name__
        raise InputError(f"the config file makes no config: get_config of {file} returns a {what}")
    return config


@contextlib.contextmanager
def one_line_errors(file: str) -> Iterator[None]:
    """Turns what a config file's own code raises into an InputError with its file and line.

    Bad input that bam refuses on its behalf is raised as it is, and so is what arose elsewhere.
    """
    try:
        yield
    except MissingExtraError:
        raise
    except Exception as error:
        where = named.user_place(error, file)
        if not where:
            raise
        raise InputError(where) from error


def imported() -> dict[str, ModuleType]:
    """The modules of the package `configs` that Python has imported, by name."""
    return {k: v for k, v in sys.modules.items() if k == "configs" or k.startswith("configs.")}


def put_back(modules: dict[str, ModuleType]) -> None:
    """Makes these the modules of `configs` again, whichever a command imported."""
    for name in imported():
        del sys.modules[name]
    sys.modules.update(modules)


def _import_configs(folder: Path) -> None:
    """Imports the package `configs` from this folder, where configs import each other from.

    Only this import looks there first: no package of that name elsewhere is taken for it, and
    nothing beside the folder for some other package. One of another folder is forgotten.
    """
    known = sys.modules.get("configs")
    if known is not None and list(getattr(known, "__path__", [])) != [str(folder)]:
        put_back({})
    sys.path.insert(0, str(folder.parent))
    try:
        importlib.import_module("configs")
    finally:
        sys.path.remove(str(folder.parent))
