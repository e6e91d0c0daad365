"""The noise is a rounded Gaussian, far into its tails, and sums are exact.

The law of a draw is not estimated: it is computed from the tables that are drawn from.
"""

import decimal
import functools
import json
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from bam.core import gaussian, grid
from bam.core.seeds import seeded_key

SLOTS = 2**gaussian.SLOT_BITS
KEY = seeded_key(35)
STEP = 7


def probabilities(table):
    """Numerators, over 2^111, of what a table draws: each slot's share goes to it and its alias."""
    share = 2 ** (gaussian.TABLE_BITS - gaussian.SLOT_BITS)
    found = [0] * SLOTS
    for slot, (first, second, third, alias) in enumerate(
        zip(*(x.tolist() for x in table), strict=True)
    ):
        own = share if alias == slot else (first << 64) + (second << 32) + third
        found[slot] += own
        found[alias] += share - own
    return found


@functools.cache
def laws():
    """Probabilities of a and of b, as floats of full relative precision."""
    return [
        np.array([w / 2**gaussian.TABLE_BITS for w in probabilities(t)])
        for t in gaussian.alias_tables()
    ]


def law_at(residue):
    """Probabilities of the draws that leave this residue by COARSE, and these draws."""
    coarse, fine = laws()
    numbers = np.arange(SLOTS) - SLOTS // 2
    of_residue = numbers % gaussian.COARSE == residue
    # b = COARSE·j + residue, so that the draw is COARSE·(a + j) + residue.
    steps = (numbers[of_residue] - residue) // gaussian.COARSE
    found = np.convolve(coarse, fine[of_residue])
    draws = gaussian.COARSE * (numbers[0] + steps[0] + np.arange(len(found))) + residue
    return found, draws


def rounded_normal(draws):
    """Φ((n + ½)/s) − Φ((n − ½)/s), by its series: the terms left out are below 1e-20."""
    z = draws / gaussian.NOISE_STD
    return stats.norm.pdf(z) / gaussian.NOISE_STD * (1 + (z**2 - 1) / (24 * gaussian.NOISE_STD**2))


# The law.


def test_the_tables_give_the_weights_to_the_last_bit():
    for table, std in zip(
        gaussian.alias_tables(), (gaussian.COARSE_STD, gaussian.FINE_STD), strict=True
    ):
        weights = gaussian.weights(std)
        assert probabilities(table) == weights
        assert sum(weights) == 2**gaussian.TABLE_BITS


@pytest.mark.parametrize("std", [gaussian.COARSE_STD, gaussian.FINE_STD])
def test_the_weights_are_a_discrete_gaussian_to_the_last_bit(std):
    """So each table is off by at most 2^15 · 2^-111, below 2e-29, in total variation."""
    weights = gaussian.weights(std)
    assert weights[0] == 0  # what lies beyond the table is below its resolution
    with decimal.localcontext(prec=60):
        exact = [(-(decimal.Decimal(a) ** 2) / (2 * std**2)).exp() for a in range(SLOTS // 2)]
        total = exact[0] + 2 * sum(exact) - 2 * exact[0]
        for a in (1, 2, 77, 1365, 5000, 9000, 13000, SLOTS // 2 - 1):
            for found in (weights[SLOTS // 2 + a], weights[SLOTS // 2 - a]):
                assert 0 <= 2**gaussian.TABLE_BITS * exact[a] / total - found <= 1
        middle = weights[SLOTS // 2] - 2**gaussian.TABLE_BITS * exact[0] / total
        assert 0 <= middle <= SLOTS  # what all the others were rounded down by


@pytest.mark.parametrize("residue", [0, 1, 100, 383, 384, 767])
def test_a_draw_is_a_rounded_gaussian_far_into_its_tails(residue):
    found, draws = law_at(residue)
    z = np.abs(draws) / gaussian.NOISE_STD
    error = np.abs(found / rounded_normal(draws) - 1)
    assert np.max(error[z < 5]) < 1e-11  # what floats of 64 bits can tell
    assert np.max(error[z < 9]) < 1e-6
    assert np.max(error[z < 10]) < 1e-2


def test_the_variance_is_that_of_a_gaussian_and_of_its_rounding():
    numbers = np.arange(SLOTS) - SLOTS // 2
    coarse, fine = (np.sum(law * numbers.astype(float) ** 2) for law in laws())
    variance = gaussian.COARSE**2 * coarse + fine
    assert variance == pytest.approx(gaussian.NOISE_STD**2 + 1 / 12, rel=1e-13)


# The support.


def reach(values):
    """How far, on both sides, every integer that is a draw has others within one step."""
    return min(-values.min(), values.max()) / gaussian.NOISE_STD


def possible_draws():
    coarse, fine = (np.flatnonzero(law) - SLOTS // 2 for law in laws())
    assert np.all(np.diff(coarse) == 1) and np.all(np.diff(fine) == 1)  # no holes in either
    assert len(fine) >= gaussian.COARSE  # so none between two steps
    return gaussian.COARSE * coarse


def float32_inversion():
    """All that `jax.random.normal` can be in its tails: 23 random bits, then an inverse CDF."""
    bits = np.r_[np.arange(64), np.arange(2**23 - 64, 2**23)].astype(np.uint32)
    uniform = (bits | np.float32(1).view(np.uint32)).view(np.float32) - np.float32(1)
    low = np.nextafter(np.float32(-1), np.float32(0))
    uniform = np.maximum(low, uniform * (np.float32(1) - low) + low)
    return gaussian.NOISE_STD * np.asarray(np.sqrt(2) * jax.lax.erf_inv(jnp.asarray(uniform)))


def test_every_whole_number_to_nine_standard_deviations_is_possible():
    assert reach(possible_draws()) > 10.5
    # Controls: what 0.1.0 drew, and a normal cut off at six.
    drawn = np.asarray(jax.random.normal(jax.random.key(0), (10**6,)))
    inverted = float32_inversion()
    assert np.max(np.abs(drawn)) <= np.max(np.abs(inverted)) / gaussian.NOISE_STD
    assert 5.2 < reach(inverted) < 5.3
    truncated = stats.truncnorm(-6, 6).ppf(np.linspace(0, 1, 1001)) * gaussian.NOISE_STD
    assert reach(truncated) < 9
    assert len(np.unique(inverted[inverted > 4.5 * gaussian.NOISE_STD])) < 100


# The draws.


@functools.cache
def draws(num):
    return np.asarray(jax.jit(lambda: noise().draws_of_device(num))())[:num]


def noise(key=KEY, step=STEP):
    return gaussian.GaussianNoise(key, 1.0, step)


def p_value(sample):
    """Of the law: a χ² test of counts in 2,000 cells of equal probability."""
    edges = stats.norm.ppf(np.linspace(0, 1, 2001)[1:-1])
    counts = np.bincount(np.searchsorted(edges, sample / gaussian.NOISE_STD), minlength=2000)
    return stats.chisquare(counts).pvalue


def test_draws_follow_the_law():
    assert p_value(draws(2**20)) > 1e-6
    assert p_value(1.02 * draws(2**20)) < 1e-6  # control: a fiftieth too wide
    low_bits = np.bincount(draws(2**20) % 256, minlength=256)
    assert stats.chisquare(low_bits).pvalue > 1e-6
    # Control: 24-bit floats of deviation 2^20 rarely have all their low bits.
    floats = np.asarray(jax.random.normal(jax.random.key(0), (2**20,)) * 2.0**30 / 2**10)
    assert not np.array_equal(floats, np.round(floats))


def test_neighbouring_entries_and_keys_are_independent():
    z = draws(2**20) / gaussian.NOISE_STD
    for lag in (1, 2, 3, 768, 2**15, 2**16):
        assert abs(np.mean(z[lag:] * z[:-lag])) < 5 / math.sqrt(len(z) - lag)
    for other in (noise(KEY + 1), noise(step=STEP + 1)):
        other = np.asarray(other.draws_of_device(2**20)) / gaussian.NOISE_STD
        assert abs(np.mean(z * other)) < 5 / 2**10


@pytest.mark.parametrize("num_entries", [17, 1000, 300_000])
def test_devices_shares_are_the_noise_of_one_device(num_entries):
    whole = np.asarray(noise().draws_of_device(num_entries))[:num_entries]
    for num_devices in (3, 8):
        share = jax.jit(
            lambda device, n=num_devices: noise().draws_of_device(num_entries, device, n)
        )
        shares = [np.asarray(share(device)) for device in range(num_devices)]
        assert len({len(share) for share in shares}) == 1
        np.testing.assert_array_equal(np.concatenate(shares)[:num_entries], whole)


@pytest.mark.parametrize("most_blocks", [1, 20, 47])
def test_draws_do_not_depend_on_how_many_are_made_at_once(monkeypatch, most_blocks):
    """A GPU makes more of them at once than a CPU. The last group need not be full."""
    tiles = jnp.arange(13, dtype=jnp.uint32)
    draw = gaussian.gaussian.__wrapped__  # not compiled before
    expected, groups, original = draw(KEY, STEP, tiles, 10), [], jax.lax.map
    assert len(np.unique(expected)) > 2000
    monkeypatch.setattr(gaussian, "MOST_BLOCKS", most_blocks)
    monkeypatch.setattr(jax.lax, "map", lambda f, x: groups.append(x.shape) or original(f, x))
    np.testing.assert_array_equal(draw(KEY, STEP, tiles, 10), expected)
    assert groups[-1] == {1: (13, 1), 20: (7, 2), 47: (4, 4)}[most_blocks]


def by_integers(words, table):
    """A draw by its definition: slot, then 96 bits against the slot's threshold."""
    slot, number = int(words[0]) >> 17, (int(words[0]) % 2**17 << 15) + int(words[1])
    number = (number << 64) + (int(words[2]) << 32) + int(words[3])
    threshold = (int(table.first[slot]) << 64) + (int(table.second[slot]) << 32)
    own = number < threshold + int(table.third[slot]) or table.alias[slot] == slot
    return (slot if own else int(table.alias[slot])) - SLOTS // 2


@pytest.mark.parametrize("ties", [0, 1, 2, 3], ids=lambda n: f"{n} words tied")
def test_a_draw_that_the_first_bits_leave_open_is_decided_by_the_others(ties):
    """One in 2^31: so words are made that tie, in as many of three as there are."""
    rng = np.random.default_rng(ties)
    for table in gaussian.alias_tables():
        slots = rng.integers(0, SLOTS, 50)
        columns = np.stack([table.first, table.second, table.third])[:, slots].astype(np.uint32)
        numbers = rng.integers(0, 2**32, (3, 50)).astype(np.uint32)
        numbers[:ties] = columns[:ties]
        words = np.stack([slots << 17 | numbers[0] >> 15, numbers[0] % 2**15, *numbers[1:]])
        words = jnp.asarray(words, jnp.uint32)
        choice = gaussian.choose_slots(words[0], words[1])
        found = gaussian.look_up(table, choice, (words[2], words[3]))
        np.testing.assert_array_equal(found, [by_integers(w, table) for w in np.asarray(words).T])
        if ties == 0:
            np.testing.assert_array_equal(found, gaussian.look_up(table, choice, ()))


def test_a_tie_makes_a_tile_draw_its_other_bits(monkeypatch):
    """With tables whose first thresholds are those of the words themselves."""
    right = np.asarray(noise().draws_of_device(1000))
    monkeypatch.setattr(gaussian, "gaussian", gaussian.gaussian.__wrapped__)  # not compiled
    looked_up = []
    original = gaussian.look_up
    monkeypatch.setattr(
        gaussian,
        "look_up",
        lambda t, c, rest: looked_up.append(len(rest)) or original(t, c, rest),
    )
    np.testing.assert_array_equal(noise().draws_of_device(1000), right)
    assert sorted(looked_up) == [0, 0, 2, 2]  # both are compiled, of both tables
    monkeypatch.setattr(jax.lax, "cond", lambda *args: True if len(args) == 4 else args[1]())
    np.testing.assert_array_equal(
        noise().draws_of_device(1000), right
    )  # the other bits decide nothing here


def print_tails(limits, size, num):
    """How many of `num` times `size` draws are beyond each limit."""

    @jax.jit
    def counts(i):
        sample = noise(step=i).draws_of_device(size) / gaussian.NOISE_STD
        return jnp.stack([jnp.sum(jnp.abs(sample) > limit) for limit in limits])

    totals = sum(np.asarray(counts(jnp.uint32(i)), np.int64) for i in range(num))
    print(json.dumps(totals.tolist()))


@pytest.mark.slow
def test_tails_have_the_counts_of_the_normal_law():
    """3·10⁸ draws: beyond 5.45 standard deviations 16 are expected.

    They are drawn in a process without the flags of these tests, five times as fast.
    """
    limits, size, num = np.array([4.0, 5.0, 5.45]), 2**22, 75
    expected = num * size * 2 * stats.norm.sf(limits)

    def plausible(found):
        low, high = stats.poisson.ppf(5e-7, expected), stats.poisson.ppf(1 - 5e-7, expected)
        return (low <= found) & (found <= high)

    code = f"from tests import test_grid; test_grid.print_tails({limits.tolist()}, {size}, {num})"
    environ = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = np.array(json.loads(done.stdout))
    assert np.all(plausible(found)), (found, expected)
    # Controls: the floats of `jax.random.normal`, all of which end before 5.45, and a cut at five.
    assert np.max(np.abs(float32_inversion())) < limits[2] * gaussian.NOISE_STD
    assert not np.all(plausible(np.where(limits == limits[2], 0, found)))
    assert not np.all(plausible(np.where(limits < 5, found - found[1], 0)))


# Integers.


def test_cutting_never_lengthens_and_keeps_whole_multiples():
    rng = np.random.default_rng(0)
    x = rng.normal(size=10_000).astype(np.float32)
    cut = np.asarray(grid.cut(jnp.asarray(x), 2.0**-10)) * 2.0**-10
    assert np.all(np.abs(cut) <= np.abs(x)) and np.all(np.abs(x - cut) < 2.0**-10)
    assert np.all(np.sign(cut) * np.sign(x) >= 0)
    whole = np.arange(-(2**20), 2**20, 999)
    np.testing.assert_array_equal(
        grid.cut(jnp.asarray(whole * 2.0**-9, jnp.float32), 2.0**-9), whole
    )
    # Control: rounding to nearest does lengthen.
    assert np.any(np.abs(np.round(x * 2**10) / 2**10) > np.abs(x))


def test_a_total_has_one_way_to_be_written_and_one_float():
    one = grid.carry(grid.Total(jnp.int32(3), jnp.int32(2**16 + 5)))
    other = grid.carry(grid.Total(jnp.int32(5), jnp.int32(5 - 2**16)))
    assert one == other == grid.Total(4, 5)
    rng = np.random.default_rng(0)
    high, low = rng.integers(-(2**29), 2**29, 1000), rng.integers(-(2**31), 2**31, 1000)
    total = grid.carry(grid.Total(jnp.asarray(high, jnp.int32), jnp.asarray(low, jnp.int32)))
    exact = high * 2**16 + low
    np.testing.assert_array_equal(
        np.asarray(total.high, np.int64) * 2**16 + np.asarray(total.low), exact
    )
    assert np.all((total.low >= 0) & (total.low < 2**16))
    floats = np.asarray(grid.to_float(total, 0.25, np.dtype(np.float32)), np.float64)
    np.testing.assert_allclose(floats, exact / 4, rtol=3e-7)
