"""Trains several methods with several seeds at the same (ε, δ) and sets them side by side.

python -m scripts.compare --config=configs/digits.py --num_seeds=3 --workdir=runs/demo
python -m scripts.compare --runs=runs/one,runs/other --workdir=runs/both   # runs that exist
"""

import json
import shutil
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from ml_collections import config_flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bam import parts, plotting, report, train
from bam.privacy.accounting import rounded_up
from scripts.lib import cells, cli, tables

_CONFIG = config_flags.DEFINE_config_file("config", None, "configs/NAME.py, without a method")
_METHODS = flags.DEFINE_list(
    "methods", "non_private,dp_sgd,dp_sat,bam_sam,bam_exact", "methods to compare"
)
_NUM_SEEDS = flags.DEFINE_integer("num_seeds", 3, "runs per method", lower_bound=1)
_RUNS = flags.DEFINE_list(
    "runs", "", "train nothing: compare the finished runs in and below these folders"
)
_WORKDIR = flags.DEFINE_string("workdir", "", "folder for all runs, the table and the picture")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "delete the same methods' earlier runs")

COLUMNS = ("method", "ε", "accuracy %", "‖bias‖", "‖ĝ‖", "‖bias‖/‖ĝ‖", "cosine", "seconds")


class Run(NamedTuple):
    """What is compared of a run: its config's `method`, metrics rows and summary."""

    method: dict[str, Any]
    rows: list[dict[str, Any]]
    summary: dict[str, Any]


def main() -> None:
    """Trains and compares methods, or compares runs that exist."""
    with cli.one_line_errors():
        if not _WORKDIR.value:
            raise ValueError("--workdir is required: the folder for the table and the picture")
        workdir = Path(_WORKDIR.value)
        if _RUNS.value:
            runs = _found([Path(folder) for folder in _RUNS.value])
        elif not flags.FLAGS["config"].value:
            raise ValueError("--config is required: configs/NAME.py, or --runs=FOLDER,FOLDER")
    if not _RUNS.value:
        runs = _trained(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    methods = [of_label[0].method for of_label in runs.values()]
    if len({method["name"] for method in methods}) == len(methods):  # strengths need no mention
        runs = {run[0].method["name"]: run for run in runs.values()}
    names = dict(zip(runs, methods, strict=True))
    table = [summarize(name, of_name) for name, of_name in runs.items()]
    report.write_json(workdir / "summary.json", table)
    report.write_text(workdir / "table.md", markdown(table))
    plotting.compare_runs(
        {parts.full_label(names[name]): [run.rows for run in runs[name]] for name in runs},
        methods,
        workdir / "comparison.png",
        _title([run for of_name in runs.values() for run in of_name]),
    )
    console = Console()
    console.print(as_table(table))
    console.print(f"Bias is measured on training examples and is not private. Files in {workdir}/")


def _found(folders: list[Path]) -> dict[str, list[Run]]:
    """The finished runs in and below folders, by method and strength."""
    found: dict[str, list[Run]] = {}
    for folder in folders:
        summaries = sorted(folder.rglob("summary.json"))
        summaries = [path for path in summaries if (path.parent / "metrics.jsonl").exists()]
        if not summaries:
            raise ValueError(f"{folder} holds no finished run (one that has a summary.json)")
        for path in summaries:
            config = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
            lines = (path.parent / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            summary = json.loads(path.read_text(encoding="utf-8"))
            run = Run(config["method"], [json.loads(line) for line in lines], summary)
            found.setdefault(parts.full_label(run.method), []).append(run)
    return found


def _title(runs: list[Run]) -> str:
    """What was trained on what, by how many seeds, at which budgets."""
    first = [run.summary for run in runs]
    private = {s["epsilon"]: s["delta"] for s in first if s["epsilon"] is not None}
    text = f"{', '.join(sorted({s['dataset'] for s in first}))}, "
    text += f"{len({s['seed'] for s in first})} seeds"
    if private:
        budgets = " and ".join(
            f"({rounded_up(e, '.3g')}, {rounded_up(d, '.3g')})-DP" for e, d in private.items()
        )
        text += f", private methods at {budgets}"
    return text


def _trained(workdir: Path) -> dict[str, list[Run]]:
    """Builds every experiment first, so that a mistake costs nothing; then trains them."""
    with cli.one_line_errors():
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

    runs: dict[str, list[Run]] = {}
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
                parts.label(method),
                total=_NUM_SEEDS.value * experiment.plan.training_steps,
                note="",
                start=False,
            )
            for method, experiment in experiments.items()
        }
        for method, experiment in experiments.items():
            progress.start_task(tasks[method])
            results = [
                train.train(
                    experiment,
                    seed,
                    run_dir(workdir, method, seed),
                    on_row=_progress_note(progress, tasks[method], seed, experiment),
                )
                for seed in range(_NUM_SEEDS.value)
            ]
            section = experiment.config.method.to_dict()
            runs[parts.full_label(section)] = [Run(section, r.rows, r.summary) for r in results]
            progress.stop_task(tasks[method])
    return runs


def run_dir(workdir: Path, method: str, seed: int) -> Path:
    """Folder of one run inside the comparison's workdir."""
    return workdir / method / f"seed{seed}"


def summarize(name: str, results: list[Run]) -> dict[str, Any]:
    """Means over the seeds of one method, as `summary.json` keeps them."""
    first = results[0].summary
    accuracies = [r.summary["test_accuracy"] for r in results]
    return {
        "method": name,
        "epsilon": first["epsilon"],
        "delta": first["delta"],
        "noise_multiplier": first["noise_multiplier"],
        "num_seeds": len(results),
        "test_accuracy_mean": statistics.fmean(accuracies),
        "test_accuracy_sd": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        "bias_norm_mean": _mean_over_training(results, "not_private/bias_norm"),
        "gradient_norm_mean": _mean_over_training(results, "not_private/gradient_norm"),
        "relative_bias_mean": _mean_over_training(results, "not_private/relative_bias"),
        "cosine_mean": _mean_over_training(results, "not_private/cosine"),
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
    return [
        parts.label(row["method"]),
        "–" if row["epsilon"] is None else rounded_up(row["epsilon"], ".2f"),
        accuracy,
        number(row["bias_norm_mean"], ".3f"),
        number(row["gradient_norm_mean"], ".3f"),
        number(row["relative_bias_mean"], ".3f"),
        number(row["cosine_mean"], ".3f"),
        f"{row['seconds']:.1f}",
    ]


def as_table(rows: list[dict[str, Any]]) -> Table:
    """The comparison as a table for the terminal."""
    seeds = " or ".join(str(n) for n in sorted({row["num_seeds"] for row in rows}))
    title = f"mean ± SD over {seeds} seeds, median training seconds"
    return tables.terminal(COLUMNS, [as_cells(row) for row in rows], title)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The same table as Markdown, for documents."""
    return tables.markdown(COLUMNS, [as_cells(row) for row in rows])


def _mean_over_training(results: list[Run], name: str) -> float | None:
    values = [row[name] for result in results for row in result.rows if name in row]
    return statistics.fmean(values) if values else None


def _progress_note(progress: Progress, task: Any, seed: int, experiment: train.Experiment) -> Any:
    def on_row(row: dict[str, Any]) -> None:
        note = f"seed {seed}"
        if "test_accuracy" in row:
            note += f"  test {row['test_accuracy']:.1%}"
        progress.update(
            task, completed=seed * experiment.plan.training_steps + row["step"], note=note
        )

    return on_row


if __name__ == "__main__":
    cli.run(main)
