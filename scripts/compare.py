"""Trains several methods with several seeds at the same (ε, δ) and sets them side by side.

python -m scripts.compare --config=configs/digits.py --num_seeds=3 --workdir=runs/demo
python -m scripts.compare --runs=runs/one,runs/other --workdir=runs/both   # runs that exist

The same command again goes on where it was stopped, and trains what is missing.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bam import files
from bam.cli import console, plotting, stats, sweeps, tables
from bam.privacy.accounting import rounded_up
from bam.training import loop, registry

_METHODS = flags.DEFINE_list(
    "methods", "non_private,dp_sgd,dp_sat,bam_sam,bam_exact", "methods to compare"
)
_RUNS = flags.DEFINE_list(
    "runs", "", "train nothing: compare the finished runs in and below these folders"
)
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "delete the same methods' earlier runs")
flags.adopt_module_key_flags(sweeps)
console.require("workdir")
console.ensure(
    ("config", "runs"),
    lambda config, runs: config is not None or runs,
    "--config is required: configs/NAME.py, or --runs=FOLDER,FOLDER",
)

MEASURED = ("bias_norm", "gradient_norm", "relative_bias", "cosine")
COLUMNS: tables.Columns = {
    "method": lambda row: registry.label(row["method"]),
    "ε": lambda row: "–" if row["epsilon"] is None else rounded_up(row["epsilon"], ".2f"),
    "accuracy %": lambda row: tables.percent(row["test_accuracy_mean"], row["test_accuracy_sd"]),
    "‖bias‖": lambda row: tables.number(row["bias_norm_mean"], ".3f"),
    "‖ĝ‖": lambda row: tables.number(row["gradient_norm_mean"], ".3f"),
    "‖bias‖/‖ĝ‖": lambda row: tables.number(row["relative_bias_mean"], ".3f"),
    "cosine": lambda row: tables.number(row["cosine_mean"], ".3f"),
    "seconds": lambda row: f"{row['seconds']:.1f}",
}


def main() -> None:
    """Trains and compares methods, or compares runs that exist."""
    workdir = Path(sweeps.WORKDIR.value)
    with console.one_line_errors():
        runs = existing([Path(folder) for folder in _RUNS.value]) if _RUNS.value else train_all()
        if not runs:
            return
        groups: dict[str, list[sweeps.Run]] = {}
        for run in runs:
            groups.setdefault(registry.full_label(run.method), []).append(run)
        names = {label: of_label[0].method["name"] for label, of_label in groups.items()}
        if len(set(names.values())) < len(names):  # several strengths of a method
            names = {label: label for label in names}
        table = [summarize(names[label], of_label) for label, of_label in groups.items()]
        workdir.mkdir(parents=True, exist_ok=True)
        files.write_json(workdir / "summary.json", table)
        plotting.compare_runs(
            {label: [run.rows for run in of_label] for label, of_label in groups.items()},
            [of_label[0].method for of_label in groups.values()],
            workdir / "comparison.png",
            title(runs),
        )
    seeds = " or ".join(str(n) for n in sorted({row["num_seeds"] for row in table}))
    heading = f"mean ± SD over {seeds} seeds, median training seconds"
    tables.show(COLUMNS, table, heading, keep=workdir / "table.md")
    print(f"Bias is measured on training examples and is not private. Files in {workdir}/")


def existing(folders: list[Path]) -> list[sweeps.Run]:
    """The finished runs in and below folders."""
    runs = []
    for folder in folders:
        paths = [path.parent for path in sorted(folder.rglob("summary.json"))]
        paths = [path for path in paths if (path / "metrics.jsonl").exists()]
        if not paths:
            raise ValueError(f"{folder} holds no finished run (one that has a summary.json)")
        runs += [sweeps.read(path) for path in paths]
    return runs


def train_all() -> list[sweeps.Run]:
    """Trains what is missing, method by method, showing how far it is; nothing if it was stopped.

    Every experiment is built first, so that a mistake costs nothing.
    """
    if not _METHODS.value:
        raise ValueError("--methods is empty: name at least one")
    groups = {m: sweeps.of_seeds(m, sweeps.method_config(m)) for m in _METHODS.value}
    all_cells = {name: config for group in groups.values() for name, config in group.items()}
    screen = Console()
    tasks: dict[str, Any] = {}
    columns = (
        TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip

    def on_built(built: Mapping[str, loop.Trainer]) -> None:
        private = [e for e in built.values() if e.plan.to_json()["epsilon"] is not None]
        if private:
            screen.print(private[0].plan.describe(), highlight=False, soft_wrap=True)
        progress.start()
        for method, group in groups.items():
            steps = [built[name].plan.training_steps for name in group if name in built]
            if steps:
                total = len(group) * steps[0]
                tasks[method] = progress.add_task(registry.label(method), False, total, note="")

    def on_row(name: str, row: dict[str, Any]) -> None:
        method = name.split("/")[0]
        progress.start_task(tasks[method])
        before = list(groups[method]).index(name) * progress.tasks[tasks[method]].total
        note = f"seed {all_cells[name].seed}"
        if "test_accuracy" in row:
            note += f"  test {row['test_accuracy']:.1%}"
        done = before / len(groups[method]) + row["step"]
        progress.update(tasks[method], completed=done, note=note)

    def on_event(name: str, text: str) -> None:
        if not text.endswith(" s"):  # what is finished is seen
            screen.print(f"{name} {text}")

    console.use_compilation_cache()
    with Progress(*columns, console=screen) as progress:
        sweeps.run(
            all_cells, Path(sweeps.WORKDIR.value), console.stop_after(sweeps.MAX_SECONDS.value),
            on_event, on_row, on_built, _OVERWRITE.value,
        )  # fmt: skip
    runs = sweeps.runs_of(groups)
    if any(len(runs[method]) < len(group) for method, group in groups.items()):
        return []
    return [run for of_seed in runs.values() for run in of_seed.values()]


def title(runs: list[sweeps.Run]) -> str:
    """What was trained on what, by how many seeds, at which budgets."""
    summaries = [run.summary for run in runs]
    private = {s["epsilon"]: s["delta"] for s in summaries if s["epsilon"] is not None}
    text = f"{', '.join(sorted({s['dataset'] for s in summaries}))}, "
    text += f"{len({s['seed'] for s in summaries})} seeds"
    if private:
        budgets = " and ".join(
            f"({rounded_up(e, '.3g')}, {rounded_up(d, '.3g')})-DP" for e, d in private.items()
        )
        text += f", private methods at {budgets}"
    return text


def summarize(name: str, runs: list[sweeps.Run]) -> dict[str, Any]:
    """Means over the seeds of one method, as `summary.json` keeps them."""
    first = runs[0].summary
    accuracy = stats.estimate([run.summary["test_accuracy"] for run in runs])
    assert accuracy is not None
    measured = {}
    for quantity in MEASURED:
        key = f"not_private/{quantity}"
        found = stats.estimate([row[key] for run in runs for row in run.rows if key in row])
        measured[f"{quantity}_mean"] = found and found.mean
    return {
        "method": name,
        **{key: first[key] for key in ("epsilon", "delta", "noise_multiplier")},
        "num_seeds": len(runs),
        "test_accuracy_mean": accuracy.mean,
        "test_accuracy_sd": accuracy.sd,
        **measured,
        "seconds": statistics.median(run.summary["seconds"] for run in runs),
        "device": first["device"],
    }


if __name__ == "__main__":
    console.run(main)
