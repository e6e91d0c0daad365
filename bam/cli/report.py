"""Writes one HTML page about a run, finished or not: privacy, accuracy, settings."""

from collections.abc import Sequence
from pathlib import Path

from absl.flags import FlagValues

from bam import files, waits
from bam.cli import command, screen
from bam.errors import InputError
from bam.release import export, records
from bam.release.report import page


def main(argv: Sequence[str]) -> int:
    """Runs `bam report` with these arguments and returns a status of `options.STATUSES`."""
    return command.run("report", argv, report)


def report(flags: FlagValues) -> None:
    """Writes the page, or refuses in one line records that are damaged or not public."""
    workdir, public = Path(flags.workdir), flags.public
    out = Path(flags.out or workdir / f"report{'_public' * public}.html")
    try:
        run = records.read(workdir)
        if public:
            run.check_chosen()
        with waits.awaited(screen.show, "drawing the figures", stays=False):
            text = page(run, public=public, made_by=export.made_by())
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise InputError(f"the records in {workdir} are damaged: {error!r}") from None
    files.check_writable(str(out))
    may_be_public = run.private and public
    files.write_text(out, text, 0o666 if may_be_public else 0o600)
    makes = " (--public makes one that you may)" * (run.private and not public)
    advice = f"private page: do not pass it on{makes}"
    screen.say(f"{out}: {'may be passed on' if may_be_public else advice}")
