"""Keeps sums out of a faulty part of XLA's CPU compiler.

Since 0.10.2, jaxlib gives a sum on CPU, with the elementwise operations before it, to the library
YNNPACK. The library computes some of them wrongly and silently (jax-ml/jax #39103 and others),
among them `jax.vmap` of a gradient's norm; and a clipped gradient is only as private as its norm is
right. XLA reads its flags once, when JAX first computes. So importing `bam` adds the flag that
keeps whole sums in XLA.

An unchecked release whose compiler knows the flag counts as faulty. An unknown flag would end the
process, so its name is first looked up in the compiler's file, within hundredths of a second.
Computing one of the wrong sums as a test would start JAX before users have made their settings, and
one right sum proves nothing about the next.
"""

import logging
import mmap
import os
import re
import sys
import warnings
from collections.abc import Callable, MutableMapping
from pathlib import Path

import jaxlib

FLAG = "--xla_cpu_experimental_ynn_fusion_type"
# The default list without whole sums: matrix products (dot) are right, and faster than XLA's own.
GUARD = "individual_dot"
RIGHT = ("", GUARD, "-reduce")
# Each was run: wrong by default, right with every value in RIGHT. Releases up to LAST_RIGHT are
# right by default, and some of them end the process at an unknown flag. Any other release has the
# flag if its compiler knows it.
FAULTY = ("0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1")
LAST_RIGHT = "0.10.1"


def guard(
    version: str,
    environ: MutableMapping[str, str],
    backend: Callable[[], str | None],
    library: Path,
) -> str:
    """Adds the flag to `XLA_FLAGS` if it is needed, absent, and not too late.

    `backend` returns the platform that JAX has started with, or None if it has not started;
    `library` is the compiler's file. Returns a warning with a remedy if results on CPU are wrong,
    and "" otherwise. A release in which the fault can be neither seen nor switched off gets a line
    in the log only: a warning is an error under `-W error`, and nothing is known to be wrong there.
    """
    if version not in FAULTY:
        if _numbers(version) <= _numbers(LAST_RIGHT):
            return ""
        if not knows_flag(library):
            logging.getLogger("bam").warning(
                "bam has not been checked with jaxlib %s, whose sums on CPU may be wrong: install "
                "the versions of constraints.txt",
                version,
            )
            return ""
    flags = environ.get("XLA_FLAGS", "").strip()
    is_file = bool(flags) and not flags.startswith("-")  # as XLA reads it
    readable = is_file and Path(flags).is_file()  # XLA says what is wrong with one that is not
    text = Path(flags).read_text(encoding="utf-8") if readable else flags
    wrong = f"jaxlib {version} computes wrong sums on CPU"
    # XLA stops reading at the first word that is not a flag. A wrong value counts even behind it, a
    # right one only before it.
    surely_read = re.split(r"\s+(?=[^\s-])", text)[0]
    for part in (text, surely_read):
        chosen = [value.strip("'\"") for value in re.findall(rf"{FLAG}=(\S*)", part)]
        if chosen and chosen[-1].lower() not in RIGHT:  # the last one counts
            return f"{wrong} with {FLAG}={chosen[-1]}: use {GUARD}"
    if chosen:
        return ""
    if is_file:
        return f"{wrong}: add {FLAG}={GUARD} to {flags}"
    started = backend()
    if started is None:
        environ["XLA_FLAGS"] = f"{FLAG}={GUARD} {flags}".strip()
        return ""
    # Too late. Not added, because programs would be cached as if they were compiled with the flag.
    if started != "cpu":
        return ""
    return f"{wrong}, and JAX has started: import bam first, or set XLA_FLAGS={FLAG}={GUARD}"


def knows_flag(library: Path) -> bool:
    """Whether a compiler knows the flag and the value: their names stand in its file as text."""
    if not library.is_file():
        return False
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        names = (FLAG.removeprefix("--"), f"LIBRARY_FUSION_TYPE_{GUARD.upper()}")
        return all(text.find(name.encode()) >= 0 for name in names)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _started_backend() -> str | None:
    if "jax" not in sys.modules:  # importing `bam` alone does not wait for JAX
        return None
    import jax
    from jax._src import xla_bridge  # every public function that tells it would start JAX

    return jax.default_backend() if xla_bridge.backends_are_initialized() else None


_PACKAGE = Path(jaxlib.__file__)
_LIBRARY = next(_PACKAGE.parent.glob("*jax_common.*"), _PACKAGE)  # .so, .dylib or .dll
_problem = guard(jaxlib.__version__, os.environ, _started_backend, _LIBRARY)
if _problem:
    warnings.warn(_problem, RuntimeWarning, stacklevel=2)
