"""`clipped_sum` is a plain loop over examples, whatever the masks, groups and junk."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bam
from bam.core.clipping import BoundedTransformation
from bam.core.engine import plain_sum
from tests import cases

CLIP = bam.clip_by_l2_norm(1.0)
PARAMS, BATCH = cases.mlp_params(), cases.mlp_batch(7)
GRAD = bam.bam_sam(cases.mlp_loss, 0.1).grad

# Gradients given directly: 'the gradient' of a row is the row.
ROWS = jnp.array([[3.0, 4.0], [0.0, 0.5], [30.0, 40.0], [-6.0, 8.0], [0.1, 0.0]])
CLIPPED = np.array([[0.6, 0.8], [0.0, 0.5], [0.6, 0.8], [-0.6, 0.8], [0.1, 0.0]])
NORMS = np.array([5.0, 0.5, 50.0, 10.0, 0.1])


def given(w, x):
    return x


@functools.partial(jax.jit, static_argnames=("microbatch_size", "clip"))
def sum_rows(rows, mask=None, microbatch_size=2, clip=CLIP):
    return bam.clipped_sum(
        given, clip, jnp.zeros(2), rows, mask=mask, microbatch_size=microbatch_size
    )


@functools.cache
def plain_loop():
    """The definition, row by row, clipped in NumPy."""
    grad, total, norms = jax.jit(GRAD), jax.tree.map(np.zeros_like, PARAMS), []
    for i in range(7):
        grads = grad(PARAMS, cases.row(BATCH, i))
        norm = cases.norm64(grads)
        norms.append(norm)
        total = jax.tree.map(lambda t, g, n=norm: t + np.asarray(g) / max(1.0, n), total, grads)
    return total, np.array(norms)


@pytest.mark.parametrize("microbatch_size", [1, 2, 3, 7, 100])
def test_any_microbatch_size_equals_a_plain_loop(microbatch_size):
    total, norms = jax.jit(
        lambda p, b: bam.clipped_sum(GRAD, CLIP, p, b, mask=None, microbatch_size=microbatch_size)
    )(PARAMS, BATCH)
    expected_total, expected_norms = plain_loop()
    assert min(expected_norms) < 1 < max(expected_norms)  # some are clipped, some are not
    cases.assert_close(total, expected_total)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)


def test_norms_are_of_each_example_before_clipping():
    total, norms = sum_rows(ROWS)
    np.testing.assert_allclose(norms, NORMS, rtol=1e-6)
    np.testing.assert_allclose(total, CLIPPED.sum(0), rtol=1e-6)


# Masks.


@pytest.mark.parametrize(
    "mask",
    [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 0, 0, 1], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]],
    ids=lambda m: "".join(map(str, m)),
)
@pytest.mark.parametrize("junk", [np.nan, np.inf, 1e30])
def test_masked_rows_contribute_exactly_zero(mask, junk):
    keep = np.array(mask, bool)
    rows = jnp.where(keep[:, None], ROWS, junk)
    for microbatch_size in (1, 2):
        total, norms = sum_rows(rows, jnp.asarray(keep), microbatch_size)
        np.testing.assert_allclose(total, CLIPPED[keep].sum(0), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(norms, np.where(keep, NORMS, 0.0), rtol=1e-6)
        blank = sum_rows(jnp.where(keep[:, None], ROWS, 0.0), jnp.asarray(keep), microbatch_size)
        cases.assert_same_bits((total, norms), blank)


@pytest.mark.parametrize("microbatch_size", [1, 2])
def test_a_batch_of_no_rows_sums_to_zero(microbatch_size):
    total, norms = sum_rows(ROWS[:0], microbatch_size=microbatch_size)
    cases.assert_same_bits(total, jnp.zeros(2))
    assert norms.shape == (0,)


def test_a_gradient_that_is_not_finite_contributes_zero_and_shows_in_the_norms():
    rows = ROWS.at[0, 0].set(jnp.nan).at[2, 1].set(jnp.inf).at[3].set(3e38)
    for clip in (CLIP, bam.normalize(1.0), bam.clip_per_layer(1.0)):
        total, norms = sum_rows(rows, clip=clip)
        alone, _ = sum_rows(ROWS, jnp.array([False, True, False, False, True]), clip=clip)
        np.testing.assert_allclose(total, alone, rtol=1e-6)
        np.testing.assert_array_equal(np.isfinite(norms), [False, True, False, False, True])


def test_a_gradient_that_is_not_finite_is_dropped_even_if_the_transform_would_pass_it():
    passes_nan_on = BoundedTransformation(*optax.clip_by_global_norm(1.0), 1.0)
    total, _ = sum_rows(ROWS.at[0, 0].set(jnp.nan), clip=passes_nan_on)
    np.testing.assert_allclose(total, CLIPPED[1:].sum(0), rtol=1e-6)


def test_a_gradient_that_is_not_finite_is_dropped_even_if_no_bound_is_declared():
    """What declares none is not measured, which would drop it, too."""
    bounds_nothing = BoundedTransformation(*optax.identity(), math.inf)
    total, norms = sum_rows(ROWS.at[0, 0].set(jnp.nan), clip=bounds_nothing)
    np.testing.assert_allclose(total, ROWS[1:].sum(0), rtol=1e-6)
    np.testing.assert_array_equal(np.isfinite(norms), [False, True, True, True, True])


# Compilation, work and memory.


def test_one_compilation_serves_every_mask():
    traces = []

    @jax.jit
    def total(rows, mask):
        traces.append(rows.shape)
        return bam.clipped_sum(given, CLIP, jnp.zeros(2), rows, mask=mask, microbatch_size=2)[0]

    for num_rows in range(6):
        total(ROWS, jnp.arange(5) < num_rows)
    assert len(traces) == 1
    total(ROWS[:4], jnp.arange(4) < 2)  # control: the counter does see another shape
    assert len(traces) == 2


def test_groups_after_the_last_real_row_are_not_run():
    seen = []

    def counted(w, x):
        jax.debug.callback(lambda _: seen.append(1), x)
        return x

    @jax.jit
    def total(mask):
        return bam.clipped_sum(counted, CLIP, jnp.zeros(2), ROWS, mask=mask, microbatch_size=1)

    for mask, num_run in [("00000", 0), ("10000", 1), ("11100", 3), ("00010", 4), ("11111", 5)]:
        seen.clear()
        jax.block_until_ready(total(jnp.array([m == "1" for m in mask])))
        jax.effects_barrier()
        assert len(seen) == num_run


def test_a_microbatch_of_one_uses_no_vmap():
    @jax.custom_batching.custom_vmap
    def never_batched(x):
        return x

    @never_batched.def_vmap
    def rule(axis_size, in_batched, x):
        raise AssertionError("batched")

    run = lambda size: bam.clipped_sum(  # noqa: E731
        lambda w, x: never_batched(x), CLIP, jnp.zeros(2), ROWS, mask=None, microbatch_size=size
    )
    np.testing.assert_allclose(run(1)[0], CLIPPED.sum(0), rtol=1e-6)
    with pytest.raises(AssertionError, match="batched"):  # control
        run(2)


def test_memory_beyond_the_batch_does_not_grow_with_it():
    wide = 4096  # one gradient: 16 KiB; a row: 4 bytes

    def temporary_bytes(num_rows, microbatch_size):
        total = lambda w, x, m: bam.clipped_sum(  # noqa: E731
            jax.grad(lambda w, x: jnp.sum(jnp.tanh(w * x))),
            CLIP,
            w,
            x,
            mask=m,
            microbatch_size=microbatch_size,
        )
        shapes = [((wide,), jnp.float32), ((num_rows,), jnp.float32), ((num_rows,), bool)]
        args = [jax.ShapeDtypeStruct(*s) for s in shapes]
        return jax.jit(total).lower(*args).compile().memory_analysis().temp_size_in_bytes

    small, large = temporary_bytes(64, 8), temporary_bytes(1024, 8)
    assert large - (1024 - 64) * 4 <= 1.1 * small
    # Control: with the whole batch as one microbatch memory does grow.
    assert temporary_bytes(1024, 1024) > 5 * small


def test_bfloat16_gradients_are_summed_in_float32():
    rows = jnp.ones((300, 1), jnp.bfloat16)
    total, norms = bam.clipped_sum(
        given, CLIP, jnp.zeros(1, jnp.bfloat16), rows, mask=None, microbatch_size=100
    )
    assert total.dtype == norms.dtype == jnp.float32
    assert float(total[0]) == 300.0
    # Control: bfloat16, with 8 bits, gets stuck at 256.
    assert float(functools.reduce(jnp.add, list(rows[:, 0]))) == 256.0


# Arguments.


def test_rows_that_disagree_are_refused():
    for batch, mask in [
        ((ROWS, ROWS[:4]), None),
        (ROWS, jnp.ones(4, bool)),
        ((ROWS, jnp.float32(1.0)), None),
    ]:
        with pytest.raises(ValueError, match="same number of rows"):
            bam.clipped_sum(lambda w, x: w, CLIP, jnp.zeros(2), batch, mask=mask)


@pytest.mark.parametrize("bad", [0, -1])
def test_a_microbatch_below_one_is_refused(bad):
    with pytest.raises(ValueError, match="microbatch_size"):
        bam.clipped_sum(given, CLIP, jnp.zeros(2), ROWS, mask=None, microbatch_size=bad)


def test_a_transform_without_sensitivity_is_refused():
    with pytest.raises(ValueError, match="sensitivity"):
        bam.clipped_sum(given, optax.clip_by_global_norm(1.0), jnp.zeros(2), ROWS, mask=None)


# Ordinary training's sum.


@pytest.mark.parametrize("microbatch_size", [1, 2, 3, 7, 100])
def test_the_plain_sum_is_the_sum_of_gradients_of_the_real_rows(microbatch_size):
    mask = jnp.array([True, False, True, True, False, True, False])
    total = jax.jit(
        lambda p, b: plain_sum(cases.mlp_loss, p, b, mask=mask, microbatch_size=microbatch_size)
    )(PARAMS, BATCH)
    each = [jax.grad(cases.mlp_loss)(PARAMS, cases.row(BATCH, i)) for i in (0, 2, 3, 5)]
    cases.assert_close(total, jax.tree.map(lambda *g: sum(g), *each))


@pytest.mark.parametrize("microbatch_size", [1, 2, 3, 4])
@pytest.mark.parametrize("padding", [0.0, np.nan, -1.0])
def test_a_masked_row_of_the_plain_sum_may_have_no_gradient(microbatch_size, padding):
    def loss(w, x):
        return jnp.sqrt(w * x)  # its derivative is infinite at 0, and NaN below

    rows, mask = jnp.array([1.0, padding, padding, padding]), jnp.arange(4) < 1
    total = plain_sum(loss, jnp.array(1.0), rows, mask=mask, microbatch_size=microbatch_size)
    assert total == 0.5
    total = plain_sum(loss, jnp.array(1.0), rows, microbatch_size=microbatch_size)
    assert not jnp.isfinite(total)  # the control


def test_the_plain_sum_of_no_rows_is_zero():
    no_rows = jax.tree.map(lambda x: x[:0], BATCH)
    total = plain_sum(cases.mlp_loss, PARAMS, no_rows)
    cases.assert_same_bits(total, jax.tree.map(jnp.zeros_like, PARAMS))


def test_the_plain_sum_checks_its_arguments():
    with pytest.raises(ValueError, match="microbatch_size"):
        plain_sum(cases.mlp_loss, PARAMS, BATCH, microbatch_size=0)
    with pytest.raises(ValueError, match="same number of rows"):
        plain_sum(cases.mlp_loss, PARAMS, BATCH, mask=jnp.ones(3, bool))


def test_what_is_summed_is_kept_as_it_was_measured():
    def program(fn):
        return str(jax.make_jaxpr(fn)({"w": jnp.zeros(3)}, {"x": jnp.ones((4, 3))}))

    def private(params, batch):
        clip = bam.clip_by_l2_norm(1.0)
        grad_fn = lambda p, example: {"w": p["w"] + example["x"]}  # noqa: E731
        return bam.clipped_sum(grad_fn, clip, params, batch, mask=None, microbatch_size=2)[0]

    def plain(params, batch):
        return plain_sum(lambda p, e: jnp.vdot(p["w"], e["x"]), params, batch, microbatch_size=2)

    # The loop that has the gradient in memory: see tests/removed_row.py for what it is for.
    assert program(private).count("while[") == program(plain).count("while[") + 1
