"""Streaming: images stay encoded in their files, and threads decode each batch before its step.

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

CHUNK = 64  # rows that a thread reads in one call

Encoded = Callable[[int], bytes | None]  # row -> its image, as a PNG or JPEG


class StoredImages:
    """Images `[..., h, w, c]`, uint8, in files: `images[rows]` reads those rows.

    Attributes:
      shape: shape of the array of all images.
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
        """Makes the array.

        Args:
          encoded: `row -> encoded image`.
          image_shape: shape of each image.
          rows: rows of the images, in an array of any shape.
          place: `row -> name of the image in errors`.
          digest: returns a hash of all images, as the files are at the time of the call.
        """
        self._encoded, self._image_shape, self._rows = encoded, image_shape, rows
        self._place, self._digest = place, digest
        self.shape = (*rows.shape, *image_shape)
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._rows)

    def __getitem__(self, index: Any) -> np.ndarray:
        """Returns the images of these rows in memory.

        DataError for a damaged one.
        """
        rows = self._rows[index]
        numbers = np.ravel(rows).tolist()
        if not numbers:
            return np.zeros((*rows.shape, *self._image_shape), np.uint8)
        encoded = [self._encoded(i) for i in numbers]
        place = lambda i: self._place(numbers[i])  # noqa: E731
        images = decode_images(encoded, place(0), self._image_shape, place)
        return images.reshape(*rows.shape, *self._image_shape)

    def select(self, index: Any) -> "StoredImages":
        """Returns the images of these rows, not read yet.

        Rows `[a, b]` give images `[a, b, h, w, c]`.
        """
        rows = self._rows[index]
        return StoredImages(self._encoded, self._image_shape, rows, self._place, self._digest)

    def content(self) -> bytes:
        """Bytes that identify these images: their rows and a hash of the files at this time.

        The hash reads Parquet files once, at about 1 GB/s on a fast disk.
        """
        return self._digest() + self._rows.tobytes()


def content(array: Any) -> memoryview | bytes:
    """Returns the bytes of an array for a hash, of stored images `StoredImages.content`."""
    if isinstance(array, StoredImages):
        return array.content()
    return np.ascontiguousarray(array).view(np.uint8).data


def select(images: Any, index: Any) -> Any:
    """`images[index]`, which does not read stored images or fill broadcast ones."""
    if isinstance(images, StoredImages):
        return images.select(index)
    if isinstance(images, np.ndarray) and not any(images.strides):  # one number for all
        rows = np.broadcast_to(np.int8(0), images.shape[:1])[index].shape
        return np.broadcast_to(images.flat[0], rows + images.shape[1:])
    return images[index]


def rows_of(
    split: Split, indices: Int[np.ndarray, " m"], mask: Bool[np.ndarray, " m"] | None = None
) -> Split:
    """The examples of these rows in memory, with zeros where the mask is False."""
    mask = np.ones(len(indices), bool) if mask is None else mask
    return Split(*(rows_or_zeros(x, indices, mask) for x in split))


def ahead(
    split: Split,
    batch_of: Callable[[int], PaddedBatch],
    capacity: int,
    steps: range,
    num_threads: int = 2,
) -> Iterator[tuple[Split, PaddedBatch]]:
    """Yields the examples and the batch of each step in order, while threads read later ones.

    Args:
      split: the training data.
      batch_of: `step -> batch` with `capacity` rows, or more if a draw exceeds the capacity.
      capacity: number of rows that are read ahead; further rows are read when their step comes.
      steps: the remaining steps of a run.
      num_threads: number of threads that read and decode; about one batch is read ahead.
    """
    with needs("data"):
        import grain

    chunks = math.ceil(capacity / CHUNK)
    batch_at = functools.lru_cache(maxsize=4)(batch_of)  # several chunks share a batch

    def read(number: int) -> Split:
        step, part = divmod(number, chunks)
        indices, mask = (
            np.asarray(x)[part * CHUNK : (part + 1) * CHUNK] for x in batch_at(steps[step])[:2]
        )
        return rows_of(split, indices, mask)

    read_ahead = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=chunks)
    parts = iter(grain.MapDataset.range(len(steps) * chunks).map(read).to_iter_dataset(read_ahead))
    for step in steps:
        batch = batch_at(step)
        beyond = (np.asarray(x)[chunks * CHUNK :] for x in batch)
        examples = [*(next(parts) for _ in range(chunks)), rows_of(split, *beyond)]
        yield Split(*map(np.concatenate, zip(*examples, strict=True))), batch
