"""Public options that turn files into pixels and numbers into labels, for data and releases."""

import math
from typing import Any, NamedTuple

import numpy as np

from bam.data.common import DataError

BACKGROUNDS = ("white", "black")
SIDES = range(4, 4097)  # possible heights and widths


class Target(NamedTuple):
    """The units of a label: for a number y in the files, a network learns (y - offset) / scale."""

    offset: float = 0.0
    scale: float = 1.0

    def to_label(self, number: float) -> float:
        """Returns the label for a number in the files."""
        return (number - self.offset) / self.scale

    def in_units(self, labels: np.ndarray) -> np.ndarray:
        """Labels or outputs in the units of the files, as float64."""
        # In float32, an offset far above the scale would hide differences between labels.
        return labels.astype(np.float64) * self.scale + self.offset

    def digits(self, least: int) -> int:
        """The number of digits to print for `least` digits of the scale beside the offset."""
        ratio = min(1e15, abs(self.offset) / self.scale)  # above it float64 has no digits left
        return min(17, least + math.ceil(math.log10(1 + ratio)))


class Preprocessing(NamedTuple):
    """Options that turn files into pixels and numbers into labels, as a release repeats them.

    Attributes:
      size: height and width in pixels; an image is resized to cover them, and its middle is used.
      channels: 1 (grey) or 3 (colour).
      window: the numbers that become black and white, for files with more than 8 bits; None for the
        range that the format declares.
      background: the colour behind transparent pixels, of `BACKGROUNDS`.
      target: offset and scale of a `Target`; None if numbers are learned unchanged.
    """

    size: tuple[int, int]
    channels: int
    window: tuple[float, float] | None = None
    background: str = "white"
    target: tuple[float, float] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        return (*self.size, self.channels)

    def as_json(self) -> dict[str, Any]:
        """Returns the record that `from_json` reads.

        A target of None, new to older versions, is left out.
        """
        fields = {k: x for k, x in self._asdict().items() if k != "target" or x is not None}
        return {k: list(x) if isinstance(x, tuple) else x for k, x in fields.items()}

    @classmethod
    def from_json(cls, value: Any) -> "Preprocessing":
        """Returns the options in a record of `as_json`.

        DataError for any other value.
        """
        try:
            fields: Any = {k: tuple(x) if isinstance(x, list) else x for k, x in value.items()}
            (record := cls(**fields)).check()
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"preprocessing {value!r:.200}: {error}") from error
        return record

    def check(self) -> None:
        """DataError for an impossible size, number of channels, window, background or target."""
        if len(self.size) != 2 or not all(type(x) is int and x in SIDES for x in self.size):
            raise DataError(f"size {self.size} must be a height and a width from 4 to {SIDES[-1]}")
        if type(self.channels) is not int or self.channels not in (1, 3):
            raise DataError(f"channels must be 1 (grey) or 3 (colour), got {self.channels}")
        ends = (0, 1) if self.window is None else self.window
        numbers = [float(x) for x in ends if type(x) in (int, float)]
        if not len(ends) == len(numbers) == 2 or not 0 < numbers[1] - numbers[0] < math.inf:
            raise DataError(f"window {ends}: two finite numbers are needed, LOW < HIGH")
        self._check_target()
        if self.background not in BACKGROUNDS:
            raise DataError(
                f"background must be {' or '.join(BACKGROUNDS)}, got {self.background!r}"
            )

    def _check_target(self) -> None:
        """DataError for an offset or a scale that is not finite, and for a scale not above 0."""
        target = (0, 1) if self.target is None else self.target
        numbers = [float(x) for x in target if type(x) in (int, float)]
        if not (
            len(target) == len(numbers) == 2
            and abs(numbers[0]) < math.inf
            and 0 < numbers[1] < math.inf
        ):
            raise DataError(
                f"target {target}: a finite offset and a finite scale above 0 are needed"
            )
