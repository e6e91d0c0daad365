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

ENDING = (signal.SIGINT, signal.SIGTERM)
GRACE = 0.5  # seconds that Python has to call a handler


class _Stop(NamedTuple):
    """Asks for a stop once, and leaves the next Ctrl-C to the earlier handler."""

    requested: threading.Event
    earlier: Any

    def ask(self, number: int, frame: object) -> None:
        """Handles a signal."""
        self.requested.set()
        signal.signal(signal.SIGINT, self.again if callable(self.earlier) else self.earlier)

    def again(self, number: int, frame: object) -> None:
        """Handles the next Ctrl-C."""
        self.earlier(number, frame)


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
    """Makes Ctrl-C and SIGTERM end the process at once: files are whole, threads would go on.

    Python calls a handler between two steps of its own code, and a whole compilation is one step.
    So a thread hears of each signal, too, and ends the process if the handler does not.
    """
    if not _in_main_thread():
        return
    for number in ENDING:
        signal.signal(number, _end_at_once)
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told)
    threading.Thread(target=_hear, args=(heard,), daemon=True).start()
    os.register_at_fork(after_in_child=_be_child)


def _hear(heard: int) -> None:
    """Ends the process at a signal whose handler is `_end_at_once` but waits to be called."""
    while number := os.read(heard, 1):
        # Read now, because a command that stops at the signal soon puts the handlers back.
        if signal.getsignal(number[0]) is not _end_at_once:
            continue
        time.sleep(GRACE)
        if signal.getsignal(number[0]) is _end_at_once:
            _end_at_once(number[0], None)


def _be_child() -> None:
    """Undoes it in a fork, whose signals would otherwise end its parent."""
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGTERM) is _end_at_once:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


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
