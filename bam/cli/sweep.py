"""Trains methods at many settings with many seeds, and sets them beside a baseline."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from bam import extras
from bam.cli import console, screen
from bam.errors import InputError
from bam.privacy.plan import PrivacyPlan
from bam.privacy.selection import Selection
from bam.sweep import comparison, private_search, studies
from bam.sweep.method_config import method_config
from bam.training import methods


def main(argv: Sequence[str]) -> int:
    """`bam sweep` with these arguments; its exit status, of `options.STATUSES`."""
    return console.command("sweep", argv, sweep)


def sweep(given: flags.FlagValues) -> int:
    """Trains what is missing, then writes and prints the table, and draws the runs."""
    chosen, (file, overrides) = comparison.settings_of(given.set), console.config_given(given)
    fixed = set(private_search.FIXED if given.private else ())
    if set_twice := sorted(fixed & chosen.keys()):
        raise InputError(f"--private sets {', '.join(set_twice)} itself: leave it out")
    fixed |= {"dataset.holdout", *chosen}
    study = comparison.make_study(
        lambda method: method_config(file, method, overrides, fixed),
        given.methods,
        chosen,
        given.holdout,
        given.smaller,
    )
    if given.private:
        return _search_privately(given, study)
    metric = comparison.metric_of(study.groups, given.metric)
    study = dataclasses.replace(study, metric=metric)
    workdir, should_stop = Path(given.workdir), console.stop_after(given.max_seconds)
    out = Path(given.out or workdir / "sweep")
    console.check_writable(f"{out}.json")
    console.use_compilation_cache()
    if given.best:
        first = studies.run_missing(study.configs(1), workdir, should_stop, console.say)
        if not all(first.values()):
            return console.STOPPED
        study = comparison.keep_best(study, first, given.best)
    rows, runs = studies.carry_out(study, given.num_seeds, workdir, out, should_stop, console.say)
    shown = studies.columns(study.columns, rows)
    # A comparison is of no use without what is compared, its figure and how sure it is.
    spared = ["p", *(x for x in shown if x.startswith(metric.replace("_", " ")))]
    screen.show(shown, rows, kept=out.with_name(f"{out.name}.md"), spared=spared)
    if not studies.finished(runs, given.num_seeds):
        return console.STOPPED
    measured = any(row["bias_norm"] is not None for row in rows)
    if measured and len({methods.full_label(row["method"]) for row in rows}) == len(rows):
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
    if given.smaller > 1 or given.out:
        raise InputError(
            "--private keeps --config.epsilon and writes no table: no --smaller, no --out"
        )
    if given.metric:
        raise InputError("--private judges trials by --score, without test data: no --metric")
    selection = Selection(given.trials_mean, given.trials_shape, given.score_noise)
    trials = {
        name: private_search.as_trial(config, selection, held_out=given.score == "held_out")
        for name, config in study.groups.items()
    }
    console.use_compilation_cache()
    should_stop = console.stop_after(given.max_seconds)
    workdir = Path(given.workdir)
    chosen = private_search.search(trials, workdir, should_stop, console.show, show_plan)
    return 0 if chosen else console.STOPPED


def show_plan(plan: PrivacyPlan) -> None:
    """Prints what a search will promise, and what it costs."""
    console.show(private_search.describe(plan))
    screen.show(private_search.COSTS, private_search.costs(plan))
