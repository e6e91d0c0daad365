"""Tries strengths of the ascent (ρ of DP-SAT, r of BAM-SAM, λ of BAM-exact) on held-out images.

python -m scripts.search --config=configs/digits.py --workdir=runs/search --holdout=200

With --learning_rates and --clip_norms every method is tried at each of those, too. With --best=K
all of that is tried with one seed, and the K best trials of each method with --num_seeds.

python -m scripts.search --private --config=configs/digits.py --workdir=runs/private

draws a random number of trials from the same settings and chooses one; ε pays for the choice, too.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from bam import files
from bam.cli import console, stats, sweeps, tables
from bam.training import registry
from scripts.lib import private_search

_HOLDOUT = flags.DEFINE_integer(
    "holdout", 5000, "training images set aside to judge on; the test split is not read", 1
)
TRIED = {"dp_sat": "0.02,0.05,0.1,0.2", "bam_sam": "0.02,0.05,0.1,0.2"}
_STRENGTHS = {
    name: flags.DEFINE_list(name, TRIED.get(name, ""), f"strengths to try for {method.label}")
    for name, method in registry.METHODS.items()
    if method.strength
}
# Further settings that are tried with every strength: flag -> key of the config.
SETTINGS = {"learning_rate": "optimizer.learning_rate", "clip_norm": "clip_norm"}
_VALUES = {
    name: flags.DEFINE_list(f"{name}s", "", f"values of {key} to try; empty: the config's")
    for name, key in SETTINGS.items()
}
_BEST = flags.DEFINE_integer(
    "best", 0, "trials of each method that get all seeds, the best with the first; 0: all", 0
)
flags.adopt_module_key_flags(sweeps)
flags.adopt_module_key_flags(private_search)
console.require("config", "workdir")

Settings = tuple[tuple[str, str], ...]  # (name, value) of what a trial sets besides the strength
Trial = tuple[str, str, Settings]  # method, strength, settings

FIRST_SEED = 1000  # seeds are others than those of the final runs
FIXED = {"dataset.holdout", "method.radius", "method.penalty"}


def _setting(name: str) -> Callable[[Any], str]:
    return lambda row: f"{row[name]:g}"


COLUMNS: tables.Columns = {
    "method": lambda row: registry.label(row["method"]),
    "strength": lambda row: f"{row['strength']:g}",
    **{name.replace("_", " "): _setting(name) for name in SETTINGS},
    "runs": lambda row: str(row["num_runs"]),
    "held-out accuracy, %": lambda row: (
        "not run" if row["accuracy"] is None else f"{row['accuracy']:.2f}"
    ),
}


def main() -> None:
    """Trains what is missing, then writes and prints accuracy against strength.

    The table holds the strengths and seeds of this call, and replaces an earlier one.
    """
    with console.one_line_errors():
        tried = {method: flag.value for method, flag in _STRENGTHS.items() if flag.value}
        if len({len(strengths) for strengths in tried.values()}) > 1:
            raise ValueError("give every method the same number of strengths, or none")
        strengths_of = {"dp_sgd": ["0"], **tried}
        wanted = {name: flag.value for name, flag in _VALUES.items() if flag.value}
        trials = [
            (method, strength, tuple(zip(wanted, values, strict=True)))
            for method, strengths in strengths_of.items()
            for strength in strengths
            for values in itertools.product(*wanted.values())
        ]
        if private_search.PRIVATE.value:
            _search_privately(trials)
            return
        found = sweeps.run_missing({trial: _runs(*trial, _BEST.value and 1) for trial in trials})
        if _BEST.value and all(found.values()):
            chosen = _best(found)
            found |= sweeps.run_missing({trial: _runs(*trial) for trial in chosen})
        rows = []
        for (method, strength, settings), runs in found.items():
            accuracies = [100 * run.summary["test_accuracy"] for run in runs.values()]
            accuracy = stats.estimate(accuracies)
            row: dict[str, Any] = {"method": method, "strength": float(strength)}
            row |= {name: float(value) for name, value in settings}
            row |= {"num_runs": len(runs), "accuracy": accuracy and accuracy.mean}
            rows.append(row | {"accuracies": accuracies})
        workdir = Path(sweeps.WORKDIR.value)
        files.write_json(workdir / "search.json", rows)
    absent = {name.replace("_", " ") for name in SETTINGS if name not in wanted}
    columns = {name: cell for name, cell in COLUMNS.items() if name not in absent}
    tables.show(columns, rows, keep=workdir / "search.md")


def _search_privately(trials: list[Trial]) -> None:
    """Trains, scores and chooses as `private_search` does."""
    if _BEST.value or sweeps.NUM_SEEDS.value > 1:
        raise ValueError("--private draws how often a setting is tried: no --best, no --num_seeds")
    holdout = _HOLDOUT.value if private_search.SCORE.value == "held_out" else 0
    grid = {
        _name(trial): private_search.as_trial(_config(*trial, holdout, private_search.FIXED))
        for trial in trials
    }
    console.use_compilation_cache()
    should_stop = console.stop_after(sweeps.MAX_SECONDS.value)
    show = functools.partial(print, flush=True)
    private_search.search(grid, Path(sweeps.WORKDIR.value), should_stop, show)


def _name(trial: Trial) -> str:
    """A trial's folder in an ordinary search, its setting's name in a private one."""
    method, strength, settings = trial
    return f"{method}/{'_'.join([strength, *(f'{name}{value}' for name, value in settings)])}"


def _best(found: Mapping[Trial, Mapping[int, sweeps.Run]]) -> list[Trial]:
    """The `--best` trials of each method by the first seed; of equals the first."""
    first = {trial: sweeps.percent(runs)[FIRST_SEED] for trial, runs in found.items()}
    return [
        trial
        for method in dict.fromkeys(trial[0] for trial in found)
        for trial in sorted((t for t in found if t[0] == method), key=lambda t: -first[t])[
            : _BEST.value
        ]
    ]


def _runs(method: str, strength: str, settings: Settings, num: int = 0) -> sweeps.Cells:
    """The runs of one trial: `num` of them, 0 for `--num_seeds`."""
    config = _config(method, strength, settings, _HOLDOUT.value)
    return sweeps.of_seeds(_name((method, strength, settings)), config, FIRST_SEED, num)


def _config(
    method: str, strength: str, settings: Settings, holdout: int, fixed: Iterable[str] = ()
) -> ConfigDict:
    """A trial's config; `fixed` are further keys that the command line must not set."""
    fixed = {*FIXED, *fixed, *(SETTINGS[name] for name, _ in settings)}
    config = sweeps.method_config(method, fixed)
    if config.public_clip.quantile and "clip_norm" in dict(settings):
        raise ValueError("--clip_norms: public_clip sets C unless public_clip.quantile is 0")
    config.dataset.holdout = holdout
    if key := registry.METHODS[method].strength:
        config.method[key] = float(strength)
    config.update_from_flattened_dict({SETTINGS[name]: float(value) for name, value in settings})
    return config


if __name__ == "__main__":
    console.run(main, defaults=["--num_seeds=1"])
