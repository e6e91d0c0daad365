"""Files, mostly JSON: written all or nothing, read with errors that name the file."""

import contextlib
import errno
import json
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias

from bam.errors import InputError

JsonObject: TypeAlias = dict[str, Any]
JsonMapping: TypeAlias = Mapping[str, Any]

_locked: weakref.WeakSet[IO[str]] = weakref.WeakSet()  # the locks of this process
LOCK = "lock"  # the file in a folder by which one process has it for itself
DEEPEST = 50  # levels of nested lists and objects in a JSON file
_DEEP = f"more than {DEEPEST} nested lists or objects"


def user_path(text: str | os.PathLike[str]) -> Path:
    """Returns the path in a config or command, with `~` and `~USER` expanded.

    `~USER` stays in the path if there is no such user.
    """
    # `Path.expanduser` would raise RuntimeError for an unknown user.
    return Path(os.path.expanduser(text))


def read_bytes(path: Path, limit: int = 2**30) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises:
      InputError: if the file is missing or larger, or is a folder, pipe or device. The line names
        it.
      OSError: if it cannot be read.
    """
    # Reading a pipe would wait for a writer, and a device may have no end.
    if not path.is_file():
        problem = "not a regular file" if path.exists() else "missing"
        raise InputError(f"{path}: {problem}")
    num_bytes = path.stat().st_size
    if num_bytes > limit:
        raise InputError(f"{path}: {num_bytes:,} bytes, at most {limit:,} are expected")
    return path.read_bytes()


def read_json(path: Path) -> JsonObject:
    """Returns the JSON object in a file.

    Raises InputError for anything else, in one line that names the file.
    """
    return as_object(read_bytes(path), path)


def as_object(text: str | bytes, path: Path) -> JsonObject:
    """Returns the JSON object in a text.

    Raises InputError for anything else, in one line that names the file.
    """
    try:
        value = json.loads(text)
    except ValueError:  # bytes that are not UTF-8, too
        raise InputError(f"{path} is damaged: not JSON") from None
    except RecursionError:
        raise InputError(f"{path} is damaged: {_DEEP}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} is damaged, or not of one run: not a JSON object")
    # Functions that walk the value recurse, so its depth is limited, level by level.
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        parts = (x.values() if isinstance(x, dict) else x for x in level)
        level = [y for part in parts for y in part if isinstance(y, dict | list)]
    if level:
        raise InputError(f"{path} is damaged: {_DEEP}")
    return value


def write_json(path: Path, value: object, mode: int = 0o666) -> None:
    """Writes strict, indented JSON, all or nothing.

    NaN and infinity are refused.
    """
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n", mode)


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Writes a text file, as `write_bytes` does."""
    write_bytes(path, text.encode(), mode)


def write_bytes(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Writes bytes to a file, as `write_atomically` does."""
    with write_atomically(path, mode) as file:
        file.write(content)


@contextlib.contextmanager
def write_atomically(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Yields a file to write, which gets its name once all its content is on the disk.

    After a crash at any moment, the path has its old content or all of the new, also if other
    processes or threads write it too. The file has the permissions of `mode`, without those that
    the umask takes, before it has any content. PermissionError for a device, a pipe or a folder,
    which a file must not replace.
    """
    check_replaceable(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    # A file that a crash left would keep its permissions, which may be wider than `mode`.
    partial.unlink(missing_ok=True)
    try:
        opener = lambda name, flags: os.open(name, flags, mode)  # noqa: E731
        with naming(path), open(partial, "xb", opener=opener) as file:
            yield file
            to_disk(file)
        partial.replace(path)
    except BaseException:  # or each try on a full disk would leave one more partial file
        partial.unlink(missing_ok=True)
        raise
    _sync(path.parent)  # the folder holds the name


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Names the file that is written in the error of a full disk, which names none."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def replace(partial: Path, path: Path) -> None:
    """Renames a closed file, or a folder of closed files, to `path`, once it is on the disk.

    So after a power cut the path has its old content or all of the new, never an empty file.
    """
    keep(partial)
    partial.replace(path)
    _sync(path.parent)


def keep(path: Path) -> None:
    """Returns when a closed file, or a folder with its content, outlives a power cut.

    Then its content, its name and the name of its folder are on the disk.
    """
    for part in (*path.rglob("*"), path, *path.parents[:2]):
        _sync(part)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Makes a folder and its parents, unless they exist.

    The new folders are still there after a power cut.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    for folder in missing:
        _sync(folder.parent)


def lock(folder: Path) -> IO[str]:
    """Locks a folder until the returned file is closed.

    Raises BlockingIOError if another process has the lock. The file is `LOCK` in the folder.
    """
    import fcntl  # here, because Windows lacks it and `import bam` must work there

    path = folder / LOCK
    check_replaceable(path)  # opening a pipe would wait for a reader
    with contextlib.ExitStack() as on_error:
        file = on_error.enter_context(path.open("a"))
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # If the file was removed meanwhile, another process can lock a new one of that name.
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                on_error.pop_all()
                _locked.add(file)
                return file
        mine = [os.fstat(x.fileno()) for x in _locked if not x.closed]
        if any(os.path.samestat(x, path.stat()) for x in mine):
            raise BlockingIOError(
                f"{folder} is in use in this process: close() the PrivateTraining that uses it, or "
                "wait until the command ends"
            )
    raise BlockingIOError(f"another process is writing in {folder}: wait until it ends")


def check_replaceable(path: Path) -> None:
    """PermissionError if the path exists and is not a regular file."""
    if path.exists() and not path.is_file():
        raise PermissionError(f"{path} cannot be written: it is not a regular file")


def check_writable(file: str) -> None:
    """Checks before any work that a file can be written.

    Raises OSError if not. With "" there is no file to check.
    """
    if not file:
        return
    folder = Path(file).parent
    folder.mkdir(parents=True, exist_ok=True)
    check_replaceable(Path(file))
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{file} cannot be written")


def to_disk(file: IO[Any]) -> None:
    """Returns when the content so far is on the disk, not in a buffer that a crash loses."""
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
    except OSError as error:  # some file systems cannot sync folders
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.EACCES, errno.ENOTSUP)):
            raise
