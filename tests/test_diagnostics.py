"""Clipping bias of batches whose answer can be worked out by hand."""

import jax.numpy as jnp
import pytest

import bam
from bam.diagnostics import clipping_bias


def given(params, example):
    """A gradient oracle whose gradients are the examples themselves."""
    return example


def test_no_gradient_above_the_clip_norm_means_no_bias():
    rows = jnp.array([[0.3, 0.4], [0.0, -1.0]])
    bias = clipping_bias(given, bam.clip_by_l2_norm(1.0), jnp.zeros(2), rows)
    assert bias.bias_norm == 0
    assert bias.relative_bias == 0
    assert bias.cosine == pytest.approx(1.0)


def test_bias_of_two_clipped_gradients_is_what_one_computes_by_hand():
    # Means: (3, 4)/2 + (0, 1)/2 = (1.5, 2.5); clipped (0.6, 0.8)/2 + (0, 1)/2 = (0.3, 0.9).
    rows = jnp.array([[3.0, 4.0], [0.0, 1.0]])
    bias = clipping_bias(given, bam.clip_by_l2_norm(1.0), jnp.zeros(2), rows)
    assert bias.bias_norm == pytest.approx((1.2**2 + 1.6**2) ** 0.5)
    assert bias.gradient_norm == pytest.approx((1.5**2 + 2.5**2) ** 0.5)
    assert bias.relative_bias == pytest.approx(2.0 / 8.5**0.5)
    assert bias.cosine == pytest.approx((0.3 * 1.5 + 0.9 * 2.5) / (0.9**0.5 * 8.5**0.5))


def test_masked_rows_and_microbatches_do_not_change_the_bias():
    rows = jnp.array([[3.0, 4.0], [0.0, 1.0], [jnp.nan, 7.0]])
    clip = bam.clip_by_l2_norm(1.0)
    plain = clipping_bias(given, clip, jnp.zeros(2), rows[:2])
    mask = jnp.array([True, True, False])
    masked = clipping_bias(given, clip, jnp.zeros(2), rows, mask=mask, microbatch_size=1)
    assert [float(x) for x in masked] == pytest.approx([float(x) for x in plain])


def test_zero_gradients_have_zero_relative_bias_not_nan():
    bias = clipping_bias(given, bam.clip_by_l2_norm(1.0), jnp.zeros(2), jnp.zeros((2, 2)))
    assert [float(x) for x in bias] == [0, 0, 0, 0]
