"""What a training by a loop of one's own has saved: facts and arrays, in a file, all or nothing."""

import io
import json
from pathlib import Path

import jax
import numpy as np
from jaxtyping import PyTree

from bam import files
from bam.files import JsonObject

LIMIT = 2**40  # bytes


def encoded(facts: JsonObject, tree: PyTree, secret: bytes) -> bytes:
    """The file's content; ValueError for a leaf of no numbers, or that has a secret's bytes."""
    arrays, facts = [np.asarray(x) for x in jax.tree.leaves(tree)], facts | {"leaves": _names(tree)}
    for name, array in zip(facts["leaves"], arrays, strict=True):
        if array.dtype.kind in "OSUMm" or (secret and secret in array.tobytes()):
            raise ValueError(f"{name} is not saved: it is no array of numbers, or a key of noise")
    file = io.BytesIO()
    named = {"facts": np.frombuffer(json.dumps(facts, default=int).encode(), np.uint8)}
    np.savez(file, *arrays, **named)
    return file.getvalue()


def read(path: Path) -> tuple[JsonObject, list[np.ndarray]]:
    """The facts and the arrays; ValueError, in one line, if a file is damaged or none."""
    content = files.read_bytes(path, LIMIT)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            facts: JsonObject = json.loads(file["facts"].tobytes())
            return facts, [file[f"arr_{i}"] for i in range(len(facts["leaves"]))]
    except Exception:  # NumPy and zipfile raise many kinds for one cause
        raise ValueError(f"{path} is damaged") from None


def restored(path: Path, like: PyTree) -> PyTree:
    """The arrays, placed as those of a tree; ValueError if its leaves are others."""
    (facts, arrays), names = read(path), _names(like)
    for old, new in zip([*facts["leaves"], "nothing"], [*names, "nothing"], strict=False):
        if old != new:
            raise ValueError(f"{path} has {old}, where there is {new}")

    def placed(leaf: PyTree, array: np.ndarray) -> PyTree:
        array = array.view(np.asarray(leaf).dtype)  # bfloat16 is two bytes of no type in the file
        if not isinstance(leaf, jax.Array):
            return array
        return jax.device_put(array, leaf.sharding if leaf.committed else None)

    leaves, structure = jax.tree.flatten(like)
    return jax.tree.unflatten(structure, map(placed, leaves, arrays))


def _names(tree: PyTree) -> list[str]:
    """Name, dtype and shape of each leaf."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")  # noqa: E731
    return [f"{name(path)} {np.asarray(x).dtype}{list(np.shape(x))}".strip() for path, x in named]
