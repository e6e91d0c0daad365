"""Runs a command, from its flags to one-line errors and an exit status."""

import contextlib
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from absl import flags

from bam import named
from bam.cli import command_line, help_text, jax_setup, options, screen, signals
from bam.errors import InputError
from bam.extras import MissingExtraError
from bam.text import visible
from bam.training import named_configs

Body = Callable[..., int | None]  # (flags) or (flags, arguments) -> exit status


def run(name: str, argv: Sequence[str], body: Body) -> int:
    """Runs a command and returns its exit status, whatever happens.

    The next command starts as this one did: its flags are values of their own, and its changes to
    the process are put back. `body` is called with the flags and, if the command is `positional`,
    with the arguments after them.
    """
    row = options.COMMANDS[name]

    def call() -> int | None:
        values = flags.FlagValues()
        options.define(values, (*row.flags, options.DEBUG))
        required = [flag.name for flag in row.flags if flag.required]
        rest = _parse(values, argv, f"bam {name}", required, row.positional)
        for rule in row.rules:
            if not rule.holds(values):
                raise InputError(rule.message)
        jax_setup.use_all_cores()
        return body(values, rest) if row.positional else body(values)

    return status_of(call, _has_debug(argv))


def run_script(
    main: Callable[[], None], required: Sequence[str] = (), defaults: Sequence[str] = ()
) -> NoReturn:
    """Runs a script's `main` with absl's global flags, as a command is run, and ends the process.

    Without a value for a flag in `required` it ends before any work. `defaults` are flags such as
    "--num_steps=9", each used unless the command line sets it.
    """
    names = {command_line.flag_name(argument) for argument in sys.argv[1:]}
    argv = [*(x for x in defaults if command_line.flag_name(x) not in names), *sys.argv[1:]]

    def call() -> None:
        if help_text.asks_for_help(argv):
            screen.show(help_text.of_script(sys.modules["__main__"].__doc__ or "", flags.FLAGS))
            return
        if "debug" not in flags.FLAGS:
            options.define(flags.FLAGS, [options.DEBUG])
        _parse(flags.FLAGS, argv, sys.argv[0], required)
        jax_setup.use_all_cores()
        main()

    signals.end_at_interrupts()
    leave(status_of(call, _has_debug(argv)))


def _parse(
    values: flags.FlagValues,
    argv: Sequence[str],
    program: str,
    required: Iterable[str],
    positional: bool = False,
) -> list[str]:
    """Parses flags, of which some are required, and returns the arguments after them."""
    rest = command_line.parse(values, argv, program)
    if rest and not positional:
        raise InputError(f"{rest[0]!r} is not a flag: see --help")
    for name in required:
        if values[name].value in (None, "", []):
            raise InputError(f"--{name} is required: {values[name].help}")
    return rest


def status_of(call: Callable[[], int | None], debug: bool = False) -> int:
    """Calls a function, prints its error, and returns its exit status.

    A user's mistake is printed as one line, `error: …`; with `debug` its traceback stands above.
    Any other error is a fault and keeps its traceback, which ends with a note on whose fault it is.
    Signal handlers, warnings, logging and the environment are put back at the end.
    """
    with _put_back():
        try:
            status = call() or 0
            sys.stdout.flush()
            return status
        except SystemExit as end:
            if isinstance(end.code, str):
                screen.say(end.code, error=True)
            return end.code if isinstance(end.code, int) else options.FAULT if end.code else 0
        except BrokenPipeError:
            return options.UNREAD
        except KeyboardInterrupt:
            screen.say("error: interrupted", error=True)
            return options.INTERRUPTED
        except Exception as error:
            mistake = _mistake(error)
            if mistake is None:
                error.add_note(_whose(error))
            if mistake is None or debug:
                screen.say(*traceback.format_exc().rstrip("\n").split("\n"), error=True)
            if mistake is None:
                return options.FAULT
            screen.say(f"error: {' '.join(mistake.split())}", error=True)
            return options.BAD_INPUT


def leave(status: int) -> NoReturn:
    """Ends the process."""
    if status == options.UNREAD:
        # Python flushes standard output at exit, which would fail again on the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    jax = sys.modules.get("jax")
    if status == options.BAD_INPUT and jax and jax.distributed.is_initialized():
        sys.stdout.flush()
        os._exit(options.BAD_INPUT)  # sys.exit would wait for the other processes of the run
    sys.exit(status)


@contextlib.contextmanager
def _put_back() -> Iterator[None]:
    """Prints warnings in one line each, and at the end undoes what a command changed."""
    formatwarning, environ = warnings.formatwarning, dict(os.environ)
    modules = named_configs.config_modules()
    # JAX logs each absent kind of accelerator, which says nothing new to a user.
    logger = logging.getLogger("jax._src.xla_bridge")
    level = logger.level
    logger.setLevel(logging.WARNING)
    warnings.formatwarning = _format_warning
    try:
        with signals.put_back(signal.SIGINT, signal.SIGTERM):
            yield
    finally:
        warnings.formatwarning = formatwarning
        named_configs.put_back(modules)
        logger.setLevel(level)
        if environ != dict(os.environ):
            os.environ.clear()
            os.environ.update(environ)


def _format_warning(message: Warning | str, *location: Any, **more: Any) -> str:
    """Formats a warning as one line, in place of `warnings.formatwarning`."""
    screen.show.draw("")
    return f"warning: {visible(str(message))}\n"


def _mistake(error: Exception) -> str | None:
    """Returns the text of an error that is no fault, with advice, or None for a fault.

    These are an InputError, a refusal of the system (`OSError`), an extra that is not installed,
    too little memory, and the loss of a process.
    """
    if isinstance(error, InputError | OSError | MissingExtraError):
        return str(error)
    text, jax = " ".join(str(error).split()), sys.modules.get("jax")
    from_jax = jax is not None and isinstance(error, jax.errors.JaxRuntimeError)
    if isinstance(error, MemoryError) or (from_jax and "RESOURCE_EXHAUSTED" in text):
        advice = "lower --config.microbatch_size, --config.augment.views or the model's size"
        return f"there is not enough memory: {advice} ({text[:200]})"
    if from_jax and jax and jax.process_count() > 1:
        return f"a process of this run was lost: start all processes again to resume ({text[:200]})"
    return None


def _whose(error: Exception) -> str:
    """A note on whose fault an error is: bam's, or that of a line of the user's code."""
    if place := named.fault_of_user(error):
        return f"This is a fault of code that is not a part of bam: {place}"
    return "This is a fault of bam: please report it with all lines above."


def _has_debug(argv: Sequence[str]) -> bool:
    return any(x in ("-debug", "--debug") for x in argv)
