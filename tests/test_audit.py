"""The audit passes the code that trains, and catches bugs that are planted in it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bam import experiment, sampling
from bam.privacy import audit, gdp
from bam.transforms import BoundedTransformation
from configs import base

METHODS = [method for method in base.METHODS if method != "non_private"]
WHOLE = {"num_examples": 8, "expected_batch_size": 8, "num_steps": 4}  # q = 1
SAMPLED = {"num_examples": 40, "expected_batch_size": 10, "num_steps": 1}  # q = 1/4


def config_of(method="dp_sgd", expected_batch_size=8, num_steps=4, **augment):
    config = base.get_config(method)
    config.update(
        {"num_steps": num_steps, "epsilon": 4.0, "microbatch_size": 1, "accountant": "rdp"}
    )
    config.expected_batch_size = expected_batch_size
    config.model = {"name": "linear", "width": 1}
    config.optimizer.update({"name": "sgd", "learning_rate": 1e-3})
    config.augment.update(augment)
    return config


def epsilon_lower(setting, num_trials, method="dp_sgd", **augment):
    num_examples, batch_size, num_steps = setting.values()
    config = config_of(method, batch_size, num_steps, **augment)
    found = audit.scores(config, num_examples, num_trials)
    return audit.lower_bound(
        *found, sampling_prob=batch_size / num_examples, num_steps=num_steps, delta=1e-5
    ).epsilon_lower


# The code as it is.


@pytest.mark.parametrize("method", METHODS)
def test_no_method_gives_away_more_than_it_claims_and_the_audit_sees_much_of_it(method):
    assert 1.0 < epsilon_lower(WHOLE, 250, method) <= 4.0


def test_with_sampling_the_bound_is_below_the_claim_too():
    assert epsilon_lower(SAMPLED, 200, "bam_sam") <= 4.0


def test_noise_and_batches_are_what_the_plan_says():
    assert min(audit.noise_p_values(config_of(), 8, 100).values()) > 1e-3
    sizes = [len(sampling.poisson_sample(0, step, 40, 0.25)) for step in range(400)]
    assert audit.batch_size_p_value(sizes, 40, 0.25) > 1e-3


# Planted bugs.


def plant_noise(monkeypatch, change):
    """Makes the experiment's noise transform go wrong."""
    right = experiment.add_gaussian_noise
    monkeypatch.setattr(
        experiment, "add_gaussian_noise", lambda sigma, s, key: change(right, sigma, s, key)
    )


def test_noise_too_small_by_the_root_of_two_is_caught(monkeypatch):
    plant_noise(monkeypatch, lambda right, sigma, s, key: right(sigma / 2**0.5, s, key))
    assert audit.noise_p_values(config_of(), 8, 100)["scale"] < 1e-9


def test_noise_scaled_to_the_mean_is_caught(monkeypatch):
    plant_noise(monkeypatch, lambda right, sigma, s, key: right(sigma, s / 8, key))
    assert epsilon_lower(WHOLE, 60) > 4.0
    assert audit.noise_p_values(config_of(), 8, 20)["scale"] < 1e-9


def test_a_noise_key_used_twice_is_caught(monkeypatch):
    def forgetful(right, sigma, s, key):
        transform = right(sigma, s, key)
        return transform._replace(
            update=lambda total, state: (transform.update(total, state)[0], state)
        )

    plant_noise(monkeypatch, forgetful)
    assert audit.noise_p_values(config_of(), 8, 100)["steps"] < 1e-9


def test_views_clipped_one_by_one_and_then_added_are_caught(monkeypatch):
    right = experiment.clipped_sum

    def per_view(grad_fn, clip, params, batch, **options):
        def sum_of_clipped(params, index):  # the views of the canary are all alike
            clipped, _ = clip.update(grad_fn(params, index), clip.init(params))
            return jax.tree.map(lambda g: 4 * g, clipped)

        as_it_is = BoundedTransformation(clip.init, lambda g, state, params=None: (g, state), 1.0)
        return right(sum_of_clipped, as_it_is, params, batch, **options)

    assert epsilon_lower(WHOLE, 100, views=4) <= 4.0
    monkeypatch.setattr(experiment, "clipped_sum", per_view)
    assert epsilon_lower(WHOLE, 100, views=4) > 4.0


def test_padding_rows_that_leak_are_caught(monkeypatch):
    right = experiment.clipped_sum

    def leaky(*arguments, mask, **options):
        return right(*arguments, mask=jnp.ones_like(mask), **options)

    monkeypatch.setattr(experiment, "clipped_sum", leaky)
    assert epsilon_lower(SAMPLED, 60) > 4.0


def test_batches_of_a_fixed_size_are_caught():
    rng = np.random.default_rng(0)
    sizes = [len(rng.choice(40, 10, replace=False)) for _ in range(400)]
    assert audit.batch_size_p_value(sizes, 40, 0.25) < 1e-9


# The estimator.


def test_the_bound_holds_as_often_as_it_says_and_gets_close(mu=1.5):
    """Scores of a Gaussian mechanism whose ε is known."""
    rng = np.random.default_rng(0)
    truth = gdp.epsilon_of_mu(mu, 1e-5)
    found = [
        audit.lower_bound(
            rng.normal(mu, 1, 1000), rng.normal(0, 1, 1000),
            sampling_prob=1.0, num_steps=1, delta=1e-5,
        )
        for _ in range(40)
    ]  # fmt: skip
    assert sum(one.epsilon_lower > truth for one in found) <= 5  # of 40, at 95 % two are expected
    assert np.median([one.epsilon_lower for one in found]) > 0.75 * truth
    assert all(0 < one.epsilon_lower_any < one.epsilon_lower for one in found)


def test_scores_that_say_nothing_give_no_bound_and_too_few_are_refused():
    same = np.linspace(0, 1, 100)
    found = audit.lower_bound(same, same, sampling_prob=0.5, num_steps=1, delta=1e-5)
    assert found.epsilon_lower == found.epsilon_lower_any == 0.0
    with pytest.raises(ValueError, match="at least 50 scores"):
        audit.lower_bound(same[:40], same, sampling_prob=1.0, num_steps=1, delta=1e-5)
    with pytest.raises(ValueError, match="confidence"):
        audit.lower_bound(same, same, sampling_prob=1.0, num_steps=1, delta=1e-5, confidence=2)
