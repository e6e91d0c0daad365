"""A folder that is packed in a zip or tar file, of somebody who need not be trusted."""

import contextlib
import lzma
import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from bam.data.common import DataError
from bam.images.listing import JUNK

SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
MOST_FILES = 10_000_000
SHARE = 2  # a file's content may take one part in so many of what the disk has free
_DAMAGE = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, ValueError,
    NotImplementedError, RuntimeError,
)  # fmt: skip


class _Member(NamedTuple):
    """A file or folder in an archive."""

    name: str
    num_bytes: int
    content: contextlib.AbstractContextManager[IO[bytes]] | None  # None: a folder
    refused: str = ""  # why it cannot be read


def is_packed(path: Path) -> bool:
    """Whether a path is a file whose name says that it is an archive."""
    return path.name.lower().endswith(SUFFIXES) and path.is_file()


@contextlib.contextmanager
def unpacked(archive: Path, near: Path, whole: bool = False) -> Iterator[Path]:
    """An archive's content in a folder beside `near`, for its owner alone; removed at the end.

    Unless it is asked for as a `whole`, the folder is the only one of the archive, if there is one
    alone. Files have the archive's time, which tells of a change.

    Raises:
      DataError: for a path that leaves the folder, a link, a password, a name that is there twice,
        a damaged archive, and one of more bytes than half of the disk's free ones.
    """
    near.absolute().parent.mkdir(parents=True, exist_ok=True)
    try:
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
        yield place if whole else _only_folder(place)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _write(archive: Path, place: Path) -> None:
    left = shutil.disk_usage(place).free // SHARE
    time = archive.stat().st_mtime_ns
    for number, member in enumerate(_members(archive)):
        where = f"{archive}: {member.name[:200]}"
        parts = PurePosixPath(member.name.replace("\\", "/")).parts
        if not parts and member.content is None:
            continue  # the folder itself: "./"
        # The root of "//x" is "//", by POSIX.
        if not parts or ".." in parts or parts[0][0] == "/" or ":" in parts[0]:
            raise DataError(f"{where}: leaves the folder")
        if member.refused:
            raise DataError(f"{where}: {member.refused}; unpack it and import the folder")
        left -= member.num_bytes
        if left < 0 or number >= MOST_FILES:
            raise DataError(
                f"{where}: the archive has too much for the disk: free some, or unpack it"
            )
        path = place.joinpath(*parts)
        try:
            (path.parent if member.content else path).mkdir(parents=True, exist_ok=True)
            if member.content:
                with member.content as packed, path.open("xb") as file:
                    shutil.copyfileobj(packed, file)
                os.utime(path, ns=(time, time))
        except (FileExistsError, NotADirectoryError):
            raise DataError(f"{where}: is there twice") from None


def _members(archive: Path) -> Iterator[_Member]:
    """Files and folders, in the order of the archive; sizes are at most those that are declared."""
    if archive.name.lower().endswith(".zip"):
        with zipfile.ZipFile(archive) as packed:
            for info in packed.infolist():
                is_link = stat.S_ISLNK(info.external_attr >> 16)
                refused = "is a link" if is_link else "needs a password" * (info.flag_bits & 1)
                content = None if info.is_dir() or refused else packed.open(info)
                yield _Member(info.filename, info.file_size, content, refused)
        return
    with tarfile.open(archive, "r|*") as stream:  # one file after the other, none kept
        for entry in stream:
            is_known = entry.isfile() or entry.isdir()
            refused = "" if is_known else "is a link or no ordinary file"
            content = stream.extractfile(entry) if entry.isfile() else None
            yield _Member(entry.name, entry.size, content, refused)


def _only_folder(place: Path) -> Path:
    """The folder that is meant: the only one, of an archive that has one alone at its top."""
    while True:
        names = [x.name for x in place.iterdir()]
        meant = [x for x in names if not x.startswith(".") and x.casefold() not in JUNK]
        if len(meant) != 1 or not (place / meant[0]).is_dir():
            return place
        place = place / meant[0]
