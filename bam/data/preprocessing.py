"""How a file becomes pixels, and a number a target: a data set and a release repeat it."""

import math
from typing import Any, NamedTuple

import numpy as np

from bam.data.common import DataError

BACKGROUNDS = ("white", "black")
SIDES = range(4, 4097)  # heights and widths that can be asked for


class Target(NamedTuple):
    """The units of a label: of a number y of the files, (y - offset) / scale is learned."""

    offset: float = 0.0
    scale: float = 1.0

    def learned(self, number: float) -> float:
        """The label of a number of the files."""
        return (number - self.offset) / self.scale

    def in_units(self, labels: np.ndarray) -> np.ndarray:
        """The numbers of labels or outputs in the units of the files, as float64."""
        # In float32 an offset that is far above the scale would hide what differs.
        return labels.astype(np.float64) * self.scale + self.offset

    def digits(self, least: int) -> int:
        """The number of digits that shows `least` digits of the scale beside the offset."""
        ratio = min(1e15, abs(self.offset) / self.scale)  # beyond it, float64 has no digits
        return min(17, least + math.ceil(math.log10(1 + ratio)))


class Preprocessing(NamedTuple):
    """How a file becomes pixels, and a number a target; it is public, and a release repeats it.

    Attributes:
      size: height and width in pixels: the image covers them, and its middle is cut out.
      channels: 1 (grey) or 3 (colour).
      window: the numbers that become black and white, of files with more than 8 bits; None: what
        a file's format declares.
      background: the colour behind transparent pixels.
      target: offset and scale of a `Target`; None: numbers are learned as they are.
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
        """What `from_json` reads; without a target of None, which an older bam does not know."""
        fields = self._asdict().items()
        there = {k: x for k, x in fields if k != "target" or x is not None}
        return {k: list(x) if isinstance(x, tuple) else x for k, x in there.items()}

    @classmethod
    def from_json(cls, value: Any) -> "Preprocessing":
        """A record that `as_json` wrote, perhaps a stranger's; a DataError says what is wrong."""
        try:
            fields: Any = {k: tuple(x) if isinstance(x, list) else x for k, x in value.items()}
            (record := cls(**fields)).check()
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"preprocessing {value!r:.200}: {error}") from error
        return record

    def check(self) -> None:
        """Raises a DataError for a size, a window, a background or a target that cannot be."""
        if len(self.size) != 2 or not all(type(x) is int and x in SIDES for x in self.size):
            raise DataError(f"size {self.size}: a height and a width from 4 to {SIDES[-1]}")
        if type(self.channels) is not int or self.channels not in (1, 3):
            raise DataError(f"{self.channels} channels: 1 (grey) or 3 (colour)")
        ends = (0, 1) if self.window is None else self.window
        numbers = [float(x) for x in ends if type(x) in (int, float)]
        if not len(ends) == len(numbers) == 2 or not 0 < numbers[1] - numbers[0] < math.inf:
            raise DataError(f"window {ends}: two finite numbers are needed, LOW < HIGH")
        self._check_target()
        if self.background not in BACKGROUNDS:
            raise DataError(f"background {self.background!r}: {' or '.join(BACKGROUNDS)}")

    def _check_target(self) -> None:
        """DataError for an offset or a scale that is not a finite number, or a scale below 0."""
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
