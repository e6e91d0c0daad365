"""Several processes of one run (`jax.distributed`): what may differ between them is agreed on."""

import os
import secrets

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import PyTree

from bam.core.pytree import is_key


def writes() -> bool:
    """Whether this process is the one that writes files and shows progress."""
    return jax.process_index() == 0


def random_bits(num_words: int) -> np.ndarray:
    """So many times 32 secret bits of the operating system, the same in every process."""
    return from_first(np.frombuffer(secrets.token_bytes(4 * num_words), np.uint32))


def from_first(value: np.generic | np.ndarray) -> np.ndarray:
    """What the first process has, of one shape and dtype in all of them, in every process."""
    several = jax.process_count() > 1
    return np.asarray(multihost_utils.broadcast_one_to_all(value) if several else value)


def any_of(flag: bool) -> bool:
    """Whether a flag is set in any process; all processes must ask."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def put(tree: PyTree, sharding: Sharding | None) -> PyTree:
    """Places a pytree of arrays, PRNG keys included; None is the default device.

    The tree is the same in every process, and each gives its own devices their part.
    """
    if isinstance(sharding, SingleDeviceSharding):
        sharding = None  # committed to it, an array would have the step compiled once more
    if jax.process_count() == 1 or sharding is None:
        return jax.device_put(tree, sharding)

    def place(leaf: jax.Array | np.ndarray) -> jax.Array:
        if is_key(leaf):
            data = place(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(place, tree)


def check_not_forked(process: int, what: str) -> None:
    """RuntimeError in another process than the one, `process`, in which `what` was made.

    A fork copies its secrets: both processes would draw the same batches and the same noise, and
    the difference of two models would have none.
    """
    if os.getpid() != process:
        raise RuntimeError(
            f"{what} was made in process {process}, and a fork in process {os.getpid()} would "
            "repeat its batches and its noise: make another one in each process"
        )
