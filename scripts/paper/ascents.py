"""What BAM's cheaper ascents do to clipping bias and accuracy, beside the full ascent and DP-SGD.

python -m scripts.paper.ascents --config=configs/cifar10_small.py --workdir=runs/ascents --seeds=3
"""

import json
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from bam import report, stats
from scripts.lib import cells, cli, tables

_CONFIG = config_flags.DEFINE_config_file("config", None, "configs/NAME.py, without a method")
_WORKDIR = flags.DEFINE_string("workdir", "", "folder for all runs and the table")
_SEEDS = flags.DEFINE_integer("seeds", 3, "seeds 0, 1, …", lower_bound=1)
_MAX_SECONDS = flags.DEFINE_float(
    "max_seconds", 0, "stop with a checkpoint after so long; 0: no limit", lower_bound=0
)
flags.mark_flags_as_required(["config"])

# Label -> method and its options.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "DP-SGD": ("dp_sgd", {}),
    "BAM-SAM": ("bam_sam", {}),
    "BAM-SAM, one-view ascent": ("bam_sam", {"ascent_views": 1}),
    "BAM-SAM, ascent on GroupNorm only": ("bam_sam", {"ascent_params": "GroupNorm"}),
}
# Of the last step's measurement; NOT PRIVATE, so for data one may look at.
MEASURED = ("bias_norm", "relative_bias", "cosine", "gradient_norm")
COLUMNS = ("ascent", "seeds", "accuracy, %", "gain, points", "‖bias‖", "relative", "cosine", "‖ĝ‖")


def main() -> None:
    """Trains what is missing, then writes and prints the table."""
    with cli.one_line_errors():
        if not _WORKDIR.value:
            raise ValueError("--workdir is required: the folder for all runs")
        workdir = Path(_WORKDIR.value)
        runs = {label: _runs(label) for label in VARIANTS}
        by_seed = {n: c for seed in range(_SEEDS.value) for n, c in _of_seed(runs, seed).items()}
        cli.use_compilation_cache()
        cells.run(by_seed, workdir, cli.stop_after(_MAX_SECONDS.value), cells.print_event)
        finished = cells.summaries(by_seed, workdir)
        baseline = _accuracies(runs["DP-SGD"], finished)
        rows = [_row(label, runs[label], finished, baseline, workdir) for label in VARIANTS]
        report.write_json(workdir / "ascents.json", rows)
    table = markdown(rows)
    report.write_text(workdir / "ascents.md", table)
    print(table)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table for documents."""
    lines = []
    for row in rows:
        line = [
            row["ascent"],
            str(row["num_runs"]),
            tables.interval(row["accuracy"], ".2f"),
            "–" if row["ascent"] == "DP-SGD" else tables.interval(row["gain"], "+.2f"),
            *(tables.interval(row[name], ".3f") for name in MEASURED),
        ]
        lines.append(line)
    return tables.markdown(COLUMNS, lines)


def _runs(label: str) -> cells.Cells:
    method, options = VARIANTS[label]
    path = config_flags.get_config_filename(flags.FLAGS["config"])
    fixed = {"seed", "dry_run", "method.ascent_views", "method.ascent_params"}
    made = {}
    for seed in range(_SEEDS.value):
        config = cells.method_config(path, method, fixed)
        config.seed = seed
        config.method.update(options)
        if not config.diagnostics.every:
            config.diagnostics.every = config.num_steps or 100
        made[f"{label.replace(' ', '_').replace(',', '')}/seed{seed}"] = config
    return made


def _of_seed(runs: dict[str, cells.Cells], seed: int) -> dict[str, Any]:
    return {n: c for of in runs.values() for n, c in of.items() if c.seed == seed}


def _accuracies(runs: cells.Cells, finished: dict[str, Any]) -> dict[int, float]:
    return {c.seed: 100 * finished[n]["test_accuracy"] for n, c in runs.items() if n in finished}


def _row(
    label: str,
    runs: cells.Cells,
    finished: dict[str, Any],
    baseline: dict[int, float],
    workdir: Path,
) -> dict[str, Any]:
    accuracies = _accuracies(runs, finished)
    measured: dict[str, list[float]] = {name: [] for name in MEASURED}
    for run in runs:
        if run in finished:
            lines = (workdir / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            rows = [row for row in map(json.loads, lines) if "not_private/bias_norm" in row]
            for name in MEASURED if rows else ():
                measured[name].append(rows[-1][f"not_private/{name}"])
    estimates = {name: stats.estimate(values) for name, values in measured.items()}
    found, gain = stats.estimate(list(accuracies.values())), None
    if label != "DP-SGD":
        gain = stats.paired_difference(accuracies, baseline)
    return {
        "ascent": label,
        "num_runs": len(accuracies),
        "accuracy": found and found._asdict(),
        "gain": gain and gain._asdict(),
        **{name: value and value._asdict() for name, value in estimates.items()},
    }


if __name__ == "__main__":
    cli.run(main)
