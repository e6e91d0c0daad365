"""Unpacks a zip or tar file, whose author need not be trusted, into a temporary folder."""

import bz2
import contextlib
import functools
import gzip
import io
import lzma
import math
import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from bam.data.common import DataError
from bam.images.listing import JUNK

SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
MOST_FILES = 10_000_000
DEEPEST = 100  # nested folders; Python cannot remove some thousand
HEADER = 2**22  # bytes before a file in a tar: its name and metadata, which stay in memory
SHARE = 2  # the content may take 1 / SHARE of the free bytes of the disk
_DAMAGE = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, ValueError,
    NotImplementedError, RuntimeError,
)  # fmt: skip


class _Member(NamedTuple):
    """A file or folder in an archive."""

    name: str
    num_bytes: int
    content: Callable[[], contextlib.AbstractContextManager[IO[bytes]]] | None  # None: a folder
    refused: str = ""  # the reason why it is not read


def is_packed(path: Path) -> bool:
    """Whether a path is a file with the suffix of an archive."""
    return path.name.lower().endswith(SUFFIXES) and path.is_file()


@contextlib.contextmanager
def unpack(archive: Path, near: Path, keep_top: bool = False) -> Iterator[Path]:
    """Unpacks an archive into a folder beside `near`, which is removed at the end.

    Only its owner can read the folder. If the archive holds a single folder, that folder is
    returned, unless `keep_top`. All files have the archive's time, so a second import sees whether
    the archive changed.

    Raises:
      DataError: for a path that leaves the folder, a link, a password, a repeated name, a damaged
        archive, and a content larger than half of the free bytes of the disk.
    """
    new = [x for x in near.absolute().parents if not x.exists()]
    try:
        near.absolute().parent.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=f".{near.name}-", dir=near.absolute().parent))
    except OSError as error:
        raise DataError(f"{archive}: cannot be unpacked beside {near}: {error.strerror}") from error
    try:
        try:
            _write(archive, place)
        except _DAMAGE as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{archive}: damaged, or of an unknown kind: {error}") from error
        except OSError as error:  # gzip and bzip2 raise it for damaged data, without strerror
            reason = error.strerror or f"damaged, or of an unknown kind: {error}"
            raise DataError(f"{archive}: {reason}") from error
        yield place if keep_top else _only_folder(place)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        for folder in new:
            with contextlib.suppress(OSError):  # not empty: it holds the data set
                folder.rmdir()


def _write(archive: Path, place: Path) -> None:
    """Writes all members below `place`."""
    left = shutil.disk_usage(place).free // SHARE
    time = archive.stat().st_mtime_ns
    with contextlib.closing(_members(archive)) as members:
        for number, member in enumerate(members):
            if number >= MOST_FILES:
                raise DataError(f"{archive}: has more than {MOST_FILES:,} files")
            left -= member.num_bytes
            _write_member(f"{archive}: {member.name[:200]}", member, place, left, time)


def _write_member(location: str, member: _Member, place: Path, left: int, time: int) -> None:
    """Writes a file or folder below `place`.

    Raises DataError if `left`, the number of bytes still free, is below 0.
    """
    parts = PurePosixPath(member.name.replace("\\", "/")).parts
    if not parts and member.content is None:
        return  # the folder itself: "./"
    # The root of "//x" is "//", by POSIX.
    if not parts or ".." in parts or parts[0][0] == "/" or ":" in parts[0]:
        raise DataError(f"{location}: leaves the folder")
    if len(parts) > DEEPEST:
        raise DataError(f"{location}: folders are nested more than {DEEPEST} deep")
    if member.refused:
        raise DataError(f"{location}: {member.refused}; unpack it and import the folder")
    if left < 0:
        raise DataError(f"{location}: too much for the disk: free space, or unpack it elsewhere")
    path = place.joinpath(*parts)
    try:
        (path.parent if member.content else path).mkdir(parents=True, exist_ok=True)
        if member.content:
            with member.content() as packed, path.open("xb") as file:
                shutil.copyfileobj(packed, file)
            os.utime(path, ns=(time, time))
    except (FileExistsError, NotADirectoryError):
        raise DataError(f"{location}: occurs twice in the archive") from None
    except OSError as error:  # a full disk, a long name, or a damaged bzip2 stream
        raise DataError(f"{location}: {error.strerror or error}") from error


def _members(archive: Path) -> Generator[_Member, None, None]:
    """Yields the files and folders in the order of the archive.

    None is longer than its declared size.
    """
    if archive.name.lower().endswith(".zip"):
        with zipfile.ZipFile(archive) as packed:
            for info in packed.infolist():
                is_link = stat.S_ISLNK(info.external_attr >> 16)
                refused = "is a link" if is_link else "needs a password" * (info.flag_bits & 1)
                is_file = not (info.is_dir() or refused)
                content: Any = functools.partial(packed.open, info) if is_file else None
                yield _Member(info.filename, info.file_size, content, refused)
        return
    # "r|" reads one file after the other and seeks nowhere.
    with contextlib.ExitStack() as opened:
        plain = opened.enter_context(_plain(archive))
        file: Any = _Limited(plain)
        stream = opened.enter_context(tarfile.open(fileobj=file, mode="r|", tarinfo=_Header))
        for entry in stream:
            if entry.size < 0:
                raise ValueError(f"{entry.name[:200]} has {entry.size} bytes")
            is_ordinary = entry.isfile() or entry.isdir()
            refused = "" if is_ordinary else "is a link or a special file"
            content = functools.partial(stream.extractfile, entry) if entry.isfile() else None
            file.left = math.inf
            yield _Member(entry.name, entry.size, content, refused)
            file.left = HEADER
        plain.read(HEADER)  # to the end, so that checksums are compared


class _Limited:
    """A file from which `left` bytes may be read."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        self.file, self.left = file, float(HEADER)

    def read(self, num_bytes: int) -> bytes:
        """Returns the next bytes.

        Raises ValueError if they are too many.
        """
        content = self.file.read(num_bytes)
        self.left -= len(content)
        if self.left < 0:
            raise ValueError(f"more than {HEADER:,} bytes before a file")
        return content


class _Header(tarfile.TarInfo):
    """A header in a tar, for which damage is an error.

    `tarfile` would take a damaged header for the end.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        """Returns the header in these bytes.

        Raises ValueError if the tar is damaged or cut short.
        """
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if bytes(buf) == bytes(tarfile.BLOCKSIZE):  # zeros mark the end
                raise
            raise ValueError(f"{error}; is it cut short?") from error


def _plain(archive: Path) -> io.BufferedIOBase:
    """The tar in a file, decompressed by the format that its first bytes say."""
    with archive.open("rb") as file:
        head = file.read(6)
    if head.startswith(b"\x1f\x8b"):
        return gzip.open(archive)
    if head.startswith(b"BZh"):
        return bz2.open(archive)
    return lzma.open(archive) if head == b"\xfd7zXZ\0" else archive.open("rb")


def _only_folder(place: Path) -> Path:
    """Returns the innermost folder that is reached through single folders.

    Junk beside them does not count.
    """
    while True:
        names = [x.name for x in place.iterdir()]
        names = [x for x in names if not x.startswith(".") and x.casefold() not in JUNK]
        if len(names) != 1 or not (place / names[0]).is_dir():
            return place
        place = place / names[0]
