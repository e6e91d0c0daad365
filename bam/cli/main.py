"""`bam COMMAND`: one command, whose names are those of the modules of this folder."""

import difflib
import os
import runpy
import sys

from bam import __version__, extras

COMMANDS = {
    "train": "trains one model privately, and goes on with one that was stopped",
    "sweep": "trains methods at many settings and seeds, and compares them",
    "report": "writes a page about a run: its privacy, accuracy and settings",
    "export": "writes what may be released of a run, with a privacy statement",
    "predict": "says what a released model sees on images",
    "audit": "bounds from below what runs, or one of yours, give away",
    "data": "makes a data set of a folder of images, and shows one",
    "privacy": "says what ε a noise earns, or what noise an ε needs",
    "hardware": "compiles a run for GPUs or TPUs that are not there; estimates the time on TPUs",
}
HELP = f"""\
bam {__version__}: differentially private image classifiers, and a statement that anyone can check

  bam train --config=digits:bam_sam --workdir=runs/digits

{{commands}}

`bam COMMAND --help` shows the flags of a command. --debug shows the traceback of an error.
Exit status: 0; 2 for bad input; 3 for a run that was stopped, which the same command goes on
with; 130 for Ctrl-C elsewhere.
"""


def main() -> None:
    """Runs the command that the first argument names; quiet if nobody reads what it prints."""
    try:
        try:
            _main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # as shells have it


def _main() -> None:
    sys.excepthook = extras.one_line
    name = (sys.argv[1:] or ["help"])[0]
    if name in COMMANDS:
        run(name)
    elif name in ("help", "--help", "-h"):
        width = max(map(len, COMMANDS)) + 2
        print(HELP.format(commands="\n".join(f"  {k:{width}}{v}" for k, v in COMMANDS.items())))
    elif name == "--version":
        print(f"bam {__version__}")
    else:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(COMMANDS)}"
        print(f"error: bam has no command {name!r}: {hint}", file=sys.stderr)
        sys.exit(2)


def run(name: str) -> None:
    """Runs a command with the rest of the arguments, as `bam NAME` does."""
    sys.excepthook = extras.one_line
    if sys.argv[1:2] == [name]:
        del sys.argv[1]
    if name != "privacy":
        with extras.needs("train"):
            import ml_collections  # noqa: F401
            import rich  # noqa: F401
    runpy.run_module(f"bam.cli.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
