"""Writes the release of a finished run: weights, settings and a privacy statement."""

from collections.abc import Sequence
from pathlib import Path

from absl.flags import FlagValues

from bam import files, waits
from bam.cli import command, screen
from bam.errors import InputError
from bam.release import export as release
from bam.release.notes import FORM
from bam.text import short_list

MOST_LISTED = 10  # names of classes


def main(argv: Sequence[str]) -> int:
    """Runs `bam export` with these arguments and returns a status of `options.STATUSES`."""
    return command.run("export", argv, export)


def export(flags: FlagValues) -> None:
    """Writes the release, or refuses in one line a run that may not be released.

    If --notes names a file that does not exist, only the empty form is written there.
    """
    form = Path(flags.notes)
    if flags.notes and not form.exists():
        files.check_writable(flags.notes)
        files.write_text(form, FORM)
        raise InputError(
            f"{form} did not exist and is an empty form now: answer its questions, then give this "
            "command again"
        )
    with waits.awaited(screen.show, "writing the release", stays=False):
        release.export(
            Path(flags.workdir),
            Path(flags.out),
            nominal=flags.nominal,
            own_model=flags.own_model,
            stablehlo=flags.stablehlo,
            weights=flags.weights,
            notes=flags.notes,
        )
    names = release.FILES + flags.stablehlo * ("model.stablehlo",)
    screen.say(f"{', '.join(names)} in {flags.out}; read PRIVACY.md before you pass it on")
    if classes := files.read_json(files.user_path(flags.out) / "model.json")["classes"]:
        named = short_list(classes, MOST_LISTED)
        screen.say(f"names of the classes, public with the model: {named}")
