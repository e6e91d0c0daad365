"""Forks of a process: they copy its secrets, and must not use them."""

import os
from typing import NamedTuple


class Process(NamedTuple):
    """This process: its id, and the number of forks since the one that imported bam.

    The id alone may be the parent's again, in a PID namespace of the child's own.
    """

    pid: int
    num_forks: int


_num_forks = 0


def _count_fork() -> None:
    global _num_forks
    _num_forks += 1


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_count_fork)


def this_process() -> Process:
    """Returns the process in which it is called, which is another one in each fork."""
    return Process(os.getpid(), _num_forks)


def check_not_forked(process: Process, what: str) -> None:
    """Raises RuntimeError if `what` was made in another process, which is `process`.

    A fork copies the secrets. Both processes would draw the same batches and the same noise, and
    the difference of their models would have no noise.
    """
    if this_process() != process:
        raise RuntimeError(
            f"{what} was made in process {process.pid}, and a fork in process {os.getpid()} would "
            "repeat its batches and its noise: make another one in each process"
        )
