"""The symmetries of a square, and convolution kernels that are tied over a group of them."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

ORDERS = (1, 2, 4, 8)


class Symmetry(NamedTuple):
    """An optional mirroring of left and right, followed by `turns` turns by 90°."""

    mirrored: bool
    turns: int

    def inverse(self) -> "Symmetry":
        """Returns the inverse symmetry.

        A mirroring with any turns is its own inverse.
        """
        return self if self.mirrored else Symmetry(False, -self.turns % 4)

    def after(self, first: "Symmetry") -> "Symmetry":
        """Returns the symmetry that applies `first`, then this one."""
        turns = self.turns + (-first.turns if self.mirrored else first.turns)
        return Symmetry(self.mirrored != first.mirrored, turns % 4)

    def __call__(
        self, images: Float[Array, "..."], axes: tuple[int, int] = (0, 1)
    ) -> Float[Array, "..."]:
        """Returns images or kernels, mirrored and turned over two axes."""
        mirrored = jnp.flip(images, axes[1]) if self.mirrored else images
        return jnp.rot90(mirrored, self.turns, axes)


def group(order: int) -> Sequence[Symmetry]:
    """Returns the group of an order.

    1 is the identity, 2 adds the mirroring, 4 is the turns, and 8 is all symmetries.
    """
    return [
        Symmetry(mirrored, turns)
        for mirrored in ((False, True) if order in (2, 8) else (False,))
        for turns in range(4 if order >= 4 else 1)
    ]


def tied_kernel(
    kernel: Float[Array, "k k c f"], order: int, lifting: bool = False
) -> Float[Array, "k k c f_order"]:
    r"""Returns an equivariant convolution's kernel, $W_{hg} = g\,\psi_{g^{-1} h}$, from weights ψ.

    Channels are fields with one number for each symmetry g. The input of a `lifting` convolution is
    images, whose channels are not fields: $W_g = g\,\psi$.

    Source: Cohen and Welling 2016 (arXiv 1602.07576).
    """
    symmetries = group(order)
    if lifting:
        return _fields([g(kernel) for g in symmetries])
    side, _, channels, features = kernel.shape
    kernel = kernel.reshape(side, side, channels // order, order, features)
    each = []
    for g in symmetries:
        parts = jax.lax.split(g(kernel), (1,) * order, axis=3)
        relative = [symmetries.index(g.inverse().after(h)) for h in symmetries]
        each.append(jnp.concatenate([parts[i] for i in relative], axis=3))
    return _fields(each).reshape(side, side, channels, features * order)


def _fields(each: Sequence[Array]) -> Array:
    """Arrays for the symmetries, interleaved along the last axis, so that a field is contiguous."""
    stacked = jnp.stack(each, axis=-1)
    return stacked.reshape(*stacked.shape[:-2], -1)


def invariant(images: Float[Array, "n s s f_order"], order: int) -> Float[Array, "n s s f"]:
    r"""Means over a field, $\sum_g g^{-1} x_g / |G|$, which no symmetry of the input changes."""
    n, height, width, channels = images.shape
    fields = images.reshape(n, height, width, channels // order, order)
    upright = [g.inverse()(fields[..., i], (1, 2)) for i, g in enumerate(group(order))]
    return jnp.mean(jnp.stack(upright), axis=0)
