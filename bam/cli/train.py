"""Trains one model privately."""

from collections.abc import Callable, Sequence
from pathlib import Path

from absl.flags import FlagValues

from bam import waits
from bam.cli import command, jax_setup, options, run_lines, screen, signals
from bam.privacy import processes
from bam.training import devices, duration, loop, rundir, tuning


def main(argv: Sequence[str]) -> int:
    """Runs `bam train` with these arguments and returns a status of `options.STATUSES`."""
    return command.run("train", argv, train)


def train(flags: FlagValues) -> int:
    """Builds the run, prints its privacy plan, trains."""
    config = flags.config
    jax_setup.join_processes(flags.coordinator, flags.num_processes, flags.process_id)
    workdir = None if config.dry_run else Path(flags.workdir)
    if workdir:
        rundir.check_resumable(workdir, config)
    jax_setup.use_compilation_cache()
    # One process prints for all.
    show = screen.show if processes.writes() else lambda line: None
    trainer = loop.build(config, log=show, folder=workdir)
    show(run_lines.describe(trainer))
    if not workdir:
        dry_run(trainer, flags.tune, show)
        return 0
    try:
        result = loop.train(
            trainer,
            config.seed,
            workdir,
            on_row=lambda row: show(run_lines.describe_row(row)),
            should_stop=signals.stop_after(flags.max_seconds),
            log=show,
        )
    except loop.StoppedError as stop:
        show(f"{stop}; the same command continues it")
        return options.STOPPED
    show(f"{', '.join(run_lines.test_figures(result.summary))}; files in {flags.workdir}")
    return 0


def dry_run(trainer: loop.Trainer, tune: bool, show: Callable[[str], None]) -> None:
    """Prints how long the run would take.

    With `tune`, it first finds the fastest microbatch size and prints it.
    """
    if tune:
        sizes = ", ".join(map(str, tuning.sizes()))
        with waits.awaited(show, f"timing microbatches on {devices.name()}"):
            size = tuning.fastest_size(trainer)
        show(f"fastest of {sizes} on {devices.name()}: --config.microbatch_size={size}")
        trainer = trainer.with_microbatch_size(size)
    trainer.load()  # features take minutes, and have lines of their own
    with waits.compiling(show, f"and timing a step on {devices.name()}"):
        estimate = duration.estimate_seconds(trainer)
    at_once = f", {trainer.config.microbatch_size} at a time" * tune
    show(f"{estimate} of training on this device{at_once}")
