r"""Trains methods at many settings with many seeds, and sets them beside a baseline.

bam sweep --config=digits --methods=dp_sgd,bam_sam:0.02 --num_seeds=5 --workdir=runs/sweep
bam sweep --config=digits --methods=dp_sgd,bam_sam:0.01,bam_sam:0.05 --holdout=200 --best=1 \
  --set=optimizer.learning_rate=0.003,0.01,0.03 --num_seeds=5 --workdir=runs/search

The first method is the baseline: each other is paired with it, by seed and at equal settings. With
--holdout settings are judged on training images that are set aside, so that the test split is not
read; with --best=K only the K best settings of each method, by the first seed, get all seeds. With
--smaller=K batches and noise are K times smaller (TAN's rule): a cheap search for large batches,
whose runs have a far larger ε. None of that is private: ε is of each run alone (docs/selection.md).
With --private a random number of trials is drawn from the same settings and the best is chosen; ε
pays for the choice, too. The same command again goes on.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from bam import extras
from bam.cli import console, private_search, sweeps
from bam.cli.study import Runs, Study, carry_out, percent, with_smaller_batches
from bam.files import JsonMapping
from bam.training import registry

_METHODS = flags.DEFINE_list(
    "methods", "dp_sgd,bam_sam", "METHOD or METHOD:STRENGTH, the baseline first"
)
_SET = flags.DEFINE_multi_string("set", [], "KEY=VALUE,VALUE of the config, tried with all others")
_HOLDOUT = flags.DEFINE_integer("holdout", 0, "training images to judge on; 0: the test split", 0)
_BEST = flags.DEFINE_integer("best", 0, "settings of each method that get all seeds; 0: all", 0)
_SMALLER = flags.DEFINE_integer(
    "smaller", 1, "search by TAN's rule: batches and noise are so many times smaller", 1
)
_OUT = flags.DEFINE_string("out", "", "files to write, less .json and .md; '': WORKDIR/sweep")
flags.adopt_module_key_flags(sweeps)
flags.adopt_module_key_flags(private_search)
console.require("config", "workdir", "methods")

# The first seed of runs that settings are chosen by: others than those of final runs.
SEARCHING = 1000


def main() -> None:
    """Trains what is missing, then writes and prints the table, and draws the runs."""
    with console.one_line_errors():
        private = private_search.PRIVATE.value
        fixed = private_search.FIXED if private else ()
        study = declared(_METHODS.value, _settings(_SET.value), _HOLDOUT.value, fixed)
        if private:
            _search_privately(study)
            return
        if _BEST.value:
            first = sweeps.run_missing(study.configs(num_seeds=1))
            if not all(first.values()):
                raise SystemExit(console.STOPPED)
            study = best(study, first, _BEST.value)
        out = Path(_OUT.value or f"{sweeps.WORKDIR.value}/sweep")
        rows, found = carry_out(study, out)
        measured = any(row["bias_norm"] is not None for row in rows)
        if measured and len({registry.full_label(row["method"]) for row in rows}) == len(rows):
            _draw(rows, found, out.with_name(f"{out.name}.png"))


def _draw(rows: Sequence[JsonMapping], found: Runs, path: Path) -> None:
    """Accuracy, bias and what belongs beside it over training, where Matplotlib is installed."""
    try:
        from bam.sweep import plot
    except extras.MissingExtraError:
        return
    runs = {
        registry.full_label(row["method"]): [run.rows for run in found[row["label"]].values()]
        for row in rows
    }
    seeds = max(len(row["seeds"]) for row in rows)
    title = f"{rows[0]['dataset']}, {seeds} seeds (mean ± SD)"
    plot.compare_runs(runs, [row["method"] for row in rows], path, title)
    print(f"{path}: bias is measured on training examples; it is NOT PRIVATE")


def _search_privately(study: Study) -> None:
    """Draws, trains, scores and chooses as `private_search` does."""
    if _BEST.value or flags.FLAGS["num_seeds"].present:
        raise ValueError("--private draws how often a setting is tried: no --best, no --num_seeds")
    if (private_search.SCORE.value == "held_out") != bool(_HOLDOUT.value):
        raise ValueError("--score=held_out and --holdout=N belong together")
    grid = {label: private_search.as_trial(config) for label, config in study.groups.items()}
    console.use_compilation_cache()
    should_stop = console.stop_after(sweeps.MAX_SECONDS.value)
    show = functools.partial(print, flush=True)
    private_search.search(grid, Path(sweeps.WORKDIR.value), should_stop, show)


def declared(
    methods: Sequence[str],
    settings: Mapping[str, Sequence[str]],
    holdout: int,
    fixed: Iterable[str] = (),
) -> Study:
    """Every method at every combination of settings, beside the first method at the same.

    `fixed` are keys that the command line must not set.
    """
    groups: dict[str, ConfigDict] = {}
    baseline = {}
    for method in methods:
        for values in itertools.product(*settings.values()):
            chosen = dict(zip(settings, values, strict=True))
            config = sweeps.strength_config(method, {"dataset.holdout", *settings, *fixed})
            for key, value in chosen.items():
                sweeps.set_key(config, key, value)
            config.dataset.holdout = holdout
            if _SMALLER.value > 1:
                config = with_smaller_batches(config, _SMALLER.value)
            if config.public_clip.quantile and "clip_norm" in chosen:
                raise ValueError("--set=clip_norm: public_clip sets C; set public_clip.quantile=0")
            label = _label(method, chosen)
            if label in groups or config in groups.values():
                raise ValueError(f"{label} is there twice")
            groups[label], baseline[label] = config, _label(methods[0], chosen)
    return Study(groups, baseline.get, first_seed=SEARCHING if holdout else 0)


def best(study: Study, first: Runs, num: int) -> Study:
    """The best groups of each method by the runs of the first seed, beside the baseline's best."""
    accuracy = {label: next(iter(percent(runs).values())) for label, runs in first.items()}
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
