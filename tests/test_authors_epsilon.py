"""The bounds on the ε of the authors' batches are bounds, and enclose something."""

import pytest

from bam.privacy import gdp
from bam.privacy.mechanisms import epsilon_of_fixed_size
from scripts.paper import authors_epsilon


@pytest.mark.parametrize("num_steps", [1, 9])
def test_without_sampling_the_pair_is_two_gaussians_a_distance_of_two_apart(num_steps):
    found = authors_epsilon.epsilon_of_a_pair(4.0, 1.0, num_steps, 1e-5)
    exact = gdp.epsilon_of_mu(2 * num_steps**0.5 / 4.0, 1e-5)
    assert exact * (1 - 1e-3) < found <= exact


@pytest.mark.parametrize(("sigma", "batch_size"), [(2.0, 100), (10.0, 500), (1.0, 1000)])
def test_what_a_pair_shows_is_below_what_the_accountant_states(sigma, batch_size):
    shown = authors_epsilon.epsilon_of_a_pair(sigma, batch_size / 1000, 20, 1e-5)
    stated = epsilon_of_fixed_size(
        noise_multiplier=sigma, num_examples=1000, batch_size=batch_size, num_steps=20, delta=1e-5
    )
    assert 0 < shown < stated
