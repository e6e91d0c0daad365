"""Configs by name: `--config=digits:bam_sam` is `configs/digits.py:bam_sam`."""

import contextlib
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
from bam.text import did_you_mean

if TYPE_CHECKING:
    from ml_collections import ConfigDict

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 2**20  # bytes of a config file


def shipped_configs() -> dict[str, Path]:
    """Returns the configs that come with bam, as name -> file.

    They are in the checkout or in the wheel.
    """
    folders = (ROOT.parent / "configs", ROOT / "_shipped" / "configs")
    # Beside an installed bam, another package may have a folder of that name.
    folder = next((f for f in folders if (f / "cifar10.py").exists()), folders[0])
    config_files = {file.stem: file for file in folder.glob("[a-z]*.py")}
    return config_files | {"base": ROOT / "training" / "config.py"}


def file_of(value: str) -> str:
    """Returns the FILE:METHOD of a value of `--config`.

    InputError unless the value names a file or a config.
    """
    name, colon, method = value.partition(":")
    configs = shipped_configs()
    if name.endswith(".py") or "/" in name:
        if not name.endswith(".py"):
            raise InputError(
                f"{name} is not a config: give a Python file, as --config=FILE.py:METHOD"
            )
        # Running a pipe or a device would wait, or read without end.
        files.read_bytes(Path(name), LIMIT)
        folder = Path(name).resolve().parent
        is_package = folder.name == "configs" and (folder / "__init__.py").exists()
        _import_configs(folder if is_package else configs["cifar10"].parent)
        return value
    if name not in configs:
        hint = did_you_mean(name, configs) or ": name a file, or"
        raise InputError(f"there is no config {name!r}{hint} one of {', '.join(sorted(configs))}")
    _import_configs(configs["cifar10"].parent)
    return f"{configs[name]}{colon}{method}"


def load(value: str) -> "ConfigDict":
    """Returns the config of a value of `--config`.

    Keys that a section of the file lacks are added with their defaults. InputError if the file does
    not make a config.
    """
    from ml_collections import ConfigDict, config_dict

    from bam.training.config import complete

    file, colon, method = file_of(value).partition(":")
    with one_line_errors(file):
        get_config = runpy.run_path(file).get("get_config")
        if not callable(get_config):
            raise InputError(f"{file} is not a config: it has no function get_config(method)")
        arguments = [method] if colon else []
        # Bound before the call, so that a TypeError of the file's own code is not taken for this.
        try:
            inspect.signature(get_config).bind(*arguments)
        except TypeError as error:
            raise InputError(
                f"{file}: get_config does not take {arguments}: {error}; give FILE.py:METHOD"
            ) from None
        config = get_config(*arguments)
    if not isinstance(config, ConfigDict):
        raise InputError(
            f"{file} is not a config: get_config returns a {type(config).__name__}, not a "
            "ConfigDict"
        )
    try:
        config.to_dict()  # reads each value
        complete(config)
    except config_dict.RequiredValueError:
        raise InputError(
            f"{file} has a required_placeholder, which a config here cannot have: give a value, "
            "which a flag replaces"
        ) from None
    return config


@contextlib.contextmanager
def one_line_errors(file: str) -> Iterator[None]:
    """Turns an exception of a config file's code into an InputError with its file and line.

    An exception that this code did not cause is raised as it is, see `named.user_place`.
    """
    try:
        yield
    except MissingExtraError:  # it says already which package to install
        raise
    except Exception as error:
        location = named.user_place(error, file)
        if not location:
            raise
        raise InputError(location) from error


def config_modules() -> dict[str, ModuleType]:
    """Returns the imported modules of the package `configs`, by name."""
    return {k: v for k, v in sys.modules.items() if k == "configs" or k.startswith("configs.")}


def put_back(modules: dict[str, ModuleType]) -> None:
    """Replaces the imported modules of `configs` by these, from an earlier `config_modules()`."""
    for name in config_modules():
        del sys.modules[name]
    sys.modules.update(modules)


def _import_configs(folder: Path) -> None:
    """Imports the package `configs` from a folder, so that its configs can import each other.

    A `configs` that was imported from another folder is forgotten.
    """
    package = sys.modules.get("configs")
    if package is not None and list(getattr(package, "__path__", [])) != [str(folder)]:
        put_back({})
    # First on the path, so that no other package `configs` is imported; and for this import alone,
    # so that no file beside the folder hides another package.
    sys.path.insert(0, str(folder.parent))
    try:
        importlib.import_module("configs")
    finally:
        sys.path.remove(str(folder.parent))
