"""The engine agrees with Google's jax-privacy on the same loss, batch and clip norm."""

import functools

import jax
import pytest

import bam
from tests import cases

clipping = pytest.importorskip("jax_privacy.clipping")

PARAMS, BATCH = cases.mlp_params(), cases.mlp_batch(6)
CLIP_NORM = 1.0


def our_sum(oracle, clip_norm=CLIP_NORM):
    total = functools.partial(bam.clipped_sum, oracle.grad, bam.clip_by_l2_norm(clip_norm))
    return jax.jit(functools.partial(total, mask=None, microbatch_size=2))(PARAMS, BATCH)


def test_dp_sgd_equals_clipped_grad_of_jax_privacy():
    theirs, aux = jax.jit(
        clipping.clipped_grad(
            cases.mlp_loss, l2_clip_norm=CLIP_NORM, keep_batch_dim=False, return_grad_norms=True
        )
    )(PARAMS, BATCH)
    ours, norms = our_sum(bam.dp_sgd(cases.mlp_loss))
    cases.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    cases.assert_close(norms, aux.grad_norms, rtol=1e-5, atol=1e-5)
    # Controls: some rows are clipped, some are not, and another bound gives another sum.
    assert min(norms) < CLIP_NORM < max(norms)
    other, _ = our_sum(bam.dp_sgd(cases.mlp_loss), 1.01 * CLIP_NORM)
    assert cases.distance(other, theirs) > 1e-3


def test_bam_inside_clipped_fun_of_jax_privacy_equals_bam_inside_ours():
    oracle = bam.bam_sam(cases.mlp_loss, 0.1)
    theirs = jax.jit(
        clipping.clipped_fun(
            oracle.grad, batch_argnums=1, keep_batch_dim=False, l2_clip_norm=CLIP_NORM
        )
    )(PARAMS, BATCH)
    ours, _ = our_sum(oracle)
    cases.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    plain, _ = our_sum(bam.dp_sgd(cases.mlp_loss))  # control: BAM is not DP-SGD
    assert cases.distance(plain, theirs) > 1e-3
