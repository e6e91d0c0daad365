"""Tries strengths of the ascent (ρ of DP-SAT, r of BAM-SAM, λ of BAM-exact) on held-out images.

python -m scripts.search --config=configs/digits.py --workdir=runs/search --holdout=200
"""

from pathlib import Path
from typing import Any

from absl import flags

from bam import files, parts, stats
from scripts.lib import cells, cli, tables

_HOLDOUT = flags.DEFINE_integer(
    "holdout", 5000, "training images set aside to judge on; the test split is not read", 1
)
TRIED = {"dp_sat": "0.02,0.05,0.1,0.2", "bam_sam": "0.02,0.05,0.1,0.2"}
_STRENGTHS = {
    name: flags.DEFINE_list(name, TRIED.get(name, ""), f"strengths to try for {method.label}")
    for name, method in parts.METHODS.items()
    if method.strength
}
flags.adopt_module_key_flags(cells)
cli.require("config", "workdir")

FIRST_SEED = 1000  # seeds are others than those of the final runs
FIXED = {"dataset.holdout", "method.radius", "method.penalty"}
COLUMNS: tables.Columns = {
    "method": lambda row: parts.label(row["method"]),
    "strength": lambda row: f"{row['strength']:g}",
    "runs": lambda row: str(row["num_runs"]),
    "held-out accuracy, %": lambda row: (
        "not run" if row["accuracy"] is None else f"{row['accuracy']:.2f}"
    ),
}


def main() -> None:
    """Trains what is missing, then writes and prints accuracy against strength.

    The table holds the strengths and seeds of this call, and replaces an earlier one.
    """
    with cli.one_line_errors():
        tried = {method: flag.value for method, flag in _STRENGTHS.items() if flag.value}
        if len({len(strengths) for strengths in tried.values()}) > 1:
            raise ValueError("give every method the same number of strengths, or none")
        trials = [("dp_sgd", "0")]
        trials += [(method, s) for method, strengths in tried.items() for s in strengths]
        found = cells.run_missing({trial: _runs(*trial) for trial in trials})
        rows = []
        for (method, strength), runs in found.items():
            accuracies = [100 * run.summary["test_accuracy"] for run in runs.values()]
            accuracy = stats.estimate(accuracies)
            row: dict[str, Any] = {"method": method, "strength": float(strength)}
            row |= {"num_runs": len(runs), "accuracy": accuracy and accuracy.mean}
            rows.append(row | {"accuracies": accuracies})
        workdir = Path(cells.WORKDIR.value)
        files.write_json(workdir / "search.json", rows)
    tables.show(COLUMNS, rows, keep=workdir / "search.md")


def _runs(method: str, strength: str) -> cells.Cells:
    """The runs of one trial."""
    config = cells.method_config(method, FIXED)
    config.dataset.holdout = _HOLDOUT.value
    if key := parts.METHODS[method].strength:
        config.method[key] = float(strength)
    return cells.of_seeds(f"{method}/{strength}", config, FIRST_SEED)


if __name__ == "__main__":
    cli.run(main, defaults=["--num_seeds=1"])
