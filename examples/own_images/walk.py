"""The commands of docs/own_images.md, run one after the other; `--out` keeps what they print.

python -m examples.own_images.walk [--out=docs/results/own_images]
"""

import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from absl import flags

from bam import files
from bam.cli import console
from examples.own_images import generate

_OUT = flags.DEFINE_string("out", "", "folder for what the commands print, with the contact sheet")
_IMAGES = flags.DEFINE_integer("images", 3000, "images of the folder", lower_bound=300)
_MORE = flags.DEFINE_string("train", "", "further flags of bam train")

COMMANDS = {
    "import": "bam data import photographs --out=data --size=32 --labels=photographs/labels.csv "
    "--classes=disc,square,triangle --user_column=person",
    "show": "bam data show data --out=sheet.png",
    "train": "bam train --config=folder:dp_sgd --workdir=run --config.dataset.path=data "
    "--config.dataset.groups=user --config.dataset.group_size=3 --config.features.name=prior",
    "report": "bam report --workdir=run",
    "export": "bam export --workdir=run --out=release",
    "predict": "bam predict --release=release photographs/0000.png photographs/0005.jpg "
    "photographs/0009.npy",
}


def main() -> None:
    """Runs them in a folder of their own."""
    with tempfile.TemporaryDirectory() as place:
        folder, started = Path(place), time.perf_counter()
        generate.write(folder / "photographs", _IMAGES.value)
        for name, command in COMMANDS.items():
            print(f"$ {command}", flush=True)
            more = shlex.split(_MORE.value) if name == "train" else []
            arguments = [sys.executable, "-m", "bam.cli.main", *shlex.split(command)[1:], *more]
            done = subprocess.run(
                arguments, cwd=folder, capture_output=True, text=True, check=False
            )
            print(done.stdout, flush=True)
            if done.returncode:
                raise ValueError(f"{command}: {done.stderr}")
            if _OUT.value:
                _keep(Path(_OUT.value) / f"{name}.md", done.stdout)
        statement = (folder / "release" / "PRIVACY.md").read_text(encoding="utf-8")
        print(statement[: statement.index("\n## ")])
        print(f"{time.perf_counter() - started:.0f} s")
        if _OUT.value:
            _keep(Path(_OUT.value) / "statement.md", statement[: statement.index("\n## ")])
            shutil.copy(folder / "sheet.png", Path(_OUT.value) / "sheet.png")


def _keep(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, f"```text\n{text.strip()}\n```\n")


if __name__ == "__main__":
    console.run(main)
