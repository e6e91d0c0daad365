"""Trains one model privately.

python -m scripts.train --config=configs/digits.py:bam_sam --workdir=runs/digits
"""

from pathlib import Path

from absl import flags
from ml_collections import config_flags

from bam import report, train
from scripts import cli

_CONFIG = config_flags.DEFINE_config_file("config", None, "configs/NAME.py:METHOD")
_WORKDIR = flags.DEFINE_string(
    "workdir", "", "folder for the run's files; an unfinished run there goes on"
)
_MAX_SECONDS = flags.DEFINE_float(
    "max_seconds", 0, "stop with a checkpoint after so long; 0: no limit", lower_bound=0
)
flags.mark_flags_as_required(["config"])


def main() -> None:
    """Builds the experiment, prints its privacy plan, trains."""
    with cli.one_line_errors():
        config = _CONFIG.value
        if not _WORKDIR.value and not config.dry_run:
            raise ValueError("--workdir is required: the folder for the run's files")
        if not config.dry_run:
            report.check_resumable(Path(_WORKDIR.value), config)
            config = report.with_recorded(config, Path(_WORKDIR.value))
        cli.use_compilation_cache()
        experiment = train.build(config)
    print(describe(experiment), flush=True)
    if config.dry_run:
        hours, minutes = divmod(round(train.estimate_seconds(experiment) / 60), 60)
        print(f"about {hours} h {minutes} min of training on this device")
        return
    should_stop = cli.stop_after(_MAX_SECONDS.value)
    try:
        with cli.one_line_errors():
            result = train.train(
                experiment, config.seed, Path(_WORKDIR.value), print_row, should_stop
            )
    except train.StoppedError as stop:
        print(f"{stop}; the same command goes on from there")
        return
    print(f"test accuracy {result.summary['test_accuracy']:.2%}; files in {_WORKDIR.value}")


def describe(experiment: train.Experiment) -> str:
    """A few lines that say what will run and what it will cost."""
    config = experiment.config
    return (
        f"{config.method.name} on {experiment.dataset.name}: {config.model.name}, "
        f"{experiment.num_params:,} parameters, on {report.device_name()}, "
        f"{config.microbatch_size} at a time\n"
        f"{experiment.plan.describe()}"
    )


def print_row(row: dict) -> None:
    """Prints one line of progress."""
    spent = "not private" if row["epsilon"] is None else f"epsilon {row['epsilon']:.3f}"
    parts = [f"step {row['step']:>6}", spent]
    if "test_accuracy" in row:
        parts.append(f"test accuracy {row['test_accuracy']:.2%}")
    if "not_private/bias_norm" in row:
        parts.append(
            f"bias {row['not_private/bias_norm']:.3f} "
            f"({row['not_private/relative_bias']:.0%} of the gradient; NOT PRIVATE)"
        )
    parts.append(f"{row['seconds']:.1f} s")
    print("  ".join(parts), flush=True)


if __name__ == "__main__":
    cli.run(main)
