"""ε by privacy loss distributions is never too small, and one line says where it is not tight."""

import math
import warnings

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import integrate, stats

import bam
from bam.privacy import accounting, pld, tradeoff
from tests.cases import run_command

loose = pytest.mark.filterwarnings("ignore::bam.privacy.pld.LooseBoundWarning")
# So nearly all of the data are in each batch that T steps are one Gaussian, and yet are composed.
NEARLY_ALL = 1 - 1e-12


def least_epsilon(mu, num_steps, delta):
    """No ε of T steps of σ = √T/μ with q = NEARLY_ALL can be smaller.

    With probability w = q^T all of them have the example, which is one Gaussian of this μ. So at ε
    they have at least w times the δ that it has at ε + log 1/w.
    """
    log_w = num_steps * math.log1p(NEARLY_ALL - 1)
    return tradeoff.epsilon_of_mu(mu, delta * math.exp(-log_w)) + log_w


def spent_by_pld(mu, num_steps, delta, spacing=pld.FINE):
    sigma = math.sqrt(num_steps) / mu
    return pld.epsilon(sigma, NEARLY_ALL, num_steps, delta, spacing)


@loose
@pytest.mark.parametrize("spacing", [pld.FINE, pld.COARSE])
@pytest.mark.parametrize(
    ("num_steps", "mu", "delta"),
    [(1, 0.3, 1e-12), (100, 0.1, 1e-6), (100, 3.0, 1e-10), (10**4, 1.0, 1e-5), (10**4, 1.0, 1e-11),
     (30_000, 3.0, 1e-10), (10**6, 0.5, 1e-5), (10**6, 0.5, 2e-9)],
)  # fmt: skip
def test_steps_that_are_one_gaussian_cost_no_less_and_more_as_the_docstring_says(
    num_steps, mu, delta, spacing
):
    spent = spent_by_pld(mu, num_steps, delta, spacing)
    assert spent >= least_epsilon(mu, num_steps, delta)
    # What the tables add to the variance, where they have more than a few entries; and rounding.
    tabled = math.sqrt(mu**2 + num_steps * spacing**2 / 6)
    if mu / math.sqrt(num_steps) > spacing / 2:
        assert spent <= 1.001 * tradeoff.epsilon_of_mu(tabled, delta - 2 * pld.ROUNDING * num_steps)


def test_what_rounding_and_tables_from_below_do_is_seen_by_the_same_bound():
    """Controls: dp-accounting's own composition, and tables that are no upper bound."""
    num_steps, delta, too_small = 10**4, 1e-11, 0
    for mu in np.linspace(0.5, 1.5, 24):
        step = pld.step_pld(math.sqrt(num_steps) / mu, NEARLY_ALL, pld.FINE)
        theirs = step.self_compose(num_steps).get_epsilon_for_delta(delta)
        too_small += theirs < least_epsilon(mu, num_steps, delta)
        assert spent_by_pld(mu, num_steps, delta) > least_epsilon(mu, num_steps, delta)
    assert too_small > 0
    below = privacy_loss_distribution.from_gaussian_mechanism(
        100.0, sampling_prob=NEARLY_ALL, use_connect_dots=False, pessimistic_estimate=False,
        value_discretization_interval=pld.FINE,
    ).self_compose(num_steps)  # fmt: skip
    assert below.get_epsilon_for_delta(1e-5) < least_epsilon(1.0, num_steps, 1e-5)


@loose
def test_other_numbers_from_these_tables_are_upper_bounds_too():
    num_steps, mu, delta = 10**4, 1.0, 1e-11
    mechanism = {"noise_multiplier": 100.0, "sampling_prob": NEARLY_ALL, "num_steps": num_steps}
    least = least_epsilon(mu, num_steps, delta)
    composed = pld.step_pld(100.0, NEARLY_ALL, pld.FINE).self_compose(num_steps)
    (found,) = pld.deltas(*mechanism.values(), [least])
    assert found - composed.get_delta_for_epsilon(least) == pytest.approx(2**-51 * num_steps)
    assert found >= delta


@pytest.mark.parametrize("sigma", [0.6, 1.5])
@pytest.mark.parametrize("q", [0.01, 0.3])
def test_one_step_costs_what_quadrature_says_of_both_directions(sigma, q):
    def without(x):  # the density of the step's noisy sum, over S
        return stats.norm.pdf(x, 0, sigma)

    def with_example(x):
        return (1 - q) * without(x) + q * stats.norm.pdf(x, 1, sigma)

    sums = np.linspace(-12 * sigma, 12 * sigma + 1, 10**6)
    densities = without(sums), with_example(sums)

    for epsilon in (0.01, 0.3):
        excesses = (
            np.maximum(0.0, more - math.exp(epsilon) * less)
            for more, less in (densities, densities[::-1])
        )
        delta = max(float(integrate.trapezoid(excess, sums)) for excess in excesses)
        spent = bam.epsilon(noise_multiplier=sigma, sampling_prob=q, num_steps=1, delta=delta)
        assert epsilon - 1e-8 <= spent <= epsilon + 1e-6


# What is said.


def test_what_rounding_hides_is_refused_and_without_sampling_there_is_no_rounding():
    run = {"noise_multiplier": 1000.0, "sampling_prob": 0.3, "num_steps": 10**6}
    with pytest.raises(ValueError, match=r"cannot resolve delta 1e-12 after 1000000 steps.*rdp"):
        bam.epsilon(**run, delta=1e-12)
    with pytest.raises(ValueError, match=r"a delta of at least 9\.8e-10, or accountant rdp"):
        bam.noise_multiplier(
            target_epsilon=1.0, delta=1e-12, sampling_prob=0.3, num_steps=10**6, accountant="pld"
        )
    assert 0 < bam.epsilon(**run, delta=1e-12, accountant="rdp") < 10
    run["sampling_prob"] = 1.0
    exact = tradeoff.epsilon_of_mu(1.0, 1e-11)
    assert bam.epsilon(**run, delta=1e-11) == pytest.approx(exact, rel=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("run", "line"),
    [
        ((1.0, 0.01, 1, 1e-12), "in any step accountant pld does not resolve .* 1e-12"),
        ((1.0, 0.01, 10_000, 1e-9), "after 2249 steps accountant pld does not resolve .* 1e-09"),
        (
            (20.0, 0.001, 10, 1e-5),
            "the privacy loss of a step is near the resolution of accountant pld, 0.0001",
        ),
    ],
)
def test_an_epsilon_that_is_not_tight_says_so_in_one_line_that_is_shown_once(run, line):
    def spent():
        names = ("noise_multiplier", "sampling_prob", "num_steps", "delta")
        return bam.epsilon(**dict(zip(names, run, strict=True)))

    accounting.cached_epsilon.cache_clear()
    pld.step_pld.cache_clear()
    with pytest.warns(pld.LooseBoundWarning, match=line + ".*accountant rdp.* smaller one$"):
        tight = spent()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for num_steps in (run[2], run[2] + 1, run[2] + 2):  # as a run's rows ask
            accounting.cached_epsilon.cache_clear()
            pld.step_pld.cache_clear()
            run = (*run[:2], num_steps, run[3])
            assert spent() >= tight
    assert len(shown) == 1


def test_a_command_that_finds_the_noise_shows_it_as_one_line():
    settings = ("--sampling_prob=0.01", "--num_steps=3000", "--delta=1e-9")
    done = run_command("bam", "privacy", "--target_epsilon=1", *settings)
    assert done.returncode == 0 and "ε =   1.0000   PLD" in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: after 2249 steps accountant pld does not resolve")
