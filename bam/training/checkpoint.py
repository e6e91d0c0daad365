"""Checkpoints of a run: atomic, the last two kept, resumable to the bit.

A checkpoint holds per-run secrets and, with a seed, the noise key: it is for resuming, never for
release.
"""

import errno
import os
import re
import tempfile
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from bam import files
from bam.core import pytree
from bam.errors import InputError
from bam.extras import needs
from bam.files import JsonObject

with needs("train"):
    import orbax.checkpoint as ocp

State = TypeVar("State")

KEPT = 2  # the newest, and one more should the newest be damaged
MIB = 2**20


class Checkpoints:
    """The checkpoints of one run in one folder; a context manager.

    A checkpoint appears whole or not at all: Orbax writes it beside its place and renames it.
    """

    def __init__(self, folder: Path | None) -> None:
        """Opens a folder, which need not exist yet; None keeps none."""
        self._manager: ocp.CheckpointManager | None = None
        if folder is not None:
            how = ocp.CheckpointManagerOptions(max_to_keep=KEPT, enable_async_checkpointing=False)
            self._manager = ocp.CheckpointManager(folder.absolute(), options=how)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *unused: object) -> None:
        if self._manager:
            self._manager.close()

    def check_room(self, state: PyTree) -> None:
        """Takes and frees the space that a checkpoint needs, or raises an OSError.

        On a full disk Orbax fails too, but in several threads and pages of traces; and a run that
        cannot be saved should not begin.
        """
        if self._manager is None:
            return
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + MIB  # Orbax's own files
        try:
            with tempfile.TemporaryFile(dir=self._manager.directory) as file:
                _reserve(file.fileno(), num_bytes)
        except OSError as error:
            raise OSError(
                f"a checkpoint needs {num_bytes / MIB:.1f} MiB in {self._manager.directory}: "
                f"{error.strerror or type(error).__name__}. Earlier ones are as they were"
            ) from None

    def save(self, step: int, state: PyTree, facts: JsonObject) -> None:
        """Writes a checkpoint, JSON facts beside the state; returns when it is safely there.

        A step saved already is left as it is. Raises OSError, as on a full disk; earlier ones stay.
        """
        if self._manager is None or step in self._manager.all_steps():
            return
        self.check_room(state)
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(jax.tree.map(_key_to_data, state)),
                    facts=ocp.args.JsonSave(facts),
                ),
            )
            if jax.process_index() == 0:  # Orbax forces the arrays to the disk, not its own files
                files.keep(Path(self._manager.directory) / str(step))
        except Exception as error:  # Orbax raises many kinds for one cause
            number = _os_error(error)
            if number is None:
                raise  # not the disk: another process of this run is gone, say
            raise OSError(
                f"the checkpoint of step {step} could not be written to {self._manager.directory}: "
                f"{os.strerror(number)}. Earlier ones are as they were"
            ) from None

    def restore(self, like: State) -> tuple[int, State, JsonObject] | None:
        """The newest checkpoint's `(step, state, facts)`, or None if there is none.

        `like` has the state's structure, shapes and dtypes; its values are not used. Raises
        InputError if it cannot be read as such a state.
        """
        step = self._manager.latest_step() if self._manager else None
        if self._manager is None or step is None:
            return None
        data_like = jax.tree.map(_key_to_data, like)
        try:
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(data_like), facts=ocp.args.JsonRestore()
                ),
            )
        except Exception as error:  # Orbax raises many kinds for one cause
            where = self._manager.directory / str(step)
            raise InputError(
                f"checkpoint {where} could not be read ({type(error).__name__}): if it is damaged, "
                "move that folder away to resume from the one before it"
            ) from None
        return step, jax.tree.map(_data_to_key, like, restored.state), restored.facts


def read(folder: Path, like: dict[str, PyTree]) -> tuple[dict[str, PyTree], JsonObject] | None:
    """Parts of the newest checkpoint, read on the host, and its facts; None if there is none.

    `like` has the parts by name, as pytrees of arrays or shapes, which are not compared. The folder
    and the rest are left alone. Raises InputError if it cannot be read, or has no such parts.
    """
    if not folder.is_dir():
        return None
    options = ocp.CheckpointManagerOptions(create=False)
    with ocp.CheckpointManager(folder.absolute(), options=options) as manager:
        step = manager.latest_step()
        if step is None:
            return None
        on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
        parts = ocp.args.PyTreeRestore(like, restore_args=on_host, partial_restore=True)
        try:
            restored = manager.restore(
                step, args=ocp.args.Composite(state=parts, facts=ocp.args.JsonRestore())
            )
        except Exception as error:  # Orbax raises many kinds for one cause
            where, problem = folder / str(step), type(error).__name__
            raise InputError(f"checkpoint {where} could not be read ({problem})") from None
    return restored.state, restored.facts


def _os_error(error: BaseException | None) -> int | None:
    """The number that the operating system gave an error, or one that led to it; None: none."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return error.errno
        if named := re.search(r"os_error_code='(\d+)'", str(error)):  # TensorStore's ValueError
            return int(named[1])
        error = error.__cause__
    return None


def _reserve(file: int, num_bytes: int) -> None:
    """Gives a file its space on disk, without writing it where the system can."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, num_bytes)
    elif os.fstatvfs(file).f_bavail * os.fstatvfs(file).f_frsize < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _key_to_data(leaf: PyTree) -> PyTree:
    return jax.random.key_data(leaf) if pytree.is_key(leaf) else leaf


def _data_to_key(like: PyTree, leaf: PyTree) -> PyTree:
    if not like.committed:  # placed as `like`, or what was compiled for that is compiled again
        leaf = jnp.asarray(np.asarray(leaf))
    if pytree.is_key(like):
        return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(like))
    return leaf
