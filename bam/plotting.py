"""Figures from metrics, in one style."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bam import parts
from bam.extras import needs

with needs("plots"):
    import matplotlib
    import matplotlib.colors

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import PercentFormatter

# What a comparison of runs shows: ‖bias‖ never without the panels that say what it is made of.
COMPARED = {
    "test_accuracy": "test accuracy",
    "not_private/bias_norm": "clipping bias ‖ĝ_clip − ĝ‖",
    "not_private/gradient_norm": "gradient ‖ĝ‖",
    "not_private/relative_bias": "relative bias ‖ĝ_clip − ĝ‖ / ‖ĝ‖",
    "not_private/cosine": "direction kept, cos(ĝ_clip, ĝ)",
    "not_private/fraction_clipped": "share of examples clipped",
}
# Pictures that do not change when they are drawn again.
matplotlib.rcParams["svg.hashsalt"] = "bam"
SVG_METADATA = {"Date": None}


class Line(NamedTuple):
    """One line of a panel, with a band of ± `spread` around it.

    Attributes:
      label: in the legend; lines of one label have one style.
      x: positions.
      mean: values.
      spread: half the band's height; None for no band.
      style: colour, line style and so on; see `styles`.
    """

    label: str
    x: Sequence[float]
    mean: Sequence[float]
    spread: Sequence[float] | None
    style: Mapping[str, Any]


class Panel(NamedTuple):
    """One chart of a figure.

    Attributes:
      title: what is drawn.
      x_label: what the x axis is.
      lines: from below to above.
      log_x: a logarithmic x axis, marked at the lines' positions.
      percent: values are shares, shown in %.
    """

    title: str
    x_label: str
    lines: Sequence[Line]
    log_x: bool = False
    percent: bool = False


def style_of(method: str) -> dict[str, Any]:
    """How a method's line is drawn; a method of one's own is a grey one."""
    known = parts.METHODS.get(method)
    return dict(known.style) if known else {"color": "#777777", "linestyle": "-"}


def styles(methods: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Line styles of methods that are drawn together, by `parts.full_label`.

    A method has its colour; of several strengths the stronger are darker, each with a marker.

    Args:
      methods: `method` sections of configs.

    Returns:
      Label -> keyword arguments for Matplotlib's lines.
    """
    found = {}
    for method in methods:
        same = {
            parts.full_label(m): parts.strength(m) for m in methods if m["name"] == method["name"]
        }
        chosen = style_of(method["name"])
        if len(same) > 1:
            rank = sorted(same, key=lambda name: same[name]).index(parts.full_label(method))
            white = 0.6 * (1 - (rank + 1) / len(same))
            color = np.array(matplotlib.colors.to_rgb(chosen["color"]))
            chosen["color"] = tuple(float(c) for c in white + (1 - white) * color)
            chosen |= {"marker": "osD^v<>"[rank % 7], "markersize": 3.5}
        found[parts.full_label(method)] = chosen
    return found


def panels(
    charts: Sequence[Panel],
    path: Path,
    title: str,
    num_columns: int = 3,
    share_y: bool = False,
) -> None:
    """Draws charts side by side under one legend.

    Args:
      charts: at least one.
      path: PNG or SVG file to write.
      title: heading of the figure.
      num_columns: charts per row.
      share_y: one y axis for all, for quantities that are compared across charts.
    """
    num_rows = -(-len(charts) // num_columns)
    figure, axes = plt.subplots(
        num_rows,
        min(num_columns, len(charts)),
        figsize=(4.2 * min(num_columns, len(charts)), 3.5 * num_rows + 0.7),
        layout="constrained",
        squeeze=False,
        sharey=share_y,
    )
    handles: dict[str, Any] = {}
    for axis, chart in zip(axes.flat, charts, strict=False):
        for line in chart.lines:
            drawn = axis.plot(line.x, line.mean, linewidth=1.8, **line.style)
            handles.setdefault(line.label, drawn[0])
            if line.spread is not None:
                low, high = np.subtract(line.mean, line.spread), np.add(line.mean, line.spread)
                axis.fill_between(
                    line.x, low, high, color=line.style["color"], alpha=0.13, linewidth=0
                )
        if any(min(line.mean) < 0 for line in chart.lines):
            axis.axhline(0, color="#777777", linewidth=0.8, zorder=0)
        if chart.log_x:
            axis.set_xscale("log")
            marks = sorted({x for line in chart.lines for x in line.x})
            axis.set_xticks(marks, [f"{x:g}" for x in marks])
            axis.minorticks_off()
        if chart.percent:
            axis.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
        axis.set_xlabel(chart.x_label)
        axis.set_title(chart.title, fontsize=11)
        _tidy(axis)
    for axis in list(axes.flat)[len(charts) :]:
        axis.set_axis_off()
    if handles:
        characters = 13 * figure.get_figwidth()  # that fit side by side
        figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower center",
            ncols=max(1, int(characters / (max(map(len, handles)) + 7))),
            frameon=False,
        )
    figure.suptitle(title, fontsize=12)
    _save(figure, path)


def over_seeds(
    seeds: Sequence[Sequence[Mapping[str, Any]]], quantity: str
) -> tuple[list[int], np.ndarray]:
    """One quantity over training, of the steps at which every seed has it.

    Args:
      seeds: metrics rows of one run per seed.
      quantity: a key of the rows.

    Returns:
      Steps `[n]` and values `[seeds, n]`.
    """
    series = [{r["step"]: r[quantity] for r in rows if quantity in r} for rows in seeds]
    steps = sorted(set(series[0]).intersection(*series[1:])) if series else []
    return steps, np.array([[one[step] for step in steps] for one in series], dtype=float)


def compare_runs(
    runs: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
    methods: Sequence[Mapping[str, Any]],
    path: Path,
    title: str,
) -> None:
    """Draws accuracy, bias and what belongs beside it over training, mean ± SD over seeds.

    Args:
      runs: label -> one list of metrics rows per seed.
      methods: `method` sections of the runs' configs, whose labels the runs' are.
      path: PNG or SVG file to write.
      title: heading of the figure.
    """
    charts, style = [], styles(methods)
    for quantity, heading in COMPARED.items():
        lines = []
        for name, seeds in runs.items():
            steps, values = over_seeds(seeds, quantity)
            if steps:
                spread = values.std(axis=0) if len(seeds) > 1 else None
                lines.append(Line(name, steps, values.mean(axis=0), spread, style[name]))
        charts.append(Panel(heading, "step", lines, percent=quantity == "test_accuracy"))
    panels(charts, path, title)


def accuracy_against_epsilon(rows: Sequence[Mapping[str, Any]], ceiling: float, path: Path) -> None:
    """Draws test accuracy, mean ± SD over seeds, against ε, one line per kind of clipping.

    Args:
      rows: with `clipping`, `target_epsilon`, `test_accuracy_mean`, `test_accuracy_sd`.
      ceiling: accuracy of the non-private fit, drawn as a line above.
      path: PNG or SVG file to write.
    """
    figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    styles = {"gradients": style_of("dp_sgd"), "inputs": style_of("bam_sam")}
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
    axis.axhline(ceiling, label="scikit-learn, not private", **style_of("non_private"))
    axis.set_xscale("log")
    axis.set_xlabel("ε")
    axis.set_title("Logistic regression on breast cancer: test accuracy", fontsize=11)
    axis.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    _tidy(axis)
    axis.legend(frameon=False)
    _save(figure, path)


def accuracy_and_gain(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draws accuracy and the seed-paired gain over DP-SGD against ε, with 95 % intervals.

    Args:
      rows: of one data set, as `scripts/paper/table1.py` makes them; those not run are left out.
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
                label=parts.label(method),
                marker="o",
                markersize=4,
                capsize=3,
                linewidth=1.8,
                **style_of(method),
            )
        axis.set_xscale("log")
        epsilons = sorted({row["epsilon"] for row in rows})
        axis.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
        axis.minorticks_off()
        axis.set_xlabel("ε")
        _tidy(axis)
    left.set_title("test accuracy, %", fontsize=11)
    right.set_title("gain over DP-SGD, points, paired by seed", fontsize=11)
    right.axhline(0, color=style_of("dp_sgd")["color"], linewidth=1)
    handles, labels = left.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=len(handles), frameon=False
        )
    figure.suptitle(title, fontsize=12)
    _save(figure, path)


def time_against_depth(
    rows: Sequence[Mapping[str, Any]],
    methods: Mapping[str, parts.Method],
    path: Path,
    device: str,
) -> None:
    """Draws step time and compile time against depth, one line per method.

    Args:
      rows: with `depth`, `method`, `median`, `low`, `high` and `compile_seconds`.
      methods: name -> label and style.
      path: PNG or SVG file to write.
      device: named in the heading.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.2), layout="constrained")
    for method in dict.fromkeys(row["method"] for row in rows):
        chosen = [row for row in rows if row["method"] == method]
        depths = [row["depth"] for row in chosen]
        middle = np.array([row["median"] for row in chosen])
        ends = np.array([[row["low"] for row in chosen], [row["high"] for row in chosen]])
        style = {"linewidth": 1.8, "marker": "o", "markersize": 3.5, **methods[method].style}
        left.errorbar(
            depths,
            1e3 * middle,
            yerr=1e3 * np.abs(ends - middle),
            capsize=3,
            label=methods[method].label,
            **style,
        )
        right.plot(depths, [row["compile_seconds"] for row in chosen], **style)
    left.set_title("step, ms (median and quartiles)", fontsize=11)
    right.set_title("compilation, s", fontsize=11)
    for axis in (left, right):
        axis.set_xlabel("layers")
        axis.set_ylim(bottom=0)
        _tidy(axis)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"Time against depth, {device}", fontsize=12)
    _save(figure, path)


def decomposition(
    gradients: np.ndarray,
    clip_norm: float,
    arrows: Mapping[str, np.ndarray],
    path: Path,
    title: str,
) -> None:
    """Draws two-dimensional gradients, their clipping, and Theorem 1's decomposition of the mean.

    Args:
      gradients: `[n, 2]`, per example.
      clip_norm: C.
      arrows: "ĝ", "ĝ_clip = a·ĝ + c", "a·ĝ" and "c", each `[2]`; c starts where a·ĝ ends.
      path: PNG or SVG file to write.
      title: heading of the figure.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.9), layout="constrained")
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    clipped = gradients / np.maximum(1, norms / clip_norm)
    grey, blue = style_of("non_private")["color"], style_of("bam_sam")["color"]
    for g, c in zip(gradients, clipped, strict=True):
        left.plot([c[0], g[0]], [c[1], g[1]], color=grey, linewidth=1, linestyle=(0, (2, 2)))
        left.plot([0, c[0]], [0, c[1]], color=blue, linewidth=1, alpha=0.5)
    left.scatter(*gradients.T, s=16, color=grey, label="gradient g_i", zorder=3)
    left.scatter(*clipped.T, s=16, color=blue, label="clipped", zorder=3)
    left.add_patch(plt.Circle((0, 0), clip_norm, fill=False, label=f"norm C = {clip_norm:g}"))
    left.set_title("a batch", fontsize=11)
    colors = dict(zip(arrows, ("#000000", blue, "#E69F00", "#CC79A7"), strict=True))
    starts = {"c": arrows["a·ĝ"]}
    for (name, arrow), width in zip(arrows.items(), (5, 5, 10, 5), strict=True):
        right.quiver(
            *starts.get(name, np.zeros(2)), *arrow, color=colors[name], label=name, angles="xy",
            scale_units="xy", scale=1, width=width / 800, zorder=2 if width == 10 else 3,
        )  # fmt: skip
    ends = np.array([np.zeros(2), arrows["ĝ"], arrows["ĝ_clip = a·ĝ + c"]])
    right.scatter(*ends.T, s=0)  # arrows alone do not widen the axes
    right.margins(0.15)
    right.set_title("its mean, clipped: shorter (a) and turned (c)", fontsize=11)
    for axis in (left, right):
        axis.set_aspect("equal", adjustable="datalim")
        axis.legend(frameon=False, fontsize=9, loc="best")
        axis.set_xlabel("first parameter")
        _tidy(axis)
    left.set_ylabel("second parameter")
    figure.suptitle(title, fontsize=12)
    _save(figure, path)


def descents(
    grid: np.ndarray,
    losses: np.ndarray,
    paths: Mapping[str, np.ndarray],
    clouds: Mapping[str, np.ndarray],
    clip_norm: float,
    path: Path,
) -> None:
    """Draws paths of two-dimensional weights over a loss, and the gradients where each one ends.

    Args:
      grid: `[rows, columns, 2]`, weights.
      losses: `[rows, columns]`, the mean loss there.
      paths: name -> `[steps, 2]`, weights; at most three names.
      clouds: name -> `[n, 2]`, every example's gradient at the end of the path.
      clip_norm: C, drawn as a circle.
      path: PNG or SVG file to write.
    """
    figure, axes = plt.subplots(1, 1 + len(paths), figsize=(12.5, 3.9), layout="constrained")
    left, *right = axes
    left.contour(grid[..., 0], grid[..., 1], losses, 18, colors="#999999", linewidths=0.6)
    styles = [style_of(key) for key in ("non_private", "dp_sgd", "bam_sam")]
    limit = 1.1 * max(np.abs(cloud).max() for cloud in clouds.values())
    for axis, (name, steps), style in zip(right, paths.items(), styles, strict=True):
        color = style["color"]
        left.plot(*steps.T, color=color, linewidth=1.8, label=name)
        left.scatter(*steps[-1], s=42, color=color, zorder=3)
        axis.scatter(*clouds[name].T, s=14, color=color)
        axis.add_patch(plt.Circle((0, 0), clip_norm, fill=False, linewidth=1))
        share = np.mean(np.linalg.norm(clouds[name], axis=1) > clip_norm)
        axis.set_title(f"{name}: gradients at its end,\n{share:.0%} longer than C", fontsize=10)
        axis.set(xlim=(-limit, limit), ylim=(-limit, limit), xlabel="first parameter")
        axis.set_aspect("equal")
    left.set_title("weights, from one start,\nover the loss", fontsize=10)
    left.set_aspect("equal", adjustable="box")
    left.set(xlabel="first parameter", ylabel="second parameter")
    left.legend(fontsize=8, loc="upper left")
    right[0].set_ylabel("second parameter")
    for axis in axes:
        _tidy(axis)
    _save(figure, path)


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


def _tidy(axis: Any) -> None:
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, path: Path) -> None:
    metadata = SVG_METADATA if path.suffix == ".svg" else None
    figure.savefig(path, dpi=150, metadata=metadata)
    plt.close(figure)
