"""The clip norm from public data is a quantile of norms, and no private example enters it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bam import models, waits
from bam.cli.main import main
from bam.core import pytree
from bam.core.clipping import BoundedTransformation
from bam.data import datasets
from bam.training import loading, public_clip, rundir
from bam.training.public_clip import PublicData, clip_norm_from_public
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
     ({"num_steps": -1}, "number of steps must be"), ({"shape": (8, 8, 3)}, "has 1 channels")],
)  # fmt: skip
def test_what_cannot_be_is_refused(public, arguments, message):
    with pytest.raises(ValueError, match=message):
        clip_norm(public, **arguments)


def command(config, *flags):
    """Runs `bam clip_norm` of a config that is set key by key, and returns its exit status."""
    keys = rundir.flat(rundir.as_json(config))
    default = rundir.flat(rundir.as_json(digits.get_config("dp_sgd")))
    changed = [f"--config.{k}={v}" for k, v in keys.items() if v != default.get(k)]
    return main(["clip_norm", "--config=digits:dp_sgd", *changed, *flags])


@pytest.mark.thorough
def test_the_command_prints_the_flags_of_a_c_that_the_private_images_do_not_change(
    monkeypatch, capsys
):
    monkeypatch.setattr(waits, "KEEP_AFTER", 600.0)
    rng = np.random.default_rng(0)

    def printed(brightness):
        private = datasets.Split(
            np.full((40, 28, 28, 1), brightness, np.uint8), rng.integers(0, 10, 40).astype(np.int32)
        )
        dataset = datasets.load("digits")._replace(train=private, test=private)
        own = loading.list_data
        given = dataset, lambda: dataset
        monkeypatch.setattr(
            loading,
            "list_data",
            lambda section, *more: given if section.name == "mnist" else own(section, *more),
        )
        config = mnist.get_config("dp_sgd")
        config.update({"expected_batch_size": 8, "num_steps": 1, "accountant": "rdp"})
        config.model.name = "linear"
        assert command(config, "--public=digits", "--steps=1") == 0
        monkeypatch.setattr(loading, "list_data", own)
        return capsys.readouterr().out

    said = printed(0)
    assert said == printed(255)
    norm = clip_norm(datasets.load("digits"), num_steps=1, shape=(28, 28, 1))
    assert said == (
        f"C = {norm:.4g}: the 0.5 quantile of gradient norms of linear on digits, after 1 steps of "
        f"training there\nadd --config.clip_norm={norm:.4g} "
        "--config.clip_norm_from=0.5-quantile-on-digits-after-1-steps\n"
    )


def bare_clip(plan, clip_norm):
    """A clip of the right bound whose gradient is another pytree."""
    as_list = lambda grads, state, params=None: (jax.tree.leaves(grads), state)  # noqa: E731
    return BoundedTransformation(lambda params: (), as_list, clip_norm)


@pytest.mark.parametrize(
    ("section", "name", "message"),
    [
        ("model", "tests.cases:three_logits", "one row of 10"),
        ("clip", "tests.test_public_clip:bare_clip", "returns a gradient of another structure"),
        ("optimizer", "none", "unknown optimizer 'none'"),
        ("clip", "l2", "it is measured"),  # the control
    ],
)
def test_parts_that_do_not_fit_are_refused_before_it_is_measured(
    section, name, message, monkeypatch, capsys
):
    def measured(*given):
        raise ValueError("it is measured")

    monkeypatch.setattr(public_clip, "clip_norm", measured)
    config = tiny_digits()
    config[section].name = name
    assert command(config, "--public=mnist") == (1 if message == "it is measured" else 2)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("private", "public", "message"),
    [
        ("digits", "digits", "'digits' is the private data set"),
        # A function of one's own has one name and is one data set.
        ("examples.own_dataset:parity", "examples.own_dataset:parity", "is the private data set"),
    ],
)
def test_the_private_data_are_not_taken_for_public_ones(private, public, message):
    config = digits.get_config("dp_sgd")
    config.dataset.name = private
    with pytest.raises(ValueError, match=message):
        public_clip.clip_norm(config, PublicData(public), 0.5, 1, (8, 8, 1))


def test_other_data_are_taken():  # the control
    public_clip.check(digits.get_config("dp_sgd"), PublicData("mnist"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("features.name", "scattering", "it reads images, not features"),
        ("trainable", "Dense", "it trains all of a model from scratch"),
        ("init_from", "a file", "it trains all of a model from scratch"),
        ("loss.name", "binary", "it measures the cross-entropy"),
        ("dataset.group_size", 2, "it measures gradients of examples, not of users"),
        ("method.name", "non_private", "method non_private clips nothing"),
    ],
)
def test_a_run_whose_gradients_are_of_another_kind_is_refused(key, value, message, capsys):
    config = tiny_digits(**{key.replace(".", "__"): value})
    assert command(config, "--public=mnist") == 2
    assert capsys.readouterr().err.startswith(f"error: no clip norm from public data: {message}")


def test_without_public_data_there_is_no_c(capsys):
    assert main(["clip_norm", "--config=digits:dp_sgd"]) == 2
    assert "give --config and --public, or --run" in capsys.readouterr().err
