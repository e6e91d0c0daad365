"""Shared by all commands: parsed flags, one-line errors, exit statuses, a compilation cache."""

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
from bam.files import JsonObject, check_replaceable
from bam.text import visible
from bam.training import named_configs
from bam.training.keys import KEYS

# Folders of bam's code and of other libraries; bam may be installed among these.
_BAM = Path(__file__).resolve().parents[1]
_LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
FAULT = 1
BAD_INPUT = 2
STOPPED = 3  # the same command continues the run
INTERRUPTED = 130  # Ctrl-C ended the command: 128 + SIGINT, as in shells
UNREAD = 141  # nobody reads the output: 128 + SIGPIPE, as in shells

Body = Callable[..., int | None]  # (flags) or (flags, arguments) -> exit status


def command(name: str, argv: Sequence[str], body: Body) -> int:
    """Runs a command; returns its exit status, whatever happens.

    The next command starts as this one did: its flags are values of their own, and its changes to
    the process are put back. `body` is called with the flags and, if the command is `positional`,
    with the arguments after them. `--help` prints the help without calling it.
    """
    row = options.COMMANDS[name]
    values = flags.FlagValues()

    def run() -> int | None:
        if options.asks_for_help(argv):
            show(options.help_of(name))
            return 0
        options.define(values, (*row.flags, options.DEBUG))
        rest = parse(values, argv, f"bam {name}")
        if rest and not row.positional:
            raise InputError(_unexpected(rest[0]))
        for flag in row.flags:
            if flag.required and values[flag.name].value in (None, "", []):
                raise InputError(f"--{flag.name} is required: {flag.help}")
        for rule in row.rules:
            if not rule.holds(values):
                raise InputError(rule.message)
        use_all_cores()
        return body(values, rest) if row.positional else body(values)

    return guarded(run, _has_debug(argv))


def run(main: Callable[[], None], defaults: Sequence[str] = ()) -> NoReturn:
    """Runs a script's `main` with absl's global flags, as a command is run; ends the process.

    `defaults` are flags such as "--num_steps=9", each used unless the command line sets it.
    """
    names = {_name(argument) for argument in sys.argv[1:]}
    argv = [*(x for x in defaults if _name(x) not in names), *sys.argv[1:]]

    def body() -> None:
        if options.asks_for_help(argv):
            show("\n".join([sys.modules["__main__"].__doc__ or "", *_lines_of(flags.FLAGS)]))
            return
        if "debug" not in flags.FLAGS:
            options.define(flags.FLAGS, [options.DEBUG])
        rest = parse(flags.FLAGS, argv, sys.argv[0])
        if rest:
            raise InputError(_unexpected(rest[0]))
        use_all_cores()
        main()

    end_at_interrupts()
    leave(guarded(body, _has_debug(argv)))


def guarded(run: Callable[[], int | None], debug: bool = False) -> int:
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
        # Python flushes standard output at exit, which would fail again on the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    jax = sys.modules.get("jax")
    if status == BAD_INPUT and jax and jax.distributed.is_initialized():
        sys.stdout.flush()
        os._exit(BAD_INPUT)  # sys.exit would wait for the other processes of the run
    sys.exit(status)


@contextlib.contextmanager
def _put_back() -> Iterator[None]:
    """Prints warnings in one line each; at the end, undoes a command's changes to the process."""
    numbers = (signal.SIGINT, signal.SIGTERM) if _in_main_thread() else ()
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
    show.draw("")
    return f"warning: {visible(str(message))}\n"


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


# Reentrant: a thread draws waits, and a signal handler can print while the main thread prints.
_printing = threading.RLock()


class _Unended(NamedTuple):
    """An unfinished line on standard output: that of a wait, see `bam.waits`."""

    file: Any = None
    text: str = ""

    def end(self, begins: str = "") -> str:
        """Ends the line, and returns the part of the next line `begins` that is left to print.

        On a terminal it erases the line, and all of `begins` is left. In a file the next line
        continues it if it begins with the same text; otherwise it ends the line.
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
    """Prints lines, on standard error if `error`; commands print only through this function.

    A line may hold file names of a stranger, so `visible` escapes line ends and control characters.
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
    """Prints a text of several lines, each by `say`; for texts of bam's own, such as a plan."""

    def __call__(self, text: str) -> None:
        """Prints a text."""
        say(*text.split("\n"))

    def draw(self, line: str) -> None:
        """Prints an unfinished line, which the next one continues (on a terminal: replaces)."""
        global _unended
        with _printing:
            line = visible(line)
            if self.draws_in_place():  # a wrapped line would be two, and only one is erased
                line = line[: shutil.get_terminal_size().columns - 1]
            print(_unended.end(line), end="", flush=True)
            _unended = _Unended(sys.stdout, line)

    def draws_in_place(self) -> bool:
        """Whether a line can be replaced, as on a terminal."""
        return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


show = _Log()


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
        say(*traceback.format_exc().splitlines(), error=True)
    say(f"error: {' '.join(message.split())}", error=True)
    sys.exit(BAD_INPUT)


def parse(values: flags.FlagValues, argv: Sequence[str], program: str) -> list[str]:
    """Parses flags into `values`, makes the config that `--config` names, returns other arguments.

    InputError for an unknown flag, a flag that is set twice, a value that a flag cannot have, and a
    key that the config lacks.
    """
    try:
        args = [_from_home(x) for x in values.read_flags_from_files(list(argv))]
        _check_set_once(values, args)
        if has_config := "config" in values and "config" in map(_name, args):
            _take_config(values, args)
        rest: list[str] = values([program, *args])
        if has_config:  # a flag may replace a whole section, which then lacks keys
            from bam.training.config import complete

            complete(values.config)
        return rest[1:]
    except flags.UnrecognizedFlagError as error:
        raise InputError(_unknown(error.flagname, values)) from None
    except flags.Error as error:
        refused = error.__context__ if isinstance(error, flags.IllegalFlagValueError) else None
        if isinstance(refused, InputError):  # absl wraps the errors of a flag's parser
            raise refused from None
        raise InputError(str(error)) from None


def _take_config(values: flags.FlagValues, args: list[str]) -> None:
    """Replaces the string flag `config` by one of `ml_collections`, which reads `--config.KEY`."""
    with needs("train"):
        from ml_collections import ConfigDict, config_flags

    class Config(flags.ArgumentParser):
        """Loads a config, and refuses unknown keys before any key is set."""

        def parse(self, value: str) -> ConfigDict:
            from bam.training.config import add_options

            config, overrides = named_configs.load(value), _overrides(args)
            add_options(config, dict(overrides))
            for key, text in overrides:
                _check_key(config, key, text)
                if inside := [x for x, _ in overrides if x.startswith(f"{key}.")]:
                    raise InputError(
                        f"--config.{key} replaces the whole section: set {inside[0]} in it, and "
                        f"leave out --config.{inside[0]}"
                    )
            config.lock()
            return config

    about = values["config"].help
    delattr(values, "config")
    config_flags.DEFINE_config_file("config", None, about, flag_values=values, sys_argv=["", *args])
    values["config"].parser = Config()


def config_given(values: flags.FlagValues) -> tuple[str, JsonObject]:
    """The file that `--config` names, and the keys that `--config.KEY=VALUE` sets."""
    from ml_collections import config_flags

    flag = values["config"]
    file = named_configs.file_of(config_flags.get_config_filename(flag)).partition(":")[0]
    return file, config_flags.get_override_values(flag)


def _overrides(args: Sequence[str]) -> list[tuple[str, str]]:
    """The keys that `--config.KEY=VALUE` sets, each with its value as text."""
    overrides = []
    for argument, after in itertools.zip_longest(args, [*args][1:], fillvalue="-"):
        if match := re.match(r"--?(?:no)?config\.([^=]*)(=?)(.*)", argument):
            in_two = not match[2] and not after.startswith("-")  # --config.KEY VALUE
            overrides.append((match[1], after if in_two else match[3]))
    return overrides


def _check_key(config: Any, key: str, text: str) -> None:
    """InputError for a key that a config lacks, or for a section that is set to a word."""
    flat = [*config.to_dict()]
    for section in [x for x in flat if hasattr(config[x], "keys")]:
        flat += [f"{section}.{name}" for name in config[section]]
    place = config
    for part in key.split("."):
        if not hasattr(place, "keys") or part not in place:
            raise InputError(f"the config has no key {key!r}{_near(key, flat)}")
        place = place[part]
    if hasattr(place, "keys") and not text.startswith("{"):
        keys = ", ".join(place)
        raise InputError(f"{key} is a section of the config: set --config.{key}.KEY, KEY of {keys}")


def _check_set_once(values: flags.FlagValues, args: Sequence[str]) -> None:
    """InputError for a flag that is set twice, because only one value would count."""
    seen = set()
    for name in filter(None, map(_name, args[: args.index("--")] if "--" in args else args)):
        if name not in values and name.removeprefix("no") in values:
            name = name.removeprefix("no")
        if name in seen and not (name in values and isinstance(values[name], flags.MultiFlag)):
            raise InputError(f"--{name} is given twice: give it once")
        seen.add(name)


def _unknown(name: str, values: flags.FlagValues) -> str:
    """The error for an unknown flag, with the flag or the key that may be meant."""
    ours = _ours(values)
    keys = [key.name for key in KEYS] if "config" in values else []
    if meant := [key for key in keys if name in (key, key.rpartition(".")[2])]:
        return f"--{name} is a key of the config: write --config.{meant[0]}"
    if name.startswith("config."):
        needed = "name the config first, by --config" if keys else "this command takes no config"
        return f"--{name}: {needed}"
    return f"--{name} is not a flag{_near(name, [*ours, *keys], '--') or ': see --help'}"


def _unexpected(argument: str) -> str:
    """The error for an argument of a command that takes only flags."""
    return f"{argument!r} is not a flag: see --help"


def _ours(values: flags.FlagValues) -> list[str]:
    """The names of bam's flags: libraries define many others among absl's global ones."""
    modules = {name: str(values.find_module_defining_flag(name)) for name in values}
    return [name for name, module in modules.items() if not module.startswith(("absl.", "orbax."))]


def _near(name: str, names: Iterable[str], dashes: str = "") -> str:
    """A question with the name of `names` that resembles `name`; "" if none does."""
    near = difflib.get_close_matches(name, list(names), 1)
    return f": did you mean {dashes}{near[0]}?" if near else ""


def _name(argument: str) -> str:
    """The name of the flag in an argument, "" if that is not a flag."""
    return argument.lstrip("-").partition("=")[0] if argument.startswith("-") else ""


def _has_debug(argv: Sequence[str]) -> bool:
    return any(x in ("-debug", "--debug") for x in argv)


def _lines_of(values: flags.FlagValues) -> list[str]:
    """The help of a script's flags."""
    ours = _ours(values)
    rows = (options.Flag(x, values[x].default, values[x].help or "") for x in ours)
    return options.flag_lines(rows)


def check_writable(file: str) -> None:
    """OSError for a file ("": none) that cannot be written; called before any work."""
    if not file:
        return
    folder = Path(file).parent
    folder.mkdir(parents=True, exist_ok=True)
    check_replaceable(Path(file))
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{file} cannot be written")


class _Stop(NamedTuple):
    """A signal handler that asks for a stop once; the next Ctrl-C goes to the earlier handler."""

    requested: threading.Event
    earlier: Any

    def ask(self, number: int, frame: object) -> None:
        """Handles a signal."""
        self.requested.set()
        signal.signal(signal.SIGINT, self.earlier)


def stop_after(max_seconds: float) -> Callable[[], bool]:
    """A `should_stop` for training: true after some seconds (0: never), SIGTERM or Ctrl-C.

    A second Ctrl-C goes to the handler from before this call. Python handles signals only in the
    main thread, so in other threads only the time counts.
    """
    deadline = time.monotonic() + (max_seconds or math.inf)
    requested = threading.Event()
    if _in_main_thread():
        handler = signal.getsignal(signal.SIGINT)
        owner = getattr(handler, "__self__", None)
        stop = _Stop(requested, owner.earlier if isinstance(owner, _Stop) else handler)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop.ask)
    return lambda: requested.is_set() or time.monotonic() >= deadline


def join_processes(
    coordinator: str, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Joins this process to others that train together, through `jax.distributed`.

    If one of them dies, the others end within half a minute. `coordinator` is "HOST:PORT" of the
    first process; "auto", without the two numbers, if SLURM, Kubernetes, Cloud TPU or MPI sets
    them; or "" for a single process. InputError if these do not describe a set of processes,
    OSError if the other processes cannot be reached.
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
            raise InputError(
                "--coordinator=auto found no SLURM, Kubernetes, Cloud TPU or MPI: set "
                "--coordinator=HOST:PORT"
            ) from None
        if "process_id" in text:
            raise InputError(text) from None
        raise OSError(f"could not join the processes at {coordinator}: {text}") from None


def use_compilation_cache() -> None:
    """Keeps compiled programs in a folder of the user, so that the second run starts at once.

    JAX runs the programs in this folder without a check, so it never comes with data or code: it is
    `bam/jax` in `$XDG_CACHE_HOME` or, without that, in `~/.cache`. If another user owns it or may
    write to it, it is not used and a warning says so. The environment variable
    JAX_COMPILATION_CACHE_DIR names another folder, which is not checked.
    """
    import jax

    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    folder = Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")) / "bam" / "jax"
    try:
        for part in (folder.parent, folder):
            part.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(part)
    except OSError as error:
        say(
            f"warning: compiled programs are not cached, so the next run compiles again: {error}",
            error=True,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _check_owner(folder: Path) -> None:
    """PermissionError if a folder belongs to another user, or if others can write to it."""
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users can write to {folder}: chmod 700 {folder}")


def use_all_cores() -> None:
    """Makes a JAX device of every CPU core, up to eight, so that a step's examples share the cores.

    One example per core is faster than one example on all cores. `JAX_NUM_CPU_DEVICES` sets another
    number. Nothing changes if JAX's own option is set or JAX has started. Accelerators are not
    affected.
    """
    jax = sys.modules.get("jax")
    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if jax is None or forced or "JAX_NUM_CPU_DEVICES" in os.environ:
        return
    from jax._src import xla_bridge  # any public function would start JAX

    if jax.config.jax_num_cpu_devices < 0 and not xla_bridge.backends_are_initialized():
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        jax.config.update("jax_num_cpu_devices", min(8, cores))


def end_at_interrupts() -> None:
    """Makes Ctrl-C end the process at once: its files are whole, and its threads would go on."""
    if _in_main_thread():
        signal.signal(signal.SIGINT, _end_at_once)


def _end_at_once(number: int, frame: object) -> None:
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)  # a bar of progress hides the cursor
    say("error: interrupted", error=True)
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def clearing() -> Iterator[None]:
    """Turns signals that end the process into an exception, so that `finally` blocks clean up.

    After the first signal, others are ignored until the context ends.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if _in_main_thread() else ()
    handlers = {number: signal.getsignal(number) for number in numbers}

    def end(number: int, frame: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number, handler in handlers.items():
        if handler != signal.SIG_IGN:  # nohup ignores SIGHUP, and so it stays
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _from_home(argument: str) -> str:
    """Expands `~` in a flag's value, which shells leave alone in `--workdir=~/runs`.

    Values of a config stay as they are written; `bam.files.user_path` expands them when they are
    read.
    """
    name, equals, value = argument.partition("=")
    if name.lstrip("-").startswith("config"):
        return argument
    return name + equals + ",".join(map(os.path.expanduser, value.split(",")))
