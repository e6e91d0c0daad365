"""Transforms keep their bounds, noise has its declared scale, and `privatize` is both."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import bam
from bam.core import pytree
from bam.core.clipping import BoundedTransformation, sensitivity_of
from bam.core.noise import GaussianNoiseState, advance_noise
from tests import cases


def new_key():
    return bam.seeded_key(7)


BOUNDED = {
    "clip_by_l2_norm": bam.clip_by_l2_norm(0.7),
    "normalize": bam.normalize(0.7),
    "clip_per_layer": bam.clip_per_layer(0.7),
    "clip_per_layer_tree": bam.clip_per_layer({"a": 0.3, "b": 0.5}),
    "chain": bam.chain(optax.scale(1e3), bam.clip_by_l2_norm(0.7)),
}


def apply(transform, grads):
    return transform.update(grads, transform.init(grads))[0]


def clip(values, clip_norm=1.0, dtype=jnp.float32):
    return apply(bam.clip_by_l2_norm(clip_norm), jnp.asarray(values, dtype))


# clip_by_l2_norm: the table of edge cases in its docstring.


def test_clipping_scales_a_long_gradient_to_the_bound():
    np.testing.assert_allclose(clip([3.0, 4.0]), [0.6, 0.8], rtol=1e-6)


def test_clipping_takes_one_norm_over_all_leaves_together():
    clipped = apply(bam.clip_by_l2_norm(1.0), {"a": jnp.array([3.0]), "b": jnp.array([[4.0]])})
    cases.assert_close(clipped, {"a": jnp.array([0.6]), "b": jnp.array([[0.8]])})


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("clip_norm", [5.0, 6.0, math.inf])
def test_a_gradient_within_the_bound_is_unchanged_to_the_bit(dtype, clip_norm):
    grads = jnp.array([3.0, -4.0, 0.0], dtype)
    cases.assert_same_bits(clip(grads, clip_norm, dtype), grads)


@pytest.mark.parametrize("clip_norm", [0.0, 1.0, math.inf])
@pytest.mark.parametrize("name", ["nan", "inf", "inf and -inf", "all nan", "largest float32"])
def test_a_gradient_of_no_finite_norm_becomes_zero(clip_norm, name):
    cases.assert_same_bits(clip(cases.ADVERSARIAL[name], clip_norm), jnp.zeros(3))


@pytest.mark.parametrize("name", ["zero", "large", "square just fits", "mixed scales"])
def test_a_bound_of_zero_makes_zero(name):
    cases.assert_same_bits(clip(cases.ADVERSARIAL[name], 0.0), jnp.zeros(3))


def test_a_bound_of_zero_makes_zero_even_where_squares_underflow():
    assert not np.any(np.asarray(clip([1e-25, 0.0], 0.0)))


def test_a_gradient_whose_squares_underflow_is_unchanged():
    grads = jnp.array([1e-25, -1e-30])
    cases.assert_same_bits(clip(grads), grads)


def test_clipping_keeps_dtypes_and_mixed_trees():
    grads = {"a": jnp.full(4, 9, jnp.bfloat16), "b": jnp.full((2, 2), 9, jnp.float32)}
    clipped = apply(bam.clip_by_l2_norm(1.0), grads)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), clipped) == jax.tree.map(
        lambda x: (x.shape, x.dtype), grads
    )


@pytest.mark.parametrize("make", [bam.clip_by_l2_norm, bam.normalize, bam.clip_per_layer])
@pytest.mark.parametrize("bad", [-1.0, math.nan, 1e-13, -math.inf])
def test_a_bad_clip_norm_is_refused_by_name(make, bad):
    with pytest.raises(ValueError, match="clip_norm"):
        make(bad)


# normalize and clip_per_layer.


def test_normalize_scales_every_gradient_to_just_below_the_bound():
    normalized = apply(bam.normalize(2.0, gamma=1.0), jnp.array([0.0, 3.0]))
    np.testing.assert_allclose(normalized, [0.0, 1.5], rtol=1e-6)
    tiny = apply(bam.normalize(1.0, gamma=0.01), jnp.array([1e-4, 0.0]))
    np.testing.assert_allclose(tiny, [1e-4 / 0.0101, 0.0], rtol=1e-5)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_normalize_refuses_a_bad_gamma_and_an_infinite_bound(bad):
    with pytest.raises(ValueError, match="gamma"):
        bam.normalize(1.0, gamma=bad)
    with pytest.raises(ValueError, match="clip_norm"):
        bam.normalize(math.inf)


def test_clip_per_layer_shares_one_bound_equally():
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.1, 0.0])}
    per_layer = bam.clip_per_layer(math.sqrt(2.0))  # one for each of two layers
    assert per_layer.sensitivity == pytest.approx(math.sqrt(2.0))
    expected = {"a": jnp.array([0.6, 0.8]), "b": jnp.array([0.1, 0.0])}
    cases.assert_close(apply(per_layer, grads), expected)


def test_clip_per_layer_takes_a_bound_for_each_layer():
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.0, 100.0])}
    per_layer = bam.clip_per_layer({"a": 3.0, "b": 4.0})
    assert per_layer.sensitivity == 5.0
    expected = {"a": jnp.array([1.8, 2.4]), "b": jnp.array([0.0, 4.0])}
    cases.assert_close(apply(per_layer, grads), expected)


def test_clip_per_layer_drops_the_whole_example_for_one_bad_leaf():
    grads = {"a": jnp.array([jnp.nan, 4.0]), "b": jnp.array([0.1, 0.0])}
    cases.assert_same_bits(
        apply(bam.clip_per_layer(1.0), grads), jax.tree.map(jnp.zeros_like, grads)
    )


# The promise every bounded transform makes.


@functools.cache
def compiled(transform):
    return jax.jit(functools.partial(apply, transform))


def largest_norm(transform, dtype=jnp.float32):
    """Largest output norm, in float64, over adversarial gradients cut into two leaves."""
    gradients = [np.asarray(g, np.float64) for g in cases.ADVERSARIAL.values()]
    rng = np.random.default_rng(0)
    gradients += [rng.normal(size=3) * 10.0**scale for scale in range(-6, 5)]
    with np.errstate(over="ignore"):
        trees = [
            {"a": jnp.asarray(g[:2], dtype), "b": jnp.asarray(g[2:], dtype)} for g in gradients
        ]
    norms = [cases.norm64(compiled(transform)(g)) for g in trees]
    return max(math.inf if math.isnan(n) else n for n in norms)


@pytest.mark.parametrize("name", BOUNDED)
def test_no_gradient_gets_past_the_declared_bound(name):
    # Float32 rounding is the one excess allowed.
    assert largest_norm(BOUNDED[name]) <= BOUNDED[name].sensitivity * (1 + 5e-7)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["clip_by_l2_norm", "normalize", "clip_per_layer"])
def test_rounding_to_half_precision_stays_below_the_bound(name, dtype):
    assert largest_norm(BOUNDED[name], dtype) <= BOUNDED[name].sensitivity


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_rounding_towards_zero_gives_the_nearest_number_that_is_no_larger(dtype):
    rng = np.random.default_rng(0)
    values = rng.normal(size=5000) * 10.0 ** rng.integers(-33, 30, 5000)
    largest = float(jnp.finfo(dtype).max)
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.float32([*values, 0, 1, largest, largest * 1.2, -6.1e-5, 5.9e-8, 2e-3])
        nearest = values.astype(dtype)
    rounded = np.asarray(jax.jit(lambda x: pytree.round_towards_zero(x, dtype))(values))
    bits = nearest.view(f"u{nearest.itemsize}")
    grew = ~(np.abs(nearest.astype(np.float64)) <= np.abs(values))  # of float8 also NaN for inf
    below = np.where(grew, bits - 1, bits).astype(bits.dtype).view(dtype)
    too_large = np.abs(values) > largest
    expected = np.where(too_large, np.copysign(largest, values), below.astype(np.float64))
    np.testing.assert_array_equal(rounded.astype(np.float64), expected)
    assert grew.any()  # control: rounding to nearest is another thing
    assert np.isnan(np.float64(pytree.round_towards_zero(jnp.array(jnp.nan), dtype)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("clip_norm", [1.0, 1e-3])
def test_many_equal_half_precision_entries_stay_below_the_bound(dtype, clip_norm):
    for num_entries in (101, 9_999):  # the worst case: every entry is rounded the same way
        norm = cases.norm64(clip(np.ones(num_entries), clip_norm, dtype))
        assert norm <= clip_norm


@pytest.mark.parametrize(
    "faulty",
    [
        BoundedTransformation(*bam.clip_by_l2_norm(0.7), 0.69),
        BoundedTransformation(*optax.identity(), 0.7),
        BoundedTransformation(*optax.clip_by_global_norm(0.7), 0.7),  # passes NaN on
        BoundedTransformation(*optax.chain(bam.clip_by_l2_norm(0.7), optax.scale(1.01)), 0.7),
        optax.GradientTransformation(
            *bam.clip_by_l2_norm(0.7)
        ),  # right, but no longer declares a bound
    ],
    ids=["bound too small", "unbounded", "passes NaN on", "scaled after", "undeclared"],
)
def test_the_bound_check_catches_a_transform_that_lies(faulty):
    bound = getattr(faulty, "sensitivity", 0.0)
    assert not largest_norm(faulty) <= bound * (1 + 5e-7)


def test_a_negative_or_nan_bound_cannot_be_declared():
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="sensitivity"):
            BoundedTransformation(*optax.identity(), bad)


# chain, and what refuses an undeclared bound.


def test_the_bound_of_a_chain_is_that_of_its_last_member():
    chained = bam.chain(bam.clip_by_l2_norm(9.0), optax.scale(10.0), bam.normalize(0.5))
    assert chained.sensitivity == 0.5
    nested = bam.chain(optax.scale(10.0), bam.chain(bam.clip_by_l2_norm(0.25)))
    assert nested.sensitivity == 0.25


@pytest.mark.parametrize("transforms", [(), (bam.clip_by_l2_norm(1.0), optax.scale(2.0))])
def test_a_chain_that_does_not_end_bounded_is_refused(transforms):
    with pytest.raises(ValueError, match="bounded"):
        bam.chain(*transforms)


@pytest.mark.parametrize(
    "transform",
    [
        optax.clip_by_global_norm(1.0),
        optax.chain(optax.scale(1.0), bam.clip_by_l2_norm(1.0)),
        optax.chain(bam.clip_by_l2_norm(1.0), optax.scale(2.0)),
    ],
    ids=["optax clip", "optax.chain ending bounded", "optax.chain ending unbounded"],
)
def test_a_transform_that_declares_no_bound_is_refused_everywhere(transform):
    with pytest.raises(ValueError, match="bound"):
        sensitivity_of(transform)
    with pytest.raises(ValueError, match="bound"):
        bam.privatize(transform, 1.0, 4, new_key())
    with pytest.raises(ValueError, match="bound"):
        bam.clipped_sum(lambda w, x: x, transform, jnp.zeros(2), jnp.ones((3, 2)), mask=None)


def test_an_infinite_bound_is_refused_by_privatize():
    for transform in (bam.clip_by_l2_norm(math.inf), bam.clip_per_layer(math.inf)):
        with pytest.raises(ValueError, match="finite"):
            bam.privatize(transform, 1.0, 4, new_key())


# Noise.


def noise_of(noise_multiplier, sensitivity, key=None, num_steps=1):
    """Noise on two leaves of zeros: one pytree for each step."""
    clip = bam.clip_by_l2_norm(sensitivity)
    tx = bam.privatize(clip, noise_multiplier, 1, new_key() if key is None else key)
    zeros = {"a": jnp.zeros((80, 100)), "b": jnp.zeros(8000)}
    state, draws = tx.init(zeros), []
    for _ in range(num_steps):
        rows = jax.tree.map(lambda x: x[None], zeros)
        noised, state = tx.update(rows, state, mask=jnp.array([False]))
        draws.append(jax.tree.map(lambda x: np.asarray(x, np.float64).ravel(), noised))
    return draws


def has_stddev(sample, stddev):
    """Chi-square test of N(0, stddev²) at level 1e-6, two-sided, and of a zero mean."""
    n = len(sample)
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], n)
    return low < np.sum((sample / stddev) ** 2) < high and abs(sample.mean()) < 5 * stddev / n**0.5


def test_noise_has_the_stddev_of_multiplier_times_sensitivity():
    (noise,) = noise_of(1.5, 4.0)
    for leaf in noise.values():
        assert has_stddev(leaf, 6.0)
        for fault in (2 / 3, 3 / 2, 1.1, 1 / 4, 1 / 1.5):
            assert not has_stddev(leaf, 6.0 * fault)
        assert stats.kstest(leaf / 6.0, "norm").pvalue > 1e-6


def test_noise_is_independent_across_leaves_and_steps():
    first, second = noise_of(1.0, 1.0, num_steps=2)
    leaves = [first["a"], first["b"], second["a"], second["b"]]
    correlations = np.corrcoef(leaves)[np.triu_indices(4, 1)]
    assert np.max(np.abs(correlations)) < 5 / 8000**0.5
    # Control: a key used twice gives the same noise, a correlation of one.
    (again,) = noise_of(1.0, 1.0)
    assert np.corrcoef(first["a"], again["a"])[0, 1] == pytest.approx(1.0)


def test_noise_depends_on_the_key_alone():
    draw = lambda key: noise_of(1.0, 1.0, key)[0]["a"]  # noqa: E731
    np.testing.assert_array_equal(draw(new_key()), draw(new_key()))
    assert abs(np.corrcoef(draw(new_key()), draw(bam.seeded_key(8)))[0, 1]) < 5 / 8000**0.5


@pytest.mark.parametrize("bad", [-1.0, math.inf, math.nan])
def test_bad_noise_is_refused_by_name(bad):
    with pytest.raises(ValueError, match="noise_multiplier"):
        bam.privatize(bam.clip_by_l2_norm(1.0), bad, 4, new_key())


# privatize.

ROWS = jnp.array([[3.0, 4.0], [0.0, 0.5], [30.0, 40.0]])  # clipped: (.6, .8), (0, .5), (.6, .8)


def private_mean(rows, noise_multiplier=0.0, expected_batch_size=4, mask=None):
    tx = bam.privatize(bam.clip_by_l2_norm(1.0), noise_multiplier, expected_batch_size, new_key())
    return tx.update(rows, tx.init(rows[0] if len(rows) else jnp.zeros(2)), mask=mask)[0]


def test_privatize_divides_by_the_expected_batch_size_never_the_realised_one():
    np.testing.assert_allclose(private_mean(ROWS), [0.3, 0.525], rtol=1e-6)
    np.testing.assert_allclose(private_mean(ROWS[:2]), [0.15, 0.325], rtol=1e-6)


def test_privatize_is_the_clipped_sum_with_its_noise_over_the_expected_batch_size_to_the_bit():
    mask = jnp.array([True, False, True])
    state = GaussianNoiseState(new_key(), jnp.zeros((), jnp.int32))
    noise, _ = advance_noise(state, 1.5, 1.0)
    total, _ = bam.clipped_sum(
        lambda w, x: x, bam.clip_by_l2_norm(1.0), jnp.zeros(2), ROWS,
        mask=mask, microbatch_size=1, noise=noise,
    )  # fmt: skip
    cases.assert_same_bits(private_mean(ROWS, 1.5, 4, mask), total / 4)


def test_privatize_equals_clipped_sum_plus_noise_over_the_expected_batch_size():
    clip_tx = bam.clip_by_l2_norm(1.0)
    mask = jnp.array([True, False, True])
    total, _ = bam.clipped_sum(lambda w, x: x, clip_tx, jnp.zeros(2), ROWS, mask=mask)
    noised = total + private_mean(ROWS[:0], 1.5, 1)
    # Cut to the noise's grid example by example, or rounded to it once: 1.5 / 2^20 for each of 3.
    grid_and_bits = 3 * 1.5 / 2**20 / 4 + 1e-6 * np.abs(noised / 4)
    assert np.all(np.abs(private_mean(ROWS, 1.5, 4, mask) - noised / 4) <= grid_and_bits)


def test_privatize_gives_masked_rows_no_say_whatever_they_hold():
    mask = jnp.array([True, True, False])
    clean = private_mean(ROWS[:2], 1.0)
    for junk in (jnp.nan, jnp.inf, 1e30):
        cases.assert_same_bits(private_mean(ROWS.at[2].set(junk), 1.0, mask=mask), clean)


def test_privatize_gives_an_empty_batch_pure_noise():
    noise = bam.gaussian_noise(bam.clip_by_l2_norm(1.0), 1.0, new_key())
    pure = noise.draws_of_device(2)[:2] * np.float32(noise.spacing) / 4
    assert jnp.all(pure != 0)
    cases.assert_same_bits(private_mean(ROWS[:0], 1.0), pure)
    cases.assert_same_bits(private_mean(ROWS, 1.0, mask=jnp.zeros(3, bool)), pure)


def test_privatize_draws_new_noise_each_step_inside_an_optax_chain():
    tx = optax.chain(bam.privatize(bam.clip_by_l2_norm(1.0), 1.0, 4, new_key()), optax.sgd(1.0))
    state, updates = tx.init(jnp.zeros(2)), []
    for _ in range(2):
        update, state = tx.update(ROWS, state, jnp.zeros(2), mask=jnp.array([True, True, False]))
        updates.append(update)
    assert not np.any(np.asarray(updates[0]) == np.asarray(updates[1]))


def test_removing_an_example_moves_a_bfloat16_sum_by_at_most_the_sensitivity():
    # 258 rows of norm 1: bfloat16 cannot hold 257, so a sum rounded to it would move by 2.
    rows = jnp.ones((258, 1), jnp.bfloat16)
    mean = lambda r: private_mean(r, expected_batch_size=1).astype(jnp.float32)  # noqa: E731
    assert abs(float(mean(rows)[0] - mean(rows[:-1])[0])) <= 1.0


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf])
def test_privatize_refuses_a_bad_expected_batch_size_by_name(bad):
    with pytest.raises(ValueError, match="expected_batch_size"):
        bam.privatize(bam.clip_by_l2_norm(1.0), 1.0, bad, new_key())


def test_privatize_refuses_an_ordinary_gradient():
    params = {"w": jnp.zeros((4, 3))}
    tx = bam.privatize(bam.clip_by_l2_norm(1.0), 1.0, 4, new_key())
    with pytest.raises(ValueError, match="per-example gradients"):
        tx.update({"w": jnp.ones((4, 3))}, tx.init(params), params, mask=None)
    updates, _ = tx.update({"w": jnp.ones((2, 4, 3))}, tx.init(params), params, mask=None)
    assert updates["w"].shape == (4, 3)


def test_normalize_refuses_a_gamma_that_norms_could_underflow():
    with pytest.raises(ValueError, match="gamma"):
        bam.normalize(1.0, gamma=1e-20)


def test_bounds_of_other_leaves_than_the_gradient_has_are_refused():
    clip = bam.clip_per_layer({"a": 1.0, "b": 1.0})
    with pytest.raises(ValueError, match="clip_norm must be a number, or a tree of numbers"):
        clip.update({"a": jnp.ones(2)}, clip.init(None))
