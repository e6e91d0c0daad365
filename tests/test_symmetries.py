"""Networks whose kernels are tied over turns and mirrorings do not change with them."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bam import models
from bam.models.layers import Conv, GroupNorm, mish
from bam.models.symmetries import ORDERS, group, invariant, tied_kernel
from tests.cases import row


@pytest.mark.parametrize("order", ORDERS)
def test_symmetries_are_a_group_of_different_ones(order):
    image = jnp.arange(6.0).reshape(3, 2)
    symmetries = group(order)
    assert len({(x := np.asarray(g(image))).shape + tuple(x.flat) for g in symmetries}) == order
    for g, h in itertools.product(symmetries, repeat=2):
        assert g.after(h) in symmetries
        np.testing.assert_array_equal(g.after(h)(image), g(h(image)))
        np.testing.assert_array_equal(g.inverse()(g(image)), image)


PLAIN = {"scale_norm": True, "weight_standardisation": "centre"}
LAST = {"norm_last": True, "weight_standardisation": "standardise"}


@pytest.mark.parametrize(
    ("order", "formulation", "options"),
    [
        (1, "matmul", PLAIN),
        (2, "matmul", PLAIN),
        (4, "xla", LAST),
        (8, "matmul", LAST),
        (8, "xla", PLAIN),
    ],
)
def test_logits_change_with_all_but_the_symmetries_of_the_network(order, formulation, options):
    network = models.create("resnet9", 3, 8, symmetries=order, **options)
    model = models.as_functions(network, (16, 16, 3), convolution=formulation)
    params = jax.tree.map(
        lambda x: x + 0.2 * jnp.cos(jnp.arange(x.size).reshape(x.shape)),
        model.init(jax.random.key(0)),
    )
    image = jax.random.normal(jax.random.key(1), (16, 16, 3))
    moved = jnp.stack([symmetry(image) for symmetry in group(8)])
    logits = np.asarray(jax.jit(model.logits)(params, moved))
    change = dict(zip(group(8), np.abs(logits - logits[0]).max(axis=1), strict=True))
    assert max(change[symmetry] for symmetry in group(order)) < 1e-5
    assert all(change[symmetry] > 1e-3 for symmetry in group(8) if symmetry not in group(order))


def test_one_symmetry_ties_and_averages_nothing():
    kernel = jax.random.normal(jax.random.key(0), (4, 4, 4, 5))
    for lifting in (False, True):
        np.testing.assert_array_equal(tied_kernel(kernel, 1, lifting), kernel)
    np.testing.assert_array_equal(invariant(kernel, 1), kernel)


class Small(nn.Module):
    """All layers that know of symmetries."""

    @nn.compact
    def __call__(self, images):
        x = Conv(8, symmetries=4, lifting=True)(images)
        x = mish(GroupNorm(2, 4)(x))
        return invariant(Conv(8, symmetries=4)(x), 4)[:, 0, 0]


def test_the_gradient_of_an_example_is_the_same_by_itself_and_among_others():
    batch = {
        "image": jax.random.normal(jax.random.key(0), (3, 1, 4, 4, 1)),
        "label": jnp.arange(3) % 2,
    }
    gradients = {}
    for convolution in ("matmul", "xla"):
        model = models.as_functions(Small(), (4, 4, 1), convolution=convolution)
        params = model.init(jax.random.key(1))
        gradient = jax.grad(model.loss)
        gradients[convolution] = jax.jit(jax.vmap(gradient, (None, 0)))(params, batch)
    alone = [jax.jit(gradient)(params, row(batch, i)) for i in range(3)]
    for together in gradients.values():
        for i, example in enumerate(alone):
            jax.tree.map(
                lambda mine, theirs: np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6),
                row(together, i),
                example,
            )
