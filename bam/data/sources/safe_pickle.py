"""Reads the pickled batches of the CIFAR Python archives without running what they say.

An ordinary `pickle.load` lets a file call any function. Here every name that a pickle of a NumPy
array needs is a stand-in defined below, and any other name is refused. It also lets nine bytes take
gigabytes: here the operations are read, and their sizes checked, before any is obeyed.
"""

import io
import pickle
import pickletools

import numpy as np

from bam.data.common import DataError

# Those of Python 2, which made the archives (its protocol 2), and bytes; but nothing that names a
# class, or something outside of the file, in another way than GLOBAL.
OPERATIONS = {opcode.name for opcode in pickletools.opcodes if opcode.proto <= 3} - {
    *("INST", "OBJ", "NEWOBJ", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID")
}
# An official batch has three to five for each of its rows, 50,000 at most. Each makes an object
# of at most a hundred bytes or so, besides what it copies from the file.
MAX_OPERATIONS = 10**6


def parse(content: bytes, where: str, label_key: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Pixels, uint8 as stored, and labels of one batch, a pickled dictionary.

    It has an array under `b"data"` and a list under the labels' key. DataError for a pickle that is
    damaged, holds something else, or asks for a function.
    """
    try:
        _check_operations(content)
        batch = _Unpickler(content).load()
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

    state: tuple = ()

    def __setstate__(self, state: tuple) -> None:
        self.state = state

    def pixels(self) -> np.ndarray:
        _, shape, dtype, fortran_order, content = self.state
        if dtype.code not in ("u1", b"u1") or fortran_order:
            raise TypeError("data is not a uint8 array in C order")
        return np.frombuffer(content, np.uint8).reshape(shape)


class _DType:
    """Stands for a NumPy dtype."""

    def __init__(self, code: object, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment, which mean nothing for bytes."""


def _new_array(*_: object) -> _Array:
    return _Array()


STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _new_array,
    ("numpy._core.multiarray", "_reconstruct"): _new_array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DType,
}


def _check_operations(content: bytes) -> None:
    """Refuses a pickle that may take much more memory than it has itself, or is none.

    That is one with an operation that no batch needs, too many of them, or an entry of the memo (a
    table as long as its largest index) beyond their number. ValueError if it reads beyond the end.
    """
    for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name not in OPERATIONS:
            raise DataError(f"refused: the pickle uses {opcode.name}")
        if count >= MAX_OPERATIONS:
            raise DataError(f"refused: the pickle has more than {MAX_OPERATIONS:,} operations")
        if opcode.name.endswith("PUT") and (argument or 0) > count:
            raise DataError(f"refused: the pickle asks for {argument:,} entries of its memo")


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self._remaining = len(content)

    def _latin1(self, text: str, _: object) -> bytes:
        """How Python 3 stores bytes; a text that stands there once may be encoded many times."""
        self._remaining -= len(text)
        if self._remaining < 0:
            raise DataError("refused: the pickle makes more bytes than it has")
        return text.encode("latin1")

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("_codecs", "encode"):
            return self._latin1
        if (module, name) not in STAND_INS:
            raise DataError(f"refused: the pickle asks for {module}.{name}")
        return STAND_INS[module, name]
