"""Many runs in one folder: each is trained once, resumed where it stopped, shared by processes."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from bam import report, train

# Path inside the workdir -> config of the run that belongs there.
Cells = Mapping[str, ConfigDict]


def summaries(cells: Cells, workdir: Path) -> dict[str, dict[str, Any]]:
    """The summaries of the finished cells.

    Args:
      cells: all cells.
      workdir: folder that holds them.

    Returns:
      Cell name -> its `summary.json`.

    Raises:
      ValueError: if a cell's folder holds a run of another config.
    """
    found = {}
    for name, config in cells.items():
        try:
            report.check_resumable(workdir / name, config)
        except FileExistsError:  # finished
            text = (workdir / name / "summary.json").read_text(encoding="utf-8")
            found[name] = json.loads(text)
    return found


def run(
    cells: Cells,
    workdir: Path,
    should_stop: Callable[[], bool],
    on_event: Callable[[str, str], None],
) -> None:
    """Trains the cells that are not finished, in order.

    Cells that another process is training are left to it, so several processes may share a
    workdir. Everything is checked before the first step.

    Args:
      cells: all cells.
      workdir: folder that holds them.
      should_stop: asked after every step; True stops the cell there and starts no other.
      on_event: called with a cell's name and what happened to it.

    Raises:
      ValueError: for a config that cannot be, or a folder with a run of another config.
    """
    finished = summaries(cells, workdir)
    missing = [name for name in cells if name not in finished]
    # Cells that differ by their seed alone share one experiment, and so what it compiled.
    experiments: dict[str, train.Experiment] = {}
    of_cell = {}
    for name in missing:
        key = _without_seed(cells[name])
        if key not in experiments:
            experiments[key] = train.build(cells[name])
        of_cell[name] = experiments[key]
    for name in missing:
        if should_stop():
            return
        try:
            result = train.train(
                of_cell[name], cells[name].seed, workdir / name, should_stop=should_stop
            )
        except (BlockingIOError, FileExistsError):
            continue  # another process is training it, or has finished it meanwhile
        except train.StoppedError as stop:
            on_event(name, str(stop))
            return
        summary = result.summary
        on_event(name, f"{summary['test_accuracy']:.2%} in {summary['seconds']:.0f} s")


def _without_seed(config: ConfigDict) -> str:
    copy = config.copy_and_resolve_references()
    copy.seed = 0
    return str(copy.to_json_best_effort(sort_keys=True))
