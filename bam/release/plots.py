"""Line charts as SVG inside of a page, in the page's own colours: no file, no script."""

import io
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bam.extras import MissingExtraError, needs
from bam.files import JsonObject

MISSING = ""  # why nothing can be drawn
try:
    with needs("plots"):
        from matplotlib import style
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
        across, up = (_form(share) for share in (self.log_x, self.percent))
        ends = (
            f"{line.label}: from {up(line.y[0])} at {across(line.x[0])} "
            f"to {up(line.y[-1])} at {across(line.x[-1])}"
            for line in self.lines
        )
        return f"{self.title}, by {self.x_label}. {'; '.join(ends)}"


def svg(chart: Chart) -> str:
    """What is inside of a chart's `<svg viewBox="0 0 WIDTH HEIGHT">`; needs Matplotlib."""
    with style.context(["default", _STYLE]):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), layout="constrained")
        axes = figure.subplots()
        for i, line in enumerate(chart.lines):
            look: JsonObject = {"color": COLORS[f"c{i}"], "clip_on": False}
            axes.plot(line.x, line.y, label=line.label, linewidth=2, linestyle=_DASHES[i], **look)
            end = [line.x[-1]] * 2, [line.y[-1]] * 2  # a dot, also where it is the only point
            axes.plot(*end, linewidth=5, solid_capstyle="round", **look)
        axes.axhline(0, color=COLORS["rule"], linewidth=1, zorder=0, clip_on=False)
        if chart.log_x:
            axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_form(chart.log_x))
        axes.yaxis.set_major_formatter(_form(chart.percent))
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
    # Places to two digits: enough to draw, and too few to be taken for a figure of the run.
    drawn = re.sub(r'(?<=[ "(])\d+\.\d{3,}', lambda number: f"{float(number[0]):.2f}", drawn)
    for name, color in COLORS.items():
        drawn = drawn.replace(color, f"var(--{name})")
    return drawn


def _form(share: bool) -> Callable[..., str]:
    """How numbers of an axis are shown; Matplotlib also gives the place among its labels."""
    if share:
        return lambda number, _=None: f"{100 * number:.4g} %"
    return lambda number, _=None: f"{number:.4g}"
