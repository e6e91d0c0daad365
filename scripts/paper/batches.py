"""Figures 5 and 6 as in the paper: clipping bias of runs that were *trained* at each batch size.

python -m scripts.paper.batches --config=configs/cifar10_scattering.py --workdir=runs/batches \
  --methods=dp_sgd,bam_sam --sizes=256,1024,4096,16384 --num_seeds=3 \
  --config.dataset.source=parquet --config.dataset.path=FOLDER

Every size trains for the config's epochs, with the learning rate in proportion to the size and the
noise for the same ε. The bias is of batches of that size, as a mean over training: NOT PRIVATE.
"""

from pathlib import Path

import numpy as np
from absl import flags
from ml_collections import ConfigDict

from bam.cli import console, sweeps
from bam.sweep import plot
from bam.sweep.comparison import Study, measured, percent
from bam.training import loading, registry
from scripts.paper import effects

_SIZES = flags.DEFINE_list("sizes", "256,1024,4096,16384", "expected batch sizes to train with")
_METHODS = flags.DEFINE_list("methods", "dp_sgd,bam_sam", "methods to train")
_OUT = flags.DEFINE_string("out", "docs/figures/batches", "files to write, less .png, .md, .json")
flags.adopt_module_key_flags(sweeps)
console.require("config", "workdir", "methods", "sizes")
console.ensure(
    ("sizes",),
    lambda sizes: all(size.isdecimal() and int(size) for size in sizes),
    "--sizes must be integers above 0",
)

FIXED = {"expected_batch_size", "num_steps", "diagnostics.every", "diagnostics.num_examples"}
MEASUREMENTS = 5  # of the bias in a run, after its beginning


def main() -> None:
    """Trains what is missing, then writes the table and the figure."""
    with console.one_line_errors():
        sizes, methods, out = [int(size) for size in _SIZES.value], _METHODS.value, Path(_OUT.value)
        groups = {f"{m} l={size}": _config(m, size) for size in sizes for m in methods}
        baseline = lambda label: f"{methods[0]} {label.split(' ')[1]}"  # noqa: E731
        _, found = sweeps.carry_out(Study(groups, baseline), out)
        charts = []
        for quantity, heading in (effects.BIAS_PANELS | {"": "test accuracy, %"}).items():
            lines = []
            for m in methods:
                runs = [found[f"{m} l={size}"] for size in sizes]
                values = [
                    measured(x, quantity) if quantity else [*percent(x).values()] for x in runs
                ]
                style = plot.style_of(m)
                lines.append(plot.mean_line(registry.label(m), sizes, np.array(values).T, style))
            charts.append(plot.Panel(heading, "batch size", lines, log_x=True))
        config = next(iter(groups.values()))
        title = (
            f"Clipping bias against the batch size that was trained with\n{config.dataset.name}, "
            f"{config.model.name}, {config.num_epochs} epochs, ε = {config.epsilon:g}, "
            f"{sweeps.NUM_SEEDS.value} seeds (± SD)"
        )
        plot.panels(charts, out.with_name(f"{out.name}.png"), title)


def _config(method: str, size: int) -> ConfigDict:
    config = sweeps.method_config(method, FIXED)
    examples = len(loading.make_dataset(config.dataset, config.features).train.labels)
    config.optimizer.learning_rate *= size / config.expected_batch_size
    config.expected_batch_size = config.diagnostics.num_examples = size
    config.num_steps = config.num_epochs * max(1, examples // size)
    config.diagnostics.every = max(1, config.num_steps // MEASUREMENTS)
    return config


if __name__ == "__main__":
    console.run(main)
