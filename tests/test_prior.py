"""Features of drawn images: what they are, what they refuse, how their weights come about."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from ml_collections import ConfigDict

from bam.data.common import DataError
from bam.features import prior
from bam.features.extraction import to_features
from bam.features.scattering import scatter, scattering
from bam.models.resnet9 import ResNet9
from bam.training import parts
from scripts import drawn
from scripts import prior as script

RNG = np.random.default_rng(0)
FEW = {"num_leaves": 30, "filters": 7, "num_drawn": 24, "steps": 0}
IMAGES = RNG.uniform(size=(3, 32, 32, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def few():
    """Weights of few drawn images and filters, and of a network that learned nothing."""
    return script.make(**FEW)


def test_drawn_images_repeat_and_differ():
    image, again = (drawn.dead_leaves(np.random.default_rng(3)) for _ in range(2))
    np.testing.assert_array_equal(image, again)
    assert image.shape == (32, 32, 3) and 0 <= image.min() < image.max() <= 1
    assert abs(drawn.dead_leaves(np.random.default_rng(4)) - image).mean() > 0.05


@pytest.mark.parametrize("kind", range(len(drawn.KINDS)))
def test_each_kind_of_drawn_image_repeats_varies_and_tells_its_factors(kind):
    drawings = [drawn.draw(np.random.default_rng((0, k)), kind) for k in range(12)]
    images, factors = map(np.stack, zip(*drawings, strict=True))
    again, _ = drawn.draw(np.random.default_rng((0, 3)), kind)
    np.testing.assert_array_equal(again, images[3])
    assert images.shape == (12, 40, 40, 3) and images.dtype == np.uint8
    assert len(np.unique(images.reshape(12, -1), axis=0)) == 12
    assert np.mean([image.std() > 5 for image in images]) > 0.8  # few are flat
    assert (factors[:, 0] == kind).all() and factors.shape == (12, 1 + len(drawn.FACTORS))
    told = factors[:, 1:]
    assert np.isfinite(told[:, -2:]).all()  # colourfulness and softness
    known = told[np.isfinite(told)]
    assert np.abs(known).max() < 6 and known.std() > 0.3
    angles = told[:, 2:4][np.isfinite(told[:, 2])]
    np.testing.assert_allclose((angles**2).sum(axis=1), 1, rtol=1e-5)


def test_drawn_images_depend_on_seed_and_number_alone():
    few, _ = drawn.drawn_images(7)
    more, factors = drawn.drawn_images(12)
    np.testing.assert_array_equal(more[:7], few)
    np.testing.assert_array_equal(factors[:, 0], np.arange(12) % 8)
    assert not np.array_equal(drawn.drawn_images(7, seed=1)[0], few)


def test_views_are_crops_that_keep_what_an_image_shows():
    rows = np.broadcast_to(np.arange(40, dtype=np.uint8)[:, None, None], (40, 40, 3))
    views = script.views(np.random.default_rng(0), np.stack([rows * 6] * 50))
    assert views.shape == (50, 32, 32, 3) and 0 <= views.min() < views.max() <= 1
    assert views.std(axis=2).max() < 1e-6  # rows stay rows, and none of a view is mirrored
    steps = np.diff(views.mean(axis=(2, 3)), axis=1)
    assert (steps > -1e-6).all()
    assert steps.max() < 1.51 * 6 / 255 * 40 / 32  # of a whole image with the most contrast
    inner = steps[(views.min(axis=(1, 2, 3)) > 0) & (views.max(axis=(1, 2, 3)) < 1)]
    assert len(inner) > 5 and inner.min() > 0.49 * 6 / 255 * 20 / 32  # of half a side, the least
    flipped = script.views(np.random.default_rng(0), np.stack([rows.swapaxes(0, 1) * 6] * 50))
    slopes = np.diff(flipped.mean(axis=(1, 3)), axis=1).mean(axis=1)
    assert 10 < np.sum(slopes < 0) < 40  # about half are mirrored
    colours = np.array([[140, 128, 116], [122, 128, 134]], np.uint8)  # of one grey
    halves = np.repeat(np.repeat(colours[None], 20, axis=1), 40, axis=0)
    views = script.views(np.random.default_rng(0), np.stack([halves] * 200))
    sides = views[:, :, 0].mean(axis=1) - views[:, :, -1].mean(axis=1)
    direction = (colours[0].astype(np.float32) - colours[1]) / 255
    shares = np.abs(sides @ direction) / (direction @ direction)
    np.testing.assert_allclose(
        sides, np.outer(sides @ direction, direction) / (direction @ direction), atol=1e-6
    )
    assert shares.max() < 1.61 * 1.51 and 0.1 < np.mean(shares < 1e-4) < 0.6  # grey, or one half
    plane = np.random.default_rng(1).random((1, 5, 4, 2)).astype(np.float32)
    places = np.array([[0.25, 3.5, 9.0, -1.0]])
    expected = [
        [np.interp(place, range(5), plane[0, :, w, c]) for w in range(4) for c in range(2)]
        for place in places[0]
    ]
    between = script._between(plane, places)
    np.testing.assert_allclose(between.reshape(4, 8), expected, rtol=1e-6)


def test_the_loss_is_of_contrast_kinds_and_known_factors(monkeypatch):
    outputs = RNG.normal(size=(4, 144)).astype(np.float32)
    factors = RNG.normal(size=(4, 9)).astype(np.float32)
    factors[:, 0], factors[1, 3:6] = (0, 5, 0, 5), np.nan

    class Fixed:
        """A network with these outputs."""

        def apply(self, params, pixels):
            return outputs

    monkeypatch.setattr(script, "encoder", Fixed)
    loss = float(script.loss_of({}, np.zeros((4, 32, 32, 3)), factors))
    z = outputs[:, :128].astype(np.float64)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    likeness = np.exp(z @ z.T / 0.2)
    pairs = [likeness[i, (i + 2) % 4] / (likeness[i].sum() - likeness[i, i]) for i in range(4)]
    shares = np.exp(outputs[:, 128:136].astype(np.float64))
    shares /= shares.sum(axis=1, keepdims=True)
    kinds = [shares[i, int(factors[i, 0])] for i in range(4)]
    errors = np.nanmean((outputs[:, 136:] - factors[:, 1:]).astype(np.float64) ** 2)
    expected = -np.mean(np.log(pairs)) - np.mean(np.log(kinds)) + errors
    assert loss == pytest.approx(expected, rel=1e-5)


def test_the_network_learns_the_same_again():
    images, factors = drawn.drawn_images(64)
    first, again, other = (script.learn(images, factors, 2, seed) for seed in (0, 0, 1))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    started = script.learn(images, factors, 0)
    assert not np.array_equal(first["Conv_0/kernel"], started["Conv_0/kernel"])
    assert not np.array_equal(first["Conv_0/kernel"], other["Conv_0/kernel"])
    assert all(np.array_equal(x, np.float16(x)) for x in first.values())  # as they ship


def test_weights_are_made_again_to_the_bit(few):
    again, other = script.make(**FEW), script.make(**FEW, seed=1)
    assert few.keys() == again.keys()
    assert all(np.array_equal(few[name], again[name]) for name in few)
    for name in ("3/fine/projection", "network/Conv_0/kernel", "1/GroupNorm_7/matrix"):
        assert not np.array_equal(few[name], other[name]), name


def wide_pair(image):
    """An image with its reflected border, by indices, and its mirror image."""
    places = np.abs(np.arange(-2, 34))
    places = np.where(places > 31, 62 - places, places)
    wide = image[places][:, places]
    return wide, wide[:, ::-1]


def views(image):
    """The eight views of an image, the network's four first."""
    return [x[i : i + 32, j : j + 32] for j in (0, 4) for x in wide_pair(image) for i in (0, 4)]


def test_filters_answer_as_the_formula_says(few):
    image, mean, projection = IMAGES[0], *(few[f"3/fine/{k}"] for k in ("mean", "projection"))
    halves, means = (slice(13), slice(13, 27)), []
    for view in views(image):
        above = np.zeros((27, 27, 7))
        for i in range(27):
            for j in range(27):
                patch = view[i : i + 6, j : j + 6].reshape(-1).astype(np.float64)
                patch = (patch - patch.mean()) / np.sqrt(patch.var() + 10 / 255**2)
                above[i, j] = np.maximum((patch - mean) @ projection - 1.5, 0)
        means.append([above[a, b].mean(axis=(0, 1)) for a in halves for b in halves])
    named = {name: np.asarray(value, np.float32) for name, value in few.items()}
    [answers] = prior.raw(image[None], named)["fine"]
    np.testing.assert_allclose(answers, np.sqrt(np.mean(means, axis=0)), rtol=1e-3, atol=1e-4)


def test_scattering_is_that_of_every_second_pixel_of_the_views(few):
    named = {name: np.asarray(value, np.float32) for name, value in few.items()}
    means = []
    for wide in wide_pair(IMAGES[0]):
        planes = np.moveaxis(scatter(wide[None], 2)[0], 0, -1)
        np.testing.assert_allclose(planes[::2, ::2], scattering()(wide[None])[0], atol=1e-6)
        for view in (planes[i : i + 16, j : j + 16] for i in (0, 2) for j in (0, 2)):
            means.append(view.reshape(4, 4, 4, 4, -1).mean(axis=(1, 3)).reshape(16, -1))
    [answers] = prior.raw(IMAGES[:1], named)["scattering"]
    np.testing.assert_allclose(answers, np.sqrt(np.mean(means, axis=0)), atol=1e-5)


def test_activations_are_those_of_the_network_over_squares_and_left_and_right(few):
    named = {name: np.asarray(value, np.float32) for name, value in few.items()}
    network = [name for name in named if name.startswith("network/")]
    flat = {tuple(name.split("/")[1:]): jnp.asarray(named[name]) for name in network}
    kept = []

    class Watched(ResNet9):
        """A ResNet-9 that keeps what its blocks make."""

        def _block(self, *args, **kwargs):
            kept.append(super()._block(*args, **kwargs))
            return kept[-1]

    images = jnp.asarray(np.stack(views(IMAGES[0])[:4]))
    Watched(144, width=32).apply({"params": unflatten_dict(flat)}, images - 0.5)
    answers = prior.raw(IMAGES[:1], named)
    for block, size, side in ((1, 16, 2), (3, 8, 2), (4, 8, 2), (5, 4, 2), (7, 1, 4)):
        planes = np.asarray(kept[block]).reshape(4, side, size, side, size, -1)
        squares = planes.mean(axis=(0, 2, 4))
        expected = [
            (squares[row, column] + squares[row, side - 1 - column]) / 2
            for row in range(side)
            for column in range(side // 2)
        ]
        np.testing.assert_allclose(answers[f"GroupNorm_{block}"][0], expected, atol=1e-5)
    assert len(kept) == 8 and prior.LAYERS.keys() == {f"GroupNorm_{k}" for k in (1, 3, 4, 5, 7)}


def test_grey_images_are_seen_by_the_network_as_coloured_ones(few):
    named = {name: np.asarray(value, np.float32) for name, value in few.items()}
    grey = IMAGES[..., :1]
    one, three = prior.raw(grey, named), prior.raw(np.repeat(grey, 3, axis=-1), named)
    for depth in prior.LAYERS:
        np.testing.assert_allclose(one[depth], three[depth], atol=1e-6)
        assert not np.array_equal(few[f"1/{depth}/centre"], few[f"3/{depth}/centre"])


def test_each_part_has_its_share_before_the_largest_variances_are_reduced(few):
    named = {name: np.asarray(value, np.float32) for name, value in few.items()}
    rows = np.asarray(prior.whiten_parts(prior.raw(IMAGES, named), named, 3))
    sizes = {"fine": 28, "coarse": 28, "scattering": 16 * 243, "network": 2 * 384 + 8 * 128}
    parts = np.split(rows, np.cumsum(list(sizes.values()))[:-1], axis=1)
    for part in parts:
        np.testing.assert_allclose((part**2).sum(axis=1), 100 / 4, rtol=1e-2)
    for depth in np.split(parts[-1], np.cumsum([128, 128, 256, 256]), axis=1):
        np.testing.assert_allclose((depth**2).sum(axis=1), 100 / 4 / 5, rtol=1e-2)
    centred = rows - named["3/all/centre"]
    directions = named["3/all/directions"]
    reduced = centred - np.einsum("kf,kg,ng->nf", directions, directions, centred)
    expected = 10 * reduced / np.linalg.norm(reduced, axis=1, keepdims=True)
    features = np.asarray(prior.with_weights(few)(IMAGES)).reshape(3, -1)
    np.testing.assert_allclose(features, expected, atol=1e-4)


def test_mirror_images_have_the_same_features(few):
    features = prior.with_weights(few)
    difference = lambda images: np.abs(features(IMAGES) - features(images)).max()  # noqa: E731
    assert difference(IMAGES[:, :, ::-1]) < 2e-3
    assert difference(IMAGES[:, ::-1]) > 2e-2  # the control: upside down


def test_the_largest_variances_become_smaller_by_the_formula():
    scales = np.array([9.0, 5.0, 3.0, 1.0, 1.0, 0.5])
    rows = (RNG.normal(size=(400, 6)) * scales) @ np.linalg.qr(RNG.normal(size=(6, 6)))[0] + 2
    mean, directions = script.reduce_largest(rows, 3, 0.25)
    np.testing.assert_allclose(mean, rows.mean(axis=0))
    before = np.linalg.eigvalsh(np.cov(rows, rowvar=False))[::-1]
    reduced = (rows - mean) - (rows - mean) @ directions.T @ directions
    after = np.linalg.eigvalsh(np.cov(reduced, rowvar=False))[::-1]
    np.testing.assert_allclose(after[:3], np.sqrt(before[:3] * before[2]), rtol=1e-9)
    np.testing.assert_allclose(after[3:], before[3:], rtol=1e-9)
    _, directions = script.reduce_largest(rows[:3], 100, 0.25)  # fewer rows than variances
    assert directions.shape == (2, 6)


@pytest.mark.parametrize("shape", [(28, 28, 1), (40, 256, 1), (64, 48, 3)])
def test_images_of_any_size_have_as_many_features(few, shape):
    features = prior.with_weights(few)
    like = features(np.zeros((1, 32, 32, shape[-1]), np.float32)).shape
    images = RNG.uniform(size=(2, *shape)).astype(np.float32)
    got = np.asarray(features(images))
    assert got.shape == (2, *like[1:]) and np.isfinite(got).all()
    assert np.isfinite(np.asarray(features(0 * images))).all()


@pytest.mark.parametrize("shape", [(27, 32, 1), (32, 257, 3), (32, 32, 4), (32, 32, 2)])
def test_other_images_are_refused_in_a_line(few, shape):
    with pytest.raises(DataError, match=r"28 to 256 pixels a side with 1 or 3 channels, got"):
        prior.with_weights(few)(np.zeros((1, *shape), np.float32))


def test_whole_numbers_that_are_no_bytes_are_refused():
    with pytest.raises(DataError, match=r"uint8 pixels or floats in \[0, 1\], not int32"):
        to_features(lambda x: x, np.zeros((1, 32, 32, 1), np.int32))


def test_the_packages_weights_are_those_of_its_hash(monkeypatch, tmp_path):
    assert parts.make_features(ConfigDict({"name": "prior"})) is not None
    with pytest.raises(DataError, match="other weights"):
        prior.prior(digest="0" * 64)
    damaged = bytearray(prior.FILE.read_bytes())
    damaged[-1] ^= 1
    for content in (bytes(damaged), b""):
        monkeypatch.setattr(prior, "FILE", tmp_path / "prior.safetensors")
        prior.FILE.write_bytes(content)
        with pytest.raises(DataError, match="safetensors is damaged: install it again"):
            parts.make_features(ConfigDict({"name": "prior"}))
