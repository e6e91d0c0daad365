"""What a training by a loop of one's own has saved: facts and arrays, in a file, all or nothing."""

import io
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from bam import files
from bam.core import pytree
from bam.files import JsonObject

LIMIT = 2**40  # bytes
FACTS = {"training": dict, "step": int, "steps_begun": int, "leaves": list, "processes": list}


def encoded(facts: JsonObject, tree: PyTree, secret: bytes) -> bytes:
    """The file's content; ValueError for a leaf of no numbers, or that has a secret's bytes."""
    for name, leaf in zip(pytree.names(tree), jax.tree.leaves(tree), strict=True):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise ValueError(f"{name} is not saved: give jax.random.key_data of a key of JAX's")
    arrays, facts = (
        [np.asarray(x) for x in jax.tree.leaves(tree)],
        facts | {"leaves": _described(tree)},
    )
    for name, array in zip(facts["leaves"], arrays, strict=True):
        if array.dtype.kind in "OSUMm" or (secret and secret in array.tobytes()):
            raise ValueError(f"{name} is not saved: it is no array of numbers, or a key of noise")
    file = io.BytesIO()
    np.savez(
        file, np.frombuffer(json.dumps(facts, default=np.generic.item).encode(), np.uint8), *arrays
    )
    return file.getvalue()


def read(path: Path) -> tuple[JsonObject, list[np.ndarray]]:
    """The facts and the arrays; ValueError, in one line, if a file is damaged or none."""
    content = files.read_bytes(path, LIMIT)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            first, *arrays = [file[f"arr_{i}"] for i in range(len(file.files))]
            facts = json.loads(first.tobytes())
    except Exception:  # NumPy and zipfile raise many kinds for one cause
        raise ValueError(f"{path} is damaged") from None
    kinds = {name: type(value) for name, value in facts.items()} if type(facts) is dict else {}
    if (
        FACTS.items() - kinds.items()
        or not all(type(x) is str for x in facts["leaves"])
        or not 0 <= facts["step"] <= facts["steps_begun"]
    ):
        raise ValueError(f"{path} is damaged, or was saved by another version of bam")
    return facts, arrays


def restored(path: Path, like: PyTree) -> PyTree:
    """The arrays, placed as those of a tree; itself if there are none, ValueError if others."""
    (facts, arrays), names = read(path), _described(like)
    if not arrays:
        return like
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


def _described(tree: PyTree) -> list[str]:
    """Name, dtype and shape of each leaf."""
    named = zip(pytree.names(tree), jax.tree.leaves(tree), strict=True)
    return [f"{name} {np.asarray(x).dtype}{list(np.shape(x))}" for name, x in named]
