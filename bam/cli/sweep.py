"""Trains methods at many settings with many seeds, and sets them beside a baseline."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from bam import extras
from bam.cli import console, private_search, sweeps
from bam.errors import InputError
from bam.privacy.selection import Selection
from bam.sweep import comparison
from bam.training import registry


def main(argv: Sequence[str]) -> int:
    """`bam sweep` with these arguments; its exit status, of `options.STATUSES`."""
    return console.command("sweep", argv, sweep)


def sweep(given: flags.FlagValues) -> int:
    """Trains what is missing, then writes and prints the table, and draws the runs."""
    settings = comparison.settings_of(given.set)
    fixed = {"dataset.holdout", *settings, *(private_search.FIXED if given.private else ())}
    study = comparison.grid(
        functools.partial(sweeps.method_config, given, fixed=fixed),
        given.methods,
        settings,
        given.holdout,
        given.smaller,
    )
    if given.private:
        return _search_privately(given, study)
    metric = comparison.metric_of(study.groups, given.metric)
    study = dataclasses.replace(study, metric=metric)
    if given.best:
        first = sweeps.run_missing(given, study.configs(1))
        if not all(first.values()):
            return console.STOPPED
        study = comparison.best(study, first, given.best)
    out = Path(given.out or f"{given.workdir}/sweep")
    rows, runs = sweeps.carry_out(given, study, out)
    measured = any(row["bias_norm"] is not None for row in rows)
    if measured and len({registry.full_label(row["method"]) for row in rows}) == len(rows):
        try:
            from bam.sweep import plot
        except extras.MissingExtraError:
            return 0
        path = out.with_name(f"{out.name}.png")
        plot.compare(rows, runs, path)
        console.say(f"{path}: bias is measured on training examples; it is NOT PRIVATE")
    return 0


def _search_privately(given: flags.FlagValues, study: comparison.Study) -> int:
    """Draws, trains, scores and chooses as `private_search` does."""
    if given.best or given["num_seeds"].present:
        raise InputError("--private draws how often a setting is tried: no --best, no --num_seeds")
    if given.metric:
        raise InputError("--private judges trials by --score, without test data: no --metric")
    selection = Selection(given.trials_mean, given.trials_shape, given.score_noise)
    trials = {
        name: private_search.as_trial(config, selection, held_out=given.score == "held_out")
        for name, config in study.groups.items()
    }
    console.use_compilation_cache()
    should_stop = console.stop_after(given.max_seconds)
    private_search.search(trials, Path(given.workdir), should_stop, console.show)
    return 0
