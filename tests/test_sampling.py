"""Batches are Poisson samples: each example independently, never cut, never a fixed size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from bam.core import chacha, sampling, seeds
from bam.core.sampling import pad, poisson_sample, usual_capacity

# One function, called many thousand times: other tests check the types of its calls.
pytestmark = pytest.mark.usefixtures("without_the_tests_type_checks")

NUM_EXAMPLES, PROB, NUM_DRAWS = 40, 0.3, 4000
LEVEL = 1e-6  # of every statistical test below; the seed is fixed, so none is flaky


@functools.cache
def poisson(step):
    return poisson_sample(seed=11, step=step, num_examples=NUM_EXAMPLES, sampling_prob=PROB)


def fixed_size(step):
    """The usual mistake: batches of always 12 examples, without replacement."""
    return np.random.default_rng(step).choice(NUM_EXAMPLES, 12, replace=False)


def same_every_other_step(step):
    return poisson(step // 2)


def favours_the_first(step):
    return np.union1d(poisson(step), np.flatnonzero([step % 10 == 0]))


def in_pairs(step):
    """Each example has the right probability, but neighbours come together."""
    return (2 * poisson(step)[:, None] + [0, 1]).ravel() % NUM_EXAMPLES


@functools.cache
def inclusions(sampler):
    """`[draws, examples]`: was the example in the draw?"""
    included = np.zeros((NUM_DRAWS, NUM_EXAMPLES), bool)
    for step in range(NUM_DRAWS):
        included[step, sampler(step)] = True
    return included


def plausible(statistic, degrees_of_freedom):
    low, high = stats.chi2.ppf([LEVEL / 2, 1 - LEVEL / 2], degrees_of_freedom)
    return low < statistic < high


def frequencies_are_right(sampler):
    z = (inclusions(sampler).sum(0) - NUM_DRAWS * PROB) / (NUM_DRAWS * PROB * (1 - PROB)) ** 0.5
    return plausible(np.sum(z**2), NUM_EXAMPLES)


def uncorrelated(centred):
    """Are the columns pairwise independent? Each product sum is a standard normal if so."""
    z = (centred.T @ centred) / (len(centred) ** 0.5 * PROB * (1 - PROB))
    above = np.triu_indices(centred.shape[1], 1)
    return plausible(np.sum(z[above] ** 2), len(above[0]))


def pairs_are_independent(sampler):
    return uncorrelated(inclusions(sampler) - PROB)


def steps_are_independent(sampler):
    return uncorrelated(inclusions(sampler)[:40].T - PROB)


def sizes_are_binomial(sampler):
    """Mean Nq and variance Nq(1 − q)."""
    sizes = inclusions(sampler).sum(1)
    variance = NUM_EXAMPLES * PROB * (1 - PROB)
    mean_is_right = abs(sizes.mean() - NUM_EXAMPLES * PROB) < 5 * (variance / NUM_DRAWS) ** 0.5
    deviations = np.sum((sizes - NUM_EXAMPLES * PROB) ** 2) / variance
    return mean_is_right and plausible(deviations, NUM_DRAWS)


CHECKS = [frequencies_are_right, pairs_are_independent, steps_are_independent, sizes_are_binomial]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_sampling_is_poisson(check):
    assert check(poisson)


@pytest.mark.parametrize(
    ("check", "faulty"),
    [
        (frequencies_are_right, favours_the_first),
        (pairs_are_independent, fixed_size),
        (pairs_are_independent, in_pairs),
        (steps_are_independent, same_every_other_step),
        (sizes_are_binomial, fixed_size),
        (sizes_are_binomial, in_pairs),
    ],
    ids=lambda f: f.__name__,
)
def test_the_checks_reject_samplers_that_are_not_poisson(check, faulty):
    assert not check(faulty)


# One draw.


def draw(seed=0, step=0, num_examples=1000, sampling_prob=0.5):
    return poisson_sample(seed, step, num_examples, sampling_prob)


def test_a_draw_is_reproducible_and_each_seed_and_step_has_its_own():
    np.testing.assert_array_equal(draw(seed=3, step=5), draw(seed=3, step=5))
    others = [draw(seed=3, step=6), draw(seed=4, step=5), draw(seed=5, step=3), draw(seed=2**80)]
    for other in others:
        # Two independent halves of 1000 share about 250; the same draw would share about 500.
        assert len(np.intersect1d(draw(seed=3, step=5), other)) < 320


def test_a_draw_is_sorted_without_repeats_and_in_range():
    rows = draw()
    assert np.all(np.diff(rows) > 0) and rows[0] >= 0 and rows[-1] < 1000
    assert draw(sampling_prob=0.0).tolist() == draw(num_examples=0).tolist() == []
    assert draw(num_examples=5, sampling_prob=1.0).tolist() == [0, 1, 2, 3, 4]


REFUSED = [
    *((draw, {"sampling_prob": bad}, "sampling_prob") for bad in (-0.1, 1.1, float("nan"))),
    (draw, {"num_examples": -1}, "num_examples"),
    *(
        (draw, {"seed": bad}, r"^a seed must be an integer from 0 to 2\^256")
        for bad in (-1, 2**256)
    ),
    *((pad, {"capacity": bad}, "capacity") for bad in (0, -4)),
    (pad, {"indices": np.array([3, 5, 3])}, "the batch has a row twice"),
    (pad, {"indices": np.array([0, sampling.PADDING])}, "from 0 to 2147483646"),
    (pad, {"indices": np.array([2**32, 1])}, "row numbers"),  # which as int32 would be row 0
    (pad, {"indices": np.array([-1, 1])}, "row numbers"),
    (pad, {"indices": np.array([0.2, 0.7])}, "row numbers must be integers"),
    (pad, {"indices": np.array([True, False])}, "row numbers must be integers"),
]


@pytest.mark.parametrize(("call", "wrong", "message"), REFUSED)
def test_a_bad_argument_is_refused_by_name(call, wrong, message):
    right = {"indices": np.arange(3), "capacity": 8, "seed": 0, "step": 1} if call is pad else {}
    with pytest.raises(ValueError, match=message):
        call(**right | wrong)


def test_the_words_of_a_draw_are_compared_with_q_as_integers():
    """At most q, by at most 2^-80: 16 bits decide, or with a tie 64 more."""
    num, q = 200_000, 0.3 + 2**-40
    key = seeds.host_key(5, "batches")
    halves = chacha.words(key, num // 2, chacha.nonce(chacha.Stream.BATCH, 9))
    bits = np.stack([halves & 0xFFFF, halves >> 16], axis=1).ravel()
    chosen = np.zeros(num, bool)
    chosen[poisson_sample(5, 9, num, q)] = True
    whole, rest = divmod(int(q * 2**16 * 2**32), 2**32)
    np.testing.assert_array_equal(chosen[bits != whole], bits[bits != whole] < whole)
    ties = np.flatnonzero(bits == whole)
    assert len(ties) > 0
    for i in ties:
        high = chacha.blocks(
            key, np.array([i], np.uint32), chacha.nonce(chacha.Stream.BATCH_TIES, 9)
        )[0, 0]
        assert chosen[i] == (high < rest)


def test_parts_and_permutations_are_uniform():
    counts = np.bincount(sampling.cycle_parts(3, 60_000, 7), minlength=7)
    assert stats.chisquare(counts).pvalue > LEVEL
    key = seeds.host_key(3, "batches")
    orders = [sampling.permutation(key, chacha.Stream.BATCH_PLACES, step, 3) for step in range(600)]
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 6 and stats.chisquare(counts).pvalue > LEVEL


# Padding.


@pytest.mark.parametrize(
    ("num_sampled", "capacity", "rows"),
    [(0, 4, 4), (3, 4, 4), (4, 4, 4), (5, 4, 8), (17, 4, 32), (0, 1, 1), (3, 3, 3), (7, 3, 12)],
)
def test_padding_doubles_until_it_holds_all_and_cuts_none(num_sampled, capacity, rows):
    sampled = np.arange(10, 10 + num_sampled)
    padded = pad(sampled, capacity, 0, 1)
    assert padded.indices.shape == padded.mask.shape == (rows,)
    np.testing.assert_array_equal(np.sort(padded.indices[padded.mask]), sampled)
    assert padded.mask.sum() == num_sampled
    assert np.all(padded.indices[~padded.mask] == sampling.PADDING)


def test_padding_takes_zeros_where_there_is_no_example_and_nothing_else_names_one():
    data = {"x": jnp.arange(1.0, 21).reshape(10, 2), "y": jnp.arange(1, 11)}
    batch = pad(np.array([2, 9]), 5, 0, 1)
    taken = batch.take(data)
    for name, x in data.items():
        expected = np.zeros((5, *x.shape[1:]))
        expected[batch.mask] = x[batch.indices[batch.mask]]
        np.testing.assert_array_equal(taken[name], expected)
        on_the_host = sampling.rows_or_zeros(np.asarray(x), *batch)
        np.testing.assert_array_equal(on_the_host, expected)
    with pytest.raises(IndexError):
        np.arange(10)[batch.indices]


@pytest.mark.parametrize("overflow_prob", [1e-9, 1e-12])
@pytest.mark.parametrize(
    ("num_examples", "sampling_prob"), [(50_000, 0.08), (1000, 0.01), (100, 1.0), (10, 0.0)]
)
def test_the_usual_capacity_is_the_smallest_that_is_rarely_filled(
    num_examples, sampling_prob, overflow_prob
):
    rows = usual_capacity(num_examples, sampling_prob, overflow_prob)
    filled = lambda rows: stats.binom.sf(rows - 1, num_examples, sampling_prob)  # noqa: E731
    assert filled(rows) <= overflow_prob or rows == num_examples
    assert rows == 1 or filled(rows - 1) > overflow_prob
    assert rows <= num_examples


def test_a_row_that_the_data_do_not_have_is_refused_and_traced_it_is_no_other():
    batch = pad(np.array([1, 5]), 4, 0, 1)
    with pytest.raises(IndexError, match="row number 5 is outside of an array with 3 rows"):
        batch.take(jnp.arange(3.0))
    taken = jax.jit(lambda batch: batch.take(jnp.arange(1.0, 4)))(batch)
    np.testing.assert_array_equal(np.sort(taken), [0, 0, 2, np.nan])
