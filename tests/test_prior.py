"""Features of drawn images: what they are, what they refuse, how their weights come about."""

import numpy as np
import pytest
from ml_collections import ConfigDict

from bam.data.common import DataError
from bam.features import prior
from bam.features.dead_leaves import dead_leaves
from bam.features.extraction import to_features
from bam.training import parts
from scripts import prior as script

RNG = np.random.default_rng(0)
IMAGES = RNG.uniform(size=(3, 32, 32, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def few():
    """Weights of few drawn images and filters."""
    return script.make(30, 7)


def test_drawn_images_repeat_and_differ():
    image, again = (dead_leaves(np.random.default_rng(3)) for _ in range(2))
    np.testing.assert_array_equal(image, again)
    assert image.shape == (32, 32, 3) and 0 <= image.min() < image.max() <= 1
    assert abs(dead_leaves(np.random.default_rng(4)) - image).mean() > 0.05


def test_weights_are_made_again_to_the_bit(few):
    again, other = script.make(30, 7), script.make(30, 7, seed=1)
    assert few.keys() == again.keys()
    assert all(np.array_equal(few[name], again[name]) for name in few)
    assert not np.array_equal(few["3/fine/projection"], other["3/fine/projection"])


def test_filters_answer_as_the_formula_says(few):
    image, mean, projection = IMAGES[0], *(few[f"3/fine/{k}"] for k in ("mean", "projection"))
    above = np.zeros((27, 27, 7))
    for view in (image, image[:, ::-1]):
        for i in range(27):
            for j in range(27):
                patch = view[i : i + 6, j : j + 6].reshape(-1).astype(np.float64)
                patch = (patch - patch.mean()) / np.sqrt(patch.var() + 10 / 255**2)
                above[i, j] += np.maximum((patch - mean) @ projection - 1.5, 0) / 2
    halves = slice(13), slice(13, 27)
    expected = np.sqrt([above[a, b].mean(axis=(0, 1)) for a in halves for b in halves])
    named = {name: np.asarray(value, np.float32) for name, value in few.items()}
    [answers] = prior.raw(image[None], "fine", named)
    np.testing.assert_allclose(answers, expected, rtol=1e-3, atol=1e-4)


def test_each_part_has_the_same_energy_and_a_mirror_image_the_same_features(few):
    features = prior.with_weights(few)
    both = np.asarray(features(IMAGES)).reshape(3, -1)
    sizes = [16 * 243 if part == "scattering" else 28 for part in prior.PARTS]
    parts = np.split(both, np.cumsum(sizes)[:-1], axis=1)
    for part in parts:
        np.testing.assert_allclose((part**2).sum(axis=1), 100 / 3, rtol=1e-2)
    mirrored = np.asarray(features(IMAGES[:, :, ::-1])).reshape(3, -1)
    np.testing.assert_allclose(mirrored, both, atol=5e-3)


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
