"""Writes one HTML page about a run, finished or not: privacy, accuracy, settings.

bam report --workdir=runs/digits
bam report --workdir=runs/digits --public --out=page.html

The page is one file; it needs no network and runs nothing. With --public it can be passed on.
"""

from pathlib import Path

from absl import flags

from bam.cli import console
from bam.errors import InputError
from bam.files import write_text
from bam.release import export, page, records

_WORKDIR = flags.DEFINE_string("workdir", "", "folder of a run; it is only read, but for the page")
_OUT = flags.DEFINE_string(
    "out", "", "HTML file to write; if empty, report.html in the run's folder"
)
_PUBLIC = flags.DEFINE_bool(
    "public", False, "leave out all that ε does not cover, paths and the seed, to pass the page on"
)
console.require("workdir")


def main() -> None:
    """Writes the page, or says in one line why there is none."""
    with console.one_line_errors():
        workdir, public = Path(_WORKDIR.value), _PUBLIC.value
        out = Path(_OUT.value or workdir / f"report{'_public' * public}.html")
        try:
            run = records.read(workdir)
            if public:
                run.check_chosen()
            text = page.page(run, public=public, made_by=export.made_by())
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise InputError(f"the records in {workdir} are damaged: {error!r}") from None
        console.check_writable(str(out))
        write_text(out, text)
    advice = "not for passing on" + "; see --public" * (run.private and not public)
    console.say(f"{out}: {'may be passed on' if run.private and public else advice}")


if __name__ == "__main__":
    console.run(main)
