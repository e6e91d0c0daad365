"""Measures a clip norm on public data, and prints the flags that set it."""

from collections.abc import Sequence

from absl.flags import FlagValues

from bam import waits
from bam.cli import command, jax_setup, screen
from bam.training import loop, public_clip


def main(argv: Sequence[str]) -> int:
    """Runs `bam clip_norm` with these arguments; returns a status of `options.STATUSES`."""
    return command.run("clip_norm", argv, measure)


def measure(flags: FlagValues) -> None:
    """Prints C, how it was measured, and the flags that set it for a run."""
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
