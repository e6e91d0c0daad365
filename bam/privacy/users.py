"""A user as the unit of privacy: the rows that are one user's, at most k of them."""

import numpy as np
from jaxtyping import Int64, Integer

EMPTY = -1  # in place of a row number, and of a label that is an integer; else NaN


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
