"""What a loss is given: one example with this step's views of it, or one user with several."""

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


MIXED = 2**31 - 1  # what is folded into the key of an example's views for its mixtures


class Inputs(NamedTuple):
    """How examples are made of a split's rows: constants, of a config and a data set.

    Attributes:
      shape: of an image.
      are_users: whether a row is a user, of several images.
      streams: whether a split holds the rows of a batch, and not all.
      num_views, shift, flip, mixtures: of `bam.data.augment`.
      prepare: what a network sees of an image.
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
    """Those of a run."""
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
    """What `example_at` makes examples of: a split's rows `indices`, in arrays `[M, ...]`.

    Of data in memory, where the split is all of them, it is the indices alone; of data that are
    streamed the split is these rows.
    """
    numbers: tuple[Array, ...] = (jnp.asarray(indices),)
    return (*numbers, *map(jnp.asarray, split[:2])) if inputs.streams else numbers


def label_of(dataset: datasets.Dataset) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one image's label."""
    labels = dataset.test.labels
    return jax.ShapeDtypeStruct(labels.shape[1:], labels.dtype)


def example_at(
    inputs: Inputs, split: datasets.Split, step: Int[Array, ""]
) -> Callable[[Array, PyTree], PyTree]:
    """Makes the examples, or users, of a split on device, by `(key of the step, row)` of `rows`.

    An example has `image`, this step's K views of it, prepared; its `label`; and, which no loss
    reads, for oracles of one's own a `key` and the `step`, and for audits the number of its `row`.
    A user has the views of all its examples in `image`, a label for each, and `present`, which of
    them are there (`users.grouped`).
    """
    options: Any = {"num_views": inputs.num_views, "shift": inputs.shift, "flip": inputs.flip}

    def at(step_key: Array, row: tuple[Array, ...]) -> dict[str, Array]:
        index, *given = row
        views_key, own_key = jax.random.split(jax.random.fold_in(step_key, index))
        # A padded row names no example: it is one of zeros, as those that are read ahead are.
        is_example = index < len(split.labels)
        arrays = given or [jnp.where(is_example, x[index], 0) for x in split[:2]]
        images, labels = arrays
        images = images.reshape(-1, *inputs.shape)
        example = {"key": own_key, "step": step, "row": index}
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
    """Shapes and dtypes of the example that a loss is given, of images of a shape: for tracing."""
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
    """How many inputs a network is given at once: of a user, those of k examples."""
    inputs_each = config.augment.views + config.augment.mixtures
    return int(inputs_each * max(1, config.dataset.group_size))
