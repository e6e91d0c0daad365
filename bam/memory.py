"""The memory that is free, and what a compiled program would take of it.

An operating system kills a process that takes more memory than there is, without a word. So a
program's memory, which XLA plans when it compiles, is compared with what is free before it runs.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bam.errors import InputError

MIB, GIB = 2**20, 2**30
# The remedies for a model that is too large even for one example at a time.
SMALLER = (
    "take a smaller model, as --config.model.width=8, or fewer views, as --config.augment.views=1"
)


class TooLargeError(InputError):
    """A program does not fit the memory.

    Attributes:
      fitting: a microbatch size that fits; 0 if none does.
    """

    def __init__(self, message: str, fitting: int = 0) -> None:
        super().__init__(message)
        self.fitting = fitting


class Needs(NamedTuple):
    """The memory that a program takes when it runs, on each of the devices, and what is free.

    Attributes:
      num_bytes: new bytes on a device. Arguments that are on it already take none.
      free: bytes that are free on a device; on CPUs a device's share of the machine's.
      num_sharing: the devices of this process that share one memory: all of a CPU, otherwise 1.
    """

    num_bytes: int
    free: int
    num_sharing: int = 1

    @property
    def fits(self) -> bool:
        """Whether the program can run."""
        return self.num_bytes <= self.free

    def __str__(self) -> str:
        """The two amounts in words, for a message."""
        needed, free = (in_words(self.num_sharing * x) for x in (self.num_bytes, self.free))
        return f"takes {needed} of memory, and {free} are free"


def in_words(num_bytes: int) -> str:
    """An amount of memory in GiB, MiB or KiB.

    Examples:
      >>> [in_words(x) for x in (45 * 2**30, 3 * 2**29, 5 * 2**18, 2**14)]
      ['45.0 GiB', '1.5 GiB', '1.2 MiB', '16 KiB']
    """
    if num_bytes < MIB:
        return f"{num_bytes / 2**10:.0f} KiB"
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def machine() -> int:
    """Bytes of memory that this process may use: the machine's, or less if a container limits it.

    Limits on data in memory are shares of it.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *(limit for limit, _ in _groups(Path("/")))])


def free(root: Path = Path("/")) -> int:
    """Bytes of memory that this process can still take before the system ends it.

    They are what Linux calls available, or less if a container limits it. Without Linux they are
    the machine's memory. `root` is the folder that holds `proc` and `sys`.
    """
    try:
        available = 1024 * _fields(root / "proc/meminfo")["MemAvailable:"]
    except (OSError, ValueError, KeyError):  # another system
        available = machine()
    return max(0, min([available, *(limit - used for limit, used in _groups(root))]))


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yields the limit and the use, in bytes, of each control group of this process."""
    names = {
        # The group without a number is that of version 2; version 1 has one for each resource.
        "": ("", "memory.max", "memory.current", ""),
        "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    }
    try:
        lines = (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        _, resources, group = (*line.split(":", 2), "", "")[:3]
        for resource in {"", "memory"} & set(resources.split(",")):
            folder, limit, used, prefix = names[resource]
            top = root / "sys/fs/cgroup" / folder
            inner = top / group.lstrip("/")
            # A container sees its own group at the top, under the name that the host gave it.
            for place in (x for x in (inner, *inner.parents) if x.is_relative_to(top)):
                try:
                    # A group without a limit says "max", which is no number.
                    most, taken = (int((place / name).read_text()) for name in (limit, used))
                except (OSError, ValueError):
                    continue
                statistics = dict[str, int]()
                with contextlib.suppress(OSError, ValueError):
                    statistics = _fields(place / "memory.stat")
                # Pages of files leave the memory when a program needs it.
                files = (statistics.get(f"{prefix}{x}_file", 0) for x in ("active", "inactive"))
                if most >= 0:  # -1 is no limit
                    yield most, taken - min(taken, sum(files))


def _fields(file: Path) -> dict[str, int]:
    """Name -> number in a file with a name and a number on each line."""
    rows = (line.split() for line in file.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def needs(program: Callable[..., Any], *args: Any) -> Needs | None:
    """Returns what a jitted function would take to run with these arguments.

    Returns None if XLA does not tell. The function is compiled. JAX keeps the program, so that a
    call with such arguments compiles nothing. It may be a partial one, as from
    `program.compile_once`.
    """
    import jax  # here, so that importing this module takes no time

    jitted: Any = program
    if isinstance(program, functools.partial):
        jitted, args = program.func, (*program.args, *args)
    compiled = jitted.lower(*args).compile()
    try:
        planned = compiled.memory_analysis()
        hardware = compiled.runtime_executable().local_devices()
        # A donated argument lends its memory to a result.
        num_bytes = planned.output_size_in_bytes - planned.alias_size_in_bytes
        num_bytes += planned.temp_size_in_bytes
        room = _free_on(hardware)
    except Exception:  # whatever a platform raises: what is not known is not refused
        return None
    on_host = (x for x in jax.tree.leaves(args) if not isinstance(x, jax.Array))
    num_bytes += sum(getattr(x, "nbytes", 0) for x in on_host)
    return room and Needs(num_bytes, *room)


def _free_on(hardware: list[Any]) -> tuple[int, int] | None:
    """Returns `free` and `num_sharing` of `Needs` for devices.

    Returns None if they do not tell.
    """
    if hardware[0].platform == "cpu":
        return free() // len(hardware), len(hardware)
    statistics = [device.memory_stats() for device in hardware]
    if not all(statistics):
        return None
    return min(x["bytes_limit"] - x["bytes_in_use"] for x in statistics), 1


def check(program: Callable[..., Any], *args: Any, what: str, remedy: str) -> None:
    """Checks that a jitted function fits the memory, see `needs`.

    Raises InputError, with a remedy, if it does not.
    """
    needed = needs(program, *args)
    if needed and not needed.fits:
        raise InputError(f"{what} {needed}: {remedy}")


def largest_size(
    num_bytes_of: Callable[[int], int], size: int, num_bytes: int, most: int
) -> tuple[int, int]:
    """The largest size that takes at most `most` bytes, and the bytes that size 1 takes.

    The size is 0 if size 1 takes more. Each size costs a compilation, so the first guess is the
    one on the line through size 1 and the size that is too large.

    Args:
      num_bytes_of: the bytes of a smaller size.
      size: a size that is too large.
      num_bytes: what it takes.
      most: the bytes that there are.
    """
    if size <= 1:
        return 0, num_bytes
    least = num_bytes_of(1)
    if least > most:
        return 0, least
    while size > 2:
        slope = max(1, num_bytes - least) / (size - 1)
        guess = min(size - 1, 1 + int((most - least) / slope))
        if guess == 1:
            break
        guessed = num_bytes_of(guess)
        if guessed <= most:
            return guess, least
        size, num_bytes = guess, guessed
    return 1, least
