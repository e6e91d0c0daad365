"""Files, JSON above all, written all or nothing and read with errors that name the file."""

import contextlib
import csv
import errno
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, TypeAlias

from bam.errors import InputError

JsonObject: TypeAlias = dict[str, Any]
JsonMapping: TypeAlias = Mapping[str, Any]

DEEPEST = 50  # lists and objects within each other in a JSON file
_DEEP = f"more than {DEEPEST} lists or objects within each other"


def user_path(text: str | os.PathLike[str]) -> Path:
    """The path that a config or a command names; `~NOBODY` stays as it is, a path to nothing.

    `Path.expanduser` raises RuntimeError for that.
    """
    return Path(os.path.expanduser(text))


def read_bytes(path: Path, limit: int = 2**30) -> bytes:
    """The bytes, at most `limit`, of an ordinary file: no folder, pipe or device.

    InputError, in one line that names it, for anything else; OSError if it cannot be read.
    """
    if not path.is_file():
        there = ": what is there is no ordinary file" if path.exists() else ""
        raise InputError(f"{path}: missing{there}")
    num_bytes = path.stat().st_size
    if num_bytes > limit:
        raise InputError(f"{path}: {num_bytes:,} bytes, at most {limit:,} are expected")
    return path.read_bytes()


def read_json(path: Path) -> JsonObject:
    """A file's JSON object; InputError, in one line that names it, for anything else."""
    return as_object(read_bytes(path), path)


def as_object(text: str | bytes, path: Path) -> JsonObject:
    """A JSON object in a text of a file; InputError, in one line, for anything else."""
    try:
        value = json.loads(text)
    except ValueError:  # of bytes that are no text, too
        raise InputError(f"{path} is damaged: not JSON") from None
    except RecursionError:
        raise InputError(f"{path} is damaged: {_DEEP}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} is damaged, or not of one run: not a JSON object")
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        parts = (x.values() if isinstance(x, dict) else x for x in level)
        level = [y for part in parts for y in part if isinstance(y, dict | list)]
    if level:  # whoever walks it would recurse as deep
        raise InputError(f"{path} is damaged: {_DEEP}")
    return value


def listed(names: Sequence[str], most: int = 12) -> str:
    """The first of the names, in their order, and how many more there are.

    Examples:
      >>> listed(["a", "b", "c"], most=2)
      'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def counted(num: int, noun: str, form: str = ",") -> str:
    """A number with its noun.

    Examples:
      >>> counted(1, "image"), counted(3000, "class")
      ('1 image', '3,000 classes')
    """
    ending = "" if num == 1 else "es" if noun.endswith("s") else "s"
    return f"{num:{form}} {noun}{ending}"


def have(num: int, noun: str) -> str:
    """`counted` with its verb: `1 file has`, `3,000 files have`."""
    return f"{counted(num, noun)} {'has' if num == 1 else 'have'}"


def one_line(value: Any, without: str = "`|") -> Any:
    """A JSON value in whose texts, keys too, spaces stand for what is not printed and `without`.

    For records that may be a stranger's, before they stand in Markdown: a line break, a backtick or
    a bar in them could end a line, a code or a cell, and what follows would pass for our words.
    """
    if isinstance(value, dict):
        return {one_line(key, without): one_line(x, without) for key, x in value.items()}
    if isinstance(value, list):
        return [one_line(x, without) for x in value]
    if isinstance(value, str):
        return "".join(c if c.isprintable() and c not in without else " " for c in value)
    return value


def visible(text: str, keep: str = "") -> str:
    r"""A text in which what a terminal would obey or hide is written out, but for `keep`.

    File, folder and class names may be a stranger's: an escape sequence in them could move the
    cursor over our words, and a mark of direction could turn them round.

    Examples:
      >>> visible("scan\x1b[2J\u202egnp.exe\n")
      'scan\\x1b[2J\\u202egnp.exe\\n'
    """
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def drawn(text: str) -> str:
    r"""A text as Matplotlib draws it letter by letter: `$` begins no formula, `_` hides no line.

    Examples:
      >>> drawn("$\\frac{$")
      '\\$\\frac{\\$'
    """
    text = visible(text).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


# What a spreadsheet takes for the beginning of a formula, in its full width too, but not a number.
_FORMULA = re.compile(r"(?![+-]?\d+(\.\d*)?(e[+-]?\d+)?\Z)[=+\-@\t\r\n＝＋－＠]", re.ASCII | re.I)


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    r"""Rows as CSV in which no text is a formula of a spreadsheet: an apostrophe is put before it.

    A name like `=HYPERLINK("http://…")` may be a stranger's, and opening the table would run it.
    Numbers stay as they are, also those that are written in a text.

    Examples:
      >>> csv_text([["=1+1", "-1.5", -1.5, "a,b"]])
      '\'=1+1,-1.5,-1.5,"a,b"\n'
    """
    is_formula = lambda x: isinstance(x, str) and _FORMULA.match(x)  # noqa: E731
    # It quotes what its line end has: with "\n" alone, a bare "\r" would begin a row of its own.
    line = csv.writer(SimpleNamespace(write=str), lineterminator="\r\n").writerow
    safe = ([f"'{x}" if is_formula(x) else x for x in row] for row in rows)
    return "".join(str(line(row)).removesuffix("\r\n") + "\n" for row in safe)


def write_json(path: Path, value: object) -> None:
    """Writes strict, indented JSON, all or nothing; NaN and infinity are refused."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Writes a text file, as `write_bytes` does."""
    write_bytes(path, text.encode(), mode)


def write_bytes(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Writes a file of these bytes, as `written` does."""
    with written(path, mode) as file:
        file.write(content)


@contextlib.contextmanager
def written(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A file to write, that has its name when all of it is on the disk: all or nothing.

    That holds whatever crashes, also beside others that write it. The file has the permissions of
    `mode`, less those that the umask takes, before it has any content. PermissionError for a
    device, a pipe or a folder, in whose place no file is put.
    """
    check_replaceable(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    partial.unlink(missing_ok=True)  # one that a crash left would keep its own permissions
    try:
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            to_disk(file)
        partial.replace(path)
    except BaseException:  # a full disk, for one, is not to fill up more at each try
        partial.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def replace(partial: Path, path: Path) -> None:
    """Gives a closed file, or a folder of such files, its name, once all of it is on the disk.

    So after a power cut there is what was there before or the whole, never an emptied file.
    """
    keep(partial)
    partial.replace(path)
    _sync(path.parent)


def keep(path: Path) -> None:
    """Returns when a closed file, or a folder with all that is in it, is on the disk.

    So are its name and that of the folder that it is in.
    """
    for part in (*path.rglob("*"), path, *path.parents[:2]):
        _sync(part)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Makes a folder unless it is there, and those above it; their names outlive a power cut."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    for folder in missing:
        _sync(folder.parent)


def lock(folder: Path) -> IO[str]:
    """The lock of a folder, held until it is closed; BlockingIOError if another has it."""
    import fcntl  # which `import bam` does without: Windows has none

    path = folder / "lock"
    check_replaceable(path)  # a pipe would be waited for
    with contextlib.ExitStack() as on_error:
        file = on_error.enter_context(path.open("a"))
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):  # nobody removed it since
                on_error.pop_all()
                return file
    raise BlockingIOError(f"another process is training in {folder}")


def check_replaceable(path: Path) -> None:
    """Refuses, with a PermissionError, what is there and no ordinary file."""
    if path.exists() and not path.is_file():
        raise PermissionError(f"{path} cannot be written: it is no ordinary file")


def to_disk(file: IO[Any]) -> None:
    """Returns when what was written is on the disk, not in some buffer that a crash empties."""
    file.flush()
    os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Forces a file's content, or the names in a folder, to the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:  # some file systems do not do this for folders
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.EACCES, errno.ENOTSUP)):
            raise
