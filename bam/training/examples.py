"""The rows of a run's batches, and the examples that a loss gets: a row with this step's views.

A row has an `image` or the images of a user, their `label` or labels, and its number `row`. A batch
has these as arrays `[M, ...]`; or, if the devices' memory holds all data, the numbers alone, and in
`data` the arrays `[N, ...]` of all rows.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int, PyTree

from bam.core.sampling import PADDING, PaddedBatch
from bam.data import augment, datasets, stream, users
from bam.data.stream import StoredImages
from bam.extras import needs
from bam.privacy.plan import PrivacyPlan
from bam.training import devices

with needs("train"):
    from ml_collections import ConfigDict


# Folded into the key of an example's views, for its mixtures. It is larger than any view's number,
# because `split` of a key may equal `fold_in` of the numbers 0, 1, ….
MIXED = 2**31 - 1


class Inputs(NamedTuple):
    """The settings with which a split's rows become examples.

    Attributes:
      shape: the shape of an image.
      are_users: whether a row is a user with several images.
      num_views, shift, flip, mixtures: arguments of `bam.data.augment`.
      prepare: normalises an image for the network.
    """

    shape: tuple[int, ...]
    are_users: bool
    num_views: int
    shift: int
    flip: str
    mixtures: int
    prepare: datasets.Preparation


def inputs_of(config: ConfigDict, dataset: datasets.Dataset) -> Inputs:
    """Returns the settings of a run, from its config and data set."""
    return Inputs(
        shape=tuple(dataset.train.images.shape[-3:]),
        are_users=config.dataset.group_size > 0,
        num_views=config.augment.views,
        shift=config.augment.shift,
        flip=config.augment.flip,
        mixtures=config.augment.mixtures,
        prepare=datasets.preparation(dataset, config.input_clip_norm),
    )


class Rows:
    """The training rows of a run: in the devices' memory, or in files that are read ahead."""

    def __init__(self, split: datasets.Split, plan: PrivacyPlan, mesh: Mesh | None) -> None:
        """Places the data on the devices, unless they are streamed."""
        self._split, self._capacity, self._mesh = split, plan.capacity, mesh
        self._data = None
        if not isinstance(split.images, StoredImages):
            # Padded to N of the plan, so that no shape tells the number of rows.
            padded = datasets.pad_split(split, plan.num_examples)
            self._data = devices.replicate(_flat(padded), mesh)

    def read(
        self, batch_at: Callable[[int], PaddedBatch], steps: range
    ) -> Iterator[tuple[PyTree, np.ndarray]]:
        """Yields the rows of each step's batch on the devices, and its mask."""
        num_rows = len(self._split.labels)
        # N of the plan may exceed the data, and a drawn row without data is an empty place.
        only = lambda step: batch_at(step).within(num_rows)  # noqa: E731
        if self._data is not None:
            yield from (self.of(only(step)) for step in steps)
            return
        for split, batch in stream.ahead(self._split, only, self._capacity, steps):
            indices, mask = map(np.asarray, batch)
            yield _on_devices(split, indices, devices.share_rows, self._mesh), mask

    def of(self, batch: PaddedBatch) -> tuple[PyTree, np.ndarray]:
        """Returns the rows of one batch, as `read` yields them."""
        indices, mask = np.asarray(batch.indices), np.asarray(batch.mask)
        if self._data is None:
            return rows_at(self._split, indices, self._mesh), mask
        # A step takes each row when it computes it: a copy of a whole batch of long rows takes
        # about as long as their gradients.
        numbers = {"row": indices.astype(np.int32)}
        return devices.replicate(numbers, self._mesh) | {"data": self._data}, mask


def rows_at(
    split: datasets.Split, indices: Int[np.ndarray, " m"], mesh: Mesh | None
) -> dict[str, PyTree]:
    """Returns the rows of these numbers on the devices, with zeros at `PADDING`."""
    indices = np.asarray(indices)
    # As the rows of a batch are placed.
    is_stored = isinstance(split.images, StoredImages)
    place = devices.share_rows if is_stored else devices.replicate
    return _on_devices(stream.rows_of(split, indices, indices != PADDING), indices, place, mesh)


def _on_devices(
    rows: datasets.Split,
    indices: np.ndarray,
    place: Callable[[PyTree, Mesh | None], PyTree],
    mesh: Mesh | None,
) -> dict[str, PyTree]:
    placed: dict[str, PyTree] = place(_flat(rows) | {"row": indices.astype(np.int32)}, mesh)
    return placed


def _flat(split: datasets.Split) -> dict[str, np.ndarray]:
    # A TPU would copy images of four axes into another layout in every step.
    return {"image": split.images.reshape(len(split.images), -1), "label": split.labels}


def label_of(dataset: datasets.Dataset) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of one image's label."""
    labels = dataset.test.labels
    return jax.ShapeDtypeStruct(labels.shape[1:], labels.dtype)


def example_of(inputs: Inputs, step_key: Array, step: Int[Array, ""]) -> Callable[[PyTree], PyTree]:
    """Returns the function that makes an example, or a user, of a row with its `place`.

    An example has `image`, its K prepared views in this step, and its `label`. No loss of bam reads
    the rest: `key` and `step` are for oracles of your own, and `row`, the row's number, is for
    audits. A gradient must not depend on `row`, because a row that is removed may renumber all
    later ones. A user has the views of all its examples in `image`, a label for each, and the mask
    `present` (`users.group_by_user`).
    """
    options: Any = {"num_views": inputs.num_views, "shift": inputs.shift, "flip": inputs.flip}

    def example_of_row(row: PyTree) -> dict[str, Array]:
        # A row's views depend on the step and the row's place in the batch, which `sampling.pad`
        # draws with ChaCha20, and not on its number: if N is a public constant, a row that is
        # removed renumbers all later ones, and ε would rest on the key of the views.
        views_key, oracle_key = jax.random.split(jax.random.fold_in(step_key, row["place"]))
        images, labels = row["image"].reshape(-1, *inputs.shape), row["label"]
        example = {"key": oracle_key, "step": step, "row": row["row"]}
        if inputs.are_users:
            keys = users.keys_of(views_key, len(images))
            views = jax.vmap(lambda key, image: augment.views(key, image, **options))(keys, images)
            views, labels, example["present"] = users.in_one_row(views, labels)
        else:
            views = augment.views(views_key, images[0], **options)
        mixed_key = jax.random.fold_in(views_key, MIXED)
        views = augment.with_mixtures(mixed_key, inputs.prepare(views), inputs.mixtures)
        return example | {"image": views, "label": labels}

    return example_of_row


def in_order(rows: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the rows of a batch with their places `0, …, M - 1`, and the data, or None."""
    rows = dict(rows)
    data = rows.pop("data", None)
    return rows | {"place": jnp.arange(len(rows["row"]), dtype=jnp.int32)}, data


def take_row(row: PyTree, data: PyTree) -> PyTree:
    """Returns a row with its arrays out of the data, or as it is if the data are None.

    They are zeros for a number beyond the data.
    """
    # `PADDING` is beyond all data.
    take = lambda x: jnp.where(row["row"] < len(x), x[row["row"]], 0)  # noqa: E731
    return row | jax.tree.map(take, data or {})


def example_like(
    config: ConfigDict,
    shape: tuple[int, ...],
    label: jax.ShapeDtypeStruct = jax.ShapeDtypeStruct((), jnp.int32),  # noqa: B008
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of a loss's example, for images of a shape, to trace with."""
    inputs = num_inputs(config)
    each = (inputs,) if config.dataset.group_size else ()
    present = {"present": jax.ShapeDtypeStruct(each, jnp.bool_)} if each else {}
    return {
        "image": jax.ShapeDtypeStruct((inputs, *shape), jnp.float32),
        "label": jax.ShapeDtypeStruct((*each, *label.shape), label.dtype),
        "key": jax.eval_shape(lambda: jax.random.key(0)),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
        "row": jax.ShapeDtypeStruct((), jnp.int32),
        **present,
    }


def num_inputs(config: ConfigDict) -> int:
    """Returns the number of network inputs that one row makes.

    It makes K views and mixtures for each of its examples.
    """
    inputs_each = config.augment.views + config.augment.mixtures
    return int(inputs_each * max(1, config.dataset.group_size))
