"""The best of a random number of trials: what it costs, and what the accounting would notice."""

import dataclasses
import json
import math
from fractions import Fraction
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy import optimize, special, stats

import bam
from bam.core.seeds import seeded_key
from bam.data import datasets
from bam.privacy import accounting, selection
from bam.privacy.plan import make_plan
from bam.privacy.selection import Selection
from bam.training import score

GEOMETRIC = Selection(8.0, 1.0, 10.0)
BOTH = ("pld", "rdp")
RUN = {"noise_multiplier": 3.5, "sampling_prob": 0.2, "num_steps": 20, "delta": 1e-5}
DISTRIBUTIONS = [
    *[(8.0, 1.0), (8.0, 0.0), (3.5, 0.5), (20.0, 2.0), (500.0, 20.0), (500.0, 0.0)],
    *[(3.0, -0.5), (8.0, -0.5), (5.0, -0.8)],
]


def probabilities(mean, shape, most=300_000):
    """P[K = 1], P[K = 2], … of Definition 1, with γ as ours."""
    gamma = Selection(mean, shape, 10.0).gamma
    k = np.arange(1, most + 1)
    if shape == 0:
        return (1 - gamma) ** k / (k * math.log(1 / gamma))
    if shape < 0:  # SciPy has none
        log = special.gammaln(k + shape) - special.gammaln(k + 1) + k * math.log1p(-gamma)
        return np.exp(log - special.gammaln(1 + shape)) * -shape / (1 - gamma**-shape)
    # All but the truncation is SciPy's: failures before η successes of probability γ.
    return stats.nbinom.pmf(k, shape, gamma) / (1 - gamma**shape)


# The number of trials.


@pytest.mark.parametrize(("mean", "shape"), DISTRIBUTIONS)
def test_the_number_of_trials_has_the_mean_that_is_accounted(mean, shape):
    p = probabilities(mean, shape)
    assert p.sum() == pytest.approx(1, abs=1e-6)
    assert (p * np.arange(1, len(p) + 1)).sum() == pytest.approx(mean, rel=1e-4)
    if shape == 1:
        assert Selection(mean, shape, 10.0).gamma == pytest.approx(1 / mean, rel=1e-12)


@pytest.mark.parametrize(("mean", "shape"), DISTRIBUTIONS)
def test_the_number_of_trials_is_drawn_by_its_distribution_function(mean, shape):
    below = np.concatenate([[0], np.cumsum(probabilities(mean, shape))])
    chosen = Selection(mean, shape, 10.0)
    for k in (1, 2, 3, 10, 400):
        if below[k] < 1 - 1e-9 and below[k] - below[k - 1] > 1e-9:
            middle = (below[k - 1] + below[k]) / 2
            assert chosen.num_trials(middle) == k
            assert chosen.num_trials(below[k] + 1e-12) == k + 1
    assert chosen.num_trials(0.0) == 1  # never none
    assert Selection(1.01, shape, 10.0).num_trials(0.9) == 1
    if shape == 1:  # finer than doubles, whose rounding would add up
        edge = Fraction((1 - chosen.gamma) / math.expm1(-math.log(chosen.gamma)))
        assert [chosen.num_trials(edge + Fraction(x, 2**100)) for x in (-1, 0)] == [1, 2]
    assert chosen.num_trials(Fraction(2**128 - 1, 2**128)) >= chosen.num_trials(1 - 2**-53)
    assert chosen.num_trials(1 - 2**-53) > 1  # and it ends: a double that underflows stays the same


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((1.0, 1.0, 10.0), "trials_mean must be from 1.01"),
        ((math.nan, 1.0, 10.0), "trials_mean"),
        ((8.0, -1.0, 10.0), "trials_shape must be above -1"),
        ((8.0, math.nan, 10.0), "trials_shape must be above -1"),
        ((8.0, -0.95, 10.0), "may draw millions of trials: take a smaller mean or a larger"),
        ((8.0, math.inf, 10.0), "trials_shape"),  # Poisson: perhaps no trial
        ((8.0, 1.0, 0.0), "score_noise_multiplier"),
        ((8.0, 1.0, 2.0**21), "score_noise_multiplier"),
    ],
)
def test_a_selection_out_of_range_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        Selection(*fields)


# What it costs.


def by_hand(rdp_of, chosen, orders, delta):
    """Theorem 2 of Papernot & Steinke with the conversion of Canonne et al., written down again."""
    mean, shape, gamma = chosen.trials_mean, chosen.trials_shape, chosen.gamma
    least = min((1 - 1 / a) * rdp_of(a) + math.log(1 / gamma) / a for a in orders)
    total = {a: rdp_of(a) + (1 + shape) * least + math.log(mean) / (a - 1) for a in orders}
    return min(
        total[a] + math.log(1 - 1 / a) - (math.log(delta) + math.log(a)) / (a - 1) for a in orders
    )


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 3.0])
def test_without_sampling_the_total_is_the_theorem_s_by_hand(shape):
    chosen, sigma, steps = Selection(8.0, shape, 10.0), 20.0, 25
    # Of Gaussians alone: λ/2 · (T/σ² + 1/τ²).
    rdp_of = lambda order: order / 2 * (steps / sigma**2 + 1 / 10.0**2)  # noqa: E731
    orders = [order for order in RdpAccountant().orders if order > 1.01]
    mechanism = {"noise_multiplier": sigma, "sampling_prob": 1.0, "num_steps": steps}
    found = selection.epsilon(chosen, **mechanism, delta=1e-5, accountant="rdp")
    assert found == pytest.approx(by_hand(rdp_of, chosen, orders, 1e-5), rel=1e-6)


def test_the_total_is_that_of_dp_accounting_s_own_event():
    step = dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(3.5))
    run = dp_accounting.SelfComposedDpEvent(step, 20)
    trial = dp_accounting.ComposedDpEvent([run, dp_accounting.GaussianDpEvent(10.0)])
    expected = RdpAccountant().compose(RepeatAndSelectDpEvent(trial, 8.0, 1.0)).get_epsilon(1e-5)
    assert selection.epsilon(GEOMETRIC, **RUN, accountant="rdp") == pytest.approx(
        expected, rel=1e-9
    )


@pytest.mark.parametrize("accountant", BOTH)
def test_choosing_costs_more_than_a_trial_and_less_than_releasing_them_all(accountant):
    by = {**RUN, "accountant": accountant}
    total = selection.epsilon(GEOMETRIC, **by)
    one = selection.composed_epsilon(1, 10.0, **by)
    training = bam.epsilon(**by)
    everything = selection.composed_epsilon(8, 10.0, **by)
    assert training < one < total < everything
    assert total > 1.2 * training  # what a claim without it leaves out
    by_rdp = selection.composed_epsilon(8, 10.0, **RUN, accountant="rdp")
    assert selection.composed_epsilon(8, 10.0, **RUN, accountant="pld") < by_rdp
    with pytest.raises(ValueError, match="unknown accountant"):
        selection.composed_epsilon(8, 10.0, **RUN, accountant="gdp")


@pytest.mark.parametrize("accountant", BOTH)
def test_more_trials_more_steps_and_less_noise_cost_more(accountant):
    def total(mean=8.0, shape=1.0, score_noise=10.0, **changes):
        run = RUN | {"accountant": accountant} | changes
        return selection.epsilon(Selection(mean, shape, score_noise), **run)

    assert total(mean=4.0) < total() < total(mean=16.0)
    assert total(shape=0.0) < total() < total(shape=2.0)
    assert total(score_noise=20.0) < total() < total(score_noise=5.0)
    assert total(noise_multiplier=4.0) < total() < total(noise_multiplier=3.0)
    assert total(num_steps=10) < total() < total(num_steps=40)
    assert total(noise_multiplier=0.0) == math.inf
    with pytest.raises(ValueError, match="delta"):
        total(delta=1.0)


@pytest.mark.parametrize("accountant", BOTH)
def test_the_noise_never_overshoots_and_is_nearly_the_least(accountant):
    steps = {"sampling_prob": 0.2, "num_steps": 20, "delta": 1e-5, "accountant": accountant}
    sigma = selection.noise_multiplier(GEOMETRIC, target_epsilon=3.0, **steps)
    total = lambda s: selection.epsilon(GEOMETRIC, noise_multiplier=s, **steps)  # noqa: E731
    assert total(sigma) <= 3.0 < total(sigma * (1 - 1e-4))
    alone = bam.noise_multiplier(target_epsilon=3.0, **steps)
    assert sigma > 1.2 * alone
    assert total(alone) > 3.0  # the control: noise for one run does not pay for the choice
    with pytest.raises(ValueError, match="the choice alone costs epsilon"):
        selection.noise_multiplier(Selection(8.0, 1.0, 0.5), target_epsilon=1.0, **steps)


@pytest.mark.parametrize("accountant", BOTH)
def test_a_plan_counts_the_choice_by_its_accountant(accountant):
    facts = {"num_examples": 100, "expected_batch_size": 20, "num_steps": 20, "delta": 1e-5}
    trials = dataclasses.asdict(GEOMETRIC)
    facts |= {"epsilon": 3.0, "mechanism": {"name": "best_of_trials", **trials}}
    plan = make_plan(**facts, accountant=accountant)
    mechanism = {"noise_multiplier": plan.noise_multiplier, "sampling_prob": 0.2}
    mechanism["accountant"] = accountant
    mechanism["delta"] = 1e-5 - plan.overflow
    assert plan.epsilon == selection.epsilon(GEOMETRIC, num_steps=20, **mechanism) <= 3
    assert plan.epsilon_after(5) == selection.epsilon(GEOMETRIC, num_steps=5, **mechanism)
    assert plan.epsilon_after(0) < plan.epsilon_after(5) < plan.epsilon
    assert plan.to_json()["mechanism_options"] == trials == {
        "trials_mean": 8.0, "trials_shape": 1.0, "score_noise_multiplier": 10.0,
    }  # fmt: skip
    assert (plan.mu, plan.dp_event) == (None, None)  # those of one trial would say too little
    one = make_plan(**(facts | {"mechanism": "poisson"}), accountant=accountant)
    assert plan.capacity == one.mechanism.capacity(one.overflow / (20 * 8)) > one.capacity
    assert "for the best of a random number of such runs, 8 on average" in plan.describe()
    with pytest.raises(ValueError, match="a private choice needs private runs"):
        make_plan(**facts | {"epsilon": math.inf}, accountant=accountant)


def test_an_accountant_that_does_not_bound_the_search_is_refused():
    with pytest.raises(ValueError, match="needs accountant pld or rdp, not gdp"):
        selection.epsilon(GEOMETRIC, **RUN, accountant="gdp")
    few = Selection(8.0, -0.5, 10.0)
    with pytest.raises(ValueError, match=r"accountant rdp needs trials_shape from 0, got -0\.5"):
        selection.epsilon(few, **RUN, accountant="rdp")
    assert 0 < selection.epsilon(few, **RUN) < selection.epsilon(GEOMETRIC, **RUN)  # the control
    with pytest.raises(ValueError, match="accountant pld cannot resolve delta"):
        selection.epsilon(GEOMETRIC, **RUN | {"delta": 1e-30})


GOLDEN = [  # ε by pld and rdp
    (GEOMETRIC, RUN, 1.74914, 2.50303),
    (Selection(3.0, 0.0, 5.0), RUN | {"delta": 1e-3}, 1.21710, 1.70679),
    (Selection(8.0, -0.5, 10.0), RUN | {"num_steps": 100}, 3.39153, None),
]


@pytest.mark.parametrize(("chosen", "run", "by_pld", "by_rdp"), GOLDEN)
def test_the_total_stays_what_it_was(chosen, run, by_pld, by_rdp):
    assert selection.epsilon(chosen, **run) == pytest.approx(by_pld, rel=1e-4)
    if by_rdp:
        found = selection.epsilon(chosen, **run, accountant="rdp")
        assert found == pytest.approx(by_rdp, rel=1e-4) and found > by_pld


# The exact ε of trials that are one Gaussian number, and the order of the numbers is their score.


EDGES = np.linspace(-9.0, 11.0, 8001)  # an output is the number's cell
CELLS = np.arange(len(EDGES) - 1)
RISING = CELLS[::-1]  # the best first


def below_is_best(least):
    """An order that takes the numbers below -`least` first, then the others from above.

    What the canary makes likelier is then beaten by what it makes less likely.
    """
    low = np.count_nonzero(EDGES[1:] <= -least)
    return np.concatenate([CELLS[:low], CELLS[low:][::-1]])


def law(chosen, shift, noise, order):
    """The distribution of the search's output: a cell, the best first."""
    masses = np.diff(stats.norm.cdf(EDGES - shift / noise))[order]
    better, gamma, shape = (
        np.concatenate([[0], np.cumsum(masses)]),
        chosen.gamma,
        chosen.trials_shape,
    )
    log = np.log(gamma + (1 - gamma) * np.minimum(better, 1))
    if shape == 0:
        none_better = log / math.log(gamma)  # φ(1 - better)
    else:
        none_better = np.expm1(-shape * log) / math.expm1(-shape * math.log(gamma))
    return none_better[:-1] - none_better[1:]


def exact_epsilon(chosen, noise, delta, order):
    with_canary, without = (law(chosen, shift, noise, order) for shift in (1, 0))

    def excess(epsilon):
        pairs = ((with_canary, without), (without, with_canary))
        return max(np.maximum(p - math.exp(epsilon) * q, 0).sum() for p, q in pairs) - delta

    return optimize.brentq(excess, 0, 60)


SCORES_ALONE = {"noise_multiplier": math.inf, "sampling_prob": 1.0, "num_steps": 1}


@pytest.mark.parametrize("delta", [1e-2, 1e-5])
@pytest.mark.parametrize(
    "chosen",
    [
        *[Selection(8.0, -0.5, 2.0), Selection(8.0, 0.0, 2.0), Selection(3.0, 1.0, 2.0)],
        *[Selection(8.0, 1.0, 1.0), Selection(30.0, 1.0, 1.0), Selection(8.0, 3.0, 2.0)],
        *[Selection(1.01, 1.0, 2.0), Selection(8.0, 1.0, 10.0)],
    ],
    ids=str,
)
def test_no_order_of_the_outputs_has_a_larger_epsilon_than_the_bound(chosen, delta):
    run, noise = SCORES_ALONE | {"delta": delta}, chosen.score_noise_multiplier
    bound = selection.epsilon(chosen, **run)
    orders = [RISING, CELLS, *map(below_is_best, np.arange(-1, 3, 0.25))]
    exact = [exact_epsilon(chosen, noise, delta, order) for order in orders]
    assert exact[0] <= bound and max(exact) <= bound
    if chosen.trials_shape >= 0:
        assert bound < selection.epsilon(chosen, **run, accountant="rdp")
    if delta == 1e-5:
        assert max(exact) > 0.85 * bound  # so there is not much to gain
    # The controls: no part of the bound may be left out.
    first = (1 + chosen.trials_shape) * selection.epsilon_1(chosen, math.inf, 1.0, 1)[0]
    without_mean = bam.epsilon(**run | {"noise_multiplier": noise}) + first
    if chosen.trials_mean > 2:
        assert max(exact) > bound - first
        if noise < 10 and delta == 1e-5:
            assert max(exact) > without_mean


@pytest.mark.parametrize("shape", [-0.5, 0.0, 1.0])
def test_the_exact_law_is_that_of_searches_that_are_carried_out(shape):
    chosen, rng, num = Selection(5.0, shape, 1.0), np.random.default_rng(1), 20_000
    sizes = np.array([chosen.num_trials(u) for u in rng.random(num)])
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    for order in (RISING, below_is_best(0.5)):
        rank = np.empty_like(order)
        rank[order] = CELLS  # 0 is the best score
        cells = np.searchsorted(EDGES, rng.normal(size=sizes.sum())) - 1
        best = np.minimum.reduceat(rank[cells], starts)
        below = np.cumsum(law(chosen, 0, 1.0, order))
        differences = [
            np.mean(best <= r) - below[r] for r in np.quantile(best, (0.1, 0.5, 0.9)).astype(int)
        ]
        assert np.max(np.abs(differences)) < 5 * 0.5 / math.sqrt(num)


# An attack: what an adversary sees of a choice.


def attacked(sizes, shift, rng):
    """Returns the best score of each group of trials, which are Gaussian.

    A canary moves all scores by `shift`.
    """
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    return np.maximum.reduceat(rng.normal(size=sizes.sum()) + shift, starts)


def lower_bound(without, with_canary, delta):
    """ε that any (ε, δ) mechanism with these outputs has at least, at 95 %, by a threshold.

    Half of the outputs choose the threshold, the others are judged, by Clopper and Pearson.
    """
    best, half = 0.0, len(without) // 2
    for least in np.quantile(with_canary[:half], np.linspace(0.02, 0.98, 49)):
        for sign, a, b in ((1, without, with_canary), (-1, with_canary, without)):
            hits, alarms = (int(np.sum(sign * x[half:] >= sign * least)) for x in (b, a))
            low = stats.beta.ppf(0.025 / 98, hits, half - hits + 1) if hits else 0.0
            high = stats.beta.ppf(1 - 0.025 / 98, alarms + 1, half - alarms)
            if low > delta:
                best = max(best, math.log((low - delta) / high))
    return best


@pytest.mark.parametrize("shape", [0.0, 1.0])
def test_an_attack_finds_more_than_a_single_trial_s_epsilon_and_less_than_the_total(shape):
    """A trial that leaves hardly a trace does once the best of many is chosen by its own score."""
    rng, delta, noise, num = np.random.default_rng(0), 1e-2, 2.0, 200_000
    chosen = Selection(30.0, shape, noise)
    # A trial is its score alone: no training.
    nothing = {"noise_multiplier": math.inf, "sampling_prob": 1.0, "num_steps": 1, "delta": delta}
    total = selection.epsilon(chosen, **nothing)
    gauss = {"noise_multiplier": noise, "sampling_prob": 1.0, "num_steps": 1, "delta": delta}
    single = bam.epsilon(**gauss)
    p = probabilities(30.0, shape)
    sizes = rng.choice(np.arange(1, len(p) + 1), size=num, p=p / p.sum())
    outputs = [attacked(rng.permutation(sizes), shift, rng) for shift in (0.0, 1 / noise)]
    found = lower_bound(*outputs, delta)
    assert single < found < total
    one = [attacked(np.ones(num, int), shift, rng) for shift in (0.0, 1 / noise)]
    assert lower_bound(*one, delta) < single  # the control: the attack claims no more of one trial


# The score.


def test_one_image_more_moves_a_score_by_one_unit_and_the_noise_is_no_less_than_planned():
    key = seeded_key(35)
    for noise in (0.01, 0.7, 10.0, 333.3, 2.0**20):
        unit = score.unit_of(noise)
        assert unit >= 1 and 2**20 / unit >= noise
        assert score.noised_count(8, noise, key) - score.noised_count(7, noise, key) == unit
    draws = [score.noised_count(1000, 10.0, seeded_key(i)) for i in range(40)]
    errors = np.array(draws) / score.unit_of(10.0) - 1000
    assert 6 < errors.std() < 14 and abs(errors.mean()) < 7
    assert len(set(draws)) == len(draws)


def test_holding_out_changes_the_count_by_one_at_most_whatever_example_is_added():
    """An example more changes the training images by one *and* exchanges a held-out one."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (60, 2, 2, 1), np.uint8)
    labels = rng.integers(0, 3, 60).astype(np.int32)
    both = 0
    for i in range(60):
        whole = datasets.Split(images, labels)
        less = datasets.Split(np.delete(images, i, 0), np.delete(labels, i))
        with_it, without = (
            datasets.hold_out(datasets.Dataset("", x, x, 3, np.ones(1), np.ones(1)), 20)
            for x in (whole, less)
        )
        aside = [{x.tobytes() for x in found.test.images} for found in (with_it, without)]
        assert len(with_it.train.labels) - len(without.train.labels) == 1
        assert len(aside[0] - aside[1]) <= 1 and len(aside[0]) == len(aside[1]) == 20
        both += len(aside[0] - aside[1])
    assert both == 20  # so the two do not compose in parallel: both are paid for


def test_the_page_shows_what_was_run_and_its_epsilons_are_what_the_plan_gives():
    docs = Path(__file__).parents[1] / "docs"
    found = json.loads((docs / "results/selection/digits.json").read_text())
    page, kept = (docs / "choose.md").read_text(), docs / "results/selection"
    search, grid, *_ = found["costs"]
    said = "costs ε = {:.3f}, and a grid of eight such trials {:.3f}."
    assert said.format(search["rdp"], grid["pld"]) in page
    table = (kept / "digits.md").read_text()
    for row, words in zip(
        found["rows"],
        (
            "paid for reached {} % (standard deviation of three searches)",
            "the same trials reached {} %, but their ε was {} in truth",
            "The library's default rate reached {} %",
            "and one that was found earlier {} %",
        ),
        strict=True,
    ):
        mean, deviation = np.mean(row["accuracies"]), np.std(row["accuracies"], ddof=1)
        accuracy = f"{mean:.1f} ± {deviation:.1f}"
        line = next(x for x in table.splitlines() if row["what"] in x)
        assert f"| {accuracy} |" in line
        assert words.format(accuracy, line.split(" | ")[2]) in " ".join(page.split())
    plan = found["selection"]
    keys = ("noise_multiplier", "sampling_prob", "num_steps", "delta")
    mechanism = {key: plan[key] for key in keys}
    mechanism["accountant"] = "rdp"
    total = selection.epsilon(Selection(**plan["selection"]), **mechanism)
    assert plan["epsilon"] == pytest.approx(total, rel=1e-6) and total <= 3
    paid, free, *_ = found["rows"]
    assert paid["claimed"] == paid["epsilon"] == plan["epsilon"]
    mechanism["noise_multiplier"] = free["noise_multiplier"]
    in_truth = selection.epsilon(Selection(**plan["selection"]), **mechanism)
    assert free["claimed"] < 3.001 < 1.5 * free["claimed"] < free["epsilon"]
    assert free["epsilon"] == pytest.approx(in_truth, rel=1e-6)


@pytest.mark.parametrize("target", [0.012, 0.1])
def test_a_small_target_is_reached_even_if_few_orders_alone_cost_more(target):
    cheap = Selection(5.0, 1.0, 1000.0)
    steps = {"sampling_prob": 0.1, "num_steps": 20, "delta": 1e-5}
    few = selection.by_rdp(cheap, math.inf, *steps.values(), accounting.FEW_ORDERS)
    assert (few > target) == (target == 0.012)  # the second is the control
    for accountant in BOTH:
        by = {**steps, "accountant": accountant}
        sigma = selection.noise_multiplier(cheap, target_epsilon=target, **by)
        spent = selection.epsilon(cheap, noise_multiplier=sigma, **by)
        assert target * (1 - 2e-5) <= spent <= target
