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
from jaxtyping import Array, Bool, Float, Int32

from bam.core import scalars
from bam.core import strategy as strategies
from bam.core.gaussian import LEAST_STD, MOST_STD, GaussianNoise, check_std, spacing_of
from bam.core.scalars import Number
from bam.errors import InputError

LIMB_BITS = 16
LIMB_MASK = 2**LIMB_BITS - 1
# Integers that are sure to fit: an entry of one row, the sum that is carried over, and all rows.
MOST_OF_ROW, MOST_OF_SUM, MOST_OF_ALL = 2**29, 2**31 - 2**LIMB_BITS, 2**46


class Total(NamedTuple):
    """A sum in integers, high · 2^16 + low: 32 bits are too few."""

    high: Int32[Array, "..."]
    low: Int32[Array, "..."]  # from 0 to 2^16 - 1 once the total is `carried`


def cut(x: Float[Array, "..."], spacing: Number) -> Int32[Array, "..."]:
    """Entries below 2^31 spacings in integer multiples of it, rounded towards zero: no norm grows.

    Or by a relative 3e-7 at most: 1 / spacing, on a GPU within 2 ulp, and its product with x are
    rounded to float32 first.
    """
    return (x * (1 / spacing)).astype(jnp.int32)


def carried(total: Total) -> Total:
    """The same number with its low part from 0 to 2^16 - 1: the one way to write it."""
    return Total(total.high + (total.low >> LIMB_BITS), total.low & LIMB_MASK)


def to_float(total: Total, spacing: Number, dtype: np.dtype) -> Float[Array, "..."]:
    """A total as a number in float32 or float64; equal totals, if `carried`, give equal floats."""
    whole = total.high.astype(dtype) * (2**LIMB_BITS) + total.low.astype(dtype)
    return whole * jnp.asarray(spacing, dtype)


def rows_per_sum(
    sensitivity: Number, noise_std: Number, batch_size: int
) -> tuple[int | Int32[Array, ""], bool | Bool[Array, ""]]:
    """How many rows' integers 32 bits surely hold the sum of, and whether these numbers are right.

    InputError for numbers that cannot be; where JAX traces one of them it is False instead. Right
    are bounds that are finite, and noise that 32-bit floats hold and that can hide a row.
    """
    if scalars.is_known(sensitivity) and not math.isfinite(sensitivity):
        raise InputError(f"noise cannot hide a sum that is not bounded (sensitivity {sensitivity})")
    check_std(noise_std)
    if scalars.is_known(sensitivity, noise_std):
        # The most of one entry, with more room than below: a program then finds no fewer rows.
        most = math.ceil(sensitivity * (1 + 2.2e-5) / spacing_of(noise_std)) + 3
        if most > MOST_OF_ROW or most * batch_size > MOST_OF_ALL:
            raise InputError(
                f"noise of standard deviation {noise_std:.3g} is too small beside a sensitivity of "
                f"{sensitivity:.3g} and {batch_size} rows: it would hide nothing"
            )
        return MOST_OF_SUM // most, True
    # The same in 32-bit floats, with room for their rounding beside the 1e-5 of `ROUNDING`.
    row_bound = sensitivity * (1 + 2e-5) / spacing_of(noise_std)
    is_right = (
        jnp.isfinite(row_bound)
        & (sensitivity >= 0)
        & (noise_std >= LEAST_STD)
        & (noise_std <= MOST_STD)
        & (row_bound <= MOST_OF_ROW)
        & (row_bound * (batch_size * (1 + 1e-6)) <= float(MOST_OF_ALL))
    )
    known = jnp.where(is_right, row_bound, MOST_OF_ROW)
    return jax.lax.div(np.int32(MOST_OF_SUM), jnp.ceil(known).astype(jnp.int32) + 2), is_right


def fitting_size(microbatch_size: int, num_rows: int | Int32[Array, ""]) -> int:
    """Rows of a microbatch, of which `num_rows` fit a sum: as many as asked, or else 2^k.

    These are few sizes, since each is a program of its own. Where JAX traces the number of rows, it
    is as many as asked, and the sum is NaN if they do not fit.
    """
    if not isinstance(num_rows, int) or num_rows >= microbatch_size:
        return microbatch_size
    return 2 ** (num_rows.bit_length() - 1)


def add_share(noise: GaussianNoise, total: Total, device: Array | int, num_devices: int) -> Total:
    """Adds one device's share of the noise to its own share of a sum, `[entries]`.

    The shares of all devices are the noise of the whole sum: entry i has draw number i. The total
    that is returned is not `carried`.
    """
    num_entries = total.low.size
    drawn = noise.share(num_entries, device, num_devices)
    if num_devices > 1:
        zeros = jnp.zeros(num_devices * len(drawn), jnp.int32)
        drawn = jax.lax.dynamic_update_slice_in_dim(zeros, drawn, device * len(drawn), 0)
    drawn = drawn[:num_entries]
    return Total(total.high + (drawn >> LIMB_BITS), total.low + (drawn & LIMB_MASK))


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
