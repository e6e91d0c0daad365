"""The clip norm from public data is a quantile of norms, and no private example enters it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bam import models
from bam.core import pytree
from bam.core.clipping import BoundedTransformation
from bam.data import datasets
from bam.training import loop, public_clip
from bam.training.public_clip import clip_norm_from_public
from configs import digits, mnist
from tests.cases import tiny_digits

LINEAR = {"name": "linear", "width": 1}


@pytest.fixture(scope="module")
def public():
    digits = datasets.load("digits")
    return digits._replace(train=datasets.Split(*(x[:60] for x in digits.train)))


def clip_norm(public, quantile=0.5, num_steps=0, shape=(8, 8, 1)):
    return clip_norm_from_public(public, shape, LINEAR, quantile, num_steps)


@pytest.mark.thorough
def test_it_is_the_quantile_of_the_norms_one_computes_one_by_one(public):
    model = models.as_functions(models.create("linear", 10, 1), (8, 8, 1))
    params = model.init(jax.random.key(0))
    images = datasets.normalize(public, public.train.images)
    norms = [
        pytree.l2_norm(
            jax.grad(model.loss)(params, {"image": jnp.asarray(image)[None], "label": jnp.int32(y)})
        )
        for image, y in zip(images, public.train.labels, strict=True)
    ]
    for quantile in (0.1, 0.5, 1.0):
        assert clip_norm(public, quantile) == pytest.approx(np.quantile(norms, quantile), rel=1e-4)


@pytest.mark.thorough
def test_it_falls_as_the_public_model_learns_and_is_the_same_each_time(public):
    at_start, later = clip_norm(public), clip_norm(public, num_steps=30)
    assert later < at_start
    assert clip_norm(public, num_steps=30) == later


@pytest.mark.thorough
def test_images_are_made_floats_one_at_a_time(public, monkeypatch):
    sizes, resize = [], jax.image.resize

    def watched(image, *arguments):
        sizes.append(image.size)
        return resize(image, *arguments)

    monkeypatch.setattr(jax.image, "resize", watched)
    clip_norm(public, num_steps=1)
    assert set(sizes) == {64}


@pytest.mark.thorough
def test_public_images_take_the_private_shape(public):
    assert clip_norm(public, shape=(28, 28, 1)) > clip_norm(public)  # more pixels, longer gradients


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"quantile": 1.5}, "quantile must be above 0"), ({"quantile": -0.5}, "quantile must be"),
     ({"num_steps": -1}, "num_steps must be"), ({"shape": (8, 8, 3)}, "has 1 channels")],
)  # fmt: skip
def test_what_cannot_be_is_refused(public, arguments, message):
    with pytest.raises(ValueError, match=message):
        clip_norm(public, **arguments)


@pytest.mark.thorough
def test_the_record_states_it_and_the_private_images_do_not_change_it():
    rng = np.random.default_rng(0)

    def record(brightness):
        private = datasets.Split(
            np.full((40, 28, 28, 1), brightness, np.uint8), rng.integers(0, 10, 40).astype(np.int32)
        )
        dataset = datasets.load("digits")._replace(train=private, test=private)
        config = mnist.get_config("dp_sgd")
        config.update({"expected_batch_size": 8, "num_steps": 1, "accountant": "rdp"})
        config.model.name = "linear"
        config.public_clip.quantile = 0.5
        config.public_clip.dataset = "digits"
        config.public_clip.num_steps = 1
        return loop.build(config, dataset).record

    assert record(0)["clip_norm"] == record(255)["clip_norm"]
    assert record(0)["clip_norm"] != mnist.get_config("dp_sgd").clip_norm


def bare_clip(plan, clip_norm):
    """A clip of the right bound whose gradient is another pytree."""
    as_list = lambda grads, state, params=None: (jax.tree.leaves(grads), state)  # noqa: E731
    return BoundedTransformation(lambda params: (), as_list, clip_norm)


@pytest.mark.parametrize(
    ("section", "name", "message"),
    [
        ("model", "tests.cases:three_logits", "one row of 10"),
        ("clip", "tests.test_public_clip:bare_clip", "gives no gradient like the parameters"),
        ("optimizer", "none", "unknown optimizer 'none'"),
        ("clip", "l2", "it is measured"),  # the control
    ],
)
def test_parts_that_do_not_fit_are_refused_before_it_is_measured(
    section, name, message, monkeypatch
):
    def measured(*given):
        raise ValueError("it is measured")

    monkeypatch.setattr(public_clip, "clip_norm", measured)
    config = tiny_digits()
    config.public_clip.quantile, config.public_clip.dataset = 0.5, "mnist"
    config[section].name = name
    with pytest.raises(ValueError, match=message):
        loop.build(config)


@pytest.mark.parametrize(
    ("private", "public", "message"),
    [
        ("digits", "", "name the public data"),
        ("digits", "digits", "'digits' is the private data set"),
        # A function of one's own has one name and is one data set.
        ("examples.own_dataset:parity", "examples.own_dataset:parity", "is the private data set"),
    ],
)
def test_the_private_data_are_not_taken_for_public_ones(private, public, message):
    config = digits.get_config("dp_sgd")
    config.dataset.name, config.public_clip.dataset = private, public
    config.public_clip.quantile = 0.5
    with pytest.raises(ValueError, match=message):
        loop.build(config)
