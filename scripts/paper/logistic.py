"""Private logistic regression, accuracy against ε: clipped gradients and clipped inputs compared.

python -m scripts.paper.logistic --workdir=runs/logistic --out=docs/results/logistic
"""

from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from ml_collections import ConfigDict
from sklearn.linear_model import LogisticRegression

from bam import waits
from bam.cli import command, screen
from bam.data import datasets
from bam.sweep import plot
from bam.sweep.comparison import Study
from bam.sweep.plot import plt
from scripts.lib import many_runs

_OUT = flags.DEFINE_string("out", "", "path without extension: .json, .md and .png are written")
_EPSILONS = flags.DEFINE_list("epsilons", "0.1,0.2,0.5,1,2,5,10", "privacy budgets")

# Clipped quantity -> the method whose line style draws it.
CLIPPINGS = {"gradients": "dp_sgd", "inputs": "bam_sam"}


def main() -> None:
    """Trains every budget and clipping, then writes table and figure."""
    groups = {
        f"{clipping} ε={epsilon}": _config(clipping, float(epsilon))
        for epsilon in _EPSILONS.value
        for clipping in CLIPPINGS
    }
    study = Study(
        groups,
        lambda label: f"gradients {label.split(' ')[1]}",
        fields=lambda label, _: {"target_epsilon": groups[label].epsilon},
    )
    rows, _ = many_runs.carry_out(study, Path(_OUT.value))
    with waits.awaited(screen.show, "fitting scikit-learn and drawing"):
        draw(rows, non_private_accuracy(), Path(f"{_OUT.value}.png"))
    screen.say(f"picture: {_OUT.value}.png")


def non_private_accuracy() -> float:
    """Test accuracy, in %, of scikit-learn's logistic regression on the same features."""
    dataset = datasets.load("breast_cancer")
    train_inputs, test_inputs = (
        np.asarray(datasets.normalize(dataset, split.images)).reshape(len(split.labels), -1)
        for split in (dataset.train, dataset.test)
    )
    fit = LogisticRegression(max_iter=10_000).fit(train_inputs, dataset.train.labels)
    return 100 * float(fit.score(test_inputs, dataset.test.labels))


def draw(rows: list[dict[str, Any]], ceiling: float, path: Path) -> None:
    """Draws test accuracy with its 95 % intervals against ε, one line per kind of clipping."""
    figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for clipping, method in CLIPPINGS.items():
        chosen = [row for row in rows if row["label"].startswith(clipping)]
        plot.error_bars(
            axis,
            [row["target_epsilon"] for row in chosen],
            [row["accuracy"]["mean"] for row in chosen],
            [row["accuracy"]["half_width"] for row in chosen],
            f"clip {clipping}",
            plot.style_of(method),
        )
    style = plot.style_of("non_private")
    axis.axhline(ceiling, label=f"scikit-learn, not private: {ceiling:.1f} %", **style)
    plot.log_axis(axis, {row["target_epsilon"] for row in rows})
    axis.set_xlabel("ε")
    axis.set_title("Logistic regression on breast cancer: test accuracy, %", fontsize=11)
    axis.legend(frameon=False)
    plot.save(figure, path)


def _config(clipping: str, epsilon: float) -> ConfigDict:
    config = many_runs.method_config(f"dp_sgd,{clipping}", {"epsilon"})
    config.epsilon = epsilon
    config.eval.every = config.checkpoint.every = 0
    return config


if __name__ == "__main__":
    command.run_script(main, ["workdir", "out"], ["--config=configs/logistic.py", "--num_seeds=20"])
