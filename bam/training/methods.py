"""The table of methods, and their names in tables and legends."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from bam.core import oracles
from bam.files import JsonMapping


class Method(NamedTuple):
    """A row of the table of methods.

    Attributes:
      make: `(loss_fn, **options) -> Oracle`.
      label: its name in tables and legends.
      options: its keys in a config's `method` section, with their defaults.
      strength: the option that is the strength of its ascent; "" for a method without one.
      symbol: the letter of the strength.
    """

    make: Callable[..., oracles.Method]
    label: str
    options: Mapping[str, int | float | str] = {}
    strength: str = ""
    symbol: str = ""

    @property
    def public_options(self) -> tuple[str, ...]:
        """The options that a release repeats: all."""
        return tuple(self.options)


# These make BAM's ascent cheaper. Its gradient is over the first `ascent_views` views (0: all), and
# it moves the parameters whose path matches `ascent_params` ("": all), for example "GroupNorm".
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
    """A method's name in tables and legends; a method of the user's keeps its name."""
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
    """λ of BAM (α·r in the SAM form), ρ of DP-SAT, 0 for methods without a strength."""
    row = METHODS.get(method["name"])
    # To first order, BAM (SAM) with mix α and radius r minimises L + α·r·‖∇L‖.
    return float(method[row.strength]) * method.get("mix", 1.0) if row and row.strength else 0.0


def is_private(name: str) -> bool:
    """Whether a method's runs are private: all but "non_private", and users' methods too."""
    return name != "non_private"
