"""What every command shares: flags, mistakes in one line, exit statuses, a compilation cache."""

import contextlib
import difflib
import itertools
import logging
import math
import os
import re
import shutil
import signal
import stat
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from absl import flags

from bam.cli import options
from bam.errors import InputError
from bam.extras import MissingExtraError, needs
from bam.files import JsonObject, check_replaceable, visible
from bam.training import named_configs
from bam.training.keys import KEYS

# Folders of code: of bam's own, and of other libraries, among which it may be installed.
_BAM = Path(__file__).resolve().parents[1]
_LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
FAULT = 1
BAD_INPUT = 2
STOPPED = 3  # of a run that the same command goes on with
INTERRUPTED = 130  # of any other command at Ctrl-C, as shells have it
UNREAD = 141  # nobody reads what it prints, as shells have it

Body = Callable[..., int | None]  # of a command: its flags, and what follows them -> exit status


def command(name: str, argv: Sequence[str], body: Body) -> int:
    """Runs a command; returns its exit status, whatever happens.

    Nothing of it stays for the next: its flags are values of their own, and what it changes of the
    process for its time is put back. `body` is called with the flags and, if the command takes
    them, the arguments that follow. `--help` is answered without it.
    """
    asked = options.COMMANDS[name]
    values = flags.FlagValues()

    def run() -> int | None:
        if options.asks_for_help(argv):
            show(options.help_of(name))
            return 0
        options.define(values, (*asked.flags, options.DEBUG))
        rest = parse(values, argv, f"bam {name}")
        if rest and not asked.positional:
            raise InputError(f"{rest[0]!r} is no flag; --help shows them")
        for flag in asked.flags:
            if flag.required and values[flag.name].value in (None, "", []):
                raise InputError(f"--{flag.name} is required: {flag.help}")
        for rule in asked.rules:
            if not rule.holds(values):
                raise InputError(rule.message)
        use_all_cores()
        return body(values, rest) if asked.positional else body(values)

    return guarded(run, _has_debug(argv))


def run(main: Callable[[], None], defaults: Sequence[str] = ()) -> NoReturn:
    """Runs a script's `main` with absl's global flags, as a command is run; ends the process.

    `defaults` are flags for what the command line does not say.
    """
    given = {_name(argument) for argument in sys.argv[1:]}
    argv = [*(x for x in defaults if _name(x) not in given), *sys.argv[1:]]

    def body() -> None:
        if options.asks_for_help(argv):
            show("\n".join([sys.modules["__main__"].__doc__ or "", *_lines_of(flags.FLAGS)]))
            return
        if "debug" not in flags.FLAGS:
            options.define(flags.FLAGS, [options.DEBUG])
        rest = parse(flags.FLAGS, argv, sys.argv[0])
        if rest:
            raise InputError(f"{rest[0]!r} is no flag; --help shows them")
        use_all_cores()
        main()

    end_at_interrupts()
    leave(guarded(body, _has_debug(argv)))


def guarded(run: Callable[[], int | None], debug: bool = False) -> int:
    """The exit status of `run`, whose errors are printed: bad input in one line, a fault in full.

    What it changes of signals, warnings, logging and environment is put back.
    """
    with _put_back():
        try:
            with one_line_errors(debug):
                status = run() or 0
                sys.stdout.flush()
                return status
        except SystemExit as end:
            if isinstance(end.code, str):
                say(end.code, error=True)
            return end.code if isinstance(end.code, int) else FAULT if end.code else 0
        except BrokenPipeError:
            return UNREAD
        except KeyboardInterrupt:
            say("error: interrupted", error=True)
            return INTERRUPTED
        except Exception:
            say(*traceback.format_exc().rstrip("\n").split("\n"), error=True)
            return FAULT


def leave(status: int) -> NoReturn:
    """Ends the process."""
    if status == UNREAD:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    jax = sys.modules.get("jax")
    if status == BAD_INPUT and jax and jax.distributed.is_initialized():
        sys.stdout.flush()
        os._exit(BAD_INPUT)  # leaving in the usual way would wait for the other processes
    sys.exit(status)


@contextlib.contextmanager
def _put_back() -> Iterator[None]:
    """Shows warnings in one line; at the end, puts back what commands change of the process."""
    numbers = (signal.SIGINT, signal.SIGTERM) if _in_main_thread() else ()
    handlers = {number: signal.getsignal(number) for number in numbers}
    formatwarning, environ = warnings.formatwarning, dict(os.environ)
    modules = named_configs.imported()
    # Which accelerators are absent is no news.
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
            if handler is not None:  # None: not of Python's
                signal.signal(number, handler)
        if environ != dict(os.environ):
            os.environ.clear()
            os.environ.update(environ)


def _warning(message: Warning | str, *where: Any, **more: Any) -> str:
    """A warning in a line of its own, which Python prints."""
    show.draw("")
    return f"warning: {visible(str(message))}\n"


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_printing = threading.RLock()  # a wait is drawn by a thread, an interrupt may be in the way


class _Unended(NamedTuple):
    """A line of standard output that is not at its end: that of a wait, see `bam.waits`."""

    file: Any = None
    text: str = ""

    def end(self, begins: str = "") -> str:
        """Ends the line, and returns what is to be printed of one that begins so.

        A terminal forgets it, for the next one or the same in full. In a file it is gone on with.
        """
        if not self.text or self.file is not sys.stdout:
            return begins
        if show.draws_in_place():
            self.file.write("\r\x1b[K")
        elif begins.startswith(self.text):
            return begins[len(self.text) :]
        else:
            self.file.write("\n")
        self.file.flush()
        return begins


_unended = _Unended()


def say(*lines: str, error: bool = False) -> None:
    """Prints lines, on standard error if so: the one way for a command to print.

    Names in them may be a stranger's. They add no line, and nothing that a terminal obeys or hides.
    """
    global _unended
    if not lines:
        return
    with _printing:
        text = "\n".join(map(visible, lines))
        text = _unended.end() + text if error else _unended.end(text)
        _unended = _Unended()
        print(text, file=sys.stderr if error else None, flush=True)


class _Log:
    """Prints a text of several lines, each as `say` does: for what is ours, as a plan is."""

    def __call__(self, text: str) -> None:
        """Prints it."""
        say(*text.split("\n"))

    def draw(self, line: str) -> None:
        """Prints a line that the next one goes on with, or on a terminal replaces; "" ends it."""
        global _unended
        with _printing:
            line = visible(line)
            if self.draws_in_place():  # where a line that is too long would become two
                line = line[: shutil.get_terminal_size().columns - 1]
            print(_unended.end(line), end="", flush=True)
            _unended = _Unended(sys.stdout, line)

    def draws_in_place(self) -> bool:
        """Whether a line can be replaced, as on a terminal."""
        return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


show = _Log()


def require(*names: str) -> None:
    """Declares global flags without which a script ends, before any work, in a line."""
    for name in names:
        message = f"--{name} is required: {flags.FLAGS[name].help}"
        ensure((name,), lambda value: value not in (None, "", []), message)


def ensure(names: Sequence[str], holds: Callable[..., bool], message: str) -> None:
    """Declares what must hold of some global flags; otherwise `message` is the error."""

    def check(values: JsonObject) -> bool:
        if not holds(*(values[name] for name in names)):
            raise InputError(message)  # absl's own error would list all values first
        return True

    flags.register_multi_flags_validator(names, check)


@contextlib.contextmanager
def one_line_errors(debug: bool | None = None) -> Iterator[None]:
    """Turns what a user can get wrong into `error: …` on standard error and exit status 2.

    That is an InputError, what the system does not do (`OSError`), and an extra that is missing.
    With `debug` (None: with `--debug`) the traceback stands above it. Anything else is a fault: it
    keeps its traceback, which ends by saying whose it is.
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
    """What to do about memory or processes that are gone, if the error is of those; or ""."""
    text, jax = " ".join(str(error).split()), sys.modules.get("jax")
    from_jax = jax is not None and isinstance(error, jax.errors.JaxRuntimeError)
    if isinstance(error, MemoryError) or (from_jax and "RESOURCE_EXHAUSTED" in text):
        advice = "lower microbatch_size, augment.views or the model's size"
        return f"there is not enough memory: {advice} ({text[:200]})"
    if from_jax and jax and jax.process_count() > 1:
        return f"a process of this run was lost; start all again to go on ({text[:200]})"
    return ""


def _whose(error: Exception) -> str:
    """Whose fault it is: bam's, also inside of a library, or that of code of a user's own."""
    frames = traceback.extract_tb(error.__traceback__)
    file = frames[-1].filename if frames else ""
    known = not file or file.startswith("<frozen") or Path(file).is_relative_to(_BAM)
    if known or any(map(Path(file).is_relative_to, _LIBRARIES)):
        return "This is a fault of bam: please report it with all lines above."
    return f"This is a fault of {file}, which is no code of bam's."


def _fail(message: str, debug: bool | None) -> NoReturn:
    """Ends the command in one line, below the traceback of the error at hand with `--debug`."""
    if _has_debug(sys.argv) if debug is None else debug:
        say(*traceback.format_exc().splitlines(), error=True)
    say(f"error: {' '.join(message.split())}", error=True)
    sys.exit(BAD_INPUT)


def parse(values: flags.FlagValues, argv: Sequence[str], program: str) -> list[str]:
    """Parses flags, and makes the config that `--config` names; returns what follows them.

    InputError for a flag that there is not, one that is given twice or cannot have its value, and
    for a key that the config has not.
    """
    try:
        args = [_from_home(x) for x in values.read_flags_from_files(list(argv))]
        _check_given_once(values, args)
        if "config" in values and "config" in map(_name, args):
            _take_config(values, args)
        rest: list[str] = values([program, *args])
        return rest[1:]
    except flags.UnrecognizedFlagError as error:
        raise InputError(_unknown(error.flagname, values)) from None
    except flags.Error as error:
        refused = error.__context__ if isinstance(error, flags.IllegalFlagValueError) else None
        if isinstance(refused, InputError):  # by a flag's own parser: absl wraps it
            raise refused from None
        raise InputError(str(error)) from None


def _take_config(values: flags.FlagValues, args: list[str]) -> None:
    """Makes the text flag `config` one of `ml_collections`, which sets keys by `--config.KEY`."""
    with needs("train"):
        from ml_collections import ConfigDict, config_flags

    class Config(flags.ArgumentParser):
        """Loads a config, and refuses keys that it has not before any is set."""

        def parse(self, value: str) -> ConfigDict:
            from bam.training.config import add_options

            config = named_configs.load(value)
            add_options(config, dict(_overrides(args)))
            for key, text in _overrides(args):
                _check_key(config, key, text)
            config.lock()
            return config

    about = values["config"].help
    delattr(values, "config")
    config_flags.DEFINE_config_file("config", None, about, flag_values=values, sys_argv=["", *args])
    values["config"].parser = Config()


def config_given(values: flags.FlagValues) -> tuple[str, JsonObject]:
    """The file that `--config` names, and what `--config.KEY=VALUE` sets."""
    from ml_collections import config_flags

    flag = values["config"]
    file = named_configs.file_of(config_flags.get_config_filename(flag)).partition(":")[0]
    return file, config_flags.get_override_values(flag)


def _overrides(args: Sequence[str]) -> list[tuple[str, str]]:
    """The keys that `--config.KEY` sets, and to which text."""
    overrides = []
    for argument, after in itertools.zip_longest(args, [*args][1:], fillvalue="-"):
        if match := re.match(r"--?(?:no)?config\.([^=]*)(=?)(.*)", argument):
            in_two = not match[2] and not after.startswith("-")  # --config.KEY VALUE
            overrides.append((match[1], after if in_two else match[3]))
    return overrides


def _check_key(config: Any, key: str, text: str) -> None:
    """InputError for a key that a config has not, or for a section that is set to a word."""
    flat = [*config.to_dict()]
    for section in [x for x in flat if hasattr(config[x], "keys")]:
        flat += [f"{section}.{name}" for name in config[section]]
    place = config
    for part in key.split("."):
        if not hasattr(place, "keys") or part not in place:
            raise InputError(f"the config has no key {key!r}{_near(key, flat)}")
        place = place[part]
    if hasattr(place, "keys") and not text.startswith("{"):
        raise InputError(f"{key} is a section of the config: set a key of it, as {key}.name")


def _check_given_once(values: flags.FlagValues, args: Sequence[str]) -> None:
    """InputError for a flag that is given twice, of which one value would be dropped."""
    seen = set()
    for name in filter(None, map(_name, args[: args.index("--")] if "--" in args else args)):
        if name not in values and name.removeprefix("no") in values:
            name = name.removeprefix("no")
        if name in seen and not (name in values and isinstance(values[name], flags.MultiFlag)):
            raise InputError(f"--{name} is given twice: say it once")
        seen.add(name)


def _unknown(name: str, values: flags.FlagValues) -> str:
    """What is wrong with a flag that there is not, and what may have been meant."""
    ours = _ours(values)
    keys = [key.name for key in KEYS] if "config" in values else []
    if meant := [key for key in keys if name in (key, key.rpartition(".")[2])]:
        return f"--{name} is a key of the config: say --config.{meant[0]}"
    if name.startswith("config."):
        needed = "name the config first, by --config" if keys else "this command takes no config"
        return f"--{name}: {needed}"
    return f"--{name} is no flag{_near(name, [*ours, *keys], '--') or '; --help shows them'}"


def _ours(values: flags.FlagValues) -> list[str]:
    """The names of flags that are not of libraries, of which the global ones have many."""
    of = {name: str(values.find_module_defining_flag(name)) for name in values}
    return [name for name, module in of.items() if not module.startswith(("absl.", "orbax."))]


def _near(name: str, known: Iterable[str], dashes: str = "") -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f": did you mean {dashes}{near[0]}?" if near else ""


def _name(argument: str) -> str:
    """The name of the flag that an argument gives, "" if it gives none."""
    return argument.lstrip("-").partition("=")[0] if argument.startswith("-") else ""


def _has_debug(argv: Sequence[str]) -> bool:
    return any(x in ("-debug", "--debug") for x in argv)


def _lines_of(values: flags.FlagValues) -> list[str]:
    """The help of a script's flags."""
    ours = _ours(values)
    rows = (options.Flag(x, values[x].default, values[x].help or "") for x in ours)
    return options.flag_lines(rows)


def check_writable(file: str) -> None:
    """Refuses, with an OSError, a file ("": none) that could not be written, before any work."""
    if not file:
        return
    folder = Path(file).parent
    folder.mkdir(parents=True, exist_ok=True)
    check_replaceable(Path(file))
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{file} cannot be written")


class _Stop(NamedTuple):
    """What signals ask for a stop; the next Ctrl-C is left to the handler before."""

    asked: threading.Event
    before: Any

    def ask(self, number: int, frame: object) -> None:
        """Handles a signal."""
        self.asked.set()
        signal.signal(signal.SIGINT, self.before)


def stop_after(max_seconds: float) -> Callable[[], bool]:
    """A `should_stop` for training: true after a time (0: never), at SIGTERM or at Ctrl-C.

    A second Ctrl-C does what it did before. Signals are the main thread's: in another one time
    alone counts.
    """
    deadline = time.monotonic() + (max_seconds or math.inf)
    terminated = threading.Event()
    if _in_main_thread():
        now = signal.getsignal(signal.SIGINT)
        earlier = getattr(now, "__self__", None)
        stop = _Stop(terminated, earlier.before if isinstance(earlier, _Stop) else now)
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, stop.ask)
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
    import jax

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
    import jax

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


def use_all_cores() -> None:
    """Makes a JAX device of every CPU core, up to eight, for the examples of a step to share.

    One example per core is faster than one example on all cores. `JAX_NUM_CPU_DEVICES` sets
    another number, and so does whoever has set JAX's own option or started JAX; accelerators are
    not affected.
    """
    jax = sys.modules.get("jax")
    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if jax is None or forced or "JAX_NUM_CPU_DEVICES" in os.environ:
        return
    from jax._src import xla_bridge  # to ask in another way would start it

    if jax.config.jax_num_cpu_devices < 0 and not xla_bridge.backends_are_initialized():
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        jax.config.update("jax_num_cpu_devices", min(8, cores))


def end_at_interrupts() -> None:
    """Has Ctrl-C end the process at once: what is written is all or nothing, threads would last."""
    if _in_main_thread():
        signal.signal(signal.SIGINT, _end_at_once)


def _end_at_once(number: int, frame: object) -> None:
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)  # a bar of progress hides the cursor
    say("error: interrupted", error=True)
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def clearing() -> Iterator[None]:
    """For its time, a signal that ends the process is an exception, so that `finally` clears up.

    Further signals wait for that.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if _in_main_thread() else ()
    before = {number: signal.getsignal(number) for number in numbers}

    def end(number: int, frame: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _from_home(argument: str) -> str:
    """`--workdir=~/runs`, of which a shell would make a folder called `~`, from the home folder.

    A config keeps such a path as it was written; `bam.files.user_path` reads it.
    """
    name, equals, value = argument.partition("=")
    if name.lstrip("-").startswith("config"):
        return argument
    return name + equals + ",".join(map(os.path.expanduser, value.split(",")))
