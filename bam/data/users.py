"""User-level privacy: an id for each training row, and at most k examples of each user.

Batches then draw users, not examples, and the gradient of a user's mean loss is clipped as one. So
the guarantee protects *all* rows of a user together. It is only as good as the ids: a person with
two ids counts as two users.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Num

from bam import files
from bam.core.user_table import EMPTY, table, with_id
from bam.data import datasets
from bam.data.common import DataError, Split, check_memory, manifest
from bam.data.datasets import Dataset
from bam.data.stream import select


def column(folder: Path | None) -> str:
    """The column of user ids that `bam data import` wrote; "" if it knew no users."""
    return str(manifest(folder).get("ids", ""))


def with_ids(dataset: Dataset, groups: str, folder: Path | None) -> Dataset:
    """A data set with the ids of its training rows, as a config's `dataset.groups` names them.

    `groups` is a `.npy` file of integers, one for each row in the order of the source, or a column
    of the Parquet files in `folder` (None if there are none). DataError for ids that are missing or
    damaged, or whose number is not that of the rows.
    """
    if dataset.users is not None:
        raise DataError(f"{dataset.name} has ids of its own: dataset.groups must be empty")
    if groups.endswith(".npy"):
        ids = _from_npy(files.user_path(groups))
    elif folder is None:
        raise DataError(
            f"dataset.groups {groups!r} is no .npy file; columns are those of Parquet files alone"
        )
    else:
        ids = datasets.reader("parquet").read_ids(folder, groups)
    with_users = dataset._replace(users=ids)
    datasets.check(with_users)
    return with_users


def grouped(dataset: Dataset, size: int) -> Dataset:
    """The data set with one training row for each user; with a size of 0 the data set itself.

    Args:
      dataset: with U different ids in `users`.
      size: k, the largest number of examples used of a user, see `table`.

    Returns:
      A data set whose `train` has images `[U, k, h, w, c]` and labels `[U, k, ...]`, without
      `users`. If a user has fewer examples, its row is padded: `in_one_row` recognises the padding
      by its label, -1 or NaN among floats. Padded images repeat the user's first.

    Raises:
      DataError: for ids without a size, a size without ids, or more data than the memory holds.
      InputError: for a row without an id.
    """
    ids = getattr(dataset, "users", None)
    if ids is None and size:
        raise DataError(
            f"dataset.group_size is {size}, but the data have no ids of users: dataset.groups names"
            " them"
        )
    if ids is None:
        return dataset
    if not size:
        raise DataError(
            "the data have ids of users: set dataset.group_size, the most examples used of each"
        )
    images, labels = dataset.train
    ids = with_id(ids)
    num_users = len(np.unique(ids))
    if not datasets.streams(dataset):
        num_bytes = num_users * size * images[0].nbytes
        check_memory(num_bytes, f"{num_users} users of {size} examples each")
    rows = table(ids, size)
    own = np.where(rows == EMPTY, rows[:, :1], rows)
    missing = (rows == EMPTY).reshape(*rows.shape, *(1,) * (labels.ndim - 1))
    empty = np.nan if np.issubdtype(labels.dtype, np.floating) else EMPTY
    train = Split(select(images, own), np.where(missing, empty, labels[own]).astype(labels.dtype))
    return dataset._replace(train=train, users=None)


def in_one_row(
    views: Num[Array, "k views h w c"], labels: Num[np.ndarray | Array, "k ..."]
) -> tuple[Num[Array, "inputs h w c"], Num[Array, "inputs ..."], Bool[Array, " inputs"]]:
    """All views of a user's examples as one row of inputs, with labels and a mask of real ones."""
    inputs = views.reshape(-1, *views.shape[2:])
    repeated = jnp.repeat(labels, views.shape[1], axis=0, total_repeat_length=len(inputs))
    empty = (
        jnp.isnan(repeated) if jnp.issubdtype(repeated.dtype, jnp.floating) else repeated == EMPTY
    )
    present = ~jnp.all(empty.reshape(len(inputs), -1), axis=1)
    return inputs, jnp.where(empty, 0, repeated), present


def keys_of(key: Array, num: int) -> Array:
    """One key for each of a user's examples; a single example keeps the key."""
    return jax.random.split(key, num) if num > 1 else key[None]


def _from_npy(file: Path) -> np.ndarray:
    if not file.is_file():
        raise DataError(f"{file}: missing")
    try:  # mapped, so that a declared size takes no memory before the data are known to exist
        ids = np.load(file, mmap_mode="r", allow_pickle=False)
        return np.array(ids)
    except (OSError, ValueError, EOFError, TypeError) as error:
        raise DataError(f"{file}: not a readable .npy file: {error}") from error
