"""One example changes a noised sum by its own bounded gradient, whatever the other rows are."""

import functools
import math

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest

import bam
from bam.core import clipping, grid, pytree
from bam.core.clipping import BoundedTransformation
from tests import cases
from tests.cases import mesh_of

CLIP = bam.clip_by_l2_norm(1.0)
NOISE = bam.GaussianNoise(bam.seeded_key(3), 1.0)


def given(w, x):
    return x


def opposite_rounding(num_ones, num_rows):
    """Rows that floats of 32 bits round away above a power of two, and up below it."""
    small = -0.75 * np.spacing(np.float32(num_ones - 2))
    return np.r_[np.ones(num_ones), np.full(num_rows - num_ones, small)].astype(np.float32)


def float32_sum(rows):
    total = np.float32(0)
    for row in rows:
        total += row
    return total


def noised_sum(rows, mask, microbatch_size, mesh=None, noise=NOISE):
    return _noised_sum(rows, mask, microbatch_size, mesh, noise)


@functools.partial(jax.jit, static_argnames=("microbatch_size", "mesh"))
def _noised_sum(rows, mask, microbatch_size, mesh, noise):
    return bam.clipped_sum(
        given, CLIP, jnp.zeros(1), rows,
        mask=mask, microbatch_size=microbatch_size, mesh=mesh, noise=noise,
    )[0]  # fmt: skip


def change(rows, removed, microbatch_size, mesh=None, noise=NOISE):
    """What removing one row does to the sum, in 64-bit floats, which show integers exactly."""
    with jax.enable_x64(True):
        rows = jnp.asarray(rows, jnp.float64)[:, None]
        masks = jnp.ones(len(rows), bool), jnp.arange(len(rows)) != removed
        whole, without = (noised_sum(rows, m, microbatch_size, mesh, noise) for m in masks)
        assert whole.dtype == jnp.float64
        return abs(float(whole[0]) - float(without[0]))


@pytest.mark.parametrize("shape", [(), (1,), (33,), (100_003,), (3, 3, 17, 256), (11, 1, 2, 9)])
@pytest.mark.parametrize("platform", ["tpu", "default"])
def test_the_norm_of_each_platform_is_that_of_64_bits(platform, shape, monkeypatch):
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *arrays, **branches: branches[platform](*arrays)
    )
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    expected = np.sum(np.square(x), dtype=np.float64)
    norm = float(jax.jit(lambda x: pytree.l2_norm(x))(x))
    # Twice the relative error of a root is that of its square; the root itself rounds, too.
    assert abs(norm**2 - expected) <= 152 * 2**-24 * expected
    # Control: adding one number after another is off by more.
    ones = np.full(2**17, np.float32(0.1))
    assert abs(np.cumsum(ones)[-1] / np.sum(ones, dtype=np.float64) - 1) > 152 * 2**-24


@pytest.mark.parametrize("num_devices", [None, 8])
@pytest.mark.parametrize("microbatch_size", [1, 32])
def test_removing_a_row_changes_the_sum_by_the_sensitivity_at_most(microbatch_size, num_devices):
    rows = opposite_rounding(4097, 8193)
    mesh = num_devices and mesh_of(num_devices)
    for removed in (0, 4096):
        assert 1 - 1e-5 <= change(rows, removed, microbatch_size, mesh) <= 1 + 1e-5
    assert 0 < change(rows, 8000, microbatch_size, mesh) < 1e-3
    # Control: as 0.1.0 added them, one row moves the sum by twice its norm.
    assert float32_sum(rows) - float32_sum(rows[1:]) == 2.0


@pytest.mark.slow
@pytest.mark.parametrize(("microbatch_size", "num_devices"), [(1, None), (7, 2), (32, 8)])
def test_so_it_is_with_a_hundred_thousand_rows(microbatch_size, num_devices):
    rows = opposite_rounding(4097, 2**17)
    mesh = num_devices and mesh_of(num_devices)
    for removed in (0, 4096):
        assert 1 - 1e-5 <= change(rows, removed, microbatch_size, mesh) <= 1 + 1e-5
    assert float32_sum(rows) - float32_sum(rows[1:]) > 25


@pytest.mark.parametrize("std", [0.01, 1.0, 300.0])
def test_the_sum_is_that_of_the_cut_rows_exactly_for_any_noise(std):
    """Small noise has a fine grid: 32 bits are carried over after every few rows."""
    rng = np.random.default_rng(0)
    rows = rng.uniform(-1, 1, 3000)
    rows[:2000] = 1.0  # many of the largest
    noise = bam.GaussianNoise(bam.seeded_key(3), std)
    with jax.enable_x64(True):
        found = noised_sum(jnp.asarray(rows)[:, None], jnp.ones(3000, bool), 8, None, noise)
        pure = noised_sum(jnp.asarray(rows)[:, None], jnp.zeros(3000, bool), 8, None, noise)
        cut = np.asarray(grid.cut(jnp.asarray(rows), noise.spacing), np.int64)
    whole = round((float(found[0]) - float(pure[0])) / noise.spacing)
    assert whole == int(cut.sum())


def test_any_grouping_and_any_devices_give_the_same_bits():
    """Of rows that the clip leaves alone: its own norms may differ in their last bit."""
    rng = np.random.default_rng(1)
    rows = jnp.asarray(rng.uniform(-0.4, 0.4, size=(1001, 5)), jnp.float32)
    mask = jnp.asarray(rng.random(1001) < 0.9)

    @jax.jit
    def sums(noise):  # one program of all, in which the noise is the same
        return [noised_sum(rows, mask, size, None, noise) for size in (1, 2, 16, 1001)]

    expected, *others = sums(NOISE)
    others += [noised_sum(rows, mask, size, mesh_of(num)) for size, num in ((3, 2), (8, 8))]
    for other in others:
        cases.assert_same_bits(other, expected)
    # Control: floating-point sums depend on the grouping.
    one_by_one, _, by_sixteen, _ = sums(None)
    assert not np.array_equal(one_by_one, by_sixteen)


def test_noise_that_could_hide_nothing_is_refused():
    little = bam.GaussianNoise(bam.seeded_key(0), 1e-3)
    with pytest.raises(ValueError, match="is too small for a sensitivity"):
        bam.clipped_sum(given, CLIP, jnp.zeros(1), jnp.ones((2, 1)), mask=None, noise=little)
    assert jnp.isnan(noised_sum(jnp.ones((2, 1)), None, 1, None, little)).all()  # std is traced
    assert jnp.isfinite(noised_sum(jnp.ones((2, 1)), None, 1, None, NOISE)).all()  # the control
    unbounded = bam.clip_by_l2_norm(math.inf)
    with pytest.raises(ValueError, match="not bounded"):
        bam.clipped_sum(given, unbounded, jnp.zeros(1), jnp.ones((2, 1)), mask=None, noise=NOISE)
    with pytest.raises(ValueError, match="hides nothing"):
        bam.privatize(CLIP, 1e-3, 4, bam.seeded_key(3))


# The bound is enforced.


def lying(update, bound=1.0):
    return BoundedTransformation(lambda params: (), update, bound)


LIARS = {
    "twice the bound": lying(lambda g, s, p=None: (2 * CLIP.update(g, None)[0], s)),
    "a little more": lying(lambda g, s, p=None: (1.0001 * CLIP.update(g, None)[0], s)),
    "not finite": lying(lambda g, s, p=None: (jnp.where(jnp.abs(g) > 1, jnp.nan, g), s)),
    "infinite": lying(lambda g, s, p=None: (jnp.where(jnp.abs(g) > 1, jnp.inf, g), s)),
    "optax's, of a larger norm": lying(optax.clip_by_global_norm(5.0).update),
}


@pytest.mark.parametrize("liar", LIARS.values(), ids=LIARS.keys())
def test_an_output_beyond_the_declared_bound_counts_for_nothing_and_is_counted(liar):
    rows, kept = jnp.array([[0.1, 0.2], [30.0, 40.0], [0.0, 0.3]]), jnp.array([True, False, True])

    @jax.jit
    def sums(mask, noise):  # without noise and with it
        return [
            bam.clipped_sum(given, liar, jnp.zeros(2), rows, mask=mask, noise=added)
            for added in (None, noise)
        ]

    for (total, norms), (expected, _) in zip(
        sums(jnp.ones(3, bool), NOISE), sums(kept, NOISE), strict=True
    ):
        cases.assert_same_bits(total, expected)
        np.testing.assert_array_equal(np.isfinite(norms), kept)
    private = bam.privatize(liar, 1.0, 1, bam.seeded_key(3))
    update = jax.jit(lambda state, mask: private.update(rows, state, mask=mask)[0])
    state = private.init(None)
    cases.assert_same_bits(update(state, jnp.ones(3, bool)), update(state, kept))


def test_a_normalised_gradient_is_finite_and_short_for_any_clip_norm_and_gradient():
    """C/(‖g‖ + γ) overflows, but C · (g/(‖g‖ + γ)) does not."""
    for clip_norm in (1e-12, 1.0, 1e30, 3e38):
        for size in (0.0, 1e-30, 1e-12, 1.0, 1e18):
            clip = bam.normalize(clip_norm, gamma=1e-12)
            bounded, _ = clip.update(jnp.array([size, -size], jnp.float32), None)
            assert np.all(np.isfinite(bounded)), (clip_norm, size)
            assert cases.norm64(bounded) <= clip_norm * (1 + 5e-7)


# What is no real number is refused.


@pytest.fixture
def without_the_tests_type_checks():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32, bool])
def test_what_is_not_real_floating_point_is_refused_by_name(dtype, without_the_tests_type_checks):
    rows = {"w": jnp.ones((3, 2)), "b": jnp.ones((3, 2), dtype)}
    private = bam.privatize(CLIP, 1.0, 3, bam.seeded_key(3))
    one_row = jax.tree.map(lambda x: x[0], rows)
    with pytest.raises(TypeError, match=r"^b is of "):
        private.update(rows, private.init(one_row), mask=None)
    with pytest.raises(TypeError, match=r"^b is of "):
        bam.clipped_sum(given, CLIP, one_row, rows, mask=None)
    for clip in (CLIP, bam.normalize(1.0), bam.clip_per_layer(1.0)):
        with pytest.raises(TypeError, match=r"^b is of "):
            clip.update(one_row, clip.init(one_row))
    to_complex = lying(lambda g, s, p=None: (jax.tree.map(lambda x: x * 1000j, g), s))
    with pytest.raises(TypeError, match="complex"):
        bam.clipped_sum(given, to_complex, jnp.zeros(2), jnp.ones((3, 2)), mask=None)


# The norm that the bound is held against.

BAD_FOR_SUMS = {
    "one large first": lambda n: np.r_[1, np.full(n - 1, 2.3e-4)],
    "all equal": lambda n: np.full(n, 0.1),
    "falling": lambda n: np.exp(-np.linspace(0, 12, n)),
    "rising": lambda n: np.exp(-np.linspace(12, 0, n)),
    "one in 32": lambda n: np.where(np.arange(n) % 32 == 0, 1, 2.4e-4),
    "two in 1024": lambda n: np.where(np.arange(n) % 1024 < 2, 1, 2.4e-4),
}


@pytest.mark.parametrize("pattern", BAD_FOR_SUMS.values(), ids=BAD_FOR_SUMS.keys())
def test_norms_are_within_half_of_what_is_allowed_for_rounding(pattern):
    """In one sum from left to right the first would be 2 % short."""
    for size in (1000, 2_359_296):
        x = pattern(size).astype(np.float32)
        exact = np.linalg.norm(x.astype(np.float64))
        alone = jax.jit(pytree.l2_norm)(jnp.asarray(x))
        batched = jax.jit(jax.vmap(pytree.l2_norm))(jnp.asarray(x)[None])[0]
        for found in (alone, batched):
            assert abs(float(found) / exact - 1) < (clipping.ROUNDING - 1) / 2


@pytest.mark.parametrize(
    "shape", [(1000, 1000), (31, 1009, 31), (7,) * 7, (2,) * 20, (3, 3, 99, 99)]
)
def test_norms_are_so_for_any_shape(shape):
    x = BAD_FOR_SUMS["one large first"](math.prod(shape)).astype(np.float32).reshape(shape)
    exact = np.linalg.norm(x.astype(np.float64))
    for norm in (pytree.l2_norm, lambda x: jax.vmap(pytree.l2_norm)(x[None])[0]):
        assert abs(float(jax.jit(norm)(jnp.asarray(x))) / exact - 1) < (clipping.ROUNDING - 1) / 2


def test_norms_are_so_for_many_leaves():
    leaves = [jnp.float32(x) for x in BAD_FOR_SUMS["one large first"](700)]
    exact = np.linalg.norm(np.array(leaves, np.float64))
    assert abs(float(jax.jit(pytree.l2_norm)(leaves)) / exact - 1) < (clipping.ROUNDING - 1) / 2


# Arguments that would leave something without noise.


@pytest.mark.parametrize("std", [-1.0, math.nan, math.inf, 1e44, 1e-44])
def test_noise_of_no_sensible_deviation_is_refused(std):
    with pytest.raises(ValueError, match="standard deviation"):
        bam.GaussianNoise(bam.seeded_key(0), std)


def test_a_mesh_of_two_axes_or_of_an_explicit_one_is_refused():
    auto, explicit = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
    for shape, names, types in (((2, 2), ("a", "b"), (auto,) * 2), ((4,), ("a",), (explicit,))):
        mesh = jax.make_mesh(shape, names, axis_types=types, devices=cases.several_devices(4))
        with pytest.raises(ValueError, match="one axis"):
            bam.clipped_sum(
                given, CLIP, jnp.zeros(1), jnp.ones((8, 1)), mask=None, mesh=mesh, noise=NOISE
            )


def test_a_bound_below_what_squares_can_show_is_not_taken_on_trust():
    with pytest.raises(ValueError, match="sensitivity"):
        lying(lambda g, s, p=None: (g, s), 1e-24)
    tiny = jnp.full((2, 3), 2e-25)
    total, _ = bam.clipped_sum(
        given, lying(lambda g, s, p=None: (g, s), 0.0), jnp.zeros(3), tiny, mask=None
    )
    np.testing.assert_array_equal(total, 0)
