"""Packages that only a part of the library needs: a missing one is one line that says which extra.

`import bam` needs none of them; pyproject.toml lists what each extra brings.
"""

import contextlib
from collections.abc import Iterator


class MissingExtraError(ModuleNotFoundError):
    """A package that an extra of `bam` brings is not installed."""


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Around imports of what `extra` brings: raises `MissingExtraError` where one of them fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed: pip install '.[{extra}]' in a clone of bam"
        raise MissingExtraError(message, name=error.name) from None
