"""The devices a run uses: all of them, each with a copy of weights and data, sharing the rows.

With several processes (`jax.distributed`, one for each host) every process runs the same program on
the same values, and what may differ between them is agreed on in `bam.core.processes`.
"""

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from bam.core import processes
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
    return processes.put(tree, NamedSharding(mesh, PartitionSpec()) if mesh else None)


def share_rows(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Shares out the leading axis of arrays among the devices, if it divides evenly; else copies.

    For functions whose rows are independent. The arrays are the same in every process.
    """
    if mesh is None or any(x.shape[0] % mesh.size for x in jax.tree.leaves(tree)):
        return replicate(tree, mesh)
    return processes.put(tree, NamedSharding(mesh, PartitionSpec(*mesh.axis_names)))


def room_for_data() -> int:
    """Bytes that a data set may take of each device's memory: half of it.

    On CPU it is a quarter of the machine's, shared by the devices, each of which has a copy.
    """
    if jax.default_backend() != "cpu" and (stats := jax.local_devices()[0].memory_stats()):
        return int(stats["bytes_limit"]) // 2
    copies = sum(device.process_index == jax.process_index() for device in visible())
    return machine_memory() // 4 // copies
