"""Parts that all readers share: the split, the error, image decoding, memory and label checks."""

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Array, Int32, Num, UInt8

from bam import files, memory
from bam.errors import InputError
from bam.extras import needs
from bam.files import JsonObject

# Pillow knows forty formats, and for one of them (EPS) it runs the file as a program.
IMAGE_FORMATS = ("PNG", "JPEG")
MANIFEST = "manifest.json"  # file that `bam data import` writes last

# Bytes of the decoded training images -> whether images stay in their files.
Stays: TypeAlias = Callable[[int], bool]


class DataError(InputError):
    """Says in one line that data is missing, damaged or different from its name."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class Split(NamedTuple):
    """Images and labels of one split.

    Attributes:
      images: `[N, height, width, channels]`, uint8, in memory or in files
        (`bam.data.stream.StoredImages`). Features of images (`bam.features.extraction`) are
        float16. A tabular set is float32 `[N, 1, 1, features]`: one pixel with a channel for each
        feature, in the feature's units.
      labels: `[N]` int32, from 0, or the labels of another loss (`bam.models.losses`).
    """

    images: Any
    labels: Num[np.ndarray | Array, "n ..."]


def in_memory(num_bytes: int) -> bool:
    """The `Stays` of a data set that is read into memory as a whole."""
    return False


def manifest(folder: Path | None) -> JsonObject:
    """Returns the manifest that `bam data import` wrote into a folder.

    {} for any other folder.
    """
    file = folder and folder / MANIFEST
    return files.read_json(file) if file and file.is_file() else {}


def check_memory(num_bytes: int, location: str) -> None:
    """DataError for more bytes than are free in this machine's memory."""
    if num_bytes > (free := memory.free()):
        needed, has = memory.in_words(num_bytes), memory.in_words(free)
        raise DataError(f"{location}: {needed} are needed in memory, and {has} are free")


def decode_images(
    encoded: Sequence[bytes | None],
    location: str,
    shape: tuple[int, int, int] | None = None,
    place: Callable[[int], str] | None = None,
) -> UInt8[np.ndarray, "n h w c"]:
    """Decodes JPEG or PNG images of one size, each header checked before its image is decoded.

    None stands for a missing image. Errors name `location`, such as the path of the file, and the
    row (from 0); or the text that `place` returns for the row. The shape is `(height, width,
    channels)`; None takes that of the first image. Channels are 1 (grey) or 3 (RGB; palettes are
    looked up and transparency is dropped).
    """
    if not encoded:
        raise DataError(f"{location}: has no rows")
    place = place or (lambda row: f"{location}: row {row}")
    shape = shape or _decode(encoded[0], place(0), None).shape
    check_memory(len(encoded) * math.prod(shape), location)
    images = np.empty((len(encoded), *shape), np.uint8)
    # Small images mostly cost Pillow's header parsing, which is Python, so threads would not help.
    for row, file in enumerate(encoded):
        images[row] = _decode(file, place(row), shape)
    return images


def check_labels(labels: np.ndarray, num_classes: int, location: str) -> Int32[np.ndarray, " n"]:
    """Returns labels as int32.

    DataError for a label that is not a class, with its row (from 0).
    """
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if wrong.size:
        row = int(wrong[0])
        raise DataError(
            f"{location}: row {row}: label {labels[row]} is not from 0 to {num_classes - 1}"
        )
    return labels.astype(np.int32)


def _decode(encoded: bytes | None, place: str, shape: tuple[int, ...] | None) -> np.ndarray:
    """Returns one image `[h, w, c]`.

    DataError at `place` for another shape or damage.
    """
    with needs("data"):
        from PIL import Image

    if encoded is None:
        raise DataError(f"{place}: no image bytes")
    try:
        with Image.open(
            io.BytesIO(encoded), formats=IMAGE_FORMATS
        ) as image:  # reads the header only
            if image.mode not in ("1", "L", "RGB", "RGBA", "P"):
                raise InputError(f"mode {image.mode} is neither 8-bit grey nor RGB")
            target = "L" if image.mode in ("1", "L") else "RGB"
            declared = (image.height, image.width, 1 if target == "L" else 3)
            if shape not in (None, declared):
                raise DataError(f"{place}: image of shape {declared}, expected {tuple(shape)}")
            pixels = np.asarray(image if image.mode == target else image.convert(target))
    except DataError:
        raise
    # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error and others.
    except Exception as error:
        raise DataError(f"{place}: unreadable image: {error}") from error
    return pixels[..., None] if pixels.ndim == 2 else pixels
