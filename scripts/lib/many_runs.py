"""Studies of scripts, with the flags of `bam sweep`: training, files and printed tables."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from bam.cli import console, options, screen
from bam.files import JsonObject
from bam.sweep import method_config as configs
from bam.sweep import runs, studies
from bam.sweep.comparison import Runs, Study

options.define(flags.FLAGS, options.MANY_RUNS)


def carry_out(study: Study, out: Path) -> tuple[list[JsonObject], Runs]:
    """Trains the missing runs, writes `OUT.json` and `OUT.md`, prints the table.

    If the time ends first, the script ends with exit status 3, and the same command continues.
    Returns the rows of the table and the runs.
    """
    console.check_writable(f"{out}.json")
    console.use_compilation_cache()
    num_seeds, workdir = flags.FLAGS.num_seeds, Path(flags.FLAGS.workdir)
    stop = console.stop_after(flags.FLAGS.max_seconds)
    rows, trained = studies.carry_out(study, num_seeds, workdir, out, stop, console.say)
    screen.show(studies.columns(study.columns, rows), rows, file=out.with_name(f"{out.name}.md"))
    if not studies.finished(trained, num_seeds):
        sys.exit(console.STOPPED)
    return rows, trained


def run_missing(groups: Mapping[str, runs.Configs]) -> dict[str, dict[int, runs.FinishedRun]]:
    """Trains the runs that `--workdir` lacks; returns group -> seed -> finished run."""
    console.use_compilation_cache()
    stop = console.stop_after(flags.FLAGS.max_seconds)
    return studies.run_missing(groups, Path(flags.FLAGS.workdir), stop, console.say)


def method_config(method: str, fixed: Iterable[str] = (), path: str = "") -> ConfigDict:
    """The config of METHOD or METHOD:STRENGTH with the command line's `--config.KEY=VALUE`.

    The script itself sets the `fixed` keys, so a command line that sets one is an error. Without a
    `path` the file is that of `--config`.
    """
    file, overrides = console.config_given(flags.FLAGS)
    return configs.method_config(path or file, method, overrides, fixed)
