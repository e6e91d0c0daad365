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
from pathlib import Path

from absl import flags

from bam import extras
from bam.cli import console, private_search, sweeps
from bam.errors import InputError
from bam.privacy.selection import Selection
from bam.sweep import comparison
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
_METRIC = flags.DEFINE_string(
    "metric", "", "to compare: a name of figures or test_… in summary.json; '': accuracy, or loss"
)
_OUT = flags.DEFINE_string("out", "", "files to write, less .json and .md; '': WORKDIR/sweep")
_PRIVATE = flags.DEFINE_bool(
    "private", False, "--config.epsilon pays for the choice, too: docs/selection.md"
)
_TRIALS_MEAN = flags.DEFINE_float("trials_mean", 8, "of --private: trials on average")
_TRIALS_SHAPE = flags.DEFINE_float(
    "trials_shape", 1, "of --private: shape η of their number; 0: logarithmic, 1: geometric"
)
_SCORE = flags.DEFINE_enum(
    "score", "training", ["training", "held_out"], "of --private: images that a trial is judged on"
)
_SCORE_NOISE = flags.DEFINE_float(
    "score_noise", 10, "of --private: standard deviation of the noise on a score, in images"
)
flags.adopt_module_key_flags(sweeps)
console.require("config", "workdir", "methods")
_OF_PRIVATE = ("trials_mean", "trials_shape", "score", "score_noise")
console.ensure(
    ("private", *_OF_PRIVATE),
    lambda private, *_: private or not any(flags.FLAGS[name].present for name in _OF_PRIVATE),
    f"--{', --'.join(_OF_PRIVATE)} belong to --private",
)


def main() -> None:
    """Trains what is missing, then writes and prints the table, and draws the runs."""
    with console.one_line_errors():
        settings = comparison.settings_of(_SET.value)
        fixed = {"dataset.holdout", *settings, *(private_search.FIXED if _PRIVATE.value else ())}
        study = comparison.grid(
            functools.partial(sweeps.method_config, fixed=fixed),
            _METHODS.value,
            settings,
            _HOLDOUT.value,
            _SMALLER.value,
        )
        if _PRIVATE.value:
            _search_privately(study)
            return
        metric = comparison.metric_of(study.groups, _METRIC.value)
        study = dataclasses.replace(study, metric=metric)
        if _BEST.value:
            first = sweeps.run_missing(study.configs(1))
            if not all(first.values()):
                raise SystemExit(console.STOPPED)
            study = comparison.best(study, first, _BEST.value)
        out = Path(_OUT.value or f"{sweeps.WORKDIR.value}/sweep")
        rows, runs = sweeps.carry_out(study, out)
        measured = any(row["bias_norm"] is not None for row in rows)
        if measured and len({registry.full_label(row["method"]) for row in rows}) == len(rows):
            try:
                from bam.sweep import plot
            except extras.MissingExtraError:
                return
            path = out.with_name(f"{out.name}.png")
            plot.compare(rows, runs, path)
            console.say(f"{path}: bias is measured on training examples; it is NOT PRIVATE")


def _search_privately(study: comparison.Study) -> None:
    """Draws, trains, scores and chooses as `private_search` does."""
    if _BEST.value or flags.FLAGS["num_seeds"].present:
        raise InputError("--private draws how often a setting is tried: no --best, no --num_seeds")
    if _METRIC.value:
        raise InputError("--private judges trials by --score, without test data: no --metric")
    selection = Selection(_TRIALS_MEAN.value, _TRIALS_SHAPE.value, _SCORE_NOISE.value)
    trials = {
        name: private_search.as_trial(config, selection, held_out=_SCORE.value == "held_out")
        for name, config in study.groups.items()
    }
    console.use_compilation_cache()
    should_stop = console.stop_after(sweeps.MAX_SECONDS.value)
    private_search.search(trials, Path(sweeps.WORKDIR.value), should_stop, console.show)


if __name__ == "__main__":
    console.run(main)
