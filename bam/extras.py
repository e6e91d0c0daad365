"""Packages that only a part of the library needs: a missing one is one line that says which extra.

`import bam` needs none of them; pyproject.toml lists what each extra brings.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import TracebackType


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


def one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The `sys.excepthook` of commands, which cannot catch what their own imports raise."""
    if isinstance(error, MissingExtraError):
        print("error:", error, file=sys.stderr, flush=True)
        raise SystemExit(2)
    sys.__excepthook__(kind, error, trace)
