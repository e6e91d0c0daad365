"""The devices a run uses: all of them, each with a copy of weights and data, sharing the rows.

With several processes (`jax.distributed`, one for each host) every process runs the same program on
the same values, and what may differ between them is agreed on in `bam.core.processes`.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from jaxtyping import PyTree

from bam.core.pytree import is_key
from bam.data.common import machine_memory


def visible() -> list[jax.Device]:
    """The devices that a run uses, those of all processes."""
    return jax.devices()


def name() -> str:
    """Kind of the first device, for example "cpu" or "NVIDIA H100 80GB HBM3"."""
    return jax.devices()[0].device_kind


def mesh(devices: Sequence[jax.Device]) -> Mesh | None:
    """Devices along one axis, "data", for `bam.clipped_sum`; None for a single one."""
    if len(devices) == 1:
        return None
    return jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def replicate(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Copies a pytree of arrays, the same in every process, to every device of a mesh."""
    return put(tree, NamedSharding(mesh, PartitionSpec()) if mesh else None)


def share_rows(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Shares out the leading axis of arrays among the devices, if it divides evenly; else copies.

    For functions whose rows are independent. The arrays are the same in every process.
    """
    if mesh is None or any(x.shape[0] % mesh.size for x in jax.tree.leaves(tree)):
        return replicate(tree, mesh)
    return put(tree, NamedSharding(mesh, PartitionSpec(*mesh.axis_names)))


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


def room_for_data() -> int:
    """Bytes that a data set may take of each device's memory: half of it.

    On CPU it is a quarter of the machine's, shared by the devices, each of which has a copy.
    """
    if jax.default_backend() != "cpu" and (stats := jax.local_devices()[0].memory_stats()):
        return int(stats["bytes_limit"]) // 2
    copies = sum(device.process_index == jax.process_index() for device in visible())
    return machine_memory() // 4 // copies
