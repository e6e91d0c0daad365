"""The devices a run uses: all of them, each with a copy of weights and data, sharing the rows.

With several processes (`jax.distributed`, one for each host) every process runs the same program on
the same values, so all that may differ between them, random bits and clocks, is agreed on here.
"""

import secrets
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from bam.tree import is_key


def visible() -> list[jax.Device]:
    """The devices that a run uses, those of all processes."""
    return jax.devices()


def name() -> str:
    """Kind of the first device, for example "cpu" or "NVIDIA H100 80GB HBM3"."""
    return jax.devices()[0].device_kind


def mesh() -> Mesh | None:
    """All visible devices along one axis, "data"; None where there is only one.

    Returns:
      A mesh for `bam.clipped_sum`.
    """
    found = visible()
    if len(found) == 1:
        return None
    return jax.make_mesh((len(found),), ("data",), axis_types=(AxisType.Auto,), devices=found)


def replicate(tree: Any, mesh: Mesh | None) -> Any:
    """Copies a pytree of arrays to every device.

    Args:
      tree: arrays, on the host or on a device; the same in every process.
      mesh: from `mesh`; None is the default device.

    Returns:
      The same tree of JAX arrays.
    """
    return put(tree, NamedSharding(mesh, PartitionSpec()) if mesh else None)


def share_rows(tree: Any, mesh: Mesh | None) -> Any:
    """Deals the leading axis of arrays to the devices, if it divides evenly; copies otherwise.

    Args:
      tree: arrays with one leading axis in common; the same in every process.
      mesh: from `mesh`.

    Returns:
      The same tree of JAX arrays, for functions whose rows are independent.
    """
    if mesh is None or any(x.shape[0] % mesh.size for x in jax.tree.leaves(tree)):
        return replicate(tree, mesh)
    return put(tree, NamedSharding(mesh, PartitionSpec(*mesh.axis_names)))


def put(tree: Any, sharding: Sharding | None) -> Any:
    """Places a pytree of arrays; every process gives its own devices their part.

    Args:
      tree: arrays, PRNG keys included; the same in every process.
      sharding: where to; None is the default device.

    Returns:
      The same tree of JAX arrays.
    """
    if jax.process_count() == 1 or sharding is None:
        return jax.device_put(tree, sharding)

    def place(leaf: Any) -> jax.Array:
        if is_key(leaf):
            data = place(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(place, tree)


def writes() -> bool:
    """Whether this process is the one that writes files and shows progress."""
    return jax.process_index() == 0


def random_bits(num_words: int) -> np.ndarray:
    """Secret bits of the operating system, the same in every process.

    Args:
      num_words: how many times 32 bits.

    Returns:
      `[num_words]`, uint32.
    """
    words = np.frombuffer(secrets.token_bytes(4 * num_words), np.uint32)
    return np.asarray(first_ones(words), np.uint32)


def first_ones(value: Any) -> Any:
    """What the first process has, in every process.

    Args:
      value: a number or NumPy array, of one shape and dtype in every process.

    Returns:
      The first process's value.
    """
    return value if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(value)


def any_of(flag: bool) -> bool:
    """Whether a flag is set in any process; all processes must ask.

    Args:
      flag: this process's.

    Returns:
      The same answer in every process.
    """
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))
