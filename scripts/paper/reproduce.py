"""The paper's Table 1: trains the missing runs and compares our accuracies with the paper's.

python -m scripts.paper.reproduce --table=1 --datasets=cifar10 --seeds=5 --workdir=runs/table1
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from bam import tables, waits
from bam.cli import command, screen
from bam.errors import InputError
from bam.sweep import plot
from bam.sweep.comparison import Study
from bam.sweep.plot import plt
from bam.sweep.runs import FinishedRun
from bam.training.methods import label
from scripts.lib import many_runs
from scripts.paper.numbers import TABLE_1, paper_cell

flags.DEFINE_enum("table", "1", ["1"], "the paper's table; there is one")
_DATASETS = flags.DEFINE_list(
    "datasets", "cifar10,cifar100,imagenet32", "names of config files in configs/"
)
_METHODS = flags.DEFINE_list("methods", "dp_sgd,dp_sat,bam_sam", "methods to run")
_EPSILONS = flags.DEFINE_list("epsilons", "", "budgets; '': those of the paper's table")

COLUMNS: tables.Columns = {
    "paper, % ± SD": lambda row: "–" if row["paper"] is None else paper_cell(*row["paper"]),
    "paper's gain": lambda row: tables.number(row["paper_gain"], "+.1f"),
}
LEGEND = (
    "paper: mean ± SD of 3 seeds (ImageNet32: one run). Ours: mean ± 95 % interval, so compare the "
    "means and not the two ±"
)


def main() -> None:
    """Trains the missing runs until the time is up, then writes table and figures."""
    if not _DATASETS.value or "dp_sgd" not in _METHODS.value:
        raise InputError("--datasets must not be empty, and --methods must contain dp_sgd")
    cells = {
        f"{name} {method} ε={epsilon:g}": (name, method, epsilon)
        for name in _DATASETS.value
        for epsilon in _epsilons(name)
        for method in _METHODS.value
    }
    groups = {label: _config(*cell) for label, cell in cells.items()}

    def baseline(label: str) -> str:
        name, _, epsilon = cells[label]
        return f"{name} dp_sgd ε={epsilon:g}"

    def columns(label: str, runs: Sequence[FinishedRun]) -> dict[str, Any]:
        name, method, epsilon = cells[label]
        paper = TABLE_1.get(groups[label].dataset.name, {}).get(epsilon, {})
        ours, theirs = paper.get(method), paper.get("dp_sgd")
        gain = round(ours[0] - theirs[0], 2) if ours and theirs and method != "dp_sgd" else None
        return {"name": name, "target_epsilon": epsilon, "paper": ours, "paper_gain": gain}

    workdir = Path(flags.FLAGS.workdir)
    study = Study(groups, baseline, COLUMNS, columns)
    rows, _ = many_runs.carry_out(study, workdir / "table1", LEGEND, ["paper's gain"])
    screen.say(
        *filter(None, (other_network(x, _config(x, "dp_sgd", 1.0)) for x in _DATASETS.value))
    )
    for name in _DATASETS.value:
        with waits.awaited(screen.show, f"drawing {name}.png"):
            draw([row for row in rows if row["name"] == name], workdir / f"{name}.png")
        screen.say(f"picture: {workdir / f'{name}.png'}")


def other_network(name: str, config: ConfigDict) -> str:
    """Returns a line on a config that is not the paper's of its data, or "" without one."""
    if name in TABLE_1 or config.dataset.name not in TABLE_1:
        return ""
    return f"{name} is not the paper's network: compare gains, not accuracies"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws accuracy and the seed-paired gain over DP-SGD against ε, with 95 % intervals."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 4.0), layout="constrained")
    methods = list(dict.fromkeys(row["method"]["name"] for row in rows))
    for axis, quantity in ((left, "accuracy"), (right, "gain")):
        for number, method in enumerate(methods):
            chosen = [row for row in rows if row["method"]["name"] == method and row[quantity]]
            if not chosen:
                continue
            sidestep = 1 + 0.04 * (number - (len(methods) - 1) / 2)  # intervals do not hide others
            plot.error_bars(
                axis,
                [row["target_epsilon"] * sidestep for row in chosen],
                [row[quantity]["mean"] for row in chosen],
                [row[quantity]["half_width"] for row in chosen],
                label(method),
                plot.style_of(method),
            )
        epsilons = {row["target_epsilon"] for row in rows}
        plot.log_axis(axis, epsilons)
        axis.set_xlim(min(epsilons) / 1.4, max(epsilons) * 1.4)
        axis.set_xlabel("ε")
    left.set_title("test accuracy, %", fontsize=11)
    right.set_title("gain over DP-SGD, points, paired by seed", fontsize=11)
    right.axhline(0, color=plot.style_of("dp_sgd")["color"], linewidth=1)
    handles, labels = left.get_legend_handles_labels()
    plot.legend_below(figure, dict(zip(labels, handles, strict=True)))
    num_seeds = max(len(row["seeds"]) for row in rows)
    seeds = plot.seeds_in_words(num_seeds, ", 95 % confidence intervals")
    figure.suptitle(f"{rows[0]['name']}, {seeds}", fontsize=12)
    plot.save(figure, path)


def _epsilons(name: str) -> list[float]:
    if _EPSILONS.value:
        return [float(epsilon) for epsilon in _EPSILONS.value]
    return list(TABLE_1.get(_config(name, "dp_sgd", 1.0).dataset.name, {})) or [1.0, 2.0, 10.0]


def _config(name: str, method: str, epsilon: float) -> ConfigDict:
    """The config of that name and method at an ε, with the command line's overrides."""
    path = Path("configs") / f"{name}.py"
    if not path.is_file():
        raise InputError(f"--datasets: no config {path}")
    fixed = {"epsilon", "dataset.name", "dataset.holdout"}
    # One folder cannot hold several data sets, and a reader may take one data set for another.
    fixed |= {"dataset.path"} if len(_DATASETS.value) > 1 else set()
    config = many_runs.method_config(method, fixed, str(path))
    config.epsilon = epsilon
    return config


if __name__ == "__main__":
    command.run_script(main, ["workdir"], ["--config=bam/training/config.py"])
