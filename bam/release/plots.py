"""Line charts as SVG inside of a page, in the page's own colours: no file, no script."""

import functools
import io
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from bam.extras import MissingExtraError, needs

MISSING = ""  # why nothing can be drawn
try:
    with needs("plots"):
        import matplotlib.style
        from matplotlib.figure import Figure
except MissingExtraError as error:
    MISSING = str(error)

WIDTH, HEIGHT = 360, 240
# Colours of the page's style sheet, where each has another value on a dark screen.
COLORS = {
    "c0": "#0072b2", "c1": "#b85c00", "c2": "#8a8f94", "c3": "#a2477f",
    "soft": "#626a72", "rule": "#dcdfe2",
}  # fmt: skip
_DASHES = ("-", (0, (3.5, 2)), (0, (1, 1.5)), (0, (4, 1.5, 1, 1.5)))
_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "bam", "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11.5, "text.color": COLORS["soft"], "axes.labelcolor": COLORS["soft"],
    "xtick.color": COLORS["soft"], "ytick.color": COLORS["soft"], "figure.facecolor": "none",
    "axes.facecolor": "none", "axes.xmargin": 0, "axes.ymargin": 0,
    "axes.autolimit_mode": "round_numbers",
}  # fmt: skip


class Line(NamedTuple):
    """One line of a chart."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


class Chart(NamedTuple):
    """Up to four lines, with 0 in sight; `percent`: y are shares, shown in %; `log_x`: x are too.

    Examples:
      >>> Chart("Accuracy", "step", [Line("test accuracy", [0, 10], [0.1, 0.875])], True).words
      'Accuracy, by step. test accuracy: from 10 % at 0 to 87.5 % at 10'
    """

    title: str
    x_label: str
    lines: Sequence[Line]
    percent: bool = False
    log_x: bool = False

    @property
    def words(self) -> str:
        """What is said of the chart to whoever does not see it."""
        ends = (
            f"{line.label}: from {_value(line.y[0], self.percent)} at "
            f"{_value(line.x[0], self.log_x)} to {_value(line.y[-1], self.percent)} at "
            f"{_value(line.x[-1], self.log_x)}"
            for line in self.lines
        )
        return f"{self.title}, by {self.x_label}. {'; '.join(ends)}"


def svg(chart: Chart) -> str:
    """What is inside of a chart's `<svg viewBox="0 0 WIDTH HEIGHT">`; needs Matplotlib."""
    with matplotlib.style.context(["default", _STYLE]):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), layout="constrained")
        axes = figure.subplots()
        for i, line in enumerate(chart.lines):
            look: Any = {"color": COLORS[f"c{i}"], "clip_on": False}
            axes.plot(line.x, line.y, label=line.label, linewidth=2, linestyle=_DASHES[i], **look)
            end = [line.x[-1]] * 2, [line.y[-1]] * 2  # a dot, also where it is the only point
            axes.plot(*end, linewidth=5, solid_capstyle="round", **look)
        axes.axhline(0, color=COLORS["rule"], linewidth=1, zorder=0, clip_on=False)
        if chart.log_x:
            axes.set_xscale("log")
        for axis, share in ((axes.xaxis, chart.log_x), (axes.yaxis, chart.percent)):
            axis.set_major_formatter(functools.partial(_shown, share=share))
        axes.tick_params(which="both", left=False, bottom=False)
        axes.grid(axis="y", color=COLORS["rule"], linewidth=1, clip_on=False)
        axes.set_axisbelow(True)
        axes.spines[:].set_visible(False)
        axes.set_xlabel(chart.x_label)
        if len(chart.lines) > 1:
            figure.legend(loc="outside lower center", ncols=2, frameon=False, handlelength=3)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    # A page has several: without the head, with its own style, and names that all would share.
    drawn = written.getvalue().partition('<g id="figure_1">')[2].rpartition("</g>")[0]
    drawn = re.sub(r' id="[^"]*"|font-family: [^;]*; ', "", drawn)
    drawn = re.sub(r"(\d\.\d)\d+", r"\1", drawn)  # a tenth of a point is enough
    for name, color in COLORS.items():
        drawn = drawn.replace(color, f"var(--{name})")
    return drawn


def _shown(number: float, position: int | None, share: bool) -> str:
    return _value(number, share)


def _value(number: float, share: bool) -> str:
    return f"{100 * number:.4g} %" if share else f"{number:.4g}"
