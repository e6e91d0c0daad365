"""Many runs in one folder: each is trained once, resumed where it stopped, shared by processes.

A run is named by its path inside the folder. The runs of a group are those behind one number of a
table: they differ by their seed alone.
"""

import itertools
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from bam import files
from bam.extras import needs
from bam.files import JsonObject
from bam.privacy import checkpoint
from bam.privacy.plan import PrivacyPlan
from bam.privacy.run import CHECKPOINTS
from bam.training import loop, rundir
from bam.training.step import TrainState

with needs("train"):
    from ml_collections import ConfigDict

# Path inside the folder -> config of the run that belongs there.
Configs = Mapping[str, ConfigDict]
Key = TypeVar("Key", bound=Hashable)


class Run(NamedTuple):
    """What a finished run has left: its config, metrics rows and summary."""

    config: JsonObject
    rows: list[JsonObject]
    summary: JsonObject

    @property
    def method(self) -> JsonObject:
        """The config's `method` section."""
        return dict(self.config["method"])


def read(folder: Path) -> Run:
    """Reads a finished run."""
    config, summary = (files.read_json(folder / f"{name}.json") for name in ("config", "summary"))
    return Run(config, rundir.read_rows(folder), summary)


def finished(wanted: Configs, workdir: Path) -> dict[str, Run]:
    """The runs that are finished; a folder with a run of another config is an error."""
    runs = {}
    for name, config in wanted.items():
        try:
            rundir.check_resumable(workdir / name, config)
        except rundir.FinishedError:
            runs[name] = read(workdir / name)
    return runs


def by_seed(groups: Mapping[Key, Configs], workdir: Path) -> dict[Key, dict[int, Run]]:
    """Group -> seed -> run of what is finished."""
    return {
        key: {wanted[name].seed: run for name, run in finished(wanted, workdir).items()}
        for key, wanted in groups.items()
    }


def in_turn(groups: Mapping[Key, Configs]) -> Configs:
    """All runs, seed by seed: whatever time allows leaves every group equally far."""
    rounds = itertools.zip_longest(*(wanted.items() for wanted in groups.values()))
    return dict(item for each in rounds for item in each if item)


def build(
    wanted: Configs,
    should_stop: Callable[[], bool],
    plans: Mapping[str, PrivacyPlan | None] = {},
) -> dict[str, loop.Trainer]:
    """The trainers of some runs; those that differ by their seed alone share one.

    So a setting is planned once. `should_stop` is asked after each. `plans` are those that
    unfinished runs have recorded.
    """
    built: dict[str, loop.Trainer] = {}
    trainers = {}
    for name, config in wanted.items():
        same = config.copy_and_resolve_references()
        same.seed = 0
        key = str(same.to_json_best_effort(sort_keys=True))
        plan = plans.get(name)
        if key not in built or (plan and plan != built[key].plan):
            built[key] = loop.build(config, plan=plan)
        trainers[name] = built[key]
        if should_stop():
            break
    return trainers


def train(
    wanted: Configs,
    workdir: Path,
    should_stop: Callable[[], bool],
    on_event: Callable[[str, str], None],
    on_row: Callable[[str, JsonObject], None] = lambda name, row: None,
    on_built: Callable[[Mapping[str, loop.Trainer]], None] = lambda built: None,
) -> None:
    """Trains the runs that are not finished, in order.

    Runs that another process is training are left to it, so several processes may share a
    workdir; they are looked at again at the end. Everything is checked before the first step.

    Args:
      wanted: all runs.
      workdir: folder that holds them.
      should_stop: asked after every step; True stops the run there and starts no other.
      on_event: called with a run's name and what happened to it.
      on_row: called with a run's name and each metrics row as it is made.
      on_built: called before the first step with the trainers of the runs to train.
    """
    done = finished(wanted, workdir)
    missing = [name for name in wanted if name not in done]
    plans = {name: rundir.recorded_plan(workdir / name, wanted[name]) for name in missing}
    built = build({name: wanted[name] for name in missing}, should_stop, plans)
    if len(built) < len(missing):
        return
    on_built(built)
    while missing:
        busy = []
        for name in missing:
            if should_stop():
                return
            try:
                result = loop.train(
                    built[name],
                    wanted[name].seed,
                    workdir / name,
                    on_row=lambda row, name=name: on_row(name, row),  # type: ignore[misc]
                    should_stop=should_stop,
                )
            except BlockingIOError:
                busy.append(name)  # another process is training it: see again at the end
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
            on_event(busy[0], f"is another process's, as are {len(busy) - 1} more")
            return
        missing = busy


def last_state(trainer: loop.Trainer, seed: int, folder: Path) -> TrainState | None:
    """The state after the last step of a run in a folder; None if it kept no checkpoint."""
    newest = checkpoint.newest(folder / CHECKPOINTS)
    return checkpoint.restore(newest, trainer.init(seed)) if newest else None


def with_seeds(folder: str, config: ConfigDict, num: int, first: int = 0) -> Configs:
    """A group: `FOLDER/seedN` -> the config with seed N, for `num` seeds."""
    wanted = {}
    for seed in range(first, first + num):
        wanted[f"{folder}/seed{seed}"] = config.copy_and_resolve_references()
        wanted[f"{folder}/seed{seed}"].seed = seed
    return wanted
