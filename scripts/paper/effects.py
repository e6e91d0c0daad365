"""How a method's bias compares with DP-SGD's: ratios, their factors, and intervals."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bam.cli import tables
from bam.sweep import comparison

# ‖bias‖ is never shown without the quantities that say what it is made of.
BIAS_PANELS = {
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


def rows(
    measured: Mapping[str, Mapping[str, Sequence[float]]], baseline: str
) -> list[dict[str, Any]]:
    """Every method against the baseline, paired by seed.

    `measured` is method -> quantity -> one value per seed; a missing quantity is left out. Returns
    a row per method and quantity: its mean, and the ratio or difference with the ends of its 95 %
    confidence interval (None with one seed); ratios are compared by their logarithms.
    """
    found = []
    for method, quantities in measured.items():
        for quantity, values in quantities.items():
            scale, back = (math.log, math.exp) if quantity in RATIOS else (float, float)
            ours, theirs = (
                {seed: scale(value) for seed, value in enumerate(measured[name][quantity])}
                for name in (method, baseline)
            )
            effect = comparison.paired_difference(ours, theirs)
            assert effect is not None
            known, half_width = effect.half_width is not None, effect.half_width or 0.0
            found.append(
                {
                    "method": method,
                    "quantity": quantity,
                    "mean": float(np.mean(values)),
                    "effect": back(effect.mean),
                    "low": back(effect.mean - half_width) if known else None,
                    "high": back(effect.mean + half_width) if known else None,
                    "seeds": effect.num,
                }
            )
    return found


def markdown(found: Sequence[Mapping[str, Any]], baseline: str) -> str:
    """The rows as a table, a line per method, with intervals in brackets."""
    by_cell = {(row["method"], row["quantity"]): row for row in found}
    headings = RATIOS | DIFFERENCES
    quantities = [q for q in headings if any(row["quantity"] == q for row in found)]
    lines = [
        [
            method,
            f"{by_cell[method, 'bias_norm']['mean']:.3f}",
            *("–" if method == baseline else _cell(by_cell[method, q]) for q in quantities),
        ]
        for method in dict.fromkeys(row["method"] for row in found)
    ]
    columns = tables.text("method", "‖bias‖", *(headings[q] for q in quantities))
    return tables.markdown(columns, lines)


def _cell(row: Mapping[str, Any]) -> str:
    factor, form = FORMS.get(row["quantity"], (1, ".3f"))
    text = format(factor * row["effect"], form)
    if row["low"] is not None:
        text += f" [{format(factor * row['low'], form)}, {format(factor * row['high'], form)}]"
    return text
