"""The files a run writes into its workdir."""

import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict
from tensorboardX import SummaryWriter

from bam.privacy.accounting import PrivacyPlan


class RunFiles:
    """Writes the files of one run; a context manager.

    They are `config.json`, `plan.json`, `metrics.jsonl`, TensorBoard events, and at the end
    `summary.json`. With `workdir=None` it writes nothing. A folder that already holds a run is
    refused, so that no result is ever overwritten.
    """

    def __init__(self, workdir: Path | None, config: ConfigDict, plan: PrivacyPlan) -> None:
        """Creates the workdir and writes the config and the plan.

        Args:
          workdir: folder to create, or None.
          config: the resolved configuration.
          plan: the privacy plan.

        Raises:
          FileExistsError: if the folder already holds a run.
        """
        self._workdir = workdir
        if workdir is None:
            return
        check_free(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        write_json(workdir / "config.json", json.loads(config.to_json_best_effort()))
        write_json(workdir / "plan.json", plan.to_json())
        self._metrics = (workdir / "metrics.jsonl").open("a", encoding="utf-8")
        self._events = SummaryWriter(str(workdir / "tensorboard"))

    def __enter__(self) -> "RunFiles":
        return self

    def __exit__(self, *unused: object) -> None:
        if self._workdir is not None:
            self._metrics.close()
            self._events.close()

    def add_row(self, row: dict[str, Any]) -> None:
        """Appends one evaluation: a line of `metrics.jsonl` and TensorBoard scalars.

        Args:
          row: `step` and named numbers; None (an infinite ε) is left out of TensorBoard.
        """
        if self._workdir is None:
            return
        self._metrics.write(json.dumps(row) + "\n")
        self._metrics.flush()
        for name, value in row.items():
            if name != "step" and value is not None:
                self._events.add_scalar(name, value, row["step"])

    def finish(self, summary: dict[str, Any]) -> None:
        """Writes `summary.json`, which marks the run as complete.

        Args:
          summary: JSON values.
        """
        if self._workdir is not None:
            write_json(self._workdir / "summary.json", summary)


def check_free(workdir: Path) -> None:
    """Refuses a folder that already holds a run.

    Args:
      workdir: the folder a run wants.

    Raises:
      FileExistsError: if it contains `config.json`.
    """
    if (workdir / "config.json").exists():
        raise FileExistsError(
            f"{workdir} already holds a run; choose another --workdir or delete that one"
        )


def write_json(path: Path, value: Any) -> None:
    """Writes strict, indented JSON, all or nothing.

    Args:
      path: file to write or replace.
      value: JSON values; NaN and infinity are refused.
    """
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def device_name() -> str:
    """Kind of the first device, for example "cpu" or "NVIDIA H100 80GB HBM3"."""
    return jax.devices()[0].device_kind


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a run's numbers."""
    packages = ("bam", "jax", "jaxlib", "flax", "optax", "numpy", "dp-accounting")
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
