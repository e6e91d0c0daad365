"""Accuracy against ε of private logistic regression: clipping gradients against clipping inputs.

python -m scripts.paper.logistic --workdir=runs/logistic --out=docs/results/logistic
"""

from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from sklearn.linear_model import LogisticRegression

from bam import files
from bam.cli import console, plotting, stats, sweeps, tables
from bam.cli.plotting import PercentFormatter, plt
from bam.data import datasets

_OUT = flags.DEFINE_string("out", "", "path without extension: .json, .md and .png are written")
_EPSILONS = flags.DEFINE_list("epsilons", "0.1,0.2,0.5,1,2,5,10", "privacy budgets")
flags.adopt_module_key_flags(sweeps)
console.require("workdir", "out")

# What is clipped -> the method whose line it is drawn with.
CLIPPINGS = {"gradients": "dp_sgd", "inputs": "bam_sam"}
COLUMNS = tables.text("ε", "clip gradients, %", "clip inputs, %")
FACTS = ("epsilon", "delta", "noise_multiplier", "clip_norm", "num_steps")


def main() -> None:
    """Runs what is missing of every budget and clipping, then writes table and figure."""
    with console.one_line_errors():
        groups = {
            (clipping, float(epsilon)): _runs(clipping, float(epsilon))
            for clipping in CLIPPINGS
            for epsilon in _EPSILONS.value
        }
        rows = [_row(*key, runs) for key, runs in sweeps.run_missing(groups).items() if runs]
        if not rows:
            return
        ceiling = non_private_accuracy()
        out = Path(_OUT.value)
        out.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(out.with_suffix(".json"), {"non_private_sklearn": ceiling, "rows": rows})
        draw(rows, ceiling, out.with_suffix(".png"))
    tables.show(COLUMNS, as_cells(rows, ceiling), keep=out.with_suffix(".md"))


def non_private_accuracy() -> float:
    """Test accuracy of scikit-learn's logistic regression on the same normalised features."""
    dataset = datasets.load("breast_cancer")
    train_inputs, test_inputs = (
        np.asarray(datasets.normalize(dataset, split.images)).reshape(len(split.labels), -1)
        for split in (dataset.train, dataset.test)
    )
    fit = LogisticRegression(max_iter=10_000).fit(train_inputs, dataset.train.labels)
    return float(fit.score(test_inputs, dataset.test.labels))


def as_cells(rows: list[dict[str, Any]], ceiling: float) -> list[list[str]]:
    """A row per budget and a column per clipping, and what is possible without privacy."""
    accuracies = {
        (row["clipping"], row["target_epsilon"]): tables.percent(
            row["test_accuracy_mean"], row["test_accuracy_sd"]
        )
        for row in rows
    }
    lines = [
        [f"{epsilon:g}", *(accuracies.get((kind, epsilon), "not run") for kind in CLIPPINGS)]
        for epsilon in sorted({row["target_epsilon"] for row in rows})
    ]
    return [*lines, ["not private (scikit-learn)", *2 * [f"{100 * ceiling:.1f}"]]]


def draw(rows: list[dict[str, Any]], ceiling: float, path: Path) -> None:
    """Draws test accuracy, mean ± SD over seeds, against ε, one line per kind of clipping."""
    figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for clipping, method in CLIPPINGS.items():
        chosen = [row for row in rows if row["clipping"] == clipping]
        plotting.error_bars(
            axis,
            [row["target_epsilon"] for row in chosen],
            [row["test_accuracy_mean"] for row in chosen],
            [row["test_accuracy_sd"] for row in chosen],
            f"clip {clipping}",
            plotting.style_of(method),
        )
    axis.axhline(ceiling, label="scikit-learn, not private", **plotting.style_of("non_private"))
    plotting.log_axis(axis, {row["target_epsilon"] for row in rows})
    axis.set_xlabel("ε")
    axis.set_title("Logistic regression on breast cancer: test accuracy", fontsize=11)
    axis.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axis.legend(frameon=False)
    plotting.save(figure, path)


def _runs(clipping: str, epsilon: float) -> sweeps.Cells:
    config = sweeps.method_config(f"dp_sgd,{clipping}", {"epsilon"})
    config.epsilon = epsilon
    config.eval.every = config.checkpoint.every = 0
    return sweeps.of_seeds(f"{clipping}/epsilon{epsilon:g}", config)


def _row(clipping: str, epsilon: float, runs: dict[int, sweeps.Run]) -> dict[str, Any]:
    first = next(iter(runs.values())).summary
    accuracy = stats.estimate([run.summary["test_accuracy"] for run in runs.values()])
    assert accuracy is not None
    return {
        "clipping": clipping,
        "target_epsilon": epsilon,
        **{key: first[key] for key in FACTS},
        "num_seeds": accuracy.num,
        "test_accuracy_mean": accuracy.mean,
        "test_accuracy_sd": accuracy.sd,
        "device": first["device"],
    }


if __name__ == "__main__":
    console.run(main, ["--config=configs/logistic.py", "--num_seeds=20"])
