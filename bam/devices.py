"""The devices a run uses: all of them, each with a copy of weights and data, sharing the rows."""

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def visible() -> list[jax.Device]:
    """The devices that a run uses."""
    return jax.devices()


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
      tree: arrays, on the host or on a device.
      mesh: from `mesh`; None is the default device.

    Returns:
      The same tree of JAX arrays.
    """
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()) if mesh else None)


def share_rows(tree: Any, mesh: Mesh | None) -> Any:
    """Deals the leading axis of arrays to the devices, if it divides evenly; copies otherwise.

    Args:
      tree: arrays with one leading axis in common.
      mesh: from `mesh`.

    Returns:
      The same tree of JAX arrays, for functions whose rows are independent.
    """
    if mesh is None or any(x.shape[0] % mesh.size for x in jax.tree.leaves(tree)):
        return replicate(tree, mesh)
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*mesh.axis_names)))
