"""One training run with canaries bounds ε from below, and catches noise that is too small."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_privacy import auditing
from scipy import special, stats

import bam
from bam.audit import canary, one_run, whole_run
from bam.audit.audited import with_step
from bam.core import sampling
from bam.privacy import tradeoff
from bam.training import parts
from tests import cases
from tests.audits import NUM_CANARIES, REAL, one_run_config


@functools.cache
def built(epsilon=1.0):
    return one_run.build(one_run_config(epsilon), NUM_CANARIES)


# The run.


def test_one_run_gives_away_no_more_than_it_claims():
    bounds = one_run.bounds(one_run.run(built(), NUM_CANARIES, seed=0), built().plan)
    assert bounds.num_guesses == 30
    assert bounds.epsilon_lower_any <= bounds.epsilon_lower <= built().plan.epsilon
    assert 0 < bounds.epsilon_lower_independent <= built().plan.epsilon


def test_noise_that_is_too_small_is_caught_by_one_run():
    """The noise of ε = 14 where ε = 1 is claimed: ten times too small."""
    sigma, planted = (built(epsilon).plan.noise_multiplier for epsilon in (1.0, 14.0))
    assert 0.09 < planted / sigma < 0.11
    planted_run = with_step(built(), built(14.0).step)
    found = one_run.run(planted_run, NUM_CANARIES, seed=0)
    bounds = one_run.bounds(found, built().plan)
    assert 1.5 < bounds.epsilon_lower_any < bounds.epsilon_lower <= 14
    assert bounds.epsilon_lower < bounds.epsilon_lower_independent <= 14


def test_a_canary_is_an_entry_of_its_own_of_norm_s():
    state = built().init(0)
    entries = one_run.entries_of(built().num_params, NUM_CANARIES)
    expected = np.zeros(built().num_params)
    expected[entries[5:]] = built().sensitivity
    rows = sampling.pad(REAL + 5 + np.arange(NUM_CANARIES - 5), built().plan.capacity, 0, 0)
    total = whole_run.clipped_gradient_sum(built(), state, built().batch(state, rows))
    np.testing.assert_allclose(total, expected, atol=1e-4)


def test_a_score_is_of_its_own_canary_and_not_of_the_other_examples(monkeypatch):
    config = one_run_config(epsilon=200.0)  # little noise
    config.augment.update({"views": 2, "shift": 2})  # these are random, but the same when read back
    moved = one_run.build(config, NUM_CANARIES)
    sigma, num_steps = moved.plan.noise_multiplier, moved.plan.num_steps

    def spread():
        """The deviation of the scores of excluded canaries, 1 if it is that of the noise."""
        found = one_run.run(moved, NUM_CANARIES, seed=0)
        return np.std(found.scores[~found.included]) * sigma / np.sqrt(num_steps)

    assert 0.85 < spread() < 1.15
    nothing = np.zeros(moved.num_params)
    monkeypatch.setattr(one_run, "clipped_gradient_sum", lambda *arguments: nothing)
    assert spread() > 3  # the control: the others are not subtracted


def test_a_canary_takes_part_if_and_only_if_its_coin_says_so():
    seen = []

    def step(state, batch):
        seen.append(np.sort(np.asarray(batch.examples["row"])[batch.mask]))
        return built().step(state, batch)

    watched = with_step(built(), step)
    found = one_run.run(watched, NUM_CANARIES, seed=0)
    assert 100 < found.included.sum() < 200
    for drawn in seen:  # at q = 1
        np.testing.assert_array_equal(drawn[:REAL], np.arange(REAL))
        np.testing.assert_array_equal(drawn[REAL:], REAL + np.flatnonzero(found.included))
    assert len(seen) == 3


@pytest.mark.parametrize("method", ["dp_sat", "bam_sam"])
def test_every_other_example_has_the_gradient_of_the_users_method(method):
    own = parts.make_oracle(one_run_config(method=method).method, loss)
    oracle, params = one_run.with_canaries(own, REAL, 3), cases.mlp_params()
    example = {"image": jnp.ones(3), "label": jnp.asarray(1)}
    for row, is_canary in ((0, False), (REAL - 1, False), (REAL, True), (sampling.PADDING, False)):
        found = oracle.grad(params, example | {"row": jnp.asarray(row)})
        expected = own.grad(params, example)
        same = all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(expected)))
        assert same == (not is_canary)
    moved = [one.ascend(params, params) for one in (oracle, own)]
    cases.assert_same_bits(*moved)


def loss(params, example):
    return cases.mlp_loss(params, (example["image"], 1.0 * example["label"]))


@pytest.mark.parametrize("sampling_prob", [0.1, 0.9, 1.0])
def test_scores_do_not_tie_however_unlikely_a_canary_was_in_any_batch(sampling_prob):
    """Beside log(1 - q) the rest was rounded away, so guesses followed the canaries' order."""
    num_steps = 3
    plan = bam.make_plan(
        num_examples=1000,
        expected_batch_size=round(1000 * sampling_prob),
        num_steps=num_steps,
        epsilon=3.0,
        delta=1e-5,
        accountant="rdp",
    )
    ratios = np.tile(-60.0 - np.arange(5.0), (num_steps, 1))
    assert np.all(np.diff(one_run.scores_of(ratios, plan)) < 0)
    ratios = np.log([[2.0], [3.0], [0.5]])
    expected = np.sum(np.log(1 - plan.sampling_prob + plan.sampling_prob * np.exp(ratios)))
    without = num_steps * np.log1p(-plan.sampling_prob) if plan.sampling_prob < 1 else 0.0
    np.testing.assert_allclose(one_run.scores_of(ratios, plan), [expected - without])


def test_what_cannot_be_audited_is_refused():
    with pytest.raises(ValueError, match="number of parameters, 650"):
        one_run.build(one_run_config(), 700)
    with pytest.raises(ValueError, match="no ε to audit"):
        one_run.build(one_run_config(method="non_private"), 20)
    correlated = one_run_config()
    correlated.update({"expected_batch_size": 50, "mechanism": {"name": "banded", "bands": 2}})
    with pytest.raises(ValueError, match="needs independent noise, not mechanism banded"):
        one_run.build(correlated, 20)
    found = one_run.OneRun(np.zeros(20), np.ones(20, bool), 0.5)
    with pytest.raises(ValueError, match="confidence"):
        one_run.bounds(found, built().plan, confidence=1.0)


# The estimators.


@pytest.mark.parametrize("guesses", [(1000, 100, 79), (5000, 500, 412), (300, 30, 30)])
def test_the_bounds_are_those_of_jax_privacy(guesses):
    expected = auditing._epsilon_one_run(0.0, *guesses, 0.05, 1e-5)
    assert abs(one_run.epsilon_any_mechanism(*guesses, 1e-5) - expected) < 1e-5
    expected = auditing._epsilon_one_run_fdp(0.0, *guesses, 0.05, 1e-5)
    for epsilon in (0.98 * expected, 1.02 * expected + 1e-3):
        f = tradeoff.gaussian_tradeoff(mu_of(epsilon))
        assert one_run.tradeoff_is_possible(f, *guesses) == (epsilon > expected)


def mu_of(epsilon):
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if tradeoff.epsilon_of_mu(middle, 1e-5) < epsilon else (low, middle)
        )
    return low


def test_the_bounds_hold_as_often_as_they_say_and_get_close():
    """Scores of a Gaussian mechanism whose ε is known, and of one that gives all away but δ."""
    rng, plan, truth = np.random.default_rng(0), built(14.0).plan, built(14.0).plan.epsilon
    mu = np.sqrt(plan.num_steps) / plan.noise_multiplier
    found = []
    for _ in range(40):
        included = rng.random(2000) < 0.5
        scores = rng.normal(mu * included, 1)
        found.append(one_run.bounds(one_run.OneRun(scores, included, 0.0), plan))
    assert sum(one.epsilon_lower > truth for one in found) <= 5
    assert sum(one.epsilon_lower_any > truth for one in found) <= 5
    assert sum(one.epsilon_lower_independent > truth for one in found) <= 5
    assert np.median([one.epsilon_lower_independent for one in found]) > 0.8 * truth
    assert np.median([one.epsilon_lower for one in found]) > 0.4 * truth


def audits_of(sigma, num_audits=400, num_canaries=200):
    """Audits with the scores of 20 steps of the Poisson-sampled Gaussian, planned for σ = 2."""
    rng, plan = np.random.default_rng(0), poisson_plan()
    included = rng.random((num_audits, num_canaries)) < 0.5
    drawn = rng.random((20, *included.shape)) < plan.sampling_prob
    entries = rng.normal(included * drawn, sigma)
    ratios = (entries.reshape(20, -1) - 0.5) / plan.noise_multiplier**2
    scores = one_run.scores_of(ratios, plan).reshape(included.shape)
    return [one_run.OneRun(*one, 0.0) for one in zip(scores, included, strict=True)]


def poisson_plan():
    return bam.make_plan(
        num_examples=1000,
        expected_batch_size=300,
        num_steps=20,
        noise_multiplier=2.0,
        delta=1e-5,
        accountant="pld",
    )


def refuted(found, sigma):
    """How many audits refute the Poisson-sampled Gaussian with this σ."""
    f = canary._tradeoff(sigma, 0.3, 20)
    correct = [one_run.correct_in_turn(one) for one in found]
    return sum(not one_run.coins_are_possible(f, len(found[0].scores), n) for n in correct)


def test_guesses_of_all_coins_refute_the_truth_in_at_most_one_run_of_twenty():
    assert refuted(audits_of(sigma=2.0), sigma=2.0) <= 30  # of 400; above 30 at p = 0.01


def test_guesses_of_all_coins_catch_noise_that_is_a_third_too_small():
    found = audits_of(sigma=4 / 3, num_audits=100, num_canaries=1000)
    assert refuted(found, sigma=2.0) > 90


def test_guesses_of_all_coins_refute_the_truth_too_often_with_a_threshold_from_the_coins():
    """The control: a threshold that is best for the coins themselves is no fair guess."""
    f, num_refuted = canary._tradeoff(2.0, 0.3, 20), 0
    for one in audits_of(sigma=2.0):
        included = one.included[np.argsort(-one.scores)]
        best = np.max(np.cumsum(included) - np.cumsum(~included)) + np.sum(~included)
        num_refuted += not one_run.coins_are_possible(f, len(included), int(best))
    assert num_refuted > 40  # of 400; above 40 at p = 0.00001 if the guess were fair


def test_guesses_of_all_coins_need_scores_that_are_independent():
    """The control: all coins get one evidence, so that each has the trade-off function G_μ.

    That is why this bound is an extra, and the other two are for scores of any dependence.
    """
    rng, mu, num_canaries, refutes, others_refute = np.random.default_rng(0), 1.0, 200, 0, 0
    f, num_guesses = tradeoff.gaussian_tradeoff(mu), one_run.guesses(200)
    for _ in range(400):
        evidence = abs(mu * rng.normal(mu / 2, 1))  # of |log-likelihood ratio|
        num_correct = rng.binomial(num_canaries, special.expit(evidence))
        refutes += not one_run.coins_are_possible(f, num_canaries, num_correct)
        num_correct = rng.binomial(num_guesses, special.expit(evidence))
        others_refute += not one_run.tradeoff_is_possible(f, num_canaries, num_guesses, num_correct)
    assert refutes > 60 and others_refute <= 30


def test_the_chance_of_a_right_guess_is_that_of_the_best_test():
    """Of a Gaussian with μ it is Φ(μ/2), so v right guesses refute μ as a binomial test does."""
    mu, num_canaries = 0.75, 1000
    chance = special.ndtr(mu / 2)
    least = int(stats.binom.isf(0.05, num_canaries, chance)) + 1  # P[B ≥ least] ≤ 0.05
    f = tradeoff.gaussian_tradeoff(mu)
    assert not one_run.coins_are_possible(f, num_canaries, least)
    assert one_run.coins_are_possible(f, num_canaries, least - 1)


def test_a_guess_in_turn_knows_only_the_scores_before():
    scores = np.array([1.0, 2.0, 0.0, np.nan, 1.5])  # compared with 0, 1, 2 and 1
    guesses = np.array([True, True, False, False, True])
    assert one_run.correct_in_turn(one_run.OneRun(scores, guesses, 0.0)) == 4  # NaN is wrong
    assert one_run.correct_in_turn(one_run.OneRun(scores, ~guesses, 0.0)) == 0


def test_guesses_at_random_bound_nothing_in_most_runs():
    rng = np.random.default_rng(0)
    found = [
        one_run.epsilon_any_mechanism(1000, 100, rng.binomial(100, 0.5), 1e-5) for _ in range(200)
    ]
    assert sum(epsilon > 0 for epsilon in found) <= 20  # of 200, at 95 % ten are expected


def test_scores_that_are_not_numbers_are_no_guesses():
    plan, included = built(14.0).plan, np.arange(2000) % 2 == 0
    bounds = lambda x: one_run.bounds(one_run.OneRun(x, included, 0.0), plan)  # noqa: E731
    scores = np.where(included, 1.0, -1.0)
    right = bounds(scores)
    assert right.num_correct == right.num_guesses == 200  # the control
    assert bounds(np.where(included, np.nan, -1.0)).num_correct <= 100
    assert bounds(np.where(included, 1.0, np.nan)).num_correct <= 100
    nothing = bounds(np.full(2000, np.nan))
    assert nothing.num_correct == nothing.epsilon_lower == nothing.epsilon_lower_any == 0
    assert nothing.num_correct_of_all == nothing.epsilon_lower_independent == 0
    few = np.where(np.arange(2000) < 1000, np.nan, scores)  # enough others to guess
    assert bounds(few).num_correct == 200


# The command.


def test_the_command_prints_the_bound_beside_the_claim_and_keeps_it(tmp_path):
    out = tmp_path / "audit.json"
    bounds = {"empirical_epsilon_lower": 3.0, "empirical_epsilon_lower_any_mechanism": 1.0}
    old = [{"method": "dp_sgd", "sampling_prob": 1.0, "num_trials": 1, "claimed_epsilon": 4.0}]
    old[0] |= bounds
    out.write_text(json.dumps(old), encoding="utf-8")
    command = (
        "bam", "audit", "--one_run", "--config=configs/digits.py:dp_sgd", "--canaries=100",
        "--config.model.name=linear", "--config.dataset.holdout=1337", "--config.num_steps=2",
        "--config.expected_batch_size=200", "--config.seed=0", f"--out={out}",
    )  # fmt: skip
    done = cases.run_command(*command)
    assert done.returncode == 0, done.stderr
    assert "claimed 3.00 at δ = 1e-05" in done.stdout
    kept, row = json.loads(out.read_text(encoding="utf-8"))
    assert [kept] == old
    assert row["kind"] == "one_run" and row["num_canaries"] == row["num_examples"] == 100
    assert row["num_guesses"] == 10
    assert "digits, linear, DP-SGD" in (tmp_path / "audit_one_run.md").read_text(encoding="utf-8")
    assert "DP-SGD" in (tmp_path / "audit.md").read_text(encoding="utf-8")


def test_the_command_says_in_one_line_what_is_missing():
    done = cases.run_command("bam", "audit", "--one_run")
    assert done.returncode == 2
    assert done.stderr == ("error: --one_run and --config=configs/NAME.py:METHOD belong together\n")
