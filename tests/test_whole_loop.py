"""There is one run: a loop of one's own is `bam train`, to the bit."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bam
from bam.data import datasets
from bam.training import loop
from configs import digits
from examples import whole_loop
from tests.cases import assert_same_bits, tiny_digits

VIEWS = {"augment.views": 2, "augment.shift": 1}


def config_of(method, **changes):
    config = digits.get_config(method)
    config.num_epochs, config.model.width, config.checkpoint.every = 1, 4, 2
    config.update_from_flattened_dict(changes)
    return config


class KilledError(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("bam_sam", VIEWS),
        pytest.param("dp_sgd", {}, marks=pytest.mark.thorough),
        pytest.param("dp_sgd", VIEWS, marks=pytest.mark.thorough),
    ],
)
def test_the_loop_of_ones_own_has_the_weights_of_bam_train(method, changes, tmp_path, monkeypatch):
    config, data = config_of(method, **changes), datasets.load("digits")
    trained = loop.train(loop.build(config, data), 0)
    saves, save = itertools.count(1), bam.PrivateTraining.save

    def killed(private, *given):
        save(private, *given)
        if next(saves) == 1:
            private.close()
            raise KilledError

    monkeypatch.setattr(bam.PrivateTraining, "save", killed)
    with pytest.raises(KilledError):
        whole_loop.train(config, 0, tmp_path / "run", data)
    params = whole_loop.train(config, 0, tmp_path / "run", data)
    assert_same_bits(jax.device_get(params), jax.device_get(trained.state.params))
    assert (tmp_path / "run" / "PRIVACY.md").exists()
    others = whole_loop.train(config, 1, tmp_path / "other", data)  # the control
    assert not np.array_equal(*(jax.tree.leaves(x)[0] for x in (others, params)))


def test_the_example_is_at_most_eighty_lines():
    with open(whole_loop.__file__) as file:
        assert len(file.readlines()) <= 80


def test_an_example_of_a_loop_has_the_key_of_its_place_in_bam_train():
    trainer = loop.build(tiny_digits())
    example_of = trainer.parts.example_of(trainer.init(0))
    rows = {name: x[0] for name, x in trainer.rows(np.zeros(1, np.int32)).items()}
    private = bam.PrivateTraining(plan=trainer.plan, clip=bam.clip_by_l2_norm(1.0), seed=0)
    data = {"x": np.zeros((trainer.plan.num_examples, 1), np.float32)}
    batch = next(private.batches(data, keys=True))
    for place in (0, 7):
        example = example_of(rows | {"place": jnp.int32(place)})
        ours = jax.tree.map(lambda x, place=place: x[place], batch.examples)
        assert jax.random.key_data(ours["key"]).tolist() == (
            jax.random.key_data(example["key"]).tolist()
        )
        assert ours["step"] == example["step"] == 0
