"""Trains methods at many settings with many seeds, and compares them with a baseline."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from absl.flags import FlagValues

from bam import extras, files
from bam.cli import command, command_line, jax_setup, options, screen, signals
from bam.errors import InputError
from bam.privacy.plan import PrivacyPlan
from bam.privacy.selection import Selection
from bam.sweep import comparison, private_search, studies
from bam.sweep.method_config import method_config
from bam.training import methods


def main(argv: Sequence[str]) -> int:
    """Runs `bam sweep` with these arguments and returns a status of `options.STATUSES`."""
    return command.run("sweep", argv, sweep)


def sweep(flags: FlagValues) -> int:
    """Trains the missing runs, writes and prints the table, and draws the bias of the runs."""
    chosen, (file, overrides) = comparison.settings_of(flags.set), command_line.config_source(flags)
    fixed = set(private_search.FIXED if flags.private else ())
    if set_twice := sorted(fixed & chosen.keys()):
        raise InputError(f"--private sets {', '.join(set_twice)}: leave it out of --set")
    fixed |= {"dataset.holdout", *chosen}
    study = comparison.make_study(
        lambda method, names: method_config(file, method, overrides, fixed, names),
        flags.methods,
        chosen,
        flags.holdout,
        flags.smaller,
    )
    if flags.private:
        return _search_privately(flags, study)
    metric = comparison.metric_of(study.groups, flags.metric)
    study = dataclasses.replace(study, metric=metric)
    workdir, should_stop = Path(flags.workdir), signals.stop_after(flags.max_seconds)
    out = Path(flags.out or workdir / "sweep")
    files.check_writable(f"{out}.json")
    jax_setup.use_compilation_cache()
    if flags.best:
        first = studies.run_missing(study.configs(1), workdir, should_stop, screen.show)
        if not all(first.values()):
            return options.STOPPED
        study = comparison.keep_best(study, first, flags.best)
    rows, runs = studies.carry_out(study, flags.num_seeds, workdir, out, should_stop, screen.show)
    columns = studies.columns(study.columns, rows)
    always = studies.main_columns(columns, rows)
    screen.table(columns, rows, file=out.with_name(f"{out.name}.md"), always=always)
    screen.show("\n".join([studies.LEGEND, *studies.remarks(rows)]))
    if not studies.is_finished(runs, flags.num_seeds):
        return options.STOPPED
    has_bias = any(row["bias_norm"] is not None for row in rows)
    if has_bias and len({methods.full_label(row["method"]) for row in rows}) == len(rows):
        try:
            from bam.sweep import plot
        except extras.MissingExtraError:
            return 0
        path = out.with_name(f"{out.name}.png")
        plot.compare(rows, runs, path)
        screen.say(f"{path}: bias is measured on training examples; it is NOT PRIVATE")
    return 0


def _search_privately(flags: FlagValues, study: comparison.Study) -> int:
    """Runs a private search: draws trials, trains and scores them, and chooses one."""
    if flags.best or flags["num_seeds"].present:
        raise InputError("--private draws the number of trials: leave out --best and --num_seeds")
    if flags.smaller > 1 or flags.out:
        raise InputError(
            "--private keeps --config.epsilon and writes no table: leave out --smaller and --out"
        )
    if flags.metric:
        raise InputError(
            "--private scores trials by --score, without test data: leave out --metric"
        )
    selection = Selection(flags.trials_mean, flags.trials_shape, flags.score_noise)
    trials = {
        name: private_search.as_trial(config, selection, held_out=flags.score == "held_out")
        for name, config in study.groups.items()
    }
    jax_setup.use_compilation_cache()
    should_stop = signals.stop_after(flags.max_seconds)
    workdir = Path(flags.workdir)
    chosen = private_search.search(trials, workdir, should_stop, screen.show, show_plan)
    return 0 if chosen else options.STOPPED


def show_plan(plan: PrivacyPlan) -> None:
    """Prints the guarantee of a search and the costs of other numbers of trials."""
    screen.show(private_search.describe(plan))
    screen.table(private_search.COSTS, private_search.costs(plan))
