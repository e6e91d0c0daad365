"""How a method's bias compares with DP-SGD's: ratios, their factors, and intervals."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bam import files
from bam.cli import tables
from bam.files import JsonMapping, JsonObject
from bam.sweep.comparison import paired_difference
from bam.training import registry

# ‖bias‖ is never shown without the quantities that say what it is made of.
BIAS = {
    "bias_norm": "clipping bias ‖ĝ_clip − ĝ‖",
    "gradient_norm": "gradient ‖ĝ‖",
    "relative_bias": "relative bias ‖ĝ_clip − ĝ‖ / ‖ĝ‖",
    "cosine": "direction kept, cos(ĝ_clip, ĝ)",
}
# ‖bias‖ = ‖ĝ‖ × relative bias, so the first ratio is the product of the next two.
RATIOS = {"bias_norm": "‖bias‖ ×", "gradient_norm": "= ‖ĝ‖ ×", "relative_bias": "· relative ×"}
DIFFERENCES = {"cosine": "cos(ĝ_clip, ĝ)", "test_accuracy": "accuracy, points"}
# How they are shown: factor and format.
FORMS = {"test_accuracy": (100, "+.2f"), "cosine": (1, "+.3f")}
BASELINE = registry.label("dp_sgd")

# Method -> quantity -> one value per seed; a missing quantity is left out.
Measured = Mapping[str, Mapping[str, Sequence[float]]]


def write(path: Path, measured: Measured) -> None:
    """Writes every method against DP-SGD, as CSV and as a table for documents, if it is there."""
    if BASELINE in measured:
        effects = rows(measured)
        tables.write_csv(path.with_suffix(".csv"), effects)
        files.write_text(path.with_suffix(".md"), markdown(effects))


def rows(measured: Measured) -> list[JsonObject]:
    """Every method against DP-SGD, paired by seed.

    Returns a row per method and quantity: its mean, and the ratio or difference with the ends of
    its 95 % confidence interval (None with one seed); ratios are compared by their logarithms.
    """
    effects = []
    for method, quantities in measured.items():
        for quantity, values in quantities.items():
            scale, back = (math.log, math.exp) if quantity in RATIOS else (float, float)
            ours, theirs = (
                dict(enumerate(map(scale, measured[name][quantity]))) for name in (method, BASELINE)
            )
            effect = paired_difference(ours, theirs)
            assert effect is not None
            half_width = effect.half_width
            low, high = (
                None if half_width is None else back(effect.mean + sign * half_width)
                for sign in (-1, 1)
            )
            row = {"method": method, "quantity": quantity, "mean": float(np.mean(values))}
            row |= {"effect": back(effect.mean), "low": low, "high": high, "seeds": effect.num}
            effects.append(row)
    return effects


def markdown(effects: Sequence[JsonMapping]) -> str:
    """The rows as a table, a line per method, with intervals in brackets."""
    by_cell = {(row["method"], row["quantity"]): row for row in effects}
    headings = {q: h for q, h in (RATIOS | DIFFERENCES).items() if (BASELINE, q) in by_cell}
    lines = [
        [
            method,
            f"{by_cell[method, 'bias_norm']['mean']:.3f}",
            *("–" if method == BASELINE else _cell(by_cell[method, q]) for q in headings),
        ]
        for method in dict.fromkeys(row["method"] for row in effects)
    ]
    return tables.markdown(tables.text("method", "‖bias‖", *headings.values()), lines)


def _cell(row: JsonMapping) -> str:
    factor, form = FORMS.get(row["quantity"], (1, ".3f"))
    text = format(factor * row["effect"], form)
    if row["low"] is not None:
        text += f" [{format(factor * row['low'], form)}, {format(factor * row['high'], form)}]"
    return text
