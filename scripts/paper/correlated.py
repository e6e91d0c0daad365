"""Noise that is correlated over steps beside independent noise, at the same ε.

python -m scripts.paper.correlated --config=configs/digits.py --workdir=runs/correlated/digits \
  --bands=2,4 --methods=dp_sgd,bam_sam --num_seeds=5 --out=docs/results/correlated/digits

Pairs have one seed: the same first weights, other batches.
"""

from pathlib import Path
from typing import Any

from absl import flags

from bam import files
from bam.cli import console, sweeps, tables
from bam.core import strategy
from bam.privacy.accounting import rounded_up
from bam.training import loop, registry

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
    "method": lambda row: registry.label(row["method"]),
    "ε": lambda row: rounded_up(row["epsilon"], ".3g"),
    "bands": lambda row: str(row["bands"]) if row["bands"] > 1 else "independent",
    "q of a part": lambda row: rounded_up(row["part_prob"], ".3g"),
    "σ": lambda row: f"{row['noise_multiplier']:.2f}",
    "noise in sums": lambda row: f"{row['noise_in_sums']:.2f}",
    "seeds": lambda row: str(len(row["accuracies"])),
    "accuracy, %": lambda row: tables.interval(row["accuracy"], ".2f"),
    **tables.gain("gain", lambda row: row["bands"] == 1),
}


def main() -> None:
    """Trains what is missing, then writes and prints the table."""
    with console.one_line_errors():
        bands = [1, *(int(b) for b in _BANDS.value)]
        groups = {(m, b): _cells(m, b) for m in _METHODS.value for b in bands}
        found = sweeps.run_missing(groups)
        rows = [_row(m, b, groups[m, b], found[m, b], found[m, 1]) for m, b in groups]
        by_method = {row["method"]: row["noise_in_sums"] for row in rows if row["bands"] == 1}
        for row in rows:  # relative to independent noise
            row["noise_in_sums"] /= by_method[row["method"]]
        out = Path(_OUT.value)
        out.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(Path(f"{out}.json"), rows)
    tables.show(COLUMNS, rows, keep=Path(f"{out}.md"))


def _cells(method: str, bands: int) -> sweeps.Cells:
    config = sweeps.method_config(method, {"mechanism.name", "mechanism.bands"})
    if bands > 1:
        config.mechanism.update({"name": "banded", "bands": bands})
    return sweeps.of_seeds(f"{method}/bands{bands}", config)


def _row(
    method: str,
    bands: int,
    group: sweeps.Cells,
    runs: dict[int, sweeps.Run],
    independent: dict[int, sweeps.Run],
) -> dict[str, Any]:
    plan = loop.build(next(iter(group.values()))).plan
    assert plan.dp_event is not None  # Poisson batches and banded ones have it
    in_sums = strategy.noise_in_sums(plan.drawing.strategy, plan.training_steps)
    return {
        "method": method,
        "bands": bands,
        "epsilon": plan.epsilon,
        "num_steps": plan.training_steps,
        "part_prob": plan.dp_event.sampling_prob,
        "noise_multiplier": plan.noise_multiplier,
        "noise_in_sums": plan.noise_multiplier * in_sums,
        **sweeps.judged(runs, independent),
    }


if __name__ == "__main__":
    console.run(main)
