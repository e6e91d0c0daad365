"""Batches by the epoch: the law they are drawn from, the ε they earn, and audits of them."""

import math

import numpy as np
import PLD_accounting as allocation
import pytest
from jax_privacy import batch_selection
from jax_privacy.experimental.monte_carlo import delta_calculation, sample_generation
from scipy import special

import bam
from bam import extras
from bam.audit import canary, checks, one_run, whole_run
from bam.audit.audited import with_step
from bam.core import sampling
from bam.privacy import accounting, mechanisms, processes
from bam.privacy import random_allocation as accountant
from bam.privacy.random_allocation import epsilon_of_random_allocation
from bam.privacy.run import PrivateRun
from bam.training import loop
from tests.audits import NUM_CANARIES, canary_config, one_run_config
from tests.cases import mostly

RUN = {"noise_multiplier": 2.0, "num_steps": 120, "delta": 1e-5}  # ten epochs of twelve batches
PLAN = {"num_examples": 80, "expected_batch_size": 20, "num_steps": 60, "delta": 1e-5}
PLAN |= {"epsilon": 4.0, "mechanism": "random_allocation"}


# The ε.


def losses(sigma, batches, epochs, num, present):
    """Privacy losses of runs of either, straight from the definition."""
    rng, found = np.random.default_rng(0), np.zeros(num)
    for _ in range(epochs):
        seen = sigma * rng.standard_normal((num, batches))
        if present:
            seen[np.arange(num), rng.integers(batches, size=num)] += 1
        found += special.logsumexp((seen - 0.5) / sigma**2, axis=1) - math.log(batches)
    return found if present else -found


SIMULATED = [(2.0, 12, 3, 0.95), (0.8, 4, 2, 0.95), (1.0, 48, 1, 0.9), (0.6285, 312, 1, 0.8)]


@pytest.mark.parametrize(
    ("sigma", "batches", "epochs", "share"),
    mostly(SIMULATED, slow=SIMULATED[1:]),
)
def test_epsilon_is_just_above_that_of_simulated_runs(sigma, batches, epochs, share):
    delta, num = 1e-3, min(400_000, 20_000_000 // batches)
    run = {"noise_multiplier": sigma, "num_steps": batches * epochs, "batches_per_epoch": batches}
    epsilon = epsilon_of_random_allocation(delta=delta, **run)
    drawn = [losses(sigma, batches, epochs, num, present) for present in (True, False)]

    def worst(epsilon):
        """δ at an ε, of the worse direction, and its standard error."""
        found = []
        for lost in drawn:
            shown = -np.expm1(np.minimum(0, epsilon - lost))
            found.append((shown.mean(), shown.std() / math.sqrt(num)))
        return max(found)

    shown, error = worst(epsilon)
    assert shown - 4 * error <= delta
    shown, error = worst(share * epsilon)  # so much less would be too little
    assert shown - 4 * error > delta


def test_epsilon_is_within_three_percent_of_the_packages_own_lower_bound():
    params = allocation.PrivacyParams(sigma=2.0, num_steps=12, num_epochs=10, delta=1e-5)
    config = allocation.AllocationSchemeConfig(loss_discretization=0.03, tail_truncation=1e-8)
    below = allocation.gaussian_allocation_epsilon_configurable(
        params=params, config=config, bound_type=allocation.BoundType.IS_DOMINATED
    )
    found = epsilon_of_random_allocation(batches_per_epoch=12, **RUN)
    assert below <= found <= 1.03 * below
    assert found < accounting.epsilon(sampling_prob=1 / 12, **RUN)


def test_an_epoch_is_what_jax_privacys_simulation_of_balls_in_bins_says():
    strategy = batch_selection.BallsInBinsSampling(cycle_length=12, iterations=12)
    sampled, _ = sample_generation.get_privacy_loss_sample(
        strategy, noise_multiplier=1.0, c_col=np.ones(1), seed=0, positive_sample=True,
        num_samples=20_000,
    )  # fmt: skip
    run = {"noise_multiplier": 1.0, "batches_per_epoch": 12, "num_steps": 12}
    epsilon = epsilon_of_random_allocation(delta=0.02, **run)
    shown = delta_calculation.delta_from_epsilon_and_samples(epsilon, sampled)
    assert 0.015 < shown < 0.022


def test_epsilon_of_the_ends_and_of_part_of_an_epoch():
    def epsilon(**changed):
        return epsilon_of_random_allocation(**RUN | {"batches_per_epoch": 12} | changed)

    assert epsilon(num_steps=0) == epsilon(noise_multiplier=math.inf) == 0
    assert epsilon(noise_multiplier=0.0) == math.inf
    assert epsilon(num_steps=109) == epsilon() > epsilon(num_steps=108)
    assert epsilon(noise_multiplier=1.9) > epsilon() > epsilon(delta=1e-4)
    assert 0 < epsilon(noise_multiplier=1000.0) < 0.01
    for wrong in ({"batches_per_epoch": 1}, {"num_steps": -1}, {"delta": 0.0}):
        with pytest.raises(ValueError, match="must be"):
            epsilon(**wrong)


def test_the_plan_promises_what_the_accountant_says_and_no_other_can():
    plan = bam.make_plan(**PLAN)
    assert 0.998 * 4 < plan.epsilon <= 4 == plan.mechanism.period
    with pytest.raises(ValueError, match="accountant rdp has no bound for random_allocation"):
        bam.make_plan(**PLAN, accountant="rdp")
    with pytest.raises(ValueError, match="expected_batch_size must be at most 40, got 41"):
        bam.make_plan(**PLAN | {"expected_batch_size": 41})


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PLD_accounting", None)
    accountant.cached_epsilon.cache_clear()
    with pytest.raises(extras.MissingExtraError, match=r"pip install '\.\[allocation\]'"):
        bam.make_plan(**PLAN)


# The batches, and audits of them.


def drawn(draw, num_epochs=100):
    """Who is in the batches of a run: `draw(epoch) -> the place of each of 80 examples`."""
    places = np.array([draw(epoch) for epoch in range(num_epochs)])
    return np.concatenate([places == place for place in range(4)], axis=1).reshape(-1, 80)


def right(epoch):
    return sampling.cycle_parts(0, 80, 4, epoch + 1)


def test_every_example_is_in_one_batch_of_each_epoch():
    mechanism = mechanisms.make("random_allocation", 80, 20)
    batches = [mechanism.draw(0, step) for step in range(1, 401)]
    members = np.zeros((400, 80), bool)
    for row, batch in zip(members, batches, strict=True):
        row[batch] = True
    np.testing.assert_array_equal(members, drawn(right))
    assert np.all(members.reshape(100, 4, 80).sum(axis=1) == 1)
    assert checks.failures(checks.period_p_values([members], 4, 0.25), 1e-3) == []
    parts = [members[:198], members[200:]]  # the first ends within an epoch
    assert checks.failures(checks.period_p_values(parts, 4, 0.25), 1e-3) == []


def in_two(epoch):
    return np.where(np.arange(80) == 7, 9, right(epoch))


WRONG = {
    "shuffled once only": (lambda epoch: right(0), "participation"),
    "of equal sizes": (lambda e: np.random.default_rng(e).permutation(80) % 4, "batch sizes"),
    "in pairs": (lambda epoch: np.repeat(right(epoch)[:40], 2), "example pairs"),
    "an epoch like the one before": (lambda epoch: right(epoch // 2), "batch pairs"),
    "more in the first": (lambda e: right(e) * (np.arange(80) % 3 > 0), "batch mean"),
    "an example in none": (in_two, "one batch of an epoch"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_other_batches_are_caught(fault):
    draw, check = WRONG[fault]
    assert check in checks.failures(checks.period_p_values([drawn(draw)], 4, 0.25))


def test_an_example_in_two_batches_of_an_epoch_is_caught():
    members = drawn(right)
    members[3, np.flatnonzero(~members[3])[0]] = True
    assert checks.failures(checks.period_p_values([members], 4, 0.25)) == ["one batch of an epoch"]


def build(num_steps=60):
    config = canary_config("dp_sgd", 20, num_steps)
    config.update({"accountant": "pld", "spare_steps": 3})
    config.mechanism.name = "random_allocation"
    return loop.build(config, canary.canary_dataset(80))


def test_whole_runs_that_stop_in_an_epoch_begin_a_new_one(monkeypatch):
    # Without a seed, yet the same each time: new noise fails a check of a run once in a while.
    monkeypatch.setattr(processes.secrets, "token_bytes", np.random.default_rng(0).bytes)
    built = build()
    runs = [whole_run.record(built, seed, cut=30) for seed in (0, None)]  # of epochs of 4 steps
    assert checks.failures(whole_run.p_values(built, runs), 1e-4) == []
    assert [len(run.members) for run in runs] == [60, 60]
    after = runs[1].parts()[1].members
    assert np.all(after[:4].sum(axis=0) == 1)

    # In the middle of an epoch of another seed.
    going_on = lambda self, step: self.plan.batch(self._root_seed, step)  # noqa: E731
    monkeypatch.setattr(PrivateRun, "batch", going_on)
    found = whole_run.p_values(built, [whole_run.record(built, None, cut=30)])
    assert checks.failures(found) == ["one batch of an epoch"]


def test_one_run_is_audited_and_noise_that_is_too_small_is_caught():
    config = one_run_config(1.0)
    config.update({"num_steps": 6, "accountant": "pld"})
    config.expected_batch_size //= 3
    config.mechanism.name = "random_allocation"
    built = one_run.build(config, NUM_CANARIES)
    bounds = one_run.bounds(one_run.run(built, NUM_CANARIES, seed=0), built.plan)
    assert bounds.epsilon_lower == bounds.epsilon_lower_any <= built.plan.epsilon
    config.epsilon = 50.0
    planted = one_run.build(config, NUM_CANARIES)
    planted = with_step(built, planted.step)
    audited = one_run.run(planted, NUM_CANARIES, seed=0)
    assert one_run.bounds(audited, built.plan).epsilon_lower > 1.5


def test_a_runs_score_is_the_likelihood_ratio_of_its_epochs():
    """Less that of no evidence in the last, and the number of batches in the first."""
    plan = bam.make_plan(**PLAN)
    ratios = np.log([[2.0], [3.0], [5.0], [6.0], [10.0]])  # an epoch of four steps, and one step
    expected = math.log(2 + 3 + 5 + 6) + math.log((10 + 3) / 3)
    np.testing.assert_allclose(one_run.scores_of(ratios, plan), [expected])


def test_scores_of_a_run_do_not_tie_however_small_the_likelihood_is():
    """Taken out of its logarithm, the sum of an epoch was 0 for all: scores of minus infinity."""
    ratios = np.full((4, 5), -800.0) - np.arange(5.0)
    scores = one_run.scores_of(ratios, bam.make_plan(**PLAN))
    np.testing.assert_allclose(np.diff(scores), -1.0)
    last = one_run.scores_of(np.full((5, 5), -40.0) - np.arange(5.0), bam.make_plan(**PLAN))
    assert np.all(np.diff(last) < 0)  # the last epoch has one step, and adds some e^-40
