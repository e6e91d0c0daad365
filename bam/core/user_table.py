"""The rows of users: at most k of each, drawn together."""

import numpy as np
from jaxtyping import Int64, Integer

from bam.core.sampling import PADDING, PaddedBatch
from bam.errors import InputError

EMPTY = -1  # a missing row number, or a missing label of an integer dtype (float ones are NaN)
# Texts that NumPy, pandas and Python write for a missing value.
MISSING = {"", "nan", "NaN", "NaT", "None", "<NA>", "--"}
# Integers for a missing value: pandas' code, and NaN or NaT converted to an integer.
MISSING_NUMBERS = (-1, -(2**31), -(2**63))


def table(ids: Integer[np.ndarray, " n"], size: int) -> Int64[np.ndarray, "users k"]:
    """The rows of each user, at most k of them; -1 where a user has fewer.

    Users are in the order of their ids, so adding a user leaves the other users' rows as they are;
    only their places in the table shift. If a user has more than k rows, k of them are kept, evenly
    spaced in the order of the source. The choice does not depend on other users.

    Args:
      ids: id of each row's user.
      size: k ≥ 1.

    Examples:
      >>> table(np.array([7, 5, 7, 7, 9, 7]), size=2).tolist()
      [[1, -1], [0, 3], [4, -1]]
    """
    order = np.argsort(ids, kind="stable")
    _, starts, counts = np.unique(ids[order], return_index=True, return_counts=True)
    place, start, count = np.arange(size), starts[:, None], counts[:, None]
    # The j-th of k kept rows is number j · count / k of the user.
    nth = np.where(count > size, place * count // size, place)
    rows = order[start + np.minimum(nth, count - 1)]
    return np.where(place < count, rows, EMPTY).astype(np.int64)


def checked_ids(groups: object) -> np.ndarray:
    """The ids as an array; InputError, in one line, if a row has none.

    All rows without an id would pass for one user. An id is missing if it is masked, NaN, NaT or
    None, or the text or integer that one of these becomes in an array.
    """
    ids = np.asarray(groups)
    missing, is_masked = np.zeros(ids.shape, bool), isinstance(groups, np.ma.MaskedArray)
    if isinstance(groups, np.ma.MaskedArray):
        missing |= np.ma.getmaskarray(groups)
    elif isinstance(groups, list | tuple) and ids.ndim == 1:
        missing |= [x is np.ma.masked for x in groups]  # the array has a 0 instead
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
