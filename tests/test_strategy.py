"""Noise that is correlated over steps is what its strategy declares, and hides what ε says."""

import contextlib
import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax_privacy.matrix_factorization import toeplitz

import bam
from bam.audit import canary, checks, whole_run
from bam.core import gaussian, grid, noise, strategy
from bam.core.clipping import ROUNDING, clip_by_l2_norm
from bam.core.noise import advance_noise, init_noise
from bam.privacy import accounting, checkpoint, ledger, mechanisms, tradeoff
from bam.privacy import plan as plans
from bam.training import config as base
from bam.training import loop
from configs import digits
from examples import adaptive_clipping
from tests.cases import assert_same_bits
from tests.run_folder import header_of, newest

KEY = bam.seeded_key(34)
CLIP = clip_by_l2_norm(1.0)
NO_FIT = (1.0, 1.0)  # its inverse alternates for ever


def drawn_noise(coefficients, num_steps, num_entries, sigma=2.0):
    """n of every step in multiples, the fresh part of it, and the size of a multiple."""
    state = init_noise(KEY, CLIP, jnp.zeros(num_entries), coefficients)
    rows, fresh, spacings = [], [], []

    @jax.jit
    def step(state):
        made, state = advance_noise(state, sigma, 1.0, coefficients)
        alone = dataclasses.replace(made, correlated=None)
        return [
            record.draws_of_device(num_entries)[:num_entries] for record in (made, alone)
        ], state

    for _ in range(num_steps):
        spacings.append(advance_noise(state, sigma, 1.0, coefficients)[0].spacing)
        found, state = step(state)
        for kept, numbers in zip((rows, fresh), found, strict=True):
            kept.append(np.asarray(numbers, np.int64))
    return np.array(rows), np.array(fresh), spacings


def small(bands=3, **changes):
    """A linear model on digits: 8 steps, batches of 100 of 1437."""
    config = digits.get_config("dp_sgd")
    config.model = {"name": "linear", "width": 1}
    config.update({"num_steps": 8, "expected_batch_size": 100, "microbatch_size": 50})
    config.accountant = "rdp"
    config.mechanism.update({"name": "banded", "bands": bands})
    config.update(changes)
    return config


def after(num_steps):
    """For `should_stop`: after so many steps."""
    asked = itertools.count(1)
    return lambda: next(asked) == num_steps


# The numbers of a strategy.


def test_the_square_root_is_the_series_that_jax_privacy_has_in_256ths():
    assert strategy.square_root(4) == (1.0, 0.5, 0.375, 0.3125)
    theirs = np.asarray(toeplitz.optimal_max_error_strategy_coefs(32))
    np.testing.assert_allclose(strategy.square_root(32), theirs, atol=1 / 512 + 1e-6)
    for bands in (1, 2, 32, 256):
        strategy.check(strategy.square_root(bands))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ((), "begins with 1"),
        ((0.5, 1.0), "begins with 1"),
        ((1.0, 0.3), "multiple of 1/256"),
        ((1.0, math.nan), "multiple of 1/256"),
        (NO_FIT, "grows"),
        ((1.0, -2.0), "grows"),
        ((1.0, 255 / 256), "grows"),
    ],
)
def test_a_strategy_whose_noise_is_not_what_it_declares_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message) as error:
        strategy.check(wrong)
    assert "\n" not in str(error.value)


# The noise itself.


def test_weighted_past_noise_is_exact_in_whole_numbers():
    rng = np.random.default_rng(0)
    coefficients = strategy.square_root(7)
    past = rng.integers(-(2**26), 2**26, size=(6, 1000))
    fresh = rng.integers(-(2**24), 2**24, size=1000)
    given = (jnp.asarray(x, jnp.int32) for x in (fresh, past))
    ours = grid.correlate(*given, coefficients)
    weights = [int(256 * c) for c in coefficients[1:]]
    exact = [
        int(z) - sum(k * int(n) for k, n in zip(weights, column, strict=True)) // 256
        for z, column in zip(fresh, past.T, strict=True)
    ]
    np.testing.assert_array_equal(ours, exact)


@pytest.mark.parametrize("bands", [2, 5])
def test_what_a_strategy_makes_of_the_noise_is_what_is_fresh_of_it(bands):
    coefficients = strategy.square_root(bands)
    rows, fresh, _ = drawn_noise(coefficients, 12, 500)
    for t in range(12):
        back = (
            sum(256 * c * rows[t - j] for j, c in enumerate(coefficients) if t >= j) / 256
            - fresh[t]
        )
        assert np.all((back >= 0) & (back < 1))  # what was rounded away
    np.testing.assert_array_equal(rows[0], fresh[0])
    spread = np.std(rows[-1]) / np.std(fresh[-1])
    assert spread == pytest.approx(np.linalg.norm(strategy.noise_of(coefficients, 12)), rel=0.1)


def test_sums_hold_less_noise_than_of_independent_noise():
    def noise_in_sums(coefficients, num_steps):
        left = np.cumsum(strategy.noise_of(coefficients, num_steps))  # of z_1 in the sum of t steps
        return np.sqrt(np.mean(np.cumsum(left**2)))

    assert noise_in_sums((1.0,), 7) == pytest.approx(2.0)
    by_hand = math.sqrt((1 + (1 + 0.5**2)) / 2)  # z_1, and then z_2 + z_1 / 2
    assert noise_in_sums((1.0, 0.5), 2) == pytest.approx(by_hand)
    ours = strategy.square_root(8)
    at_one_privacy = strategy.norm(ours) * noise_in_sums(ours, 64)
    assert at_one_privacy < 0.6 * noise_in_sums((1.0,), 64)


def shift_of(x, others, outputs, coefficients):
    """What the mean of each row moves, given what was shown, if x takes part in the first step."""

    def means(sums):
        past = outputs - sums  # the noise that these sums would need
        found = []
        for t in range(len(outputs)):
            weighted = sum(
                int(256 * c) * past[t - j] for j, c in enumerate(coefficients) if j and t >= j
            )
            found.append(sums[t] - np.asarray(weighted) // 256)
        return np.array(found)

    with_x = others.copy()
    with_x[0] += x
    return float(np.linalg.norm(means(with_x) - means(others)))


def test_the_noise_is_wide_enough_for_what_rounding_lets_an_example_move():
    # One multiple in every entry: as small as an example can be, so that rounding counts most.
    coefficients, num_entries = strategy.square_root(3), 400
    rng = np.random.default_rng(1)
    worst = 0.0
    for _ in range(200):
        others = rng.integers(-50, 50, size=(3, num_entries))
        outputs = rng.integers(-(2**20), 2**20, size=(3, num_entries))
        moved = shift_of(np.ones(num_entries, int), others, outputs, coefficients)
        worst = max(worst, moved)
    own = strategy.norm(coefficients) * math.sqrt(num_entries)
    rounding = math.sqrt(2 * num_entries)
    assert own < worst < own + rounding  # control: without what is added for rounding it leaks
    _, _, spacings = drawn_noise(coefficients, 1, num_entries, sigma=2.0)
    in_multiples = strategy.norm(coefficients) / spacings[0] * ROUNDING + rounding
    assert (1 - 1e-9) * 2.0 / strategy.norm(coefficients) * in_multiples <= gaussian.NOISE_STD


def test_more_parameters_than_the_rounding_allows_are_refused():
    state = noise.CorrelatedNoiseState(KEY, jnp.zeros((), int), jnp.zeros((1, 10), jnp.int32))
    with pytest.raises(ValueError, match="too many"):
        advance_noise(state, 3e5, 1.0, strategy.square_root(2))


# Its dp_event.


@pytest.mark.parametrize(("bands", "num_steps"), [(4, 20), (4, 17), (3, 2)])
def test_without_sampling_epsilon_is_that_of_the_whole_matrix(bands, num_steps):
    # All of a part in every one of its steps: a Gaussian of the norm of those columns of C.
    mechanism = mechanisms.make("banded", 100, 100 // bands, {"bands": bands})
    steps = accounting.poisson_steps(mechanism.event(1.0, num_steps))
    assert steps.sampling_prob == pytest.approx(1.0, abs=0.02)
    mechanism = mechanisms.make("banded", 12, 12 // bands, {"bands": bands})
    columns = [
        np.concatenate([np.zeros(i), mechanism.strategy, np.zeros(num_steps)])[:num_steps]
        for i in range(num_steps)
    ]
    longest = max(np.linalg.norm(sum(columns[i::bands])) for i in range(bands))
    theirs = toeplitz.minsep_sensitivity_squared(jnp.array(mechanism.strategy), bands, n=num_steps)
    assert longest == pytest.approx(math.sqrt(theirs), rel=1e-6)
    ours = mechanism.epsilon(
        noise_multiplier=8.0, num_steps=num_steps, delta=1e-5, accountant="pld"
    )
    whole = tradeoff.epsilon_of_mu(longest / 8.0, 1e-5)
    assert whole * (1 - 1e-6) <= ours <= whole * (1.0 if num_steps % bands == 0 else 1.2) + 1e-3
    alone = accounting.epsilon(
        noise_multiplier=8.0, sampling_prob=1.0, num_steps=-(-num_steps // bands), delta=1e-5
    )
    assert alone < 0.95 * whole  # control: the norm of the strategy left out


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_plan_of_correlated_noise_keeps_to_its_budget(accountant):
    plan = bam.make_plan(
        num_examples=1000, expected_batch_size=50, num_steps=33, epsilon=2.0, delta=1e-5,
        accountant=accountant, mechanism={"name": "banded", "bands": 4},
    )  # fmt: skip
    assert 1.99 < plan.epsilon <= 2.0
    assert plan.dp_event.num_steps == 9
    assert plan.dp_event.sampling_prob == 4 * 50 / 1000
    spent = [plan.epsilon_after(steps) for steps in (0, 1, 4, 5, 32, 33)]
    assert spent[0] == 0 < spent[1] == spent[2] < spent[3] < spent[4] < spent[5] == plan.epsilon
    assert bam.PrivacyPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bands": 0}, "mechanism.bands from 2"),
        ({"bands": 1}, "mechanism.bands from 2"),
        ({"bands": 257}, "mechanism.bands from 2"),
        ({"bands": 21}, "at most 47"),
        ({"bunds": 3}, "banded does not take .'bunds': 3.: got an unexpected"),
    ],
)
def test_bands_that_cannot_be_are_one_line(options, message):
    with pytest.raises(ValueError, match=message) as error:
        mechanisms.make("banded", 1000, 50, options)
    assert "\n" not in str(error.value)


def test_only_the_banded_mechanism_takes_bands():
    with pytest.raises(ValueError, match=r"poisson does not take \{'bands': 3"):
        mechanisms.make("poisson", 1000, 50, {"bands": 3})
    with pytest.raises(ValueError, match="mechanism_options must be a dict"):
        bam.PrivacyPlan.from_json(
            dict.fromkeys(plans.RECORDED) | {"mechanism": "banded", "mechanism_options": [3]}
        )


# Batches.


def test_no_example_is_twice_within_the_bands_and_each_has_probability_q():
    mechanism = mechanisms.make("banded", 600, 60, {"bands": 5})
    members = np.zeros((200, 600), bool)
    for step in range(1, 201):
        members[step - 1, mechanism.draw(11, step)] = True
    assert checks.are_separated(members, 5)
    assert not checks.are_separated(members, 6)  # control: five steps later it may be there again
    sizes = members.sum(axis=1)
    assert abs(sizes.mean() - 60) < 2
    assert sizes.max() <= mechanism.capacity(1e-9)
    parts = [np.flatnonzero(members[i::5].any(axis=0)) for i in range(5)]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(600))
    assert len({len(part) for part in parts}) > 1  # drawn one by one, not dealt out
    poisson = mechanisms.make("poisson", 600, 60)
    for step in range(1, 201):
        members[step - 1] = False
        members[step - 1, poisson.draw(11, step)] = True
    assert not checks.are_separated(members, 5)


def members_of(draw, num_steps=120, num_examples=300):
    members = np.zeros((num_steps, num_examples), bool)
    for step in range(1, num_steps + 1):
        members[step - 1, draw(step)] = True
    return members


def test_the_audit_sees_how_often_and_from_which_parts_banded_draws():
    plan = bam.make_plan(
        num_examples=300, expected_batch_size=60, num_steps=120, epsilon=2.0, delta=1e-5,
        accountant="rdp", mechanism={"name": "banded", "bands": 4},
    )  # fmt: skip
    right = [members_of(lambda step, seed=seed: plan.mechanism.draw(seed, step)) for seed in (1, 2)]
    assert checks.failures(checks.batches_p_values(right, plan), 1e-4) == []
    rng = np.random.default_rng(0)
    dealt = rng.permutation(300).reshape(4, 75)  # all parts of one size
    wrong = {
        "batch mean": lambda step: np.arange(step % 4, 300, 4),  # all of a part, each time
        "parts": lambda step: dealt[step % 4][rng.random(75) < 0.8],
        "separation": lambda step: np.flatnonzero(rng.random(300) < 0.2),
    }
    for check, draw in wrong.items():
        assert check in checks.failures(checks.batches_p_values([members_of(draw)], plan)), check


# In training.


def test_the_trainers_step_is_privatize_to_the_bit():
    coefficients = strategy.square_root(3)
    grads = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float32)
    tx = bam.privatize(CLIP, 1.5, 4.0, bam.seeded_key(34), coefficients)
    state = tx.init(grads[0])
    own = init_noise(KEY, CLIP, grads[0], coefficients)
    update = jax.jit(tx.update)
    for _ in range(5):
        ours, state = update(grads, state, grads[0], mask=None)
        made, own = advance_noise(own, 1.5, 1.0, coefficients)
        total, _ = bam.clipped_sum(lambda p, g: g, CLIP, grads[0], grads, mask=None, noise=made)
        assert_same_bits(ours, total / 4)
    independent = bam.privatize(CLIP, 1.5, 4.0, bam.seeded_key(34))
    plain, _ = independent.update(grads, independent.init(grads[0]), mask=None)
    assert not np.array_equal(plain, ours)
    with pytest.raises(ValueError, match="grows"):
        bam.privatize(CLIP, 1.5, 4.0, bam.seeded_key(34), NO_FIT)


def test_a_clip_that_adds_to_the_sum_has_correlated_noise_on_all_of_it():
    plan = bam.make_plan(
        num_examples=1000, expected_batch_size=50, num_steps=8, epsilon=2.0, delta=1e-5,
        mechanism={"name": "banded", "bands": 4},
    )  # fmt: skip
    clip = adaptive_clipping.clip(plan, 1.0)
    state = init_noise(KEY, clip, {"w": jnp.zeros(5)}, plan.mechanism.strategy)
    assert state.past.shape[0] == 3
    assert state.past.shape[1] > 5
    tx = optax.chain(
        bam.privatize(clip, 2.0, 50.0, bam.seeded_key(34), plan.mechanism.strategy), optax.sgd(1.0)
    )
    params = {"w": jnp.zeros(5)}
    updates, _ = tx.update({"w": jnp.ones((3, 5))}, tx.init(params), params, mask=None)
    assert updates["w"].shape == (5,)


def test_a_run_without_a_seed_saves_no_noise_and_pays_for_beginning_anew(tmp_path):
    built = loop.build(small(spare_steps=2))
    with pytest.raises(loop.StoppedError):
        loop.train(built, None, tmp_path, should_stop=after(5))
    assert header_of(tmp_path)["steps_begun"] == 4
    past = {name: x for name, x in checkpoint.read(newest(tmp_path))[1] if "past" in name}
    assert past and not any(x.any() for x in past.values())
    resumed = loop.train(built, None, tmp_path)
    # Step 4 began the second block of three: two more steps count, for which two were spare.
    assert resumed.summary["steps_begun"] == 10
    assert resumed.summary["steps_taken"] == 8
    assert np.any(np.asarray(resumed.state.private.privatize.noise.past))
    assert "last 2 steps' noise times 0.5, 0.375" in resumed.summary["noise"]
    assert resumed.summary["mechanism_options"] == {"bands": 3}
    assert built.plan.epsilon_after(10) == built.plan.epsilon


def test_the_steps_that_a_period_lacks_are_begun(tmp_path):
    plan = bam.make_plan(
        num_examples=100, expected_batch_size=10, num_steps=8, epsilon=9.0, delta=1e-5,
        accountant="rdp",
    )  # fmt: skip
    path = tmp_path / "steps_begun"
    ledger.create(path)
    with contextlib.closing(ledger.Ledger(path, plan, 0, 0)) as counted:
        counted.end_period(5)  # nothing is begun yet
        counted.begin()
        counted.end_period(5)
        assert counted.begun == path.stat().st_size == 5
        counted.end_period(5)
        assert counted.begun == 5


def test_noise_without_room_for_the_parameters_is_refused_before_any_step():
    plan = loop.build(small(bands=8)).plan
    plan = dataclasses.replace(plan, noise_multiplier=1e5)  # of a tiny ε
    with pytest.raises(ValueError, match="too many for noise"):
        loop.build(small(bands=8), plan=plan)


# Audits.


@pytest.fixture(scope="module")
def audited():
    config = base.get_config("dp_sgd")
    config.model = {"name": "linear", "width": 1}
    config.update({"num_steps": 24, "expected_batch_size": 20, "microbatch_size": 20})
    config.mechanism.update({"name": "banded", "bands": 4})
    return loop.build(config, canary.canary_dataset(100))


@pytest.mark.thorough
def test_real_runs_have_the_noise_and_the_batches_of_the_plan(audited):
    p_values = whole_run.audit(audited)
    assert checks.failures(p_values) == []
    assert "separation" in p_values


def test_noise_that_is_not_correlated_as_planned_is_caught(audited, monkeypatch):
    right = noise.advance_noise
    monkeypatch.setattr(
        "bam.core.private_mean.advance_noise",
        lambda state, sigma, s, c: right(state, sigma, s, (1.0,) + (0.0,) * (len(c) - 1)),
    )
    wrong = loop.build(audited.config, audited.dataset)
    assert checks.failures(whole_run.p_values(wrong, [whole_run.record(wrong, 0)]))


def test_batches_of_poissons_are_caught_beside_correlated_noise(audited, monkeypatch):
    monkeypatch.setattr(
        "bam.core.sampling.cyclic_sample",
        lambda seed, step, n, q, parts: bam.core.sampling.poisson_sample(seed, step, n, q / parts),
    )
    wrong = loop.build(audited.config, audited.dataset)
    found = whole_run.p_values(wrong, [whole_run.record(wrong, 0)])
    assert "separation" in checks.failures(found)


@pytest.fixture(scope="module")
def of_parts_as_a_whole():
    """Two parts in turn, each drawn whole: no amplification, so that an audit is nearly tight."""
    config = base.get_config("dp_sgd")
    config.model = {"name": "linear", "width": 1}
    config.update({"num_steps": 4, "expected_batch_size": 10, "microbatch_size": 10})
    config.update({"epsilon": 12.0, "accountant": "rdp"})
    config.mechanism.update({"name": "banded", "bands": 2})
    return config


def epsilon_lower(config, num_trials):
    event = loop.build(config, canary.canary_dataset(20)).plan.dp_event
    assert (event.sampling_prob, event.num_steps) == (1.0, 2)
    found = canary.lower_bound(
        *canary.scores(config, 20, num_trials), sampling_prob=1.0, num_steps=2, delta=config.delta
    )
    return found.epsilon_lower


@pytest.mark.usefixtures("without_the_tests_type_checks")
def test_a_canary_beside_correlated_noise_shows_no_more_than_claimed(of_parts_as_a_whole):
    found = epsilon_lower(of_parts_as_a_whole, 150)
    assert 0.35 * of_parts_as_a_whole.epsilon < found <= of_parts_as_a_whole.epsilon


@pytest.mark.usefixtures("without_the_tests_type_checks")
def test_a_canary_that_is_twice_within_the_bands_shows_more(of_parts_as_a_whole, monkeypatch):
    monkeypatch.setattr(
        "bam.core.sampling.cyclic_sample", lambda seed, step, n, q, parts: np.arange(n)
    )
    assert epsilon_lower(of_parts_as_a_whole, 60) > of_parts_as_a_whole.epsilon
