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

from bam.cli import console, plotting, sweeps, tables
from bam.training import registry
from scripts.paper import effects

_SIZES = flags.DEFINE_list("sizes", "256,1024,4096,16384", "expected batch sizes to train with")
_METHODS = flags.DEFINE_list("methods", "dp_sgd,bam_sam", "methods to train")
_OUT = flags.DEFINE_string("out", "docs/figures", "folder for the picture and the numbers")
flags.adopt_module_key_flags(sweeps)
console.require("config", "workdir", "methods", "sizes")
console.ensure(
    ("sizes",),
    lambda sizes: all(size.isdecimal() and int(size) for size in sizes),
    "--sizes must be integers above 0",
)

FIXED = {"expected_batch_size", "num_steps", "diagnostics.every", "diagnostics.num_examples"}
MEASUREMENTS = 5  # of the bias in a run, after its beginning
PANELS = effects.BIAS_PANELS | {"test_accuracy": "test accuracy"}


def main() -> None:
    """Trains what is missing, then writes batches.png and batches.csv."""
    with console.one_line_errors():
        sizes = [int(size) for size in _SIZES.value]
        groups = {(m, size): _cells(m, size) for m in _METHODS.value for size in sizes}
        found = sweeps.run_missing(groups)
        if any(len(found[key]) < len(groups[key]) for key in groups):
            return
        config = next(iter(groups[_METHODS.value[0], sizes[0]].values()))
        charts, table = [], []
        for quantity, heading in PANELS.items():
            lines = []
            for method in _METHODS.value:
                values = np.array(
                    [[_mean(run, quantity) for run in found[method, n].values()] for n in sizes]
                ).T
                label = registry.label(method)
                lines.append(plotting.mean_line(label, sizes, values, plotting.style_of(method)))
                table += [
                    {"quantity": quantity, "method": label, "batch size": size, "mean": row.mean()}
                    | {f"seed {seed}": value for seed, value in enumerate(row)}
                    for size, row in zip(sizes, values.T, strict=True)
                ]
            share = quantity == "test_accuracy"
            charts.append(plotting.Panel(heading, "batch size", lines, log_x=True, percent=share))
        path = Path(_OUT.value) / "batches"
        path.parent.mkdir(parents=True, exist_ok=True)
        title = (
            f"Clipping bias against the batch size that was trained with\n{config.dataset.name}, "
            f"{config.model.name}, {config.num_epochs} epochs, ε = {config.epsilon:g}, "
            f"{sweeps.NUM_SEEDS.value} seeds (± SD)"
        )
        plotting.panels(charts, path.with_suffix(".png"), title)
        tables.write_csv(path.with_suffix(".csv"), table)
    print(f"{path}.png and .csv")


def _cells(method: str, size: int) -> sweeps.Cells:
    config = sweeps.method_config(method, FIXED)
    examples = len(registry.make_dataset(config.dataset, config.features).train.labels)
    config.optimizer.learning_rate *= size / config.expected_batch_size
    config.expected_batch_size = config.diagnostics.num_examples = size
    config.num_steps = config.num_epochs * max(1, examples // size)
    config.diagnostics.every = max(1, config.num_steps // MEASUREMENTS)
    return sweeps.of_seeds(f"{method}/batch{size}", config)


def _mean(run: sweeps.Run, quantity: str) -> float:
    """Over training, after its beginning; of the accuracy the last."""
    if quantity == "test_accuracy":
        return float(run.summary[quantity])
    rows = [row for row in run.rows if row["step"] and f"not_private/{quantity}" in row]
    return float(np.mean([row[f"not_private/{quantity}"] for row in rows]))


if __name__ == "__main__":
    console.run(main)
