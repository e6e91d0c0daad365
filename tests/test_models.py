"""Models are pure functions of rows that do not see each other."""

import jax
import numpy as np
import pytest

from bam import models
from bam.models.layers import _conv2d_as_matmul


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_convolution_as_a_matrix_product_is_xlas_convolution(kernel_size):
    image_key, kernel_key = jax.random.split(jax.random.key(0))
    images = jax.random.normal(image_key, (2, 6, 5, 3))
    kernel = jax.random.normal(kernel_key, (kernel_size, kernel_size, 3, 4))
    expected = jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    np.testing.assert_allclose(_conv2d_as_matmul(images, kernel), expected, atol=1e-4)


@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_a_batch_of_one_equals_a_slice_of_many(name):
    model = models.as_functions(models.create(name, 10, 8), (8, 8, 1))
    params = model.init(jax.random.key(0))
    images = jax.random.normal(jax.random.key(1), (3, 8, 8, 1))
    many = model.logits(params, images)
    assert many.shape == (3, 10)
    np.testing.assert_allclose(model.logits(params, images[1:2])[0], many[1], atol=1e-5)


def test_the_loss_of_an_example_is_the_mean_over_its_views():
    model = models.as_functions(models.create("convnet", 10, 8), (8, 8, 1))
    params = model.init(jax.random.key(0))
    views = jax.random.normal(jax.random.key(1), (2, 8, 8, 1))
    label = np.int32(3)
    losses = [model.loss(params, {"image": v[None], "label": label}) for v in views]
    whole = model.loss(params, {"image": views, "label": label})
    np.testing.assert_allclose(whole, np.mean(losses), rtol=1e-5)


def test_unknown_and_impossible_models_are_refused():
    with pytest.raises(ValueError, match="unknown model"):
        models.create("resnet152", 10, 16)
    with pytest.raises(ValueError, match="at least 2 classes"):
        models.create("linear", 1, 16)
    with pytest.raises(ValueError, match="width"):
        models.create("convnet", 10, 0)
