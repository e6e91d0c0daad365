"""Waits: work that takes a while has a line in the log, which ends with its outcome.

A log is a function of a line. The commands' log, `bam.cli.screen.show`, is a `Screen`: it can draw
an unfinished line. It gets the task, as `compiling the step …`, and then the outcome, as
`compiling the step … 11 s, kept in the cache`. Any other log gets no line on waits.
"""

import collections
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

KEEP_AFTER = 3.0  # seconds; a shorter wait gets no line that stays
DRAW_AFTER = 0.5  # seconds; a shorter wait gets no line on a terminal either
REDRAW_EVERY = 1.0  # seconds between two drawings of a bar
BAR = 20  # cells

Log = Callable[[str], None]

# JAX's events of its cache on disk -> the end of a line on compiling. JAX records a miss only if
# it writes the program to the cache.
_EVENTS = {
    "/jax/compilation_cache/cache_hits": ", from the cache",
    "/jax/compilation_cache/cache_misses": ", kept in the cache",
}


@runtime_checkable
class Screen(Protocol):
    """A log that can draw unfinished lines."""

    def __call__(self, line: str) -> None:
        """Prints a line."""

    def draw(self, line: str) -> None:
        """Draws a line that the next one continues or replaces.

        The text "" ends or removes the line.
        """

    def draws_in_place(self) -> bool:
        """Whether a line can be replaced, as on a terminal."""


class Wait:
    """A task that takes a while, and its progress.

    Attributes:
      task: its words for a line, such as "compiling the step".
      about: an estimate of its seconds; 0 if there is none.
      share: the finished share, from 0 to 1, set by the task; None takes it from the estimate.
      outcome: the end of the line, after the seconds.
    """

    def __init__(self, task: str, about: float = 0.0) -> None:
        """Begins now."""
        self.task, self.about = task, about
        self.share: float | None = None
        self.outcome = ""
        self.began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    def begin(self) -> str:
        """The unfinished line that names the task."""
        return f"{self.task}, about {in_words(self.about)} …" if self.about else f"{self.task} …"

    def progress(self) -> str:
        """That line with a bar, or with the seconds so far if the share is not known."""
        share = self.share
        if share is None and self.about:
            # A task that outlasts its estimate is not finished, so the bar never says 100 %.
            share = min(self.seconds / self.about, 0.99)
        if share is None:
            return f"{self.begin()} {self.seconds:.0f} s"
        full = round(BAR * share)
        return f"{self.begin()} {'━' * full}{'─' * (BAR - full)} {share:.0%}"

    def end(self) -> str:
        """The finished line: the task, its seconds and the outcome."""
        return f"{self.begin()} {in_words(self.seconds)}{self.outcome}"


@contextlib.contextmanager
def awaited(log: Log, task: str, about: float = 0.0, stays: bool = True) -> Iterator[Wait]:
    """Writes a line on the task within it, if that takes longer than `KEEP_AFTER`, and its outcome.

    A terminal shows the line from `DRAW_AFTER` on, with a bar if `about` or the `share` of the
    yielded `Wait` tells the progress. On a terminal, a line that does not stay, or took less than
    `KEEP_AFTER`, is removed at the end. If the task raises, its line has no outcome.
    """
    wait, over, is_shown = Wait(task, about), threading.Event(), threading.Event()
    if not isinstance(log, Screen):
        yield wait
        return
    screen, in_place = log, log.draws_in_place()

    def show() -> None:
        if over.wait(DRAW_AFTER if in_place else KEEP_AFTER):
            return
        is_shown.set()
        # An error of a closed pipe would end only this thread; the next printed line raises it.
        with contextlib.suppress(OSError):
            screen.draw(wait.begin())
            while in_place and not over.wait(REDRAW_EVERY):
                screen.draw(wait.progress())

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield wait
    finally:
        over.set()
        thread.join()  # so that the lines below do not interleave with its drawing
    if is_shown.is_set() and in_place and not (stays and wait.seconds > KEEP_AFTER):
        screen.draw("")
    elif is_shown.is_set():
        log(wait.end())


@contextlib.contextmanager
def compiling(log: Log, program: str) -> Iterator[Wait]:
    """`awaited` whose outcome says whether JAX's cache on disk had the program, or has it now."""
    events = _cache_events()
    before = events.copy()
    with awaited(log, f"compiling {program}") as wait:
        yield wait
        for event, outcome in _EVENTS.items():
            if events[event] > before[event]:
                wait.outcome = outcome


@functools.cache
def _cache_events() -> collections.Counter[str]:
    """Counts of JAX's events, by name, since the first call."""
    import jax  # here, so that importing this module takes no time

    counts: collections.Counter[str] = collections.Counter()
    # JAX passes details of an event by name, which nothing here reads.
    jax.monitoring.register_event_listener(lambda event, **details: counts.update([event]))
    return counts


def in_words(seconds: float) -> str:
    """A duration in seconds, minutes, hours or days, with about two digits.

    Examples:
      >>> [in_words(x) for x in (0.74, 11.2, 400, 7900, 72000, 2160000)]
      ['0.7 s', '11 s', '7 min', '2.2 h', '20 h', '25 days']
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    if hours < 72:
        return f"{hours:.1f} h" if hours < 10 else f"{hours:.0f} h"
    return f"{hours / 24:.0f} days"
