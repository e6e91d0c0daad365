"""Features of images: the scattering transform, what is kept on disk, what is refused."""

import hashlib
import io
import json
import math
import stat
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from bam import models
from bam.data import datasets
from bam.data.sources import builtin
from bam.features import extraction, photographs
from bam.features.backbone import backbone
from bam.features.scattering import scattering
from bam.models import finetune
from bam.privacy import statement
from bam.release import export
from bam.training import loading, loop
from configs import digits
from tests.cases import forget_data, refused, several_devices

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
    forget_data()


@pytest.fixture
def few(monkeypatch):
    """Digits are eighty to train on and twenty to test."""
    splits = zip(builtin.digits(), (80, 20), strict=True)
    digits_ = [datasets.Split(*(x[:number] for x in split)) for split, number in splits]
    monkeypatch.setitem(builtin.SPLITS, "digits", lambda: digits_)
    monkeypatch.setattr(extraction, "CHUNK", 32)


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


def test_whitened_photographs_vary_as_the_ridge_lets_them():
    crops = photographs.crops(channels=1)
    assert crops.shape[1:] == (32, 32, 1) and 0 <= crops.min() < crops.max() <= 1
    plain = np.asarray(scattering()(crops)).reshape(-1, 81).astype(np.float64)
    found = np.asarray(scattering(whiten=0.5)(crops)).reshape(-1, 81)
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


def extracted(feature_map):
    return extraction.extract(datasets.load("digits"), feature_map, {})


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: scattering()(jnp.zeros((1, 30, 32, 1))), "of 4, from 8, got 30 × 32"),
        (lambda: scattering()(jnp.zeros((1, 4, 32, 1))), "of 4, from 8, got 4 × 32"),
        (lambda: scattering()(jnp.zeros((1, 32, 33, 1))), "of 4, from 8, got 32 × 33"),
        (lambda: scattering(10)(jnp.zeros((1, 8, 8, 1))), "groups must divide 81 channels, got 10"),
        (lambda: scattering(whiten=-1), r"features\.whiten must be finite and not negative"),
        (lambda: scattering(whiten=math.nan), "must be finite"),
        (lambda: scattering(whiten=math.inf), "must be finite"),
        (lambda: scattering(whiten=1.0)(jnp.zeros((1, 8, 8, 2))), "3 channels, or 1 when grey, no"),
        (lambda: extracted(lambda x: x.reshape(len(x), -1)), r"expected \[n, height, width, chann"),
        (lambda: extracted(lambda x: x[:1]), "a row for each image"),
        (lambda: extracted(lambda x: 1e6 * x), "not finite in float16"),
        (lambda: extracted(jnp.log), "not finite in float16"),
    ],
)
def test_features_that_cannot_be_are_refused(attempt, message):
    refused(message, attempt)


@pytest.mark.parametrize(
    "feature_map",
    [
        lambda x: x - x[:1],
        lambda x: jnp.cumsum(x, 0) / 100,
        lambda x: x - jnp.roll(x, 1, 0).at[0].set(0),
        lambda x: x.reshape(-1, 2, *x.shape[1:])[:, ::-1].reshape(x.shape),
        lambda x: x + jnp.arange(len(x))[:, None, None, None],
        lambda x: x - x.mean(0),
        lambda x: x - 0.05 * x.mean(0),
    ],
    ids=["first", "all before", "one before", "pairs", "place", "BatchNorm", "a little of it"],
)
def test_a_map_that_mixes_images_is_refused(feature_map):
    refused("depend on the images beside it", extracted, feature_map)


def test_features_are_computed_once_and_kept_for_their_owner_alone(tmp_path, few):
    said = []
    config = config_on(tmp_path / "kept")
    first = loading.make_dataset(config.dataset, config.features, said.append)
    assert [line.split(",")[0] for line in said] == [f"features of {n} images" for n in (80, 20)]
    written = sorted((tmp_path / "kept").iterdir())
    assert len(written) == 2
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in written)
    forget_data()
    second = loading.make_dataset(config.dataset, config.features, said.append)
    assert len(said) == 2
    for a, b in zip(first.train, second.train, strict=True):
        np.testing.assert_array_equal(a, b)
    assert first.train.images.dtype == np.float16
    assert first.train.images.shape == (80, 2, 2, 81)
    np.testing.assert_array_equal(first.train.labels, datasets.load("digits").train.labels)
    expected = scattering(9)(datasets.load("digits").test.images[:5].astype(np.float32) / 255)
    np.testing.assert_allclose(first.test.images[:5], expected, atol=5e-3)


DAMAGE = {
    "cut": lambda whole: whole[:-100],
    "empty": lambda whole: b"",
    "zip": lambda whole: b"PK\x03\x04" + whole[4:],
    "header": lambda whole: whole[:10] + b"\x8a" + whole[11:],
    "pickle": lambda whole: npy(np.array([{}], dtype=object)),
    "other numbers": lambda whole: npy(np.load(io.BytesIO(whole)) + 1),
}


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_the_maps_any_more_is_computed_again(tmp_path, damage):
    data, said = datasets.load("digits"), []
    first = extraction.extract(data, lambda x: x[:, ::2], {}, tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(DAMAGE[damage](path.read_bytes()))
    again = extraction.extract(data, lambda x: x[:, ::2], {}, tmp_path, said.append)
    np.testing.assert_array_equal(first.train.images, again.train.images)
    assert (
        sum(x.endswith((": computing them again", ": computing features again")) for x in said) == 2
    )


def test_other_images_and_other_options_have_files_of_their_own(tmp_path):
    digits_, half = datasets.load("digits"), lambda x: x[:, ::2, ::2] / 2
    extraction.extract(digits_, half, {"name": "half"}, tmp_path)
    extraction.extract(digits_, half, {"name": "half", "groups": 3}, tmp_path)
    changed = digits_.train.images.copy()
    changed[700, 0, 0, 0] ^= 1
    extraction.extract(
        digits_._replace(train=digits_.train._replace(images=changed)),
        half,
        {"name": "half"},
        tmp_path,
    )
    assert len(list(tmp_path.iterdir())) == 5  # the test images are the same twice


def test_a_map_that_changed_behind_its_name_is_noticed(tmp_path):
    data, said = datasets.load("digits"), []
    first = extraction.extract(data, lambda x: x, {"name": "own"}, tmp_path, said.append)
    second = extraction.extract(data, lambda x: 0.9 * x, {"name": "own"}, tmp_path, said.append)
    assert any("computing them again" in line for line in said)
    np.testing.assert_allclose(second.train.images, 0.9 * first.train.images, atol=1e-3)


def test_a_small_change_of_a_map_is_noticed(tmp_path):
    data, numbers = datasets.load("digits"), np.full(3, 0.5, np.float32)
    for change in (1.0, 1.005, 1.00001):
        numbers = np.full(3, change / 2, np.float32)
        for times in range(2):  # computed, then read
            said, given = [], jnp.asarray(numbers)
            map_ = lambda x, given=given: jax.jit(lambda y: y * given.sum())(x)  # noqa: E731
            kept = extraction.extract(data, map_, {"name": "own"}, tmp_path, said.append)
            assert [any("kept in" in x for x in said)] == [times == 0], (change, said)
            expected = (data.train.images / 255 * numbers.sum()).astype(np.float16)
            np.testing.assert_allclose(kept.train.images, expected, rtol=2e-3)


def test_kept_rows_that_differ_in_more_than_a_rounding_are_computed_again(tmp_path):
    data, said = datasets.load("digits"), []
    scale = {"by": 1.0}  # behind a callback, where no program shows it

    def map_(x):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda y: np.asarray(y) * np.float32(scale["by"]), like, x)

    for by, again in ((1.0, False), (1.0, False), (1.0002, False), (1.005, True)):
        scale["by"], said[:] = by, []
        extraction.extract(data, map_, {"name": "own"}, tmp_path, said.append)
        assert any("has other features than this map" in x for x in said) == again, by


def test_a_map_that_fails_is_not_taken_for_a_damaged_file(tmp_path):
    images = datasets.load("digits").test.images[:20]
    computed = lambda x: extraction.to_features(lambda pixels: pixels, x)  # noqa: E731
    extraction.load_or_compute(computed, b"", images, {}, tmp_path, lambda line: None)
    failures = iter([RuntimeError("out of memory")])

    def failing(x):
        for failure in failures:  # the first time
            raise failure
        return computed(x)

    with pytest.raises(RuntimeError, match="out of memory"):
        extraction.load_or_compute(failing, b"", images, {}, tmp_path, lambda line: None)


def test_a_folder_that_cannot_be_written_loses_only_the_time(tmp_path):
    (tmp_path / "file").write_text("")
    said = []
    found = extraction.extract(
        datasets.load("digits"), lambda x: x, {}, tmp_path / "file" / "below", said.append
    )
    assert found.train.images.shape == (1437, 8, 8, 1)
    assert any("could not be written" in line for line in said)


def test_a_disk_that_is_full_is_left_as_it_was(tmp_path, monkeypatch):
    data = datasets.load("digits")

    def full(path, array):
        path.write_bytes(b"some")
        raise OSError("no space left")

    monkeypatch.setattr(np, "save", full)
    extraction.extract(data, lambda x: x, {}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_same_examples_are_held_out_of_features_as_of_images(tmp_path, few):
    config = config_on(tmp_path, **{"dataset.holdout": 30})
    of_features = loading.make_dataset(config.dataset, config.features)
    of_images = loading.make_dataset(config.dataset)
    for a, b in ((of_features.train, of_images.train), (of_features.test, of_images.test)):
        np.testing.assert_array_equal(a.labels, b.labels)
        expected = scattering(9)(b.images[:20].astype(np.float32) / 255)
        np.testing.assert_allclose(a.images[:20], expected, atol=5e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"augment.shift": 1}, "features cannot be shifted"),
        ({"augment.views": 2}, "features cannot be shifted"),
        ({"augment.flip": "horizontal"}, "features cannot be shifted"),
        (
            {"features.name": "wavelets"},
            "unknown features 'wavelets'; choose from backbone, prior, scat",
        ),
        ({"features.name": ""}, "unknown features ''"),
        ({"features.groups": 10}, r"features\.groups must divide 81 channels"),
        ({"features.name": "nowhere:map"}, "cannot be imported"),
    ],
)
def test_what_features_cannot_go_with_is_refused(tmp_path, change, message):
    refused(message, loop.build, config_on(tmp_path, **change))


def test_zeros_of_the_shape_of_features_take_no_memory():
    blank = extraction.blank(datasets.stand_in("cifar10"), scattering(27))
    assert blank.train.images.shape == (50_000, 8, 8, 243)
    assert blank.train.images.strides == (0, 0, 0, 0)
    datasets.check(blank)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Returns a file of random weights, their small vision transformer, and the weights."""
    network = models.as_functions(models.create("vit_ti16", 3, 1), (16, 16, 3))
    rng = np.random.default_rng(0)

    def drawn(like):  # without compiling the network's own initialisation
        mean, std = (1.0, 0.1) if like.ndim == 1 else (0.0, np.prod(like.shape[:-1]) ** -0.5)
        return jnp.asarray(rng.normal(mean, std, like.shape), jnp.float32)

    params = jax.tree.map(drawn, jax.eval_shape(network.init, jax.random.key(0)))
    file = tmp_path_factory.mktemp("weights") / "public.safetensors"
    finetune.save(params, file)
    return file, network, params


def test_a_backbones_features_are_what_its_last_layer_sees(weights):
    file, network, params = weights
    images = np.random.default_rng(0).random((3, 16, 16, 3), np.float32)
    made = backbone("vit_ti16", str(file), 16, mean=0.3, std=0.2)(images)
    assert made.shape == (3, 1, 1, 192)
    logits = made[:, 0, 0] @ params["head"]["kernel"] + params["head"]["bias"]
    expected = network.logits(params, (images - 0.3) / 0.2)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert np.abs(expected - network.logits(params, images)).max() > 1e-3  # the constants matter
    headless = models.MODELS["resnet18"].make(0, 8).init_with_output
    assert jax.eval_shape(headless, jax.random.key(0), images)[0].shape == (3, 8 * 2**3)


@pytest.mark.slow
def test_the_last_layer_of_a_backbone_is_trained_on_features_and_released(weights, tmp_path, few):
    digest = hashlib.sha256(weights[0].read_bytes()).hexdigest()
    options = {"model": "vit_ti16", "weights": str(weights[0]), "size": 16, "groups": None}
    config = config_on(tmp_path / "kept")
    config.features.update({"name": "backbone", **options})
    result = loop.train(loop.build(config), 1, tmp_path / "run")
    assert result.summary["num_params"] == 192 * 10 + 10
    export.export(tmp_path / "run", tmp_path / "out", nominal=True)
    said = (tmp_path / "out" / "PRIVACY.md").read_text()
    facts = {"features": "declared", "features_name": "backbone", "features_digest": digest}
    facts["features_weights_known"] = True
    assert f"| features of the examples | {statement.render(facts, 'seen')} |" in said
    released = export.load(tmp_path / "out")
    assert released.logits(released.params, np.zeros((2, 1, 1, 192), np.float32)).shape == (2, 10)
    assert str(tmp_path) not in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "resnet9"}, "model='resnet9' must be a vision transformer or a ResNet"),
        ({"model": "resnet18"}, "lacks"),
        ({"weights": ""}, "needs weights"),
        ({"size": 0}, "features.size is 0"),
        ({"std": 0.0}, "features.std is 0.0: one or three positive numbers"),
    ],
)
def test_a_backbone_that_cannot_be_is_refused(weights, changes, message):
    options = {"model": "vit_ti16", "weights": str(weights[0]), "size": 16} | changes
    refused(message, backbone, **options)


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
    words = "a fixed map of each image alone, made without these data"
    assert f"| features of the examples | by `scattering`, {words} |" in said
    assert str(tmp_path) not in said


def test_features_are_of_the_weights_that_a_file_had_when_the_run_was_built(weights, tmp_path, few):
    file, own = weights[0], tmp_path / "weights.safetensors"
    own.write_bytes(file.read_bytes())
    config = config_on(tmp_path / "kept")
    options = {"model": "vit_ti16", "weights": str(own), "size": 16, "groups": None}
    config.features.update({"name": "backbone", **options})
    first = loop.build(config)
    changed = safetensors.numpy.load(own.read_bytes())
    name = next(k for k in changed if k.endswith("kernel"))
    changed[name] = changed[name] * np.float32(1.001)  # less than a damaged row would differ by
    own.write_bytes(safetensors.numpy.save(changed))
    second = loop.build(config)
    assert first.features_digest == hashlib.sha256(file.read_bytes()).hexdigest()
    assert second.features_digest == hashlib.sha256(own.read_bytes()).hexdigest()
    own.unlink()
    ours, theirs = (run.load().train.images for run in (first, second))
    # Each is of its weights, which were read when it was built.
    assert not np.array_equal(ours, theirs)
    assert len(list((tmp_path / "kept").glob("*.npy"))) == 4  # a train and a test split of each
    assert loop.train(first, 1).summary["features_digest"] == first.features_digest


def test_an_image_that_is_replaced_by_nothing_changes_no_bit_of_another():
    images = np.random.default_rng(0).integers(0, 256, (300, 8, 8, 1), np.uint8)
    without = images.copy()
    without[7] = 0

    def others_differ(feature_map):
        computed = jax.jit(lambda x: extraction.to_features(feature_map, x))
        found = [extraction.in_chunks(computed, x) for x in (images, without)]
        return bool((np.delete(found[0], 7, 0) != np.delete(found[1], 7, 0)).any())

    assert not others_differ(scattering(9))
    assert others_differ(lambda x: x - x.mean(0))


def test_a_map_on_several_devices_gives_the_bits_of_one_and_the_same_file(tmp_path, monkeypatch):
    several_devices(2)
    images = np.random.default_rng(0).integers(0, 256, (300, 8, 8, 1), np.uint8)
    alone = jax.jit(lambda x: extraction.to_features(scattering(9), x))
    chunk = jnp.asarray(images[: extraction.CHUNK])
    traced = jax.make_jaxpr(alone)(chunk)
    shared = extraction._on_all_devices(alone, traced)
    assert len(shared(chunk).sharding.device_set) == math.gcd(8, jax.local_device_count())
    features = extraction.in_chunks(shared, images)
    data = datasets.load("digits")
    kept = extraction.extract(data, scattering(9), {}, tmp_path)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    on_one = extraction._on_all_devices(alone, traced)
    assert len(on_one(chunk).sharding.device_set) == 1
    np.testing.assert_array_equal(features, extraction.in_chunks(on_one, images))
    lines = []
    again = extraction.extract(data, scattering(9), {}, tmp_path, lines.append)
    assert not lines  # the files are those of this map, on one device, too
    np.testing.assert_array_equal(again.train.images, kept.train.images)


def test_a_map_with_a_callback_stays_on_one_device():
    several_devices(2)

    def doubled(x):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.jit(lambda y: jax.pure_callback(lambda z: 2 * np.asarray(z), like, y))(x)

    images = np.ones((3, 4, 4, 1), np.float32)
    for map_, is_alone in ((doubled, True), (lambda x: 2 * x, False)):
        alone = jax.jit(lambda x, map_=map_: extraction.to_features(map_, x))
        like = jax.ShapeDtypeStruct((extraction.CHUNK, 4, 4, 1), np.float32)
        computed = extraction._on_all_devices(alone, jax.make_jaxpr(alone)(like))
        chunk = jnp.ones(like.shape, like.dtype)
        assert (len(computed(chunk).sharding.device_set) == 1) == is_alone
        np.testing.assert_array_equal(extraction.in_chunks(computed, images), 2 * images)
