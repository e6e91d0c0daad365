"""Writes what may be released of a finished run: weights, settings and a privacy statement.

bam export --workdir=runs/digits --out=release
"""

from pathlib import Path

from absl import flags

from bam.cli import console
from bam.release import export

_WORKDIR = flags.DEFINE_string("workdir", "", "folder of a finished run, trained without a seed")
_OUT = flags.DEFINE_string("out", "", "folder to write, new or empty")
_NOMINAL = flags.DEFINE_bool(
    "nominal", False, "also take a run with a seed; its PRIVACY.md begins by saying what that means"
)
_OWN_MODEL = flags.DEFINE_string(
    "own_model", "", "MODULE:FUNCTION of the run's model, if it is your own; it is imported"
)
_STABLEHLO = flags.DEFINE_bool(
    "stablehlo", False, "also write model.stablehlo: the network with its weights, for jax.export"
)
console.require("workdir", "out")


def main() -> None:
    """Writes the folder, or says in one line why it cannot be released."""
    with console.one_line_errors():
        export.export(
            Path(_WORKDIR.value),
            Path(_OUT.value),
            nominal=_NOMINAL.value,
            own_model=_OWN_MODEL.value,
            stablehlo=_STABLEHLO.value,
        )
    files = export.FILES + _STABLEHLO.value * ("model.stablehlo",)
    console.say(f"{', '.join(files)} in {_OUT.value}; read PRIVACY.md before you pass it on")


if __name__ == "__main__":
    console.run(main)
