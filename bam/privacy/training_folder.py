"""The folder of a training by a loop of one's own: what it takes to go on after a crash.

`training.npz` is all or nothing: the facts that the training must agree with, and the arrays that
were saved. `steps_begun` is the ledger (`bam.privacy.ledger`) of a training without a seed, and
`lock` is its process's. The folder is for resuming, never for release.
"""

import contextlib
import io
import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from bam import files
from bam.core import pytree
from bam.files import JsonObject
from bam.privacy import ledger
from bam.privacy.ledger import Ledger
from bam.privacy.plan import PrivacyPlan

LIMIT = 2**40  # bytes of what was saved


class TrainingFolder:
    """A folder that one process at a time trains in; its lock is held until it is closed."""

    def __init__(self, path: str | os.PathLike[str], *, is_new: bool) -> None:
        """Takes the folder of a new training, or of one that was saved there.

        ValueError if there is another one, or none; BlockingIOError if a training has the lock.
        """
        self.path = files.user_path(path)
        self._file = self.path / "training.npz"
        self._check(is_new)
        files.make_folder(self.path, mode=0o700)
        with contextlib.ExitStack() as opened:
            opened.enter_context(files.lock(self.path))
            self._check(is_new)  # once more: another may have begun meanwhile
            self._open = opened.pop_all()

    def _check(self, is_new: bool) -> None:
        if is_new and (self._file.exists() or (self.path / "config.json").exists()):
            raise ValueError(f"{self.path} holds a training: save this one in another folder")
        if not is_new and not self._file.exists():
            raise ValueError(f"{self.path} holds no training that was saved")

    def close(self) -> None:
        """Lets others have the folder."""
        self._open.close()

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """Whether this is that folder."""
        return self.path.resolve() == files.user_path(path).resolve()

    def ledger(self, plan: PrivacyPlan, secret: bool, step: int, at_least: int) -> Ledger:
        """The ledger, see `Ledger`; without a secret it has no file: lost steps cost nothing."""
        counted = Ledger(self.path / "steps_begun" if secret else None, plan, step, at_least)
        self._open.callback(counted.close)
        return counted

    def new_ledger(self, plan: PrivacyPlan, secret: bool, steps_begun: int) -> Ledger:
        """The same of a new training, which has begun so many steps."""
        if secret:
            ledger.create(self.path / "steps_begun")
        counted = self.ledger(plan, secret, 0 if secret else steps_begun, 0)
        while counted.begun < steps_begun:
            counted.begin()
        counted.force()
        return counted

    def write(self, content: bytes) -> None:
        """Replaces what was saved by what is `encoded`."""
        files.write_bytes(self._file, content, mode=0o600)

    def facts(self) -> JsonObject:
        """The facts that were saved."""
        return files.as_object(self._read("facts")[0], self._file)

    def read(self, like: PyTree) -> PyTree:
        """What was saved, on the devices of `like`; ValueError if it is of another structure."""
        saved, wanted = self.facts()["leaves"], _described(like)
        for old, new in zip([*saved, None], [*wanted, None], strict=False):
            if old != new:
                raise ValueError(f"{self._file} has the array {old}, where {new} is wanted")
        contents = self._read(*(str(i) for i in range(len(saved))))
        leaves, structure = jax.tree.flatten(like)
        return jax.tree.unflatten(structure, map(_like, leaves, contents))

    def _read(self, *names: str) -> list[bytes]:
        content = files.read_bytes(self._file, LIMIT)
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as stored:
                return [stored[name].tobytes() for name in names]
        except Exception:  # NumPy and zipfile raise many kinds for one cause
            raise ValueError(f"{self._file} is damaged") from None


def encoded(facts: JsonObject, tree: PyTree, secret: bytes) -> bytes:
    """What is written of facts and a tree; ValueError for a leaf that is none of numbers.

    So it is if the bytes of a `secret` are in a leaf.
    """
    described = _described(tree)
    arrays = [np.asarray(_data(x)) for x in jax.tree.leaves(tree)]
    for x, (name, dtype, _) in zip(arrays, described, strict=True):
        if not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == np.bool_):
            raise ValueError(f"{name} is of {dtype}: numbers alone are saved")
        if secret and secret in x.tobytes():
            raise ValueError(f"{name} is the key of the noise: give the state that has it instead")
    contents = {str(i): x.tobytes() for i, x in enumerate(arrays)}
    contents["facts"] = json.dumps(facts | {"leaves": described}).encode()
    file = io.BytesIO()
    np.savez(file, **{name: np.frombuffer(x, np.uint8) for name, x in contents.items()})
    return file.getvalue()


def _described(tree: PyTree) -> list[list[Any]]:
    """Name, dtype and shape of each leaf."""
    return [
        [
            jax.tree_util.keystr(path, simple=True, separator="/"),
            str(getattr(x, "dtype", type(x).__name__)),
            list(np.shape(x)),
        ]
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if pytree.is_key(leaf) else leaf


def _like(leaf: Any, content: bytes) -> Any:
    """A leaf of these bytes."""
    like = np.asarray(_data(leaf))
    array = np.frombuffer(content, like.dtype).reshape(like.shape).copy()
    if pytree.is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array):
        return jax.device_put(array, leaf.sharding if leaf.committed else None)
    return array if isinstance(leaf, np.ndarray) else type(leaf)(array[()])
