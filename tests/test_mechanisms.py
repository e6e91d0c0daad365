"""A mechanism's sampler, neighbours and ε stand in one record, and each is what it says."""

import dataclasses
import math

import pytest

import bam
from bam.privacy import mechanisms

PLAN = {
    "num_examples": 1000,
    "expected_batch_size": 40,
    "num_steps": 20,
    "target_epsilon": 2.0,
    "delta": 1e-5,
    "clip_norm": 1.0,
    "accountant": "rdp",
}


def test_a_full_batch_is_poisson_with_every_example():
    whole = {**PLAN, "expected_batch_size": 1000}
    full, poisson = (bam.make_plan(**whole, mechanism=m) for m in ("full_batch", "poisson"))
    assert dataclasses.replace(full, mechanism_name="poisson") == poisson
    assert full.mechanism.draw(3, 5).tolist() == list(range(1000))
    assert poisson.mechanism.draw(3, 5).tolist() == list(range(1000))
    assert full.capacity == poisson.capacity == 1000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mechanism": "full_batch"}, "expected_batch_size = N = 1000"),
        ({"mechanism": "shuffled"}, "unknown mechanism 'shuffled'"),
        ({"mechanism": "fixed_size"}, "mechanism fixed_size, .* is gone: take poisson"),
        ({"mechanism_options": {"bands": 3}}, r"poisson does not take \{'bands': 3\}"),
        ({"mechanism": "random_allocation"}, "accountant rdp has no bound for random_allocation"),
    ],
)
def test_a_plan_refuses_what_its_mechanism_cannot_do(changes, message):
    with pytest.raises(ValueError, match=message):
        bam.make_plan(**PLAN | changes)


@pytest.mark.parametrize("name", mechanisms.MECHANISMS)
def test_a_plan_without_privacy_asks_no_accountant_of_its_mechanism(name):
    size = 1000 if name == "full_batch" else 40
    without = PLAN | {"target_epsilon": math.inf, "expected_batch_size": size, "mechanism": name}
    options = {"bands": 2} if name == "banded" else {}
    plan = bam.make_plan(**without, mechanism_options=options)
    assert (plan.epsilon_after(0), plan.epsilon_after(20)) == (0, math.inf)
    assert plan.adjacency == "zero_out"  # one relation for all


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adjacency": "replace_one"}, "the records disagree"),
        ({"adjacency": "replace_one", "mechanism": "fixed_size"}, "is gone"),
        ({"mechanism": "tests.test_mechanisms:PLAN"}, "code of one's own, is unknown here"),
        ({"mechanism": []}, "unknown mechanism"),
        ({"accountant": "gdp"}, "accountant gdp"),
        ({"sampling_prob": 0.004}, "the records disagree"),
        ({"expected_batch_size": 0, "sampling_prob": 0.0}, "expected_batch_size 0"),
        (
            {
                "mechanism": "banded",
                "mechanism_options": {"bands": 2},
                "selection": (8.0, 1.0, 9.0),
            },
            "no record",
        ),
        ({"selection": {"foo": 1}}, "no record"),
        ({"selection": [1]}, "no record"),
        ({"num_examples": "many"}, "no record|num_examples must be of"),
        ({"delta": None}, "no record|delta"),
    ],
    ids=str,
)
def test_a_record_that_no_plan_leaves_behind_is_a_value_error(changes, message):
    record = bam.make_plan(**PLAN).to_json()
    assert bam.PrivacyPlan.from_json(record).epsilon == record["epsilon"]
    with pytest.raises(ValueError, match=message):
        bam.PrivacyPlan.from_json(record | changes)
