"""Several processes of one run (`jax.distributed`): they agree on anything that may differ."""

import secrets

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import PyTree

from bam.core.pytree import is_key


def writes() -> bool:
    """Returns whether this process is the one that writes files and shows progress."""
    return jax.process_index() == 0


def random_words(num_words: int) -> np.ndarray:
    """Returns secret 32-bit words of the operating system, the same in every process."""
    return from_first(np.frombuffer(secrets.token_bytes(4 * num_words), np.uint32))


def random_seed() -> int:
    """Returns a seed of 256 random bits of the operating system, the same in every process."""
    return int.from_bytes(random_words(8).tobytes())


def from_first(value: np.generic | np.ndarray) -> np.ndarray:
    """Returns the first process's value, in every process.

    The shape and dtype of the value must be the same in all processes.
    """
    if jax.process_count() == 1:
        return np.asarray(value)
    return np.asarray(multihost_utils.broadcast_one_to_all(value))


def any_of(flag: bool) -> bool:
    """Returns whether a flag is set in any process.

    Every process must call this.
    """
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def least(value: float) -> float:
    """Returns the smallest of all processes' values, as a 32-bit float.

    Every process must call this.
    """
    if jax.process_count() == 1:
        return value
    return float(np.min(multihost_utils.process_allgather(np.float32(value))))


def everywhere(mesh: Mesh | None) -> NamedSharding | None:
    """Returns the sharding of arrays that every device has, or None for a single device."""
    return NamedSharding(mesh, PartitionSpec()) if mesh else None


def of_rows(num_rows: int, mesh: Mesh | None) -> NamedSharding | None:
    """Returns the sharding of arrays of so many rows, for functions whose rows are independent.

    The rows are shared over the devices, or copied if they do not divide evenly; None for a single
    device.
    """
    if mesh is None:
        return None
    axes = mesh.axis_names if num_rows % mesh.size == 0 else ()
    return NamedSharding(mesh, PartitionSpec(*axes))


def put(tree: PyTree, sharding: Sharding | None) -> PyTree:
    """Places a pytree of arrays, PRNG keys included, on the devices of a sharding.

    None is the default device. The tree is the same in every process, and each process fills its
    own devices.
    """
    if isinstance(sharding, SingleDeviceSharding):
        sharding = None  # arrays committed to a device would compile the step once more
    if jax.process_count() == 1 or sharding is None:
        return jax.device_put(tree, sharding)

    def place(leaf: jax.Array | np.ndarray) -> jax.Array:
        if is_key(leaf):
            data = place(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(place, tree)
