"""The pixels of an image file as people have it, as a PNG of one size and 8 bits a channel."""

import io
import warnings
from pathlib import Path

import numpy as np

from bam.data.common import MAX_PIXELS, DataError
from bam.extras import needs

with needs("data"):
    from PIL import Image, ImageOps

FORMATS = ("PNG", "JPEG", "TIFF", "WEBP", "BMP")
MODES = {1: "L", 3: "RGB"}  # channels -> what Pillow calls them


def encoded(file: Path, size: int, channels: int) -> bytes:
    """An image file as a PNG of the size and channels that are asked for; else a DataError.

    8 and 16 bits, grey, colour, palettes and transparency (on white) are read, turned upright as
    their EXIF says, resized by Lanczos and cut to their middle.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow: sizes are checked here
            with Image.open(file, formats=FORMATS) as image:
                if image.width * image.height > 8 * MAX_PIXELS:
                    raise ValueError(f"{image.width} × {image.height} pixels are too many")
                upright = ImageOps.exif_transpose(_eight_bits(image)).convert(MODES[channels])
                fitted = ImageOps.fit(upright, (size,) * 2, Image.Resampling.LANCZOS)
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
