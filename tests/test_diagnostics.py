"""Clipping bias of batches whose answer can be worked out by hand, and the paper's identities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bam
from bam.core import pytree
from bam.training import diagnostics
from bam.training.diagnostics import bias_aware_objective, clipping_bias
from tests import cases


def given(params, example):
    """A gradient oracle whose gradients are the examples themselves."""
    return example


def mlp_means(oracle=None, clip_norm=0.5, num_rows=16, **options):
    oracle = oracle or bam.dp_sgd(cases.mlp_loss)
    return diagnostics.means(
        oracle.grad,
        bam.clip_by_l2_norm(clip_norm),
        cases.mlp_params(),
        cases.mlp_batch(num_rows),
        **options,
    )


def flat(tree_of_arrays):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree_of_arrays)])


# Bias.


def test_no_gradient_above_the_clip_norm_means_no_bias():  # Lemma 2
    rows = jnp.array([[0.3, 0.4], [0.0, -1.0]])
    bias = clipping_bias(given, bam.clip_by_l2_norm(1.0), jnp.zeros(2), rows)
    assert bias.bias_norm == 0
    assert bias.relative_bias == 0
    assert bias.cosine == pytest.approx(1.0)
    assert bias.magnitude == pytest.approx(1.0)


def test_bias_of_two_clipped_gradients_is_what_one_computes_by_hand():
    # Means: (3, 4)/2 + (0, 1)/2 = (1.5, 2.5); clipped (0.6, 0.8)/2 + (0, 1)/2 = (0.3, 0.9).
    rows = jnp.array([[3.0, 4.0], [0.0, 1.0]])
    bias = clipping_bias(given, bam.clip_by_l2_norm(1.0), jnp.zeros(2), rows)
    assert bias.bias_norm == pytest.approx((1.2**2 + 1.6**2) ** 0.5)
    assert bias.gradient_norm == pytest.approx((1.5**2 + 2.5**2) ** 0.5)
    assert bias.relative_bias == pytest.approx(2.0 / 8.5**0.5)
    assert bias.cosine == pytest.approx((0.3 * 1.5 + 0.9 * 2.5) / (0.9**0.5 * 8.5**0.5))
    # a = (0.3, 0.9)·(1.5, 2.5)/8.5 and c = (0.3, 0.9) − a·(1.5, 2.5).
    a = 2.7 / 8.5
    assert bias.magnitude == pytest.approx(a)
    assert bias.direction_norm == pytest.approx(np.hypot(0.3 - 1.5 * a, 0.9 - 2.5 * a))


def test_masked_rows_and_microbatches_do_not_change_the_bias():
    rows = jnp.array([[3.0, 4.0], [0.0, 1.0], [jnp.nan, 7.0]])
    clip = bam.clip_by_l2_norm(1.0)
    plain = clipping_bias(given, clip, jnp.zeros(2), rows[:2])
    mask = jnp.array([True, True, False])
    masked = clipping_bias(given, clip, jnp.zeros(2), rows, mask=mask, microbatch_size=1)
    assert [float(x) for x in masked] == pytest.approx([float(x) for x in plain])


def test_zero_gradients_have_zero_relative_bias_not_nan():
    bias = clipping_bias(given, bam.clip_by_l2_norm(1.0), jnp.zeros(2), jnp.zeros((2, 2)))
    assert bias._asdict() == {
        "bias_norm": 0, "relative_bias": 0, "magnitude": 1, "direction_norm": 0, "cosine": 0,
        "gradient_norm": 0,
    }  # fmt: skip


def test_noise_adds_no_bias():  # Lemma 1
    key, sum_of_two = bam.seeded_key(0), jnp.array([0.6, 1.8])
    clip, rows = bam.clip_by_l2_norm(1.0), jnp.array([[0.6, 0.8], [0.0, 1.0]])

    def draw(key, step):
        noise = bam.gaussian_noise(clip, 2.0, key, step)
        return key, bam.clipped_sum(given, clip, jnp.zeros(2), rows, mask=None, noise=noise)[0]

    num_draws = 4000
    _, draws = jax.lax.scan(draw, key, jnp.arange(num_draws))
    five_sigma = 5 * 2.0 / num_draws**0.5
    np.testing.assert_allclose(draws.mean(axis=0), sum_of_two, atol=five_sigma)
    biased = jnp.maximum(draws, -1.0)  # the negative control: cutting the noise off is seen
    assert np.abs(biased.mean(axis=0) - sum_of_two).max() > five_sigma


# Theorem 1.


@pytest.mark.parametrize("clip_norm", [0.05, 0.5, 5.0])
def test_the_clipped_mean_is_a_times_the_mean_plus_c_as_theorem_1_writes_them(clip_norm):
    oracle, params, batch = bam.dp_sgd(cases.mlp_loss), cases.mlp_params(), cases.mlp_batch(16)
    g = np.stack([flat(oracle.grad(params, cases.row(batch, i))) for i in range(16)])
    g = g.astype(np.float64)
    mean = g.mean(axis=0)
    eta = g @ mean / (mean @ mean)
    tau = g - eta[:, None] * mean
    m = np.maximum(1, np.linalg.norm(g, axis=1) / clip_norm)
    a, c = np.mean(eta / m), np.mean(tau / m[:, None], axis=0)

    found = mlp_means(clip_norm=clip_norm)
    bias = diagnostics.bias(found.clipped, found.gradient)
    np.testing.assert_allclose(flat(found.clipped), a * mean + c, atol=1e-6)
    assert bias.magnitude == pytest.approx(a, rel=1e-5)
    assert bias.direction_norm == pytest.approx(np.linalg.norm(c), rel=1e-4, abs=1e-6)
    assert abs(c @ mean) < 1e-12
    parts = (1 - bias.magnitude) ** 2 * bias.gradient_norm**2 + bias.direction_norm**2
    assert bias.bias_norm**2 == pytest.approx(float(parts), rel=1e-4, abs=1e-9)


# Means, and what is said of them.


def test_fraction_clipped_and_norms_are_those_of_the_examples():
    rows = jnp.array([[3.0, 4.0], [0.0, 1.0], [0.3, 0.4], [jnp.nan, 0.0], [9.0, 9.0]])
    mask = jnp.array([True, True, True, True, False])
    found = diagnostics.means(given, bam.clip_by_l2_norm(1.0), jnp.zeros(2), rows, mask=mask)
    assert found.fraction_clipped == pytest.approx(1 / 4)
    np.testing.assert_allclose(found.norms, [5.0, 1.0, 0.5, np.nan, np.nan])
    np.testing.assert_allclose(found.gradient, [3.3 / 4, 5.4 / 4], rtol=1e-6)


def test_means_do_not_depend_on_microbatches_and_memory_does_not_grow_with_rows():
    one, all_at_once = mlp_means(microbatch_size=1), mlp_means(microbatch_size=16)
    cases.assert_close(one, all_at_once)

    def temporary_bytes(num_rows):
        width = 10_000  # so that one gradient outweighs everything that is kept per row
        lowered = jax.jit(
            lambda params, rows: diagnostics.means(
                lambda p, x: jnp.cos(p * x), bam.clip_by_l2_norm(1.0), params, rows,
                microbatch_size=2,
            )
        ).lower(jnp.ones(width), jnp.arange(num_rows, dtype=float))  # fmt: skip
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(512) < 1.1 * temporary_bytes(32)


def test_the_mean_cosine_is_that_of_the_examples():
    oracle, params, batch = bam.dp_sgd(cases.mlp_loss), cases.mlp_params(), cases.mlp_batch(16)
    g = np.stack([flat(oracle.grad(params, cases.row(batch, i))) for i in range(16)])
    mean = g.mean(axis=0)
    cosines = g @ mean / np.linalg.norm(g, axis=1) / np.linalg.norm(mean)
    found = mlp_means()
    said = diagnostics.describe(found, found, found.gradient, noise_std=0.0)
    assert said["cosine_examples"] == pytest.approx(cosines.mean(), rel=1e-5)
    assert said["cosine_previous"] == pytest.approx(1.0)
    assert "snr" not in said


def test_a_method_is_compared_with_its_own_gradient_and_with_the_plain_one():
    own, plain = mlp_means(bam.bam_sam(cases.mlp_loss, radius=0.3)), mlp_means()
    said = diagnostics.describe(own, plain, plain.gradient, noise_std=0.1)
    for prefix, clipped, reference in (
        ("", own.clipped, own.gradient),
        ("against_plain/", own.clipped, plain.gradient),
        ("plain/", plain.clipped, plain.gradient),
    ):
        distance = cases.distance(clipped, reference)
        assert said[f"{prefix}bias_norm"] == pytest.approx(distance, rel=1e-4)
    assert len({float(said[f"{p}bias_norm"]) for p in ("", "against_plain/", "plain/")}) == 3
    num_params = pytree.num_params(cases.mlp_params())
    assert said["snr"] == pytest.approx(cases.norm64(own.clipped) / (0.1 * num_params**0.5))
    assert said["norm_quantile_50"] == pytest.approx(np.median(own.norms))
    assert said["plain/mean_norm"] == pytest.approx(np.mean(plain.norms))


def test_groups_merged_to_larger_batches_have_the_bias_of_those_batches():
    batch, clip = cases.mlp_batch(16), bam.clip_by_l2_norm(0.5)
    oracle, params = bam.dp_sgd(cases.mlp_loss), cases.mlp_params()

    def means_of(rows):
        return diagnostics.means(oracle.grad, clip, params, jax.tree.map(lambda x: x[rows], batch))

    groups = (means_of(np.arange(start, start + 2)) for start in range(0, 16, 2))
    found = diagnostics.bias_by_batch_size(groups, smallest=2, largest=8)
    assert list(found) == ["2", "4", "8"]
    halves = [means_of(np.arange(8)), means_of(np.arange(8, 16))]
    norms = [float(diagnostics.bias(half.clipped, half.gradient).bias_norm) for half in halves]
    assert found["8"]["bias_norm"] == pytest.approx(np.mean(norms), rel=1e-5)


# The objective, L_BAO.


def test_the_exact_oracle_is_the_gradient_of_the_objective():
    params, example = cases.mlp_params(), cases.row(cases.mlp_batch(1), 0)
    objective = bias_aware_objective(cases.mlp_loss, penalty=0.1)
    cases.assert_close(
        bam.bam_exact(cases.mlp_loss, penalty=0.1).grad(params, example),
        jax.grad(objective)(params, example),
    )


def test_the_objective_bounds_the_batch_gradient_penalty_from_above():  # Lemma 3
    penalty, params, batch = 0.7, cases.mlp_params(), cases.mlp_batch(16)
    objectives = jax.vmap(bias_aware_objective(cases.mlp_loss, penalty), (None, 0))(params, batch)
    losses = jax.vmap(cases.mlp_loss, (None, 0))(params, batch)
    found = mlp_means()
    of_batch = jnp.mean(losses) + penalty * pytree.l2_norm(found.gradient)
    assert of_batch < jnp.mean(objectives)
    assert jnp.mean(objectives) == pytest.approx(
        float(jnp.mean(losses) + penalty * jnp.nanmean(found.norms)), rel=1e-5
    )


def test_lemma_3_is_an_equality_when_all_gradients_are_one_and_strict_when_they_cancel():
    # Gradients (3, 4) twice: both sides 12.5 + 5λ. (3, 4) and (-3, -4): 12.5 against 12.5 + 5λ.
    at = jnp.zeros(2)
    for rows, of_batch in (
        ([[-3.0, -4.0], [-3.0, -4.0]], 13.0),
        ([[3.0, 4.0], [-3.0, -4.0]], 12.5),
    ):
        examples = jnp.array(rows)
        objective = bias_aware_objective(cases.quadratic, penalty=0.1)
        assert jnp.mean(jax.vmap(objective, (None, 0))(at, examples)) == pytest.approx(13.0)
        mean_gradient = jnp.mean(at - examples, axis=0)
        assert 12.5 + 0.1 * pytree.l2_norm(mean_gradient) == pytest.approx(of_batch)
