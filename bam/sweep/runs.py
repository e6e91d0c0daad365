"""Many runs in one folder: each is trained once, and resumed if it was stopped.

Several processes may work in one folder. A run's name is its path inside the folder. The runs of a
group differ in their seed alone and give one number of a table.
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from bam import files
from bam.extras import needs
from bam.files import JsonObject
from bam.privacy import checkpoint
from bam.privacy.recorded_plan import PLAN
from bam.privacy.run import CHECKPOINTS
from bam.training import loop, rundir
from bam.training.step import TrainState

with needs("train"):
    from ml_collections import ConfigDict

# Path inside the folder -> config of the run that belongs there.
Configs = Mapping[str, ConfigDict]
Key = TypeVar("Key", bound=Hashable)


class FinishedRun(NamedTuple):
    """The files of a finished run: its config, rows of metrics and summary."""

    config: JsonObject
    rows: list[JsonObject]
    summary: JsonObject

    @property
    def method(self) -> JsonObject:
        """The config's `method` section."""
        return dict(self.config["method"])


def read(folder: Path) -> FinishedRun:
    """Reads a finished run."""
    config, summary = (files.read_json(folder / f"{name}.json") for name in ("config", "summary"))
    return FinishedRun(config, rundir.read_rows(folder), summary)


def read_finished(configs: Configs, workdir: Path) -> dict[str, FinishedRun]:
    """Reads the finished runs.

    InputError for a folder that holds a run of another config.
    """
    runs = {}
    for name, config in configs.items():
        try:
            rundir.check_resumable(workdir / name, config)
        except rundir.FinishedError:
            runs[name] = read(workdir / name)
    return runs


def by_seed(groups: Mapping[Key, Configs], workdir: Path) -> dict[Key, dict[int, FinishedRun]]:
    """Group -> seed -> run, for the finished runs."""
    return {
        key: {configs[name].seed: run for name, run in read_finished(configs, workdir).items()}
        for key, configs in groups.items()
    }


def in_turn(groups: Mapping[Key, Configs]) -> Configs:
    """All runs, seed by seed, so that a sweep cut short has equally many seeds of each group."""
    rounds = itertools.zip_longest(*(configs.items() for configs in groups.values()))
    return dict(item for each in rounds for item in each if item)


def build(
    configs: Configs,
    should_stop: Callable[[], bool],
    workdir: Path | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, loop.Trainer]:
    """The trainers of some runs, by name.

    Runs that differ in their seed alone share one trainer, so a setting is planned once.
    `should_stop` is called after each run, and True returns the trainers so far. `workdir`
    holds the unfinished runs, which have recorded their plans. `log` gets lines on long waits.
    """
    built: dict[str, loop.Trainer] = {}
    trainers = {}
    for name, config in configs.items():
        seedless = config.copy_and_resolve_references()
        seedless.seed = 0
        key, folder = str(seedless.to_json_best_effort(sort_keys=True)), None
        # A resumed run keeps its recorded σ, even where an accountant would choose another today.
        if workdir and (recorded := workdir / name / PLAN).exists():
            key, folder = f"{key} {files.read_bytes(recorded)!r}", workdir / name
        if key not in built:
            built[key] = loop.build(config, log=log, folder=folder)
        trainers[name] = built[key]
        if should_stop():
            break
    return trainers


def train(
    configs: Configs,
    workdir: Path,
    should_stop: Callable[[], bool],
    on_event: Callable[[str, str], None],
    on_step: Callable[[str, int], None] = lambda name, step: None,
    on_built: Callable[[Mapping[str, loop.Trainer]], None] = lambda built: None,
    log: Callable[[str], None] = lambda line: None,
) -> None:
    """Trains the runs that are not finished, in order.

    Several processes may share a workdir: a run that another process is training is skipped, and
    tried again at the end. Every config is checked before the first step.

    Args:
      configs: all runs.
      workdir: folder that holds them.
      should_stop: called after every step; True stops that run and starts no other.
      on_event: called with a run's name and an event, such as its end.
      on_step: called with a run's name and 0 before it begins, and then each step it has taken.
      on_built: called before the first step with the trainers of the unfinished runs.
      log: called with lines of a run's training, as that of `loop.train`.
    """
    complete = read_finished(configs, workdir)
    missing = [name for name in configs if name not in complete]
    built = build({name: configs[name] for name in missing}, should_stop, workdir, log)
    if len(built) < len(missing):
        return
    on_built(built)
    while missing:
        busy = []
        for name in missing:
            if should_stop():
                return
            on_step(name, 0)
            try:
                result = loop.train(
                    built[name],
                    configs[name].seed,
                    workdir / name,
                    should_stop=should_stop,
                    log=log,
                    on_step=functools.partial(on_step, name),
                )
            except BlockingIOError:
                busy.append(name)  # another process is training it; tried again at the end
                continue
            except rundir.FinishedError:
                continue  # another process has finished it meanwhile
            except loop.StoppedError as stop:
                on_event(name, str(stop))
                return
            summary = result.summary
            accuracy = summary["test_accuracy"]
            text = "trained" if accuracy is None else f"{accuracy:.2%}"
            text += f" in {summary['seconds']:.0f} s"
            on_event(name, "; ".join(filter(None, (text, rundir.divergence(summary)))))
        if busy == missing:
            on_event(busy[0], f"another process trains this run and {len(busy) - 1} more")
            return
        missing = busy


def last_state(trainer: loop.Trainer, seed: int, folder: Path) -> TrainState | None:
    """Returns the state after the last step of a run in a folder.

    It returns None if the run saved none.
    """
    newest = checkpoint.newest(folder / CHECKPOINTS)
    return checkpoint.restore(newest, trainer.init(seed)) if newest else None


def with_seeds(folder: str, config: ConfigDict, num: int, first: int = 0) -> Configs:
    """A group: `FOLDER/seedN` -> the config with seed N, for `num` seeds."""
    configs = {}
    for seed in range(first, first + num):
        configs[f"{folder}/seed{seed}"] = config.copy_and_resolve_references()
        configs[f"{folder}/seed{seed}"].seed = seed
    return configs
