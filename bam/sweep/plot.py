"""Figures of metrics, in one style."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from bam.extras import needs
from bam.files import JsonMapping, JsonObject
from bam.sweep.comparison import Runs
from bam.text import plural
from bam.training.methods import full_label, strength

with needs("plots"):
    import matplotlib
    import matplotlib.colors

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

# The panels of `compare`. ‖bias‖ says little without ‖ĝ‖, the ratio and the cosine.
COMPARED = {
    "test_accuracy": "test accuracy",
    "not_private/bias_norm": "clipping bias ‖ĝ_clip − ĝ‖",
    "not_private/gradient_norm": "gradient ‖ĝ‖",
    "not_private/relative_bias": "relative bias ‖ĝ_clip − ĝ‖ / ‖ĝ‖",
    "not_private/cosine": "direction kept, cos(ĝ_clip, ĝ)",
    "not_private/fraction_clipped": "share of examples clipped",
}
# The colours of Okabe and Ito, each with its line style, so that methods differ in grey and for
# colour-blind readers.
STYLES: dict[str, JsonObject] = {
    "non_private": {"color": "#777777", "linestyle": (0, (1, 1))},
    "dp_sgd": {"color": "#000000", "linestyle": "-"},
    "dp_sat": {"color": "#E69F00", "linestyle": "--"},
    "bam_sam": {"color": "#0072B2", "linestyle": "-."},
    "bam_exact": {"color": "#CC79A7", "linestyle": (0, (5, 1))},
}


class Line(NamedTuple):
    """One line of a panel.

    Lines with the same label must have the same style.
    """

    label: str
    x: Sequence[float]
    mean: Sequence[float]
    spread: Sequence[float] | None  # half the height of the band; None: no band
    style: JsonMapping  # keyword arguments of `Axes.plot`, see `styles`


class Panel(NamedTuple):
    """One chart of a figure.

    Later lines are drawn over earlier ones.
    """

    title: str
    x_label: str
    lines: Sequence[Line]
    log_x: bool = False  # with ticks at the x of the lines, or at every second one
    percent: bool = False  # y values are shares, labelled in %


def style_of(method: str) -> JsonObject:
    """Returns the style of a method's line.

    It is grey for a method that bam does not have.
    """
    return dict(STYLES.get(method, {"color": "#777777", "linestyle": "-"}))


def styles(methods: Sequence[JsonMapping]) -> dict[str, JsonObject]:
    """`full_label` -> line style, for methods in one figure.

    Each method keeps its colour. If it has several strengths, each has its own marker, and the
    stronger are darker.
    """
    looks = {}
    for method in methods:
        label, look = full_label(method), style_of(method["name"])
        strengths = sorted((m for m in methods if m["name"] == method["name"]), key=strength)
        order = list(dict.fromkeys(map(full_label, strengths)))
        if len(order) > 1:
            rank = order.index(label)
            white = 0.6 * (1 - (rank + 1) / len(order))
            color = np.array(matplotlib.colors.to_rgb(look["color"]))
            look["color"] = tuple(float(c) for c in white + (1 - white) * color)
            look |= {"marker": "osD^v<>"[rank % 7], "markersize": 3.5}
        looks[label] = look
    return looks


def panels(
    charts: Sequence[Panel], path: Path, title: str, num_columns: int = 2, share_y: bool = False
) -> None:
    """Draws charts side by side above one legend.

    With `share_y`, all charts have the same y axis. In two columns the text is as large as that of
    the page that shows the picture.
    """
    num_rows = -(-len(charts) // num_columns)
    figure, axes = plt.subplots(
        num_rows,
        min(num_columns, len(charts)),
        figsize=(3.1 * min(num_columns, len(charts)), 2.6 * num_rows + 0.9),
        layout="constrained",
        squeeze=False,
        sharey=share_y,
    )
    handles: JsonObject = {}
    for axis, chart in zip(axes.flat, charts, strict=False):
        for line in chart.lines:
            (handle,) = axis.plot(line.x, line.mean, linewidth=1.8, **line.style)
            handles.setdefault(line.label, handle)
            if line.spread is not None:
                low, high = np.subtract(line.mean, line.spread), np.add(line.mean, line.spread)
                axis.fill_between(
                    line.x, low, high, color=line.style["color"], alpha=0.13, linewidth=0
                )
        if any(min(line.mean) < 0 for line in chart.lines):
            axis.axhline(0, color="#777777", linewidth=0.8, zorder=0)
        if chart.log_x:
            marks = sorted({x for line in chart.lines for x in line.x})
            log_axis(axis, marks[:: 2 if len(marks) > 5 else 1])
        if chart.percent:
            axis.yaxis.set_major_formatter(PercentFormatter(xmax=1))
        axis.set_xlabel(chart.x_label)
        axis.set_title(chart.title, fontsize=10)
    for axis in list(axes.flat)[len(charts) :]:
        axis.set_axis_off()
    legend_below(figure, handles)
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def over_seeds(
    seeds: Sequence[Sequence[JsonMapping]], quantity: str
) -> tuple[list[int], np.ndarray]:
    """A quantity over training: the steps `[n]` at which all seeds have it, values `[seeds, n]`."""
    series = [{r["step"]: r[quantity] for r in rows if quantity in r} for rows in seeds]
    steps = sorted(set(series[0]).intersection(*series[1:])) if series else []
    return steps, np.array([[one[step] for step in steps] for one in series], dtype=float)


def mean_line(label: str, x: Sequence[float], values: np.ndarray, style: JsonMapping) -> Line:
    """The mean ± SD over seeds as a line, from positions `[n]` and values `[seeds, n]`."""
    spread = values.std(axis=0, ddof=1).tolist() if len(values) > 1 else None
    return Line(label, x, values.mean(axis=0).tolist(), spread, style)


def compare(rows: Sequence[JsonMapping], runs: Runs, path: Path) -> None:
    """Draws the quantities of `COMPARED` over training, mean ± SD over seeds, into the PNG `path`.

    `rows` are the rows of a study; each must have another method or strength.
    """
    looks, charts = styles([row["method"] for row in rows]), []
    for quantity, heading in COMPARED.items():
        lines = []
        for row in rows:
            label = full_label(row["method"])
            steps, values = over_seeds([r.rows for r in runs[row["label"]].values()], quantity)
            if steps:
                lines.append(mean_line(label, steps, values, looks[label]))
        if lines:
            charts.append(Panel(heading, "step", lines, percent=quantity == "test_accuracy"))
    seeds = seeds_in_words(max(len(row["seeds"]) for row in rows), " (mean ± SD)", "")
    panels(charts, path, f"{rows[0]['dataset']}, {seeds}")


def seeds_in_words(num: int, spread: str, no_spread: str = ", no intervals") -> str:
    """Returns a number of seeds for a title, with the spread that only several have.

    Examples:
      >>> [seeds_in_words(num, ", 95 % confidence intervals") for num in (1, 3)]
      ['1 seed, no intervals', '3 seeds, 95 % confidence intervals']
    """
    return plural(num, "seed") + (spread if num > 1 else no_spread)


def error_bars(
    axis: Axes,
    x: Sequence[float],
    mean: Sequence[float],
    spread: ArrayLike,
    label: str,
    style: JsonMapping,
) -> None:
    """Draws points with error bars, joined by a line, on a Matplotlib axis.

    `spread` holds half of each bar's length, or two rows: the lengths below and above the points. A
    None in it draws no bar, because a single run has no interval. Without any bar, the legend has
    none either.
    """
    bars = np.array(spread, dtype=float)  # None becomes NaN, which Matplotlib leaves out
    look: JsonObject = {"linewidth": 1.8, "marker": "o", "markersize": 4, **style}
    yerr = None if np.isnan(bars).all() else bars
    axis.errorbar(x, mean, yerr=yerr, label=label, capsize=3, **look)


def log_axis(axis: Axes, marks: Iterable[float]) -> None:
    """Makes the x axis logarithmic, with ticks at `marks` alone."""
    marks = sorted(marks)
    axis.set_xscale("log")
    axis.set_xticks(marks, [f"{x:g}" for x in marks])
    axis.minorticks_off()


def legend_below(figure: Figure, handles: JsonMapping) -> None:
    """Puts a legend, label -> Matplotlib handle, below a figure, in as many columns as fit."""
    if handles:
        characters = 11 * figure.get_figwidth()  # about 11 fit into an inch
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
