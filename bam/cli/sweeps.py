"""Many runs in one folder: each is trained once, resumed where it stopped, shared by processes.

A run is named by its path inside the folder. Commands lay their runs out as groups, the runs behind
one number of a table, which differ by their seed alone.
"""

import ast
import itertools
import runpy
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from absl import flags
from ml_collections import ConfigDict, config_flags
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bam import files
from bam.cli import configs, console
from bam.files import JsonMapping, JsonObject
from bam.privacy.plan import PrivacyPlan
from bam.training import checkpoint, loop, registry, rundir
from bam.training.step import TrainState

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "configs/NAME.py, without a method; --config.KEY=VALUE is for all runs"
)
WORKDIR = flags.DEFINE_string("workdir", "", "folder for all runs and what is made of them")
NUM_SEEDS = flags.DEFINE_integer("num_seeds", 3, "runs of each kind, by seeds 0, 1, …", 1)
MAX_SECONDS = flags.DEFINE_float(
    "max_seconds", 0, "stop with a checkpoint after so long; 0: never", lower_bound=0
)
flags.DEFINE_alias("seeds", "num_seeds")

# Path inside the workdir -> config of the run that belongs there.
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
    rows = rundir.read_rows(folder)
    config, summary = (files.read_json(folder / f"{name}.json") for name in ("config", "summary"))
    if summary.get("test_accuracy") is None:
        raise ValueError(f"{folder / 'summary.json'} has no test_accuracy to compare")
    return Run(config, rows, summary)


def finished(wanted: Configs, workdir: Path) -> dict[str, Run]:
    """The runs that are finished; a folder with a run of another config is an error."""
    runs = {}
    for name, config in wanted.items():
        try:
            rundir.check_resumable(workdir / name, config)
        except rundir.FinishedError:
            runs[name] = read(workdir / name)
    return runs


def build(
    wanted: Configs,
    should_stop: Callable[[], bool],
    plans: Mapping[str, PrivacyPlan | None] = {},
) -> dict[str, loop.Trainer]:
    """The trainers of some runs; those that differ by their seed alone share one.

    They share what it compiled, too. `should_stop` is asked after each. `plans` are those that
    unfinished runs have recorded.
    """
    built: dict[str, loop.Trainer] = {}
    of_run = {}
    for name, config in wanted.items():
        if registry.make_loss(config.loss).right is None:
            raise ValueError(f"a sweep compares accuracies: the loss {config.loss.name} has none")
        same = config.copy_and_resolve_references()
        same.seed = 0
        key = str(same.to_json_best_effort(sort_keys=True))
        plan = plans.get(name)
        if key not in built or (plan and plan != built[key].plan):
            built[key] = loop.build(config, plan=plan)
        of_run[name] = built[key]
        if should_stop():
            break
    return of_run


def run(
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
    configs = {name: rundir.with_recorded(wanted[name], workdir / name) for name in missing}
    plans = {name: rundir.recorded_plan(workdir / name, configs[name]) for name in missing}
    built = build(configs, should_stop, plans)
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
            text = f"{summary['test_accuracy']:.2%} in {summary['seconds']:.0f} s"
            on_event(name, "; ".join(filter(None, (text, rundir.divergence(summary)))))
        if busy == missing:
            on_event(busy[0], f"is another process's, as are {len(busy) - 1} more")
            return
        missing = busy


def run_missing(groups: Mapping[Key, Configs]) -> dict[Key, dict[int, Run]]:
    """Trains what is missing in `--workdir` until it is done or time is up; as `runs_of`.

    It goes seed by seed, so that whatever time allows leaves every group equally far, and shows a
    bar of all steps.
    """
    by_seed = itertools.zip_longest(*(wanted.items() for wanted in groups.values()))
    wanted = dict(item for of_seed in by_seed for item in of_seed if item)
    console.use_compilation_cache()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), "steps")
    shown = sys.stdout.isatty()
    with Progress(*columns, TimeRemainingColumn(), transient=True, disable=not shown) as bar:
        task = bar.add_task("compiling", total=None)
        step: dict[str, int] = {}

        def on_built(built: Mapping[str, loop.Trainer]) -> None:
            bar.update(task, total=sum(each.plan.training_steps for each in built.values()))

        def on_row(name: str, row: JsonMapping) -> None:
            step[name] = row["step"]
            bar.update(task, description=name, completed=sum(step.values()))

        should_stop = console.stop_after(MAX_SECONDS.value)
        run(wanted, Path(WORKDIR.value), should_stop, print_event, on_row, on_built)
    return runs_of(groups)


def runs_of(groups: Mapping[Key, Configs]) -> dict[Key, dict[int, Run]]:
    """Group -> seed -> run of what is finished in `--workdir`, and a line if something is not."""
    found, num_missing, workdir = {}, 0, Path(WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    for key, wanted in groups.items():
        runs = finished(wanted, workdir)
        found[key] = {wanted[name].seed: run for name, run in runs.items()}
        num_missing += len(wanted) - len(runs)
    if num_missing:
        print(f"{num_missing} runs are not finished; the same command goes on from there")
    return found


def print_event(name: str, text: str) -> None:
    """Prints what happened to a run, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')}  {name}  {text}", flush=True)


def last_state(experiment: loop.Trainer, seed: int, folder: Path) -> TrainState | None:
    """The state after the last step of a run in a folder; None if it kept no checkpoint."""
    checkpoints = folder / "checkpoints"
    if not checkpoints.exists():
        return None
    with checkpoint.Checkpoints(checkpoints) as kept:
        restored = kept.restore(experiment.init(seed))
    return restored and restored[1]


def with_seeds(folder: str, config: ConfigDict, first: int = 0, num: int | None = None) -> Configs:
    """A group: `FOLDER/seedN` -> the config with that seed, `num` or `--num_seeds` of them."""
    wanted = {}
    for seed in range(first, first + (num or NUM_SEEDS.value)):
        wanted[f"{folder}/seed{seed}"] = config.copy_and_resolve_references()
        wanted[f"{folder}/seed{seed}"].seed = seed
    return wanted


def method_config(method: str, fixed: Iterable[str] = (), path: str = "") -> ConfigDict:
    """A config file's configuration of one method, with the command line's `--config.KEY=VALUE`.

    Overrides of `method.*` reach the methods that have the key; overrides of what the command sets
    itself, the `fixed` keys, are an error. Without a `path` the file is that of `--config`.
    """
    path = path or config_flags.get_config_filename(flags.FLAGS["config"])
    overrides = dict(config_flags.get_override_values(flags.FLAGS["config"]))
    set_twice = sorted({"method.name", "seed", "dry_run", *fixed} & set(overrides))
    if set_twice:
        raise ValueError(f"this command sets {', '.join(set_twice)} itself: leave it out")
    file = path.split(":")[0]
    with configs.one_line_errors(file):
        config: ConfigDict = runpy.run_path(file)["get_config"](method)
    for key, value in overrides.items():
        if key.startswith("method.") and key.removeprefix("method.") not in config.method:
            continue
        try:
            config.update_from_flattened_dict({key: value})
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} does not take {key} = {value!r}: {error}") from None
    return config


def strength_config(name: str, fixed: Iterable[str] = ()) -> ConfigDict:
    """The config of METHOD:STRENGTH, or of METHOD with the strength that its config file has.

    So an item of a flag `--methods` names it; `fixed` as of `method_config`.
    """
    method, _, strength = name.partition(":")
    key = registry.METHODS[method].strength if method in registry.METHODS else ""
    if strength and not key:
        raise ValueError(f"--methods={name}: {method} takes no strength")
    config = method_config(method, {*fixed, *({f"method.{key}"} if strength else ())})
    if strength:
        try:
            config.method[key] = float(strength)
        except ValueError:
            raise ValueError(f"--methods={name}: {strength!r} is no number") from None
    return config


def set_key(config: ConfigDict, key: str, text: str) -> None:
    """Sets a key to a value as `--set` has it; ValueError for one that the key cannot have."""
    flat = rundir.flat(config.to_dict())
    if key not in flat:
        raise ValueError(f"--set: {console.unknown_key(key, list(flat))}")
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        value = text
    if isinstance(flat[key], float) and type(value) is int:
        value = float(value)
    try:
        config.update_from_flattened_dict({key: value})
    except TypeError as error:
        raise ValueError(f"--set={key}={text}: {error}") from None
