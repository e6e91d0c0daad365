"""What claims to reduce clipping bias, compared: one problem, budget, seeds and search for all.

python -m scripts.paper.bias_benchmark --config=configs/cifar10_scattering.py --workdir=runs/bias \
  --out=docs/results/bias_benchmark --learning_rates=1,2,4 --num_seeds=5 \
  --config.dataset.source=parquet --config.dataset.path=FOLDER

Every entry is first tried at each of its values and each learning rate on held-out images, with
other seeds; then trained at the best of them. Its bias is measured at DP-SGD's weights after the
last step: NOT PRIVATE.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags
from ml_collections import ConfigDict

from bam import files
from bam.cli import console, sweeps, tables
from bam.sweep import comparison
from bam.sweep.comparison import Study, as_json, percent, set_key
from bam.sweep.runs import Configs, Run, last_state
from bam.training import loop
from bam.training.feed import Feed
from configs import extensions

_OUT = flags.DEFINE_string("out", "", "files to write, less .json and .md")
_ENTRIES = flags.DEFINE_list("entries", "", "names to compare; empty: all, dp_sgd is always there")
_LEARNING_RATES = flags.DEFINE_list("learning_rates", "", "to try; empty: the config's")
_HOLDOUT = flags.DEFINE_integer("holdout", 5000, "training images to choose on", 1)
_SEARCH_SEEDS = flags.DEFINE_integer("search_seeds", 1, "runs of each trial, from seed 1000 on", 1)
flags.adopt_module_key_flags(sweeps)
console.require("config", "workdir", "out")


class Entry(NamedTuple):
    """What is compared: a method, sections of a config that differ, and what is tried of it."""

    method: str
    sections: Mapping[str, Mapping[str, object]]
    key: str = ""  # of the config, tried at these values
    values: tuple[float, ...] = (0.0,)


def _extension(name: str, key: str = "", values: tuple[float, ...] = (0.0,)) -> Entry:
    return Entry(*extensions.EXTENSIONS[name], key, values)


RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)  # of Adam, whose steps do not depend on C
ENTRIES = {
    "dp_sgd": Entry("dp_sgd", {}),
    "dp_sat": Entry("dp_sat", {}, "method.radius", (0.02, 0.05, 0.1)),
    "bam_sam": Entry("bam_sam", {}, "method.radius", (0.001, 0.005, 0.02)),
    "bam_exact": Entry("bam_exact", {}, "method.penalty", (0.001, 0.005, 0.02)),
    "schedule": _extension("schedule", "method.radius", (0.005, 0.02, 0.05)),
    "automatic": _extension("automatic", "clip.gamma", (0.01, 0.1, 1.0)),
    "psac": _extension("psac", "clip.r", (0.01, 0.1, 1.0)),
    "adaptive": _extension("adaptive", "clip.quantile", (0.3, 0.5, 0.7)),
    "slaclip": _extension("slaclip", "clip.num_slots", (10, 50)),
    "adam_bc": _extension("adam_bc", "optimizer.learning_rate", RATES),
    "low_pass": _extension("low_pass", "optimizer.learning_rate", RATES),
}
SET_HERE = {"dataset.holdout", "clip.name", "optimizer.name", "optimizer.learning_rate"}
MEASURED = {
    "against_plain/relative_bias": "‖bias‖/‖ĝ‖",
    "against_plain/cosine": "direction kept",
}
COLUMNS: tables.Columns = {
    "chosen": lambda row: ", ".join(f"{k.split('.')[-1]} {v:g}" for k, v in row["chosen"].items()),
    **{
        heading: lambda row, key=key: tables.interval(row["bias"][key], ".3f")  # type: ignore[misc]
        for key, heading in MEASURED.items()
    },
    "S / C": lambda row: f"{row['relative_sensitivity']:.3f}",
}


def main() -> None:
    """Searches, trains and measures what is missing, then writes and prints the table."""
    with console.one_line_errors():
        names = ["dp_sgd", *(n for n in _ENTRIES.value or ENTRIES if n != "dp_sgd")]
        if unknown := [name for name in names if name not in ENTRIES]:
            raise ValueError(f"--entries: no {unknown[0]}; choose from {', '.join(ENTRIES)}")
        trials = {_label(name, trial): trial for name in names for trial in _trials(name)}
        configs = {label: _config(label.split(" ")[0], trial) for label, trial in trials.items()}
        for config in (
            searching := {k: v.copy_and_resolve_references() for k, v in configs.items()}
        ).values():
            config.dataset.holdout = _HOLDOUT.value
            config.checkpoint.every = 0
        search = Study(searching, lambda label: None, first_seed=1000, folder="search")
        tried = sweeps.run_missing(search.configs(_SEARCH_SEEDS.value))
        if any(len(runs) < _SEARCH_SEEDS.value for runs in tried.values()):
            raise SystemExit(console.STOPPED)
        judged = {label: float(np.mean([*percent(runs).values()])) for label, runs in tried.items()}
        best = {
            name: max((x for x in trials if x.split(" ")[0] == name), key=lambda x: judged[x])
            for name in names
        }
        finals = {label: configs[label] for label in best.values()}

        def facts(label: str, runs: Sequence[Run]) -> dict[str, Any]:
            bias = _bias(
                study.configs(sweeps.NUM_SEEDS.value)[label],
                study.configs(sweeps.NUM_SEEDS.value)[best["dp_sgd"]],
            )
            return {
                "chosen": dict(trials[label]),
                "searched": {
                    x: judged[x] for x in trials if x.split(" ")[0] == label.split(" ")[0]
                },
                "bias": {
                    key: as_json(comparison.estimate([of_seed[key] for of_seed in bias]))
                    for key in MEASURED
                },
                "relative_sensitivity": runs[0].summary["sensitivity"] / _unit(runs[0].summary),
            }

        study = Study(finals, lambda label: best["dp_sgd"], COLUMNS, facts, folder="final")
        sweeps.carry_out(study, Path(_OUT.value))


Trial = tuple[tuple[str, float], ...]  # (key of the config, value), …


def _trials(name: str) -> list[Trial]:
    """The values of an entry, each with every learning rate; only its own if it tries those."""
    entry = ENTRIES[name]
    own: list[Trial] = [((entry.key, value),) if entry.key else () for value in entry.values]
    rates: list[Trial]
    rates = [(("optimizer.learning_rate", float(rate)),) for rate in _LEARNING_RATES.value] or [()]
    if entry.key == "optimizer.learning_rate":
        rates = [()]
    return [(*a, *b) for a, b in itertools.product(own, rates)]


def _config(name: str, trial: Trial) -> ConfigDict:
    entry = ENTRIES[name]
    config = sweeps.method_config(entry.method, SET_HERE | {entry.key})
    config = extensions.extended(config, entry.sections)
    for key, value in trial:
        set_key(config, key, f"{value:g}")
    return config


def _label(name: str, trial: Trial) -> str:
    return " ".join([name, *(f"{key.split('.')[-1]}={value:g}" for key, value in trial)])


def _unit(summary: Mapping[str, Any]) -> float:
    """What S is to be compared with: C, or 1 of a clip that counts in units of its own C."""
    return (
        1.0
        if summary["clip"].endswith(("slaclip:clip", "adaptive_clipping:clip"))
        else summary["clip_norm"]
    )


def _bias(own: Configs, baseline: Configs) -> list[dict[str, float]]:
    """Per seed what is said of an entry at DP-SGD's weights, and with its own state of the clip."""
    built = functools.cache(lambda: loop.build(next(iter(own.values()))))
    plain = functools.cache(lambda: loop.build(next(iter(baseline.values()))))
    found = []
    workdir = Path(sweeps.WORKDIR.value)
    for (name, config), at in zip(own.items(), baseline, strict=True):
        if not all((workdir / x / "summary.json").exists() for x in (name, at)):
            continue  # without a last step yet
        file = workdir / name / "bias.json"
        where = {"at": at, "num_examples": config.diagnostics.num_examples}
        kept = files.read_json(file) if file.exists() else {}
        if kept.get("where") != where:  # another search may have found DP-SGD another best
            ours = last_state(built(), config.seed, workdir / name)
            theirs = last_state(plain(), config.seed, workdir / at)
            if ours is None or theirs is None:
                continue
            state = ours._replace(params=theirs.params, private_grad=theirs.private_grad)
            said = loop.not_private(built(), state, Feed(built()))
            named = {k.removeprefix("not_private/"): v for k, v in said.items()}
            kept = {"where": where, "bias": named}
            files.write_json(file, kept)
        found.append(kept["bias"])
    return found


if __name__ == "__main__":
    console.run(main)
