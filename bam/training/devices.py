"""The devices of a run: each has a copy of the weights and data, and they share the rows.

With several processes (`jax.distributed`, one for each host), every process runs the same program
on the same values. `bam.privacy.processes` makes them agree on values that may differ, such as the
time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh
from jaxtyping import PyTree

from bam import memory
from bam.privacy import processes


def visible() -> list[jax.Device]:
    """Returns the devices of a run: those of all processes."""
    return jax.devices()


def name() -> str:
    """Returns the kind of the first device, for example "cpu" or "NVIDIA H100 80GB HBM3"."""
    return jax.devices()[0].device_kind


def mesh(devices: Sequence[jax.Device]) -> Mesh | None:
    """Returns a mesh of devices along one axis, "data", for `bam.clipped_sum`.

    None for a single device.
    """
    if len(devices) == 1:
        return None
    # The default, explicit axes, refuses operations whose sharding is ambiguous.
    return jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def replicate(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Copies a pytree of arrays to every device of a mesh.

    The arrays must be equal in every process.
    """
    return processes.put(tree, processes.everywhere(mesh))


def share_rows(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Places arrays, equal in every process, with the sharding `processes.of_rows`."""
    return processes.put(tree, processes.of_rows(len(jax.tree.leaves(tree)[0]), mesh))


def room_for_data() -> int:
    """Returns the bytes of a device's memory that a data set may take: half of it.

    On a CPU they are a quarter of the machine's memory, divided by its number of devices.
    """
    if jax.default_backend() != "cpu" and (stats := jax.local_devices()[0].memory_stats()):
        return int(stats["bytes_limit"]) // 2
    # Devices of one CPU share its memory, and each has a copy of the data.
    copies = sum(device.process_index == jax.process_index() for device in visible())
    return memory.machine() // 4 // copies


def needs(program: Callable[..., Any], *args: Any) -> memory.Needs | None:
    """Returns `memory.needs` of a run's program, with the least memory that is free in any process.

    So all processes decide alike whether the program fits.
    """
    needed = memory.needs(program, *args)
    return needed and needed._replace(free=int(processes.least(needed.free)))
