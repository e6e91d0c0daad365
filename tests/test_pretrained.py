"""Frozen weights stay as they were and cost nothing, and initial weights are checked."""

import json
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import traverse_util

from bam import models
from bam.audit import whole_run
from bam.core import pytree
from bam.data import datasets
from bam.models import finetune, pretrained
from bam.privacy import statement
from bam.release import export
from bam.training import config as base
from bam.training import examples, loop, parts, rundir
from configs import digits
from scripts.benchmarks import arithmetic
from tests import cases
from tests.cases import assert_close, assert_same_bits, distance, random_images, refused

HEAD = "Dense_1"
SHAPES = {
    "Dense_0/bias": (4,), "Dense_0/kernel": (16, 4), "Dense_1/bias": (3,), "Dense_1/kernel": (4, 3),
}  # fmt: skip


def own_data():
    return random_images("own", 40, 20, mean=0.5, std=0.25)


def tiny(**overrides):
    config = digits.get_config("dp_sgd")
    config.update({"accountant": "rdp", "num_steps": 3, "expected_batch_size": 20})
    config.update({"microbatch_size": 10, "ema_decay": 0.9, "clip_norm": 0.1})
    config.model.update({"name": "examples.own_model:mlp", "width": 4})
    config.checkpoint.every, config.eval.every = 1, 0
    config.update_from_flattened_dict(overrides)
    return config


def model():
    module = parts.make_model(tiny().model, 3)
    return models.as_functions(module, (4, 4, 1))


@pytest.fixture(scope="module")
def given():
    """Weights of somebody else's: name -> array."""
    rng = np.random.default_rng(7)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def file(given, tmp_path_factory):
    path = tmp_path_factory.mktemp("given") / "weights.safetensors"
    path.write_bytes(safetensors.numpy.save(given))
    return path


@pytest.fixture(scope="module")
def of_head(file):
    """An experiment that trains the last layer alone, from the file's weights."""
    return loop.build(tiny(init_from=str(file), trainable=HEAD), own_data())


@pytest.fixture(scope="module")
def finished(of_head, tmp_path_factory):
    """A run of it without a seed: its workdir and what it left in memory."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    return workdir, loop.train(of_head, None, workdir)


def test_what_is_frozen_never_changes_and_nothing_else_of_its_shape_exists(
    of_head, finished, given
):
    state, summary = finished[1].state, finished[1].summary
    for layer, tensors in (("Dense_0", state.frozen), ("Dense_1", of_head.init(1).params)):
        assert set(tensors) == {layer}
        for name in ("bias", "kernel"):
            np.testing.assert_array_equal(tensors[layer][name], given[f"{layer}/{name}"])
    assert not np.array_equal(state.params["Dense_1"]["kernel"], given["Dense_1/kernel"])
    others = jax.tree.leaves(state._replace(frozen={}))
    assert sum(x.shape == (16, 4) for x in others) == 0
    assert sum(x.shape == (4, 3) for x in others) == 5  # θ, its average, two moments, the gradient
    assert (of_head.num_params, of_head.num_frozen) == (4 * 3 + 3, 16 * 4 + 4)
    assert (summary["num_params"], summary["num_frozen"]) == (15, 68)


def test_gradient_norm_and_noise_are_those_of_the_trained_part_alone(of_head, given):
    run = whole_run.record(of_head, 0)
    assert run.noise.shape == (3, 15)
    assert 0.6 < np.std(run.noise) < 1.4
    state = of_head.init(0)
    own, _ = of_head.mean_gradients(state, of_head.rows(np.arange(8)))
    images = datasets.prepare(of_head.dataset, of_head.dataset.train.images[:8])
    examples = {"image": images[:, None], "label": jnp.asarray(of_head.dataset.train.labels[:8])}
    params = finetune.merge(state.params, state.frozen)
    assert_same_bits(
        params, jax.tree.map(jnp.asarray, traverse_util.unflatten_dict(given, sep="/"))
    )
    whole = jax.vmap(jax.grad(model().loss), (None, 0))(params, examples)
    trained, _ = finetune.split(whole, HEAD)
    of_trained, of_all = (np.asarray(jax.vmap(pytree.l2_norm)(t)) for t in (trained, whole))
    np.testing.assert_allclose(own.norms, of_trained, rtol=1e-4)
    assert np.all(of_all > 1.01 * of_trained)  # the control: another norm would be seen
    scale = np.minimum(1, 0.1 / of_trained)
    assert np.sum(scale < 1) >= 6
    assert_close(own.gradient, jax.tree.map(lambda x: jnp.mean(x, 0), trained), rtol=1e-4)
    clipped = jax.tree.map(lambda x: jnp.tensordot(scale, x, 1) / 8, trained)
    assert_close(own.clipped, clipped, rtol=1e-4)


def test_two_devices_train_the_same_part_from_the_same_weights(of_head, file):
    config = tiny(init_from=str(file), trainable=HEAD)
    shared = loop.build(config, own_data(), cases.several_devices(2))
    one, two = (loop.train(built, 0).state for built in (of_head, shared))
    assert_same_bits(two.frozen, one.frozen)
    assert two.frozen["Dense_0"]["kernel"].sharding.num_devices == 2
    assert_close(two.params, one.params, rtol=1e-4, atol=1e-6)
    other = loop.train(of_head, 1).state
    assert distance(other.params, one.params) > 1000 * distance(two.params, one.params)


def test_with_nothing_frozen_the_program_is_the_same():
    params = jax.eval_shape(model().init, jax.random.key(0))
    assert finetune.split(params, "") == (params, {}) == finetune.split(params, "Dense")
    assert finetune.merge(params, {}) is params
    example = examples.example_like(tiny(), (4, 4, 1))

    def program(trainable):
        trained, frozen = finetune.split(params, trainable)
        frozen = jax.tree.map(lambda x: jnp.zeros(x.shape), frozen)
        loss = finetune.with_frozen(model().loss, frozen)
        return str(jax.make_jaxpr(jax.grad(loss))(trained, example))

    assert program("") == str(jax.make_jaxpr(jax.grad(model().loss))(params, example))
    assert len(program(HEAD)) < len(program(""))  # no way back through what is frozen


def test_a_release_of_it_is_whole_and_training_goes_on_from_it(of_head, finished, tmp_path):
    workdir, result = finished
    export.export(workdir, tmp_path / "out", own_model="examples.own_model:mlp")
    released = export.load(tmp_path / "out", "examples.own_model:mlp")
    expected = finetune.merge(result.state.averaged, result.state.frozen)
    assert_same_bits(released.params, expected)
    judged = loop.evaluate(of_head, released.params)
    assert judged.items() <= result.rows[-1].items()

    going_on = loop.build(tiny(init_from=str(tmp_path / "out")), own_data())
    assert_same_bits(going_on.init(3).params, expected)
    images = of_head.dataset.test.images
    inputs = datasets.prepare(of_head.dataset, images)
    np.testing.assert_allclose(
        released.logits(released.params, images),
        model().logits(going_on.init(3).params, inputs),
        rtol=1e-5,
    )
    finetune.save(released.params, tmp_path / "saved")
    release = tmp_path / "out" / "weights.safetensors"
    assert (tmp_path / "saved").read_bytes() == release.read_bytes()

    text = (tmp_path / "out" / "PRIVACY.md").read_text()
    facts = {"init": "in a file", "init_digest": of_head.weights.digest}
    facts |= {"frozen": True, "num_frozen": 68, "num_weights": 83}
    began = "".join(statement.render(facts, name) for name in ("began", "left_out"))
    assert f"| weights before training | {began} |" in text
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["trainable"] == HEAD and "init_from" not in settings


def test_a_statement_says_where_weights_began(finished):
    config, summary = (rundir.read_json(finished[0] / f"{x}.json") for x in ("config", "summary"))
    fresh = summary | {"init_digest": "", "num_frozen": 0}
    shipped = config | {"model": {"name": "linear"}}
    for settings, recorded, expected in (
        (shipped, fresh, ("at random", False)),
        (config, fresh, ("by its own model", False)),
        (config, summary, ("in a file", True)),
    ):
        facts = statement.fields_on_other_uses(settings, recorded, False, searched=False)
        assert (facts["init"], facts["frozen"]) == expected


def test_what_begins_afresh_is_not_taken_from_the_file(file, given):
    config = tiny(init_from=str(file), init_fresh=HEAD)
    other_head = own_data()._replace(num_classes=7)  # the file's shapes do not matter there
    params = loop.build(config, other_head).init(0).params
    np.testing.assert_array_equal(params["Dense_0"]["kernel"], given["Dense_0/kernel"])
    assert params["Dense_1"]["kernel"].shape == (4, 7)
    with pytest.raises(ValueError, match=r"other shapes or types than the model: Dense_1/bias"):
        loop.build(tiny(init_from=str(file)), other_head)


def without(given, name):
    return {k: x for k, x in given.items() if k != name}


SPOILED = {
    r"lacks Dense_0/bias: to initialise them at random add --config.init_fresh=": lambda g: without(
        g, "Dense_0/bias"
    ),
    r"has parameters that the model lacks: old/gain": lambda g: (
        g | {"old/gain": np.ones(2, np.float32)}
    ),
    r"Dense_0/bias float32\[5\], not float32\[4\]": lambda g: (
        g | {"Dense_0/bias": np.ones(5, np.float32)}
    ),
    r"Dense_0/bias float64\[4\], not float32\[4\]": lambda g: (
        g | {"Dense_0/bias": np.ones(4, np.float64)}
    ),
    r"NaN or infinity in Dense_0/bias": lambda g: (
        g | {"Dense_0/bias": np.full(4, np.nan, np.float32)}
    ),
    r"lacks a, b, c and 1 more": None,
}


@pytest.mark.parametrize("message", SPOILED)
def test_weights_that_do_not_fit_are_refused_in_one_line(message, given, tmp_path):
    spoil, like = SPOILED[message], jax.eval_shape(model().init, jax.random.key(0))
    path = tmp_path / "weights.safetensors"
    if spoil is None:
        like, spoil = dict.fromkeys("abcd", np.ones(2)), lambda g: {}
    else:
        path.write_bytes(safetensors.numpy.save(given))
        assert set(finetune.load(str(path), "", like).arrays) == set(given)  # the control
    path.write_bytes(safetensors.numpy.save(spoil(given)))
    with pytest.raises(ValueError, match=message) as error:
        finetune.load(str(tmp_path), "", like)
    assert str(error.value).count("\n") == 0 and str(path) in str(error.value)


@pytest.mark.parametrize("path", ["~nobody-of-this-name/weights", "no such file", "."])
def test_a_path_without_weights_is_one_line(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused("weights|no such file", finetune.load, path, "", {}, kind=FileNotFoundError)


def test_a_path_that_is_no_file_of_weights_is_told_which_is(tmp_path):
    load = lambda path: finetune.load(str(path), "", {})  # noqa: E731
    hub = "no such file: give a .safetensors file of this machine, because names of a hub are not"
    refused(hub, load, "timm/vit_tiny_patch16_224", kind=FileNotFoundError)
    (tmp_path / "model.safetensors").write_bytes(b"")
    message = "has no weights.safetensors: give the file, as .*model.safetensors"
    refused(message, load, tmp_path, kind=FileNotFoundError)


@pytest.mark.parametrize(
    ("file", "stored", "message"),
    [
        ("a", {"norm/bias": 2, "head/bias": 1000}, "at random by --config.init_fresh=^head"),
        ("a", {"norm/bias": 2}, "lacks head/bias: to .* at random add --config.init_fresh=^head"),
        ("a", {"norm/bias": 2, "head/bias": 3, "old/a": 1}, "leave .*--config.init_fresh=^old"),
        (
            "a",
            {"fc_norm/bias": 2, "head/bias": 3},
            "has fc_norm/bias instead: give weights",
        ),
        ("a-00001-of-00002", {"norm/bias": 2}, "lacks head/bias: join the files of all parts"),
    ],
)
def test_weights_of_other_layers_are_told_what_begins_at_random(file, stored, message, tmp_path):
    path = tmp_path / f"{file}.safetensors"
    like = {"norm": {"bias": np.ones(2, np.float32)}, "head": {"bias": np.ones(3, np.float32)}}
    arrays = {name: np.ones(size, np.float32) for name, size in stored.items()}
    path.write_bytes(safetensors.numpy.save(arrays))
    refused(message.replace("^", r"\^"), finetune.load, str(path), "", like)


def test_nothing_but_safetensors_is_read(tmp_path):
    header = json.dumps({"a": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}).encode()
    narrow = len(header).to_bytes(8, "little") + header + b"ab"
    file = tmp_path / "weights"
    np.savez(tmp_path / "weights.npz", a=np.ones(1))
    for content in (b"", b"junk" * 9, narrow, (tmp_path / "weights.npz").read_bytes()):
        file.write_bytes(content)
        refused("not a safetensors file", finetune.load, str(file), "", {"a": np.ones(1)})
    for content, message in (
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a pointer of Git LFS"),
        (b"\n <!DOCTYPE html><html>", "a web page"),
        (b"<html>", "a web page"),
        (b"PK\x03\x04" + bytes(9), "a zip file"),
        (pickle.dumps({"a": 1}, 2), "a pickle"),
        (b'{\n "metadata": {}}', "a JSON file: give the .safetensors file beside it"),
        (narrow, "NumPy's types: save its weights of F8_E4M3 as F32"),
        (narrow[:-1], "damaged, cut short or not a safetensors file: download it again"),
    ):
        file.write_bytes(content)
        refused(message, finetune.load, str(file), "", {"a": np.ones(1)})
    file.write_bytes(safetensors.numpy.save({"a": np.ones(1, np.float32)}))
    assert finetune.load(str(file), "", {"a": np.ones(1, np.float32)}).arrays["a"] == 1


@pytest.mark.parametrize("kind", [jnp.bfloat16, np.float16])
def test_narrow_weights_are_read_as_float32(kind, tmp_path):
    values = np.random.default_rng(0).normal(size=(2, 3)).astype(kind)
    name = {"bfloat16": "BF16", "float16": "F16"}[np.dtype(kind).name]
    header = {"a": {"dtype": name, "shape": [2, 3], "data_offsets": [0, 12]}}
    text = json.dumps(header).encode()
    file = tmp_path / "w.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + values.tobytes())
    named = finetune.load(str(file), "", {"a": jax.ShapeDtypeStruct((2, 3), np.float32)}).arrays
    assert named["a"].dtype == np.float32
    np.testing.assert_array_equal(named["a"], values.astype(np.float32))
    # Where a model is of that type, its weights stay so.
    same = finetune.load(str(file), "", {"a": jax.ShapeDtypeStruct((2, 3), kind)}).arrays["a"]
    assert same.dtype == kind


@pytest.mark.parametrize("length", [640, 1152, 0x4B50, 0x223C])
def test_a_header_of_any_length_is_one(length, tmp_path):
    """Of 640 bytes it begins like a pickle, of 19,280 like a zip file."""
    tensor = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    text = json.dumps(tensor).encode()
    file = tmp_path / "w.safetensors"
    content = length.to_bytes(8, "little") + text.ljust(length) + np.float32(1).tobytes()
    file.write_bytes(content)
    assert pretrained.tensors(content, file)["a"] == 1
    for cut in (content[:-1], content[:100]):
        refused("cut short|a pickle|a zip|a web page", pretrained.tensors, cut, file)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"trainable": "Conv"}, "trainable=Conv matches no parameter of Dense_0/bias"),
        ({"trainable": "("}, r"'\(' is not a regular expression"),
        ({"init_fresh": HEAD}, "init_fresh needs --config.init_from=FILE"),
        ({"init_fresh": "Conv", "init_from": "FILE"}, "init_fresh=Conv matches no parameter of"),
        (
            {"init_from": "/nowhere/at/all"},
            "/nowhere/at/all: no such file: give",
        ),
    ],
)
def test_what_cannot_be_is_refused(overrides, message, file):
    overrides = {k: str(file) if v == "FILE" else v for k, v in overrides.items()}
    refused(message, loop.build, tiny(**overrides), own_data(), kind=(ValueError, OSError))


def test_a_resumed_run_keeps_what_it_froze_and_no_other_file_goes_on(file, given, tmp_path):
    own_file = tmp_path / "mine.safetensors"
    own_file.write_bytes(file.read_bytes())
    # The first layer begins at random, and is frozen: no file could tell what it was.
    config = tiny(init_from=str(own_file), init_fresh="Dense_0", trainable=HEAD)
    built = loop.build(config, own_data())
    whole = loop.train(built, 0)
    calls = iter(range(2))
    with pytest.raises(loop.StoppedError):
        loop.train(built, 0, tmp_path / "run", lambda row: None, lambda: next(calls, None) is None)

    changed = given | {"Dense_1/bias": given["Dense_1/bias"] + 1}
    own_file.write_bytes(safetensors.numpy.save(changed))
    with pytest.raises(
        ValueError, match=r"belongs to a run with other weights than those in .*mine"
    ):
        loop.train(loop.build(config, own_data()), 0, tmp_path / "run")

    own_file.write_bytes(file.read_bytes())
    resumed = loop.train(loop.build(config, own_data()), 0, tmp_path / "run")
    for of in ("params", "averaged", "frozen", "opt_state"):
        assert_same_bits(getattr(resumed.state, of), getattr(whole.state, of))
    assert not np.array_equal(whole.state.frozen["Dense_0"]["kernel"], given["Dense_0/kernel"])


def test_a_run_older_than_a_key_is_not_continued(tmp_path):
    config = base.get_config("dp_sgd")
    recorded = config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(recorded))
    rundir.check_resumable(tmp_path, config)  # the control
    del recorded["trainable"]
    (tmp_path / "config.json").write_text(json.dumps(recorded))
    refused("a run with trainable = None, not ''", rundir.check_resumable, tmp_path, config)


def test_arithmetic_is_found_for_the_trained_part():
    last, every = (
        arithmetic.flop_per_step(tiny(trainable=names), own_data()) for names in (HEAD, "")
    )
    # Forwards 2·(16·4 + 4·3); backwards the head's kernel; for all, also its inputs and Dense_0's.
    assert last == 20 * 2 * (64 + 12 + 12)
    assert every == 20 * 2 * (64 + 12 + 12 + 12 + 64)


def test_the_names_are_those_of_a_release():
    assert re.fullmatch(r"\w+/\w+", next(iter(SHAPES)))
    params = jax.eval_shape(model().init, jax.random.key(0))
    found = {name: x.shape for name, x in traverse_util.flatten_dict(params, sep="/").items()}
    assert found == SHAPES and pytree.num_params(params) == 83
