"""A mechanism's sampler, neighbours and ε stand in one record, and each is what it says."""

import dataclasses
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import RdpAccountant
from scipy import stats

import bam
from bam.audit import checks
from bam.core import sampling
from bam.privacy import accounting, fixed_size, mechanisms, tradeoff
from bam.privacy.fixed_size import epsilon_of_fixed_size, least_epsilon_of_fixed_size

FIXED = {"num_examples": 1000, "batch_size": 40, "num_steps": 200, "delta": 1e-5}
PLAN = {
    "num_examples": 1000,
    "expected_batch_size": 40,
    "num_steps": 20,
    "target_epsilon": 2.0,
    "delta": 1e-5,
    "clip_norm": 1.0,
    "accountant": "rdp",
}


def hockey_stick_of_a_realised_pair(sigma, q, epsilon):
    """δ of one step at ε: batches with one gradient +S in place of -S, all others 0, q = l/N."""
    x = np.linspace(-12 * sigma, 12 * sigma, 400_001)
    zero, plus, minus = (stats.norm.pdf(x, mean, sigma) for mean in (0, 1, -1))
    over = (1 - q) * zero + q * plus - math.exp(epsilon) * ((1 - q) * zero + q * minus)
    return np.trapezoid(np.maximum(over, 0), x)


# Accounting of batches of a fixed size.


def test_the_whole_data_as_a_batch_is_a_gaussian_of_sensitivity_two():
    # q = 1: RDP of T Gaussians that two gradients of norm S, 2S apart, must hide behind.
    whole = FIXED | {"batch_size": 1000, "num_steps": 10}
    composed = RdpAccountant(fixed_size.WHOLE_ORDERS)
    composed.compose(dp_accounting.GaussianDpEvent(3.0 / 2), 10)
    ours = epsilon_of_fixed_size(noise_multiplier=3.0, **whole)
    assert ours == pytest.approx(composed.get_epsilon(1e-5), rel=1e-12)
    of_one_norm = bam.epsilon(
        noise_multiplier=3.0, sampling_prob=1.0, num_steps=10, delta=1e-5, accountant="rdp"
    )
    assert ours > 1.5 * of_one_norm  # control: the sensitivity of add/remove would be too little


def test_fixed_batches_are_what_dp_accounting_says_of_replacing_one():
    step = dp_accounting.SampledWithoutReplacementDpEvent(
        1000, 40, dp_accounting.GaussianDpEvent(1.5 / 2)
    )
    accountant = RdpAccountant(list(range(2, 33)), NeighboringRelation.REPLACE_ONE)
    accountant.compose(step, 200)
    ours = epsilon_of_fixed_size(noise_multiplier=1.5, **FIXED)
    assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)


@pytest.mark.parametrize("sigma", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("q", [0.1, 0.5])
def test_the_bound_holds_for_a_pair_that_happens_and_poissons_does_not(sigma, q):
    one_step = {"num_steps": 1, "delta": 1e-3}
    ours = epsilon_of_fixed_size(
        noise_multiplier=sigma, num_examples=100, batch_size=round(100 * q), **one_step
    )
    assert hockey_stick_of_a_realised_pair(sigma, q, ours) <= 1e-3
    poisson = bam.epsilon(noise_multiplier=sigma, sampling_prob=q, **one_step)
    assert hockey_stick_of_a_realised_pair(sigma, q, poisson) > 1e-3  # control


@pytest.mark.parametrize("num_steps", [1, 9])
def test_without_sampling_the_pair_is_two_gaussians_a_distance_of_two_apart(num_steps):
    found = least_epsilon_of_fixed_size(
        noise_multiplier=4.0, num_examples=10, batch_size=10, num_steps=num_steps, delta=1e-5
    )
    exact = tradeoff.epsilon_of_mu(2 * num_steps**0.5 / 4.0, 1e-5)
    assert exact * (1 - 1e-3) < found <= exact


@pytest.mark.parametrize(("sigma", "batch_size"), [(2.0, 100), (10.0, 500), (1.0, 1000)])
def test_what_a_pair_shows_is_below_what_the_accountant_states(sigma, batch_size):
    run = {"num_examples": 1000, "batch_size": batch_size, "num_steps": 20, "delta": 1e-5}
    shown = least_epsilon_of_fixed_size(noise_multiplier=sigma, **run)
    stated = epsilon_of_fixed_size(noise_multiplier=sigma, **run)
    assert 0 < shown < stated


def test_epsilon_of_fixed_batches_is_monotone_and_has_its_edges():
    of_sigma = [epsilon_of_fixed_size(noise_multiplier=s, **FIXED) for s in (0.5, 1, 2, 4, 8)]
    assert of_sigma == sorted(of_sigma, reverse=True)
    assert epsilon_of_fixed_size(noise_multiplier=0.0, **FIXED) == math.inf
    assert epsilon_of_fixed_size(noise_multiplier=math.inf, **FIXED) == 0
    assert epsilon_of_fixed_size(noise_multiplier=1.0, **FIXED | {"num_steps": 0}) == 0
    assert 0 < epsilon_of_fixed_size(noise_multiplier=1e4, **FIXED) < 0.1
    for wrong in ({"batch_size": 1001}, {"batch_size": -1}, {"delta": 0.0}, {"num_steps": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            epsilon_of_fixed_size(noise_multiplier=1.0, **FIXED | wrong)
    with pytest.raises(ValueError, match="noise_multiplier"):
        epsilon_of_fixed_size(noise_multiplier=math.nan, **FIXED)


# One record: what the plan says is what is drawn and what is accounted.


def test_a_plan_takes_neighbours_and_epsilon_from_its_mechanism():
    poisson = bam.make_plan(**PLAN)
    fixed = bam.make_plan(**PLAN, mechanism="fixed_size")
    assert (poisson.adjacency, fixed.adjacency) == ("zero_out", "replace_one")
    assert 1.99 < fixed.epsilon <= 2.0
    assert fixed.noise_multiplier > 1.5 * poisson.noise_multiplier
    assert fixed.epsilon_after(20) == fixed.epsilon
    assert "replace one of 1000" in fixed.describe()
    assert "exactly 40 of 1000" in fixed.describe()
    assert bam.PrivacyPlan.from_json(fixed.to_json()) == fixed


def test_a_full_batch_is_poisson_with_every_example():
    whole = {**PLAN, "expected_batch_size": 1000}
    full, poisson = (bam.make_plan(**whole, mechanism=m) for m in ("full_batch", "poisson"))
    assert dataclasses.replace(full, mechanism_name="poisson") == poisson
    assert full.mechanism.draw(3, 5).tolist() == list(range(1000))
    with pytest.raises(ValueError, match="expected_batch_size = N = 1000"):
        bam.make_plan(**PLAN, mechanism="full_batch")


def test_a_plan_refuses_what_its_mechanism_cannot_do():
    with pytest.raises(ValueError, match="accountant pld has no bound for fixed_size"):
        bam.make_plan(**{**PLAN, "accountant": "pld"}, mechanism="fixed_size")
    with pytest.raises(ValueError, match="unknown mechanism 'shuffled'"):
        bam.make_plan(**PLAN, mechanism="shuffled")
    with pytest.raises(ValueError, match=r"poisson does not take \{'bands': 3\}"):
        bam.make_plan(**PLAN, mechanism_options={"bands": 3})


def test_a_plan_without_privacy_asks_no_accountant_of_its_mechanism():
    without = {**PLAN, "target_epsilon": math.inf, "accountant": "pld"}
    plan = bam.make_plan(**without, mechanism="fixed_size")
    assert (plan.epsilon_after(0), plan.epsilon_after(20)) == (0, math.inf)


def test_a_recorded_plan_runs_no_code_and_has_the_neighbours_of_its_batches(tmp_path):
    fixed = bam.make_plan(**PLAN, mechanism="fixed_size").to_json()
    assert bam.PrivacyPlan.from_json(fixed).adjacency == "replace_one"
    as_poisson = {k: v for k, v in fixed.items() if k != "mechanism"}
    for plan in (as_poisson, fixed | {"adjacency": "add_or_remove_one"}):
        with pytest.raises(ValueError, match="the records disagree"):
            bam.PrivacyPlan.from_json(plan)
    own = bam.make_plan(**PLAN).to_json() | {"mechanism": "tests.test_mechanisms:PLAN"}
    with pytest.raises(ValueError, match="is unknown here"):
        bam.PrivacyPlan.from_json(own)


@pytest.mark.parametrize(
    "changes",
    [
        {"accountant": "gdp"},
        {"sampling_prob": 0.004},
        {"expected_batch_size": 0, "sampling_prob": 0.0},
        {"mechanism": "banded", "mechanism_options": {"bands": 2}, "selection": (8.0, 1.0, 10.0)},
        {"selection": {"foo": 1}},
        {"selection": [1]},
        {"mechanism": []},
        {"num_examples": "many"},
        {"delta": None},
    ],
)
def test_a_record_that_no_plan_leaves_behind_is_a_value_error(changes):
    record = bam.make_plan(**PLAN).to_json()
    assert bam.PrivacyPlan.from_json(record).epsilon == record["epsilon"]
    with pytest.raises(ValueError):
        bam.PrivacyPlan.from_json(record | changes)


# The sampler.


def batches(draw, num_steps=400, num_examples=40):
    members = np.zeros((num_steps, num_examples), bool)
    for step in range(num_steps):
        members[step, draw(step)] = True
    return members


def fixed(step, seed=7):
    return sampling.fixed_size_sample(seed, step, 40, 12)


WRONG = {
    "batch sizes": lambda step: sampling.poisson_sample(7, step, 40, 0.3),
    "participation spread": lambda step: np.random.default_rng(step // 4).permutation(40)[
        10 * (step % 4) : 10 * (step % 4) + 10
    ],
    "batch pairs": lambda step: fixed(step // 2),
    "example pairs": lambda step: np.unique(
        (2 * sampling.fixed_size_sample(7, step, 20, 6)[:, None] + [0, 1]).ravel()
    ),
    "participation": lambda step: np.union1d(fixed(step)[:11], [39]),
}


def test_fixed_batches_pass_the_audit_of_batches():
    drawn = fixed(3)
    assert drawn.tolist() == sorted(set(drawn.tolist()))
    assert fixed(3).tolist() == drawn.tolist() != fixed(4).tolist() != fixed(3, seed=8).tolist()
    p_values = checks.fixed_size_p_values(batches(fixed), 12)
    assert not checks.failures(p_values, level=1e-3), p_values


@pytest.mark.parametrize("check", WRONG)
def test_other_batches_do_not_pass(check):
    members = batches(WRONG[check], num_steps=40 if check == "batch pairs" else 400)
    size = 10 if check == "participation spread" else 12
    assert check in checks.failures(checks.fixed_size_p_values(members, size))


def test_poisson_and_fixed_batches_are_told_apart_by_the_plan():
    fixed_plan = bam.make_plan(**PLAN, mechanism="fixed_size")
    poisson_plan = bam.make_plan(**PLAN)
    for drawn_by, right in ((fixed_plan, fixed_plan), (poisson_plan, poisson_plan)):
        members = batches(lambda step, d=drawn_by: d.mechanism.draw(1, step), 60, 1000)
        for plan in (fixed_plan, poisson_plan):
            failed = checks.failures(checks.batches_p_values([members], plan))
            assert bool(failed) == (plan is not right)


def test_the_search_for_noise_never_overshoots():
    made = mechanisms.make("fixed_size", 1000, 40)
    steps = {"num_steps": 20, "delta": 1e-5, "accountant": "rdp"}
    for target in (0.5, 3.0, 20.0):
        sigma = made.noise_multiplier(target_epsilon=target, **steps)
        spent = made.epsilon(noise_multiplier=sigma, **steps)
        assert target * (1 - 2e-5) <= spent <= target
    with pytest.raises(ValueError, match="epsilon must be from"):
        made.noise_multiplier(target_epsilon=accounting.LARGEST_EPSILON + 1, **steps)
