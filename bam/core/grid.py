r"""Sums and noise in integers, where nothing is rounded.

A bounded gradient is cut, towards zero, to integer multiples of a *spacing*; the multiples are
added as integers, in any order the same; Gaussian noise in integer multiples is added to them; only
then is the total a floating-point number again. Two things follow:

* one example changes the sum by its own entries and by nothing else, whatever the others are: there
  is no rounding that its presence could tip over;
* the noised sum is the *rounded* Gaussian mechanism. For an integer x, round(x + Z) is
  x + round(Z): adding rounded noise to integers is rounding the noised sum, which is
  post-processing. Every output is possible with and without any one example.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, PyTree

from bam.core import strategy as strategies
from bam.core.clipping import ROUNDING
from bam.core.gaussian import GaussianNoise, spacing_of
from bam.errors import InputError

LIMB_BITS = 16
LIMB_MASK = 2**LIMB_BITS - 1


class Total(NamedTuple):
    """A sum in integers, high · 2^16 + low: 32 bits are too few."""

    high: Int32[Array, "..."]
    low: Int32[Array, "..."]  # from 0 to 2^16 - 1 once the total is `carried`


def cut(x: Float[Array, "..."], spacing: float) -> Int32[Array, "..."]:
    """Entries below 2^31 spacings in integer multiples of it, rounded towards zero: no norm grows.

    Or by a relative 1e-7 at most: x / spacing is rounded to float32 first.
    """
    return (x * (1 / spacing)).astype(jnp.int32)


def carried(total: Total) -> Total:
    """The same number with its low part from 0 to 2^16 - 1: the one way to write it."""
    return Total(total.high + (total.low >> LIMB_BITS), total.low & LIMB_MASK)


def to_float(total: Total, spacing: float, dtype: np.dtype) -> Float[Array, "..."]:
    """A total as a number in float32 or float64; equal totals, if `carried`, give equal floats."""
    whole = total.high.astype(dtype) * (2**LIMB_BITS) + total.low.astype(dtype)
    return whole * jnp.asarray(spacing, dtype)


def rows_per_sum(sensitivity: float, noise_std: float, batch_size: int) -> int:
    """How many rows' integers 32 bits surely hold the sum of."""
    if not math.isfinite(sensitivity):
        raise InputError(f"noise cannot hide a sum that is not bounded (sensitivity {sensitivity})")
    most = math.ceil(sensitivity * ROUNDING / spacing_of(noise_std)) + 1  # of one entry
    if most > 2**29 or most * batch_size > 2**46:
        raise InputError(
            f"noise of standard deviation {noise_std:.3g} is too small beside a sensitivity of "
            f"{sensitivity:.3g} and {batch_size} rows: it would hide nothing"
        )
    return (2**31 - 2**LIMB_BITS) // most


def add_share(noise: GaussianNoise, total: PyTree, device: Array | int, num_devices: int) -> PyTree:
    """Adds one device's share of the noise to its own share of a sum.

    The shares of all devices are the noise of the whole sum: entry i of all leaves in order has
    draw number i. The tree of `Total`s that is returned is not `carried`.
    """
    leaves: list[Total] = jax.tree.leaves(total, is_leaf=_is_total)
    sizes = [leaf.low.size for leaf in leaves]
    drawn = noise.share(sum(sizes), device, num_devices)
    if num_devices > 1:
        zeros = jnp.zeros(num_devices * len(drawn), jnp.int32)
        drawn = jax.lax.dynamic_update_slice_in_dim(zeros, drawn, device * len(drawn), 0)
    noised = []
    for leaf, begin in zip(leaves, np.cumsum([0, *sizes]), strict=False):
        own = jax.lax.slice_in_dim(drawn, begin, begin + leaf.low.size).reshape(leaf.low.shape)
        noised.append(Total(leaf.high + (own >> LIMB_BITS), leaf.low + (own & LIMB_MASK)))
    return jax.tree.unflatten(jax.tree.structure(total, is_leaf=_is_total), noised)


def _is_total(x: object) -> bool:
    return isinstance(x, Total)


def correlated(
    fresh: Int32[Array, " n"], past: Int32[Array, "past n"], strategy: Sequence[float]
) -> Int32[Array, " n"]:
    r"""$n_t = z_t - \lfloor \sum_{j \ge 1} c_j n_{t-j} \rfloor$, exactly; see `bam.core.strategy`.

    `fresh` is z_t, `past` the noise before, the newest first. The strategy passes its `check`.
    """
    # Products of 8 bits and 32, in two parts: of the past's lowest 12 bits and of the others.
    weights = [round(c * strategies.UNITS) for c in strategy[1:]]
    high = sum(k * (n >> 12) for k, n in zip(weights, past, strict=True))
    low = sum(k * (n & (2**12 - 1)) for k, n in zip(weights, past, strict=True))
    return fresh - ((high << 4) + (low >> 8))
