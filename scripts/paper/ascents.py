"""What BAM's cheaper ascents do to clipping bias and accuracy, beside the full ascent and DP-SGD.

python -m scripts.paper.ascents --config=configs/cifar10_small.py --workdir=runs/ascents --seeds=3
"""

from pathlib import Path
from typing import Any

from absl import flags

from bam import files
from bam.cli import console, stats, sweeps, tables

flags.adopt_module_key_flags(sweeps)
console.require("config", "workdir")

# Label -> method and its options.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "DP-SGD": ("dp_sgd", {}),
    "BAM-SAM": ("bam_sam", {}),
    "BAM-SAM, one-view ascent": ("bam_sam", {"ascent_views": 1}),
    "BAM-SAM, ascent on GroupNorm only": ("bam_sam", {"ascent_params": "GroupNorm"}),
}
# Of the last step's measurement; NOT PRIVATE, so for data one may look at.
MEASURED = ("bias_norm", "relative_bias", "cosine", "gradient_norm")
COLUMNS: tables.Columns = {
    "ascent": lambda row: row["ascent"],
    "seeds": lambda row: str(row["num_runs"]),
    "accuracy, %": lambda row: tables.interval(row["accuracy"], ".2f"),
    "gain, points": lambda row: (
        "–" if row["ascent"] == "DP-SGD" else tables.interval(row["gain"], "+.2f")
    ),
    "‖bias‖": lambda row: tables.interval(row["bias_norm"], ".3f"),
    "relative": lambda row: tables.interval(row["relative_bias"], ".3f"),
    "cosine": lambda row: tables.interval(row["cosine"], ".3f"),
    "‖ĝ‖": lambda row: tables.interval(row["gradient_norm"], ".3f"),
}


def main() -> None:
    """Trains what is missing, then writes and prints the table."""
    with console.one_line_errors():
        found = sweeps.run_missing({label: _runs(label) for label in VARIANTS})
        rows = [_row(label, runs, found["DP-SGD"]) for label, runs in found.items()]
        workdir = Path(sweeps.WORKDIR.value)
        files.write_json(workdir / "ascents.json", rows)
    tables.show(COLUMNS, rows, keep=workdir / "ascents.md")


def _runs(label: str) -> sweeps.Cells:
    method, options = VARIANTS[label]
    config = sweeps.method_config(method, {"method.ascent_views", "method.ascent_params"})
    config.method.update(options)
    if not config.diagnostics.every:
        config.diagnostics.every = config.num_steps or 100
    return sweeps.of_seeds(label.replace(" ", "_").replace(",", ""), config)


def _row(
    label: str, runs: dict[int, sweeps.Run], baseline: dict[int, sweeps.Run]
) -> dict[str, Any]:
    ours, theirs = sweeps.percent(runs), sweeps.percent(baseline)
    last = [
        [row for row in run.rows if "not_private/bias_norm" in row][-1] for run in runs.values()
    ]
    estimates = {
        "accuracy": stats.estimate(list(ours.values())),
        "gain": stats.paired_difference(ours, theirs) if label != "DP-SGD" else None,
    } | {name: stats.estimate([row[f"not_private/{name}"] for row in last]) for name in MEASURED}
    found = {name: estimate and estimate._asdict() for name, estimate in estimates.items()}
    return {"ascent": label, "num_runs": len(runs), **found}


if __name__ == "__main__":
    console.run(main)
