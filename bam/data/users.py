"""User-level privacy: an id for each training row, and at most k examples of each user.

Batches then draw users, not examples, and the gradient of a user's mean loss is clipped as one. So
the guarantee protects *all* rows of a user together. It relies on the ids: a person with two ids
counts as two users, and each of the two is protected separately.
"""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Num

from bam import files
from bam.core.user_table import EMPTY, table
from bam.data import datasets
from bam.data.common import DataError, Split, check_memory, manifest
from bam.data.datasets import Dataset
from bam.data.stream import select
from bam.errors import InputError
from bam.privacy.user_ids import number_users
from bam.text import have, plural


def column(folder: Path | None) -> str:
    """Returns the column of user ids that `bam data import` wrote, or "" without users."""
    return str(manifest(folder).get("ids", ""))


def with_ids(dataset: Dataset, groups: str, folder: Path | None) -> Dataset:
    """The data set with the user ids of its training rows, from a config's `dataset.groups`.

    `groups` is a `.npy` file with an integer or a text for each row in the order of the source, or
    a column of the Parquet files in `folder` (None without Parquet files). DataError for damaged
    ids, for those that `user_id` finds missing or refuses, and for another number of them than of
    rows.
    """
    if dataset.users is not None:
        raise DataError(f"{dataset.name} already has user ids: leave out --config.dataset.groups")
    if groups.endswith(".npy"):
        ids = _from_npy(files.user_path(groups))
    elif folder is None:
        raise DataError(
            f"--config.dataset.groups={groups} is not a .npy file, and only Parquet files have "
            "columns of ids"
        )
    else:
        ids = datasets.reader("parquet").read_ids(folder, groups)
    with_users = dataset._replace(users=ids)
    datasets.check(with_users)
    return with_users


def with_test_ids(
    dataset: Dataset, column: str, folder: Path | None, log: Callable[[str], None]
) -> Dataset:
    """The data set with the user ids of its test rows, if its Parquet files have them.

    They serve the intervals of test figures alone. `log` hears of ids that cannot be read, and of
    users who are in both splits.
    """
    if not column or column.endswith(".npy") or folder is None:
        return dataset
    parquet = datasets.reader("parquet")
    if not parquet.has_column(folder, column, "test"):
        return dataset
    try:
        train, test = parquet.read_all_ids(folder, column)
    except DataError as error:
        log(f"intervals of test figures draw images, not persons: {error}")
        return dataset
    if num := len(np.intersect1d(train, test)):
        log(
            f"NOT PRIVATE: {have(num, 'user')} rows in training and in test, so test figures "
            f"look too good: put all rows of a user in one split (column {column} of {folder})"
        )
    return dataset._replace(test_users=test)


def group_by_user(dataset: Dataset, size: int) -> Dataset:
    """Returns the data set with one training row for each user.

    With a size of 0 it is the data set itself.

    Args:
      dataset: a data set with U different ids in `users`.
      size: k, the largest number of examples that are used of a user, see `table`.

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
            f"--config.dataset.group_size={size} needs user ids: add "
            "--config.dataset.groups=COLUMN or --config.dataset.groups=FILE.npy"
        )
    if ids is None:
        return dataset
    if not size:
        raise DataError(
            "the data have user ids: add --config.dataset.group_size=K, the most examples that are "
            "used of a user"
        )
    images, labels = dataset.train
    ids = number_users(ids)
    num_users = len(np.unique(ids))
    if not datasets.streams(dataset):
        num_bytes = num_users * size * images[0].nbytes
        check_memory(num_bytes, f"{num_users} users of {size} examples each")
    rows = table(ids, size)
    padded = np.where(rows == EMPTY, rows[:, :1], rows)  # with the user's first row
    missing = (rows == EMPTY).reshape(*rows.shape, *(1,) * (labels.ndim - 1))
    empty = np.nan if np.issubdtype(labels.dtype, np.floating) else EMPTY
    padded_labels = np.where(missing, empty, labels[padded]).astype(labels.dtype)
    train = Split(select(images, padded), padded_labels)
    return dataset._replace(train=train, users=None)


def unused_line(dataset: Dataset, size: int) -> str:
    """Returns a line on the training images that `group_by_user` leaves out, or "" if none."""
    if dataset.users is None or not size:
        return ""
    _, counts = np.unique(number_users(dataset.users), return_counts=True)
    num_unused = np.maximum(counts - size, 0).sum()
    if not num_unused:
        return ""
    used, are = plural(size, "image"), "is" if size == 1 else "are"
    return (
        f"at most {used} of each user {are} used; {num_unused:,} of {counts.sum():,} are not "
        "(NOT PRIVATE)"
    )


def in_one_row(
    views: Num[Array, "k views h w c"], labels: Num[np.ndarray | Array, "k ..."]
) -> tuple[Num[Array, "inputs h w c"], Num[Array, "inputs ..."], Bool[Array, " inputs"]]:
    """A user's views on one axis of inputs, with their labels and a mask of real examples."""
    inputs = views.reshape(-1, *views.shape[2:])
    repeated = jnp.repeat(labels, views.shape[1], axis=0, total_repeat_length=len(inputs))
    empty = (
        jnp.isnan(repeated) if jnp.issubdtype(repeated.dtype, jnp.floating) else repeated == EMPTY
    )
    present = ~jnp.all(empty.reshape(len(inputs), -1), axis=1)
    return inputs, jnp.where(empty, 0, repeated), present


def keys_of(key: Array, num: int) -> Array:
    """Returns one key for each of a user's examples, of which a single one keeps the key."""
    return jax.random.split(key, num) if num > 1 else key[None]


def _from_npy(file: Path) -> np.ndarray:
    """Returns the ids in a `.npy` file, with numbers for ids that are no integers.

    DataError for a damaged one.
    """
    if not file.is_file():
        raise DataError(f"{file}: missing")
    try:  # mapped, so that a declared size takes no memory before the data are known to exist
        ids = np.array(np.load(file, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError, TypeError) as error:
        why = str(error)
        if "Python objects" in why:  # reading them could run code of the file
            why = "it holds Python objects: save the ids with np.save(file, ids.astype(str))"
        raise DataError(f"{file}: not a readable .npy file: {why}") from error
    try:
        places = number_users(ids)
    except InputError as error:
        raise DataError(f"{file}: {error}") from error
    return ids if ids.dtype.kind in "iu" else places
