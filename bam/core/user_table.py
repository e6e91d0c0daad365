"""The rows of users: at most k of each, which are drawn together."""

import numpy as np
from jaxtyping import Int64, Integer

from bam.core.sampling import PADDING, PaddedBatch
from bam.errors import InputError

EMPTY = -1  # in place of a row number, and of a label that is an integer; else NaN
# What NumPy, pandas and Python write in place of a text that is missing.
MISSING = {"", "nan", "NaN", "NaT", "None", "<NA>", "--"}
# In place of an integer: pandas' code of a missing value, and NaN or NaT made an integer.
MISSING_NUMBERS = (-1, -(2**31), -(2**63))


def table(ids: Integer[np.ndarray, " n"], size: int) -> Int64[np.ndarray, "users k"]:
    """The rows of each user, at most k of them; -1 where there are fewer.

    Users are in the order of their ids, so one user more or less changes nothing of the others but
    their number. Of a user with more than k rows those are kept that are evenly spaced, in the
    order of the source, among its own: nobody else's rows have a say in it.

    Args:
      ids: of the user that each row belongs to.
      size: k ≥ 1.

    Examples:
      >>> table(np.array([7, 5, 7, 7, 9, 7]), size=2).tolist()
      [[1, -1], [0, 3], [4, -1]]
    """
    order = np.argsort(ids, kind="stable")
    _, starts, counts = np.unique(ids[order], return_index=True, return_counts=True)
    place, start, count = np.arange(size), starts[:, None], counts[:, None]
    nth = np.where(count > size, place * count // size, place)
    rows = order[start + np.minimum(nth, count - 1)]
    return np.where(place < count, rows, EMPTY).astype(np.int64)


def with_id(groups: object) -> np.ndarray:
    """The ids as an array; InputError, in one line, if a row has none.

    All rows whose id is missing would pass for one user, whoever they are of. Missing is what is
    masked, NaN, NaT or None, and what of these is left in an array of texts or of integers.
    """
    ids = np.asarray(groups)
    missing, is_masked = np.zeros(ids.shape, bool), isinstance(groups, np.ma.MaskedArray)
    if isinstance(groups, np.ma.MaskedArray):
        missing |= np.ma.getmaskarray(groups)
    elif isinstance(groups, list | tuple) and ids.ndim == 1:
        missing |= [x is np.ma.masked for x in groups]  # an array has a 0 there
    if ids.dtype.kind == "i":
        missing |= np.isin(ids, MISSING_NUMBERS)
    elif ids.dtype.kind in "fc":
        missing |= np.isnan(ids)
    elif ids.dtype.kind in "mM":
        missing |= np.isnat(ids)
    elif ids.dtype.kind in "USO":
        missing |= np.vectorize(_is_missing, otypes=[bool])(ids)
    if missing.any():
        row = np.flatnonzero(missing)[0]
        instead = "masked" if is_masked else repr(ids.ravel()[row : row + 1].tolist()[0])
        raise InputError(
            f"row {row} (from 0) has no user: its id is {instead}, and all such rows would be one "
            "user. Give every user an id, or leave such rows out"
        )
    return ids


def _is_missing(value: object) -> bool:
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text.strip() in MISSING


def examples(batch: PaddedBatch, table: Int64[np.ndarray, "users k"]) -> PaddedBatch:
    """The examples `[M, k]` of a batch of users, with their mask."""
    rows = table[np.where(batch.mask, batch.indices, 0)]
    mask = np.asarray(batch.mask)[:, None] & (rows != EMPTY)
    return PaddedBatch(np.where(mask, rows, PADDING).astype(np.int32), mask)
