"""Convolutions whose kernel gradients are grouped compute what XLA's convolutions compute."""

import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bam
from bam import models
from bam.core.engine import plain_sum
from bam.models import grouped
from bam.models.layers import Conv, convolutions_as
from tests.cases import assert_same_bits, derivatives, distance, norm64, thoroughly

FORMS = ("grouped", "xla")
NUM_EXAMPLES = 3
POST = Path(__file__).parents[1] / "benchmarks" / "vmapped_kernel_gradients.md"
# Options of both convolutions of a network, and the side of its images.
LAYERS = {
    "3×3": ({}, 6),
    "1×1": ({"kernel_size": 1}, 4),
    "5×5": ({"kernel_size": 5}, 5),
    "strides": ({"stride": 2}, 8),
    "symmetric padding": ({"stride": 2, "symmetric": True}, 8),
    "1×1 with strides": ({"kernel_size": 1, "stride": 2}, 5),
    "patches": ({"kernel_size": 4, "stride": 4}, 16),
    "symmetries": ({"symmetries": 4}, 4),
    "centred weights": ({"weight_standardisation": "centre", "use_bias": True}, 4),
    "standardised weights": ({"weight_standardisation": "standardise", "gain_and_bias": True}, 4),
}


@pytest.fixture
def grouped_here(monkeypatch):
    """Groups on a CPU, too: its numbers are the same, but for NaN."""
    monkeypatch.setattr(grouped, "PLATFORMS", ("cuda", "cpu"))


class Net(nn.Module):
    options: dict

    @nn.compact
    def __call__(self, images):
        lifting = {"lifting": True} if "symmetries" in self.options else {}
        between = jnp.tanh(Conv(8, **self.options, **lifting)(images))
        return jnp.sin(Conv(4, **self.options)(between)).mean(axis=(1, 2))


def case(options, side, dtype=jnp.float32):
    """The loss of an example, parameters, and a batch of two views of each example."""
    keys = jax.random.split(jax.random.key(0), 3)
    net, shape = Net(options), (side, side, 3)
    params = net.init(keys[0], jnp.zeros((1, *shape)))
    params = jax.tree.map(lambda x: (x + 0.1 * jnp.cos(x)).astype(dtype), params)
    images = jax.random.normal(keys[1], (NUM_EXAMPLES, 2, *shape), dtype)
    weights = jax.random.normal(keys[2], (4,), dtype)
    return lambda p, x: jnp.mean(jnp.square(net.apply(p, x["image"]) @ weights)), params, images


def gradients_of_methods(loss, params, images):
    """Each method's gradient of each example, and the gradient of all examples' mean loss."""
    batch = {"image": images}
    sat = bam.dp_sat(loss, 0.1)
    methods = {
        "dp_sgd": bam.dp_sgd(loss),
        "dp_sat": sat,
        "bam_sam": bam.bam_sam(loss, 0.1),
        "bam_exact": bam.bam_exact(loss, 0.1),
        "bam_exact of one view": bam.bam_exact(loss, 0.1, ascent_views=1),
    }
    shifted = sat.ascend(params, params)
    gradients = {
        name: jax.vmap(method.grad, (None, 0))(shifted if name == "dp_sat" else params, batch)
        for name, method in methods.items()
    }
    in_all = lambda p: jnp.mean(jax.vmap(loss, (None, 0))(p, batch))  # noqa: E731
    return gradients | {"ordinary": jax.grad(in_all)(params)}


def in_each_form(fn, *args):
    results = []
    for form in FORMS:
        with convolutions_as(form):
            # A new function, because JAX keeps the trace of a known one.
            results.append(jax.jit(lambda *a: fn(*a))(*args))
    return results


def assert_close_to_largest(results, expected, tolerance):
    for mine, theirs in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        mine, theirs = np.asarray(mine), np.asarray(theirs)
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance * np.abs(theirs).max())


@pytest.mark.parametrize("layer", thoroughly(LAYERS, "3×3"))
def test_the_gradients_of_each_method_are_those_of_xlas_convolutions(layer, grouped_here):
    loss, params, images = case(*LAYERS[layer])
    gradients = in_each_form(lambda *a: gradients_of_methods(loss, *a), params, images)
    assert_close_to_largest(*gradients, 1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("layer", LAYERS)
def test_derivatives_of_every_kind_are_those_of_xlas_convolutions_in_float64(layer, grouped_here):
    with jax.enable_x64(True):
        loss, params, images = case(*LAYERS[layer], jnp.float64)
        value = lambda p, x: loss(p, {"image": x})  # noqa: E731
        gradients = in_each_form(lambda *a: derivatives(value, *a), params, images[0])
        assert_close_to_largest(*gradients, 1e-12)
        methods = in_each_form(lambda *a: gradients_of_methods(loss, *a), params, images)
        assert_close_to_largest(*methods, 1e-12)


@pytest.mark.parametrize(
    ("name", "options"),
    thoroughly(
        [
            ("lenet5", {}),
            ("resnet9", {}),
            ("resnet9", {"symmetries": 4}),
            ("wide_resnet", {"depth": 10}),
            ("convnet", {}),
        ]
    ),
)
def test_models_have_the_same_gradients_of_examples(name, options, grouped_here):
    module, shape = models.create(name, 10, 4, **options), (16, 16, 3)
    gradients = []
    with jax.enable_x64(True):
        for form in FORMS:
            model = models.as_functions(module, shape, convolution=form)
            params = jax.tree.map(lambda x: x.astype(jnp.float64), model.init(jax.random.key(0)))
            images = jax.random.normal(jax.random.key(1), (3, 2, *shape), jnp.float64)
            batch = {"image": images, "label": jnp.arange(3)}
            gradients.append(jax.jit(jax.vmap(jax.grad(model.loss), (None, 0)))(params, batch))
        assert_close_to_largest(*gradients, 1e-10)


def test_bfloat16_gives_gradients_of_the_same_dtype_and_nearly_the_same_numbers(grouped_here):
    module, shape = models.create("convnet", 10, 8), (16, 16, 3)
    forms = [models.as_functions(module, shape, convolution=x, precision="bfloat16") for x in FORMS]
    params = forms[0].init(jax.random.key(0))
    images = jax.random.normal(jax.random.key(1), (3, 2, *shape))
    batch = {"image": images, "label": np.arange(3)}
    gradients, expected = (
        jax.jit(jax.vmap(jax.grad(model.loss), (None, 0)))(params, batch) for model in forms
    )
    assert {x.dtype for x in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.float32)}
    assert distance(gradients, expected) < 0.01 * norm64(expected)


def with_one_that_is_nan(method):
    """The gradients of three examples, of which the second is NaN, and without it."""
    loss, params, images = case(*LAYERS["3×3"])
    with convolutions_as("grouped"):
        gradients = jax.jit(jax.vmap(method(loss).grad, (None, 0)))
        return [gradients(params, {"image": x}) for x in (images.at[1].set(jnp.nan), images)]


@pytest.mark.parametrize("method", [bam.dp_sgd, lambda loss: bam.bam_exact(loss, 0.1)])
def test_an_example_that_is_nan_changes_no_bit_of_the_others(method):
    gradients, expected = with_one_that_is_nan(method)
    others = np.array([0, 2])
    assert_same_bits(*(jax.tree.map(lambda x: x[others], each) for each in (gradients, expected)))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))
    assert all(np.isnan(x[1]).all() for x in jax.tree.leaves(gradients))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what XLA makes of groups for a CPU")
def test_groups_on_a_cpu_would_let_a_nan_out_of_its_example(grouped_here):
    gradients, _ = with_one_that_is_nan(bam.dp_sgd)
    assert all(np.isnan(x).any(axis=(1, 2, 3, 4)).all() for x in jax.tree.leaves(gradients))


def program_of(fn, *args):
    return jax.jit(lambda *a: fn(*a)).lower(*args).as_text()


def group_counts(program):
    """The numbers of groups of the kernel gradients in a program."""
    return {int(x) for x in re.findall(r"batch_group_count = (\d+)", program)}


def test_the_two_forms_shown_to_jaxs_developers_compute_the_same():
    [code] = re.findall(r"```python\n(.+?)```", POST.read_text(encoding="utf-8"), re.DOTALL)
    shown, given = {}, "N, SIDE, C, F = 64, 32, 64, 128"
    assert given in code
    exec(code.partition("\nx, dy = ")[0].replace(given, "N, SIDE, C, F = 3, 8, 4, 5"), shown)
    x, dy = (np.random.default_rng(0).normal(size=(3, 8, 8, k)) for k in (4, 5))
    mapped, grouped = (
        shown[form](jnp.float32(x), jnp.float32(dy)) for form in ("mapped", "grouped")
    )
    assert mapped.shape == (3, 3, 3, 4, 5)
    np.testing.assert_allclose(mapped, grouped, rtol=1e-5, atol=1e-5)


def test_only_gradients_of_examples_are_grouped(grouped_here):
    loss, params, images = case(*LAYERS["3×3"])
    batch, size = {"image": images}, {"microbatch_size": NUM_EXAMPLES}
    ordinary = lambda p, x: plain_sum(loss, p, x, **size)  # noqa: E731
    each = jax.vmap(jax.grad(loss), (None, 0))
    for form in FORMS:
        with convolutions_as(form):
            assert group_counts(program_of(ordinary, params, batch)) == {1}
            counts = group_counts(program_of(each, params, batch))
            assert counts == ({1, NUM_EXAMPLES} if form == "grouped" else {1})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("precision", "asked"), [("float32", "HIGHEST"), ("tensorfloat32", "HIGH")]
)
def test_convolutions_ask_for_the_precision_that_was_chosen(form, precision, asked, grouped_here):
    module, shape = models.create("convnet", 10, 4), (16, 16, 3)
    model = models.as_functions(module, shape, convolution=form, precision=precision)
    params = model.init(jax.random.key(0))
    batch = {"image": jnp.ones((2, 1, *shape)), "label": np.arange(2)}
    program = program_of(jax.vmap(bam.bam_exact(model.loss, 0.1).grad, (None, 0)), params, batch)
    convolutions = [line for line in program.splitlines() if "stablehlo.convolution" in line]
    assert convolutions
    assert {x for c in convolutions for x in re.findall(r"precision (\w+)>", c)} == {asked}
    assert all("precision " in c for c in convolutions)
