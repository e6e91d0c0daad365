"""The engine agrees with Google's jax-privacy on the same loss, batch and clip norm."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bam
from bam.audit import canary
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


# Its cases of clipping that have an edge: the gradient and the bound -> what is left of it.
NAN, INF = float("nan"), float("inf")
EDGES = {
    "zero": ([0.0, 0.0], 1.0, [0.0, 0.0]),
    "short": ([0.3, 0.4], 1.0, [0.3, 0.4]),
    "as long as the bound": ([3.0, 4.0], 5.0, [3.0, 4.0]),
    "long": ([3.0, 4.0], 1.0, [0.6, 0.8]),
    "NaN": ([NAN, NAN], 1.0, [0.0, 0.0]),
    "NaN in an entry": ([NAN, 1.0], 1.0, [0.0, 0.0]),
    "infinite": ([INF, -INF], 1.0, [0.0, 0.0]),
    "infinite in an entry": ([INF, 1.0], 1.0, [0.0, 0.0]),
    "a bound of zero": ([3.0, 4.0], 0.0, [0.0, 0.0]),
}


@pytest.mark.parametrize("name", EDGES)
def test_the_edges_of_clipping_are_those_of_jax_privacy(name):
    gradient, bound, left = EDGES[name]
    gradient = jnp.array(gradient)
    if " in an entry" in name:  # the one difference: it would keep the other entries
        assert clipping.clip_pytree(gradient, bound)[0].tolist() == [0.0, 1.0]
    theirs, _ = clipping.clip_pytree(jnp.where(jnp.isfinite(gradient).all(), gradient, NAN), bound)
    clip = bam.clip_by_l2_norm(bound)
    ours, _ = clip.update(gradient, clip.init(gradient))
    total, norms = bam.clipped_sum(lambda _, x: x, clip, gradient, gradient[None], mask=None)
    for clipped in (theirs, ours, total):
        cases.assert_close(clipped, jnp.array(left), rtol=1e-6, atol=1e-6)
    assert bool(jnp.isfinite(norms[0])) == bool(jnp.isfinite(gradient).all())


@pytest.mark.parametrize("rows", [0, 3])
def test_a_batch_of_no_rows_sums_to_zero(rows):
    batch, mask = jnp.ones((rows, 2)), jnp.zeros(rows, bool)
    clip, weights = bam.clip_by_l2_norm(1.0), jnp.zeros(2)
    total, norms = bam.clipped_sum(lambda _, x: x, clip, weights, batch, mask=mask)
    assert (total == 0).all() and norms.shape == (rows,) and (norms == 0).all()
    noise = bam.gaussian_noise(clip, 2.0, bam.seeded_key(0))
    noised, _ = bam.clipped_sum(lambda _, x: x, clip, weights, batch, mask=mask, noise=noise)
    assert jnp.abs(noised).min() > 0 and jnp.abs(noised).max() < 20  # noise alone


def test_scores_without_evidence_bound_nothing_as_in_jax_privacy():
    auditing = pytest.importorskip("jax_privacy.auditing")
    rng = np.random.default_rng(0)
    same = rng.normal(size=200)
    for present, absent, says in [
        (np.full(200, np.nan), np.full(200, np.nan), False),
        (np.zeros(200), np.zeros(200), False),
        (same, same, False),
        (same + 10, same, True),
    ]:
        ours = canary.lower_bound(present, absent, sampling_prob=1.0, num_steps=1, delta=1e-5)
        theirs = auditing.CanaryScoreAuditor(present, absent)
        bound = theirs.epsilon_clopper_pearson(0.05, 1e-5)
        assert (ours.epsilon_lower_any > 0) == (bound > 0) == says
