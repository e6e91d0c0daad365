"""Networks that other libraries have weights for, low-rank factors, and networks of any kind."""

import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx, traverse_util
from PIL import Image

import bam
from bam import models
from bam.models import finetune, lora, pretrained
from bam.training import loop
from configs import digits
from tests.cases import mostly, refused
from tests.peers import pretrained as peer

PEERS = json.loads(peer.FILE.read_text(encoding="utf-8"))["networks"]
QUICK = ["vit_ti16 timm", "vit_ti16 transformers"]


def legacy(name):
    """A name of transformers 5 as files of its earlier versions have it."""
    for new, old in (
        (r"vit\.layers", "vit.encoder.layer"),
        (r"attention\.q_proj", "attention.attention.query"),
        (r"attention\.k_proj", "attention.attention.key"),
        (r"attention\.v_proj", "attention.attention.value"),
        (r"attention\.o_proj", "attention.output.dense"),
        (r"mlp\.fc1", "intermediate.dense"),
        (r"mlp\.fc2", "output.dense"),
    ):
        name = re.sub(new, old, name)
    return name


@pytest.mark.parametrize("name", mostly([*PEERS], slow={*PEERS} - {*QUICK}))
def test_logits_are_those_of_the_library_that_the_weights_come_from(name, tmp_path):
    made = peer.weights_of(PEERS[name]["shapes"])
    model = models.as_functions(models.create(name.split()[0], 5, 64), (64, 64, 3))
    like = jax.eval_shape(model.init, jax.random.key(0))
    names = [lambda x: x, legacy] if "transformers" in name else [lambda x: x]
    for naming in names:
        file = tmp_path / "model.safetensors"
        file.write_bytes(safetensors.numpy.save({naming(k): x for k, x in made.items()}))
        params = finetune.begin({}, finetune.load(str(file), "", like))
        logits = jax.jit(model.logits)(params, peer.images())
        np.testing.assert_allclose(logits, PEERS[name]["logits"], atol=1e-4)
    # The control: without the last of all biases they are others.
    params["head"]["bias"] = jnp.zeros(5)
    wrong = model.logits(params, peer.images()) - np.asarray(PEERS[name]["logits"])
    assert np.abs(wrong).max() > 1e-3


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"bn1.running_mean": (8,), "conv1.weight": (8, 3, 7, 7)}, "a model with BatchNorm"),
        ({"cls_token": (1, 1, 24), "blocks.0.attn.qkv.weight": (72, 24)}, "lacks"),
        ({"vit.embeddings.cls_token": (1, 1, 9), "odd.name": (2,)}, "lacks"),
    ],
)
def test_weights_that_do_not_fit_are_refused_in_one_line(shapes, message, tmp_path):
    model = models.as_functions(models.create("vit_ti16", 5, 1, depth=1), (16, 16, 3))
    like = jax.eval_shape(model.init, jax.random.key(0))
    file = tmp_path / "model.safetensors"
    file.write_bytes(safetensors.numpy.save(peer.weights_of(shapes)))
    refused(message, finetune.load, str(file), "", like)


def test_weights_of_another_width_are_refused(tmp_path):
    like = {"class_token": jnp.zeros((1, 1, 4)), "head": {"bias": jnp.zeros(5)}}
    file = tmp_path / "model.safetensors"
    wide = {"vit.embeddings.cls_token": (1, 1, 4), "classifier.bias": (7,)}
    file.write_bytes(safetensors.numpy.save(peer.weights_of(wide)))
    with pytest.raises(ValueError, match=r"head/bias float32\[7\], not float32\[5\]"):
        finetune.load(str(file), "", like)
    found = finetune.load(str(file), "head", like)
    assert {*found.arrays} == {"class_token"}


def weights_of(name):
    return peer.weights_of(PEERS[name]["shapes"])


@pytest.mark.parametrize(("side", "shape"), [(2, (4, 4)), (14, (4, 4)), (6, (3, 8)), (3, (5, 2))])
def test_positions_are_interpolated_as_pillow_resizes(side, shape):
    rng = np.random.default_rng(0)
    position = rng.normal(size=(1, 1 + side**2, 5)).astype(np.float32)
    needed = {"position": jax.ShapeDtypeStruct((1, 1 + shape[0] * shape[1], 5), np.float32)}
    images = (16 * shape[0], 16 * shape[1], 3)
    new = pretrained.adapt({"position": position}, needed, images)["position"]
    assert new.shape == needed["position"].shape
    np.testing.assert_array_equal(new[:, 0], position[:, 0])
    grid = position[0, 1:].reshape(side, side, 5)
    for k in range(5):  # PyTorch's with antialias=True, which timm takes, is made after Pillow's
        right = Image.fromarray(grid[..., k]).resize(shape[::-1], Image.Resampling.BICUBIC)
        np.testing.assert_allclose(new[0, 1:, k].reshape(shape), np.asarray(right), atol=1e-5)


def test_positions_of_no_square_are_left_to_be_refused():
    position = np.zeros((1, 1 + 6, 5), np.float32)
    needed = {"position": jax.ShapeDtypeStruct((1, 1 + 4, 5), np.float32)}
    assert pretrained.adapt({"position": position}, needed, ())["position"] is position
    same = {"position": jax.ShapeDtypeStruct((1, 1 + 6, 5), np.float32)}
    assert pretrained.adapt({"position": position}, same, (32, 48, 3))["position"] is position


def test_a_vision_transformer_begins_from_weights_of_another_size(tmp_path):
    weights, model = weights_of("vit_ti16 timm"), models.create("vit_ti16", 5, 64)
    weights["pos_embed"] = weights["pos_embed"][:, :1].repeat(50, axis=1)  # of 7 × 7, all the same
    (tmp_path / "w.safetensors").write_bytes(safetensors.numpy.save(weights))
    functions = models.as_functions(model, (64, 64, 3))
    like = jax.eval_shape(functions.init, jax.random.key(0))
    named = finetune.load(str(tmp_path / "w.safetensors"), "", like, (64, 64, 3)).arrays
    np.testing.assert_allclose(named["position"], weights["pos_embed"][:, :17], atol=1e-6)


@pytest.mark.parametrize("name", ["vit_ti16", "resnet18"])
def test_a_grey_image_gives_what_three_equal_channels_give(name, tmp_path):
    (tmp_path / "w.safetensors").write_bytes(safetensors.numpy.save(weights_of(f"{name} timm")))
    grey = peer.images()[..., :1]

    def logits(images):
        model = models.as_functions(models.create(name, 5, 64), images.shape[1:])
        like = jax.eval_shape(model.init, jax.random.key(0))
        named = finetune.load(str(tmp_path / "w.safetensors"), "", like, images.shape[1:])
        return np.asarray(jax.jit(model.logits)(finetune.begin({}, named), images))

    ours, thrice = logits(grey), logits(grey.repeat(3, axis=-1))
    np.testing.assert_allclose(ours, thrice, atol=1e-4)
    assert np.abs(ours - logits(peer.images())).max() > 1e-2  # the control


class Small(nn.Module):
    """Two linear layers, of which the first has factors."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="head")(nn.tanh(nn.Dense(6, name="fc")(x.reshape(len(x), -1))))


def test_factors_add_their_product_and_begin_as_nothing():
    plain = models.as_functions(Small(), (4, 4, 1))
    model = models.as_functions(Small(), (4, 4, 1), lora_rank=2, lora_targets="fc")
    key, images = jax.random.key(0), jax.random.normal(jax.random.key(1), (5, 4, 4, 1))
    params = model.init(key)
    assert {*traverse_util.flatten_dict(params["lora"], sep="/")} == {"fc/a", "fc/b"}
    np.testing.assert_array_equal(
        model.logits(params, images), plain.logits(plain.init(key), images)
    )
    params["lora"]["fc"]["b"] += 1.0
    kernel = params["fc"]["kernel"] + params["lora"]["fc"]["a"] @ params["lora"]["fc"]["b"]
    expected = plain.logits(
        {"fc": params["fc"] | {"kernel": kernel}, "head": params["head"]}, images
    )
    assert np.abs(expected - plain.logits(plain.init(key), images)).max() > 0.1
    np.testing.assert_allclose(model.logits(params, images), expected, atol=1e-5)
    np.testing.assert_allclose(plain.logits(lora.fold(params), images), expected, atol=1e-5)
    assert lora.fold(plain.init(key)).keys() == {"fc", "head"}


@pytest.mark.parametrize(
    ("rank", "targets", "message"), [(-1, "fc", "at least 1"), (1, "no", "no linear")]
)
def test_factors_that_cannot_be_are_refused(rank, targets, message):
    lora_options = {"lora_rank": rank, "lora_targets": targets}
    refused(message, models.as_functions, Small(), (4, 4, 1), **lora_options)


def small(num_classes):
    """A model of one's own, for a config."""
    assert num_classes == 10
    return nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(8), nn.tanh, nn.Dense(10)])


def test_a_private_run_of_the_factors_releases_a_plain_model(tmp_path):
    config = digits.get_config("dp_sgd")
    config.model = {"name": "tests.test_backbones:small"}
    config.trainable, config.accountant = "lora", "rdp"
    config.lora.rank, config.lora.targets, config.num_steps = 2, "layers_1", 3
    built = loop.build(config)
    assert built.num_params == 2 * (64 + 8) and built.num_frozen == 64 * 8 + 8 + 8 * 10 + 10
    result = loop.train(built, 0)
    released = loop.whole_model(result.state)
    begun = built.init(0).frozen
    assert released.keys() == begun.keys()
    moved = released["layers_1"]["kernel"] - begun["layers_1"]["kernel"]
    assert np.linalg.matrix_rank(moved) == 2
    np.testing.assert_array_equal(released["layers_3"]["kernel"], begun["layers_3"]["kernel"])


class Nnx(nnx.Module):
    """A list of layers, as NNX has them."""

    def __init__(self, rngs, norm=None):
        self.layers = nnx.List([nnx.Linear(4, 6, rngs=rngs) for _ in range(1)])
        self.norm = norm
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.tanh(self.layers[0](x))
        return self.head(x if self.norm is None else self.norm(x))


def gradients(model):
    example = {"image": jnp.ones((1, 4)) / 3, "label": jnp.array(1)}
    return bam.dp_sgd(model.loss).grad(model.init(jax.random.key(0)), example)


def test_an_nnx_module_a_linen_one_and_functions_have_the_same_gradients():
    network = Nnx(nnx.Rngs(0))
    model = bam.as_functions(network, (4,))
    named = traverse_util.flatten_dict(model.init(jax.random.key(0)), sep="/")
    assert {*named} == {f"{x}/{y}" for x in ("layers/0", "head") for y in ("kernel", "bias")}
    linen = nn.Sequential([nn.Dense(6), nn.tanh, nn.Dense(3)])
    of_linen = {"layers_0": "layers/0", "layers_2": "head"}
    weights = {k: {x: named[f"{v}/{x}"] for x in ("kernel", "bias")} for k, v in of_linen.items()}
    apply = lambda params, inputs: linen.apply({"params": params}, inputs)  # noqa: E731
    pair = bam.as_functions((lambda key, inputs: weights, apply), (4,))
    found, expected = gradients(model), gradients(pair)
    np.testing.assert_allclose(
        found["layers"]["0"]["kernel"], expected["layers_0"]["kernel"], rtol=1e-6
    )
    np.testing.assert_allclose(found["head"]["bias"], expected["layers_2"]["bias"], rtol=1e-6)
    np.testing.assert_allclose(
        network(jnp.ones((2, 4))),
        model.logits(model.init(jax.random.key(0)), jnp.ones((2, 4))),
        rtol=1e-6,
    )


def test_what_mixes_examples_or_is_no_network_is_refused():
    mixing = Nnx(nnx.Rngs(0), nnx.BatchNorm(6, rngs=nnx.Rngs(0)))
    refused("BatchNorm mixes the examples", bam.as_functions, mixing, (4,))
    drawing = Nnx(nnx.Rngs(0), nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    refused("needs random numbers", bam.as_functions, drawing, (4,))
    for wrong in (7, (len,), lambda x: x):
        refused("must be a Flax Linen or NNX module or a pair", bam.as_functions, wrong, (4,))
    own = Nnx(nnx.Rngs(0))
    refused("LoRA needs a Flax Linen module", bam.as_functions, own, (4,), lora_rank=1)


def test_a_private_gradient_of_a_vision_transformer_is_that_of_its_examples():
    model = models.as_functions(models.create("vit_ti16", 2, 1, depth=1), (16, 16, 3))
    params = model.init(jax.random.key(0))
    images = jax.random.normal(jax.random.key(1), (3, 1, 16, 16, 3))
    examples = {"image": images, "label": jnp.array([0, 1, 0])}
    oracle, clip = bam.dp_sgd(model.loss), bam.clip_by_l2_norm(1.0)
    total, norms = bam.clipped_sum(
        oracle.grad, clip, params, examples, mask=None, microbatch_size=3
    )
    alone = [oracle.grad(params, jax.tree.map(lambda x, i=i: x[i], examples)) for i in range(3)]
    expected = jax.tree.map(
        lambda *rows: sum(x * np.minimum(1, 1 / n) for x, n in zip(rows, norms, strict=True)),
        *alone,
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), total, expected)
    assert norms.min() > 0


def test_renaming_leaves_weights_of_this_library_alone():
    named = {"Dense_0/kernel": np.ones((2, 3)), "odd.weight": np.ones(2)}
    assert pretrained.renamed(named) == named
