"""The `bam` command: `bam COMMAND` runs `bam.cli.COMMAND`, the module of that name."""

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from bam import __version__, extras, waits
from bam.cli import command, help_text, options, screen, signals
from bam.errors import InputError
from bam.text import did_you_mean


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `bam` with these arguments and returns a status of `options.STATUSES`.

    With `argv` it can be called from Python any number of times: it raises neither SystemExit nor
    an error. Without `argv` it is the program `bam`: it reads the command line, Ctrl-C ends it at
    once, and it does not return.
    """
    if argv is not None:
        return command.status_of(lambda: _dispatch(argv))
    signals.end_at_interrupts()
    command.leave(command.status_of(lambda: _dispatch(sys.argv[1:])))


def _dispatch(argv: Sequence[str]) -> int:
    name, *rest = argv or ["help"]
    if name in options.COMMANDS:
        if help_text.asks_for_help(rest):  # before anything heavy is imported
            screen.show(help_text.of(name))
            return 0
        if name != "privacy":
            with extras.needs("train"):
                import ml_collections  # noqa: F401
                import rich  # noqa: F401
        status: int = _load(name).main(rest)
        return status
    if name in ("help", "--help", "-h"):
        screen.show(help_text.of_all(__version__))
    elif name == "--version":
        screen.say(f"bam {__version__}")
    else:
        hint = did_you_mean(name, options.COMMANDS)
        names = ", ".join(options.COMMANDS)
        raise InputError(f"bam has no command {name!r}{hint or f': choose from {names}'}")
    return 0


def _load(name: str) -> ModuleType:
    """Imports the module of a command, on a terminal with a line if that takes long."""
    module = f"bam.cli.{name}"
    # In a file the line would stay, also above the table of `bam predict`.
    if module in sys.modules or not screen.show.draws_in_place():
        return importlib.import_module(module)
    with waits.awaited(screen.show, "loading bam"):
        return importlib.import_module(module)


if __name__ == "__main__":
    main()
