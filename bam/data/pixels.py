"""The pixels of an image file as people have it, as a PNG of one size and 8 bits a channel."""

import io
import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bam.data.common import MAX_PIXELS, DataError
from bam.extras import needs

with needs("data"):
    from PIL import Image, ImageOps

FORMATS = ("PNG", "JPEG", "TIFF", "WEBP", "BMP")
MODES = {1: "L", 3: "RGB"}  # channels -> what Pillow calls them
BACKGROUNDS = ("white", "black")
SIZES = (4, 4096)  # pixels of a side: least and most


class Preprocessing(NamedTuple):
    """How a file becomes pixels; all of it is public, and a release repeats it.

    Attributes:
      size: height and width in pixels: the image covers them, and its middle is cut out.
      channels: 1 (grey) or 3 (colour).
      window: the numbers that become black and white, of files with more than 8 bits; None: what
        a file's format declares.
      background: the colour behind transparent pixels.
    """

    size: tuple[int, int]
    channels: int
    window: tuple[float, float] | None = None
    background: str = "white"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        return (*self.size, self.channels)

    def as_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {key: list(x) if isinstance(x, tuple) else x for key, x in self._asdict().items()}

    @classmethod
    def from_json(cls, value: Any) -> "Preprocessing":
        """A record that `as_json` wrote, perhaps a stranger's; a DataError says what is wrong."""
        try:
            record = cls(**value)
            sides, window = tuple(record.size), record.window
            record = record._replace(size=sides, window=None if window is None else tuple(window))
            record.check()
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(f"preprocessing {value!r:.200}: {error}") from error
        return record

    def check(self) -> None:
        """Raises a DataError for a size, a window or a background that cannot be."""
        if len(self.size) != 2 or not all(_is_side(x) for x in self.size):
            raise DataError(f"size {self.size}: a height and a width from {SIZES[0]} to {SIZES[1]}")
        if type(self.channels) is not int or self.channels not in MODES:
            raise DataError(f"{self.channels} channels: 1 (grey) or 3 (colour)")
        if self.window is not None and not _is_window(self.window):
            raise DataError(f"window {self.window}: two finite numbers are needed, LOW < HIGH")
        if self.background not in BACKGROUNDS:
            raise DataError(f"background {self.background!r}: {' or '.join(BACKGROUNDS)}")


def _is_side(x: object) -> bool:
    return isinstance(x, int) and SIZES[0] <= x <= SIZES[1]


def _is_window(window: tuple[object, ...]) -> bool:
    numbers = [x for x in window if isinstance(x, int | float) and math.isfinite(x)]
    return len(window) == len(numbers) == 2 and numbers[0] < numbers[1]


def encoded(file: Path, preprocessing: Preprocessing) -> bytes:
    """An image file as a PNG of 8 bits a channel; else a DataError.

    8 and 16 bits, grey, colour, palettes and transparency are read, turned upright as
    their EXIF says, resized by Lanczos and cut to their middle.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow: sizes are checked here
            with Image.open(file, formats=FORMATS) as image:
                if image.width * image.height > 8 * MAX_PIXELS:
                    raise ValueError(f"{image.width} × {image.height} pixels are too many")
                upright = ImageOps.exif_transpose(_eight_bits(image))
                upright = upright.convert(MODES[preprocessing.channels])
                fitted = ImageOps.fit(upright, preprocessing.size[::-1], Image.Resampling.LANCZOS)
    # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error and more.
    except Exception as error:
        raise DataError(f"{file}: {type(error).__name__}: {error}") from error
    written = io.BytesIO()
    fitted.save(written, "PNG")
    return written.getvalue()


def _eight_bits(image: Image.Image) -> Image.Image:
    """An image of at most 8 bits a channel, its transparency on white."""
    if image.mode == "F":
        raise ValueError("of floating-point numbers it is not known which is white")
    if image.mode == "I" or image.mode.startswith("I;16"):
        return Image.fromarray(_upper_byte(np.asarray(image)))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        over = image.convert("RGBA")
        white = Image.new("RGBA", over.size, "white")
        white.alpha_composite(over)
        return white
    return image


def _upper_byte(numbers: np.ndarray) -> np.ndarray:
    """16 bits in 8."""
    if numbers.min() < 0 or numbers.max() >= 2**16:
        raise ValueError("numbers of more than 16 bits")
    return (numbers >> 8).astype(np.uint8)
