"""Writes the release of a finished run: weights, settings and a privacy statement."""

from collections.abc import Sequence
from pathlib import Path

from absl.flags import FlagValues

from bam import waits
from bam.cli import command, screen
from bam.release import export as release


def main(argv: Sequence[str]) -> int:
    """Runs `bam export` with these arguments; returns a status of `options.STATUSES`."""
    return command.run("export", argv, export)


def export(flags: FlagValues) -> None:
    """Writes the release, or refuses in one line a run that may not be released."""
    with waits.awaited(screen.show, "writing the release", stays=False):
        release.export(
            Path(flags.workdir),
            Path(flags.out),
            nominal=flags.nominal,
            own_model=flags.own_model,
            stablehlo=flags.stablehlo,
            weights=flags.weights,
        )
    files = release.FILES + flags.stablehlo * ("model.stablehlo",)
    screen.say(f"{', '.join(files)} in {flags.out}; read PRIVACY.md before you pass it on")
