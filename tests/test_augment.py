"""Views are the same image moved and mirrored, and depend on their key alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bam.data import augment

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
