"""Many runs in one folder: each is trained once, resumed where it stopped, shared by processes."""

import json
import runpy
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

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
        except report.FinishedError:
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
    workdir; they are looked at again at the end. Everything is checked before the first step.

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
        if should_stop():
            return
    while missing:
        busy = []
        for name in missing:
            if should_stop():
                return
            try:
                result = train.train(
                    of_cell[name], cells[name].seed, workdir / name, should_stop=should_stop
                )
            except BlockingIOError:
                busy.append(name)  # another process is training it: see again at the end
                continue
            except report.FinishedError:
                continue  # another process has finished it meanwhile
            except train.StoppedError as stop:
                on_event(name, str(stop))
                return
            summary = result.summary
            on_event(name, f"{summary['test_accuracy']:.2%} in {summary['seconds']:.0f} s")
        if busy == missing:
            on_event(busy[0], f"is another process's, as are {len(busy) - 1} more")
            return
        missing = busy


def print_event(name: str, text: str) -> None:
    """Prints what happened to a cell, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')}  {name}  {text}", flush=True)


def method_config(path: str, method: str, fixed: Iterable[str] = ()) -> ConfigDict:
    """A config file's configuration of one method, with the command line's `--config.KEY=VALUE`.

    Overrides of `method.*` reach the methods that have the key.

    Args:
      path: of the config file; what follows a colon is left out.
      method: its argument.
      fixed: keys that the command sets itself.

    Returns:
      The config.

    Raises:
      ValueError: for an override of a fixed key, or of a key that the config does not have.
    """
    overrides = dict(config_flags.get_override_values(flags.FLAGS["config"]))
    set_twice = sorted({"method.name", *fixed} & set(overrides))
    if set_twice:
        raise ValueError(f"this command sets {', '.join(set_twice)} itself: leave it out")
    config: ConfigDict = runpy.run_path(path.split(":")[0])["get_config"](method)
    for key, value in overrides.items():
        if key.startswith("method.") and key.removeprefix("method.") not in config.method:
            continue
        try:
            config.update_from_flattened_dict({key: value})
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} does not take {key} = {value!r}: {error}") from None
    return config


def _without_seed(config: ConfigDict) -> str:
    copy = config.copy_and_resolve_references()
    copy.seed = 0
    return str(copy.to_json_best_effort(sort_keys=True))
