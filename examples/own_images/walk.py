"""Runs the commands of docs/own_images.md one after the other.

`--out` saves their output.

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
from bam.cli import command
from bam.training.rundir import read_rows
from examples.own_images import generate

_OUT = flags.DEFINE_string("out", "", "folder for the commands' output and the contact sheet")
_IMAGES = flags.DEFINE_integer("images", 3000, "number of images in the folder", lower_bound=300)
_ONLY = flags.DEFINE_list("only", [], "names of commands; '': all of them")
_MORE = flags.DEFINE_string("train", "", "more flags for bam train")

COMMANDS = {
    "import": "bam data import photographs --out=data --size=32 --labels=photographs/labels.csv "
    "--classes=disc,square,triangle --user_column=person",
    "show": "bam data show data --out=sheet.png",
    "train": "bam train --config=folder:dp_sgd --workdir=run --config.dataset.path=data "
    "--config.dataset.groups=user --config.dataset.group_size=3 --config.features.name=prior",
    "train_pixels": "bam train --config=folder:dp_sgd --workdir=pixels --config.dataset.path=data "
    "--config.dataset.groups=user --config.dataset.group_size=3 --config.eval.every=5",
    "report": "bam report --workdir=run",
    "export": "bam export --workdir=run --out=release",
    "predict": "bam predict --release=release photographs/0000.png photographs/0005.jpg "
    "photographs/0009.npy",
    "archive": "bam data import shapes.zip --out=shapes --labels=metadata.jsonl "
    "--label_column=shape --classes=disc,square,triangle --user_column=author",
    "scans": "bam data import scans --out=weights --size=32x40 --channels=1 --labels=weights.csv "
    "--label_column=kg --number --target_offset=80 --target_scale=20 --user_column=PatientID "
    "--window=0,4095",
    "scans_train": "bam train --config=folder:dp_sgd --workdir=run2 --config.dataset.path=weights "
    "--config.loss.name=squared_error --config.dataset.groups=user --config.dataset.group_size=2 "
    "--config.features.name=prior",
    "scans_export": "bam export --workdir=run2 --out=release2",
    "scans_predict": "bam predict --release=release2 scans/0000.dcm scans/0001.dcm",
}


def main() -> None:
    """Runs the commands in a temporary folder."""
    with tempfile.TemporaryDirectory() as place:
        folder, started = Path(place), time.perf_counter()
        generate.write(folder / "photographs", _IMAGES.value)
        generate.write_archive(folder / "shapes.zip")
        generate.write_scans(folder / "scans")
        for name in _ONLY.value or COMMANDS:
            command = COMMANDS[name]
            print(f"$ {command}", flush=True)
            more = shlex.split(_MORE.value) if "train" in name else []
            arguments = [sys.executable, "-m", "bam.cli.main", *shlex.split(command)[1:], *more]
            process = subprocess.run(
                arguments, cwd=folder, capture_output=True, text=True, check=False
            )
            print(process.stdout, flush=True)
            if process.returncode:
                raise ValueError(f"{command}: {process.stderr}")
            if _OUT.value:
                _keep(Path(_OUT.value) / f"{name}.md", process.stdout)
        if _OUT.value and (folder / "pixels").exists():  # for the picture of a training
            plan, rows = files.read_json(folder / "pixels/plan.json"), read_rows(folder / "pixels")
            record = {"plan": plan, "metrics": rows}
            files.write_json(Path(_OUT.value) / "training.json", record)
        if (file := folder / "release" / "PRIVACY.md").exists():
            statement, _, _ = file.read_text(encoding="utf-8").partition("\n## ")
            print(statement)
            if _OUT.value:
                _keep(Path(_OUT.value) / "statement.md", statement)
        if _OUT.value and (folder / "sheet.png").exists():
            shutil.copy(folder / "sheet.png", Path(_OUT.value) / "sheet.png")
        print(f"{time.perf_counter() - started:.0f} s")


def _keep(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, f"```text\n{text.strip()}\n```\n")


if __name__ == "__main__":
    command.run_script(main)
