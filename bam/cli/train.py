"""Trains one model privately."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from absl.flags import FlagValues

from bam import memory, waits
from bam.cli import command, jax_setup, options, run_lines, screen, signals
from bam.extras import needs
from bam.privacy import processes
from bam.training import devices, duration, loop, methods, named_configs, rundir, tuning
from bam.training.examples import Rows

with needs("train"):
    from ml_collections import ConfigDict

BUSY = 1.5  # processes that compute for each core, from which on they slow each other
LONG = 2 * 24 * 3600.0  # seconds of a run on a CPU from which on a dry run says what is faster


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
    # Features take minutes and no step is taken yet, so a signal ends the command here at once.
    trainer.load()
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

    With `tune`, it first finds the fastest microbatch size and prints it. A size that does not fit
    the memory is replaced by one that does.
    """
    # The load is read first, because the work below adds to it.
    is_busy = _on_cpu() and os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)
    asked = trainer.config.microbatch_size
    if tune:
        sizes = ", ".join(map(str, tuning.sizes()))
        with waits.awaited(show, f"timing microbatches on {devices.name()}"):
            size = tuning.fastest_size(trainer)
        show(f"fastest of {sizes} on {devices.name()}: --config.microbatch_size={size}")
        trainer = trainer.with_microbatch_size(size)
    trainer.load()  # features take minutes, and have lines of their own
    rows = trainer.place_rows()
    trainer = fit_memory(trainer, rows, show)
    with waits.awaited(show, f"timing a step on {devices.name()}"):
        estimate = duration.estimate_seconds(trainer, rows)
    size = trainer.config.microbatch_size
    at_once = f", {size} at a time" * (tune or size != asked)
    busy = "; other programs use this machine, so it may be too long" * is_busy
    show(f"{estimate} of training on this device{at_once}{busy}")
    if estimate.seconds > LONG and _on_cpu():
        show(advise(trainer.config))


def fit_memory(trainer: loop.Trainer, rows: Rows, show: Callable[[str], None]) -> loop.Trainer:
    """Compiles the step, and returns the trainer or one with a smaller microbatch size that fits.

    `memory.TooLargeError` if even one example does not fit.
    """
    try:
        with waits.compiling(show, f"a step on {devices.name()}"):
            trainer.check_step(trainer.init(0), rows)
    except memory.TooLargeError as error:
        if not error.fitting:
            raise
        show(str(error))
        return fit_memory(trainer.with_microbatch_size(error.fitting), rows, show)
    return trainer


def advise(config: ConfigDict) -> str:
    """Returns what makes a run faster that takes days on a CPU."""
    remedies = {}
    if config.augment.views > 1:
        remedies["fewer views"] = "--config.augment.views=1"
    small = named_configs.load("cifar10_small:dp_sgd").model
    is_wide = config.model.name == small.name and config.model.width > small.width
    if config.dataset.name == "cifar10" and is_wide and config.method.name in methods.METHODS:
        remedies["a smaller network"] = f"--config=cifar10_small:{config.method.name}"
    faster = "a GPU is faster (docs/accelerators.md)"
    if not remedies:
        return faster
    how, flags = (" or ".join(x) for x in (remedies, remedies.values()))
    return f"{faster}; training takes less time with {how}: {flags}"


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"
