"""Intervals that can be checked against a table of Student's t."""

import doctest

import numpy as np
import pytest
import scipy.stats

from bam.cli import stats, tables
from scripts.paper import table1


def test_the_interval_of_five_values_is_students():
    found = stats.estimate([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3
    assert found.sd == pytest.approx(2.5**0.5)
    assert found.half_width == pytest.approx(2.776445 * (2.5 / 5) ** 0.5, rel=1e-6)  # t(0.975, 4)


def test_one_value_has_no_spread_and_none_no_mean():
    assert stats.estimate([4.0]) == stats.Estimate(4.0, None, None, 1)
    assert stats.estimate([]) is None


def test_a_constant_gain_is_certain_however_much_the_seeds_differ():
    baseline = {0: 10.0, 1: 50.0, 2: 90.0}
    gain = stats.paired_difference({seed: x + 1 for seed, x in baseline.items()}, baseline)
    assert (gain.mean, gain.half_width, gain.num) == (1, 0, 3)


def test_only_seeds_that_both_have_are_paired():
    assert stats.paired_difference({0: 1.0, 7: 100.0}, {0: 0.0, 3: 0.0}).num == 1
    assert stats.paired_difference({0: 1.0}, {1: 0.0}) is None


def test_p_is_that_of_scipys_paired_test():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 10))
    found = stats.paired_difference(dict(enumerate(a)), dict(enumerate(b)))
    assert stats.p_value(found) == pytest.approx(scipy.stats.ttest_rel(a, b).pvalue)
    assert stats.p_value(stats.estimate([1.0])) is None
    for equal in ([1.0, 1.0], [0.0, 0.0]):  # no spread was seen
        assert stats.p_value(stats.estimate(equal)) is None
        assert stats.detectable(stats.estimate(equal)) is None


@pytest.mark.parametrize("num", [3, 5, 10])
def test_what_would_be_found_is_found_four_times_of_five(num):
    smallest = stats.detectable(stats.Estimate(0.0, 2.0, None, num))
    drawn = np.random.default_rng(num).normal(smallest, 2.0, (20_000, num))
    found = scipy.stats.ttest_1samp(drawn, 0, axis=1).pvalue < 0.05
    assert found.mean() == pytest.approx(0.8, abs=0.01)
    half = scipy.stats.ttest_1samp(drawn - smallest / 2, 0, axis=1).pvalue < 0.05
    assert half.mean() < 0.5  # the control
    assert stats.detectable(stats.estimate([1.0])) is None


def table_row(method, accuracies, baseline=None):
    ours, theirs = (
        {seed: 100 * value for seed, value in of.items()} for of in (accuracies, baseline or {})
    )
    return table1.row("cifar10_small", "cifar10", 2.0, method, ours, theirs)


def shown(row):
    return [cell(row) for cell in table1.COLUMNS.values()]


def test_a_row_of_the_table_sets_ours_beside_the_papers():
    baseline = {0: 0.60, 1: 0.64}
    row = table_row("bam_sam", {0: 0.62, 1: 0.66, 2: 0.70}, baseline)
    assert (row["paper_accuracy"], row["paper_sd"], row["paper_difference"]) == (68.2, 0.27, 1.1)
    assert row["accuracy"]["mean"] == pytest.approx(66)
    assert row["difference"]["mean"] == pytest.approx(2)
    assert row["difference"]["num"] == 2
    assert shown(row)[:6] == [
        "cifar10_small", "2", "BAM (SAM)", "68.2 ± 0.27", "+1.1", "3",
    ]  # fmt: skip


def test_what_was_not_run_says_so():
    assert shown(table_row("dp_sat", {}))[5:] == ["0", "not run", "not run", "–", "–"]
    assert shown(table_row("dp_sgd", {}))[5:] == ["0", "not run", "–", "–", "–"]
    one = shown(table_row("dp_sat", {0: 0.5}, {0: 0.4}))
    assert one[5:] == ["1", "50.00", "+10.00", "–", "–"]


def test_every_row_of_the_markdown_table_has_all_columns():
    rows = [table_row("dp_sgd", {0: 0.5})]
    lines = tables.markdown(table1.COLUMNS, rows, table1.LEFT).splitlines()
    assert lines[1].startswith("|---|---:|---|---:|")
    assert len({line.count("|") for line in lines}) == 1


def test_the_docstrings_examples_are_right():
    found = doctest.testmod(stats, optionflags=doctest.ELLIPSIS)
    assert found.attempted >= 4 and found.failed == 0
