"""The audit passes the code that trains, and catches bugs that are planted in it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from bam.audit import canary, checks, whole_run
from bam.audit.audited import with_step
from bam.core import private_mean, pytree, sampling
from bam.core.clipping import Bound, BoundedTransformation, clip_by_l2_norm
from bam.core.noise import with_new_key
from bam.privacy import tradeoff
from bam.privacy.private_gradient import batch_of
from bam.privacy.run import PrivateRun
from bam.training import examples, loop, trainer
from bam.training import step as steps
from tests import runs
from tests.audits import canary_config
from tests.cases import assert_same_bits

# The same few functions, called many thousand times: other tests check the types of these calls.
pytestmark = pytest.mark.usefixtures("without_the_tests_type_checks")

WHOLE = {"num_examples": 8, "expected_batch_size": 8, "num_steps": 4}  # q = 1
SAMPLED = {"num_examples": 40, "expected_batch_size": 10, "num_steps": 1}  # q = 1/4
NUM_STEPS, CUT = 120, 60  # of a whole run


def epsilon_lower(setting, num_trials, method="dp_sgd", **augment):
    num_examples, batch_size, num_steps = setting.values()
    config = canary_config(method, batch_size, num_steps, **augment)
    found = canary.scores(config, num_examples, num_trials)
    return canary.lower_bound(
        *found, sampling_prob=batch_size / num_examples, num_steps=num_steps, delta=1e-5
    ).epsilon_lower


def build(num_steps=NUM_STEPS, clip="l2"):
    """A linear model of two leaves, 10 and 360 numbers, on 80 examples."""
    config = canary_config("dp_sgd", 20, num_steps)
    config.clip.name = clip
    return loop.build(config, canary.canary_dataset(80, num_classes=10, num_features=36))


@functools.cache  # compiled once for all that is planted around its step
def right():
    return build()


@functools.cache
def recorded():
    return whole_run.record(right(), 0)


# The code as it is.


@pytest.mark.parametrize("method", ["dp_sgd", "bam_sam"])
def test_no_method_gives_away_more_than_it_claims_and_the_audit_sees_much_of_it(method):
    assert 1.0 < epsilon_lower(WHOLE, 250, method) <= 4.0


def test_with_sampling_the_bound_is_below_the_claim_too():
    assert epsilon_lower(SAMPLED, 200, "bam_sam") <= 4.0


@pytest.mark.thorough
def test_whole_runs_cut_and_resumed_with_and_without_a_seed_are_what_the_plan_says():
    assert checks.failures(whole_run.audit(right())) == []


def test_with_a_seed_the_whole_run_alone_is_what_the_plan_says_at_a_stricter_level():
    assert checks.failures(whole_run.p_values(right(), [recorded()]), 1e-3) == []


def test_a_run_cut_and_resumed_is_recorded_as_the_run_that_was_not():
    whole, resumed = whole_run.record(right(), 3), whole_run.record(right(), 3, CUT)
    np.testing.assert_array_equal(whole.members, resumed.members)
    np.testing.assert_array_equal(whole.noise, resumed.noise)
    found = checks.failures(whole_run.p_values(right(), [whole, resumed]))
    assert {"steps", "batch pairs"} <= set(found)  # one seed twice is no two runs


def clip_with_another_bound(plan, clip_norm):
    return clip_by_l2_norm(2 * clip_norm)


def test_noise_and_scores_are_measured_against_the_sensitivity_not_the_clip_norm():
    clip = f"{__name__}:clip_with_another_bound"
    built = build(num_steps=20, clip=clip)
    assert built.sensitivity == 2 * built.clip_norm
    found = whole_run.p_values(built, [whole_run.record(built, 1)])
    assert checks.failures(found, 1e-3) == []
    config = canary_config()
    config.clip.name, config.epsilon = clip, 200.0  # hardly any noise
    present, absent = canary.scores(config, 8, 16)
    assert 0.9 < np.mean(present) - np.mean(absent) < 1.1  # C² in the place of S² makes it 4


def hiding_its_noise(plan, clip_norm):
    clip = clip_by_l2_norm(clip_norm)
    return BoundedTransformation(*clip, clip.sensitivity, lambda mean, state: (mean, state))


def test_only_a_private_run_whose_noise_can_be_read_is_recorded():
    non_private = loop.build(canary_config("non_private"), canary.canary_dataset(8))
    with pytest.raises(ValueError, match="only a private run"):
        whole_run.record(non_private, 0)
    with pytest.raises(ValueError, match="finish"):
        whole_run.record(build(clip=f"{__name__}:hiding_its_noise"), 0)


def test_an_audited_run_is_the_same_but_for_its_step_and_compiles_nothing_ahead():
    built, batches = build(num_steps=3), []

    def step(state, batch):
        batches.append(batch)
        return state

    audited = with_step(built, step)
    names = [field.name for field in dataclasses.fields(trainer.Trainer)]
    assert all(getattr(audited, name) is getattr(built, name) for name in names)
    state = loop.train(audited, 0).state
    assert_same_bits(state.params, audited.init(0).params)  # no other step was taken
    assert len(batches) == 3 and steps.take not in audited.programs.fitting
    loop.train(built, 0)  # the control
    assert steps.take in built.programs.fitting


# Planted around the step, in real runs.


def caught(built, *seeds, cut=0):
    """The names of the checks that runs fail by far."""
    recorded = [whole_run.record(built, seed, cut) for seed in seeds or (0,)]
    return checks.failures(whole_run.p_values(built, recorded), level=1e-9)


def given(change):
    """An experiment whose step is given `change(noise, mask)`, past the check of its batch."""

    def step(state, batch):
        num_taken, tag = int(state.step), np.asarray(state.private.tag)
        noise, mask = change(state.private.privatize.noise, batch.mask)
        batch = batch_of(batch.examples, mask, int(noise.step) + 1, tag)
        state = right().step(runs.with_noise(state, noise), batch)
        return runs.after(state, num_taken + 1)

    return with_step(right(), step)


def replaced(noise, bias):
    return np.concatenate([bias, noise[10:]])


# Each is made of the noise of all steps so far, `[370]`, first the 10 numbers of the bias, in units
# of the planned deviation; it is put in the place of what a real run was seen to add.
CHANGED_NOISE = {  # fault: (what becomes of the noise, name of the check)
    "skipped on resume": (
        lambda seen: seen[-1] * (len(seen) != CUT + 1),
        "scale of a step",
    ),
    "repeated on resume": (
        lambda seen: seen[-1 - (len(seen) == CUT + 1)],
        "steps",
    ),
    "of the bias used in two steps": (
        lambda seen: replaced(seen[-1], seen[-1 - (len(seen) % 2 == 0)][:10]),
        "steps",
    ),
    "of the bias copied from the kernel": (
        lambda seen: replaced(seen[-1], seen[-1][10:20]),
        "entries",
    ),
    "of the bias copied from a column of the kernel": (
        lambda seen: replaced(seen[-1], seen[-1][13::36]),
        "entries",
    ),
    "of the bias copied from the kernel, three steps later": (
        lambda seen: replaced(seen[-1], seen[max(0, len(seen) - 4)][110:120]),
        "entries",
    ),
    "of the bias missing": (
        lambda seen: replaced(seen[-1], np.zeros(10)),
        "scale of a leaf",
    ),
    "uniform": (
        lambda seen: 3**0.5 * (2 * stats.norm.cdf(seen[-1]) - 1),
        "shape",
    ),
    "cut off at 2.2 deviations": (
        lambda seen: 1.025 * np.clip(seen[-1], -2.2, 2.2),
        "tails",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", CHANGED_NOISE)
def test_noise_that_is_wrong_is_caught_by_name(fault):
    change, name = CHANGED_NOISE[fault]
    seen = list(recorded().noise)
    noise = np.array([change(seen[:step]) for step in range(1, NUM_STEPS + 1)])
    wrong = whole_run.p_values(right(), [recorded()._replace(noise=noise)])
    assert name in checks.failures(wrong, level=1e-9)


def test_a_noise_key_used_again_after_fifty_steps_is_caught():
    def change(noise, mask):
        return noise._replace(step=noise.step % 50), mask

    assert "steps" in caught(given(change))


def test_noise_that_begins_anew_on_resume_is_caught():
    def change(noise, mask):
        return noise._replace(step=noise.step - CUT * (noise.step >= CUT)), mask

    assert caught(given(change), cut=CUT) == ["steps"]


def test_resuming_with_the_saved_key_of_a_run_without_a_seed_is_caught():
    def change(noise, mask):
        if noise.step >= CUT:
            noise = with_new_key(noise, jnp.full(8, 7, jnp.uint32))
        return noise, mask

    assert caught(given(change), None, None, cut=CUT) == ["steps"]


def test_padding_rows_that_take_part_are_caught_in_a_whole_run():
    def change(noise, mask):
        return noise, np.ones_like(mask)

    assert "mean of an entry" in caught(given(change))


def test_sampling_that_begins_anew_on_resume_is_caught(monkeypatch, first=17):
    right_one = sampling.poisson_sample

    def restarted(seed, step, *arguments):
        return right_one(seed, step if step <= CUT else step - CUT + first, *arguments)

    monkeypatch.setattr(sampling, "poisson_sample", restarted)
    assert caught(right(), cut=CUT) == ["batch pairs"]


def test_two_runs_without_a_seed_that_draw_the_same_batches_are_caught(monkeypatch):
    monkeypatch.setattr(PrivateRun, "batch", lambda run, step: run.plan.batch(7, step))
    assert caught(right(), None, None) == ["batch pairs"]


def plant_sampling(monkeypatch, change):
    rng = np.random.default_rng(0)
    monkeypatch.setattr(
        sampling, "poisson_sample", lambda seed, step, n, q: np.sort(change(rng, step, n, q))
    )


def test_batches_of_a_fixed_size_are_caught(monkeypatch):
    plant_sampling(monkeypatch, lambda rng, step, n, q: rng.choice(n, int(n * q), replace=False))
    assert caught(right()) == ["batch sizes"]


def test_shuffling_is_caught(monkeypatch):
    def shuffled(rng, step, n, q):
        epoch, part = divmod(step - 1, round(1 / q))
        order = np.random.default_rng(epoch).permutation(n)
        return order[part * int(n * q) :][: int(n * q)]

    plant_sampling(monkeypatch, shuffled)
    assert caught(right()) == ["batch sizes", "participation spread"]


def test_a_sampling_probability_that_is_not_the_plans_is_caught(monkeypatch):
    plant_sampling(monkeypatch, lambda rng, step, n, q: np.flatnonzero(rng.random(n) < 1.25 * q))
    assert "batch mean" in caught(right())


def test_examples_that_are_drawn_together_are_caught(monkeypatch):
    def in_pairs(rng, step, n, q):
        return np.flatnonzero(np.repeat(rng.random(n // 2) < q, 2))

    plant_sampling(monkeypatch, in_pairs)
    assert "example pairs" in caught(right())


# Planted in the step's own parts.


def plant_noise(monkeypatch, change):
    """Makes the experiment's noise go wrong."""
    right = private_mean.advance_noise
    planted = lambda state, sigma, s, strategy: change(right, state, sigma, s)  # noqa: E731
    monkeypatch.setattr(private_mean, "advance_noise", planted)


def test_noise_too_small_by_the_root_of_two_is_caught(monkeypatch):
    plant_noise(monkeypatch, lambda right, state, sigma, s: right(state, sigma / 2**0.5, s))
    assert "scale" in caught(build(num_steps=20))


def test_noise_scaled_to_the_mean_is_caught(monkeypatch):
    plant_noise(monkeypatch, lambda right, state, sigma, s: right(state, sigma, s / 8))
    assert epsilon_lower(WHOLE, 60) > 4.0
    assert "scale" in caught(build(num_steps=2))


def test_a_noise_key_used_twice_is_caught(monkeypatch):
    def first(right, state, sigma, s):
        return right(state._replace(step=0), sigma, s)[0], right(state, sigma, s)[1]

    plant_noise(monkeypatch, first)
    assert "steps" in caught(build(num_steps=20))


@pytest.mark.slow
def test_views_clipped_one_by_one_and_then_added_are_caught(monkeypatch):
    right = private_mean.per_example_sum

    def per_view(grad_fn, params, batch, *, bound, **options):
        def sum_of_clipped(params, index):  # the views of the canary are all alike
            clipped, _ = bound.bounded_grad(params, grad_fn(params, index))
            return jax.tree.map(lambda g: 4 * g, clipped)

        # The engine drops what is longer than declared, so the fault needs a false declaration.
        as_it_is = Bound(lambda params, g: (g, pytree.l2_norm(g)), declared, False)
        return right(sum_of_clipped, params, batch, bound=as_it_is, **options)

    assert epsilon_lower(WHOLE, 60, views=4) <= 4.0
    declared = 4.0
    monkeypatch.setattr(private_mean, "per_example_sum", per_view)
    assert epsilon_lower(WHOLE, 60, views=4) > 4.0
    declared = 1.0  # as the plan has it: nothing is left of the canary
    monkeypatch.setattr(private_mean, "per_example_sum", per_view)
    assert epsilon_lower(WHOLE, 60, views=4) < 1.0


def test_padding_rows_that_leak_are_caught(monkeypatch):
    right, take_row = private_mean.per_example_sum, examples.take_row

    def leaky(*given, mask, **options):
        return right(*given, mask=jnp.ones_like(mask), **options)

    def leaked(row, data):
        number = jnp.where(row["row"] == sampling.PADDING, canary.CANARY, row["row"])
        return take_row(row | {"row": number}, data)

    monkeypatch.setattr(private_mean, "per_example_sum", leaky)
    monkeypatch.setattr(examples, "take_row", leaked)
    assert epsilon_lower(SAMPLED, 60) > 4.0


# The estimator.


def test_the_bound_holds_as_often_as_it_says_and_gets_close(mu=1.5):
    """Scores of a Gaussian mechanism whose ε is known."""
    rng = np.random.default_rng(0)
    truth = tradeoff.epsilon_of_mu(mu, 1e-5)
    found = [
        canary.lower_bound(
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
    found = canary.lower_bound(same, same, sampling_prob=0.5, num_steps=1, delta=1e-5)
    assert found.epsilon_lower == found.epsilon_lower_any == 0.0
    with pytest.raises(ValueError, match="at least 50 scores"):
        canary.lower_bound(same[:40], same, sampling_prob=1.0, num_steps=1, delta=1e-5)
    with pytest.raises(ValueError, match="confidence"):
        canary.lower_bound(same, same, sampling_prob=1.0, num_steps=1, delta=1e-5, confidence=2)


NOT_NUMBERS = {  # scores with and without the canary -> whether they may be evidence
    "all NaN": (np.full(200, np.nan), np.full(200, np.nan), False),
    "NaN with it alone": (np.full(200, np.nan), np.zeros(200), False),
    "NaN without it alone": (np.ones(200), np.full(200, np.nan), False),
    "all infinite": (np.full(200, np.inf), np.full(200, np.inf), False),
    "infinite apart": (np.full(200, np.inf), np.full(200, -np.inf), True),
    "some NaN": (np.r_[np.full(20, np.nan), np.ones(180)], np.zeros(200), True),
    "none": (np.ones(200), np.zeros(200), True),
}


@pytest.mark.parametrize("name", NOT_NUMBERS)
def test_a_score_that_is_not_a_number_is_never_evidence(name):
    present, absent, is_evidence = NOT_NUMBERS[name]
    rng = np.random.default_rng(0)
    present, absent = rng.permutation(present), rng.permutation(absent)
    seen = canary.lower_bound(present, absent, sampling_prob=1.0, num_steps=1, delta=1e-5)
    assert (seen.epsilon_lower > 1) == (seen.epsilon_lower_any > 0) == is_evidence
    if name == "some NaN":  # each counts as missed
        assert seen.false_negative_rate > 0.1 > seen.false_positive_rate


@pytest.mark.parametrize("where", ["everywhere", "in an entry", "in a step"])
def test_noise_that_is_not_a_number_passes_no_check(where):
    z = np.random.default_rng(0).normal(size=(40, 60))
    names = set(checks.failures(checks.noise_p_values([z], [20, 40])))
    assert not names  # the control
    z[{"everywhere": ..., "in an entry": (slice(None), 7), "in a step": 3}[where]] = np.nan
    names = set(checks.failures(checks.noise_p_values([z], [20, 40])))
    assert {"scale", "scale of a leaf", "scale of a step", "mean", "mean of an entry"} <= names
