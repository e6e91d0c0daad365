"""Intervals that can be checked against a table of Student's t."""

import numpy as np
import pytest
import scipy.stats

from bam.sweep import comparison, studies


def test_the_interval_of_five_values_is_students():
    found = comparison.estimate([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3
    assert found.sd == pytest.approx(2.5**0.5)
    assert found.half_width == pytest.approx(2.776445 * (2.5 / 5) ** 0.5, rel=1e-6)  # t(0.975, 4)


def test_one_value_has_no_spread_and_none_no_mean():
    assert comparison.estimate([4.0]) == comparison.Estimate(4.0, None, None, 1)
    assert comparison.estimate([]) is None


def test_a_constant_gain_is_certain_however_much_the_seeds_differ():
    baseline = {0: 10.0, 1: 50.0, 2: 90.0}
    gain = comparison.paired_difference({seed: x + 1 for seed, x in baseline.items()}, baseline)
    assert (gain.mean, gain.half_width, gain.num) == (1, 0, 3)


def test_only_seeds_that_both_have_are_paired():
    assert comparison.paired_difference({0: 1.0, 7: 100.0}, {0: 0.0, 3: 0.0}).num == 1
    assert comparison.paired_difference({0: 1.0}, {1: 0.0}) is None


def test_p_is_that_of_scipys_paired_test():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 10))
    found = comparison.paired_difference(dict(enumerate(a)), dict(enumerate(b)))
    assert comparison.p_value(found) == pytest.approx(scipy.stats.ttest_rel(a, b).pvalue)
    assert comparison.p_value(comparison.estimate([1.0])) is None
    for equal in ([1.0, 1.0], [0.0, 0.0]):  # no spread was seen
        assert comparison.p_value(comparison.estimate(equal)) is None
        assert comparison.minimum_detectable_effect(comparison.estimate(equal)) is None


@pytest.mark.parametrize("num", [3, 5, 10])
def test_what_would_be_found_is_found_four_times_of_five(num):
    smallest = comparison.minimum_detectable_effect(comparison.Estimate(0.0, 2.0, None, num))
    drawn = np.random.default_rng(num).normal(smallest, 2.0, (20_000, num))
    found = scipy.stats.ttest_1samp(drawn, 0, axis=1).pvalue < 0.05
    assert found.mean() == pytest.approx(0.8, abs=0.01)
    half = scipy.stats.ttest_1samp(drawn - smallest / 2, 0, axis=1).pvalue < 0.05
    assert half.mean() < 0.5  # the control
    assert comparison.minimum_detectable_effect(comparison.estimate([1.0])) is None


def test_a_gain_s_cells_say_what_is_known_and_no_p_is_0():
    def cells(*gains):
        effect = comparison.estimate(gains)
        row = {
            "gain": comparison.as_json(effect),
            "p": comparison.p_value(effect),
            "minimum_detectable_effect": comparison.minimum_detectable_effect(effect),
        }
        return [cell(row) for cell in studies.GAIN.values()]

    assert cells(10.0) == ["+10.00", "–", "–"]
    assert cells(-0.001, 0.0) == ["+0.00 ± 0.01", "0.50", "0.01"]
    assert cells(5.0, 5.01, 5.02)[1] == "< 0.01"
