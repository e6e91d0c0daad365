"""Studies of scripts: trained, written and shown as their flags say, which are those of a sweep."""

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
    """Trains what is missing, writes `OUT.json` and `OUT.md`, prints the table; its rows and runs.

    A study that is not finished ends the script with exit status 3; the same command goes on.
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


def run_missing(groups: Mapping[str, runs.Configs]) -> dict[str, dict[int, runs.Run]]:
    """Trains what is missing in `--workdir`; group -> seed -> finished run."""
    console.use_compilation_cache()
    stop = console.stop_after(flags.FLAGS.max_seconds)
    return studies.run_missing(groups, Path(flags.FLAGS.workdir), stop, console.say)


def method_config(method: str, fixed: Iterable[str] = (), path: str = "") -> ConfigDict:
    """The config of METHOD or METHOD:STRENGTH with the command line's `--config.KEY=VALUE`.

    Overrides of what the script sets itself, the `fixed` keys, are an error. Without a `path` the
    file is that of `--config`.
    """
    file, overrides = console.config_given(flags.FLAGS)
    return configs.method_config(path or file, method, overrides, fixed)
