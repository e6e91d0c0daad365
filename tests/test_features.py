"""Features of images: the scattering transform, what is kept on disk, what is refused."""

import hashlib
import json
import math
import os
import stat
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from ml_collections import ConfigDict

from bam import models
from bam.data import datasets, features
from bam.data.scattering import scattering
from bam.data.sources import photographs
from bam.release import export
from bam.training import finetune, loading, loop
from bam.training.backbone import backbone
from configs import digits

KYMATIO = Path(__file__).with_name("scattering_kymatio.npy")


def picture():
    """What kymatio 0.3.0's `Scattering2D(J=2, shape=(32, 28))` was given for that file."""
    y, x = np.mgrid[:32, :28].astype(float)
    wave = np.sin(0.7 * x + 0.3 * y) * np.exp(-((x - 9) ** 2 + (y - 14) ** 2) / 60)
    return (0.5 + 0.5 * wave + 0.1 * ((x * y) % 7 > 3)).astype(np.float32)[None, :, :, None]


def config_on(cache, **overrides):
    config = digits.get_config("dp_sgd")
    config.update({"accountant": "rdp", "num_steps": 3, "expected_batch_size": 20, "seed": 1})
    config.features.update({"name": "scattering", "groups": 9, "cache": str(cache)})
    config.model.name, config.microbatch_size = "linear", 7
    config.update_from_flattened_dict(overrides)
    return config


@pytest.fixture(autouse=True)
def forget():
    loading._datasets.clear()


def test_scattering_is_kymatios():
    found = np.moveaxis(np.asarray(scattering()(picture())[0]), -1, 0)
    expected = np.load(KYMATIO)
    assert found.shape == expected.shape == (81, 8, 7)
    # kymatio takes 3.1415 for π, and cuts its Gaussian off where a coarser grid has no frequencies.
    np.testing.assert_allclose(found, expected, atol=4e-4)
    assert np.abs(np.roll(found, 1, axis=1) - expected).max() > 0.05
    assert np.abs(np.roll(found[1:9], 1, axis=0) - expected[1:9]).max() > 0.02  # of the angles


def test_of_scattering_no_image_moves_another_and_each_channel_is_by_itself():
    images = np.asarray(jax.random.uniform(jax.random.key(0), (3, 16, 12, 2)))
    found = scattering(6)(images)
    assert found.shape == (3, 4, 3, 162)
    alone = scattering(6)(images[1:2])
    np.testing.assert_allclose(found[1], alone[0], atol=1e-5)
    plain = scattering()(images)
    np.testing.assert_allclose(plain[..., 81:], scattering()(images[..., 1:]), atol=1e-6)


def test_groups_have_mean_0_and_variance_1():
    images = np.asarray(jax.random.uniform(jax.random.key(0), (2, 16, 16, 3)))
    found = np.asarray(scattering(27)(images)).reshape(2, 16, 27, 9)
    np.testing.assert_allclose(found.mean((1, 3)), 0, atol=1e-4)
    assert found.var((1, 3)).max() < 1.0001
    assert found[:, :, 0].var() > 0.99  # the image itself varies by more than the floor of 1e-5


@pytest.mark.parametrize("shape", [(1, 30, 32, 1), (1, 4, 32, 1), (1, 32, 33, 1)])
def test_sides_that_scattering_cannot_take_are_refused(shape):
    with pytest.raises(ValueError, match=f"multiples of 4, from 8, got {shape[1]} × {shape[2]}"):
        scattering()(jnp.zeros(shape))


def test_whitened_photographs_vary_as_the_ridge_lets_them(channels=1):
    crops = photographs.crops(channels=channels)
    assert crops.shape[1:] == (32, 32, channels) and 0 <= crops.min() < crops.max() <= 1
    plain = np.asarray(scattering()(crops)).reshape(-1, 81 * channels).astype(np.float64)
    found = np.asarray(scattering(whiten=0.5)(crops)).reshape(-1, 81 * channels)
    values, vectors = np.linalg.eigh(np.corrcoef(plain, rowvar=False))
    expected = (vectors * values / (values + 0.5)) @ vectors.T
    np.testing.assert_allclose(found.mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(np.cov(found, rowvar=False), expected, atol=2e-3)
    assert np.abs(np.cov(found, rowvar=False) - np.eye(len(expected))).max() > 0.1


def test_whitening_comes_before_groups_and_keeps_images_apart():
    images = np.asarray(jax.random.uniform(jax.random.key(0), (3, 16, 12, 3)))
    found = np.asarray(scattering(1, 1.0)(images))
    np.testing.assert_allclose(found.mean((1, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(found.var((1, 2, 3)), 1, atol=1e-3)
    np.testing.assert_allclose(found[1], scattering(1, 1.0)(images[1:2])[0], atol=1e-4)
    assert np.abs(found - scattering(1)(images)).max() > 1


def test_mirrored_features_do_not_tell_left_from_right():
    images = np.asarray(jax.random.uniform(jax.random.key(0), (2, 16, 12, 1)))
    found, turned = (scattering(mirror=True)(x) for x in (images, images[:, :, ::-1]))
    np.testing.assert_allclose(found, turned, atol=1e-6)
    plain, turned = (scattering()(x) for x in (images, images[:, :, ::-1]))
    np.testing.assert_allclose(found, (plain + turned) / 2, atol=1e-6)
    assert np.abs(plain - turned).max() > 0.01


def test_whitening_that_is_negative_or_has_no_photographs_is_refused():
    for ridge in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"features\.whiten must be finite and not negative"):
            scattering(whiten=ridge)
    with pytest.raises(ValueError, match="photographs have 3 channels, or 1 when grey, not 2"):
        scattering(whiten=1.0)(jnp.zeros((1, 8, 8, 2)))


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"features.groups must divide 81 channels, got 10"):
        scattering(10)(jnp.zeros((1, 8, 8, 1)))


def test_features_are_computed_once_and_kept_for_their_owner_alone(tmp_path):
    said = []
    config = config_on(tmp_path / "kept")
    first = loading.make_dataset(config.dataset, config.features, said.append)
    assert [line.split(",")[0] for line in said] == [
        "features of 1",
        "features of 360 images",
    ]
    written = sorted((tmp_path / "kept").iterdir())
    assert len(written) == 2
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in written)
    loading._datasets.clear()
    second = loading.make_dataset(config.dataset, config.features, said.append)
    assert len(said) == 2
    for a, b in zip(first.train, second.train, strict=True):
        np.testing.assert_array_equal(a, b)
    assert first.train.images.dtype == np.float16
    assert first.train.images.shape == (1437, 2, 2, 81)
    np.testing.assert_array_equal(first.train.labels, datasets.load("digits").train.labels)
    expected = scattering(9)(datasets.load("digits").test.images[:5].astype(np.float32) / 255)
    np.testing.assert_allclose(first.test.images[:5], expected, atol=5e-3)


@pytest.mark.parametrize("damage", ["cut", "other numbers", "empty", "pickle", "zip", "header"])
def test_what_is_not_the_maps_any_more_is_computed_again(tmp_path, damage):
    config = config_on(tmp_path)
    first = loading.make_dataset(config.dataset, config.features)
    for path in tmp_path.iterdir():
        whole = path.read_bytes()
        if damage == "cut":
            path.write_bytes(whole[:-100])
        elif damage == "empty":
            path.write_bytes(b"")
        elif damage == "zip":
            path.write_bytes(b"PK\x03\x04" + whole[4:])
        elif damage == "header":
            path.write_bytes(whole[:10] + b"\x8a" + whole[11:])
        elif damage == "pickle":
            np.save(path, np.array([{}], dtype=object), allow_pickle=True)
        else:
            np.save(path, np.load(path) + 1)
    loading._datasets.clear()
    said = []
    again = loading.make_dataset(config.dataset, config.features, said.append)
    np.testing.assert_array_equal(first.train.images, again.train.images)
    assert sum("computed again" in line for line in said) == 2


def test_other_images_and_other_options_have_files_of_their_own(tmp_path):
    digits_, half = datasets.load("digits"), lambda x: x[:, ::2, ::2] / 2
    features.extract(digits_, half, {"name": "half"}, tmp_path)
    features.extract(digits_, half, {"name": "half", "groups": 3}, tmp_path)
    changed = digits_.train.images.copy()
    changed[700, 0, 0, 0] ^= 1
    features.extract(
        digits_._replace(train=digits_.train._replace(images=changed)),
        half,
        {"name": "half"},
        tmp_path,
    )
    assert len(list(tmp_path.iterdir())) == 5  # the test images are the same twice


def test_a_map_that_changed_behind_its_name_is_noticed(tmp_path):
    data, said = datasets.load("digits"), []
    first = features.extract(data, lambda x: x, {"name": "own"}, tmp_path, said.append)
    second = features.extract(data, lambda x: 0.9 * x, {"name": "own"}, tmp_path, said.append)
    assert any("computed again" in line for line in said)
    np.testing.assert_allclose(second.train.images, 0.9 * first.train.images, atol=1e-3)


def test_a_map_that_fails_is_not_taken_for_a_damaged_file(tmp_path):
    images = datasets.load("digits").test.images[:20]
    computed = lambda x: features.to_features(lambda pixels: pixels, x)  # noqa: E731
    features._kept(computed, images, {}, tmp_path, lambda line: None)
    failures = iter([RuntimeError("out of memory")])

    def failing(x):
        for failure in failures:  # the first time
            raise failure
        return computed(x)

    with pytest.raises(RuntimeError, match="out of memory"):
        features._kept(failing, images, {}, tmp_path, lambda line: None)


def test_a_folder_that_cannot_be_written_loses_only_the_time(tmp_path):
    (tmp_path / "file").write_text("")
    said = []
    config = config_on(tmp_path / "file" / "below")
    found = loading.make_dataset(config.dataset, config.features, said.append)
    assert found.train.images.shape == (1437, 2, 2, 81)
    assert any("not kept" in line for line in said)


def test_what_a_killed_process_left_is_in_no_way(tmp_path, monkeypatch):
    data = datasets.load("digits")
    features.extract(data, lambda x: x, {}, tmp_path / "first")
    names = [path.name for path in (tmp_path / "first").iterdir()]
    (tmp_path / "second").mkdir()
    for name in names:
        (tmp_path / "second" / f"{name}.{os.getpid()}.partial").write_bytes(b"")
    features.extract(data, lambda x: x, {}, tmp_path / "second")
    assert all((tmp_path / "second" / name).exists() for name in names)

    def full(out, array):
        out.write(b"some")
        raise OSError("no space left")

    monkeypatch.setattr(np, "save", full)
    features.extract(data, lambda x: x, {}, tmp_path / "third")
    assert not list((tmp_path / "third").iterdir())


@pytest.mark.parametrize(
    "feature_map",
    [
        lambda x: x - x[:1],
        lambda x: jnp.cumsum(x, 0) / 100,
        lambda x: x - jnp.roll(x, 1, 0).at[0].set(0),
        lambda x: x.reshape(-1, 2, *x.shape[1:])[:, ::-1].reshape(x.shape),
        lambda x: x + jnp.arange(len(x))[:, None, None, None],
    ],
    ids=["the first", "all before", "the one before", "pairs", "the place"],
)
def test_a_map_is_tried_in_company_before_and_after(feature_map):
    with pytest.raises(datasets.DataError, match="depend on the images beside it"):
        features.extract(datasets.load("digits"), feature_map, {})


def mixing(strength=1.0):
    """As BatchNorm in training: the mean of the images at hand is taken off."""
    return lambda images: images - strength * images.mean(0)


def by_pixel():
    return lambda images: images * 2


def test_a_map_that_mixes_images_is_refused():
    config = config_on("")
    for strength in (1.0, 0.05):
        section = {"name": f"{__name__}:mixing", "cache": "", "strength": strength}
        config.features = ConfigDict(section)
        with pytest.raises(ValueError, match="depend on the images beside it"):
            loop.build(config)
    config.features = ConfigDict({"name": f"{__name__}:by_pixel", "cache": ""})
    assert loop.build(config).dataset.train.images.max() == 2


@pytest.mark.parametrize(
    ("feature_map", "match"),
    [
        (lambda x: x.reshape(len(x), -1), r"expected \[n, height, width, channels\]"),
        (lambda x: x[:1], "a row for each image"),
        (lambda x: 1e6 * x, "not finite in float16"),
        (lambda x: jnp.log(x), "not finite in float16"),
    ],
)
def test_features_that_cannot_be_are_refused(feature_map, match):
    with pytest.raises(datasets.DataError, match=match):
        features.extract(datasets.load("digits"), feature_map, {})


def test_the_same_examples_are_held_out_of_features_as_of_images(tmp_path):
    config = config_on(tmp_path, **{"dataset.holdout": 100})
    of_features = loading.make_dataset(config.dataset, config.features)
    of_images = loading.make_dataset(config.dataset)
    for a, b in ((of_features.train, of_images.train), (of_features.test, of_images.test)):
        np.testing.assert_array_equal(a.labels, b.labels)
        expected = scattering(9)(b.images[:20].astype(np.float32) / 255)
        np.testing.assert_allclose(a.images[:20], expected, atol=5e-3)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"augment.shift": 1}, "features cannot be shifted"),
        ({"augment.views": 2}, "features cannot be shifted"),
        ({"augment.flip": "horizontal"}, "features cannot be shifted"),
        (
            {"public_clip.quantile": 0.5, "public_clip.dataset": "digits"},
            "public_clip reads images",
        ),
        (
            {"features.name": "wavelets"},
            "unknown features 'wavelets'; choose from backbone, scattering",
        ),
        ({"features.name": ""}, "unknown features ''"),
        ({"features.groups": 10}, r"features\.groups must divide 81 channels"),
        ({"features.name": "nowhere:map"}, "cannot be imported"),
    ],
)
def test_what_features_cannot_go_with_is_refused(tmp_path, change, match):
    with pytest.raises(ValueError, match=match):
        loop.build(config_on(tmp_path, **change))


def test_zeros_of_the_shape_of_features_take_no_memory():
    blank = features.blank(datasets.stand_in("cifar10"), scattering(27))
    assert blank.train.images.shape == (50_000, 8, 8, 243)
    assert blank.train.images.strides == (0, 0, 0, 0)
    datasets.check(blank)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A ResNet-18's, made at random; and the functions of that network."""
    network = models.as_functions(models.create("resnet18", 3, 64), (32, 32, 3))
    params = network.init(jax.random.key(0))
    file = tmp_path_factory.mktemp("weights") / "public.safetensors"
    finetune.save(params, file)
    return file, network, params


def test_a_backbones_features_are_what_its_last_layer_sees(weights):
    file, network, params = weights
    images = np.random.default_rng(0).random((3, 32, 32, 3), np.float32)
    made = backbone("resnet18", str(file), 32, mean=0.3, std=0.2)(images)
    assert made.shape == (3, 1, 1, 512)
    logits = made[:, 0, 0] @ params["head"]["kernel"] + params["head"]["bias"]
    expected = network.logits(params, (images - 0.3) / 0.2)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert np.abs(expected - network.logits(params, images)).max() > 1e-3  # the constants matter


def test_the_last_layer_of_a_backbone_is_trained_on_features_and_released(weights, tmp_path):
    digest = hashlib.sha256(weights[0].read_bytes()).hexdigest()
    options = {"model": "resnet18", "weights": str(weights[0]), "size": 32, "groups": None}
    config = config_on(tmp_path / "kept")
    config.features.update({"name": "backbone", **options})
    result = loop.train(loop.build(config), 1, tmp_path / "run")
    assert result.summary["num_params"] == 512 * 10 + 10
    export.export(tmp_path / "run", tmp_path / "out", nominal=True)
    said = (tmp_path / "out" / "PRIVACY.md").read_text()
    assert f"by `backbone`**, a frozen network of the weights of SHA-256 {digest}," in said
    released = export.load(tmp_path / "out")
    assert released.logits(released.params, np.zeros((2, 1, 1, 512), np.float32)).shape == (2, 10)
    assert str(tmp_path) not in said


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": "resnet9"}, "a vision transformer or a ResNet, not 'resnet9'"),
        ({"model": "vit_ti16"}, "lacks"),
        ({"weights": ""}, "needs weights"),
        ({"size": 0}, "needs weights, and a size"),
        ({"std": 0.0}, "needs weights, and a size and std above 0"),
    ],
)
def test_a_backbone_that_cannot_be_is_refused(weights, changes, match):
    options = {"model": "resnet18", "weights": str(weights[0]), "size": 32} | changes
    with pytest.raises(ValueError, match=match):
        backbone(**options)


def test_a_release_takes_images_and_says_where_its_features_come_from(tmp_path):
    config = config_on(tmp_path / "kept")
    built = loop.build(config)
    result = loop.train(built, 1, tmp_path / "run")
    export.export(tmp_path / "run", tmp_path / "out", nominal=True)
    released = export.load(tmp_path / "out")
    images, labels = datasets.load("digits").test
    right = np.argmax(released.logits(released.params, images), axis=1) == labels
    assert np.mean(right) == pytest.approx(result.summary["test_accuracy"], abs=0.006)
    facts = json.loads((tmp_path / "out" / "model.json").read_text())
    assert facts["features"] == {"name": "scattering", "groups": 9}
    said = (tmp_path / "out" / "PRIVACY.md").read_text()
    assert "| features of the examples | by `scattering`, a fixed map of each image alone" in said
    assert str(tmp_path) not in said


def test_features_are_of_the_weights_that_a_file_had_when_the_run_was_built(weights, tmp_path):
    file, own = weights[0], tmp_path / "weights.safetensors"
    own.write_bytes(file.read_bytes())
    config = config_on(tmp_path / "kept")
    options = {"model": "resnet18", "weights": str(own), "size": 32, "groups": None}
    config.features.update({"name": "backbone", **options})
    first = loop.build(config)
    changed = safetensors.numpy.load(own.read_bytes())
    name = next(k for k in changed if k.endswith("kernel"))
    changed[name] = changed[name] * np.float32(1.001)  # less than a damaged row would differ by
    own.write_bytes(safetensors.numpy.save(changed))
    second = loop.build(config)
    assert first.features_digest == hashlib.sha256(file.read_bytes()).hexdigest()
    assert second.features_digest == hashlib.sha256(own.read_bytes()).hexdigest()
    assert len(list((tmp_path / "kept").glob("*.npy"))) == 4  # a train and a test split of each
    own.unlink()
    assert loop.train(first, 1).summary["features_digest"] == first.features_digest


def test_an_image_that_is_replaced_by_nothing_changes_no_bit_of_another():
    images = np.random.default_rng(0).integers(0, 256, (300, 8, 8, 1), np.uint8)
    without = images.copy()
    without[7] = 0

    def others_differ(feature_map):
        computed = jax.jit(lambda x: features.to_features(feature_map, x))
        found = [features._of_rows(computed, x) for x in (images, without)]
        return bool((np.delete(found[0], 7, 0) != np.delete(found[1], 7, 0)).any())

    assert not others_differ(scattering(9))
    assert others_differ(lambda x: x - x.mean(0))
