"""A mechanism's sampler, neighbours and ε stand in one record, and each is what it says."""

import dataclasses
import math

import numpy as np
import pytest

import bam
from bam.part_table import Part
from bam.privacy import mechanisms

PLAN = {"num_examples": 1000, "expected_batch_size": 40, "num_steps": 20, "delta": 1e-5}
PLAN |= {"epsilon": 2.0, "accountant": "rdp"}
TRIALS = {"trials_mean": 3.0, "trials_shape": 1.0, "score_noise_multiplier": 8.0}


def test_a_full_batch_is_poisson_with_every_example():
    whole = {**PLAN, "expected_batch_size": 1000}
    full, poisson = (bam.make_plan(**whole, mechanism=m) for m in ("full_batch", "poisson"))
    assert dataclasses.replace(full, mechanism_config=poisson.mechanism_config) == poisson
    assert full.mechanism.draw(3, 5).tolist() == list(range(1000))
    assert poisson.mechanism.draw(3, 5).tolist() == list(range(1000))
    assert full.capacity == poisson.capacity == 1000


def test_epsilon_of_poisson_batches_is_that_of_the_probability_that_they_have():
    plan, probs = bam.make_plan(**PLAN), (40 / 1000, 20 / 1000)
    settings = {"noise_multiplier": plan.noise_multiplier, "num_steps": 20, "accountant": "rdp"}
    settings["delta"] = 1e-5 - plan.overflow
    epsilon, control = (bam.epsilon(sampling_prob=prob, **settings) for prob in probs)
    assert plan.epsilon == epsilon > 1.2 * control
    drawn = np.mean([len(plan.mechanism.draw(0, step)) for step in range(400)]) / 1000
    assert [abs(drawn - prob) < 0.002 for prob in probs] == [True, False]  # six deviations


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mechanism": "full_batch"}, "expected_batch_size = N = 1000"),
        ({"mechanism": "shuffled"}, "unknown mechanism 'shuffled'"),
        ({"mechanism": "fixed_size"}, "mechanism fixed_size no longer exists: use poisson"),
        ({"mechanism": {"name": "poisson", "bands": 3}}, r"poisson does not take \{'bands': 3\}"),
        ({"mechanism": "random_allocation"}, "accountant rdp has no bound for random_allocation"),
    ],
)
def test_a_plan_refuses_what_its_mechanism_cannot_do(changes, message):
    with pytest.raises(ValueError, match=message):
        bam.make_plan(**PLAN | changes)


def for_examples_by_rdp(num_examples, batch_size):
    def check(unit, accountant, private):
        if (unit, accountant, private) != ("example", "rdp", True):
            raise bam.InputError(f"not of {unit}, {accountant}, {private}")

    return dataclasses.replace(mechanisms.poisson(num_examples, batch_size), check=check)


def test_a_mechanism_brings_what_no_plan_of_it_may_be(monkeypatch):
    part = Part("tests.test_mechanisms:for_examples_by_rdp")
    monkeypatch.setitem(mechanisms.MECHANISMS, "mine", part)
    by_rdp = PLAN | {"mechanism": "mine", "accountant": "rdp"}
    users = {"group_size": 2}
    for changes, message in (
        ({"accountant": "pld"}, "not of example, pld, True"),
        (users, "not of user, rdp, True"),
        ({"epsilon": math.inf}, "not of example, rdp, False"),
    ):
        with pytest.raises(bam.InputError, match=message):
            bam.make_plan(**by_rdp | changes)
        bam.make_plan(**by_rdp | changes | {"mechanism": "poisson"})  # the control
    record = bam.make_plan(**by_rdp).to_json()
    with pytest.raises(bam.InputError, match="not of example, pld, True"):
        bam.PrivacyPlan.from_json(record | {"accountant": "pld"})


@pytest.mark.parametrize("name", sorted(mechanisms.MECHANISMS.keys() - {"best_of_trials"}))
def test_a_plan_without_privacy_asks_no_accountant_of_its_mechanism(name):
    size = 1000 if name == "full_batch" else 40
    without = PLAN | {"epsilon": math.inf, "expected_batch_size": size}
    options = {"bands": 2} if name == "banded" else {}
    plan = bam.make_plan(**without, mechanism={"name": name, **options})
    assert (plan.epsilon_after(0), plan.epsilon_after(20)) == (0, math.inf)
    assert plan.adjacency == "zero_out"  # one relation for all


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adjacency": "replace_one"}, "the record contradicts itself"),
        ({"adjacency": "replace_one", "mechanism": "fixed_size"}, "no longer exists"),
        (
            {"mechanism": "tests.test_mechanisms:PLAN"},
            "unknown mechanism",
        ),
        ({"mechanism": []}, "unknown mechanism"),
        ({"mechanism": "banded", "mechanism_options": {"bands": 999}}, "mechanism.bands from 2"),
        ({"mechanism_options": {"bands": 2}}, "does not take"),
        ({"accountant": "gdp"}, "accountant gdp"),
        ({"sampling_prob": 0.004}, "the record contradicts itself"),
        (
            {"expected_batch_size": 0, "sampling_prob": 0.0},
            "size must be at least 1, got 0",
        ),
        ({"selection": TRIALS}, "a private search by an earlier version"),
        ({"mechanism": "best_of_trials"}, "best_of_trials does not take"),
        ({"mechanism": "best_of_trials", "mechanism_options": {"foo": 1}}, "does not take"),
        (
            {"mechanism": "best_of_trials", "mechanism_options": TRIALS | {"trials_shape": -0.5}},
            "accountant rdp needs trials_shape from 0",
        ),
        (
            {"mechanism": "best_of_trials", "mechanism_options": TRIALS | {"trials_mean": 0.5}},
            "trials_mean must be from",
        ),
        ({"num_examples": "many"}, "not the record|num_examples must be of"),
        ({"delta": None}, "not the record|delta"),
        ({"delta": 0.002}, "delta 0.002"),
        ({"overflow": 0.0}, "the record contradicts itself"),
        ({"noise_multiplier": math.inf}, "noise_multiplier must be at most"),
        ({"noise_multiplier": 1e7}, "noise_multiplier must be at most"),
        ({"noise_multiplier": 0.0}, "the record contradicts itself"),
        ({"num_examples_given": 1}, "not the record|num_examples_given must be of"),
        ({"num_steps": 0}, "num_steps must be at least 1"),
        ({"num_steps": True}, "not the record|num_steps must be of"),
        ({"spare_steps": 20}, "spare_steps must be from 0 to 19"),
        ({"group_size": 3}, "is invalid: .example. needs 0"),
    ],
    ids=str,
)
def test_a_record_that_no_plan_leaves_behind_is_a_value_error(changes, message):
    record = bam.make_plan(**PLAN).to_json()
    assert bam.PrivacyPlan.from_json(record).epsilon == record["epsilon"]
    with pytest.raises(ValueError, match=message):
        bam.PrivacyPlan.from_json(record | changes)
