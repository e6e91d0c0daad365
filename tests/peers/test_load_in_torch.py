"""PyTorch, without bam and JAX, makes the logits of a release that bam makes."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bam.data import datasets
from bam.release import export
from bam.training import loop
from tests.test_export import tiny, write_run

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = """
import sys
sys.modules.update(bam=None, jax=None, flax=None)  # importing them fails
import load_in_torch, numpy, torch
with torch.no_grad():
    logits = load_in_torch.load("release")(torch.tensor(numpy.load("images.npy")))
numpy.save("logits.npy", logits.numpy())
"""


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
    state = built.init(0)._replace(step=jnp.ones((), jnp.int32))
    moved = jax.tree.map(  # biases are zeros and scales ones at first
        lambda x: x + 0.2 * jax.random.normal(jax.random.key(x.size), x.shape), state.averaged
    )
    write_run(tmp_path / "run", built, state._replace(averaged=moved))
    export.export(tmp_path / "run", tmp_path / "release")
    released = export.load(tmp_path / "release")
    expected = np.asarray(released.logits(released.params, images))
    np.save(tmp_path / "images.npy", images)
    paths = f"{EXAMPLES}:{Path(torch.__file__).parents[1]}"
    subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env={"PYTHONPATH": paths}, check=True
    )
    found = np.load(tmp_path / "logits.npy")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert not np.allclose(found[::-1], expected, rtol=1e-2, atol=1e-2)  # the control
