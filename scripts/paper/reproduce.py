"""Runs the missing cells of the paper's Table 1 and prints ours beside the paper's.

python -m scripts.paper.reproduce --table=1 --datasets=cifar10 --seeds=5 --workdir=runs/table1
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from bam import files, parts, plotting, report
from bam.plotting import plt
from scripts.lib import cells, cli, tables
from scripts.paper import table1

flags.DEFINE_enum("table", "1", ["1"], "the paper's table; there is one")
_DATASETS = flags.DEFINE_list(
    "datasets", "cifar10,cifar100,imagenet32", "names of config files in configs/"
)
_METHODS = flags.DEFINE_list("methods", "dp_sgd,dp_sat,bam_sam", "methods to run")
_EPSILONS = flags.DEFINE_list("epsilons", "", "budgets; empty: those of the paper's table")
_EARLIER = flags.DEFINE_string(
    "earlier",
    "",
    "a table1.json of runs of these configs that are elsewhere: they are not trained again",
)
_TRAIN = flags.DEFINE_bool("train", True, "train what is missing; --notrain: only print the table")
flags.adopt_module_key_flags(cells)
cli.require("workdir")
cli.ensure(
    ("datasets", "methods"),
    lambda datasets, methods: datasets and "dp_sgd" in methods,
    "--datasets and --methods must not be empty, and methods have dp_sgd",
)

FIXED = {"epsilon", "dataset.name", "dataset.holdout"}
# What to know of each run beside its accuracy.
FACTS = (
    "epsilon", "delta", "noise_multiplier", "num_steps", "num_params", "test_accuracy", "seconds",
    "device",
)  # fmt: skip
Facts = Mapping[str, Any]
PATHS = ("dataset.path", "public_clip.path", "features.cache")


def main() -> None:
    """Trains what is missing until it is done or time is up, then writes and prints the table.

    The table holds the cells of this call, and replaces an earlier one.
    """
    with cli.one_line_errors():
        groups = {
            (name, epsilon, method): _seeds_of(name, epsilon, method)
            for name in _DATASETS.value
            for epsilon in _epsilons(name)
            for method in _METHODS.value
        }
        earlier = _earlier(groups.values())
        missing = {
            key: {cell: config for cell, config in group.items() if cell not in earlier}
            for key, group in groups.items()
        }
        found = (cells.run_missing if _TRAIN.value else cells.runs_of)(missing)
        facts = earlier | {
            cell: {fact: found[key][config.seed].summary[fact] for fact in FACTS}
            for key, group in missing.items()
            for cell, config in group.items()
            if config.seed in found[key]
        }
        percent = {
            key: {
                config.seed: 100 * facts[cell]["test_accuracy"]
                for cell, config in group.items()
                if cell in facts
            }
            for key, group in groups.items()
        }
        rows = []
        for name, epsilon, method in groups:
            dataset = next(iter(groups[name, epsilon, method].values())).dataset.name
            ours, baseline = (percent[name, epsilon, m] for m in (method, "dp_sgd"))
            rows.append(table1.row(name, dataset, epsilon, method, ours, baseline))
        workdir = Path(cells.WORKDIR.value)
        configs = {folder: report.as_json(config) for folder, config in map(_kept, groups.values())}
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


def _earlier(groups: Iterable[cells.Cells]) -> dict[str, Facts]:
    """Cell -> facts of those that the table of `--earlier` has; none without it.

    ValueError: if it has none, or if their configs are not today's.
    """
    if not _EARLIER.value:
        return {}
    path = Path(_EARLIER.value)
    table = files.read_json(path)
    runs, configs = (table.get(key) or {} for key in ("runs", "configs"))
    earlier: dict[str, Facts] = {}
    for group in groups:
        of_group = {cell: runs[cell] for cell in group if cell in runs}
        folder, config = _kept(group)
        if of_group and folder not in configs:
            raise ValueError(f"--earlier: {path} does not keep the config of {folder}")
        if of_group and (differs := report.difference(configs[folder], config)):
            raise ValueError(f"--earlier: {folder} in {path} has {differs}")
        earlier |= of_group
    if not earlier:
        raise ValueError(f"--earlier: {path} has none of these runs")
    return earlier


def _kept(group: cells.Cells) -> tuple[str, ConfigDict]:
    """A group's folder, and its config as the table keeps it: not one seed's or one machine's."""
    cell, config = next(iter(group.items()))
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict({key: "" for key in PATHS})
    config.seed = None
    return str(Path(cell).parent), config


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
                parts.label(method),
                plotting.style_of(method),
            )
        plotting.log_axis(axis, {row["epsilon"] for row in rows})
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
    return cells.method_config(method, fixed, str(path))


def _seeds_of(name: str, epsilon: float, method: str) -> cells.Cells:
    """The runs behind one number of the table."""
    config = _config(name, method)
    config.epsilon = epsilon
    return cells.of_seeds(f"{name}/epsilon{epsilon:g}/{method}", config)


if __name__ == "__main__":
    cli.run(main, defaults=["--config=configs/base.py"])
