"""Writes what may be released of a finished run: weights, settings and a privacy statement."""

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from bam import waits
from bam.cli import console
from bam.release import export as release


def main(argv: Sequence[str]) -> int:
    """`bam export` with these arguments; its exit status, of `options.STATUSES`."""
    return console.command("export", argv, export)


def export(given: flags.FlagValues) -> None:
    """Writes the folder, or says in one line why it cannot be released."""
    with waits.awaited(console.show, "writing the release", stays=False):
        release.export(
            Path(given.workdir),
            Path(given.out),
            nominal=given.nominal,
            own_model=given.own_model,
            stablehlo=given.stablehlo,
        )
    files = release.FILES + given.stablehlo * ("model.stablehlo",)
    console.say(f"{', '.join(files)} in {given.out}; read PRIVACY.md before you pass it on")
