"""Line charts as SVG elements of a page, without files or scripts."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bam.extras import MissingExtraError, needs
from bam.files import JsonObject
from bam.text import literal

MISSING = ""  # the error, if Matplotlib is missing
try:
    with needs("plots"):
        from matplotlib import style
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
except MissingExtraError as error:
    MISSING = str(error)


NUMBER, SHARE = "{x:.4g}", "{x:.1%}"


class Chart(NamedTuple):
    """Lines over x.

    The y axis includes 0. `form` and `x_form` are the formats of the numbers on the axes.

    Examples:
      >>> Chart("Right", "step", {"on the test": ([0, 10], [0.1, 0.875])}, SHARE).words
      'Right, by step. on the test: from 10.0% at 0 to 87.5% at 10'
    """

    title: str
    x_label: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]  # label -> x, y
    form: str = NUMBER
    x_form: str = NUMBER  # for `SHARE` the axis is logarithmic

    @property
    def words(self) -> str:
        """The chart in words, for readers who cannot see it."""
        at = f"{self.form} at {self.x_form.replace('x', 'at')}".format
        ends = (
            f"{label}: from {at(x=y[0], at=x[0])} to {at(x=y[-1], at=x[-1])}"
            for label, (x, y) in self.lines.items()
        )
        return f"{self.title}, by {self.x_label}. {'; '.join(ends)}"


def _short(form: str) -> Any:
    """The format of an axis: `form`, but 100% and not 100.0%."""
    return (lambda x, at: f"{100 * x:.4g}%") if form == SHARE else form


def svg(chart: Chart) -> str:
    """Returns the chart as one `<svg>` element.

    It needs Matplotlib.
    """
    with style.context(["default", {"svg.fonttype": "none", "svg.hashsalt": "bam"}]):
        figure = Figure(figsize=(5, 3.3), layout="constrained")
        axes = figure.subplots()
        for (label, (x, y)), dashes in zip(chart.lines.items(), ("-", "--", ":"), strict=False):
            (line,) = axes.plot(x, y, dashes, label=literal(label), clip_on=False)
            end: JsonObject = {"linewidth": 5, "solid_capstyle": "round", "color": line.get_color()}
            # The end as a dot, which also shows a line of one point.
            axes.plot([x[-1]] * 2, [y[-1]] * 2, clip_on=False, **end)
        axes.set(xlabel=literal(chart.x_label), xscale="log" if chart.x_form == SHARE else "linear")
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        if chart.x_form != SHARE:
            integers: JsonObject = {"integer": True, "min_n_ticks": 1}  # a step is never 1.25
            axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], **integers))
        axes.xaxis.set_major_formatter(_short(chart.x_form))
        axes.yaxis.set_major_formatter(_short(chart.form))
        # Without tick marks: in SVG they refer to ids, which are removed below.
        axes.tick_params(which="both", left=False, bottom=False)
        if len(chart.lines) > 1:  # above the axes, where it covers no curve
            figure.legend(loc="outside upper center", ncols=2, frameon=False)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    # Without ids and the head: a page has several charts, whose equal ids would clash.
    picture = re.sub(r' (id|clip-path|xmlns:\w+)="[^"]*"', "", written.getvalue())
    head = r"<metadata>.*?</metadata>|<style.*?</style>|.*<!DOCTYPE[^>]*>"
    picture = re.sub(head, "", picture, flags=re.DOTALL)
    # Positions with two decimals are enough to draw, and cannot be read as a number of the run.
    short = lambda number: f"{float(number[0]):.2f}"  # noqa: E731
    return re.sub(r'(?<=[ "(])\d+\.\d{3,}', short, picture).strip()
