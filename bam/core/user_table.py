"""The rows of each user: at most k, drawn together."""

import numpy as np
from jaxtyping import Int64, Integer

from bam.core.sampling import PADDING, PaddedBatch

EMPTY = -1  # a missing row number, or a missing label of an integer dtype (float ones are NaN)


def table(ids: Integer[np.ndarray, " n"], size: int) -> Int64[np.ndarray, "users k"]:
    """Returns the rows of each user, at most k of them.

    A user with fewer has -1 at the end. Users are in the order of their ids, so adding a user
    leaves the other users' rows as they are, and only moves them in the table. If a user has
    more than k rows, k of them are kept, evenly spaced in the order of the source. The choice does
    not depend on other users.

    Args:
      ids: id of each row's user.
      size: k ≥ 1.

    Examples:
      >>> table(np.array([7, 5, 7, 7, 9, 7]), size=2).tolist()
      [[1, -1], [0, 3], [4, -1]]
    """
    order = np.argsort(ids, kind="stable")
    _, starts, counts = np.unique(ids[order], return_index=True, return_counts=True)
    j, start, count = np.arange(size), starts[:, None], counts[:, None]
    # The j-th of k kept rows is number j · count / k of the user.
    nth = np.where(count > size, j * count // size, j)
    rows = order[start + np.minimum(nth, count - 1)]
    return np.where(j < count, rows, EMPTY).astype(np.int64)


def examples(batch: PaddedBatch, table: Int64[np.ndarray, "users k"]) -> PaddedBatch:
    """Returns the examples `[M, k]` of a batch of users, with their mask."""
    rows = table[np.where(batch.mask, batch.indices, 0)]
    mask = np.asarray(batch.mask)[:, None] & (rows != EMPTY)
    return PaddedBatch(np.where(mask, rows, PADDING).astype(np.int32), mask)
