"""Runs the missing cells of the paper's Table 1 and prints ours beside the paper's.

python -m scripts.paper.reproduce --table=1 --datasets=cifar10 --seeds=5 --workdir=runs/table1
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from bam import files
from bam.cli import console, plotting, sweeps, tables
from bam.cli.plotting import plt
from bam.training import registry, rundir
from scripts.paper import table1

flags.DEFINE_enum("table", "1", ["1"], "the paper's table; there is one")
_DATASETS = flags.DEFINE_list(
    "datasets", "cifar10,cifar100,imagenet32", "names of config files in configs/"
)
_METHODS = flags.DEFINE_list("methods", "dp_sgd,dp_sat,bam_sam", "methods to run")
_EPSILONS = flags.DEFINE_list("epsilons", "", "budgets; empty: those of the paper's table")
_TRAIN = flags.DEFINE_bool("train", True, "train what is missing; --notrain: only print the table")
flags.adopt_module_key_flags(sweeps)
console.require("workdir")
console.ensure(
    ("datasets", "methods"),
    lambda datasets, methods: datasets and "dp_sgd" in methods,
    "--datasets and --methods must not be empty, and methods have dp_sgd",
)

FIXED = {"epsilon", "dataset.name", "dataset.holdout"}
# What to know of each run beside its accuracy.
FACTS = (
    "epsilon", "delta", "noise_multiplier", "num_steps", "num_params", "test_accuracy", "seconds",
    "device", "commit",
)  # fmt: skip
PATHS = ("dataset.path", "public_clip.path", "features.cache")


def main() -> None:
    """Trains what is missing until it is done or time is up, then writes and prints the table.

    The table holds the cells of this call, and replaces an earlier one.
    """
    with console.one_line_errors():
        groups = {
            (name, epsilon, method): _seeds_of(name, epsilon, method)
            for name in _DATASETS.value
            for epsilon in _epsilons(name)
            for method in _METHODS.value
        }
        found = (sweeps.run_missing if _TRAIN.value else sweeps.runs_of)(groups)
        rows, facts, configs = [], {}, {}
        for (name, epsilon, method), runs in found.items():
            group = groups[name, epsilon, method]
            first = next(iter(group.values()))
            ours, baseline = (sweeps.percent(found[name, epsilon, m]) for m in (method, "dp_sgd"))
            rows.append(table1.row(name, first.dataset.name, epsilon, method, ours, baseline))
            configs[_folder(name, epsilon, method)] = _of_any_seed(first)
            for cell, config in group.items():
                if config.seed in runs:
                    summary = runs[config.seed].summary
                    facts[cell] = {key: summary.get(key) for key in FACTS}
        workdir = Path(sweeps.WORKDIR.value)
        table = {"rows": rows, "runs": facts, "configs": configs}
        files.write_json(workdir / "table1.json", table)
        for name in _DATASETS.value:
            of_name = [row for row in rows if row["config"] == name]
            if seeds := max(len(row["seeds"]) for row in of_name):
                title = f"{name}, up to {seeds} seeds, 95 % confidence intervals"
                draw(of_name, workdir / f"{name}.png", title)
    tables.show(table1.COLUMNS, rows, left=table1.LEFT, keep=workdir / "table1.md")
    total = sum(len(group) for group in groups.values())
    print(table1.CAPTION)
    print(f"{len(facts)} of {total} runs finished. Table and figures in {workdir}/")


def _of_any_seed(config: ConfigDict) -> files.JsonObject:
    """A config as the table keeps it: that of no one seed, and of no one machine."""
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict({key: "" for key in PATHS})
    config.seed = None
    return rundir.as_json(config)


def draw(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draws accuracy and the seed-paired gain over DP-SGD against ε, with 95 % intervals."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 4.0), layout="constrained")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for axis, quantity in ((left, "accuracy"), (right, "difference")):
        for number, method in enumerate(methods):
            chosen = [row for row in rows if row["method"] == method and row[quantity]]
            if not chosen:
                continue
            sidestep = 1 + 0.04 * (number - (len(methods) - 1) / 2)  # intervals do not hide others
            plotting.error_bars(
                axis,
                [row["epsilon"] * sidestep for row in chosen],
                [row[quantity]["mean"] for row in chosen],
                [row[quantity]["half_width"] for row in chosen],
                registry.label(method),
                plotting.style_of(method),
            )
        epsilons = {row["epsilon"] for row in rows}
        plotting.log_axis(axis, epsilons)
        axis.set_xlim(min(epsilons) / 1.4, max(epsilons) * 1.4)
        axis.set_xlabel("ε")
    left.set_title("test accuracy, %", fontsize=11)
    right.set_title("gain over DP-SGD, points, paired by seed", fontsize=11)
    right.axhline(0, color=plotting.style_of("dp_sgd")["color"], linewidth=1)
    handles, labels = left.get_legend_handles_labels()
    plotting.legend_below(figure, dict(zip(labels, handles, strict=True)))
    figure.suptitle(title, fontsize=12)
    plotting.save(figure, path)


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
    return sweeps.method_config(method, fixed, str(path))


def _seeds_of(name: str, epsilon: float, method: str) -> sweeps.Cells:
    """The runs behind one number of the table."""
    config = _config(name, method)
    config.epsilon = epsilon
    return sweeps.of_seeds(_folder(name, epsilon, method), config)


def _folder(name: str, epsilon: float, method: str) -> str:
    return f"{name}/epsilon{epsilon:g}/{method}"


if __name__ == "__main__":
    console.run(main, defaults=["--config=bam/training/config.py"])
