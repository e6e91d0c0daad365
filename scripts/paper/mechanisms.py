"""The noise that one ε takes, by the way that batches are drawn, at the shipped configs.

python -m scripts.paper.mechanisms --out=docs/results/batches/mechanisms

All have the config's ε, δ and number of steps, and its batches but for the full batch. A second
table sets ε of random allocation beside both bounds of `PLD_accounting`, whose upper one we compute
with a spacing of our own. Batches of a fixed size were planned at `archive-0.2.0`.
"""

import runpy
from pathlib import Path

import PLD_accounting as allocation
from absl import flags
from ml_collections import ConfigDict

import bam
from bam import provenance
from bam.cli import configs, console, tables
from bam.data.catalogue import DATASETS
from bam.files import JsonObject, write_json
from bam.privacy.random_allocation import epsilon_of_random_allocation
from bam.privacy.rounding import rounded_down

_OUT = flags.DEFINE_string("out", "", "files to write, less .json and .md")
_CONFIGS = flags.DEFINE_list(
    "configs", "mnist,cifar10_scattering,cifar10_medium,cifar10,imagenet32", "of configs/"
)
console.require("out", "configs")

MECHANISMS = ("poisson", "random_allocation", "full_batch")
COLUMNS: tables.Columns = {
    "config": lambda row: row["config"],
    "N": lambda row: f"{row['num_examples']:,}",
    "l": lambda row: f"{row['expected_batch_size']:,}",
    "T": lambda row: f"{row['num_steps']:,}",
    "ε": lambda row: f"{row['epsilon']:g}",
    **{
        name: lambda row, name=name: rounded_down(row[name], ".4g")  # type: ignore[misc]
        for name in MECHANISMS
    },
}
LONGEST = 10_000  # steps that the package bounds in seconds


def _package(row: JsonObject, which: int) -> str:
    return f"{row['package_epsilons'][which]:.3f}" if row["package_epsilons"] else "not run"


ALLOCATION: tables.Columns = {
    "config": lambda row: row["config"],
    "σ": lambda row: f"{row['random_allocation']:.4g}",
    "steps an epoch": lambda row: f"{row['num_examples'] // row['expected_batch_size']:,}",
    "epochs": lambda row: f"{row['epochs']:,}",
    "ε, ours": lambda row: f"{row['allocation_epsilon']:.3f}",
    "the package, from above": lambda row: _package(row, 0),
    "the package, from below": lambda row: _package(row, 1),
    "Poisson": lambda row: f"{row['poisson_epsilon']:.3f}",
}


def main() -> None:
    """Plans the noise of every config and mechanism, and writes and prints the tables."""
    with console.one_line_errors():
        modules = {name: runpy.run_path(configs.file_of(name)) for name in _CONFIGS.value}
        rows = [_row(name, file["get_config"]("dp_sgd")) for name, file in modules.items()]
        content = {
            "commit": provenance.git_commit(),
            "versions": provenance.versions(),
            "rows": rows,
        }
        out = Path(_OUT.value)
        write_json(out.with_name(f"{out.name}.json"), content)
        for columns, name in ((COLUMNS, out.name), (ALLOCATION, f"{out.name}_epsilon")):
            tables.show(columns, rows, left=("config",), keep=out.with_name(f"{name}.md"))


def _row(name: str, config: ConfigDict) -> JsonObject:
    num_examples, batch_size = DATASETS[config.dataset.name].rows[0], config.expected_batch_size
    num_steps = config.num_steps or config.num_epochs * (num_examples // batch_size)
    run = {"num_examples": num_examples, "num_steps": num_steps, "delta": config.delta}
    row: JsonObject = {"config": name, **run, "epsilon": config.epsilon}
    row["expected_batch_size"] = batch_size
    for mechanism in MECHANISMS:
        plan = bam.make_plan(
            **run,
            expected_batch_size=num_examples if mechanism == "full_batch" else batch_size,
            target_epsilon=config.epsilon,
            clip_norm=1.0,
            mechanism=mechanism,
        )
        row[mechanism] = plan.noise_multiplier
        print(f"{name}, {mechanism}: {plan.noise_multiplier:.4g}", flush=True)
    sigma, batches = row["random_allocation"], num_examples // batch_size
    row["epochs"] = -(-num_steps // batches)
    spent = {"noise_multiplier": sigma, "num_steps": num_steps, "delta": config.delta}
    row["allocation_epsilon"] = epsilon_of_random_allocation(batches_per_epoch=batches, **spent)
    row["poisson_epsilon"] = bam.epsilon(sampling_prob=1 / batches, **spent)
    row["package_epsilons"] = None
    if num_steps < LONGEST:
        row["package_epsilons"] = allocation.gaussian_allocation_epsilon_range(
            sigma=sigma, num_steps=batches, num_epochs=row["epochs"], delta=config.delta
        )
    return row


if __name__ == "__main__":
    console.run(main)
