"""What every reader shares: the split, the error, decoding of images, checks of labels."""

import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float32, Int32, UInt8


class DataError(ValueError):
    """Data that is missing, damaged or not what its name promises; the message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class Split(NamedTuple):
    """Images and labels of one split.

    Attributes:
      images: `[N, height, width, channels]`, uint8. A tabular set is float32
        `[N, 1, 1, features]`: one pixel with a channel per feature, in the features' own units.
      labels: `[N]` int32, from 0.
    """

    images: UInt8[np.ndarray | Array, "n h w c"] | Float32[np.ndarray | Array, "n h w c"]
    labels: Int32[np.ndarray | Array, " n"]


def decode_images(
    encoded: Sequence[bytes | None], where: str, shape: tuple[int, int, int] | None = None
) -> UInt8[np.ndarray, "n h w c"]:
    """Decodes JPEG, PNG or other still images of one size.

    Args:
      encoded: `N` image files, at least one; None marks a missing one.
      where: what an error names before the row, for example the file's path.
      shape: `(height, width, channels)` that every image must have; None: that of the first image.
        Channels are 1 (grey) or 3 (RGB; palettes are looked up and transparency is dropped).

    Returns:
      `[N, height, width, channels]` uint8.

    Raises:
      DataError: naming the first row (from 0) that is missing, unreadable, or of another shape.
    """
    if not encoded:
        raise DataError(f"{where}: has no rows")
    first = _decode(encoded[0], where, 0)
    images = np.empty((len(encoded), *(shape or first.shape)), np.uint8)
    # Small images cost Pillow's header parsing, which is Python: threads would not speed it up.
    for row, file in enumerate(encoded):
        image = _decode(file, where, row)
        if image.shape != images.shape[1:]:
            raise DataError(
                f"{where}: row {row}: image of shape {image.shape}, expected {images.shape[1:]}"
            )
        images[row] = image
    return images


def check_labels(labels: np.ndarray, num_classes: int, where: str) -> Int32[np.ndarray, " n"]:
    """Labels as int32, each checked to be a class.

    Args:
      labels: `[N]` integers.
      num_classes: labels must be from 0 to `num_classes - 1`.
      where: what an error names before the row.

    Returns:
      `[N]` int32.

    Raises:
      DataError: naming the first row (from 0) whose label is no class.
    """
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if wrong.size:
        row = int(wrong[0])
        raise DataError(
            f"{where}: row {row}: label {labels[row]} is not from 0 to {num_classes - 1}"
        )
    return labels.astype(np.int32)


def _decode(encoded: bytes | None, where: str, row: int) -> np.ndarray:
    from PIL import Image

    if encoded is None:
        raise DataError(f"{where}: row {row}: no image bytes")
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            if image.mode not in ("1", "L", "RGB", "RGBA", "P"):
                raise ValueError(f"mode {image.mode} is neither 8-bit grey nor RGB")
            target = "L" if image.mode in ("1", "L") else "RGB"
            pixels = np.asarray(image if image.mode == target else image.convert(target))
    # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error and more.
    except Exception as error:
        raise DataError(f"{where}: row {row}: unreadable image: {error}") from error
    return pixels[..., None] if pixels.ndim == 2 else pixels
