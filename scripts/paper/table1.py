"""Table 1 of arXiv 2308.12018: its numbers, and ours beside them."""

from collections.abc import Mapping
from typing import Any

from bam.cli import stats, tables
from bam.training import registry

# data -> ε -> method -> test accuracy in %: mean and SD of 3 seeds (ImageNet32: one run).
# The paper has one column for BAM; its runs use the SAM approximation.
PAPER: dict[str, dict[float, dict[str, tuple[float, float | None]]]] = {
    "cifar10": {
        1.0: {"dp_sgd": (60.9, 0.49), "dp_sat": (60.9, 0.62), "bam_sam": (61.4, 0.48)},
        2.0: {"dp_sgd": (67.1, 0.10), "dp_sat": (67.2, 0.30), "bam_sam": (68.2, 0.27)},
        10.0: {"dp_sgd": (78.6, 0.08), "dp_sat": (78.1, 0.69), "bam_sam": (79.7, 0.13)},
    },
    "cifar100": {
        1.0: {"dp_sgd": (18.1, 0.10), "dp_sat": (18.2, 0.13), "bam_sam": (18.5, 0.04)},
        2.0: {"dp_sgd": (24.9, 0.46), "dp_sat": (24.9, 0.35), "bam_sam": (25.4, 0.40)},
        10.0: {"dp_sgd": (40.3, 0.21), "dp_sat": (40.1, 0.19), "bam_sam": (40.8, 0.06)},
    },
    "imagenet32": {
        10.0: {"dp_sgd": (14.97, None), "dp_sat": (14.70, None), "bam_sam": (20.67, None)}
    },
}

COLUMNS: tables.Columns = {
    "data": lambda row: row["config"],
    "ε": lambda row: f"{row['epsilon']:g}",
    "method": lambda row: registry.label(row["method"]),
    "paper": lambda row: (
        tables.number(row["paper_accuracy"], ".2f")
        if row["paper_sd"] is None
        else f"{row['paper_accuracy']:.1f} ± {row['paper_sd']:.2f}"
    ),
    "gain": lambda row: tables.number(row["paper_difference"], "+.1f"),
    "seeds": lambda row: str(len(row["seeds"])),
    "ours": lambda row: tables.interval(row["accuracy"], ".2f"),
    **tables.gain("difference", lambda row: row["method"] == "dp_sgd"),
}
LEFT = ("method",)
CAPTION = (
    "Test accuracy in %: the paper's ± SD of 3 seeds, ours ± 95 % confidence interval; "
    "gain over DP-SGD in points, ours paired by seed; p of a paired t-test, and the smallest gain "
    "that so many seeds find with a power of 80 %, were the spread this one."
)


def row(
    config_name: str,
    dataset: str,
    epsilon: float,
    method: str,
    accuracies: Mapping[int, float],
    baseline: Mapping[int, float],
) -> dict[str, Any]:
    """One cell of the table, as `table1.json` keeps it.

    The accuracies are seed -> % of the finished runs, `baseline` those of DP-SGD. The number beside
    them is the paper's of the config's data set; it has none of methods that are not its own.
    """
    paper = PAPER.get(dataset, {}).get(epsilon, {})
    mean, sd = paper.get(method, (None, None))
    gain = method != "dp_sgd"
    accuracy = stats.estimate(list(accuracies.values()))
    difference = stats.paired_difference(accuracies, baseline) if gain else None
    return {
        "config": config_name,
        "dataset": dataset,
        "epsilon": epsilon,
        "method": method,
        "paper_accuracy": mean,
        "paper_sd": sd,
        "paper_difference": round(mean - paper["dp_sgd"][0], 2) if mean and gain else None,
        "accuracy": accuracy and accuracy._asdict(),
        "difference": difference and difference._asdict(),
        "seeds": sorted(accuracies),
        "accuracies": [accuracies[seed] for seed in sorted(accuracies)],
    }
