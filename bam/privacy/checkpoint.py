"""A run's checkpoints: each is one file with a JSON header and the arrays of a pytree.

They are for resuming, never for release. The newest two are kept, so a damaged one costs the steps
since the one before it. The state is the same on every device of every process, so one process
writes it, in NumPy's format. A file is renamed when it is complete, so it is never half written.
"""

import errno
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jaxtyping import PyTree

from bam import files
from bam.core import pytree
from bam.errors import InputError
from bam.files import JsonObject
from bam.privacy import processes

KEPT = 2
MIB = 2**20
# Facts of a checkpoint and their types, see `bam.privacy.run`. "leaves" has a name, a dtype and a
# shape for each array.
HEADER = {
    "record": dict, "digests": dict, "processes": list, "step": int, "steps_begun": int,
    "more": dict, "leaves": list,
}  # fmt: skip


def newest(folder: Path) -> Path | None:
    """Returns the newest checkpoint in a folder, or None.

    The folder need not exist.
    """
    saved = _checkpoints_in(folder)
    return saved[-1] if saved else None


def _checkpoints_in(folder: Path) -> list[Path]:
    """Returns the checkpoints in a folder, oldest first."""
    return sorted((x for x in folder.glob("*.npz") if x.stem.isdecimal()), key=_step)


def _step(path: Path) -> int:
    return int(path.stem)


def check(tree: PyTree, secret: bytes) -> None:
    """Checks the leaves of a tree.

    InputError for a leaf that is not an array of numbers, or contains the secret's bytes.
    """
    for name, leaf in zip(pytree.names(tree), jax.tree.leaves(tree), strict=True):
        array = _on_host(leaf)
        if array.dtype.kind in "OSUMm" or (secret and secret in array.tobytes()):
            raise InputError(
                f"{name} cannot be saved: it is not an array of numbers, or it contains a noise key"
            )


def check_room(folder: Path, tree: PyTree) -> None:
    """Takes and frees the space that a checkpoint needs in a folder, or raises an OSError."""
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) + MIB  # names and the header
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            _reserve(file.fileno(), num_bytes)
    except OSError as error:
        raise OSError(
            f"a checkpoint needs {num_bytes / MIB:.1f} MiB in {folder}: "
            f"{error.strerror or type(error).__name__}. Earlier ones are as they were"
        ) from None


def _reserve(file: int, num_bytes: int) -> None:
    """Reserves a file's space on the disk, without writing it if the system can."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, num_bytes)
    elif os.fstatvfs(file).f_bavail * os.fstatvfs(file).f_frsize < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write(folder: Path, header: JsonObject, tree: PyTree) -> None:
    """Writes the checkpoint of `header["step"]`, and keeps only it and the one before it.

    OSError if it cannot be written, as on a full disk; earlier ones stay.
    """
    path = folder / f"{header['step']}.npz"
    earlier = _checkpoints_in(folder)
    for partial in folder.glob("*.partial"):  # left by a crash
        partial.unlink(missing_ok=True)
    header = header | {"leaves": _describe(tree)}
    text = json.dumps(header, default=np.generic.item).encode()
    try:
        with files.write_atomically(path, mode=0o600) as file:
            arrays = [_on_host(leaf) for leaf in jax.tree.leaves(tree)]
            np.savez(file, np.frombuffer(text, np.uint8), *arrays)
    except OSError as error:
        raise OSError(
            f"the checkpoint of step {header['step']} could not be written to {folder}: "
            f"{error.strerror or type(error).__name__}. Earlier ones are as they were"
        ) from None
    # A newer checkpoint than this one belongs to steps that are repeated now.
    older = [x for x in earlier if _step(x) < _step(path)][1 - KEPT :]
    for other in earlier:
        if other not in (*older, path):
            other.unlink(missing_ok=True)


def read_header(path: Path) -> JsonObject:
    """Returns the header of a checkpoint.

    InputError, in one line, if it is damaged.
    """
    return read(path, lambda name: False)[0]


def read(
    path: Path, chosen: Callable[[str], bool] = lambda name: True
) -> tuple[JsonObject, list[tuple[str, np.ndarray]]]:
    """Returns the header and the arrays with chosen names.

    InputError, in one line, for a damaged file.
    """
    damaged = InputError(
        f"checkpoint {path} could not be read: if it is damaged, move it away to resume from the "
        "one before it"
    )
    arrays = []
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise damaged
        # NumPy itself would leave a damaged file open.
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            header = json.loads(file["arr_0"].tobytes())
            # Exactly these keys and types: another version's file is refused.
            if {name: type(value) for name, value in header.items()} != HEADER:
                raise damaged
            for i, (name, dtype, shape) in enumerate(header["leaves"], start=1):
                if chosen(name):
                    # In the file, bfloat16 is two bytes without a type.
                    array = file[f"arr_{i}"].view(np.dtype(dtype)).reshape(shape)
                    arrays.append((name, array))
    except FileNotFoundError:
        raise
    except Exception:  # NumPy and zipfile raise many types for a damaged file
        raise damaged from None
    if not 0 <= header["step"] <= header["steps_begun"]:
        raise damaged
    return header, arrays


def restore(path: Path, like: PyTree) -> PyTree:
    """Returns the pytree of a checkpoint, placed on devices as `like`.

    This is `like` itself if none was saved. InputError if the saved pytree has other arrays.
    """
    header, arrays = read(path)
    if not header["leaves"]:
        return like
    for old, new in zip([*header["leaves"], None], [*_describe(like), None], strict=False):
        if old != new:
            raise InputError(f"{path} has {_in_words(old)}, but this training has {_in_words(new)}")
    leaves, structure = jax.tree.flatten(like)
    return jax.tree.unflatten(structure, map(_place, leaves, (x for _, x in arrays)))


def _place(leaf: PyTree, array: np.ndarray) -> PyTree:
    """Returns the array on the leaf's device, so that programs compiled for the leaf serve it."""
    if not isinstance(leaf, jax.Array):
        return array
    if pytree.is_key(leaf):
        data = _place(jax.random.key_data(leaf), array)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if jax.process_count() > 1 and leaf.committed:
        return processes.put(array, leaf.sharding)
    return jax.device_put(array, leaf.sharding if leaf.committed else None)


def _describe(tree: PyTree) -> list[list[object]]:
    """Returns name, dtype and shape of each leaf, as JSON values."""
    # A typed key is stored as its words.
    arrays = [jax.random.key_data(x) if pytree.is_key(x) else x for x in jax.tree.leaves(tree)]
    arrays = [x if hasattr(x, "dtype") else np.asarray(x) for x in arrays]
    leaves = zip(pytree.names(tree), arrays, strict=True)
    return [[name, x.dtype.name, list(x.shape)] for name, x in leaves]


def _in_words(leaf: list[object] | None) -> str:
    return f"{leaf[0]} {leaf[1]}{leaf[2]}" if leaf else "nothing"


def _on_host(leaf: PyTree) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if pytree.is_key(leaf) else leaf)
