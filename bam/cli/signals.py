"""Signals: Ctrl-C, SIGTERM and SIGHUP stop a command, end it, or let it clean up."""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from bam.cli import options, screen


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
    if in_main_thread():
        handler = signal.getsignal(signal.SIGINT)
        owner = getattr(handler, "__self__", None)
        stop = _Stop(requested, owner.earlier if isinstance(owner, _Stop) else handler)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop.ask)
    return lambda: requested.is_set() or time.monotonic() >= deadline


def end_at_interrupts() -> None:
    """Makes Ctrl-C end the process at once: its files are whole, and its threads would go on."""
    if in_main_thread():
        signal.signal(signal.SIGINT, _end_at_once)


def _end_at_once(number: int, frame: object) -> None:
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)  # a bar of progress hides the cursor
    screen.say("error: interrupted", error=True)
    os._exit(options.INTERRUPTED)


@contextlib.contextmanager
def as_exceptions() -> Iterator[None]:
    """Turns signals that end the process into an exception, so that `finally` blocks clean up.

    After the first signal, others are ignored until the context ends.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if in_main_thread() else ()
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


def in_main_thread() -> bool:
    """Whether this thread is the one that handles signals."""
    return threading.current_thread() is threading.main_thread()
