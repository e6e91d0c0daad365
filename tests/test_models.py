"""Models are pure functions of rows that do not see each other."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bam
from bam import models
from bam.core import pytree
from bam.core.gaussian import GaussianNoise
from bam.core.own_weights import own_weights
from bam.models.layers import (
    Conv,
    GroupNorm,
    average_pool,
    conv2d,
    convolutions_as,
    mish,
    standardise_weights,
)
from tests.cases import derivatives, distance, mostly, norm64, refused, thoroughly


@pytest.mark.parametrize(("kernel_size", "stride"), [(1, 1), (3, 1), (5, 1), (1, 2), (3, 2)])
def test_convolution_as_a_matrix_product_is_xlas_convolution(kernel_size, stride):
    image_key, kernel_key = jax.random.split(jax.random.key(0))
    images = jax.random.normal(image_key, (2, 6, 5, 3))
    kernel = jax.random.normal(kernel_key, (kernel_size, kernel_size, 3, 4))
    expected = jax.lax.conv_general_dilated(
        images, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    with convolutions_as("matmul"):
        found = conv2d(images, kernel, stride)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def assert_all_close(found, expected):
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.thorough
def test_all_derivatives_agree_between_formulations_in_float64():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = average_pool(mish(GroupNorm(2)(Conv(4)(x))))
            return jnp.sum(jnp.sin(GroupNorm(4)(Conv(4, stride=2)(x))))

    with jax.enable_x64(True):
        images = jax.random.normal(jax.random.key(0), (3, 8, 6, 3), jnp.float64)
        params = Block().init(jax.random.key(1), images)
        params = jax.tree.map(lambda x: x.astype(jnp.float64) + 0.1 * jnp.cos(x), params)
        found = []
        for name in ("matmul", "xla", "grouped", "tpu"):
            with convolutions_as(name):
                found.append(jax.jit(lambda *a: derivatives(Block().apply, *a))(params, images))
        for other in found[1:]:
            assert_all_close(found[0], other)


def test_group_norm_and_its_gradients_are_flaxes():
    ours, flaxes = GroupNorm(3), nn.GroupNorm(num_groups=3, epsilon=1e-5, use_fast_variance=False)
    with jax.enable_x64(True):
        images = 5 + jax.random.normal(jax.random.key(0), (2, 4, 5, 6), jnp.float64)
        weights = jax.random.normal(jax.random.key(1), images.shape, jnp.float64)
        params = {
            "scale": jax.random.normal(jax.random.key(2), (6,), jnp.float64),
            "bias": jax.random.normal(jax.random.key(3), (6,), jnp.float64),
        }

        def probe(module):
            @jax.jit
            def value(params, images):
                return jnp.sum(weights * module.apply({"params": params}, images))

            gradient = jax.grad(value, argnums=(0, 1))
            return value(params, images), gradient(params, images)

        assert_all_close(probe(ours), probe(flaxes))


def test_group_norm_of_a_constant_image_is_its_bias_and_has_a_finite_gradient():
    def value(images):
        return jnp.sum(GroupNorm(2).apply({"params": params}, images))

    params = {"scale": jnp.ones(4), "bias": jnp.arange(4.0)}
    images = jnp.full((1, 3, 3, 4), 1e3)
    assert value(images) == 9 * (0 + 1 + 2 + 3)
    assert np.isfinite(jax.grad(value)(images)).all()


@pytest.mark.parametrize("side", [4, 5])
def test_average_pooling_is_flaxes(side):
    images = jax.random.normal(jax.random.key(0), (2, side, side, 3))
    expected = nn.avg_pool(images, (2, 2), strides=(2, 2))
    np.testing.assert_allclose(average_pool(images), expected, rtol=1e-6, atol=1e-6)


def test_normalising_and_pooling_are_the_same_in_each_formulation_up_to_second_derivatives():
    norm, side = GroupNorm(2), 5

    def value(params, images):
        return jnp.sum(jnp.sin(average_pool(mish(norm.apply({"params": params}, images)))))

    def derivatives(params, images):
        gradient, hessian_vector_product = jax.linearize(jax.grad(value, (0, 1)), params, images)
        return value(params, images), gradient, hessian_vector_product(params, jnp.cos(images))

    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 3)
        images = jax.random.normal(keys[0], (3, 2, side, side, 4), jnp.float64)
        params = {
            "scale": jax.random.normal(keys[1], (4,), jnp.float64),
            "bias": jax.random.normal(keys[2], (4,), jnp.float64),
        }
        found = {}
        for convolution, own in (("matmul", False), ("xla", False), ("tpu", False), ("tpu", True)):
            # Not `jit(derivatives)` itself: JAX would find it traced already, another way.
            fn = jax.jit(lambda p, x: jax.vmap(derivatives, (None, 0))(p, x))
            token = own_weights.set(own)
            with convolutions_as(convolution):
                windows = "reduce_window_sum" in str(jax.make_jaxpr(fn)(params, images))
                assert windows == (convolution == "tpu" and own)
                found[convolution, own] = fn(params, images)
            own_weights.reset(token)
        expected, *others = map(jax.tree.leaves, found.values())
        for other in others:
            for ours, theirs in zip(other, expected, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


SECOND = [(bam.bam_sam, 1), (bam.bam_exact, 0)]


@pytest.mark.thorough
@pytest.mark.parametrize(("method", "ascent_views"), mostly(SECOND, slow=SECOND[1:]))
def test_gradients_at_weights_of_an_examples_own_agree_between_formulations(method, ascent_views):
    module, shape = models.create("convnet", 10, 4), (16, 16, 3)
    each = {how: models.as_functions(module, shape, convolution=how) for how in ("matmul", "tpu")}
    params = each["tpu"].init(jax.random.key(0))
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
        images = jax.random.normal(jax.random.key(1), (3, 2, *shape), jnp.float64)
        batch = {"image": images, "label": jnp.arange(3)}
        clip = bam.clip_by_l2_norm(1.0)
        found = {}
        for convolution, model in each.items():
            grad = method(model.loss, 0.1, ascent_views=ascent_views).grad
            windows = "reduce_window_sum" in str(
                jax.make_jaxpr(jax.vmap(grad, (None, 0)))(params, batch)
            )
            assert windows == (convolution == "tpu")
            noise = GaussianNoise(bam.seeded_key(2), 1.0)
            found[convolution] = [
                bam.clipped_sum(grad, clip, params, batch, mask=None, microbatch_size=size, noise=n)
                for size, n in ((1, None), (3, None), (3, noise))
            ]
        for ours, theirs in zip(*map(jax.tree.leaves, found.values()), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-5)
        for ours, theirs in zip(*(jax.tree.leaves(f[:2]) for f in found.values()), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def test_bfloat16_changes_gradients_by_a_few_percent_and_leaves_them_float32():
    module, shape = models.create("convnet", 10, 8), (16, 16, 3)
    exact = models.as_functions(module, shape)
    rounded = models.as_functions(module, shape, precision="bfloat16")
    params = exact.init(jax.random.key(0))
    images = jax.random.normal(jax.random.key(1), (2, *shape))
    example = {"image": images, "label": np.int32(3)}
    expected, found = (jax.jit(jax.grad(m.loss))(params, example) for m in (exact, rounded))
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32)}
    assert jax.eval_shape(rounded.loss, params, example).dtype == jnp.float32
    error = distance(found, expected) / norm64(expected)
    assert 1e-4 < error < 0.05  # it does round, and no more than eight bits of mantissa explain


@pytest.mark.parametrize(
    ("precision", "asked"),
    [("float32", jax.lax.Precision.HIGHEST), ("tensorfloat32", jax.lax.Precision.HIGH)],
)
def test_matrix_products_ask_for_the_precision_that_was_chosen(precision, asked):
    module = models.create("linear", 10, 1)
    model = models.as_functions(module, (3,), precision=precision)
    params = jax.tree.map(jnp.ones_like, model.init(jax.random.key(0)))
    example = {"image": jnp.ones((1, 3)), "label": np.int32(3)}
    program = jax.make_jaxpr(jax.grad(model.loss))(params, example)
    products = [e for e in program.eqns if e.primitive.name == "dot_general"]
    assert products
    assert {p for e in products for p in e.params["precision"]} == {asked}


def test_mish_and_its_two_derivatives_are_the_textbook_ones():
    with jax.enable_x64(True):
        x = jnp.concatenate([jnp.linspace(-120, 120, 4801), jnp.array([-1e30, 1e30])])
        ours, textbook = mish, lambda x: x * jnp.tanh(jax.nn.softplus(x))
        for _ in range(3):  # the function, its first and its second derivative
            expected = jax.vmap(textbook)(x)
            np.testing.assert_allclose(jax.vmap(ours)(x), expected, rtol=1e-12, atol=1e-12)
            in_float32 = jax.vmap(ours)(x.astype(jnp.float32))
            np.testing.assert_allclose(in_float32, expected, rtol=1e-5, atol=1e-5)
            ours, textbook = jax.grad(ours), jax.grad(textbook)


def test_weight_standardisation_centres_and_scales_each_output_feature():
    kernel = 3 + 2 * jax.random.normal(jax.random.key(0), (3, 3, 8, 4))
    np.testing.assert_array_equal(standardise_weights(kernel, "none"), kernel)
    centred = standardise_weights(kernel, "centre")
    np.testing.assert_allclose(centred.mean(axis=(0, 1, 2)), 0, atol=1e-6)
    np.testing.assert_allclose(
        centred - kernel, (centred - kernel)[:1, :1, :1] + 0 * kernel, atol=1e-5
    )
    standardised = standardise_weights(kernel, "standardise")
    np.testing.assert_allclose(standardised.var(axis=(0, 1, 2)) * 72, 1, rtol=1e-4)


def test_standardised_weights_and_all_derivatives_are_the_textbook_ones():
    def textbook(kernel, gain):
        centred = kernel - kernel.mean(axis=(0, 1, 2))
        variance = jnp.mean(jnp.square(centred), axis=(0, 1, 2))
        return gain * centred / jnp.sqrt(jnp.maximum(variance * 45, 1e-4))

    def ours(kernel, gain):
        return standardise_weights(kernel, "standardise", gain)

    with jax.enable_x64(True):
        kernel = 3 + jax.random.normal(jax.random.key(0), (3, 3, 5, 4), jnp.float64)
        kernel = kernel.at[..., 0].multiply(1e-4)  # a feature whose variance is below the floor
        gain = jax.random.normal(jax.random.key(1), (4,), jnp.float64)

        def loss(form):
            return lambda kernel, gain: jnp.sum(jnp.sin(form(kernel, gain) + kernel))

        got, expected = (
            jax.jit(lambda *a, form=form: derivatives(loss(form), *a))(kernel, gain)
            for form in (ours, textbook)
        )
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
        far = 1e3 + kernel[..., 1:]  # float32 has no digits left of the others
        in_float32 = ours(far.astype(jnp.float32), gain[1:].astype(jnp.float32))
        np.testing.assert_allclose(in_float32, ours(far, gain[1:]), rtol=2e-3, atol=2e-3)


# Parameter counts published for, or counted in, the models' sources.
GOLDEN_COUNTS = [
    ("resnet9", 10, 64, {}, 2_447_946),
    ("resnet9", 100, 64, {}, 2_540_196),
    ("resnet9", 10, 64, {"scale_norm": True}, 2_447_946 + 768),
    ("resnet9", 10, 64, {"weight_standardisation": "centre"}, 2_447_946),
    # Each symmetry more divides all but the biases of the logits.
    *[("resnet9", 10, 16, {"symmetries": n}, (155_802 - 10) // n + 10) for n in (1, 2, 4, 8)],
    ("wide_resnet", 10, 4, {}, 2_753_818),
    ("wide_resnet_bam", 1000, 4, {}, 3_005_112),
    ("resnet18", 2, 64, {}, 11_177_538),
]


@pytest.mark.parametrize(
    ("name", "num_classes", "width", "options", "count"),
    thoroughly(GOLDEN_COUNTS, *GOLDEN_COUNTS[:3]),
)
def test_models_have_the_papers_parameter_counts(name, num_classes, width, options, count):
    module = models.create(name, num_classes, width, **options)
    model = models.as_functions(module, (32, 32, 3))
    assert pytree.num_params(jax.eval_shape(model.init, jax.random.key(0))) == count


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "side"), [("convnet", 8), ("lenet5", 8), ("linear", 8), ("resnet9", 16)]
)
def test_a_batch_of_one_equals_a_slice_of_many(name, side):
    model = models.as_functions(models.create(name, 10, 4), (side, side, 1))
    params = model.init(jax.random.key(0))
    images = jax.random.normal(jax.random.key(1), (3, side, side, 1))
    logits = jax.jit(model.logits)
    many = logits(params, images)
    assert many.shape == (3, 10)
    np.testing.assert_allclose(logits(params, images[1:2])[0], many[1], rtol=1e-4, atol=1e-4)


def as_functions(name, num_classes, width, shape, **options):
    return models.as_functions(models.create(name, num_classes, width, **options), shape)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("resnet152", 10, 16, ()), {}, "unknown model"),
        (("linear", 0, 16, ()), {}, "at least one output"),
        (("linear", 10, 1, ()), {"scale_norm": True}, "linear does not take"),
        (("resnet9", 10, 8, ()), {"weight_standardisation": "center"}, "weight_standardisation"),
        (("wide_resnet", 10, 1, (32, 32, 3)), {"depth": 17}, "6n"),
        (("deep_residual", 10, 1, (3,)), {"depth": 1}, "depth of at least 2"),
        (("resnet9", 10, 8, (28, 28, 1)), {}, "multiples of 16"),
        (("resnet9", 10, 8, (32, 32, 3)), {"symmetries": 3}, "must be 1, 2, 4 or 8 .* got 3 and 8"),
        (("resnet9", 10, 12, (32, 32, 3)), {"symmetries": 8}, "divide model.width, got 8 and 12"),
        (("convnet", 10, 8, (32, 32, 3)), {"symmetries": 2}, "convnet does not take"),
        (("vit_ti16", 2, 1, (20, 20, 3)), {}, "multiples of 16"),
        (("convnet", 10, 0, ()), {}, "width"),
        (("convnet", 10, 8, (1, 30, 1)), {}, "inputs of shape .* to nothing"),
    ],
)
def test_unknown_and_impossible_models_are_refused(arguments, options, message):
    refused(message, as_functions, *arguments, **options)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "option", "first", "then"),
    [
        ("resnet9", {}, "Conv_0", lambda norm, x: norm(x)),
        ("resnet9", {"norm_last": True}, "Conv_0", lambda norm, x: norm(mish(x))),
        ("wide_resnet", {}, "Conv_0", lambda norm, x: norm(nn.relu(x))),
        ("wide_resnet", {"shortcut_norm_first": True}, "Conv_0", lambda norm, x: norm(x)),
    ],
)
def test_layers_are_in_the_order_that_is_asked_for(name, option, first, then):
    width, depth = (4, {}) if name == "resnet9" else (1, {"depth": 10})
    module, plain = (models.create(name, 10, width, **depth, **own) for own in (option, {}))
    images = jax.random.normal(jax.random.key(0), (1, 16, 16, 3))
    params = jax.jit(module.init)(jax.random.key(1), images)
    assert pytree.same_structure(params, jax.eval_shape(plain.init, jax.random.key(1), images))
    seeing = {"capture_intermediates": True, "mutable": ["intermediates"]}
    _, seen = jax.jit(lambda *given: module.apply(*given, **seeing))(params, images)
    outputs = seen["intermediates"]
    [convolved], [normed] = (outputs[layer]["__call__"] for layer in (first, "GroupNorm_0"))
    groups = 4 if name == "resnet9" else 16

    def norm(x):
        parts = x.reshape(1, -1, groups, x.shape[-1] // groups)
        mean, var = parts.mean((1, 3), keepdims=True), parts.var((1, 3), keepdims=True)
        return ((parts - mean) / jnp.sqrt(var + 1e-5)).reshape(x.shape)

    np.testing.assert_allclose(normed, then(norm, convolved), atol=1e-4)
