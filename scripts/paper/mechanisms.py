"""The noise that one ε takes, by the way that batches are drawn, at the shipped configs.

python -m scripts.paper.mechanisms --out=docs/results/batches/mechanisms

All have the config's ε, δ and number of steps, and its batches but for the full batch. Neighbours
differ in one example that is added or removed; of fixed_size, in one that is replaced.
"""

import runpy
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

import bam
from bam import provenance
from bam.cli import configs, console, tables
from bam.data.sources import archives
from bam.files import JsonObject, write_json
from bam.privacy.accounting import rounded_down

_OUT = flags.DEFINE_string("out", "", "files to write, less .json and .md")
_CONFIGS = flags.DEFINE_list(
    "configs", "mnist,cifar10_scattering,cifar10_medium,cifar10,imagenet32", "of configs/"
)
console.require("out", "configs")

MECHANISMS = ("poisson", "random_allocation", "fixed_size", "full_batch")
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


def main() -> None:
    """Plans the noise of every config and mechanism, and writes and prints the table."""
    with console.one_line_errors():
        found = {name: runpy.run_path(configs.file_of(name)) for name in _CONFIGS.value}
        rows = [_row(name, file["get_config"]("dp_sgd")) for name, file in found.items()]
        out = Path(_OUT.value)
        write_json(
            out.with_name(f"{out.name}.json"),
            {"commit": provenance.git_commit(), "versions": provenance.versions(), "rows": rows},
        )
        tables.show(COLUMNS, rows, left=("config",), keep=out.with_name(f"{out.name}.md"))


def _row(name: str, config: ConfigDict) -> JsonObject:
    num_examples, batch_size = archives.ROWS[config.dataset.name][0], config.expected_batch_size
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
            accountant="rdp" if mechanism == "fixed_size" else "pld",
            mechanism=mechanism,
        )
        row[mechanism] = plan.noise_multiplier
        print(f"{name}, {mechanism}: {plan.noise_multiplier:.4g}", flush=True)
    return row


if __name__ == "__main__":
    console.run(main)
