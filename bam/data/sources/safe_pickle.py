"""Reads the pickled batches of the CIFAR Python archives, and obeys nothing that they say.

A pickle is a program: obeyed, it may call any function, and nine bytes of it may take gigabytes.
Here its operations are only listed; what belongs to a key of the dictionary follows that key.
"""

import itertools
import pickletools
from collections.abc import Iterator
from typing import Any

import numpy as np

from bam.data.common import DataError

# All that a pickle of a dictionary of bytes, integers and a NumPy array names.
NAMES = {
    "_codecs encode",  # how Python 3 writes bytes
    "numpy.core.multiarray _reconstruct",
    "numpy._core.multiarray _reconstruct",
    "numpy ndarray",
    "numpy dtype",
}
# An official batch has three to five for each of its rows, 50,000 at most.
MAX_OPERATIONS = 10**6


def parse(content: bytes, where: str, label_key: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Pixels, uint8 `[rows, 3072]`, and labels of one batch, a pickled dictionary.

    It has an array under `b"data"` and a list under the labels' key. DataError for a pickle that is
    damaged, holds something else, or asks for a function.
    """
    try:
        values = list(_values(content))
        following = values[values.index(label_key) + 1 :]
        labels = list(itertools.takewhile(lambda value: type(value) is int, following))
        array = values[values.index(b"data") + 1 :]
        # After NumPy's other arguments: whether it is in Fortran's order, and its bytes.
        is_fortran, content = next(
            (x, y) for x, y in itertools.pairwise(array) if isinstance(y, bytes) and len(y) > 99
        )
        if array[3:6] != [len(labels), 3072, b"u1"] or is_fortran:
            raise TypeError("data is not a uint8 array in C order, with a row for each label")
        pixels = np.frombuffer(content, np.uint8).reshape(len(labels), 3072)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    # A damaged pickle raises nearly anything.
    except Exception as error:
        raise DataError(f"{where}: not a CIFAR batch: {type(error).__name__} {error}") from error
    return pixels, np.array(labels, np.int64)


def _values(content: bytes) -> Iterator[bytes | int]:
    """Texts as bytes, integers and truth values, in order; none of what is remembered or called."""
    value: Any
    for count, (operation, value, _) in enumerate(pickletools.genops(content)):
        if count >= MAX_OPERATIONS:
            raise DataError(f"refused: the pickle has more than {MAX_OPERATIONS:,} operations")
        if operation.name == "GLOBAL":
            if value not in NAMES:
                raise DataError(f"refused: the pickle asks for {value.replace(' ', '.')}")
        elif operation.name in ("NEWTRUE", "NEWFALSE"):
            yield operation.name == "NEWTRUE"
        elif not operation.name.endswith(("PUT", "GET", "PROTO")) and value not in (None, "latin1"):
            yield value.encode("latin1") if isinstance(value, str) else value
