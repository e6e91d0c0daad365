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
    """Asks for a stop once, and leaves the next Ctrl-C to the earlier handler."""

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


def end_at_interrupts() -> None:
    """Makes Ctrl-C end the process at once: its files are whole, and its threads would go on."""
    if _in_main_thread():
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
    with put_back(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as handlers:

        def end(number: int, frame: object) -> None:
            for each in handlers:
                signal.signal(each, signal.SIG_IGN)
            raise KeyboardInterrupt

        for number, handler in handlers.items():
            if handler != signal.SIG_IGN:  # nohup ignores SIGHUP, and so it stays
                signal.signal(number, end)
        yield


@contextlib.contextmanager
def put_back(*numbers: signal.Signals) -> Iterator[dict[signal.Signals, Any]]:
    """Yields the handlers of signals, and sets them again at the end.

    In a thread that does not handle signals, it yields none.
    """
    handlers = {x: signal.getsignal(x) for x in numbers} if _in_main_thread() else {}
    try:
        yield handlers
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # None: set outside Python, which cannot set it again
                signal.signal(number, handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
