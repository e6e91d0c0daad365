"""A user as the unit of privacy: at most k rows, which are drawn together."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64, Integer

from bam.core.sampling import PADDING, PaddedBatch
from bam.errors import InputError
from bam.privacy.plan import Population

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


def checked(
    groups: np.ndarray | Sequence[object] | None, population: Population
) -> Int64[np.ndarray, " rows"]:
    """The user of each row, as numbers in the order of the ids; InputError if there are not N."""
    if groups is None or not population.group_size:
        raise InputError("groups, the user of each row, and group_size, the most rows used of each")
    ids = with_id(groups)
    if ids.ndim != 1 or ids.dtype.kind not in "iuUS":
        raise InputError(f"groups must be [rows] integers or texts, got {ids.dtype}{ids.shape}")
    different, numbers = np.unique(ids, return_inverse=True)
    num, most = len(different), population.num_examples
    if not (1 if population.num_examples_given else most) <= num <= most:
        raise InputError(f"num_examples is {most}, the users in groups are {num}")
    return numbers


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
