"""PyTorch, without bam and JAX, makes the logits of a release that bam makes."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from ml_collections import ConfigDict

from bam import features
from bam.data import datasets
from bam.release import export
from bam.training import loop, parts
from tests.peers import pretrained as peer
from tests.runs import drawn, run_on, tiny, write_run

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = """
import sys
sys.modules.update(bam=None, jax=None, flax=None)  # importing them fails
import load_in_torch, numpy, torch
features = None
if len(sys.argv) > 1:
    features = __import__(sys.argv[1]).load("release", sys.argv[2])
images = torch.tensor(numpy.load("images.npy"))
with torch.no_grad():
    if features:
        numpy.save("features.npy", features(images.float() / 255).numpy())
    logits = load_in_torch.load("release", features)(images)
numpy.save("logits.npy", logits.numpy())
"""
PEERS = json.loads(peer.FILE.read_text(encoding="utf-8"))["networks"]
PRIOR = Path(features.__file__).with_name("prior.safetensors")
TIMM = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.25, 0.3]}


def logits_in_torch(folder, images, *arguments):
    """The logits that the examples compute for the release in a folder, without bam."""
    np.save(folder / "images.npy", images)
    paths = f"{EXAMPLES}:{Path(torch.__file__).parents[1]}"
    command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": paths}, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("model", "shape", "bound"),
    [
        ({"name": "convnet", "width": 16}, (9, 14, 3), 0.0),
        ({"name": "convnet", "width": 6}, (8, 8, 1), 2.5),
        ({"name": "vit_ti16", "depth": 3}, (32, 48, 3), 0.0),
        ({"name": "vit_s16", "depth": 1}, (16, 16, 1), 2.5),
    ],
)
def test_logits_are_those_of_bam(model, shape, bound, tmp_path):
    config = tiny(num_steps=1, input_clip_norm=bound)
    config.model = {"width": 16} | model
    images = np.random.default_rng(0).integers(0, 256, (60, *shape), np.uint8)
    split = datasets.Split(images, np.arange(60, dtype=np.int32) % 3)
    mean, std = (
        np.linspace(*ends, shape[2], dtype=np.float32) for ends in ((0.3, 0.5), (0.2, 0.3))
    )
    built = loop.build(config, datasets.Dataset("own", split, split, 3, mean, std))
    state = built.init(0)
    private = state.private.privatize
    private = private._replace(noise=private.noise._replace(step=jnp.ones((), jnp.int32)))
    state = state._replace(private=state.private._replace(privatize=private))
    moved = jax.tree.map(  # biases are zeros and scales ones at first
        lambda x: x + 0.2 * jax.random.normal(jax.random.key(x.size), x.shape), state.averaged
    )
    write_run(tmp_path / "run", built, state._replace(averaged=moved))
    export.export(tmp_path / "run", tmp_path / "release")
    released = export.load(tmp_path / "release")
    expected = np.asarray(released.logits(released.params, images))
    assert logits_in_torch(tmp_path, images).returncode == 0
    found = np.load(tmp_path / "logits.npy")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert not np.allclose(found[::-1], expected, rtol=1e-2, atol=1e-2)  # the control


def compared(folder, arguments, options):
    """Compares features and logits of a release, from pixels, with those of bam."""
    export.export(run_on(folder, **options), folder / "release")
    released = export.load(folder / "release", weights=options.get("weights", ""))
    images, section = drawn().test.images, ConfigDict(options)
    done = logits_in_torch(folder, images, *arguments)
    assert done.returncode == 0, done.stderr
    pixels = images.astype(np.float32) / 255
    expected = np.asarray(jax.jit(parts.make_features(section))(pixels))
    found = np.load(folder / "features.npy")
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * scale)
    # A run keeps features as float16, so a last bit may be rounded the other way.
    logits = np.load(folder / "logits.npy")
    expected = np.asarray(released.logits(released.params, images))
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    assert not np.allclose(logits[::-1], expected, rtol=1e-2, atol=1e-2)  # the control


@pytest.mark.usefixtures("blank")
def test_logits_of_priors_features_are_those_of_bam(tmp_path):
    compared(tmp_path, ("prior_in_torch", PRIOR), {"name": "prior"})
    images = drawn().test.images
    assert "give their map" in logits_in_torch(tmp_path, images).stderr
    other = tmp_path / "other.safetensors"
    other.write_bytes(PRIOR.read_bytes() + b" ")
    done = logits_in_torch(tmp_path, images, "prior_in_torch", other)
    assert "the SHA-256 is not that of the features" in done.stderr


@pytest.mark.usefixtures("blank")
@pytest.mark.parametrize(
    ("network", "size", "interpolation"),
    [
        ("vit_ti16 timm", 64, "bicubic"),
        ("vit_ti16 timm", 96, "bilinear"),  # its positions are interpolated
        ("vit_ti16 transformers", 64, "bilinear"),
        ("resnet18 timm", 64, "nearest"),
        ("resnet50 timm", 16, "bilinear"),  # smaller than the images
    ],
)
def test_logits_of_a_backbones_features_are_those_of_bam(network, size, interpolation, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(safetensors.numpy.save(peer.weights_of(PEERS[network]["shapes"])))
    beside = TIMM | {"interpolation": interpolation}
    (tmp_path / "config.json").write_text(json.dumps(beside))
    options = {"name": "backbone", "model": network.split()[0], "weights": str(file), "size": size}
    compared(tmp_path, ("backbone_in_torch", file), options)
