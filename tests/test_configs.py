"""Every config of the paper, on a miniature data set in the real format."""

import importlib

import jax
import numpy as np
import pytest

import bam
from bam.core import sampling
from bam.errors import InputError
from bam.features import prior
from bam.privacy import private_gradient
from bam.training import loop, parts
from configs import (
    cifar10,
    cifar10_prior_network,
    cifar10_scattering,
    cifar100,
    digits,
    imagenet32,
    logistic,
    mnist,
)
from tests.cases import write_parquet

METHODS = ("dp_sgd", "dp_sat", "bam_sam", "bam_exact")
IMAGE_CONFIGS = ("cifar10", "cifar100", "imagenet32", "mnist")
# Each config and each method twice: a deep network takes 10 to 20 s to compile for one method.
WITH_OWN_MODEL = (
    ("cifar10", "dp_sat"),
    ("cifar10", "bam_sam"),
    ("cifar100", "dp_sgd"),
    ("cifar100", "bam_exact"),
    ("imagenet32", "dp_sat"),
    ("imagenet32", "bam_sam"),
    ("mnist", "dp_sgd"),
    ("mnist", "bam_exact"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of miniature Parquet splits per image data set: 16 random images each."""
    rng = np.random.default_rng(0)
    made = {}
    for name in IMAGE_CONFIGS:
        shape = (28, 28, 1) if name == "mnist" else (32, 32, 3)
        made[name] = tmp_path_factory.mktemp(name)
        column = {"cifar10": "img", "cifar100": "img"}.get(name, "image")
        label = "fine_label" if name == "cifar100" else "label"
        for split in ("train", "test"):
            images, labels = rng.integers(0, 256, (16, *shape), np.uint8), rng.integers(0, 10, 16)
            write_parquet(made[name] / f"{split}.parquet", images, labels, column, label)
    return made


def miniature(name, method, folders):
    """The named config cut down to the miniature data: two steps of about four examples."""
    config = importlib.import_module(f"configs.{name}").get_config(method)
    config.update_from_flattened_dict(
        {"expected_batch_size": 4, "num_steps": 2, "microbatch_size": 4, "accountant": "rdp"}
    )
    config.dataset.update({"source": "parquet", "path": str(folders[name])})
    config.augment.views = min(2, config.augment.views)
    return config


@pytest.mark.parametrize("name", IMAGE_CONFIGS)
def test_every_config_takes_every_method_and_trains_two_steps_of_its_own(name, folders):
    own = METHODS[IMAGE_CONFIGS.index(name)]  # each method is compiled by a config, each config too
    for method in METHODS:
        config = miniature(name, method, folders)
        # Of 1000 classes, a linear model has 3 million weights.
        config.model = {"name": "convnet" if name == "imagenet32" else "linear", "width": 1}
        built = loop.build(config)
        state = jax.eval_shape(lambda built=built: built.init(0))
        padded = sampling.pad(np.arange(4), built.plan.capacity, 0, 0)
        rows, tag = built.rows(padded.indices), np.zeros(2, np.uint32)
        batch = private_gradient.batch_of(rows, padded.mask, 1, tag)
        stepped = jax.eval_shape(built.step, state, batch)
        assert jax.tree.map(_kind, stepped) == jax.tree.map(_kind, state)
        if method == own:
            result = loop.train(built, seed=0)
            assert int(result.state.step) == 2
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.state.params))


def _kind(x):
    return x.shape, x.dtype


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), WITH_OWN_MODEL)
def test_every_config_trains_two_steps_with_its_own_model(name, method, folders):
    config = miniature(name, method, folders)
    config.model.width = min(4, config.model.width)
    if name == "imagenet32":  # one block a stage, of two
        with config.unlocked():
            config.model.depth = 10
    result = loop.train(loop.build(config), seed=0)
    assert int(result.state.step) == 2
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.state.params))


def test_a_whole_network_begins_at_the_weights_of_drawn_images(folders, tmp_path):
    prior.save_network(tmp_path / "network.safetensors")
    config = cifar10_prior_network.get_config("bam_sam")
    config.update_from_flattened_dict({"num_steps": 2, "accountant": "rdp", "microbatch_size": 4})
    config.dataset.update({"source": "parquet", "path": str(folders["cifar10"])})
    config.expected_batch_size = 4
    with pytest.raises(InputError, match=r"add --config\.init_from=FILE"):
        loop.build(config)
    config.init_from = str(tmp_path / "network.safetensors")
    built = loop.build(config)
    params = built.init(0).params
    network = dict(prior.encoder_params(prior.load()))
    assert params.pop("Dense_0")["kernel"].shape == (512, 10)
    assert network.pop("Dense_0")["kernel"].shape == (512, prior.OUTPUTS)
    jax.tree.map(np.testing.assert_array_equal, params, network)
    # The map shows the network pixels in [0, 1] less 0.5.
    assert (built.normalisation.mean, built.normalisation.std) == ((0.5,) * 3, (1.0,) * 3)


@pytest.mark.parametrize(
    ("method", "clipping"),
    zip(METHODS, ["gradients", "inputs", "inputs", "gradients"], strict=True),
)
def test_logistic_regression_trains_privately_on_the_full_batch(method, clipping):
    config = logistic.get_config(f"{method},{clipping}")
    config.num_steps = 2
    config.accountant = "rdp"
    experiment = loop.build(config)
    assert experiment.plan.sampling_prob == 1
    assert loop.train(experiment, seed=0).summary["test_accuracy"] > 0.4


def test_clipped_inputs_bound_the_logistic_gradient_so_its_clip_never_acts():
    config = logistic.get_config("dp_sgd,inputs")
    config.update_from_flattened_dict({"num_steps": 1, "accountant": "rdp"})
    experiment = loop.build(config)
    state = experiment.init(0)
    wild = jax.tree.map(
        lambda x: x + 3 * jax.random.normal(jax.random.key(1), x.shape), state.params
    )
    figures = experiment.diagnose(state._replace(params=wild), experiment.rows(np.arange(400)))
    assert figures["bias_norm"] < 1e-5
    assert figures["gradient_norm"] > 0.1


def test_hyper_parameters_are_those_of_table_2():
    for module, model, rate, views, sat, penalty in (
        (cifar10, "resnet9", 2e-3, 16, 0.086, 0.02),
        (cifar100, "resnet9", 2e-3, 16, 0.086, 0.01),
        (imagenet32, "wide_resnet", 1e-3, 4, 0.07, 0.005),
    ):
        for method in METHODS:
            config = module.get_config(method)
            assert config.model.name == model
            assert config.optimizer.name == "nadam"
            assert config.optimizer.learning_rate == rate
            assert config.augment.views == views
            assert config.augment.shift == 4
            assert config.augment.flip == "horizontal"
            assert config.expected_batch_size == 4096
            assert config.num_epochs == 75
            assert config.clip_norm == 1.0
        assert module.get_config("dp_sat").method.radius == sat
        assert module.get_config("bam_sam").method.radius == penalty
        assert module.get_config("bam_exact").method.penalty == penalty
    assert cifar10.get_config("dp_sgd").delta == cifar100.get_config("dp_sgd").delta == 1e-5
    assert mnist.get_config("bam_sam").model.name == "lenet5"
    assert cifar100.get_config("dp_sgd").model.scale_norm


def test_a_mistaken_clipping_is_refused():
    with pytest.raises(ValueError, match="choose from gradients, inputs"):
        logistic.get_config("dp_sgd,outputs")


def test_a_learning_rate_per_clip_norm_takes_steps_in_units_of_it():
    section = cifar10_scattering.get_config("dp_sgd").optimizer
    grads = np.array([2.0, -4.0], np.float32)
    plan = bam.make_plan(
        num_examples=1000, expected_batch_size=100, num_steps=10, epsilon=3.0, delta=1e-5,
        accountant="rdp",
    )  # fmt: skip
    for clip_norm in (2.0, 8.0):
        optimizer = parts.make_optimizer(section, plan, clip_norm, clip_norm)
        step, _ = optimizer.update(grads, optimizer.init(grads), grads)
        np.testing.assert_allclose(step, -section.learning_rate * grads / clip_norm, rtol=1e-6)


def test_without_a_clip_norm_a_learning_rate_has_no_such_unit():
    config = digits.get_config("non_private")
    config.optimizer = cifar10_scattering.get_config("dp_sgd").optimizer
    with pytest.raises(ValueError, match=r"optimizer\.per_clip_norm needs a private run"):
        loop.build(config)
