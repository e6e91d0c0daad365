"""Is less directional bias more accuracy? Rank correlations over finished runs, and one figure.

python -m scripts.paper.bias_accuracy --runs=runs/search,runs/table1 --out=docs/figures

Reads every finished run below those folders whose metrics have the bias of more than the first step
(`--config.diagnostics.every`). NOT PRIVATE, like those metrics.
"""

import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats
from absl import flags

from bam.cli import console, plotting, sweep, tables
from bam.cli.plotting import plt
from bam.training import registry

_RUNS = flags.DEFINE_list("runs", "", "folders with finished runs, anywhere below")
_OUT = flags.DEFINE_string("out", "docs/figures", "folder for the picture and the numbers")
console.require("runs")

# Direction kept, as means over training: of a method's own gradients, and of the loss's at θ.
COSINES = {
    "cosine": "cos(ĝ_clip, ĝ), of the gradients that are clipped",
    "against_plain/cosine": "cos(ĝ_clip, ∇L), of the loss at θ",
}
# What runs share that are compared with each other, and what makes them one setting.
PROBLEM = ("holdout", "dataset", "model", "batch_size", "epsilon", "rest")
SETTING = (*PROBLEM, "method", "strength", "clip_norm", "learning_rate")
COMPARED_OR_NO_MATTER = {
    "method", "clip_norm", "seed", "microbatch_size", "convolution", "eval", "checkpoint",
    "diagnostics", "dry_run",
}  # fmt: skip
COLUMNS: tables.Columns = {
    "compared": lambda row: row["compared"],
    "direction kept": lambda row: row["quantity"],
    "runs": lambda row: str(row["runs"]),
    "settings": lambda row: str(row["settings"]),
    "rank correlation": lambda row: (
        f"{row['correlation']:+.2f} [{row['low']:+.2f}, {row['high']:+.2f}]"
    ),
}
ALL, PAIRED = "all runs of a budget", "with DP-SGD of the same seed, C, rate"
Row = dict[str, Any]


def main() -> None:
    """Writes bias_accuracy.png, .csv (a row per run) and .md (the correlations)."""
    with console.one_line_errors():
        runs = list(read(Path(folder) for folder in _RUNS.value))
        compared = {ALL: centred(runs), PAIRED: paired(runs)}
        found = [
            {"compared": name, "quantity": heading, **correlation(rows, quantity)}
            for name, rows in compared.items()
            for quantity, heading in COSINES.items()
        ]
        path = Path(_OUT.value) / "bias_accuracy"
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(compared, path.with_suffix(".png"))
        tables.write_csv(path.with_suffix(".csv"), runs)
    tables.show(COLUMNS, found, left=("direction kept",), keep=path.with_suffix(".md"))


def read(folders: Iterable[Path]) -> Iterable[Row]:
    """A row of each finished run with diagnostics: its setting, seed, accuracy in %, cosines."""
    for folder in folders:
        summaries = sorted(folder.rglob("summary.json"))
        if not summaries:
            raise ValueError(f"--runs: no finished run below {folder}")
        for file in summaries:
            run = sweep.read(file.parent)
            measured = [row for row in run.rows if row["step"] and "not_private/cosine" in row]
            if not measured or not registry.is_private(run.method["name"]):
                continue  # what has no noise is of no budget
            config = run.config
            yield {
                "holdout": config["dataset"]["holdout"],
                "dataset": config["dataset"]["name"],
                "model": config["model"]["name"],
                "batch_size": config["expected_batch_size"],
                "epsilon": config["epsilon"],
                "rest": _rest(config),
                "method": run.method["name"],
                "strength": registry.strength(run.method),
                "clip_norm": config["clip_norm"],
                "learning_rate": config["optimizer"]["learning_rate"],
                "seed": config["seed"],
                "accuracy": 100 * run.summary["test_accuracy"],
                **{
                    name: float(np.mean([row[f"not_private/{name}"] for row in measured]))
                    for name in COSINES
                },
            }


def _rest(config: Mapping[str, Any]) -> str:
    """A short name for all other settings that change a result, such as features."""
    rest = {
        name: {k: v for k, v in value.items() if k not in ("learning_rate", "path", "cache")}
        if isinstance(value, Mapping)
        else value
        for name, value in config.items()
        if name not in COMPARED_OR_NO_MATTER
    }
    text = json.dumps(rest, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def centred(runs: Sequence[Row]) -> list[Row]:
    """The runs less the mean of their problem: budgets differ in accuracy for other reasons."""
    return _less(runs, runs, PROBLEM)


def paired(runs: Sequence[Row]) -> list[Row]:
    """The runs less DP-SGD's of the same problem, seed, C and learning rate; DP-SGD's left out."""
    others = [run for run in runs if run["method"] != "dp_sgd"]
    baselines = [run for run in runs if run["method"] == "dp_sgd"]
    return _less(others, baselines, (*PROBLEM, "seed", "clip_norm", "learning_rate"))


def _less(runs: Sequence[Row], baselines: Sequence[Row], shared: Sequence[str]) -> list[Row]:
    means: dict[Any, Row] = {}
    for key, of_key in _groups(baselines, shared):
        means[key] = {x: np.mean([run[x] for run in of_key]) for x in ("accuracy", *COSINES)}
    return [
        run | {name: run[name] - value for name, value in means[_key(run, shared)].items()}
        for run in runs
        if _key(run, shared) in means
    ]


def correlation(rows: Sequence[Row], quantity: str, draws: int = 2000) -> dict[str, float]:
    """Spearman's ρ of a quantity and accuracy, and its 95 % interval by a bootstrap of settings.

    Runs of a setting differ by their seed alone and are drawn together: they are no new evidence
    about settings.
    """
    settings = [
        np.array([[run[quantity], run["accuracy"]] for run in of_setting])
        for _, of_setting in _groups(rows, SETTING)
    ]
    if len(settings) < 3:
        raise ValueError(f"--runs: {len(settings)} settings to compare; a correlation needs 3")

    def rho(chosen: Sequence[np.ndarray]) -> float:
        return float(scipy.stats.spearmanr(np.concatenate(chosen)).statistic)

    random = np.random.default_rng(0)
    drawn = [
        rho([settings[i] for i in random.integers(len(settings), size=len(settings))])
        for _ in range(draws)
    ]
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return {
        "correlation": rho(settings),
        "low": float(low),
        "high": float(high),
        "runs": len(rows),
        "settings": len(settings),
    }


def draw(compared: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Accuracy against the direction kept: a column for each cosine, a row for each comparison."""
    figure, axes = plt.subplots(
        len(compared), len(COSINES), figsize=(9.2, 7.6), layout="constrained", sharey="row"
    )
    handles: dict[str, Any] = {}
    for (name, rows), of_row in zip(compared.items(), axes, strict=True):
        for (quantity, heading), axis in zip(COSINES.items(), of_row, strict=True):
            for (method,), of_method in _groups(rows, ("method",)):
                dots = axis.scatter(
                    [run[quantity] for run in of_method],
                    [run["accuracy"] for run in of_method],
                    s=16,
                    alpha=0.7,
                    linewidths=0,
                    color=plotting.style_of(method)["color"],
                )
                handles.setdefault(registry.label(method), dots)
            axis.axhline(0, color="#777777", linewidth=0.8, zorder=0)
            axis.axvline(0, color="#777777", linewidth=0.8, zorder=0)
            axis.set_title(heading, fontsize=10)
            axis.set_xlabel("difference in the direction kept")
        of_row[0].set_ylabel(f"accuracy, points:\n{name}")
    plotting.legend_below(figure, handles)
    figure.suptitle("Is less directional bias more accuracy? One dot a run", fontsize=12)
    plotting.save(figure, path)


def _key(run: Row, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(run[name] for name in names)


def _groups(runs: Sequence[Row], names: Sequence[str]) -> Iterable[tuple[Any, list[Row]]]:
    key = functools.partial(_key, names=names)
    for found, group in itertools.groupby(sorted(runs, key=key), key):
        yield found, list(group)


if __name__ == "__main__":
    console.run(main)
