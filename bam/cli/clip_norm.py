"""Measures a clip norm on public data, and prints how a run is given it."""

from collections.abc import Sequence

from absl import flags

from bam import waits
from bam.cli import console
from bam.training import public_clip, trainer


def main(argv: Sequence[str]) -> int:
    """`bam clip_norm` with these arguments; its exit status, of `options.STATUSES`."""
    return console.command("clip_norm", argv, measure)


def measure(given: flags.FlagValues) -> None:
    """Prints C, how it was measured, and the flags that give a run this C."""
    public = public_clip.PublicData(given.public, given.source, given.path, given.num_classes)
    public_clip.check(given.config, public)
    console.use_compilation_cache()
    run = trainer.build(given.config)  # what does not fit costs no measurement
    shape = run.dataset.train.images.shape[-3:]
    with waits.awaited(console.show, f"training {run.config.model.name} on {public.name}"):
        clip_norm = public_clip.clip_norm(run.config, public, given.quantile, given.steps, shape)
    console.say(
        f"C = {clip_norm:.4g}: the {given.quantile:g} quantile of gradient norms of "
        f"{run.config.model.name} on {public.name}, after {given.steps} steps of training there",
        f"add --config.clip_norm={clip_norm:.4g} "
        f"--config.clip_norm_from={public_clip.origin(public.name, given.quantile, given.steps)}",
    )
