"""How many images does a private model need? Accuracy against their number, at several ε.

python -m examples.own_images.size --workdir=runs/own_images [--out=docs/results/own_images/size]

The first 600 images of `generate` are for testing, the next N for training, at 16 × 16 pixels, each
image protected by itself; the settings are those of configs/folder.py, which were not searched for.
"""

from pathlib import Path

from absl import flags

from bam.cli import console, sweeps
from bam.data import importing
from bam.data.listing import Example
from bam.sweep.comparison import Study
from examples.own_images import generate

_OUT = flags.DEFINE_string("out", "docs/results/own_images/size", "files, less .json and .md")
_SIZES = flags.DEFINE_list("sizes", "500,1000,2000,5000", "numbers N of training images")
_EPSILONS = flags.DEFINE_list("epsilons", "1,3,8", "budgets, at δ = 1e-5")
flags.adopt_module_key_flags(sweeps)
console.require("workdir")

TEST = 600


def prepare(photographs: Path, num: int, out: Path) -> None:
    """Imports N training images and those for testing, of which damaged ones are left out."""
    lines = (photographs / "labels.csv").read_text(encoding="utf-8").splitlines()
    rows = [line.split(",") for line in lines[1 : 1 + TEST + num]]
    examples = [
        Example(file, label, split="train" if number >= TEST else "test")
        for number, (file, label, _) in enumerate(rows)
    ]
    importing.run(photographs, examples, out, importing.Options(16, 3, generate.CLASSES, 0, False))


def main() -> None:
    """Makes the images, trains what is missing, and writes JSON and table."""
    with console.one_line_errors():
        folder, sizes = Path(sweeps.WORKDIR.value), [int(size) for size in _SIZES.value]
        if not (folder / "photographs/labels.csv").exists():
            generate.write(folder / "photographs", TEST + max(sizes))
        groups = {}
        for num in sizes:
            prepare(folder / "photographs", num, folder / f"images{num}")
            for method in ("non_private", *_EPSILONS.value):
                private = method != "non_private"
                config = sweeps.method_config("dp_sgd" if private else method, {"epsilon"})
                config.dataset.path, config.eval.every = str(folder / f"images{num}"), 0
                config.epsilon = float(method) if private else config.epsilon
                groups[f"N={num} {'ε=' * private}{method}"] = config
        facts = lambda name, runs: {"num_examples": runs[0].summary["num_examples"]}  # noqa: E731
        sweeps.carry_out(Study(groups, lambda name: None, facts=facts), Path(_OUT.value))


if __name__ == "__main__":
    console.run(main, defaults=["--config=configs/folder.py"])
