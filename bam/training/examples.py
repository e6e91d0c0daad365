"""The input of a loss: an example with this step's views, or a user with several examples."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from bam.data import augment, datasets, users
from bam.extras import needs

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
      streams: whether a split holds only the rows of a batch.
      num_views, shift, flip, mixtures: arguments of `bam.data.augment`.
      prepare: normalises an image for the network.
    """

    shape: tuple[int, ...]
    are_users: bool
    streams: bool
    num_views: int
    shift: int
    flip: str
    mixtures: int
    prepare: datasets.Preparation


def inputs_of(config: ConfigDict, dataset: datasets.Dataset) -> Inputs:
    """The settings of a run, from its config and data set."""
    return Inputs(
        shape=tuple(dataset.train.images.shape[-3:]),
        are_users=config.dataset.group_size > 0,
        streams=datasets.streams(dataset),
        num_views=config.augment.views,
        shift=config.augment.shift,
        flip=config.augment.flip,
        mixtures=config.augment.mixtures,
        prepare=datasets.preparation(dataset, config.input_clip_norm),
    )


def rows(inputs: Inputs, split: datasets.Split, indices: Array | np.ndarray) -> tuple[Array, ...]:
    """The arrays `[M, ...]` from which `example_at` makes the examples of rows `indices`.

    For data in memory, these are the indices and their places `0, …, M - 1`, because the split has
    all rows. If data are streamed, images and labels follow, because the split has only these rows.
    """
    places = jnp.arange(len(indices), dtype=jnp.int32)
    numbers: tuple[Array, ...] = (jnp.asarray(indices), places)
    return (*numbers, *map(jnp.asarray, split[:2])) if inputs.streams else numbers


def label_of(dataset: datasets.Dataset) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one image's label."""
    labels = dataset.test.labels
    return jax.ShapeDtypeStruct(labels.shape[1:], labels.dtype)


def example_at(
    inputs: Inputs, split: datasets.Split, step: Int[Array, ""]
) -> Callable[[Array, PyTree], PyTree]:
    """A function `(key of the step, row)` that makes an example, or a user, on the device.

    `row` is one of `rows`. An example has `image`, its K prepared views in this step, and its
    `label`. No loss of bam reads the rest: `key` and `step` are for oracles of your own, and `row`,
    the row's number, is for audits. A gradient must not depend on `row`, because a row that is
    removed may renumber all later ones. A user has the views of all its examples in `image`, a
    label for each, and the mask `present` (`users.grouped`).
    """
    options: Any = {"num_views": inputs.num_views, "shift": inputs.shift, "flip": inputs.flip}

    def at(step_key: Array, row: tuple[Array, ...]) -> dict[str, Array]:
        index, place, *streamed = row
        # A row's views depend on the step and the row's place in the batch, which `sampling.pad`
        # draws with ChaCha20, and not on its number: if N is a public constant, a row that is
        # removed renumbers all later ones, and ε would rest on the key of the views.
        views_key, oracle_key = jax.random.split(jax.random.fold_in(step_key, place))
        # A padded row has an index past the end, which JAX would clamp to the last example. It
        # becomes an example of zeros, as in streamed data.
        is_example = index < len(split.labels)
        arrays = streamed or [jnp.where(is_example, x[index], 0) for x in split[:2]]
        images, labels = arrays
        images = images.reshape(-1, *inputs.shape)  # flat on the devices, see `Trainer.place`
        example = {"key": oracle_key, "step": step, "row": index}
        if inputs.are_users:
            keys = users.keys_of(views_key, len(images))
            views = jax.vmap(lambda key, image: augment.views(key, image, **options))(keys, images)
            views, labels, example["present"] = users.in_one_row(views, labels)
        else:
            views = augment.views(views_key, images[0], **options)
        mixed_key = jax.random.fold_in(views_key, MIXED)
        views = augment.with_mixtures(mixed_key, inputs.prepare(views), inputs.mixtures)
        return example | {"image": views, "label": labels}

    return at


def example_like(
    config: ConfigDict,
    shape: tuple[int, ...],
    label: jax.ShapeDtypeStruct = jax.ShapeDtypeStruct((), jnp.int32),  # noqa: B008
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a loss's example, for images of a shape, to trace with."""
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
    """The number of network inputs that one row makes: K views and mixtures, for each example."""
    inputs_each = config.augment.views + config.augment.mixtures
    return int(inputs_each * max(1, config.dataset.group_size))
