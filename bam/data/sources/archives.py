"""Reads official distributions from local files: CIFAR archives, ImageNet32 batches, MNIST idx.

CIFAR archives are checked against their published MD5 sums, and every set against its published
number of rows. A pickle is a program that may call any function, so the pickles of the Python
archives may only name the parts of an array.
"""

import functools
import gzip
import hashlib
import io
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from bam.data.catalogue import DATASETS, Entry
from bam.data.common import DataError, Split, check_labels

MD5 = {
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85",
    "cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8",
}

_CIFAR10_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
_IMAGENET32_FILES = (tuple(f"train_data_batch_{i}.npz" for i in range(1, 11)), ("val_data.npz",))
# The folders in the two official archives of ImageNet32, which need not be merged.
_IMAGENET32_FOLDERS = ("Imagenet32_train_npz", "Imagenet32_val_npz")
_MNIST_FILES = tuple(
    f"{stem}-{part}-ubyte" for stem in ("train", "t10k") for part in ("images-idx3", "labels-idx1")
)
_MNIST_FOLDER = Path("MNIST", "raw")  # of torchvision
# Data set -> the files that `read` needs, in words.
EXPECTED = {
    "cifar10": "cifar-10-python.tar.gz or cifar-10-binary.tar.gz, packed or unpacked",
    "cifar100": "cifar-100-python.tar.gz or cifar-100-binary.tar.gz, packed or unpacked",
    "imagenet32": "train_data_batch_1.npz to train_data_batch_10.npz and val_data.npz, unpacked",
    "mnist": f"{', '.join(_MNIST_FILES)}, with or without .gz",
}
# All names that a pickle of bytes, integers and a NumPy array needs.
PICKLED = {
    "_codecs.encode",  # Python 3 writes bytes with it
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
}

# A part of a split: the file of its labels, its images `[n, h, w, c]`, and its labels.
Part: TypeAlias = tuple[str, np.ndarray, np.ndarray]


class _Layout(NamedTuple):
    """The archive and the files of one version of a CIFAR data set."""

    archive: str
    folder: str
    files: tuple[tuple[str, ...], tuple[str, ...]]  # files of the training and the test split
    parse: Callable[[bytes, str], tuple[np.ndarray, np.ndarray]]


def read(name: str, path: Path) -> tuple[Split, Split]:
    """The training and test split of an official distribution, in its order, from local files.

    `path` is the folder with the files. For CIFAR it may also be the `.tar.gz` itself, or a folder
    with the archive or its content, in the Python or the binary version. ImageNet32 needs
    `train_data_batch_1.npz` to `_10.npz` and `val_data.npz`, together or in the folders of the two
    official archives; MNIST needs the four idx files, with or without `.gz`, also in torchvision's
    `MNIST/raw`. DataError for a missing, truncated or altered file, or labels out of range.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    entry = DATASETS[name]
    train, test = (
        _join(parts, rows, entry, path)
        for parts, rows in zip(_READERS[name](name, path), entry.rows, strict=True)
    )
    return train, test


def _join(parts: Iterator[Part], rows: int, entry: Entry, path: Path) -> Split:
    """Fills one array part by part, so that ImageNet32 is never in memory twice."""
    images, labels = np.empty((rows, *entry.shape), np.uint8), np.empty(rows, np.int32)
    start = 0
    for location, part_images, part_labels in parts:
        checked = check_labels(part_labels, entry.num_classes, location)
        stop = start + len(checked)
        if len(part_images) != len(checked) or part_images.shape[1:] != entry.shape:
            raise DataError(f"{path}: images {part_images.shape} do not fit {len(checked)} labels")
        if stop <= rows:
            images[start:stop], labels[start:stop] = part_images, checked
        start = stop
    if start != rows:
        raise DataError(f"{path}: has {start} rows, but the official split has {rows}")
    return Split(images, labels)


def _cifar(name: str, path: Path) -> Iterator[Iterator[Part]]:
    """The parts of the training split, then those of the test split, one a file."""
    layout, contents = _cifar_contents(name, path)

    def parts(files: tuple[str, ...]) -> Iterator[Part]:
        for file in files:
            location = f"{path}: {file}"
            pixels, labels = layout.parse(contents[file], location)
            yield location, _channels_last(pixels, location), labels

    return (parts(files) for files in layout.files)


class _Place(NamedTuple):
    """Where one version of a CIFAR data set lies: its archive, or the folder of its files."""

    layout: _Layout
    location: Path
    missing: tuple[str, ...]  # files that the folder lacks


def _cifar_places(name: str, path: Path) -> Iterator[_Place]:
    """The archives and folders of a CIFAR data set at `path`, also those with missing files."""
    for layout in _LAYOUTS[name]:
        archive = path if path.is_file() and path.name == layout.archive else path / layout.archive
        if archive.is_file():
            yield _Place(layout, archive, ())
        files = [file for files in layout.files for file in files]
        for folder in (path / layout.folder, path):
            missing = [file for file in files if not (folder / file).is_file()]
            if len(missing) < len(files):
                yield _Place(layout, folder, tuple(missing))


def _cifar_contents(name: str, path: Path) -> tuple[_Layout, dict[str, bytes]]:
    """The first complete layout of the data set at `path`, and its files' bytes."""
    places = sorted(_cifar_places(name, path), key=lambda place: bool(place.missing))
    if not places:
        expected = " or ".join(layout.archive for layout in _LAYOUTS[name])
        raise DataError(f"{path}: contains neither {expected} nor their files")
    layout, location, missing = places[0]
    if missing:
        raise DataError(f"{location / missing[0]}: missing")
    if location.is_file():
        return layout, _untar(location, layout)
    return layout, {file: _read(location / file) for files in layout.files for file in files}


def _read(file: Path) -> bytes:
    if not file.is_file():
        raise DataError(f"{file}: missing")
    return file.read_bytes()


def _untar(archive: Path, layout: _Layout) -> dict[str, bytes]:
    """The files of an archive, read after its checksum was verified."""
    with archive.open("rb") as file:
        md5 = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if md5 != MD5[layout.archive]:
        raise DataError(
            f"{archive}: MD5 {md5}, expected {MD5[layout.archive]}: truncated or altered; "
            "download it again"
        )
    members = {f"{layout.folder}/{file}": file for files in layout.files for file in files}
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                if name in members and (handle := tar.extractfile(member)) is not None:
                    contents[members[name]] = handle.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{archive}: not a readable archive: {error}") from error
    missing = [file for name, file in members.items() if file not in contents]
    if missing:
        raise DataError(f"{archive} lacks {', '.join(missing)}: download it again")
    return contents


class _Unpickler(pickle.Unpickler):
    """Loads the names in `PICKLED` alone.

    DataError for any other name.
    """

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in PICKLED:
            raise DataError(f"the pickle was refused, because it imports {module}.{name}")
        return super().find_class(module, name)


def parse_pickle(content: bytes, location: str, label_key: bytes) -> tuple[np.ndarray, np.ndarray]:
    """The pixels, uint8 `[rows, 3072]`, and the labels of a batch, which is a pickled dictionary.

    The dictionary has an array under `b"data"` and a list under `label_key`. DataError for a pickle
    that is damaged, holds other objects, or imports a name not in `PICKLED`.
    """
    try:
        batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        pixels, labels = batch[b"data"], batch[label_key]
        if not (isinstance(labels, list) and all(type(label) is int for label in labels)):
            raise TypeError("labels are not a list of integers")
        if pixels.dtype != np.uint8 or pixels.shape != (len(labels), 3072):
            raise TypeError("data is not an array of uint8 with a row for each label")
    except DataError as error:
        raise DataError(f"{location}: {error}") from error
    # A damaged pickle may raise nearly any error.
    except Exception as error:
        raise DataError(f"{location}: not a CIFAR batch: {type(error).__name__} {error}") from error
    return pixels, np.array(labels, np.int64)


def _parse_binary(content: bytes, location: str, label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pixels and the last label of records with `label_bytes` labels."""
    size = label_bytes + 3072
    if len(content) % size:
        raise DataError(f"{location}: truncated in row {len(content) // size}")
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    return records[:, label_bytes:], records[:, label_bytes - 1].astype(np.int64)


def _imagenet32(name: str, path: Path) -> Iterator[Iterator[Part]]:
    places = _imagenet32_places(path)
    for file in (file for files in places for file in files):
        if not file.is_file():  # before gigabytes are read
            raise DataError(f"{file}: missing")
    return (map(_imagenet32_batch, files) for files in places)


def _imagenet32_places(path: Path) -> list[list[Path]]:
    """The files of each split: in `path`, or else in the folder of their official archive."""
    return [
        [next((x for x in (path / file, path / folder / file) if x.is_file()), path / file)
         for file in files]
        for files, folder in zip(_IMAGENET32_FILES, _IMAGENET32_FOLDERS, strict=True)
    ]  # fmt: skip


def _imagenet32_batch(file: Path) -> Part:
    """A batch of ImageNet32, whose labels begin at 1 in the file."""
    try:
        with file.open("rb") as content, np.load(content, allow_pickle=False) as batch:
            pixels, labels = batch["data"], np.asarray(batch["labels"], np.int64)
    # A damaged file may raise nearly any error.
    except Exception as error:
        raise DataError(f"{file}: not a readable batch: {error}") from error
    return str(file), _channels_last(pixels, str(file)), labels - 1


def _mnist(name: str, path: Path) -> Iterator[Iterator[Part]]:
    files = [_mnist_place(path, file) for file in _MNIST_FILES]
    for file in files:
        if not file.is_file():
            raise DataError(f"{file}: missing")
    for images, labels in (files[:2], files[2:]):
        yield iter([(str(labels).removesuffix(".gz"), _idx(images, 3)[..., None], _idx(labels, 1))])


def _mnist_place(path: Path, name: str) -> Path:
    """The file of MNIST with that name, zipped or not: in `path`, or where torchvision puts it."""
    folders = (path, path / _MNIST_FOLDER)
    files = [folder / file for folder in folders for file in (f"{name}.gz", name)]
    return next((file for file in files if file.is_file()), path / name)


def _idx(file: Path, num_axes: int) -> np.ndarray:
    """The uint8 array of an idx file, which has a magic number, big-endian lengths, then bytes."""
    start, content = 4 + 4 * num_axes, _read(file)
    if file.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{file}: truncated or altered: {error}") from error
    if len(content) < start or content[:4] != bytes((0, 0, 8, num_axes)):
        raise DataError(f"{file}: not an idx file of bytes with {num_axes} axes")
    shape = struct.unpack(f">{num_axes}I", content[4:start])
    expected = int(np.prod(shape, dtype=object))
    if len(content) - start != expected:
        raise DataError(f"{file}: {len(content) - start} bytes after the header, not {expected}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def find(name: str, path: Path) -> list[str]:
    """Returns names of official files of a data set at `path`, [] if there are none."""
    if name in _LAYOUTS:
        files = [place.location for place in _cifar_places(name, path)]
    elif name == "imagenet32":
        files = [file for files in _imagenet32_places(path) for file in files if file.is_file()]
    else:
        files = [x for x in (_mnist_place(path, file) for file in _MNIST_FILES) if x.is_file()]
    return [file.name for file in files]


def archive_names(name: str) -> tuple[str, ...]:
    """Returns the names of the archives of a data set that `read` unpacks itself."""
    return tuple(layout.archive for layout in _LAYOUTS.get(name, ()))


def zip_names(name: str, path: Path) -> list[str]:
    """Returns the official archives of ImageNet32 in a folder, which `read` does not unpack."""
    files = [path / f"{folder}.zip" for folder in _IMAGENET32_FOLDERS * (name == "imagenet32")]
    return [file.name for file in files if file.is_file()]


def _channels_last(pixels: np.ndarray, location: str) -> np.ndarray:
    """Rows `[n, 3072]` of three colour planes, as CIFAR and ImageNet32 store them, as NHWC."""
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3072:
        raise DataError(f"{location}: {pixels.dtype} {pixels.shape}, expected uint8 rows of 3072")
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


_READERS: dict[str, Callable[[str, Path], Iterator[Iterator[Part]]]] = {
    "cifar10": _cifar,
    "cifar100": _cifar,
    "imagenet32": _imagenet32,
    "mnist": _mnist,
}
_LAYOUTS = {
    "cifar10": (
        _Layout(
            "cifar-10-python.tar.gz", "cifar-10-batches-py", (_CIFAR10_BATCHES, ("test_batch",)),
            functools.partial(parse_pickle, label_key=b"labels"),
        ),
        _Layout(
            "cifar-10-binary.tar.gz", "cifar-10-batches-bin",
            (tuple(f"{batch}.bin" for batch in _CIFAR10_BATCHES), ("test_batch.bin",)),
            functools.partial(_parse_binary, label_bytes=1),
        ),
    ),
    "cifar100": (
        _Layout(
            "cifar-100-python.tar.gz", "cifar-100-python", (("train",), ("test",)),
            functools.partial(parse_pickle, label_key=b"fine_labels"),
        ),
        _Layout(
            "cifar-100-binary.tar.gz", "cifar-100-binary", (("train.bin",), ("test.bin",)),
            functools.partial(_parse_binary, label_bytes=2),
        ),
    ),
}  # fmt: skip
