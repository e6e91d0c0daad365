"""Line charts as SVG inside of a page: no file, no script."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bam.extras import MissingExtraError, needs
from bam.files import JsonObject, literal

MISSING = ""  # why nothing can be drawn
try:
    with needs("plots"):
        from matplotlib import style
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
except MissingExtraError as error:
    MISSING = str(error)


NUMBER, SHARE = "{x:.4g}", "{x:.1%}"


class Chart(NamedTuple):
    """Lines over x, with 0 in sight, whose numbers are shown in such forms.

    Examples:
      >>> Chart("Right", "step", {"on the test": ([0, 10], [0.1, 0.875])}, SHARE).words
      'Right, by step. on the test: from 10.0% at 0 to 87.5% at 10'
    """

    title: str
    x_label: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]  # label -> x, y
    form: str = NUMBER
    x_form: str = NUMBER  # shares are on an axis of logarithms

    @property
    def words(self) -> str:
        """What is said of the chart to whoever does not see it."""
        at = f"{self.form} at {self.x_form.replace('x', 'at')}".format
        ends = (
            f"{label}: from {at(x=y[0], at=x[0])} to {at(x=y[-1], at=x[-1])}"
            for label, (x, y) in self.lines.items()
        )
        return f"{self.title}, by {self.x_label}. {'; '.join(ends)}"


def _short(form: str) -> Any:
    """How an axis shows its numbers: as the form does, but 100% and not 100.0%."""
    return (lambda x, at: f"{100 * x:.4g}%") if form == SHARE else form


def svg(chart: Chart) -> str:
    """The chart as one `<svg>` element; needs Matplotlib."""
    with style.context(["default", {"svg.fonttype": "none", "svg.hashsalt": "bam"}]):
        figure = Figure(figsize=(5, 3.3), layout="constrained")
        axes = figure.subplots()
        for (label, (x, y)), dashes in zip(chart.lines.items(), ("-", "--", ":"), strict=False):
            (line,) = axes.plot(x, y, dashes, label=literal(label), clip_on=False)
            end: JsonObject = {"linewidth": 5, "solid_capstyle": "round", "color": line.get_color()}
            axes.plot([x[-1]] * 2, [y[-1]] * 2, clip_on=False, **end)  # also the only point
        axes.set(xlabel=literal(chart.x_label), xscale="log" if chart.x_form == SHARE else "linear")
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        if chart.x_form != SHARE:
            whole: JsonObject = {"integer": True, "min_n_ticks": 1}  # no step is 1.25
            axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], **whole))
        axes.xaxis.set_major_formatter(_short(chart.x_form))
        axes.yaxis.set_major_formatter(_short(chart.form))
        axes.tick_params(which="both", left=False, bottom=False)  # they would have names
        axes.legend()
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    # A page has several: without the head, and the names that all would share.
    picture = re.sub(r' (id|clip-path|xmlns:\w+)="[^"]*"', "", written.getvalue())
    others = r"<metadata>.*?</metadata>|<style.*?</style>|.*<!DOCTYPE[^>]*>"
    picture = re.sub(others, "", picture, flags=re.DOTALL)
    # Places to two digits: enough to draw, and too few to be taken for a figure of the run.
    short = lambda number: f"{float(number[0]):.2f}"  # noqa: E731
    return re.sub(r'(?<=[ "(])\d+\.\d{3,}', short, picture).strip()
