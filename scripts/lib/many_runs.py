"""Studies of scripts, with the flags of `bam sweep`: training, files and printed tables."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from bam import files
from bam.cli import command_line, jax_setup, options, screen, signals
from bam.files import JsonObject
from bam.sweep import method_config as configs
from bam.sweep import runs, studies
from bam.sweep.comparison import Runs, Study

options.define(flags.FLAGS, options.MANY_RUNS)


def carry_out(
    study: Study, out: Path, legend: str = "", always: Sequence[str] = ()
) -> tuple[list[JsonObject], Runs]:
    """Trains the missing runs, writes `OUT.json` and `OUT.md`, prints the table.

    `legend` explains the study's own columns, in a line below the table. A narrow terminal gets
    those in `always`, too.
    If the time ends first, the script ends with exit status 3, and the same command continues.
    Returns the rows of the table and the runs.
    """
    files.check_writable(f"{out}.json")
    jax_setup.use_compilation_cache()
    num_seeds, workdir = flags.FLAGS.num_seeds, Path(flags.FLAGS.workdir)
    with _should_stop() as stop:
        rows, trained = studies.carry_out(study, num_seeds, workdir, out, stop, screen.show)
    columns, file = studies.columns(study.columns, rows), out.with_name(f"{out.name}.md")
    screen.table(columns, rows, file=file, always=[*studies.main_columns(columns, rows), *always])
    notes = filter(None, [studies.LEGEND, legend, *studies.remarks(rows)])
    screen.show("\n".join(notes))
    if not studies.is_finished(trained, num_seeds):
        sys.exit(options.STOPPED)
    return rows, trained


def run_missing(groups: Mapping[str, runs.Configs]) -> dict[str, dict[int, runs.FinishedRun]]:
    """Trains the runs that `--workdir` lacks, and returns group -> seed -> finished run.

    If the time ends first, the script ends with exit status 3, and the same command continues.
    """
    jax_setup.use_compilation_cache()
    with _should_stop() as stop:
        trained = studies.run_missing(groups, Path(flags.FLAGS.workdir), stop, screen.show)
    if any(len(trained[name]) < len(configs) for name, configs in groups.items()):
        sys.exit(options.STOPPED)
    return trained


@contextlib.contextmanager
def _should_stop() -> Iterator[Callable[[], bool]]:
    """Yields a `should_stop` of training.

    A signal ends at once what follows the training.
    """
    with signals.put_back(signal.SIGINT, signal.SIGTERM):
        yield signals.stop_after(flags.FLAGS.max_seconds)


def method_config(method: str, fixed: Iterable[str] = (), path: str = "") -> ConfigDict:
    """The config of METHOD or METHOD:STRENGTH with the command line's `--config.KEY=VALUE`.

    The script itself sets the `fixed` keys, so a command line that sets one is an error. Without a
    `path` the file is that of `--config`.
    """
    file, overrides = command_line.config_source(flags.FLAGS)
    return configs.method_config(path or file, method, overrides, fixed)
