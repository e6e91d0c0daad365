"""What a training by a loop of one's own has saved: facts and arrays, in a file, all or nothing."""

import contextlib
import functools
import hashlib
import inspect
import io
import json
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from bam import files
from bam.core import pytree
from bam.errors import InputError
from bam.files import JsonObject

LIMIT = 2**40  # bytes
PLAIN = (bool, int, float, str, tuple, np.ndarray, np.generic, jax.Array)
FACTS = {"training": dict, "step": int, "steps_begun": int, "leaves": list, "processes": list}


def in_words(value: Any, above: tuple[int, ...] = ()) -> str:
    """A function, by its name and the values that it keeps, in words that every process gives.

    For example "bam.core.clipping.normalize.<locals>.update(bound=1.0, floor=0.01)". Kept are the
    values that it closes over, defaults and, in objects, attributes that are plain. Arrays stand by
    a digest; the function's lines are not told.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | int | float | str | bytes | None):
        return repr(value)
    if id(value) in above or len(above) > 20:  # a function that calls itself, a list in itself
        return type(value).__qualname__
    describe = functools.partial(in_words, above=(*above, id(value)))
    if isinstance(value, np.ndarray | jax.Array):
        array = np.asarray(value)
        content = repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
        return f"{array.dtype}{list(array.shape)} {hashlib.sha256(content).hexdigest()[:16]}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(describe, value))}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(describe, value)))}}}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{describe(key)}: {describe(x)}' for key, x in value.items())}}}"
    if isinstance(value, functools.partial):
        return describe([value.func, value.args, value.keywords])
    if isinstance(value, type | types.ModuleType):
        return value.__name__
    function = inspect.unwrap(value) if callable(value) else value
    kept = {}
    if isinstance(function, types.FunctionType):
        parameters = inspect.signature(function).parameters.values()
        kept = {x.name: x.default for x in parameters if x.default is not x.empty}
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            with contextlib.suppress(ValueError):  # an empty cell
                kept[name] = cell.cell_contents
    elif isinstance(function, types.MethodType):
        kept = {"self": function.__self__}
    elif isinstance(vars(type(function)).get("__dict__"), types.GetSetDescriptorType):
        kept = {k: x for k, x in sorted(vars(function).items()) if isinstance(x, PLAIN)}
    named: Any = function if hasattr(function, "__qualname__") else type(function)
    words = ", ".join(f"{key}={describe(x)}" for key, x in kept.items())
    return f"{named.__module__}.{named.__qualname__}({words})"


def encoded(facts: JsonObject, tree: PyTree, secret: bytes) -> bytes:
    """The file's content; InputError for a leaf of no numbers, or that has a secret's bytes."""
    for name, leaf in zip(pytree.names(tree), jax.tree.leaves(tree), strict=True):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise InputError(f"{name} is not saved: give jax.random.key_data of a key of JAX's")
    arrays, facts = (
        [np.asarray(x) for x in jax.tree.leaves(tree)],
        facts | {"leaves": _described(tree)},
    )
    for name, array in zip(facts["leaves"], arrays, strict=True):
        if array.dtype.kind in "OSUMm" or (secret and secret in array.tobytes()):
            raise InputError(f"{name} is not saved: it is no array of numbers, or a key of noise")
    file = io.BytesIO()
    np.savez(
        file, np.frombuffer(json.dumps(facts, default=np.generic.item).encode(), np.uint8), *arrays
    )
    return file.getvalue()


def read(path: Path) -> tuple[JsonObject, list[np.ndarray]]:
    """The facts and the arrays; InputError, in one line, if a file is damaged or none."""
    content = files.read_bytes(path, LIMIT)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            first, *arrays = [file[f"arr_{i}"] for i in range(len(file.files))]
            facts = json.loads(first.tobytes())
    except Exception:  # NumPy and zipfile raise many kinds for one cause
        raise InputError(f"{path} is damaged") from None
    kinds = {name: type(value) for name, value in facts.items()} if type(facts) is dict else {}
    if (
        FACTS.items() - kinds.items()
        or not all(type(x) is str for x in facts["leaves"])
        or not 0 <= facts["step"] <= facts["steps_begun"]
        or not {type(x) for x in facts["training"].get("data") or ()} <= {str}
        or not {type(x) for x in facts["training"].get("groups") or ()} <= {str}
    ):
        raise InputError(f"{path} is damaged, or was saved by another version of bam")
    return facts, arrays


def restored(path: Path, like: PyTree) -> PyTree:
    """The arrays, placed as those of a tree; itself if there are none, InputError if others."""
    (facts, arrays), names = read(path), _described(like)
    if not arrays:
        return like
    for old, new in zip([*facts["leaves"], "nothing"], [*names, "nothing"], strict=False):
        if old != new:
            raise InputError(f"{path} has {old}, where there is {new}")

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
