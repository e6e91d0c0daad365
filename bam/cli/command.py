"""Runs a command: flags in; one-line errors and an exit status out."""

import contextlib
import logging
import os
import signal
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import flags

from bam.cli import command_line, jax_setup, options, screen, signals
from bam.errors import InputError
from bam.extras import MissingExtraError
from bam.files import JsonObject
from bam.text import visible
from bam.training import named_configs

# Folders of bam's code and of other libraries; bam may be installed among these.
_BAM = Path(__file__).resolve().parents[1]
_LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}

Body = Callable[..., int | None]  # (flags) or (flags, arguments) -> exit status


def run(name: str, argv: Sequence[str], body: Body) -> int:
    """Runs a command; returns its exit status, whatever happens.

    The next command starts as this one did: its flags are values of their own, and its changes to
    the process are put back. `body` is called with the flags and, if the command is `positional`,
    with the arguments after them. `--help` prints the help without calling it.
    """
    row = options.COMMANDS[name]
    values = flags.FlagValues()

    def run() -> int | None:
        if options.asks_for_help(argv):
            screen.show(options.help_of(name))
            return 0
        options.define(values, (*row.flags, options.DEBUG))
        rest = command_line.parse(values, argv, f"bam {name}")
        if rest and not row.positional:
            raise InputError(_unexpected(rest[0]))
        for flag in row.flags:
            if flag.required and values[flag.name].value in (None, "", []):
                raise InputError(f"--{flag.name} is required: {flag.help}")
        for rule in row.rules:
            if not rule.holds(values):
                raise InputError(rule.message)
        jax_setup.use_all_cores()
        return body(values, rest) if row.positional else body(values)

    return status_of(run, _has_debug(argv))


def run_script(main: Callable[[], None], defaults: Sequence[str] = ()) -> NoReturn:
    """Runs a script's `main` with absl's global flags, as a command is run; ends the process.

    `defaults` are flags such as "--num_steps=9", each used unless the command line sets it.
    """
    names = {command_line.flag_name(argument) for argument in sys.argv[1:]}
    argv = [*(x for x in defaults if command_line.flag_name(x) not in names), *sys.argv[1:]]

    def body() -> None:
        if options.asks_for_help(argv):
            screen.show("\n".join([sys.modules["__main__"].__doc__ or "", *_lines_of(flags.FLAGS)]))
            return
        if "debug" not in flags.FLAGS:
            options.define(flags.FLAGS, [options.DEBUG])
        rest = command_line.parse(flags.FLAGS, argv, sys.argv[0])
        if rest:
            raise InputError(_unexpected(rest[0]))
        jax_setup.use_all_cores()
        main()

    signals.end_at_interrupts()
    leave(status_of(body, _has_debug(argv)))


def status_of(run: Callable[[], int | None], debug: bool = False) -> int:
    """Calls `run`, prints its error, and returns its exit status.

    Bad input is printed in one line, a fault with its traceback. Signal handlers, warnings, logging
    and the environment are put back at the end.
    """
    with _put_back():
        try:
            with one_line_errors(debug):
                status = run() or 0
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
        except Exception:
            screen.say(*traceback.format_exc().rstrip("\n").split("\n"), error=True)
            return options.FAULT


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
    """Prints warnings in one line each; at the end, undoes a command's changes to the process."""
    numbers = (signal.SIGINT, signal.SIGTERM) if signals.in_main_thread() else ()
    handlers = {number: signal.getsignal(number) for number in numbers}
    formatwarning, environ = warnings.formatwarning, dict(os.environ)
    modules = named_configs.imported()
    # JAX logs each absent kind of accelerator, which says nothing new to a user.
    logger = logging.getLogger("jax._src.xla_bridge")
    level = logger.level
    logger.setLevel(logging.WARNING)
    warnings.formatwarning = _warning
    try:
        yield
    finally:
        warnings.formatwarning = formatwarning
        named_configs.put_back(modules)
        logger.setLevel(level)
        for number, handler in handlers.items():
            if handler is not None:  # None: set outside Python, which cannot set it again
                signal.signal(number, handler)
        if environ != dict(os.environ):
            os.environ.clear()
            os.environ.update(environ)


def _warning(message: Warning | str, *location: Any, **more: Any) -> str:
    """Formats a warning as one line, in place of `warnings.formatwarning`; Python prints it."""
    screen.show.draw("")
    return f"warning: {visible(str(message))}\n"


def require(*names: str) -> None:
    """Declares global flags that a script needs; without one it ends before any work."""
    for name in names:
        message = f"--{name} is required: {flags.FLAGS[name].help}"
        ensure((name,), lambda value: value not in (None, "", []), message)


def ensure(names: Sequence[str], holds: Callable[..., bool], message: str) -> None:
    """Declares a condition on global flags: if `holds` is false, `message` is the error."""

    def check(values: JsonObject) -> bool:
        if not holds(*(values[name] for name in names)):
            raise InputError(message)  # absl's own error would list all values first
        return True

    flags.register_multi_flags_validator(names, check)


@contextlib.contextmanager
def one_line_errors(debug: bool | None = None) -> Iterator[None]:
    """Turns a user's mistakes into `error: …` on standard error and exit status 2.

    These are an InputError, a refusal of the system (`OSError`), an extra that is not installed,
    and too little memory. With `debug` (None: if the command line has `--debug`) the traceback
    stands above the line. Any other error is a fault and keeps its traceback, which ends with a
    note on whose fault it is.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (InputError, OSError, MissingExtraError) as error:
        _fail(str(error), debug)
    except Exception as error:
        if text := _too_much(error):
            _fail(text, debug)
        notes = getattr(error, "__notes__", [])
        if (note := _whose(error)) not in notes:
            error.add_note(note)
        raise


def _too_much(error: Exception) -> str:
    """Advice if the error means that memory ran out or a process was lost; otherwise ""."""
    text, jax = " ".join(str(error).split()), sys.modules.get("jax")
    from_jax = jax is not None and isinstance(error, jax.errors.JaxRuntimeError)
    if isinstance(error, MemoryError) or (from_jax and "RESOURCE_EXHAUSTED" in text):
        advice = "lower --config.microbatch_size, --config.augment.views or the model's size"
        return f"there is not enough memory: {advice} ({text[:200]})"
    if from_jax and jax and jax.process_count() > 1:
        return f"a process of this run was lost: start all processes again to resume ({text[:200]})"
    return ""


def _whose(error: Exception) -> str:
    """A note on whose fault an error is: bam's, libraries included, or that of a user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    file = frames[-1].filename if frames else ""
    is_bam = not file or file.startswith("<frozen") or Path(file).is_relative_to(_BAM)
    if is_bam or any(map(Path(file).is_relative_to, _LIBRARIES)):
        return "This is a fault of bam: please report it with all lines above."
    return f"This is a fault of {file}, which is not a part of bam."


def _fail(message: str, debug: bool | None) -> NoReturn:
    """Prints an error in one line, with `--debug` below its traceback, and ends the command."""
    if _has_debug(sys.argv) if debug is None else debug:
        screen.say(*traceback.format_exc().splitlines(), error=True)
    screen.say(f"error: {' '.join(message.split())}", error=True)
    sys.exit(options.BAD_INPUT)


def _unexpected(argument: str) -> str:
    """The error for an argument of a command that takes only flags."""
    return f"{argument!r} is not a flag: see --help"


def _has_debug(argv: Sequence[str]) -> bool:
    return any(x in ("-debug", "--debug") for x in argv)


def _lines_of(values: flags.FlagValues) -> list[str]:
    """The help of a script's flags."""
    ours = command_line.own_flags(values)
    rows = (options.Flag(x, values[x].default, values[x].help or "") for x in ours)
    return options.flag_lines(rows)
