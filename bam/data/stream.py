"""Streaming: images stay encoded in their files, and threads decode each batch ahead of its step.

Memory holds all labels, and the images of the current batch and of about one more.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from bam.core.sampling import PaddedBatch, rows_or_zeros
from bam.data.common import Split, decode_images
from bam.extras import needs

CHUNK = 64  # rows that a thread reads at once

Encoded = Callable[[int], bytes | None]  # row -> its image, as a PNG or JPEG


class StoredImages:
    """Images `[..., h, w, c]`, uint8, in files: `images[rows]` reads those rows.

    Attributes:
      shape: of all of them.
      dtype: uint8.
    """

    dtype = np.dtype(np.uint8)

    def __init__(
        self,
        encoded: Encoded,
        image_shape: tuple[int, int, int],
        rows: np.ndarray,
        place: Callable[[int], str],
        digest: Callable[[], bytes],
    ) -> None:
        """`rows` are numbers of images, in an array of any shape.

        `place` is what an error calls an image of that number, `digest` a hash of all images as the
        files have them when it is called.
        """
        self._encoded, self._image_shape, self._rows = encoded, image_shape, rows
        self._place, self._digest = place, digest
        self.shape = (*rows.shape, *image_shape)
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._rows)

    def __getitem__(self, index: Any) -> np.ndarray:
        """The images of these rows, read now. DataError for one that is damaged."""
        rows = self._rows[index]
        numbers = np.ravel(rows).tolist()
        if not numbers:
            return np.zeros((*rows.shape, *self._image_shape), np.uint8)
        encoded = [self._encoded(i) for i in numbers]
        place = lambda i: self._place(numbers[i])  # noqa: E731
        images = decode_images(encoded, place(0), self._image_shape, place)
        return images.reshape(*rows.shape, *self._image_shape)

    def select(self, index: Any) -> "StoredImages":
        """The images of these rows, not read; rows in `[a, b]` give images `[a, b, h, w, c]`."""
        rows = self._rows[index]
        return StoredImages(self._encoded, self._image_shape, rows, self._place, self._digest)

    def content(self) -> bytes:
        """What tells these images from others: the rows, and a hash of the files as they are now.

        Parquet files are read once for it, at about 1 GB/s if the disk is as fast.
        """
        return self._digest() + self._rows.tobytes()


def content(array: Any) -> memoryview | bytes:
    """What a hash of an array reads: its bytes; of stored images `StoredImages.content`."""
    if isinstance(array, StoredImages):
        return array.content()
    return np.ascontiguousarray(array).view(np.uint8).data


def select(images: Any, index: Any) -> Any:
    """`images[index]` of an array; of stored images the same, not read."""
    if isinstance(images, StoredImages):
        return images.select(index)
    if isinstance(images, np.ndarray) and not any(images.strides):  # one number, of no memory
        rows = np.broadcast_to(np.int8(0), images.shape[:1])[index].shape
        return np.broadcast_to(images.flat[0], rows + images.shape[1:])
    return images[index]


def rows_of(
    split: Split, indices: Int[np.ndarray, " m"], mask: Bool[np.ndarray, " m"] | None = None
) -> Split:
    """The examples of these rows, in memory; zeros where the mask is False."""
    shown = np.ones(len(indices), bool) if mask is None else mask
    return Split(*(rows_or_zeros(x, indices, shown) for x in split))


def ahead(
    split: Split,
    batch_of: Callable[[int], PaddedBatch],
    capacity: int,
    steps: range,
    num_threads: int = 2,
) -> Iterator[tuple[Split, PaddedBatch]]:
    """The examples of each step's batch with the batch, in order, read ahead by threads.

    Args:
      split: of the training data.
      batch_of: `step -> batch`, of `capacity` rows, or of more where a draw outgrows them.
      capacity: rows that are read ahead; those beyond are read when their step comes.
      steps: of a run that are left.
      num_threads: that read and decode; about one batch is read ahead.
    """
    with needs("data"):
        import grain

    chunks = math.ceil(capacity / CHUNK)
    drawn = functools.lru_cache(maxsize=4)(batch_of)

    def read(number: int) -> Split:
        step, part = divmod(number, chunks)
        indices, mask = (
            np.asarray(x)[part * CHUNK : (part + 1) * CHUNK] for x in drawn(steps[step])[:2]
        )
        return rows_of(split, indices, mask)

    read_ahead = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=chunks)
    parts = iter(grain.MapDataset.range(len(steps) * chunks).map(read).to_iter_dataset(read_ahead))
    for step in steps:
        batch = drawn(step)
        beyond = (np.asarray(x)[chunks * CHUNK :] for x in batch)
        examples = [*(next(parts) for _ in range(chunks)), rows_of(split, *beyond)]
        yield Split(*map(np.concatenate, zip(*examples, strict=True))), batch
