"""Accuracy against ε of private logistic regression: clipping gradients against clipping inputs.

python -m scripts.paper.logistic --out=docs/results/logistic
"""

import statistics
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from sklearn.linear_model import LogisticRegression

from bam import plotting, report, train
from bam.data import datasets
from configs import logistic
from scripts.lib import cli

_OUT = flags.DEFINE_string("out", "", "path without extension: .json, .md and .png are written")
_EPSILONS = flags.DEFINE_list("epsilons", "0.1,0.2,0.5,1,2,5,10", "privacy budgets")
_NUM_SEEDS = flags.DEFINE_integer("seeds_each", 20, "runs per budget and clipping", lower_bound=2)


def main() -> None:
    """Runs every budget and clipping with every seed, then writes table and figure."""
    with cli.one_line_errors():
        if not _OUT.value:
            raise ValueError("--out is required: where the table and the figure go")
        epsilons = [float(e) for e in _EPSILONS.value]
        experiments = {
            (clipping, epsilon): _build(clipping, epsilon)
            for clipping in ("gradients", "inputs")
            for epsilon in epsilons
        }
    cli.use_compilation_cache()
    rows: list[dict[str, Any]] = []
    for (clipping, epsilon), experiment in experiments.items():
        summaries = [train.train(experiment, s).summary for s in range(_NUM_SEEDS.value)]
        accuracies = [s["test_accuracy"] for s in summaries]
        rows.append(
            {
                "clipping": clipping,
                "target_epsilon": epsilon,
                "epsilon": experiment.plan.epsilon,
                "delta": experiment.plan.delta,
                "noise_multiplier": experiment.plan.noise_multiplier,
                "clip_norm": experiment.plan.clip_norm,
                "num_steps": experiment.plan.num_steps,
                "num_seeds": len(summaries),
                "test_accuracy_mean": statistics.fmean(accuracies),
                "test_accuracy_sd": statistics.stdev(accuracies),
                "device": summaries[0]["device"],
            }
        )
        print(_line(rows[-1]), flush=True)
    ceiling = non_private_accuracy()
    print(f"scikit-learn, not private: {ceiling:.1%}")
    out = Path(_OUT.value)
    out.parent.mkdir(parents=True, exist_ok=True)
    report.write_json(out.with_suffix(".json"), {"non_private_sklearn": ceiling, "rows": rows})
    out.with_suffix(".md").write_text(markdown(rows, ceiling), encoding="utf-8")
    plotting.accuracy_against_epsilon(rows, ceiling, out.with_suffix(".png"))


def non_private_accuracy() -> float:
    """Test accuracy of scikit-learn's logistic regression on the same normalised features."""
    dataset = datasets.load("breast_cancer")
    train_inputs, test_inputs = (
        np.asarray(datasets.normalize(dataset, split.images)).reshape(len(split.labels), -1)
        for split in (dataset.train, dataset.test)
    )
    fit = LogisticRegression(max_iter=10_000).fit(train_inputs, dataset.train.labels)
    return float(fit.score(test_inputs, dataset.test.labels))


def markdown(rows: list[dict[str, Any]], ceiling: float) -> str:
    """A table with a row per budget and a column per clipping."""
    cells = {(r["clipping"], r["target_epsilon"]): r for r in rows}
    lines = ["| ε | clip gradients, % | clip inputs, % |", "|---:|---:|---:|"]
    for epsilon in sorted({r["target_epsilon"] for r in rows}):
        both = (_accuracy(cells[clipping, epsilon]) for clipping in ("gradients", "inputs"))
        lines.append(f"| {epsilon:g} | " + " | ".join(both) + " |")
    lines.append(f"| not private (scikit-learn) | {100 * ceiling:.1f} | {100 * ceiling:.1f} |")
    return "\n".join(lines) + "\n"


def _build(clipping: str, epsilon: float) -> train.Experiment:
    config = logistic.get_config(f"dp_sgd,{clipping}")
    config.epsilon = epsilon
    config.eval.every = 0
    return train.build(config)


def _accuracy(row: dict[str, Any]) -> str:
    return f"{100 * row['test_accuracy_mean']:.1f} ± {100 * row['test_accuracy_sd']:.1f}"


def _line(row: dict[str, Any]) -> str:
    return (
        f"clip {row['clipping']:<9}  ε {row['target_epsilon']:<4g}  "
        f"σ {row['noise_multiplier']:.3f}  accuracy {_accuracy(row)} %"
    )


if __name__ == "__main__":
    cli.run(main)
