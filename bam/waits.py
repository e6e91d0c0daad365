"""Waits: what takes a while is said in a line that ends in what came of it.

A log is a function of a line. That of a command, `bam.cli.console.show`, is a `Screen`: it can draw
a line that is not at its end. It is told what is awaited, as `compiling the step …`, and then how
that ended, as `compiling the step … 11 s, kept in the cache`. Any other log hears of no wait.
"""

import collections
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

PATIENCE = 3.0  # seconds that are not worth a line which stays
SOON = 0.5  # seconds that are not worth one which goes
TICK = 1.0  # seconds between two looks at the clock
BAR = 20  # cells

Log = Callable[[str], None]

# What JAX says of its cache on disk -> how a line on compiling ends. The second is said only of
# programs that are written.
_EVENTS = {
    "/jax/compilation_cache/cache_hits": ", from the cache",
    "/jax/compilation_cache/cache_misses": ", kept in the cache",
}


@runtime_checkable
class Screen(Protocol):
    """A log of lines that are not all at their ends."""

    def __call__(self, line: str) -> None:
        """Prints a line."""

    def draw(self, line: str) -> None:
        """Prints one that the next goes on with, or in its place; "" is its end."""

    def draws_in_place(self) -> bool:
        """Whether a line can be replaced, as on a terminal."""


class Wait:
    """What is awaited, and how far it is.

    Attributes:
      what: for a line, such as "compiling the step".
      about: seconds that it will take, as an estimate; 0: nobody knows.
      share: how much of it is done, from 0 to 1, by whoever counts; None: the estimate says.
      outcome: what the line ends with, behind the seconds.
    """

    def __init__(self, what: str, about: float = 0.0) -> None:
        """Begins now."""
        self.what, self.about = what, about
        self.share: float | None = None
        self.outcome = ""
        self.began = time.monotonic()

    @property
    def seconds(self) -> float:
        """How long it takes already."""
        return time.monotonic() - self.began

    def begin(self) -> str:
        """The line that says what is awaited."""
        return f"{self.what}, about {in_words(self.about)} …" if self.about else f"{self.what} …"

    def progress(self) -> str:
        """The same with a bar, or with the seconds if nobody knows how far it is."""
        share = self.share
        if share is None and self.about:
            share = min(self.seconds / self.about, 0.99)
        if share is None:
            return f"{self.begin()} {self.seconds:.0f} s"
        full = round(BAR * share)
        return f"{self.begin()} {'━' * full}{'─' * (BAR - full)} {share:.0%}"

    def end(self) -> str:
        """The same, and how it ended."""
        return f"{self.begin()} {in_words(self.seconds)}{self.outcome}"


@contextlib.contextmanager
def awaited(log: Log, what: str, about: float = 0.0, stays: bool = True) -> Iterator[Wait]:
    """Tells a log what is awaited, if that takes longer than `PATIENCE`, and how it ended.

    A terminal shows it from `SOON` on: with a bar, if `about` or the `share` that is set meanwhile
    says how far it is. Unless `stays`, the line leaves a terminal at the end. What raises has no
    end to tell.
    """
    wait, over, is_shown = Wait(what, about), threading.Event(), threading.Event()
    if not isinstance(log, Screen):
        yield wait
        return
    screen, in_place = log, log.draws_in_place()

    def show() -> None:
        if over.wait(SOON if in_place else PATIENCE):
            return
        is_shown.set()
        with contextlib.suppress(OSError):  # whoever prints next is told
            screen.draw(wait.begin())
            while in_place and not over.wait(TICK):
                screen.draw(wait.progress())

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield wait
    finally:
        over.set()
        thread.join()
    if is_shown.is_set() and in_place and not (stays and wait.seconds > PATIENCE):
        screen.draw("")
    elif is_shown.is_set():
        log(wait.end())


@contextlib.contextmanager
def compiling(log: Log, what: str) -> Iterator[Wait]:
    """`awaited`, whose end says whether JAX's cache on disk had the program, or has it now."""
    events = _cache_events()
    before = events.copy()
    with awaited(log, f"compiling {what}") as wait:
        yield wait
        for event, outcome in _EVENTS.items():
            if events[event] > before[event]:
                wait.outcome = outcome


@functools.cache
def _cache_events() -> collections.Counter[str]:
    """How often JAX's cache had a program, or was given one, since this is first asked."""
    import jax

    counts: collections.Counter[str] = collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **facts: counts.update([event]))
    return counts


def in_words(seconds: float) -> str:
    """Seconds, minutes or hours: two digits are enough.

    Examples:
      >>> [in_words(x) for x in (0.74, 11.2, 400, 7900)]
      ['0.7 s', '11 s', '7 min', '2.2 h']
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
