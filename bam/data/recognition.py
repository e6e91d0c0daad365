"""Recognises which source reads a folder, by the names of the files that lie there."""

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from bam.data.catalogue import DATASETS, FOLDER
from bam.data.common import DataError
from bam.data.sources import archives, prepared
from bam.text import short_list, visible

# Source -> what its files are called in an error.
KINDS = {
    "parquet": "Parquet files",
    "archive": "official files",
    "tfds": "files of tensorflow-datasets",
}
IMAGES = (".png", ".jpg", ".jpeg")
SOME = 1000  # entries of a folder that are looked at for a hint


def source_of(name: str, path: Path) -> str:
    """Returns the source of a data set whose files lie at a path.

    A part of a source's files is recognised, too: its reader says which file is missing. DataError
    for a path that does not exist, for files of no source or of two, and for a file that is no
    official archive.
    """
    check_exists(path)
    sources = DATASETS.get(name, FOLDER).sources
    found = {source: files for source in sources if (files := find(name, source, path))}
    if len(found) == 1:
        return next(iter(found))
    if found:
        kinds = " and ".join(f"{KINDS[x]} ({short_list(files, 3)})" for x, files in found.items())
        flags = " or ".join(f"--config.dataset.source={source}" for source in found)
        raise DataError(f"{path} holds two kinds of data, {kinds}: choose one with {flags}")
    if path.is_file():
        raise _no_archive(name, path)
    names = sorted(x.name for x in path.iterdir())
    holds = f"only {visible(short_list(names, 5))}" if names else "it is empty"
    advice = _advice(name, path) or f"expected {'; or '.join(_describe_files(name))}"
    data = "Parquet files" if name == "folder" else f"data of {name}"
    raise DataError(f"{path} holds no {data}, {holds}: {advice}")


def check_exists(path: Path) -> None:
    """DataError for a path of a data set that does not exist."""
    if not path.exists():
        raise DataError(f"{path}: no such file or folder: set --config.dataset.path")


def check_source(name: str, source: str, path: Path) -> None:
    """DataError for a path that does not exist, is a file, or holds files of other sources alone.

    An official archive may be a file. Without files of any source, the reader says what it expects.
    """
    check_exists(path)
    if find(name, source, path):
        return
    for other in DATASETS.get(name, FOLDER).sources:
        if files := find(name, other, path):
            raise DataError(
                f"{path} holds {KINDS[other]} ({short_list(files, 3)}), not {KINDS[source]}: leave "
                f"out --config.dataset.source={source}"
            )
    if path.is_file():
        raise _no_archive(name, path)


def find(name: str, source: str, path: Path) -> list[str]:
    """Returns names of a source's files of a data set at a path, [] without any."""
    entry = DATASETS.get(name, FOLDER)
    if source == "parquet":
        files = sorted(x.name for x in path.glob("*.parquet"))
        return [x for x in files if re.fullmatch(r"(train|test)(-\d+-of-\d+)?\.parquet", x)]
    if source == "archive":
        return archives.find(name, path)
    return sorted(f"{entry.tfds}/{version}" for version in prepared.versions(entry, path))


def _no_archive(name: str, path: Path) -> DataError:
    """The error for a file that is no official archive of a data set."""
    packed = archives.archive_names(name)
    or_file = f", or to a file {' or '.join(packed)}" if packed else ""
    advice = _of_another(name, path) or f"set --config.dataset.path to its folder{or_file}"
    return DataError(f"{path} is a file: {advice}")


def _describe_files(name: str) -> Iterator[str]:
    """Yields the files that each source of a data set needs, in words."""
    entry = DATASETS.get(name, FOLDER)
    for source in sorted(entry.sources):
        if source == "archive":
            yield archives.EXPECTED[name]
        elif source == "parquet":
            yield "train.parquet and test.parquet, as `bam data import` writes them"
        else:
            yield f"{entry.tfds}/VERSION, which tensorflow-datasets prepares"


def _advice(name: str, path: Path) -> str:
    """What to do with a folder that holds no data of a name, or "" if nothing is recognised."""
    if folders := _nearby(name, path):
        flags = " or ".join(f"--config.dataset.path={shlex.quote(str(x))}" for x in folders[:3])
        return f"set {flags}, where such files lie"
    if another := _of_another(name, path):
        return another
    if any(x.suffix.lower() in IMAGES for x in itertools.islice(path.rglob("*"), SOME)):
        command = f"bam data import {shlex.quote(str(path))} --out=DATA"
        return f"import images by `{command}`, and set --config.dataset.path=DATA"
    zipped = archives.zip_names(name, path)
    return f"unpack {' and '.join(zipped)} there" if zipped else ""


def _nearby(name: str, path: Path) -> list[Path]:
    """Folders in a folder that hold data, or one above it in which tensorflow-datasets made it.

    A folder with the name of another data set is left out: Parquet files have the same names in
    all.
    """
    sources, others = DATASETS.get(name, FOLDER).sources, DATASETS.keys() - {name}
    inside = [x for x in sorted(itertools.islice(path.iterdir(), SOME)) if x.is_dir()]
    inside = [x for x in inside if x.name.lower() not in others]
    found = [x for x in inside if any(find(name, source, x) for source in sources)]
    above = path.parents[:3] if "tfds" in sources else ()
    return found or [x for x in above if find(name, "tfds", x)]


def _of_another(name: str, path: Path) -> str:
    """Says which other data set the files at a path belong to.

    Returns "" if they are recognised as none.
    """
    for other, facts in DATASETS.items():
        for source in ("archive", "tfds"):
            if other != name and source in facts.sources and find(other, source, path):
                kind = f"{KINDS[source]} of {other}"
                return f"set --config.dataset.name={other}, because there are {kind}"
    return ""
