"""Optional packages: if one is missing, the error is one line that names the extra to install.

`import bam` needs none of them. pyproject.toml lists the packages of each extra.
"""

import contextlib
from collections.abc import Iterator


class MissingExtraError(ModuleNotFoundError):
    """A package of one of bam's extras is not installed."""


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Raises `MissingExtraError` if an import within it fails: a package of `extra` is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed: pip install '.[{extra}]' in a clone of bam"
        raise MissingExtraError(message, name=error.name) from None
