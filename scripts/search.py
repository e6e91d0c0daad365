"""Tries strengths of the ascent (ρ of DP-SAT, r of BAM-SAM, λ of BAM-exact) on held-out images.

python -m scripts.search --config=configs/digits.py --workdir=runs/search --holdout=200
"""

import itertools
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from bam import parts, report, stats
from scripts.lib import cells, cli

_CONFIG = config_flags.DEFINE_config_file("config", None, "configs/NAME.py, without a method")
_WORKDIR = flags.DEFINE_string("workdir", "", "folder for all runs and the table")
_HOLDOUT = flags.DEFINE_integer(
    "holdout", 5000, "training images set aside to judge on; the test split is not read", 1
)
TRIED = {"dp_sat": "0.02,0.05,0.1,0.2", "bam_sam": "0.02,0.05,0.1,0.2"}
_STRENGTHS = {
    name: flags.DEFINE_list(name, TRIED.get(name, ""), f"strengths to try for {method.label}")
    for name, method in parts.METHODS.items()
    if method.strength
}
_SEEDS = flags.DEFINE_list("search_seeds", "1000", "seeds, other than those of the final runs")
_MAX_SECONDS = flags.DEFINE_float(
    "max_seconds", 0, "stop with a checkpoint after so long; 0: no limit", lower_bound=0
)
flags.mark_flags_as_required(["config"])

FIXED = {"seed", "dry_run", "dataset.holdout", "method.radius", "method.penalty"}


def main() -> None:
    """Trains what is missing, then writes and prints accuracy against strength.

    The table holds the strengths and seeds of this call, and replaces an earlier one.
    """
    with cli.one_line_errors():
        if not _WORKDIR.value:
            raise ValueError("--workdir is required: the folder for all runs")
        tried = {m: flag.value for m, flag in _STRENGTHS.items() if flag.value}
        if len({len(strengths) for strengths in tried.values()}) > 1:
            raise ValueError("give every method the same number of strengths, or none")
        workdir = Path(_WORKDIR.value)
        trials = {("dp_sgd", "0"): _runs("dp_sgd", "0")} | {
            (method, strength): _runs(method, strength)
            for method, strengths in tried.items()
            for strength in strengths
        }
        all_cells = dict(itertools.chain.from_iterable(runs.items() for runs in trials.values()))
        cli.use_compilation_cache()
        cells.run(
            all_cells,
            workdir,
            cli.stop_after(_MAX_SECONDS.value),
            cells.print_event,
        )
        finished = cells.summaries(all_cells, workdir)
        rows = [_row(*trial, runs, finished) for trial, runs in trials.items()]
        report.write_json(workdir / "search.json", rows)
    table = markdown(rows)
    report.write_text(workdir / "search.md", table)
    print(table)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table for documents."""
    lines = ["| method | strength | runs | held-out accuracy, % |", "|---|---:|---:|---:|"]
    for row in rows:
        accuracy = "not run" if row["accuracy"] is None else f"{row['accuracy']:.2f}"
        lines.append(
            f"| {parts.label(row['method'])} | {row['strength']:g} | {row['num_runs']} "
            f"| {accuracy} |"
        )
    return "\n".join(lines) + "\n"


def _runs(method: str, strength: str) -> cells.Cells:
    """The runs of one trial, one per seed: path -> config."""
    made = {}
    for seed in _SEEDS.value:
        path = config_flags.get_config_filename(flags.FLAGS["config"])
        config = cells.method_config(path, method, FIXED)
        config.seed = int(seed)
        config.dataset.holdout = _HOLDOUT.value
        if key := parts.METHODS[method].strength:
            config.method[key] = float(strength)
        made[f"{method}/{strength}/seed{seed}"] = config
    return made


def _row(method: str, strength: str, runs: cells.Cells, finished: Any) -> dict[str, Any]:
    accuracies = [100 * finished[name]["test_accuracy"] for name in runs if name in finished]
    found = stats.estimate(accuracies)
    return {
        "method": method,
        "strength": float(strength),
        "num_runs": len(accuracies),
        "accuracy": found and found.mean,
        "accuracies": accuracies,
    }


if __name__ == "__main__":
    cli.run(main)
