"""Reads the pickled batches of the CIFAR Python archives without running what they say.

An ordinary `pickle.load` lets a file call any function. Here every name that a pickle of a NumPy
array needs is a stand-in defined below, and any other name is refused.
"""

import io
import pickle
from typing import Any

import numpy as np

from bam.data.common import DataError


def parse(content: bytes, where: str, label_key: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Reads one batch.

    Args:
      content: a pickled dictionary with an array under `b"data"` and a list of labels.
      where: what an error names.
      label_key: the key of the labels.

    Returns:
      Pixels, uint8 in the stored shape; labels, `[n]` int64.

    Raises:
      DataError: for a pickle that is damaged, holds something else, or asks for a function.
    """
    try:
        batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        pixels, labels = batch[b"data"].pixels(), batch[label_key]
        if not all(type(label) is int for label in labels):
            raise TypeError("labels are not integers")
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    # A damaged pickle raises nearly anything.
    except Exception as error:
        raise DataError(f"{where}: not a CIFAR batch: {type(error).__name__} {error}") from error
    return pixels, np.array(labels, np.int64)


class _Array:
    """Stands for a NumPy array: keeps the raw bytes and their description."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def pixels(self) -> np.ndarray:
        _, shape, dtype, fortran_order, content = self.state
        if dtype.code not in ("u1", b"u1") or fortran_order:
            raise TypeError("data is not a uint8 array in C order")
        return np.frombuffer(content, np.uint8).reshape(shape)


class _DType:
    """Stands for a NumPy dtype."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment, which mean nothing for bytes."""


def _new_array(*_: Any) -> _Array:
    return _Array()


def _latin1(text: str, _: Any) -> bytes:
    return text.encode("latin1")


STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _new_array,
    ("numpy._core.multiarray", "_reconstruct"): _new_array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DType,
    ("_codecs", "encode"): _latin1,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in STAND_INS:
            raise DataError(f"refused: the pickle asks for {module}.{name}")
        return STAND_INS[module, name]
