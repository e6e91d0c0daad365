"""Trains several methods with several seeds at the same (ε, δ) and sets them side by side.

python -m scripts.compare --config=configs/digits.py --num_seeds=3 --workdir=runs/demo
"""

import shutil
import statistics
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bam import plotting, report, train
from scripts import cells, cli

_CONFIG = config_flags.DEFINE_config_file("config", None, "configs/NAME.py, without a method")
_METHODS = flags.DEFINE_list(
    "methods", "non_private,dp_sgd,dp_sat,bam_sam,bam_exact", "methods to compare"
)
_NUM_SEEDS = flags.DEFINE_integer("num_seeds", 3, "runs per method", lower_bound=1)
_WORKDIR = flags.DEFINE_string("workdir", "", "folder for all runs, the table and the picture")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "delete the same methods' earlier runs")
flags.mark_flags_as_required(["config"])

COLUMNS = ("method", "ε spent", "δ", "σ", "accuracy %", "‖bias‖", "‖bias‖/‖ĝ‖", "seconds")


def main() -> None:
    """Builds every experiment first, so that a mistake costs nothing; then trains them."""
    workdir = Path(_WORKDIR.value)
    with cli.one_line_errors():
        if not _WORKDIR.value:
            raise ValueError("--workdir is required: the folder for all runs")
        if not _METHODS.value:
            raise ValueError("--methods is empty: name at least one")
        path = config_flags.get_config_filename(flags.FLAGS["config"])
        experiments = {
            method: train.build(cells.method_config(path, method, fixed={"seed", "dry_run"}))
            for method in _METHODS.value
        }
        if _OVERWRITE.value:
            for method in experiments:
                shutil.rmtree(workdir / method, ignore_errors=True)
        for method in experiments:
            for seed in range(_NUM_SEEDS.value):
                report.check_free(run_dir(workdir, method, seed))
    cli.use_compilation_cache()
    console = Console()
    private = [e for e in experiments.values() if e.plan.to_json()["epsilon"] is not None]
    if private:
        console.print(private[0].plan.describe(), highlight=False, soft_wrap=True)

    runs: dict[str, list[train.Result]] = {}
    with Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    ) as progress:
        tasks = {
            method: progress.add_task(
                plotting.LABELS.get(method, method),
                total=_NUM_SEEDS.value * experiment.plan.num_steps,
                note="",
                start=False,
            )
            for method, experiment in experiments.items()
        }
        for method, experiment in experiments.items():
            progress.start_task(tasks[method])
            runs[method] = [
                train.train(
                    experiment,
                    seed,
                    run_dir(workdir, method, seed),
                    on_row=_progress_note(progress, tasks[method], seed, experiment),
                )
                for seed in range(_NUM_SEEDS.value)
            ]
            progress.stop_task(tasks[method])

    table = [summarize(runs[method]) for method in experiments]
    report.write_json(workdir / "summary.json", table)
    (workdir / "table.md").write_text(markdown(table), encoding="utf-8")
    title = f"{experiments[_METHODS.value[0]].dataset.name}, {_NUM_SEEDS.value} seeds"
    if private:
        plan = private[0].plan
        title += f", private methods at ({plan.epsilon:.3g}, {plan.delta:.0e})-DP"
    rows = {method: [result.rows for result in results] for method, results in runs.items()}
    plotting.compare_methods(rows, workdir / "comparison.png", title)
    console.print(as_table(table))
    console.print(f"Bias is measured on training examples and is not private. Files in {workdir}/")


def run_dir(workdir: Path, method: str, seed: int) -> Path:
    """Folder of one run inside the comparison's workdir."""
    return workdir / method / f"seed{seed}"


def summarize(results: list[train.Result]) -> dict[str, Any]:
    """Means over the seeds of one method, as `summary.json` keeps them."""
    first = results[0].summary
    accuracies = [r.summary["test_accuracy"] for r in results]
    return {
        "method": first["method"],
        "epsilon": first["epsilon"],
        "delta": first["delta"],
        "noise_multiplier": first["noise_multiplier"],
        "num_seeds": len(results),
        "test_accuracy_mean": statistics.fmean(accuracies),
        "test_accuracy_sd": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        "bias_norm_mean": _mean_over_training(results, "not_private/bias_norm"),
        "relative_bias_mean": _mean_over_training(results, "not_private/relative_bias"),
        "seconds": statistics.median(r.summary["seconds"] for r in results),
        "device": first["device"],
    }


def as_cells(row: dict[str, Any]) -> list[str]:
    """One row of the table as text, in the order of `COLUMNS`."""

    def number(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    accuracy = f"{100 * row['test_accuracy_mean']:.1f}"
    if row["test_accuracy_sd"] is not None:
        accuracy += f" ± {100 * row['test_accuracy_sd']:.1f}"
    private = row["epsilon"] is not None
    return [
        plotting.LABELS.get(row["method"], row["method"]),
        number(row["epsilon"], ".3f"),
        f"{row['delta']:.0e}" if private else "–",
        f"{row['noise_multiplier']:.3f}" if private else "–",
        accuracy,
        number(row["bias_norm_mean"], ".3f"),
        number(row["relative_bias_mean"], ".3f"),
        f"{row['seconds']:.1f}",
    ]


def as_table(rows: list[dict[str, Any]]) -> Table:
    """The comparison as a table for the terminal."""
    title = f"mean ± SD over {rows[0]['num_seeds']} seeds, median training seconds"
    table = Table(title=title, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*as_cells(row))
    return table


def markdown(rows: list[dict[str, Any]]) -> str:
    """The same table as Markdown, for documents."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" + "|---:" * (len(COLUMNS) - 1) + "|"]
    lines += ["| " + " | ".join(as_cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _mean_over_training(results: list[train.Result], name: str) -> float | None:
    values = [row[name] for result in results for row in result.rows if name in row]
    return statistics.fmean(values) if values else None


def _progress_note(progress: Progress, task: Any, seed: int, experiment: train.Experiment) -> Any:
    def on_row(row: dict[str, Any]) -> None:
        note = f"seed {seed}"
        if "test_accuracy" in row:
            note += f"  test {row['test_accuracy']:.1%}"
        progress.update(task, completed=seed * experiment.plan.num_steps + row["step"], note=note)

    return on_row


if __name__ == "__main__":
    cli.run(main)
