"""Figures from metrics, in one style."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import PercentFormatter

LABELS = {
    "non_private": "non-private",
    "dp_sgd": "DP-SGD",
    "dp_sat": "DP-SAT",
    "bam_sam": "BAM (SAM)",
    "bam_exact": "BAM (exact)",
    "bam_reverse": "BAM (reverse-over-reverse)",
}
# Okabe-Ito colours, with a line style each: told apart in grey and by colour-blind readers.
STYLES: dict[str, dict[str, Any]] = {
    "non_private": {"color": "#777777", "linestyle": (0, (1, 1))},
    "dp_sgd": {"color": "#000000", "linestyle": "-"},
    "dp_sat": {"color": "#E69F00", "linestyle": "--"},
    "bam_sam": {"color": "#0072B2", "linestyle": "-."},
    "bam_exact": {"color": "#CC79A7", "linestyle": (0, (5, 1))},
    "bam_reverse": {"color": "#009E73", "linestyle": ":"},
}
PANELS = {
    "test_accuracy": "test accuracy",
    "not_private/bias_norm": "clipping bias ‖ĝ_clip − ĝ‖",
    "not_private/relative_bias": "relative bias ‖ĝ_clip − ĝ‖ / ‖ĝ‖",
}


def compare_methods(
    runs: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], path: Path, title: str
) -> None:
    """Draws accuracy, bias and relative bias over training, one line per method.

    Args:
      runs: method name -> one list of metrics rows per seed.
      path: PNG (or SVG) file to write.
      title: heading of the figure.
    """
    figure, axes = plt.subplots(1, len(PANELS), figsize=(12.5, 4.2), layout="constrained")
    for axis, (quantity, label) in zip(axes, PANELS.items(), strict=True):
        for method, seeds in runs.items():
            steps, values = _by_seed(seeds, quantity)
            if len(steps) == 0:
                continue
            mean, spread = values.mean(axis=0), values.std(axis=0)
            style = STYLES.get(method, {})
            axis.plot(steps, mean, label=LABELS.get(method, method), linewidth=1.8, **style)
            band_color = style.get("color")
            axis.fill_between(
                steps, mean - spread, mean + spread, color=band_color, alpha=0.12, linewidth=0
            )
        axis.set_xlabel("step")
        if quantity == "test_accuracy":
            axis.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
        axis.set_title(label, fontsize=11)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(title, fontsize=12)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def accuracy_against_epsilon(rows: Sequence[Mapping[str, Any]], ceiling: float, path: Path) -> None:
    """Draws test accuracy, mean ± SD over seeds, against ε, one line per kind of clipping.

    Args:
      rows: with `clipping`, `target_epsilon`, `test_accuracy_mean`, `test_accuracy_sd`.
      ceiling: accuracy of the non-private fit, drawn as a line above.
      path: PNG or SVG file to write.
    """
    figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    styles = {"gradients": STYLES["dp_sgd"], "inputs": STYLES["bam_sam"]}
    for clipping, style in styles.items():
        chosen = [row for row in rows if row["clipping"] == clipping]
        axis.errorbar(
            [row["target_epsilon"] for row in chosen],
            [row["test_accuracy_mean"] for row in chosen],
            yerr=[row["test_accuracy_sd"] for row in chosen],
            label=f"clip {clipping}",
            marker="o",
            markersize=4,
            capsize=3,
            linewidth=1.8,
            **style,
        )
    axis.axhline(ceiling, label="scikit-learn, not private", **STYLES["non_private"])
    axis.set_xscale("log")
    axis.set_xlabel("ε")
    axis.set_title("Logistic regression on breast cancer: test accuracy", fontsize=11)
    axis.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def accuracy_and_gain(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draws accuracy and the seed-paired gain over DP-SGD against ε, with 95 % intervals.

    Args:
      rows: of one data set, as `scripts/table1.py` makes them; those not run are left out.
      path: PNG or SVG file to write.
      title: heading of the figure.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 4.0), layout="constrained")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for axis, quantity in ((left, "accuracy"), (right, "difference")):
        for number, method in enumerate(methods):
            chosen = [row for row in rows if row["method"] == method and row[quantity]]
            if not chosen:
                continue
            sidestep = 1 + 0.04 * (number - (len(methods) - 1) / 2)  # intervals do not hide others
            axis.errorbar(
                [row["epsilon"] * sidestep for row in chosen],
                [row[quantity]["mean"] for row in chosen],
                yerr=[_or_nan(row[quantity]["half_width"]) for row in chosen],
                label=LABELS.get(method, method),
                marker="o",
                markersize=4,
                capsize=3,
                linewidth=1.8,
                **STYLES.get(method, {}),
            )
        axis.set_xscale("log")
        epsilons = sorted({row["epsilon"] for row in rows})
        axis.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
        axis.minorticks_off()
        axis.set_xlabel("ε")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    left.set_title("test accuracy, %", fontsize=11)
    right.set_title("gain over DP-SGD, points, paired by seed", fontsize=11)
    right.axhline(0, color=STYLES["dp_sgd"]["color"], linewidth=1)
    handles, labels = left.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=len(handles), frameon=False
        )
    figure.suptitle(title, fontsize=12)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def time_against_depth(rows: Sequence[Mapping[str, Any]], path: Path, device: str) -> None:
    """Draws step time and compile time against depth, one line per method.

    Args:
      rows: with `depth`, `method`, `median`, `low`, `high` and `compile_seconds`.
      path: PNG or SVG file to write.
      device: named in the heading.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.2), layout="constrained")
    for method in dict.fromkeys(row["method"] for row in rows):
        chosen = [row for row in rows if row["method"] == method]
        depths = [row["depth"] for row in chosen]
        middle = np.array([row["median"] for row in chosen])
        ends = np.array([[row["low"] for row in chosen], [row["high"] for row in chosen]])
        style = {"linewidth": 1.8, "marker": "o", "markersize": 3.5, **STYLES[method]}
        left.errorbar(
            depths,
            1e3 * middle,
            yerr=1e3 * np.abs(ends - middle),
            capsize=3,
            label=LABELS[method],
            **style,
        )
        right.plot(depths, [row["compile_seconds"] for row in chosen], **style)
    left.set_title("step, ms (median and quartiles)", fontsize=11)
    right.set_title("compilation, s", fontsize=11)
    for axis in (left, right):
        axis.set_xlabel("layers")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"Time against depth, {device}", fontsize=12)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def contact_sheet(images: np.ndarray, path: Path, title: str) -> None:
    """Draws a grid of small images, one row per example.

    Args:
      images: `[rows, columns, height, width, channels]` uint8, 1 or 3 channels.
      path: PNG or SVG file to write.
      title: heading of the figure.
    """
    num_rows, num_columns, _, _, channels = images.shape
    figure, axes = plt.subplots(
        num_rows,
        num_columns,
        figsize=(0.7 * num_columns + 0.3, 0.72 * num_rows + 0.5),
        squeeze=False,
        layout="constrained",
    )
    for row in range(num_rows):
        for column in range(num_columns):
            axis = axes[row, column]
            image = images[row, column]
            axis.imshow(image[..., 0] if channels == 1 else image, cmap="gray", vmin=0, vmax=255)
            axis.set_axis_off()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _or_nan(half_width: float | None) -> float:
    """One run has no interval: no bar is drawn, rather than one of length zero."""
    return math.nan if half_width is None else half_width


def _by_seed(seeds: Sequence[Sequence[Mapping[str, Any]]], quantity: str) -> Any:
    """Steps `[n]` and values `[seeds, n]` of one quantity, over the steps that have it."""
    series = [[(r["step"], r[quantity]) for r in rows if quantity in r] for rows in seeds]
    steps = np.array([step for step, _ in series[0]])
    return steps, np.array([[value for _, value in one] for one in series])
