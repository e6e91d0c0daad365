"""Trains one model privately."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from absl import flags

from bam import files, waits
from bam.cli import console
from bam.core import processes
from bam.privacy.rounding import rounded_up
from bam.training import devices, loading, loop, rundir, tuning


def main(argv: Sequence[str]) -> int:
    """`bam train` with these arguments; its exit status, of `options.STATUSES`."""
    return console.command("train", argv, train)


def train(given: flags.FlagValues) -> int:
    """Builds the experiment, prints its privacy plan, trains."""
    config = given.config
    console.join_processes(given.coordinator, given.num_processes, given.process_id)
    plan = None
    if not config.dry_run:
        rundir.check_resumable(Path(given.workdir), config)
        plan = rundir.recorded_plan(Path(given.workdir), config)
    console.use_compilation_cache()
    # Progress is shown once.
    show = console.show if processes.writes() else lambda line: None
    experiment = loop.build(config, log=show, plan=plan, on_plan=lambda run: show(describe(run)))
    if config.dry_run:
        dry_run(experiment, given.tune, show)
        return 0
    try:
        result = loop.train(
            experiment,
            config.seed,
            Path(given.workdir),
            on_row=lambda row: show(describe_row(row)),
            should_stop=console.stop_after(given.max_seconds),
            log=show,
        )
    except loop.StoppedError as stop:
        show(f"{stop}; the same command goes on from there")
        return console.STOPPED
    show(f"{', '.join(judged(result.summary))}; files in {given.workdir}")
    return 0


def dry_run(experiment: loop.Trainer, tune: bool, show: Callable[[str], None]) -> None:
    """Says how long the run would take, and first, if asked, which microbatch size is fastest."""
    if tune:
        sizes = ", ".join(map(str, tuning.sizes()))
        with waits.awaited(show, f"timing microbatches on {devices.name()}"):
            size = tuning.fastest_size(experiment)
        show(f"fastest of {sizes} on {devices.name()}: --config.microbatch_size={size}")
        config = experiment.config.copy_and_resolve_references()
        config.microbatch_size = size
        experiment = dataclasses.replace(experiment, config=config)
    with waits.compiling(show, f"and timing a step on {devices.name()}"):
        hours, minutes = divmod(round(loop.estimate_seconds(experiment) / 60), 60)
    at_once = f", {experiment.config.microbatch_size} at a time" * tune
    show(f"about {hours} h {minutes} min of training on this device{at_once}")


def describe(experiment: loop.Trainer) -> str:
    """A few lines that say what will run, what it will cost and what ε rests on."""
    config, features = experiment.config, experiment.config.features.name
    frozen = f" ({experiment.num_frozen:,} more are frozen)" if experiment.num_frozen else ""
    lines = [
        f"{config.method.name} on {experiment.dataset.name}: {config.model.name}, "
        f"{experiment.num_params:,} parameters{frozen}, on {devices_of(experiment)}, "
        f"{config.microbatch_size} at a time",
        experiment.describe_plan(),
    ]
    if experiment.plan.private and experiment.plan.unit == "example":
        lines += loading.unprotected_users(config.dataset)
    condition = "ε holds if {} made without any of these examples"
    if ":" in features:
        lines.append(f"features by {features}: {condition.format('it was')}")
    elif features:
        lines.append(f"features by {features}, a fixed map of each image: they cost no privacy")
    if config.init_from:
        lines.append(f"weights of {config.init_from}: {condition.format('they were')}")
    if expected := experiment.normalisation:
        lines.append(f"images are normalised for these weights: {expected}")
    return "\n".join(lines)


def devices_of(experiment: loop.Trainer) -> str:
    """For example "2 × cpu" or "16 × NVIDIA H100 80GB HBM3 in 2 processes"."""
    many = f"{experiment.mesh.size} × " if experiment.mesh else ""
    several = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{many}{devices.name()}{several}"


def judged(row: dict) -> list[str]:
    """What test data say of a model, by its loss's own figures: of one without any, the loss."""
    accuracy = row.get("test_accuracy")
    shown = [] if accuracy is None else [f"test accuracy {accuracy:.2%}"]
    if diverged := rundir.divergence(row):
        return [*shown, diverged]
    figures = row.get("figures") or {}
    if balanced := figures.get("balanced_accuracy"):
        shown.append(f"balanced accuracy {balanced[0]:.2%}{_over(figures)}")
    own = [x for x in row if x.startswith("test_") and "/" not in x]
    own = [x for x in own if x not in ("test_accuracy", "test_loss")]
    if "test_loss" in row and not (own or shown):
        own = ["test_loss"]
    return shown + [f"{name.replace('_', ' ')} {row[name]:.4f}" for name in own]


def _over(figures: dict) -> str:
    """Over how many classes or labels a mean is, if there are some without a test image."""
    by_class = "recall/" if any(x.startswith("recall/") for x in figures) else "balanced_accuracy/"
    each = {x.removeprefix(by_class): y for x, y in figures.items() if x.startswith(by_class)}
    without = [name for name, figure in each.items() if figure is None]
    if not without:
        return ""
    what = "classes; no test image" if by_class == "recall/" else "labels; all or no test images"
    return f" (of {len(each) - len(without)} of {len(each)} {what}: {files.listed(without, 3)})"


def describe_row(row: dict) -> str:
    """One line of progress."""
    spent = (
        "not private" if row["epsilon"] is None else f"epsilon {rounded_up(row['epsilon'], '.3f')}"
    )
    parts = [f"step {row['step']:>6}", spent]
    parts += judged(row)
    bias, relative = (row.get(f"not_private/{x}") for x in ("bias_norm", "relative_bias"))
    if bias is not None and relative is not None:
        parts.append(f"bias {bias:.3f} ({relative:.0%} of the gradient; NOT PRIVATE)")
    parts.append(f"{row['seconds']:.1f} s")
    return "  ".join(parts)
