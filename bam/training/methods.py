"""The names of methods in tables and legends, with their strengths."""

from bam.files import JsonMapping
from bam.part_table import METHODS


def label(name: str) -> str:
    """Returns a method's name in tables and legends.

    A method of the user's keeps its name.
    """
    return METHODS[name].label if name in METHODS else name


def full_label(method: JsonMapping) -> str:
    """Returns a method's name with its strength, from the `method` section of a config.

    Examples:
      >>> full_label({"name": "bam_sam", "radius": 0.02, "mix": 1.0, "ascent_views": 1})
      'BAM (SAM), λ = 0.02, ascent of 1 views'
    """
    text = label(method["name"])
    row = METHODS.get(method["name"])
    if row and row.strength:
        text += f", {row.symbol} = {strength(method):g}"
    if method.get("ascent_views"):
        text += f", ascent of {method['ascent_views']} views"
    if method.get("ascent_params"):
        text += f", ascent on {method['ascent_params']}"
    return text


def strength(method: JsonMapping) -> float:
    """Returns λ of BAM (α·r in the SAM form), ρ of DP-SAT, 0 for methods without a strength."""
    row = METHODS.get(method["name"])
    # To first order, BAM (SAM) with mix α and radius r minimises L + α·r·‖∇L‖.
    return float(method[row.strength]) * method.get("mix", 1.0) if row and row.strength else 0.0


def is_private(name: str) -> bool:
    """Returns whether a method's runs are private.

    All methods are private but "non_private", also those of users.
    """
    return name != "non_private"
