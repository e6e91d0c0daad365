"""Weights are fed as they were trained: by the file beside them, or as whoever trains says."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from absl import flags
from PIL import Image
from scipy import special

from bam import models
from bam.cli import command_line, run_lines
from bam.data import datasets
from bam.data.preprocessing import Preprocessing
from bam.features.backbone import IN_JAX, backbone, normalisation_of
from bam.images import pixels
from bam.models import finetune, normalisation
from bam.models.normalisation import Normalisation
from bam.release import export
from bam.training import loop
from configs import digits
from tests.cases import refused, stop_after, tiny_digits
from tests.peers import pretrained as peer

PEERS = json.loads(peer.FILE.read_text(encoding="utf-8"))["networks"]
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
COLOUR = {"mean": MEAN, "std": STD}
TIMM = COLOUR | {"input_size": [3, 224, 192], "interpolation": "bicubic", "crop_pct": 0.9}
TRANSFORMERS = {"do_normalize": True, "image_mean": MEAN, "image_std": STD, "resample": 2}
OURS = Normalisation((0.5,) * 3, (0.25,) * 3)
HF, CONFIG = "preprocessor_config.json", "config.json"

# What lies beside the weights -> mean, std, size and interpolation.
SAYS = {
    "nothing": ({}, (OURS.mean, OURS.std, None, "")),
    "timm": ({CONFIG: {"architecture": "vit", "pretrained_cfg": TIMM}}, (224, 192, "bicubic")),
    "timm, flat": ({CONFIG: {"architecture": "vit", **TIMM}}, (224, 192, "bicubic")),
    "timm without more": ({CONFIG: {"pretrained_cfg": COLOUR}}, (None, None, "")),
    "a release": ({"model.json": COLOUR, CONFIG: {"epsilon": 3.0}}, (None, None, "")),
    "transformers": (
        {HF: TRANSFORMERS | {"size": {"height": 384, "width": 224}}, CONFIG: {"image_size": 9}},
        (384, 224, "bilinear"),
    ),
    "transformers, one number": ({HF: TRANSFORMERS | {"size": 224}}, (224, 224, "bilinear")),
    "transformers, an edge": (
        {HF: TRANSFORMERS | {"size": {"shortest_edge": 256}, "resample": 3}},
        (256, 256, "bicubic"),
    ),
    "transformers, cut out": (
        {HF: TRANSFORMERS | {"size": 256, "do_center_crop": True, "crop_size": 224}},
        (224, 224, "bilinear"),
    ),
    "transformers, before timm": (
        {HF: TRANSFORMERS, CONFIG: TIMM | {"mean": [0, 0, 0]}}, (None, None, "bilinear")),
    "transformers, plain": (
        {HF: {"do_normalize": False, "size": 32}}, ((0, 0, 0), (1, 1, 1), (32, 32), "")),
    "transformers, 0 to 255": (
        {HF: {"do_rescale": False, "image_mean": [127.5] * 3, "image_std": [51.0] * 3}},
        ((0.5,) * 3, (0.2,) * 3, None, ""),
    ),
    "transformers, -1 to 1": (
        {HF: {"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [1.0] * 3}},
        ((0.5,) * 3, (0.5,) * 3, None, ""),
    ),
    "another's": ({CONFIG: {"architectures": ["Bert"]}}, (OURS.mean, OURS.std, None, "")),
}  # fmt: skip


def beside(folder, files):
    for name, facts in files.items():
        (folder / name).write_text(facts if isinstance(facts, str) else json.dumps(facts))
    return folder / "model.safetensors"


def of(weights, channels=3, **given):
    default = Normalisation(OURS.mean[:channels], OURS.std[:channels])
    return normalisation.expected_by(weights, given, "init_", default)


@pytest.mark.parametrize("name", SAYS)
def test_the_file_beside_the_weights_says_what_they_expect(name, tmp_path):
    files, values = SAYS[name]
    if len(values) == 3:
        values = (MEAN, STD, None if values[0] is None else values[:2], values[2])
    read = of(beside(tmp_path, files))
    np.testing.assert_allclose(read.mean, values[0], rtol=1e-15)
    np.testing.assert_allclose(read.std, values[1], rtol=1e-15)
    assert (read.size, read.interpolation) == values[2:]
    source = {"nothing": "", "another's": ""}.get(name, str(tmp_path / next(iter(files), "")))
    assert read.source == source
    assert (source or "no file beside the weights says what they expect") in str(read)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "mean 0.485, 0.456, 0.406; std 0.229, 0.224, 0.225; 224 × 192; bicubic (DIR)"),
        ({"mean": 0.5}, "mean 0.5; std 0.229, 0.224, 0.225; 224 × 192; bicubic (mean as given; "
         "DIR)"),
        ({"mean": 0, "std": (0.1, 0.2, 1)}, "mean 0; std 0.1, 0.2, 1; 224 × 192; bicubic (mean, "
         "std as given; DIR)"),
        ({"size": 64}, "mean 0.485, 0.456, 0.406; std 0.229, 0.224, 0.225; 64 × 64; bicubic "
         "(size as given; DIR)"),
    ],
)  # fmt: skip
def test_what_is_given_is_taken_and_the_line_says_where_each_is_from(given, line, tmp_path):
    read = of(beside(tmp_path, {CONFIG: TIMM}), **given)
    assert str(read).replace(str(tmp_path / CONFIG), "DIR") == line
    alone = of(tmp_path / "elsewhere" / "w", **{"mean": 0.5, "std": 0.5})
    assert str(alone) == "mean 0.5; std 0.5 (mean, std as given)"


def test_of_a_grey_image_three_numbers_are_averaged(tmp_path):
    read = of(beside(tmp_path, {CONFIG: TIMM}), channels=1)
    np.testing.assert_allclose((read.mean, read.std), [[np.mean(MEAN)], [np.mean(STD)]])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"std": 0}, "^init_std is 0: one or three positive numbers are needed"),
        ({"std": -1.0}, "^init_std is -1.0: one or three positive"),
        ({"std": (0.2, 0.0, 0.2)}, "^init_std is .*: one or three positive"),
        ({"mean": float("nan")}, "^init_mean is nan: one or three finite"),
        ({"mean": (0.5, float("inf"), 0)}, "^init_mean is .* finite"),
        ({"mean": (0.5, 0.5)}, r"^init_mean is \(0.5, 0.5\): 2 numbers for 3 channels"),
        ({"mean": "half"}, "^init_mean is 'half': one or three finite"),
        ({"mean": ()}, "^init_mean is .*: one or three finite"),
        ({"mean": True}, "^init_mean is True"),
        ({"size": 0}, "^init_size is 0: pixels from 1"),
    ],
)
def test_numbers_that_cannot_be_are_one_line_that_names_the_key(given, message, tmp_path):
    refused(message, of, tmp_path / "weights", **given)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({CONFIG: TIMM | {"std": [0.2, 0, 0.2]}}, f"{CONFIG}: std is .*positive"),
        ({CONFIG: TIMM | {"mean": [0.5, 0.5]}}, f"{CONFIG}: mean is .*2 numbers for 3 channels"),
        ({CONFIG: TIMM | {"mean": [float("nan")] * 3}}, f"{CONFIG}: mean is .*finite"),
        ({CONFIG: {"mean": MEAN}}, f"{CONFIG}: std is None"),
        ({CONFIG: TIMM | {"input_size": [3, -1, 4]}}, f"{CONFIG}: size is .*pixels from 1"),
        (
            {CONFIG: TIMM | {"interpolation": "random"}},
            f"{CONFIG}: interpolation 'random' is not one",
        ),
        ({CONFIG: "{"}, f"{CONFIG} is damaged: not JSON"),
        ({HF: {"do_normalize": True}}, f"{HF}: mean is None"),
        ({HF: TRANSFORMERS | {"rescale_factor": 0}}, f"{HF}: rescale_factor is 0"),
        ({HF: TRANSFORMERS | {"resample": [4]}}, rf"{HF}: interpolation \[4\] is not one of"),
        ({HF: TRANSFORMERS | {"size": {"height": "x"}}}, f"{HF}: size is .*pixels"),
    ],
)
def test_a_file_that_says_what_cannot_be_is_one_line_that_names_it(files, message, tmp_path):
    refused(message, of, beside(tmp_path, files))


# The networks of timm and transformers, written out in NumPy; they make the logits that the
# packages made, which `tests/peers` has, and so stand for the packages where these are not there.


def convolved(x, kernel, stride, padding):
    x = np.pad(x, ((0, 0), (0, 0), (padding,) * 2, (padding,) * 2))
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[2:], axis=(2, 3))
    return np.einsum("nchwij,ocij->nohw", windows[:, :, ::stride, ::stride], kernel, optimize=True)


def group_normed(x, weights, name, groups=32):
    grouped = x.reshape(len(x), groups, -1)
    mean, var = (f(grouped, axis=2, keepdims=True) for f in (np.mean, np.var))
    normed = ((grouped - mean) / np.sqrt(var + 1e-5)).reshape(x.shape)
    scale, bias = (weights[f"{name}.{k}"][:, None, None] for k in ("weight", "bias"))
    return normed * scale + bias


def resnet18(w, x):
    """timm's resnet18 with GroupNorm, for images `[n, 3, h, w]`."""
    x = np.maximum(group_normed(convolved(x, w["conv1.weight"], 2, 3), w, "bn1"), 0)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    x = windows[:, :, ::2, ::2].max(axis=(4, 5))
    for block in [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]:
        stride = 2 if block[5] > "1" and block.endswith("0") else 1
        y = convolved(x, w[f"{block}.conv1.weight"], stride, 1)
        y = np.maximum(group_normed(y, w, f"{block}.bn1"), 0)
        y = group_normed(convolved(y, w[f"{block}.conv2.weight"], 1, 1), w, f"{block}.bn2")
        if f"{block}.downsample.0.weight" in w:
            x = convolved(x, w[f"{block}.downsample.0.weight"], stride, 0)
            x = group_normed(x, w, f"{block}.downsample.1")
        x = np.maximum(x + y, 0)
    return x.mean(axis=(2, 3)) @ w["fc.weight"].T + w["fc.bias"]


def vit_ti16(w, x, floor=1e-6):
    """timm's vit_tiny_patch16, for images `[n, 3, h, w]`."""

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def normed(x, name):
        y = x - x.mean(-1, keepdims=True)
        y = y / np.sqrt(np.mean(y**2, -1, keepdims=True) + floor)
        return y * w[f"{name}.weight"] + w[f"{name}.bias"]

    x = (
        convolved(x, w["patch_embed.proj.weight"], 16, 0)
        + w["patch_embed.proj.bias"][:, None, None]
    )
    x = x.reshape(*x.shape[:2], -1).swapaxes(1, 2)
    x = np.concatenate([np.broadcast_to(w["cls_token"], (len(x), 1, 192)), x], 1) + w["pos_embed"]
    for i in range(12):
        b = f"blocks.{i}"
        qkv = linear(normed(x, f"{b}.norm1"), f"{b}.attn.qkv")
        q, k, v = qkv.reshape(*x.shape[:2], 3, 3, 64).transpose(2, 0, 3, 1, 4)
        weights = special.softmax(q @ k.swapaxes(-1, -2) / 8, axis=-1)
        x = x + linear((weights @ v).swapaxes(1, 2).reshape(x.shape), f"{b}.attn.proj")
        y = linear(normed(x, f"{b}.norm2"), f"{b}.mlp.fc1")
        x = x + linear(y * special.ndtr(y), f"{b}.mlp.fc2")
    return linear(normed(x, "norm")[:, 0], "head")


def vit_of_transformers(w, x):
    """The same network by the names of transformers, with queries, keys and values apart."""
    names = {
        "cls_token": "vit.embeddings.cls_token",
        "pos_embed": "vit.embeddings.position_embeddings",
    }
    renamed = {k: w[name] for k, name in names.items()}
    pairs = {"patch_embed.proj": "vit.embeddings.patch_embeddings.projection"}
    pairs |= {"norm": "vit.layernorm", "head": "classifier"}
    for i in range(12):
        b, t = f"blocks.{i}", f"vit.layers.{i}"
        pairs |= {f"{b}.norm1": f"{t}.layernorm_before", f"{b}.norm2": f"{t}.layernorm_after"}
        pairs |= {f"{b}.attn.proj": f"{t}.attention.o_proj"}
        pairs |= {f"{b}.mlp.fc1": f"{t}.mlp.fc1", f"{b}.mlp.fc2": f"{t}.mlp.fc2"}
        for kind in ("weight", "bias"):
            three = [w[f"{t}.attention.{x}_proj.{kind}"] for x in "qkv"]
            renamed[f"{b}.attn.qkv.{kind}"] = np.concatenate(three)
    renamed |= {
        f"{k}.{x}": w[f"{name}.{x}"] for k, name in pairs.items() for x in ("weight", "bias")
    }
    return vit_ti16(renamed, x, floor=1e-12)


REFERENCES = {
    "resnet18 timm": resnet18,
    "vit_ti16 timm": vit_ti16,
    "vit_ti16 transformers": vit_of_transformers,
}


def weights_of(name):
    return peer.weights_of(PEERS[name]["shapes"])


def wide(weights):
    return {k: x.astype(np.float64) for k, x in weights.items()}


@pytest.mark.parametrize("name", REFERENCES)
def test_the_written_out_networks_make_the_packages_logits(name):
    images = peer.images().astype(np.float64).transpose(0, 3, 1, 2)
    logits = REFERENCES[name](wide(weights_of(name)), images)
    np.testing.assert_allclose(logits, PEERS[name]["logits"], atol=2e-5)


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    """A PNG of 64 × 64 pixels in colour."""
    file = tmp_path_factory.mktemp("picture") / "image.png"
    rng = np.random.default_rng(2)
    coarse = Image.fromarray(rng.integers(0, 256, (9, 9, 3), np.uint8))
    Image.fromarray(np.asarray(coarse.resize((64, 64), Image.Resampling.BICUBIC))).save(file)
    return file


@pytest.fixture(scope="module", params=REFERENCES)
def network(request, tmp_path_factory):
    """Returns a network's name and its weights, with the file of their library beside them."""
    folder = tmp_path_factory.mktemp("hub")
    contents = {CONFIG: {"pretrained_cfg": TIMM | {"input_size": [3, 64, 64]}}}
    if "transformers" in request.param:
        contents = {HF: TRANSFORMERS | {"size": {"height": 64, "width": 64}}, CONFIG: {"width": 1}}
    beside(folder, contents)
    (folder / "model.safetensors").write_bytes(safetensors.numpy.save(weights_of(request.param)))
    return request.param, folder / "model.safetensors"


def reference_logits(name, picture, mean=MEAN, std=STD):
    """As timm does it: `ToTensor`, `Normalize`, the network."""
    pixels = np.asarray(Image.open(picture)).astype(np.float64) / 255
    image = ((pixels - mean) / std).transpose(2, 0, 1)
    return REFERENCES[name](wide(weights_of(name)), image[None])


def fine_tuned(file, images, **settings):
    """An experiment that begins from a file's weights, on images `[n, h, w, c]`, uint8."""
    config = digits.get_config("dp_sgd")
    config.update({"accountant": "rdp", "num_steps": 1, "expected_batch_size": 1})
    config.model.width = 64  # of the ResNets
    config.update({"microbatch_size": 1, "init_from": str(file), "clip_norm": 0.1})
    config.update_from_flattened_dict(settings)
    split = datasets.Split(images, np.zeros(len(images), np.int32))
    channels = images.shape[-1]
    constants = (np.full(channels, x, np.float32) for x in (0.5, 0.25))
    return loop.build(config, datasets.Dataset("own", split, split, 5, *constants))


def test_logits_of_a_png_are_those_of_the_package_that_the_weights_are_from(network, picture):
    name, file = network
    image = pixels.decode(picture, Preprocessing((64, 64), 3))[None]
    right = reference_logits(name, picture)

    def logits(**settings):
        built = fine_tuned(file, image, **{"model.name": name.split()[0], **settings})
        params = finetune.begin({}, built.weights)
        inputs = datasets.prepare(built.dataset, image)
        return built, np.asarray(jax.jit(built.parts.model.logits)(params, inputs))

    built, ours = logits()
    np.testing.assert_allclose(ours, right, atol=1e-4)
    used = built.normalisation._replace(size=None, interpolation="")
    assert f"images are normalised for these weights: {used}" in run_lines.describe(built)
    source = HF if "transformers" in name else CONFIG
    assert str(file.parent / source) in str(built.normalisation)
    # The control: with the mean of another library's weights they are others.
    _, wrong = logits(init_mean=0.5)
    assert np.abs(wrong - right).max() > 1e-3
    np.testing.assert_allclose(wrong, reference_logits(name, picture, mean=0.5), atol=1e-4)


def test_positions_of_another_size_are_a_warning_without_a_file_beside_the_weights(tmp_path):
    def plan_for(side):
        network = models.as_functions(models.create("vit_ti16", 10, 1), (side, side, 3))
        like = jax.eval_shape(network.init, jax.random.key(0))
        file = tmp_path / f"{side}.safetensors"
        finetune.save(jax.tree.map(lambda x: jnp.full(x.shape, 0.01, x.dtype), like), file)
        settings = {"model.name": "vit_ti16", "init_fresh": "^head"}
        return run_lines.describe(fine_tuned(file, np.zeros((4, 32, 32, 3), np.uint8), **settings))

    warning = "warning: these weights expect images of 224 × 224, and yours are 32 × 32, a grid of "
    assert warning + "2 × 2 patches: " in plan_for(224)
    assert "warning" not in plan_for(32)  # the control


@pytest.mark.parametrize(
    ("changes", "unused", "warning"),
    [
        (
            {"size": [3, 224, 192]},
            "224 × 192, bicubic",
            "warning: these weights expect images of 224 × 192, and yours are 32 × 32, a grid of "
            "2 × 2 patches: --config.features.name=backbone resizes images (docs/finetuning.md)",
        ),
        (
            {"size": [3, 224, 192], "dataset": "folder"},
            "224 × 192, bicubic",
            "warning: these weights expect images of 224 × 192, and yours are 32 × 32, a grid of "
            "2 × 2 patches: import them again with --size=224x192 (docs/finetuning.md)",
        ),
        ({"size": [3, 32, 32]}, "bicubic", ""),  # the control: images of this size
        ({"size": None, "interpolation": ""}, "", ""),  # and a file that says no more
    ],
)
def test_the_plan_says_what_of_the_weights_preprocessing_is_not_used(
    changes, unused, warning, tmp_path
):
    network = models.as_functions(models.create("vit_ti16", 10, 1), (32, 32, 3))
    like = jax.eval_shape(network.init, jax.random.key(0))
    beside_it = COLOUR | {"interpolation": changes.get("interpolation", "bicubic")}
    if changes["size"]:
        beside_it["input_size"] = changes["size"]
    file = beside(tmp_path, {CONFIG: beside_it})
    finetune.save(jax.tree.map(lambda x: jnp.full(x.shape, 0.01, x.dtype), like), file)
    settings = {"model.name": "vit_ti16", "init_fresh": "^head"}
    built = fine_tuned(file, np.zeros((4, 32, 32, 3), np.uint8), **settings)
    built.config.dataset.name = changes.get("dataset", "digits")
    plan = run_lines.describe(built).splitlines()
    because = "; not used, because images stay as they are: "
    expected = (
        "images are normalised for these weights: mean 0.485, 0.456, 0.406; "
        f"std 0.229, 0.224, 0.225 ({tmp_path / CONFIG})" + (because + unused if unused else "")
    )
    start = plan.index(expected)
    assert plan[start + 1 :] == ([warning] if warning else [])


def test_features_of_a_png_are_what_the_package_has_before_its_head(network, picture):
    name, file = network
    image = pixels.decode(picture, Preprocessing((64, 64), 3))[None].astype(np.float32) / 255
    weights, right = weights_of(name), reference_logits(name, picture)
    heads = ("head.bias", "fc.bias", "classifier.bias")
    head = next(x.removesuffix(".bias") for x in heads if x in weights)

    def logits(**options):
        features = backbone(name.split()[0], str(file), **options)(jnp.asarray(image))
        return features[:, 0, 0] @ weights[f"{head}.weight"].T + weights[f"{head}.bias"]

    np.testing.assert_allclose(logits(), right, atol=1e-4)
    wrong = logits(mean=(0.5, 0.5, 0.5))
    assert np.abs(wrong - right).max() > 1e-3  # the control
    np.testing.assert_allclose(wrong, reference_logits(name, picture, 0.5), atol=1e-4)


def test_a_release_says_what_pixels_its_features_are_of(tmp_path):
    network = models.as_functions(models.create("vit_ti16", 3, 1), (16, 16, 3))
    like = jax.eval_shape(network.init, jax.random.key(0))
    file = beside(tmp_path, {CONFIG: TIMM | {"input_size": [3, 16, 16]}})
    finetune.save(jax.tree.map(lambda x: jnp.full(x.shape, 0.01, x.dtype), like), file)
    assert normalisation_of(str(file)).size == (16, 16)
    assert normalisation_of(str(file), size=32, mean=0.5)[:3] == ((0.5,) * 3, tuple(STD), (32, 32))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "w.safetensors").write_bytes(file.read_bytes())
    bare = normalisation_of(str(elsewhere / "w.safetensors"))
    assert bare[:4] == ((0.5,) * 3, (0.5,) * 3, (224, 224), "bilinear")

    config = tiny_digits()
    options = {"name": "backbone", "model": "vit_ti16", "weights": str(file)}
    config.features.update(options | {"cache": str(tmp_path / "kept")})
    built = loop.build(config)
    assert "images are normalised for these weights: mean 0.485" in run_lines.describe(built)
    loop.train(built, 1, tmp_path / "run")
    export.export(tmp_path / "run", tmp_path / "out", nominal=True)
    facts = json.loads((tmp_path / "out" / "model.json").read_text())
    numbers = {"mean": MEAN, "std": STD, "size": [16, 16], "interpolation": "bicubic"}
    digest = built.features_digest
    expected_facts = {"name": "backbone", "model": "vit_ti16", "digest": digest}
    assert facts["features"] == expected_facts | numbers
    assert str(tmp_path) not in (tmp_path / "run" / "summary.json").read_text()
    export.load(tmp_path / "out")
    # Another file beside the weights makes other features.
    kept = len([*(tmp_path / "kept").iterdir()])
    beside(tmp_path, {CONFIG: TIMM | {"input_size": [3, 16, 16], "mean": [0.1, 0.2, 0.3]}})
    loop.build(config).load()
    assert len([*(tmp_path / "kept").iterdir()]) == 2 * kept


def colours(num):
    return np.random.default_rng(3).integers(0, 256, (num, 4, 4, 3), np.uint8)


@pytest.fixture
def linear(tmp_path):
    """Weights of a linear model of 4 × 4 pixels in colour, with timm's config.json beside them."""
    file = beside(tmp_path, {CONFIG: TIMM})
    rng = np.random.default_rng(0)
    weights = {"weight": rng.normal(size=(5, 48)), "bias": rng.normal(size=5)}
    file.write_bytes(safetensors.numpy.save({k: x.astype(np.float32) for k, x in weights.items()}))
    return file


def test_a_release_normalises_as_the_weights_that_it_began_from(linear, tmp_path):
    built = fine_tuned(linear, colours(8), **{"model.name": "linear"})
    loop.train(built, 1, tmp_path / "run")
    export.export(tmp_path / "run", tmp_path / "out", nominal=True)
    facts = json.loads((tmp_path / "out" / "model.json").read_text())
    np.testing.assert_allclose((facts["mean"], facts["std"]), (MEAN, STD), rtol=1e-7)
    released = export.load(tmp_path / "out")
    right = (colours(8) / 255 - MEAN) / STD
    np.testing.assert_allclose(released.prepare(colours(8)), right, rtol=1e-5, atol=1e-6)
    # Further training gets its inputs in the same way, and other numbers are told from these.
    again = fine_tuned(tmp_path / "out", colours(8), **{"model.name": "linear"})
    np.testing.assert_array_equal(again.dataset.mean, built.dataset.mean)
    assert again.normalisation.source == str(tmp_path / "out" / "model.json")
    other = fine_tuned(linear, colours(8), **{"model.name": "linear", "init_std": 0.5})
    np.testing.assert_array_equal(other.dataset.std, np.full(3, 0.5, np.float32))
    np.testing.assert_array_equal(other.dataset.mean, built.dataset.mean)


def test_a_run_does_not_go_on_with_another_normalisation(linear, tmp_path):
    settings = {"model.name": "linear", "num_steps": 3, "checkpoint.every": 1}
    first = fine_tuned(linear, colours(8), **settings)
    with pytest.raises(loop.StoppedError):
        loop.train(first, 1, tmp_path / "run", should_stop=stop_after(1))
    beside(tmp_path, {CONFIG: TIMM | {"mean": [0.4] * 3}})
    other = fine_tuned(linear, colours(8), **settings)
    refused("other weights than those in", loop.train, other, 1, tmp_path / "run")
    beside(tmp_path, {CONFIG: TIMM})
    loop.train(fine_tuned(linear, colours(8), **settings), 1, tmp_path / "run")  # the control


def test_without_a_file_or_a_number_the_data_sets_constants_stay(linear):
    (linear.parent / CONFIG).unlink()
    built = fine_tuned(linear, colours(8), **{"model.name": "linear"})
    np.testing.assert_array_equal(built.dataset.mean, np.full(3, 0.5, np.float32))
    np.testing.assert_array_equal(built.dataset.std, np.full(3, 0.25, np.float32))
    assert built.normalisation[:2] == ((0.5,) * 3, (0.25,) * 3)
    assert "no file beside the weights says what they expect" in run_lines.describe(built)


def test_floats_are_normalised_by_the_file_only_if_the_config_says_so(linear):
    floats = colours(8).astype(np.float32) / 255
    built = fine_tuned(linear, floats, **{"model.name": "linear"})
    np.testing.assert_array_equal(built.dataset.mean, np.full(3, 0.5, np.float32))
    assert "the data set: its images are floats" in run_lines.describe(built)
    built = fine_tuned(linear, floats, **{"model.name": "linear", "init_mean": 0.1})
    np.testing.assert_array_equal(built.dataset.mean, np.full(3, 0.1, np.float32))


@pytest.mark.parametrize("key", ["init_mean", "init_std"])
def test_numbers_without_weights_are_refused(key):
    refused("add --config.init_from=FILE", loop.build, tiny_digits(**{key: 0.5}))


@pytest.mark.parametrize("key", ["init_mean", "features.std"])
@pytest.mark.parametrize(
    ("text", "value"), [("0.5", 0.5), ("0.1,0.2,0.3", (0.1, 0.2, 0.3)), ("(1,2)", (1, 2))]
)
def test_the_command_line_takes_one_number_or_three(key, text, value):
    values = flags.FlagValues()
    flags.DEFINE_string("config", "", "", flag_values=values)
    command_line.parse(values, ["--config=digits:dp_sgd", f"--config.{key}={text}"], "bam train")
    section, _, name = key.rpartition(".")
    assert (values.config[section] if section else values.config)[name] == value


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("nearest", (128, 192)),  # where no pixel is as near to two
        *((name, size) for name in normalisation.RESIZING[1:] for size in ((21, 25), (91, 71))),
    ],
)
def test_images_are_resized_as_pillow_does_it(name, size, picture):
    image = Image.open(picture)
    way = Image.Resampling[name.upper()]
    right = np.asarray(image.resize(size[::-1], way)) / 255
    ours = jax.image.resize(np.asarray(image) / 255, (*size, 3), IN_JAX[name]).clip(0, 1)
    np.testing.assert_allclose(ours, right, atol=1.6 / 255)  # Pillow rounds twice
    # The control: another way is not the same.
    other = Image.Resampling.NEAREST if name != "nearest" else Image.Resampling.BILINEAR
    assert np.abs(np.asarray(image.resize(size[::-1], other)) / 255 - ours).max() > 0.05
