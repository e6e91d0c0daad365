"""Line charts as SVG inside of a page, in the page's own colours: no file, no script."""

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 480, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 26, 10, 42


class Line(NamedTuple):
    """One line of a chart."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


def chart(
    title: str, x_label: str, lines: Sequence[Line], percent: bool = False, log_x: bool = False
) -> str:
    """A `<figure>` of up to four lines, from 0 up; `percent`: y are shares, shown in %."""
    xs, ys = ([v for line in lines for v in getattr(line, axis)] for axis in "xy")
    y_ticks = _ticks(min(0.0, *ys), max(0.0, *ys))
    x_ticks = [0.001, 0.01, 0.1, 1.0] if log_x else _ticks(min(xs), max(xs))
    left, right = (x_ticks[0], x_ticks[-1]) if log_x else (min(xs), max(xs))
    scale = math.log10 if log_x else float

    def across(x: float) -> float:
        width = scale(right) - scale(left) or 1.0
        return LEFT + (WIDTH - LEFT - RIGHT) * (scale(x) - scale(left)) / width

    def down(y: float) -> float:
        share = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    def value(number: float, share: bool) -> str:
        return f"{100 * number:.4g} %" if share else f"{number:.4g}"

    drawn = []
    for y in y_ticks:
        drawn.append(f'<path class="grid" d="M{LEFT} {down(y):.1f}H{WIDTH - RIGHT}"/>')
        drawn.append(_text(LEFT - 7, down(y) + 4, value(y, percent), "end"))
    for x in x_ticks:
        if left <= x <= right:
            drawn.append(_text(across(x), HEIGHT - BOTTOM + 18, value(x, log_x), "middle"))
    drawn.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, x_label, "middle"))
    for i, line in enumerate(lines):
        points = [(across(x), down(y)) for x, y in zip(line.x, line.y, strict=True)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        drawn.append(f'<path class="line c{i}" d="M{path}"/>')
        if len(points) < 16 and i == 0:
            drawn += [f'<circle class="c{i}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points]
    said = "; ".join(
        f"{line.label}: from {value(line.y[0], percent)} at {value(line.x[0], log_x)} to "
        f"{value(line.y[-1], percent)} at {value(line.x[-1], log_x)}"
        for line in lines
    )
    keys = "".join(
        f'<li><svg viewBox="0 0 30 8" aria-hidden="true"><path class="line c{i}" d="M1 4H29"/>'
        f"</svg>{html.escape(line.label)}</li>"
        for i, line in enumerate(lines)
        if len(lines) > 1
    )
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(f"{title}, by {x_label}. {said}")}">'
        f'{"".join(drawn)}</svg><ul class="keys">{keys}</ul></figure>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, two to seven of them, the first at most `low` and the last at least `high`."""
    span = high - low or 1.0
    power = 10.0 ** math.floor(math.log10(span / 5))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= span / 5 * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * i for i in range(first, max(last, first + 1) + 1)]
