"""Flags and printing of commands that train many runs: `bam sweep`, and the scripts of results."""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bam import files
from bam.cli import configs, console, screen, tables
from bam.errors import InputError
from bam.files import JsonMapping, JsonObject
from bam.models.figures import LOWER_IS_BETTER
from bam.privacy.rounding import rounded_up
from bam.sweep import runs
from bam.sweep.comparison import Runs, Study, is_percent
from bam.training import loop, registry

# Heading -> what the diagnostics measure.
BIAS = {"‖bias‖": "bias_norm", "‖ĝ‖": "gradient_norm", "ratio": "relative_bias", "cosine": "cosine"}
GAIN: tables.Columns = {
    "paired gain": lambda row: tables.interval(row["gain"], f"+z{_form(row)}"),
    # A p that would be rounded to 0 is not 0.
    "p": lambda row: tables.number(row["p"], ".2f").replace("0.00", "< 0.01"),
    "min. detectable": lambda row: tables.number(row["minimum_detectable_effect"], _form(row)),
}


def carry_out(given: flags.FlagValues, study: Study, out: Path) -> tuple[list[JsonObject], Runs]:
    """Trains what is missing, writes `OUT.json` and `OUT.md`, prints the table; its rows and runs.

    `given` are a command's or a script's flags, with those of `options.MANY_RUNS`. A study that
    is not finished is written as far as it is, and ends the command with exit status 3; the same
    command goes on.
    """
    console.check_writable(f"{out}.json")
    trained = run_missing(given, study.configs(given.num_seeds))
    result = study.result(trained)
    files.write_json(out.with_name(f"{out.name}.json"), result)
    rows = result["rows"]
    screen.show(columns(study.columns, rows), rows, keep=out.with_name(f"{out.name}.md"))
    if any(len(by_seed) < given.num_seeds for by_seed in trained.values()):
        sys.exit(console.STOPPED)
    return rows, trained


def columns(own: tables.Columns, rows: Sequence[JsonMapping]) -> tables.Columns:
    """A study's table: gains where something is paired, bias where it was measured."""
    paired = any(row["baseline"] not in (None, row["label"]) for row in rows)
    metric = next((row["metric"] for row in rows if "metric" in row), "accuracy")
    heading = metric.replace("_", " ") + ", %" * is_percent(metric)
    heading += " (lower is better)" * (metric in LOWER_IS_BETTER)
    measured = {heading: key for heading, key in BIAS.items() if any(row[key] for row in rows)}
    gain = {
        heading: lambda row, cell=cell: "–" if row["gain"] is None else cell(row)
        for heading, cell in GAIN.items()
    }
    return {
        "group": lambda row: row["label"],
        "ε": lambda row: "–" if row["epsilon"] is None else rounded_up(row["epsilon"], ".3g"),
        **own,
        "seeds": lambda row: str(len(row["seeds"])),
        heading: lambda row: (
            tables.interval(row[metric], _form(row)) if row[metric] else "diverged"
        ),
        **(gain if paired else {}),
        **{
            heading: lambda row, key=key: tables.number(row[key] and row[key]["mean"], ".3f")  # type: ignore[misc]
            for heading, key in measured.items()
        },
        "seconds": lambda row: f"{row['seconds']:.3g}",
    }


def _form(row: JsonMapping) -> str:
    """Of %, two digits; of any other metric, whose size is not known, four that count."""
    return ".2f" if is_percent(row.get("metric", "accuracy")) else ".4g"


def run_missing(
    given: flags.FlagValues, groups: Mapping[str, runs.Configs]
) -> dict[str, dict[int, runs.Run]]:
    """Trains what is missing in `--workdir`, seed by seed, until it is done or time is up.

    It shows a bar of all steps. Returns group -> seed -> finished run.
    """
    workdir = Path(given.workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    console.use_compilation_cache()
    parts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), "steps")
    shown = sys.stdout.isatty()
    with Progress(*parts, TimeRemainingColumn(), transient=True, disable=not shown) as bar:
        task = bar.add_task("compiling", total=None)
        step: dict[str, int] = {}

        def on_built(built: Mapping[str, loop.Trainer]) -> None:
            bar.update(task, total=sum(each.plan.training_steps for each in built.values()))

        def on_row(name: str, row: JsonMapping) -> None:
            step[name] = row["step"]
            bar.update(task, description=name, completed=sum(step.values()))

        should_stop = console.stop_after(given.max_seconds)
        runs.train(runs.in_turn(groups), workdir, should_stop, print_event, on_row, on_built)
    trained = runs.by_seed(groups, workdir)
    if num_missing := sum(map(len, groups.values())) - sum(map(len, trained.values())):
        console.say(f"{num_missing} runs are not finished; the same command goes on from there")
    return trained


def print_event(name: str, text: str) -> None:
    """Prints what happened to a run, with the time of day."""
    console.say(f"{time.strftime('%H:%M:%S')}  {name}  {text}")


def method_config(
    given: flags.FlagValues, method: str, fixed: Iterable[str] = (), path: str = ""
) -> ConfigDict:
    """The config of METHOD or METHOD:STRENGTH with the command line's `--config.KEY=VALUE`.

    Overrides of what the command sets itself, the `fixed` keys, are an error. Without a `path` the
    file is that of `--config`.
    """
    flag = given["config"]
    file = configs.file_of(path or config_flags.get_config_filename(flag)).partition(":")[0]
    return load(file, method, config_flags.get_override_values(flag), fixed)


def load(file: str, method: str, overrides: JsonMapping, fixed: Iterable[str] = ()) -> ConfigDict:
    """A config file's configuration of METHOD, or of METHOD:STRENGTH for a method of BAM's kind.

    Args:
      file: the config file.
      method: what its `get_config` is called with; a number after a colon is the strength.
      overrides: key -> value, for all methods; keys of `method.*` for those that have them.
      fixed: keys that the caller sets and that therefore no override may set.

    Raises:
      InputError: for an override of what is fixed or not there, a strength that cannot be, or what
        the file's own code raises.
    """
    name, colon, number = method.partition(":")
    strength = registry.METHODS[name].strength if name in registry.METHODS else ""
    if colon and not strength:
        raise InputError(f"{method}: {name} takes no strength")
    keys = {"method.name", "seed", "dry_run", *fixed, *({f"method.{strength}"} if colon else ())}
    if set_twice := sorted(keys & set(overrides)):
        raise InputError(f"this command sets {', '.join(set_twice)} itself: leave it out")
    config = configs.load(f"{file}:{name}")
    for key, value in overrides.items():
        if key.startswith("method.") and key.removeprefix("method.") not in config.method:
            continue
        try:
            config.update_from_flattened_dict({key: value})
        except (KeyError, TypeError) as error:
            raise InputError(f"{file} does not take {key} = {value!r}: {error}") from None
    if colon:
        try:
            config.method[strength] = float(number)
        except ValueError:
            raise InputError(f"{method}: {number!r} is no number") from None
    return config
