"""What every command shares: flags that fail in one line, and a compilation cache."""

import contextlib
import dis
import functools
import logging
import math
import os
import re
import signal
import stat
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import jax
from absl import app, flags
from absl import logging as absl_logging

from bam import extras
from bam.cli import configs
from bam.errors import InputError
from bam.files import JsonObject, check_replaceable, visible

# Folders of code: of bam's own, and of other libraries, among which it may be installed.
_BAM = Path(__file__).parents[1]
_LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
STOPPED = 3  # exit status of a run that the same command goes on with
INTERRUPTED = 130  # of any other command at Ctrl-C, as shells have it

flags.DEFINE_bool("debug", False, "show the traceback of an error, too")


def run(main: Callable[..., None], defaults: Sequence[str] = (), positional: bool = False) -> None:
    """Runs `main` after parsing flags; a bad flag or config key is one line and exit status 2.

    A warning is one line, too. `defaults` are flags for what the command line does not say. With
    `positional`, `main` is given what follows the flags; otherwise nothing may follow.
    """
    warnings.formatwarning = lambda message, *where: f"warning: {visible(str(message))}\n"
    sys.excepthook = _uncaught
    # Which accelerators are absent is no news.
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
    _use_all_cores()
    given = _names(sys.argv)
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS["debug"])  # --help has it
    added = [flag for flag in defaults if flag.lstrip("-").partition("=")[0] not in given]
    with one_line_errors():  # in sys.argv, because that is where config flags look for overrides
        sys.argv[1:], file = configs.with_files([*added, *sys.argv[1:]])

    def quietly(argv: Sequence[str]) -> None:
        absl_logging.set_verbosity(absl_logging.WARNING)  # every checkpoint writes ten lines else
        if positional:
            main(argv[1:])
        elif argv[1:]:
            _fail(f"{argv[1]!r} is no flag; --help shows them")
        else:
            main()

    signal.signal(signal.SIGINT, _end_at_once)
    app.run(quietly, flags_parser=functools.partial(_parse_flags, file))


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The `sys.excepthook` of a command: as Python's, in what `say` prints."""
    if isinstance(error, extras.MissingExtraError):
        extras.one_line(kind, error, trace)
    lines = "".join(traceback.format_exception(kind, error, trace))
    say(*lines.rstrip("\n").split("\n"), error=True)


def say(*lines: str, error: bool = False) -> None:
    """Prints lines, on standard error if so: the one way for a command to print.

    Names in them may be a stranger's. They add no line, and nothing that a terminal obeys or hides.
    """
    print(*map(visible, lines), sep="\n", file=sys.stderr if error else None, flush=True)


def show(text: str) -> None:
    """Prints a text of several lines, each as `say` does: for what is ours, as a plan is."""
    say(*text.split("\n"))


def require(*names: str) -> None:
    """Declares flags without which the command ends before any work, with a line that says so."""
    for name in names:
        message = f"--{name} is required: {flags.FLAGS[name].help}"
        ensure((name,), lambda value: value not in (None, "", []), message)


def ensure(names: Sequence[str], holds: Callable[..., bool], message: str) -> None:
    """Declares what must hold of the values of some flags; otherwise `message` is the error."""

    def check(values: JsonObject) -> bool:
        if not holds(*(values[name] for name in names)):
            raise InputError(message)  # absl's own error would list all values first
        return True

    flags.register_multi_flags_validator(names, check)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns what a user can get wrong into `error: …` on standard error and exit status 2.

    With `--debug` the traceback stands above it. An InputError that nobody raised on purpose is a
    fault of the program: it keeps its traceback, which ends by asking for a report.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        if on_purpose(error):
            _fail(str(error))
        error.add_note("This is a fault of bam: please report it with all lines above.")
        raise
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        text = " ".join(str(error).split())
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
            advice = "lower microbatch_size, augment.views or the model's size"
            _fail(f"there is not enough memory: {advice} ({text[:200]})")
        if jax.process_count() > 1:
            _fail(f"a process of this run was lost; start all again to go on ({text[:200]})")
        raise


def on_purpose(error: ValueError | OSError) -> bool:
    """Whether an error is about what the user gave: the system's, or one that `bam` raises itself.

    That is so if the statement that failed is a `raise` of code of `bam` or of the user's own, and
    neither a call of a function that is written in C, nor something inside of another library.
    """
    if isinstance(error, OSError) or error.__traceback__ is None:
        return True
    last = error.__traceback__
    while last.tb_next:
        last = last.tb_next
    code = last.tb_frame.f_code
    file = Path(code.co_filename)
    ours = file.is_relative_to(_BAM) or not any(map(file.is_relative_to, _LIBRARIES))
    return ours and code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def check_writable(file: str) -> None:
    """Refuses, with an OSError, a file ("": none) that could not be written, before any work."""
    if not file:
        return
    folder = Path(file).parent
    folder.mkdir(parents=True, exist_ok=True)
    check_replaceable(Path(file))
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{file} cannot be written")


def stop_after(max_seconds: float) -> Callable[[], bool]:
    """A `should_stop` for training: true after a time (0: never), at SIGTERM or at Ctrl-C.

    A second Ctrl-C ends the command at once.
    """
    deadline = time.monotonic() + (max_seconds or math.inf)
    terminated = threading.Event()

    def stop(number: int, frame: object) -> None:
        terminated.set()
        signal.signal(signal.SIGINT, _end_at_once)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, stop)
    return lambda: terminated.is_set() or time.monotonic() >= deadline


def join_processes(
    coordinator: str, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Makes this process one of several that train together, through `jax.distributed`.

    Should one of them die, the others end too, within half a minute. `coordinator` is "HOST:PORT"
    of the first process; "auto": as SLURM, Kubernetes, Cloud TPU or MPI say, without the numbers;
    or "": this process is the only one. Raises an InputError if that is not a set of processes, an
    OSError if the others cannot be reached.
    """
    numbers, automatic = (num_processes, process_id), coordinator == "auto"
    if (not coordinator or automatic) and numbers != (None, None):
        raise InputError("--num_processes and --process_id need --coordinator=HOST:PORT")
    if not coordinator:
        return
    if not automatic and (None in numbers or not re.fullmatch(r".+:[0-9]+", coordinator)):
        raise InputError("--coordinator=HOST:PORT needs --num_processes and --process_id")
    try:
        jax.distributed.initialize(
            None if automatic else coordinator,
            *numbers,
            cluster_detection_method=None if automatic else "deactivate",
            initialization_timeout=120,
            heartbeat_timeout_seconds=20,
            shutdown_timeout_seconds=20,
        )
    except (ValueError, RuntimeError) as error:
        text = str(error)
        if "should be defined" in text or "must be defined" in text:
            absent = "no SLURM, Kubernetes, Cloud TPU or MPI here: set --coordinator=HOST:PORT"
            raise InputError(absent) from None
        if "process_id" in text:
            raise InputError(text) from None
        raise OSError(f"the processes at {coordinator} could not be joined: {text}") from None


def use_compilation_cache() -> None:
    """Keeps compiled programs in a folder of the user, so that the second run starts at once.

    What lies there is run without a question, so it is `$XDG_CACHE_HOME/bam/jax`, or else
    `~/.cache/bam/jax`, never a folder that came with data or code; and one that another user owns
    or may write to is passed over, with a line that says so. The environment variable
    JAX_COMPILATION_CACHE_DIR names another folder, which is not checked.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path is to be ignored, says the XDG specification.
    folder = Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")) / "bam" / "jax"
    try:
        for part in (folder.parent, folder):
            part.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_own(part)
    except OSError as error:
        say(f"warning: compiled programs are not kept: {error}", error=True)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _check_own(folder: Path) -> None:
    """Refuses a folder that another user, root apart, can put files into."""
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} can be written to by others (chmod 700 {folder})")


def _use_all_cores() -> None:
    """Makes a JAX device of every CPU core, up to eight, for the examples of a step to share.

    One example per core is faster than one example on all cores. `JAX_NUM_CPU_DEVICES` sets
    another number; accelerators are not affected.
    """
    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if "JAX_NUM_CPU_DEVICES" not in os.environ and not forced:
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        jax.config.update("jax_num_cpu_devices", min(8, cores))


def _end_at_once(number: int, frame: object) -> None:
    """Ends at Ctrl-C: whatever is written is all or nothing, and threads would be waited for."""
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)  # a bar of progress hides the cursor
    say("error: interrupted", error=True)
    os._exit(INTERRUPTED)


def _from_home(argument: str) -> str:
    """`--workdir=~/runs`, of which a shell would make a folder called `~`, from the home folder.

    A config keeps such a path as it was written; `bam.files.user_path` reads it.
    """
    name, equals, value = argument.partition("=")
    if name.lstrip("-").startswith("config"):
        return argument
    return name + equals + ",".join(map(os.path.expanduser, value.split(",")))


def _parse_flags(config_file: str, argv: list[str]) -> list[str]:
    """What is left of the arguments, once absl has parsed its flags and `config_file`."""
    try:
        with configs.one_line_errors(config_file):
            rest: list[str] = flags.FLAGS([argv[0], *map(_from_home, argv[1:])])
            if "config" in flags.FLAGS:  # which keeps an OSError until it is looked at
                getattr(flags.FLAGS["config"].value, "seed", None)
            return rest
    except BrokenPipeError:
        raise
    except SystemExit as end:  # absl has shown the help
        sys.exit(0 if {"help", "helpshort", "helpfull", "helpxml"} & _names(argv) else end.code)
    except (AttributeError, KeyError) as error:  # of an unknown key, or of a mistaken config file
        # As ml_collections says it, within several pairs of quotes.
        unknown = re.fullmatch(r"""\W*(\w+)\W*(?:nDid you mean "(\w+)".*)?""", str(error))
        if unknown is None:
            _fail(f"the config file makes no config: {error!r}; --debug shows where")
        hint = f": did you mean {unknown[2]}?" if unknown[2] else ""
        _fail(f"the config has no key {unknown[1]!r}{hint}")
    except (flags.Error, ValueError, TypeError, OSError) as error:
        # A config file's own error arrives wrapped in its traceback; its last line is the message.
        _fail(re.sub(r"(?s)Error whilst parsing config file.*\n\w+: ", "", str(error)))


def _names(argv: Sequence[str]) -> set[str]:
    """The flags that are given."""
    return {x.lstrip("-").partition("=")[0] for x in argv[1:] if x.startswith("-")}


def _fail(message: str) -> NoReturn:
    """Ends the command in one line, below the traceback of the error at hand with `--debug`."""
    if "debug" in (argument.lstrip("-") for argument in sys.argv):  # flags may not be parsed yet
        say(*traceback.format_exc().splitlines(), error=True)
    say(f"error: {' '.join(message.split())}", error=True)
    if jax.distributed.is_initialized():
        os._exit(2)  # leaving in the usual way would wait for the other processes
    sys.exit(2)
