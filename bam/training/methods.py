"""The table of methods, and what tables and legends call them."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from bam.core import oracles
from bam.files import JsonMapping


class Method(NamedTuple):
    """A row of the table of methods: all that is known of a method.

    Attributes:
      make: `(loss_fn, **options) -> Oracle`.
      label: its name in tables and legends.
      options: what it reads of a config's `method` section, with the defaults.
      strength: the option that says how far it ascends; "" for a method that does not.
      symbol: the letter of that.
    """

    make: Callable[..., oracles.Oracle]
    label: str
    options: Mapping[str, int | float | str] = {}
    strength: str = ""
    symbol: str = ""

    @property
    def public_options(self) -> tuple[str, ...]:
        """Those that a release repeats: all."""
        return tuple(self.options)


# BAM's direction, made cheaper: from so many of the views (0: all), and moving only parameters
# whose path matches a regular expression ("": all), for example "GroupNorm".
ASCENT: dict[str, int | float | str] = {"ascent_views": 0, "ascent_params": ""}

METHODS = {
    "non_private": Method(oracles.dp_sgd, "non-private"),
    "dp_sgd": Method(oracles.dp_sgd, "DP-SGD"),
    "dp_sat": Method(
        oracles.dp_sat, "DP-SAT", options={"radius": 0.05}, strength="radius", symbol="ρ"
    ),
    "bam_sam": Method(
        oracles.bam_sam,
        "BAM (SAM)",
        options={"radius": 0.05, "mix": 1.0, **ASCENT},
        strength="radius",
        symbol="λ",
    ),
    "bam_exact": Method(
        oracles.bam_exact,
        "BAM (exact)",
        options={"penalty": 0.05, **ASCENT},
        strength="penalty",
        symbol="λ",
    ),
}


def label(name: str) -> str:
    """A method's name in tables and legends; a method of one's own keeps its name."""
    return METHODS[name].label if name in METHODS else name


def full_label(method: JsonMapping) -> str:
    """A method's name with its strength, from the `method` section of a config.

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
    """λ of BAM (α·r in the SAM form), ρ of DP-SAT, 0 for methods that have none."""
    row = METHODS.get(method["name"])
    return float(method[row.strength]) * method.get("mix", 1.0) if row and row.strength else 0.0


def is_private(name: str) -> bool:
    """Whether a method asks for privacy; `build` plans a run for it that has it, or refuses."""
    return name != "non_private"
