"""How a command sets up JAX before it starts: its processes, CPU devices and cache of programs."""

import os
import re
import stat
import sys
from pathlib import Path

from bam.cli import screen
from bam.errors import InputError


def join_processes(
    coordinator: str, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Joins this process to others that train together, through `jax.distributed`.

    If one of them dies, the others end within half a minute. `coordinator` is "HOST:PORT" of the
    first process; "auto", without the two numbers, if SLURM, Kubernetes, Cloud TPU or MPI sets
    them; or "" for a single process. InputError if these do not describe a set of processes,
    OSError if the other processes cannot be reached.
    """
    import jax

    numbers, automatic = (num_processes, process_id), coordinator == "auto"
    if (not coordinator or automatic) and numbers != (None, None):
        raise InputError("--num_processes and --process_id need --coordinator=HOST:PORT")
    if not coordinator:
        return
    if not automatic and (None in numbers or not re.fullmatch(r".+:[0-9]+", coordinator)):
        raise InputError("--coordinator=HOST:PORT needs --num_processes and --process_id")
    try:
        jax.distributed.initialize(
            None if automatic else coordinator,
            *numbers,
            cluster_detection_method=None if automatic else "deactivate",
            initialization_timeout=120,
            heartbeat_timeout_seconds=20,
            shutdown_timeout_seconds=20,
        )
    except (ValueError, RuntimeError) as error:
        text = str(error)
        if "should be defined" in text or "must be defined" in text:
            raise InputError(
                "--coordinator=auto found no SLURM, Kubernetes, Cloud TPU or MPI: set "
                "--coordinator=HOST:PORT"
            ) from None
        if "process_id" in text:
            raise InputError(text) from None
        raise OSError(f"could not join the processes at {coordinator}: {text}") from None


def use_all_cores() -> None:
    """Makes a JAX device of every CPU core, up to eight, so that a step's examples share the cores.

    One example per core is faster than one example on all cores. `JAX_NUM_CPU_DEVICES` sets another
    number. Nothing changes if JAX's own option is set or JAX has started. Accelerators are not
    affected.
    """
    jax = sys.modules.get("jax")
    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if jax is None or forced or "JAX_NUM_CPU_DEVICES" in os.environ:
        return
    from jax._src import xla_bridge  # any public function would start JAX

    if jax.config.jax_num_cpu_devices < 0 and not xla_bridge.backends_are_initialized():
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        jax.config.update("jax_num_cpu_devices", min(8, cores))


def use_compilation_cache() -> None:
    """Keeps compiled programs in a folder of the user, so that the second run starts at once.

    JAX runs the programs in this folder without a check, so it never comes with data or code: it is
    `bam/jax` in `$XDG_CACHE_HOME` or, without that, in `~/.cache`. If another user owns it or may
    write to it, it is not used and a warning says so. The environment variable
    JAX_COMPILATION_CACHE_DIR names another folder, which is not checked.
    """
    import jax

    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    folder = Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")) / "bam" / "jax"
    try:
        for part in (folder.parent, folder):
            part.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(part)
    except OSError as error:
        screen.say(
            f"warning: compiled programs are not cached, so the next run compiles again: {error}",
            error=True,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _check_owner(folder: Path) -> None:
    """PermissionError if a folder belongs to another user, or if others can write to it."""
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users can write to {folder}: chmod 700 {folder}")
