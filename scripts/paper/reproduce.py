"""Runs the missing cells of the paper's Table 1 and prints ours beside the paper's.

python -m scripts.paper.reproduce --table=1 --datasets=cifar10 --seeds=5 --workdir=runs/table1
"""

import itertools
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags
from rich import box
from rich.console import Console
from rich.table import Table

from bam import plotting, report
from scripts.lib import cells, cli
from scripts.paper import table1

flags.DEFINE_enum("table", "1", ["1"], "the paper's table; there is one")
_DATASETS = flags.DEFINE_list(
    "datasets", "cifar10,cifar100,imagenet32", "names of config files in configs/"
)
_METHODS = flags.DEFINE_list("methods", "dp_sgd,dp_sat,bam_sam", "methods to run")
_EPSILONS = flags.DEFINE_list("epsilons", "", "budgets; empty: those of the paper's table")
_SEEDS = flags.DEFINE_integer("seeds", 3, "runs per cell of the table", lower_bound=1)
_WORKDIR = flags.DEFINE_string("workdir", "", "folder for all runs and the table")
_MAX_SECONDS = flags.DEFINE_float(
    "max_seconds", 0, "stop with a checkpoint after so long; 0: no limit", lower_bound=0
)
_TRAIN = flags.DEFINE_bool("train", True, "train what is missing; --notrain: only print the table")
config_flags.DEFINE_config_file("config", None, "--config.KEY=VALUE overrides a key in every cell")

FIXED = {"seed", "epsilon", "dry_run", "dataset.name", "dataset.holdout"}


def main() -> None:
    """Trains what is missing until it is done or time is up, then writes and prints the table.

    The table holds the cells of this call, and replaces an earlier one.
    """
    console = Console()
    with cli.one_line_errors():
        if not _WORKDIR.value:
            raise ValueError("--workdir is required: the folder for all runs")
        if not _DATASETS.value or "dp_sgd" not in _METHODS.value:
            raise ValueError("--datasets and --methods must not be empty, and methods have dp_sgd")
        workdir = Path(_WORKDIR.value)
        table = {
            (name, epsilon, method): _seeds_of(name, epsilon, method)
            for name in _DATASETS.value
            for epsilon in _epsilons(name)
            for method in _METHODS.value
        }
        # Seed by seed, so that whatever time allows leaves every cell equally far.
        by_seed = zip(*(runs.items() for runs in table.values()), strict=True)
        all_cells = dict(itertools.chain.from_iterable(by_seed))
        if _TRAIN.value:
            cli.use_compilation_cache()
            cells.run(
                all_cells,
                workdir,
                cli.stop_after(_MAX_SECONDS.value),
                cells.print_event,
            )
        finished = cells.summaries(all_cells, workdir)
        rows = [_row(*key, table, finished) for key in table]
        workdir.mkdir(parents=True, exist_ok=True)
        report.write_json(workdir / "table1.json", {"rows": rows, "runs": _facts(finished)})
        report.write_text(workdir / "table1.md", table1.markdown(rows))
    for name in _DATASETS.value:
        of_name = [row for row in rows if row["config"] == name]
        seeds = max(len(row["seeds"]) for row in of_name)
        if seeds:
            title = f"{name}, up to {seeds} seeds, 95 % confidence intervals"
            plotting.accuracy_and_gain(of_name, workdir / f"{name}.png", title)
    for name in _DATASETS.value:
        printed = Table(title=name, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        for column in table1.COLUMNS[1:]:
            justify: Any = "left" if column == "method" else "right"
            printed.add_column(column, justify=justify, no_wrap=True)
        for row in rows:
            if row["config"] == name:
                printed.add_row(*table1.as_cells(row)[1:])
        console.print(printed)
    console.print(table1.CAPTION)
    console.print(
        f"{len(finished)} of {len(all_cells)} runs finished. Table and figures in {workdir}/"
    )


def _epsilons(name: str) -> list[float]:
    if _EPSILONS.value:
        return [float(epsilon) for epsilon in _EPSILONS.value]
    return list(table1.PAPER.get(_config(name, "dp_sgd").dataset.name, {})) or [1.0, 2.0, 10.0]


def _config(name: str, method: str) -> ConfigDict:
    """The config of that name and method, with the command line's overrides."""
    path = Path("configs") / f"{name}.py"
    if not path.is_file():
        raise ValueError(f"--datasets: no config {path}")
    # One folder cannot hold several data sets, though a reader might take one for another.
    fixed = FIXED | ({"dataset.path"} if len(_DATASETS.value) > 1 else set())
    return cells.method_config(str(path), method, fixed)


def _seeds_of(name: str, epsilon: float, method: str) -> cells.Cells:
    """The runs behind one number of the table: path -> config."""
    made = {}
    for seed in range(_SEEDS.value):
        config = _config(name, method)
        config.update({"epsilon": epsilon, "seed": seed})
        made[f"{name}/epsilon{epsilon:g}/{method}/seed{seed}"] = config
    return made


def _row(name: str, epsilon: float, method: str, table: Any, finished: Any) -> dict[str, Any]:
    def accuracies(method: str) -> dict[int, float]:
        of_method = table.get((name, epsilon, method), {})
        return {c.seed: finished[n]["test_accuracy"] for n, c in of_method.items() if n in finished}

    dataset = next(iter(table[name, epsilon, method].values())).dataset.name
    return table1.row(name, dataset, epsilon, method, accuracies(method), accuracies("dp_sgd"))


def _facts(finished: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What to know of each run beside its accuracy."""
    keys = ("epsilon", "delta", "noise_multiplier", "num_steps", "num_params", "test_accuracy",
            "seconds", "device")  # fmt: skip
    return {name: {key: summary[key] for key in keys} for name, summary in finished.items()}


if __name__ == "__main__":
    cli.run(main, defaults=["--config=configs/base.py"])
