"""The official distributions: CIFAR archives, ImageNet32 batches, MNIST's idx files.

Everything is read from local files. Whole CIFAR archives are checked against their published MD5
sums, every set against its published number of rows, and the pickles of the Python archives can run
nothing (`safe_pickle`). No file is read, or unpacked, beyond what such a set can have.
"""

import functools
import gzip
import hashlib
import io
import math
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from bam.data.catalogue import DATASETS, Facts
from bam.data.common import DataError, Split, check_labels, check_size, read_file
from bam.data.sources import safe_pickle
from bam.errors import InputError

MD5 = {
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85",
    "cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8",
}

_CIFAR10_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
_IMAGENET32_FILES = (tuple(f"train_data_batch_{i}.npz" for i in range(1, 11)), ("val_data.npz",))
# Of a row of CIFAR in any layout: a pickle may take two bytes for one, and the file's name.
_CIFAR_ROW_BYTES = 2 * 3074 + 256
MIB = 2**20
MAX_HEADER = 10_000  # bytes that say an array's shape and dtype; NumPy reads no longer ones either

# Of a part of a split: the file of its labels, images [n, h, w, c], and labels.
Part: TypeAlias = tuple[str, np.ndarray, np.ndarray]


class _Layout(NamedTuple):
    """One of the forms in which a CIFAR data set is distributed."""

    archive: str
    folder: str
    files: tuple[tuple[str, ...], tuple[str, ...]]  # of the training and the test split
    parse: Callable[[bytes, str], tuple[np.ndarray, np.ndarray]]


def read(name: str, path: Path) -> tuple[Split, Split]:
    """Training and test split of an official distribution, in its order, from local files.

    `path` is the folder that holds the files. For CIFAR also the `.tar.gz` itself, or a folder with
    either the archive or what was extracted from it, Python or binary version. For ImageNet32
    `train_data_batch_1.npz` to `_10.npz` and `val_data.npz`; for MNIST the four idx files, with or
    without `.gz`. DataError for a missing, truncated or altered file, or labels out of range.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    facts = DATASETS[name]
    train, test = (
        _join(parts, rows, facts, path)
        for parts, rows in zip(_READERS[name](name, path), facts.rows, strict=True)
    )
    return train, test


def _join(parts: Iterator[Part], rows: int, facts: Facts, path: Path) -> Split:
    """Fills one array part by part, so that ImageNet32 is never in memory twice."""
    images, labels = np.empty((rows, *facts.shape), np.uint8), np.empty(rows, np.int32)
    start = 0
    for where, part_images, part_labels in parts:
        checked = check_labels(part_labels, facts.num_classes, where)
        stop = start + len(checked)
        if len(part_images) != len(checked) or part_images.shape[1:] != facts.shape:
            raise DataError(f"{path}: images {part_images.shape} do not fit {len(checked)} labels")
        if stop <= rows:
            images[start:stop], labels[start:stop] = part_images, checked
        start = stop
    if start != rows:
        raise DataError(f"{path}: {start} rows in all, the official split has {rows}")
    return Split(images, labels)


def _cifar(name: str, path: Path) -> Iterator[Iterator[Part]]:
    layout, contents = _cifar_contents(name, path)

    def parts(files: tuple[str, ...]) -> Iterator[Part]:
        for file in files:
            where = f"{path}: {file}"
            pixels, labels = layout.parse(contents[file], where)
            yield where, _channels_last(pixels, where), labels

    return (parts(files) for files in layout.files)


def _cifar_contents(name: str, path: Path) -> tuple[_Layout, dict[str, bytes]]:
    """The first of the data set's layouts that is at `path`, and its files' bytes."""
    layouts = _LAYOUTS[name]
    limit = max(DATASETS[name].rows) * _CIFAR_ROW_BYTES + MIB
    for layout in layouts:
        archive = path if path.is_file() and path.name == layout.archive else path / layout.archive
        if archive.is_file():
            return layout, _untar(archive, layout, limit)
        for folder in (path / layout.folder, path):
            if (folder / layout.files[0][0]).is_file():
                return layout, {
                    file: read_file(folder / file, limit)
                    for files in layout.files
                    for file in files
                }
    expected = " or ".join(layout.archive for layout in layouts)
    raise DataError(f"{path}: neither {expected} nor what they contain")


def _untar(archive: Path, layout: _Layout, limit: int) -> dict[str, bytes]:
    """Reads an archive's members, of `limit` bytes at most, once its checksum is right."""
    with archive.open("rb") as file:
        md5 = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if md5 != MD5[layout.archive]:
        raise DataError(
            f"{archive}: MD5 {md5}, expected {MD5[layout.archive]}: truncated or altered; "
            "download it again"
        )
    wanted = {f"{layout.folder}/{file}": file for files in layout.files for file in files}
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                if name in wanted and (handle := tar.extractfile(member)) is not None:
                    check_size(member.size, limit, f"{archive}: {name}")
                    contents[wanted[name]] = handle.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{archive}: not a readable archive: {error}") from error
    missing = [file for name, file in wanted.items() if file not in contents]
    if missing:
        raise DataError(f"{archive}: {', '.join(missing)} missing inside")
    return contents


def _parse_binary(content: bytes, where: str, label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Records of `label_bytes` labels, the last of them the one wanted, and 3072 pixels."""
    size = label_bytes + 3072
    if len(content) % size:
        raise DataError(f"{where}: truncated in row {len(content) // size}")
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    return records[:, label_bytes:], records[:, label_bytes - 1].astype(np.int64)


def _imagenet32(name: str, path: Path) -> Iterator[Iterator[Part]]:
    for files, rows in zip(_IMAGENET32_FILES, DATASETS[name].rows, strict=True):
        rows_per_file = 2 * rows // len(files)  # the official ones differ little
        yield (_imagenet32_batch(path / file, rows_per_file) for file in files)


def _imagenet32_batch(file: Path, most_rows: int) -> Part:
    if not file.is_file():
        raise DataError(f"{file}: missing")
    try:
        with zipfile.ZipFile(file) as batch:
            pixels = _npy(batch, "data", most_rows * 3072)
            labels = np.asarray(_npy(batch, "labels", most_rows * 8), np.int64)
    except DataError as error:
        raise DataError(f"{file}: {error}") from error
    # A damaged file raises nearly anything.
    except Exception as error:
        raise DataError(f"{file}: not a readable batch: {error}") from error
    return str(file), _channels_last(pixels, str(file)), labels - 1


def _npy(batch: zipfile.ZipFile, name: str, limit: int) -> np.ndarray:
    """An array of an npz file, once its header declares no more than `limit` bytes."""
    # NumPy writes no other; bzip2 and LZMA are not unpacked piece by piece.
    if batch.getinfo(f"{name}.npy").compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InputError(f"{name} is compressed as NumPy does not")
    with batch.open(f"{name}.npy") as file:
        head = io.BytesIO(file.read(12 + MAX_HEADER))  # no further, whatever length it declares
    long = np.lib.format.read_magic(head) != (1, 0)
    declared = int.from_bytes(head.read(4 if long else 2), "little")
    check_size(declared, MAX_HEADER, f"{name}'s header")
    head.seek(8)
    read = np.lib.format.read_array_header_2_0 if long else np.lib.format.read_array_header_1_0
    shape, _, dtype = read(head)
    check_size(math.prod(shape) * dtype.itemsize, limit, name)
    with batch.open(f"{name}.npy") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _mnist(name: str, path: Path) -> Iterator[Iterator[Part]]:
    for stem, rows in zip(("train", "t10k"), DATASETS[name].rows, strict=True):
        images = _idx(path, f"{stem}-images-idx3-ubyte", (rows, 28, 28))[..., None]
        labels = _idx(path, f"{stem}-labels-idx1-ubyte", (rows,))
        yield iter([(str(path / f"{stem}-labels-idx1-ubyte"), images, labels)])


def _idx(folder: Path, name: str, largest: tuple[int, ...]) -> np.ndarray:
    """The uint8 array of an idx file: a magic number, big-endian lengths, then the bytes."""
    file = next((f for f in (folder / f"{name}.gz", folder / name) if f.is_file()), folder / name)
    num_axes = len(largest)
    start = 4 + 4 * num_axes
    limit = start + math.prod(largest)
    if file.suffix == ".gz":
        try:
            with gzip.open(file) as unpacked:
                content = unpacked.read(limit + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{file}: truncated or altered: {error}") from error
        check_size(len(content), limit, f"{file}, unpacked")
    else:
        content = read_file(file, limit)
    if len(content) < start or content[:4] != bytes((0, 0, 8, num_axes)):
        raise DataError(f"{file}: not an idx file of bytes with {num_axes} axes")
    shape = struct.unpack(f">{num_axes}I", content[4:start])
    expected = int(np.prod(shape, dtype=object))
    if len(content) - start != expected:
        raise DataError(f"{file}: {len(content) - start} bytes after the header, not {expected}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _channels_last(pixels: np.ndarray, where: str) -> np.ndarray:
    """`[n, 3072]` with whole colour planes, as all three distributions have it, to NHWC."""
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3072:
        raise DataError(f"{where}: {pixels.dtype} {pixels.shape}, expected uint8 rows of 3072")
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
            functools.partial(safe_pickle.parse, label_key=b"labels"),
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
            functools.partial(safe_pickle.parse, label_key=b"fine_labels"),
        ),
        _Layout(
            "cifar-100-binary.tar.gz", "cifar-100-binary", (("train.bin",), ("test.bin",)),
            functools.partial(_parse_binary, label_bytes=2),
        ),
    ),
}  # fmt: skip
