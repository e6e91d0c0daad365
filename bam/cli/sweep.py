r"""Trains methods at many settings with many seeds, and sets them beside a baseline.

bam sweep --config=digits --methods=dp_sgd,bam_sam:0.02 --num_seeds=5 --workdir=runs/sweep
bam sweep --config=digits --methods=dp_sgd,bam_sam:0.01,bam_sam:0.05 --holdout=200 --best=1 \
  --set=optimizer.learning_rate=0.003,0.01,0.03 --num_seeds=5 --workdir=runs/search

The first method is the baseline: each other is paired with it, by seed and at equal settings. With
--holdout settings are judged on training images that are set aside, so that the test split is not
read; with --best=K only the K best settings of each method, by the first seed, get all seeds. None
of that is private: ε is of each run alone (docs/selection.md). The same command again goes on.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from absl import flags

from bam.cli import console, sweeps
from bam.cli.study import Study, carry_out, train

_METHODS = flags.DEFINE_list(
    "methods", "dp_sgd,bam_sam", "METHOD or METHOD:STRENGTH, the baseline first"
)
_SET = flags.DEFINE_multi_string("set", [], "KEY=VALUE,VALUE of the config, tried with all others")
_HOLDOUT = flags.DEFINE_integer("holdout", 0, "training images to judge on; 0: the test split", 0)
_BEST = flags.DEFINE_integer("best", 0, "settings of each method that get all seeds; 0: all", 0)
_OUT = flags.DEFINE_string("out", "", "files to write, less .json and .md; '': WORKDIR/sweep")
flags.adopt_module_key_flags(sweeps)
console.require("config", "workdir", "methods")

# The first seed of runs that settings are chosen by: others than those of final runs.
SEARCHING = 1000


def main() -> None:
    """Trains what is missing, then writes and prints the table."""
    with console.one_line_errors():
        study = declared(_METHODS.value, _settings(_SET.value), _HOLDOUT.value)
        if _BEST.value:
            first = train(study, num_seeds=1)
            if not all(first.values()):
                raise SystemExit(console.STOPPED)
            study = best(study, first, _BEST.value)
        carry_out(study, Path(_OUT.value or f"{sweeps.WORKDIR.value}/sweep"))


def declared(methods: Sequence[str], settings: Mapping[str, Sequence[str]], holdout: int) -> Study:
    """Every method at every combination of settings, beside the first method at the same."""
    groups, baseline = {}, {}
    for method in methods:
        for values in itertools.product(*settings.values()):
            chosen = dict(zip(settings, values, strict=True))
            config = sweeps.strength_config(method, {"dataset.holdout", *settings})
            for key, value in chosen.items():
                sweeps.set_key(config, key, value)
            config.dataset.holdout = holdout
            label = _label(method, chosen)
            groups[label], baseline[label] = config, _label(methods[0], chosen)
    return Study(groups, baseline.get, first_seed=SEARCHING if holdout else 0)


def best(study: Study, first: Mapping[str, Mapping[int, sweeps.Run]], num: int) -> Study:
    """The best groups of each method by the runs of the first seed, beside the baseline's best."""
    accuracy = {label: next(iter(sweeps.percent(runs).values())) for label, runs in first.items()}
    by_method: dict[str, list[str]] = {}
    for label in sorted(accuracy, key=lambda label: -accuracy[label]):  # of equals the first
        by_method.setdefault(study.groups[label].method.name, []).append(label)
    kept = {label for labels in by_method.values() for label in labels[:num]}
    groups = {label: config for label, config in study.groups.items() if label in kept}
    baseline = by_method[next(iter(study.groups.values())).method.name][0]
    return dataclasses.replace(study, groups=groups, baseline=lambda label: baseline)


def _settings(texts: Sequence[str]) -> dict[str, list[str]]:
    """Key -> values, of what `--set` was given."""
    found: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not (key and equals and all(values.split(","))):
            raise ValueError(f"--set={text}: KEY=VALUE,VALUE is needed")
        if key in found or key in ("seed", "dry_run", "method.name", "dataset.holdout"):
            raise ValueError(f"--set={text}: {key} is set twice, or by this command itself")
        found[key] = values.split(",")
    return found


def _label(method: str, chosen: Mapping[str, str]) -> str:
    return " ".join([method, *(f"{key}={value}" for key, value in chosen.items())])


if __name__ == "__main__":
    console.run(main)
