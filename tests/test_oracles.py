"""Every oracle passes one conformance suite, and each method has its own facts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bam
from tests import cases

PARAMS, BATCH = cases.mlp_params(), cases.mlp_batch(4)
EXAMPLE = cases.row(BATCH, 0)


@pytest.fixture(params=cases.ORACLES.values(), ids=cases.ORACLES.keys())
def make_oracle(request):
    return request.param


# Every oracle.


def test_gradients_have_the_structure_shapes_and_dtypes_of_the_parameters(make_oracle):
    params = {**PARAMS, "b1": PARAMS["b1"].astype(jnp.bfloat16)}
    grads = jax.eval_shape(make_oracle(cases.mlp_loss).grad, params, EXAMPLE)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), grads) == jax.tree.map(
        lambda x: (x.shape, x.dtype), params
    )


def test_jit_equals_eager_and_vmap_equals_a_loop(make_oracle):
    grad = make_oracle(cases.mlp_loss).grad
    eager = [grad(PARAMS, cases.row(BATCH, i)) for i in range(2)]
    two = jax.tree.map(lambda x: x[:2], BATCH)
    batched = jax.jit(jax.vmap(grad, in_axes=(None, 0)))(PARAMS, two)
    jitted = jax.jit(grad)
    for i in range(2):
        cases.assert_close(cases.row(batched, i), eager[i])
        cases.assert_close(jitted(PARAMS, cases.row(BATCH, i)), eager[i])


def test_a_zero_gradient_stays_zero_and_finite(make_oracle):
    oracle = make_oracle(cases.quadratic)
    at_minimum = jnp.array([1.0, -2.0, 3.0])
    params = oracle.ascend(at_minimum, jnp.zeros(3))
    cases.assert_same_bits(params, at_minimum)
    cases.assert_same_bits(oracle.grad(params, at_minimum), jnp.zeros(3))


def test_a_zero_gradient_stays_finite_inside_jit_and_vmap(make_oracle):
    at_minimum = jnp.array([1.0, -2.0, 3.0])
    rows = jnp.stack([at_minimum, at_minimum + 1.0])
    grads = jax.jit(jax.vmap(make_oracle(cases.quadratic).grad, in_axes=(None, 0)))(
        at_minimum, rows
    )
    assert jnp.all(jnp.isfinite(grads))
    assert not jnp.any(grads[0])


@pytest.mark.parametrize(
    "oracle",
    [
        bam.dp_sat(cases.mlp_loss, radius=0.0),
        bam.bam_sam(cases.mlp_loss, radius=0.0),
        bam.bam_sam(cases.mlp_loss, radius=0.0, mix=0.5),
        bam.bam_sam(cases.mlp_loss, radius=0.1, mix=0.0),
        bam.bam_exact(cases.mlp_loss, penalty=0.0),
    ],
    ids=["dp_sat", "bam_sam", "bam_sam_mixed", "bam_sam_mix_0", "bam_exact"],
)
def test_zero_radius_penalty_or_mix_is_dp_sgd_to_the_bit(oracle):
    params = oracle.ascend(PARAMS, PARAMS)
    plain = bam.dp_sgd(cases.mlp_loss)
    cases.assert_same_bits(oracle.grad(params, EXAMPLE), plain.grad(PARAMS, EXAMPLE))


@pytest.mark.parametrize("name", [n for n in cases.ORACLES if n != "dp_sat"])
def test_only_dp_sat_shifts_the_parameters_of_the_whole_batch(name):
    assert cases.ORACLES[name](cases.mlp_loss).ascend(PARAMS, PARAMS) is PARAMS


# On a quadratic, ∇L = w − x = (3, 4), ‖∇L‖ = 5, the unit gradient is (0.6, 0.8) and H = I.


@pytest.mark.parametrize(
    ("oracle", "expected"),
    [
        (bam.dp_sgd(cases.quadratic), [3.0, 4.0]),
        (bam.bam_sam(cases.quadratic, radius=1.0), [3.6, 4.8]),
        (bam.bam_sam(cases.quadratic, radius=1.0, mix=0.5), [3.3, 4.4]),
        (bam.bam_exact(cases.quadratic, penalty=2.0), [4.2, 5.6]),
    ],
)
def test_gradients_on_a_quadratic_are_those_by_hand(oracle, expected):
    grads = oracle.grad(jnp.array([3.0, 5.0]), jnp.array([0.0, 1.0]))
    np.testing.assert_allclose(grads, expected, rtol=1e-6)


# BAM against its definition, in float64.


def penalised_gradient(params, example, penalty):
    """Eq. 13 by reverse over reverse: the gradient of L + λ‖∇L‖."""

    def objective(p):
        loss, grads = jax.value_and_grad(cases.mlp_loss)(p, example)
        return loss + penalty * jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))

    return jax.grad(objective)(params)


def test_bam_exact_is_the_gradient_of_the_penalised_loss():
    with jax.enable_x64(True):
        params, batch = cases.mlp_params(np.float64), cases.mlp_batch(3, np.float64)
        for i, penalty in enumerate([0.02, 0.5, 3.0]):
            example = cases.row(batch, i)
            exact = bam.bam_exact(cases.mlp_loss, penalty).grad(params, example)
            wanted = penalised_gradient(params, example, penalty)
            assert cases.distance(exact, wanted) <= 1e-9 * cases.norm64(wanted)
            # Control: the tolerance tells a penalty from one a millionth larger.
            other = penalised_gradient(params, example, penalty * (1 + 1e-6))
            assert cases.distance(exact, other) > 1e-9 * cases.norm64(wanted)


def test_bam_sam_approaches_bam_exact_as_the_radius_squared():
    with jax.enable_x64(True):
        params, batch = cases.mlp_params(np.float64), cases.mlp_batch(1, np.float64)
        example = cases.row(batch, 0)
        plain = bam.dp_sgd(cases.mlp_loss).grad(params, example)
        sam_gaps, plain_gaps = [], []
        for radius in (0.02, 0.01, 0.005):
            exact = bam.bam_exact(cases.mlp_loss, radius).grad(params, example)
            sam = bam.bam_sam(cases.mlp_loss, radius).grad(params, example)
            sam_gaps.append(cases.distance(sam, exact))
            plain_gaps.append(cases.distance(plain, exact))
    sam_gaps, plain_gaps = np.array(sam_gaps), np.array(plain_gaps)
    np.testing.assert_allclose(sam_gaps[:-1] / sam_gaps[1:], 4.0, rtol=0.1)
    # Control: plain DP-SGD's gap is λ‖H v‖, which only halves.
    np.testing.assert_allclose(plain_gaps[:-1] / plain_gaps[1:], 2.0, rtol=1e-6)


def test_bam_exact_evaluates_the_loss_once():
    def num_tanh(fn):
        return str(jax.make_jaxpr(fn)(PARAMS, EXAMPLE)).count("= tanh")

    def by_plain_jvp(params, example):
        gradient = lambda p: jax.grad(cases.mlp_loss)(p, example)  # noqa: E731
        here = gradient(params)
        return jax.jvp(gradient, (params,), (here,))

    assert num_tanh(jax.grad(cases.mlp_loss)) == 1
    assert num_tanh(bam.bam_exact(cases.mlp_loss, 0.1).grad) == 1
    # Controls: the count does see a second evaluation.
    assert num_tanh(by_plain_jvp) == 2
    assert num_tanh(bam.bam_sam(cases.mlp_loss, 0.1).grad) == 2


# Cheaper directions. Views: an example is {"image": [views, 3], "label": y}, its loss their mean.


def views_loss(params, example):
    losses = jax.vmap(lambda x: cases.mlp_loss(params, (x, example["label"])))(example["image"])
    return jnp.mean(losses)


def views_example(num_views, dtype=np.float32):
    images, labels = cases.mlp_batch(num_views, dtype)
    return {"image": images, "label": labels[0]}


def masked_norm(grads, mask):
    chosen = jax.tree.map(lambda g, m: jnp.sum(g**2) if m else 0.0, grads, mask)
    return jnp.sqrt(sum(jax.tree.leaves(chosen)))


@pytest.mark.parametrize("num_views", [0, 1, 3])
@pytest.mark.parametrize("pattern", ["", "w", "b1"])
def test_bam_exact_penalises_the_chosen_views_and_parameters(num_views, pattern):
    with jax.enable_x64(True):
        params, example = cases.mlp_params(np.float64), views_example(4, np.float64)
        mask = bam.core.pytree.name_mask(pattern)
        few = {**example, "image": example["image"][: num_views or None]}

        def objective(p):
            return views_loss(p, example) + 0.5 * masked_norm(jax.grad(views_loss)(p, few), mask(p))

        oracle = bam.bam_exact(views_loss, 0.5, ascent_views=num_views, ascent_mask=mask)
        wanted = jax.grad(objective)(params)
        found = oracle.grad(params, example)
        assert cases.distance(found, wanted) <= 1e-9 * cases.norm64(wanted)
        if num_views or pattern:  # control: the full penalty is another gradient
            full = bam.bam_exact(views_loss, 0.5).grad(params, example)
            assert cases.distance(full, wanted) > 1e-4 * cases.norm64(wanted)


@pytest.mark.parametrize("num_views", [0, 1, 3])
@pytest.mark.parametrize("pattern", ["", "w", "b1"])
def test_bam_sam_ascends_along_the_chosen_views_and_parameters(num_views, pattern):
    example = views_example(4)
    mask = bam.core.pytree.name_mask(pattern)
    few = {**example, "image": example["image"][: num_views or None]}
    uphill = jax.tree.map(
        lambda g, m: g if m else 0 * g, jax.grad(views_loss)(PARAMS, few), mask(PARAMS)
    )
    scale = 0.1 / cases.norm64(uphill)
    ahead = jax.tree.map(lambda p, g: p + scale * g, PARAMS, uphill)
    expected = jax.grad(views_loss)(ahead, example)
    options = {"ascent_views": num_views, "ascent_mask": mask}
    cases.assert_close(bam.bam_sam(views_loss, 0.1, **options).grad(PARAMS, example), expected)
    half = bam.bam_sam(views_loss, 0.1, mix=0.5, **options).grad(PARAMS, example)
    here = jax.grad(views_loss)(PARAMS, example)
    cases.assert_close(half, jax.tree.map(lambda a, b: 0.5 * a + 0.5 * b, here, expected))


def test_moving_everything_or_all_views_is_the_plain_method_to_the_bit():
    example = views_example(3)
    for make in (bam.bam_sam, bam.bam_exact):
        plain = make(views_loss, 0.1).grad(PARAMS, example)
        everything = jax.tree.map(lambda p: True, PARAMS)
        for options in ({"ascent_mask": everything}, {"ascent_views": 3}):
            cases.assert_same_bits(make(views_loss, 0.1, **options).grad(PARAMS, example), plain)


@pytest.mark.parametrize("make", [bam.bam_sam, bam.bam_exact])
def test_a_direction_that_cannot_be_taken_is_refused(make):
    example = views_example(2)
    with pytest.raises(ValueError, match="has 2 views"):
        make(views_loss, 0.1, ascent_views=3).grad(PARAMS, example)
    with pytest.raises(ValueError, match="ascent_views must be"):
        make(views_loss, 0.1, ascent_views=-1)
    with pytest.raises(ValueError, match="dicts with views"):
        make(cases.mlp_loss, 0.1, ascent_views=1).grad(PARAMS, EXAMPLE)
    with pytest.raises(ValueError, match="with at least one True"):
        make(views_loss, 0.1, ascent_mask=bam.core.pytree.name_mask("no such name")).grad(
            PARAMS, example
        )
    with pytest.raises(ValueError, match="tree of bools like the parameters"):
        make(views_loss, 0.1, ascent_mask=[True, False, False]).grad(PARAMS, example)
    with pytest.raises(ValueError, match="not a regular expression"):
        bam.core.pytree.name_mask("(")


# DP-SAT.


@pytest.mark.parametrize("method", [bam.bam_sam, bam.bam_exact])
def test_a_mask_that_is_a_module_and_can_be_called_is_a_tree(method):
    @jax.tree_util.register_pytree_node_class
    class Line(list):
        def __call__(self, x):
            return self[0] @ x + self[1]

        def tree_flatten(self):
            return tuple(self), None

        @classmethod
        def tree_unflatten(cls, structure, leaves):
            return cls(leaves)

    line, x = Line([jnp.ones(3), jnp.array(0.5)]), jnp.arange(3.0)
    mask = Line([True, False])
    by_tree, by_function, everywhere = (
        method(lambda f, x: f(x) ** 2, 0.1, ascent_mask=m).grad(line, x)
        for m in (mask, lambda params: mask, None)
    )
    cases.assert_same_bits(by_tree, by_function)
    assert not np.array_equal(by_tree[0], everywhere[0])


def test_dp_sat_shifts_by_the_radius_along_the_previous_private_gradient():
    oracle = bam.dp_sat(cases.quadratic, radius=0.5)
    shifted = oracle.ascend(jnp.array([1.0, 1.0]), jnp.array([30.0, 40.0]))
    np.testing.assert_allclose(shifted, [1.3, 1.4], rtol=1e-6)
    np.testing.assert_allclose(oracle.grad(shifted, jnp.zeros(2)), [1.3, 1.4], rtol=1e-6)


def test_dp_sat_takes_one_norm_over_all_leaves_together():
    shifted = bam.dp_sat(cases.mlp_loss, radius=0.5).ascend(PARAMS, PARAMS)
    np.testing.assert_allclose(cases.distance(shifted, PARAMS), 0.5, rtol=1e-5)
    step = jax.tree.map(jnp.subtract, shifted, PARAMS)
    scale = 0.5 / cases.norm64(PARAMS)
    cases.assert_close(step, jax.tree.map(lambda p: scale * p, PARAMS), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("previous", [None, jax.tree.map(jnp.zeros_like, PARAMS)])
def test_dp_sat_stays_where_there_is_no_previous_gradient(previous):
    shifted = bam.dp_sat(cases.mlp_loss, radius=0.5).ascend(PARAMS, previous)
    cases.assert_same_bits(shifted, PARAMS)


# Zhao mixing.


def test_mix_one_is_the_gradient_at_the_ascended_point():
    here = jax.grad(cases.mlp_loss)(PARAMS, EXAMPLE)
    scale = 0.1 / cases.norm64(here)
    ahead = jax.tree.map(lambda p, g: p + scale * g, PARAMS, here)
    expected = jax.grad(cases.mlp_loss)(ahead, EXAMPLE)
    cases.assert_close(bam.bam_sam(cases.mlp_loss, 0.1, mix=1.0).grad(PARAMS, EXAMPLE), expected)
    # Control: the two gradients differ by far more than the tolerance.
    assert cases.distance(here, expected) > 1e-3


def test_mixing_is_linear_in_alpha():
    g0, g1, mixed = (
        bam.bam_sam(cases.mlp_loss, 0.1, mix=a).grad(PARAMS, EXAMPLE) for a in (0, 1, 0.25)
    )
    cases.assert_close(mixed, jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, g0, g1))


# Arguments.


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("make", "name"),
    [(bam.dp_sat, "radius"), (bam.bam_sam, "radius"), (bam.bam_exact, "penalty")],
)
def test_a_bad_distance_is_refused_by_name(make, name, bad):
    with pytest.raises(ValueError, match=name):
        make(cases.quadratic, **{name: bad})


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan")])
def test_a_mix_outside_zero_to_one_is_refused_by_name(bad):
    with pytest.raises(ValueError, match="mix"):
        bam.bam_sam(cases.quadratic, radius=0.1, mix=bad)
