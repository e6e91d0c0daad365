"""Figures from metrics, in one style."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from bam.extras import needs
from bam.files import JsonMapping, JsonObject
from bam.sweep import comparison
from bam.training import registry

with needs("plots"):
    import matplotlib
    import matplotlib.colors

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
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


class Line(NamedTuple):
    """One line of a panel; lines of one label have one style."""

    label: str
    x: Sequence[float]
    mean: Sequence[float]
    spread: Sequence[float] | None  # half the height of the band around it; None for no band
    style: JsonMapping  # colour, line style and so on, see `styles`


class Panel(NamedTuple):
    """One chart of a figure, its lines from below to above."""

    title: str
    x_label: str
    lines: Sequence[Line]
    log_x: bool = False  # marked at the lines' positions
    percent: bool = False  # values are shares, shown in %


def style_of(method: str) -> JsonObject:
    """How a method's line is drawn; a method of one's own is a grey one."""
    known = registry.METHODS.get(method)
    return dict(known.style) if known else {"color": "#777777", "linestyle": "-"}


def styles(methods: Sequence[JsonMapping]) -> dict[str, JsonObject]:
    """Line styles of methods that are drawn together, by `registry.full_label`.

    A method has its colour; of several strengths the stronger are darker, each with a marker.
    """
    found = {}
    for method in methods:
        same = {
            registry.full_label(m): registry.strength(m)
            for m in methods
            if m["name"] == method["name"]
        }
        chosen = style_of(method["name"])
        if len(same) > 1:
            rank = sorted(same, key=lambda name: same[name]).index(registry.full_label(method))
            white = 0.6 * (1 - (rank + 1) / len(same))
            color = np.array(matplotlib.colors.to_rgb(chosen["color"]))
            chosen["color"] = tuple(float(c) for c in white + (1 - white) * color)
            chosen |= {"marker": "osD^v<>"[rank % 7], "markersize": 3.5}
        found[registry.full_label(method)] = chosen
    return found


def panels(
    charts: Sequence[Panel], path: Path, title: str, num_columns: int = 3, share_y: bool = False
) -> None:
    """Draws charts side by side under one legend; `share_y` for quantities to compare across."""
    num_rows = -(-len(charts) // num_columns)
    figure, axes = plt.subplots(
        num_rows,
        min(num_columns, len(charts)),
        figsize=(4.2 * min(num_columns, len(charts)), 3.5 * num_rows + 0.7),
        layout="constrained",
        squeeze=False,
        sharey=share_y,
    )
    handles: JsonObject = {}
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
            log_axis(axis, {x for line in chart.lines for x in line.x})
        if chart.percent:
            axis.yaxis.set_major_formatter(PercentFormatter(xmax=1))
        axis.set_xlabel(chart.x_label)
        axis.set_title(chart.title, fontsize=11)
    for axis in list(axes.flat)[len(charts) :]:
        axis.set_axis_off()
    legend_below(figure, handles)
    figure.suptitle(title, fontsize=12)
    save(figure, path)


def over_seeds(
    seeds: Sequence[Sequence[JsonMapping]], quantity: str
) -> tuple[list[int], np.ndarray]:
    """A quantity over training: steps `[n]` where all seeds' rows have it, values `[seeds, n]`."""
    series = [{r["step"]: r[quantity] for r in rows if quantity in r} for rows in seeds]
    steps = sorted(set(series[0]).intersection(*series[1:])) if series else []
    return steps, np.array([[one[step] for step in steps] for one in series], dtype=float)


def mean_line(label: str, x: Sequence[float], values: np.ndarray, style: JsonMapping) -> Line:
    """A line of the mean ± SD over seeds: positions `[n]` and values `[seeds, n]`."""
    estimates = [comparison.estimate(at_x) for at_x in values.T.tolist()]
    means = [found.mean if found else np.nan for found in estimates]
    spread = [found.sd or 0.0 for found in estimates if found] if len(values) > 1 else None
    return Line(label, x, means, spread, style)


def compare_runs(
    runs: Mapping[str, Sequence[Sequence[JsonMapping]]],
    methods: Sequence[JsonMapping],
    path: Path,
    title: str,
) -> None:
    """Draws accuracy, bias and what belongs beside it over training, mean ± SD over seeds.

    `runs` has one list of metrics rows per seed, by the labels of `methods`, sections of configs.
    """
    charts, style = [], styles(methods)
    for quantity, heading in COMPARED.items():
        lines = []
        for name, seeds in runs.items():
            steps, values = over_seeds(seeds, quantity)
            if steps:
                lines.append(mean_line(name, steps, values, style[name]))
        charts.append(Panel(heading, "step", lines, percent=quantity == "test_accuracy"))
    panels(charts, path, title)


def error_bars(
    axis: Axes,
    x: Sequence[float],
    mean: Sequence[float],
    spread: ArrayLike,
    label: str,
    style: JsonMapping,
) -> None:
    """Draws points with bars on a Matplotlib axis, joined by a line.

    `spread` is half the bars' lengths, or two rows of what is below and above; None in it (a single
    run has no interval) is no bar, rather than one of length zero.
    """
    bars = np.array(spread, dtype=float)
    look: JsonObject = {"linewidth": 1.8, "marker": "o", "markersize": 4, **style}
    axis.errorbar(x, mean, yerr=bars, label=label, capsize=3, **look)


def log_axis(axis: Axes, marks: Iterable[float]) -> None:
    """Makes the x axis logarithmic, marked at these positions."""
    marks = sorted(marks)
    axis.set_xscale("log")
    axis.set_xticks(marks, [f"{x:g}" for x in marks])
    axis.minorticks_off()


def legend_below(figure: Figure, handles: JsonMapping) -> None:
    """Puts one legend, label -> what it stands for, under a figure, in as many columns as fit."""
    if handles:
        characters = 11 * figure.get_figwidth()  # that fit side by side
        figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower center",
            ncols=max(1, int(characters / (max(map(len, handles)) + 7))),
            frameon=False,
        )


def save(figure: Figure, path: Path) -> None:
    """Writes a Matplotlib figure as PNG in the common style, and closes it."""
    for axis in figure.axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
