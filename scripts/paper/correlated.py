"""Noise that is correlated over steps beside independent noise, at the same ε.

python -m scripts.paper.correlated --config=configs/digits.py --workdir=runs/correlated/digits \
  --bands=2,4 --methods=dp_sgd,bam_sam --num_seeds=5 --out=docs/results/correlated/digits

Pairs have one seed: the same first weights, other batches.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from bam.cli import console, sweeps, tables
from bam.core import strategy
from bam.privacy.accounting import rounded_up
from bam.sweep.comparison import Study
from bam.sweep.runs import Run
from bam.training import loop

_BANDS = flags.DEFINE_list("bands", "2,4", "steps to correlate noise over, besides 1")
_METHODS = flags.DEFINE_list("methods", "dp_sgd,bam_sam", "methods to train")
_OUT = flags.DEFINE_string("out", "", "files to write, less .json and .md")
flags.adopt_module_key_flags(sweeps)
console.require("config", "workdir", "methods", "out")
console.ensure(
    ("bands",),
    lambda bands: all(b.isdecimal() and int(b) > 1 for b in bands),
    "--bands must be integers above 1",
)

COLUMNS: tables.Columns = {
    "q of a part": lambda row: rounded_up(row["part_prob"], ".3g"),
    "σ": lambda row: f"{row['noise_multiplier']:.2f}",
    "noise in sums": lambda row: f"{row['noise_in_sums']:.2f}",
}


def main() -> None:
    """Trains what is missing, then writes and prints the table."""
    with console.one_line_errors():
        groups = {}
        for method in _METHODS.value:
            groups[method] = sweeps.method_config(method, {"mechanism.name", "mechanism.bands"})
            for bands in map(int, _BANDS.value):
                config = groups[method].copy_and_resolve_references()
                config.mechanism.update({"name": "banded", "bands": bands})
                groups[f"{method}, {bands} bands"] = config
        plans = {label: loop.build(config).plan for label, config in groups.items()}

        def independent(label: str) -> str:
            return label.split(",")[0]

        def in_sums(label: str) -> float:
            plan = plans[label]
            return plan.noise_multiplier * strategy.noise_in_sums(
                plan.mechanism.strategy, plan.training_steps
            )

        def facts(label: str, runs: Sequence[Run]) -> dict[str, Any]:
            event = plans[label].dp_event
            assert event is not None  # Poisson batches and banded ones have it
            relative = in_sums(label) / in_sums(independent(label))
            return {"part_prob": event.sampling_prob, "noise_in_sums": relative}

        sweeps.carry_out(Study(groups, independent, COLUMNS, facts), Path(_OUT.value))


if __name__ == "__main__":
    console.run(main)
