"""The worked extensions of `examples/` beside DP-SGD and BAM.

python -m scripts.paper.extensions --workdir=runs/extensions --out=docs/extensions_digits

With --dataset=mnist and the data's --config.dataset.path, the same on MNIST.
"""

from pathlib import Path

from absl import flags

from bam.cli import console, sweeps
from bam.cli.study import Study, carry_out
from configs.extensions import EXTENSIONS

_OUT = flags.DEFINE_string("out", "", "files to write, less .json and .md")
_DATASET = flags.DEFINE_enum("dataset", "digits", ["digits", "mnist"], "what to train on")
flags.adopt_module_key_flags(sweeps)
console.require("workdir", "out")


def main() -> None:
    """Trains what is missing; runs with one seed share batches and noise."""
    with console.one_line_errors():
        prefix = "mnist_" if _DATASET.value == "mnist" else ""
        groups = {prefix + name: sweeps.method_config(prefix + name) for name in EXTENSIONS}
        for config in groups.values():
            config.eval.every = config.checkpoint.every = 0
        noise = lambda row: f"{row['noise_multiplier']:.3f} × {row['sensitivity']:.3f}"  # noqa: E731
        study = Study(groups, lambda label: f"{prefix}dp_sgd", {"noise on the sum": noise})
        carry_out(study, Path(_OUT.value))


if __name__ == "__main__":
    console.run(main, ["--config=configs/extensions.py", "--config.expected_batch_size=256"])
