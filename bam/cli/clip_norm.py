"""Measures a clip norm on public data, or reads it from a private run, and prints what to set."""

from collections.abc import Sequence
from pathlib import Path

from absl.flags import FlagValues

from bam import files, waits
from bam.cli import command, jax_setup, screen
from bam.core import slots
from bam.errors import InputError
from bam.training import loop, public_clip


def main(argv: Sequence[str]) -> int:
    """Runs `bam clip_norm` with these arguments and returns a status of `options.STATUSES`."""
    return command.run("clip_norm", argv, measure)


def measure(flags: FlagValues) -> None:
    """Prints C, how it was measured, and the flags that set it for a run."""
    if flags.run:
        advise(files.user_path(flags.run))
        return
    public = public_clip.PublicData(flags.public, flags.source, flags.path, flags.num_classes)
    public_clip.check(flags.config, public)
    jax_setup.use_compilation_cache()
    run = loop.build(flags.config)  # refuses a wrong config before the long measurement
    shape = run.dataset.train.images.shape[-3:]
    with waits.awaited(screen.show, f"training {run.config.model.name} on {public.name}"):
        clip_norm = public_clip.clip_norm(run.config, public, flags.quantile, flags.steps, shape)
    screen.say(
        f"C = {clip_norm:.4g}: the {flags.quantile:g} quantile of gradient norms of "
        f"{run.config.model.name} on {public.name}, after {flags.steps} steps of training there",
        f"add --config.clip_norm={clip_norm:.4g} "
        f"--config.clip_norm_from={public_clip.origin(public.name, flags.quantile, flags.steps)}",
    )


def advise(folder: Path) -> None:
    """Prints what the slots of a finished private run tell of C.

    InputError if the run is not finished, or its clip had no slots.
    """
    if not (folder / "summary.json").exists():
        raise InputError(f"{folder} has no summary.json: name the folder of a finished run")
    shares = files.read_json(folder / "summary.json").get("gradient_norms")
    if not isinstance(shares, dict):
        raise InputError(
            f"{folder} does not know how many gradients were clipped: train with "
            "--config.clip.slack=8"
        )
    clip_norm = float(files.read_json(folder / "config.json")["clip_norm"])
    screen.say(
        slots.advice(slots.of_shares(shares), clip_norm),
        "ε covers this figure. A next run on the same data adds its own ε: bam privacy --plan",
    )
