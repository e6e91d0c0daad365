"""The code that made a result: versions of packages, and the commit."""

import functools
import importlib.metadata
import platform
import subprocess
from pathlib import Path


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python, of the packages that decide a run's numbers, and of further packages."""
    decisive = ("bam", "jax", "jaxlib", "flax", "optax", "numpy", "dp-accounting")
    installed = {"python": platform.python_version()}
    for name in (*decisive, *packages):
        try:
            installed[name] = importlib.metadata.version("bam-dp" if name == "bam" else name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed


@functools.cache
def git_commit() -> str:
    """The commit of this code, for example "1d4e…", "1d4e… (modified)" or "not known".

    The first call decides, because the files may change while a process runs.
    """
    root = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        result = subprocess.run(command, capture_output=True, check=True, timeout=60)
        return result.stdout.decode().strip()

    try:
        # If this file is untracked, the repository is that of the project that uses bam.
        git("ls-files", "--error-unmatch", "bam/provenance.py")
        commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "-uno")
    except (OSError, subprocess.SubprocessError):
        return "not known"
    return f"{commit} (modified)" if changes else commit
