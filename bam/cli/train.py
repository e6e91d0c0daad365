"""Trains one model privately.

bam train --config=digits:bam_sam --workdir=runs/digits

All devices of this machine share the work; those of several, too, if started on each of them with
--coordinator (docs/accelerators.md).
"""

import sys
from pathlib import Path

import jax
from absl import flags
from ml_collections import config_flags

from bam.cli import console
from bam.core import processes
from bam.privacy.rounding import rounded_up
from bam.training import devices, loading, loop, rundir
from bam.training.config import KEYS

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "NAME:METHOD of a shipped config, or FILE.py:METHOD"
)
_WORKDIR = flags.DEFINE_string(
    "workdir", "", "folder for the run's files; an unfinished run there goes on"
)
_MAX_SECONDS = flags.DEFINE_float(
    "max_seconds", 0, "stop with a checkpoint after so long; 0: no limit", lower_bound=0
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", "", "HOST:PORT of process 0 of several; auto: as SLURM, Kubernetes, … say"
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "with --coordinator=HOST:PORT")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "likewise: 0 to num_processes - 1")
console.require("config")
console.ensure(
    ("config", "workdir"),
    lambda config, workdir: workdir or (config and config.dry_run),
    "--workdir is required: the folder for the run's files",
)


def main() -> None:
    """Builds the experiment, prints its privacy plan, trains."""
    with console.one_line_errors():
        config = _CONFIG.value
        console.join_processes(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
        plan = None
        if not config.dry_run:
            rundir.check_resumable(Path(_WORKDIR.value), config)
            config = rundir.with_recorded(config, Path(_WORKDIR.value))
            plan = rundir.recorded_plan(Path(_WORKDIR.value), config)
        console.use_compilation_cache()
        # Progress is shown once.
        show = console.show if processes.writes() else lambda line: None
        experiment = loop.build(config, log=show, plan=plan)
    show(describe(experiment))
    if config.dry_run:
        with console.one_line_errors():
            hours, minutes = divmod(round(loop.estimate_seconds(experiment) / 60), 60)
        show(f"about {hours} h {minutes} min of training on this device")
        return
    should_stop = console.stop_after(_MAX_SECONDS.value)
    try:
        with console.one_line_errors():
            result = loop.train(
                experiment,
                config.seed,
                Path(_WORKDIR.value),
                on_row=lambda row: show(describe_row(row)),
                should_stop=should_stop,
                log=show,
            )
    except loop.StoppedError as stop:
        show(f"{stop}; the same command goes on from there")
        sys.exit(console.STOPPED)
    show(f"{', '.join(judged(result.summary))}; files in {_WORKDIR.value}")


def describe(experiment: loop.Trainer) -> str:
    """A few lines that say what will run, what it will cost and what ε rests on."""
    config, features = experiment.config, experiment.config.features.name
    frozen = f" ({experiment.num_frozen:,} more are frozen)" if experiment.num_frozen else ""
    lines = [
        f"{config.method.name} on {experiment.dataset.name}: {config.model.name}, "
        f"{experiment.num_params:,} parameters{frozen}, on {devices_of(experiment)}, "
        f"{config.microbatch_size} at a time",
        experiment.plan.describe(),
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
    if balanced := (row.get("figures") or {}).get("balanced_accuracy"):
        shown.append(f"balanced accuracy {balanced[0]:.2%}")
    own = [x for x in row if x.startswith("test_") and "/" not in x]
    own = [x for x in own if x not in ("test_accuracy", "test_loss")]
    if "test_loss" in row and not (own or shown):
        own = ["test_loss"]
    return shown + [f"{name.replace('_', ' ')} {row[name]:.4f}" for name in own]


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


if __name__ == "__main__":
    __doc__ = "\n  ".join(
        [f"{__doc__}\nkeys of a config, for --config.KEY=VALUE:", *map(str, KEYS)]
    )
    console.run(main)
