"""Views are the same image moved and mirrored, and depend on their key alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bam.data import augment
from bam.training import examples, loop
from configs import digits

IMAGE = jnp.arange(6 * 5 * 2, dtype=jnp.uint8).reshape(6, 5, 2)


def test_one_view_without_augmentation_is_the_identity():
    one = augment.views(jax.random.key(0), IMAGE, num_views=1)
    assert one.dtype == jnp.uint8
    np.testing.assert_array_equal(one[0], IMAGE)


def test_every_view_is_one_of_the_shifted_images_and_all_of_them_occur():
    shift = 1
    border = ((shift, shift), (shift, shift), (0, 0))
    padded = np.pad(np.asarray(IMAGE), border, mode="reflect")
    possible = {padded[t : t + 6, s : s + 5].tobytes() for t in range(3) for s in range(3)}
    views = augment.views(jax.random.key(1), IMAGE, num_views=200, shift=shift)
    seen = {np.asarray(view).tobytes() for view in views}
    assert seen == possible


def test_about_half_of_the_views_are_mirrored():
    views = np.asarray(augment.views(jax.random.key(2), IMAGE, num_views=400, flip="horizontal"))
    mirrored = (views == np.flip(np.asarray(IMAGE), 1)).all(axis=(1, 2, 3))
    same = (views == np.asarray(IMAGE)).all(axis=(1, 2, 3))
    assert (mirrored | same).all()
    assert 140 < mirrored.sum() < 260


def test_views_repeat_with_their_key_and_change_with_it():
    options = {"num_views": 4, "shift": 2, "flip": "horizontal"}
    first, again = (augment.views(jax.random.key(3), IMAGE, **options) for _ in range(2))
    other = augment.views(jax.random.key(4), IMAGE, **options)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_views": 0}, "views"),
        ({"num_views": 1, "shift": -1}, "shift"),
        ({"num_views": 1, "flip": "vertical"}, "flip"),
    ],
)
def test_augmentations_that_cannot_be_are_refused_by_name(options, named):
    with pytest.raises(ValueError, match=f"augment.{named}"):
        augment.views(jax.random.key(0), IMAGE, **options)


def test_mixtures_are_of_two_different_views_of_one_example():
    key, views = jax.random.key(5), jax.random.normal(jax.random.key(6), (3, 2, 2, 1))
    made = np.asarray(augment.with_mixtures(key, views, 40))
    np.testing.assert_array_equal(made[:3], views)
    pairs = set()
    for mixture in made[3:]:
        # The slow way: of every pair, the α that fits best, and whether it fits.
        for i in range(3):
            for j in range(i):
                one, other = (np.asarray(views[k]).ravel() for k in (i, j))
                apart = one - other
                alpha = (mixture.ravel() - other) @ apart / (apart @ apart)
                if np.allclose(other + alpha * apart, mixture.ravel(), atol=1e-6):
                    assert 0 <= alpha <= 1
                    pairs.add((i, j))
    assert pairs == {(1, 0), (2, 0), (2, 1)}
    np.testing.assert_array_equal(augment.with_mixtures(key, views, 0), views)
    assert not np.array_equal(made, augment.with_mixtures(jax.random.key(7), views, 40))


def config_of(**changes):
    config = digits.get_config("dp_sgd")
    config.update({"accountant": "rdp", "num_steps": 2, "expected_batch_size": 20})
    config.model.name, config.microbatch_size = "linear", 5
    config.augment.update({"views": 2, "shift": 1, "mixtures": 3})
    config.update_from_flattened_dict(changes)
    return config


def test_a_step_sees_views_and_mixtures_of_each_example_alone():
    built = loop.build(config_of())
    state, split, key = built.init(0), built.dataset.train, jax.random.key(3)
    at = examples.example_of(built.parts.inputs, key, state.step)

    def row(index, place=7, split=split):
        rows = examples.rows_at(split, np.array([index]), None)
        return {name: x[0] for name, x in rows.items()} | {"place": jnp.int32(place)}

    one = at(row(4))
    assert one["image"].shape == (5, 8, 8, 1)
    without = config_of(**{"augment.mixtures": 0})
    inputs = examples.inputs_of(without, built.dataset)
    plain = examples.example_of(inputs, key, state.step)(row(4))
    np.testing.assert_array_equal(one["image"][:2], plain["image"])  # as they were
    # The control: another example, elsewhere in the data, changes nothing of it.
    other, same = (split._replace(images=split.images.copy()) for _ in range(2))
    other.images[5] = 7
    np.testing.assert_array_equal(at(row(4, split=other))["image"], one["image"])
    assert np.abs(at(row(5, split=other))["image"] - at(row(5))["image"]).max() > 0
    # Views belong to the place, not to the row's number; test_neighbouring_datasets.py needs it.
    same.images[8] = split.images[4]
    np.testing.assert_array_equal(at(row(8, split=same))["image"], one["image"])
    assert np.abs(at(row(4, place=8))["image"] - one["image"]).max() > 0
    loss = built.parts.model.loss(state.params, one)
    each = [built.parts.model.loss(state.params, one | {"image": x[None]}) for x in one["image"]]
    assert loss == pytest.approx(np.mean(each), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"augment.mixtures": -1}, "augment.mixtures need augment.views of at least 2"),
        ({"augment.views": 1}, "augment.mixtures need augment.views of at least 2"),
        ({"dataset.groups": "x.npy", "dataset.group_size": 2}, "mixes the views of an example"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        loop.build(config_of(**changes))
