r"""Sums and noise in integers, where nothing is rounded.

A bounded gradient is cut, towards zero, to integer multiples of a *spacing*. The multiples are
added as integers, so their order does not matter. Gaussian noise in integer multiples is added, and
only then does the total become a floating-point number. Two facts follow:

* One example changes the sum by its own entries alone, whatever the others are, because no rounding
  depends on its presence.
* The noised sum is the *rounded* Gaussian mechanism. For an integer x, round(x + Z) = x + round(Z),
  so adding rounded noise to integers is the same as rounding the noised sum, which is
  post-processing. With and without one example, the possible sums differ only at the ends of the
  noise, with probability below 1e-24.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from bam.core import scalars, tracing
from bam.core import strategy as strategies
from bam.core.gaussian import LEAST_STD, MOST_STD, GaussianNoise, check_std, spacing_of
from bam.core.scalars import Number
from bam.errors import InputError

LIMB_BITS = 16
LIMB_MASK = 2**LIMB_BITS - 1
# Largest integers: an entry of one row, a sum before it is carried over, and the sum of all rows.
MOST_OF_ROW, MOST_OF_SUM, MOST_OF_ALL = 2**29, 2**31 - 2**LIMB_BITS, 2**46


class Total(NamedTuple):
    """An integer sum, high · 2^16 + low, because 32 bits are too few."""

    high: Int32[Array, "..."]
    low: Int32[Array, "..."]  # from 0 to 2^16 - 1 after `carry`


def cut(x: Float[Array, "..."], spacing: Number) -> Int32[Array, "..."]:
    """Rounds entries towards zero, to integer multiples of the spacing.

    Their magnitudes must be below 2^31 spacings. No norm grows by more than a relative 3e-7. That
    is the rounding of 1 / spacing, within 2 ulp on a GPU, and of its product with x to float32.

    InputError where x is differentiated: the derivative of integers would be 0 without a word.
    """
    x = tracing.refuse_derivative(x)
    return (x * (1 / spacing)).astype(jnp.int32)


def carry(total: Total) -> Total:
    """Returns the same total in its unique form, with a low part from 0 to 2^16 - 1."""
    return Total(total.high + (total.low >> LIMB_BITS), total.low & LIMB_MASK)


def to_float(total: Total, spacing: Number, dtype: np.dtype) -> Float[Array, "..."]:
    """Returns a total in float32 or float64.

    Equal totals give equal floats if both are from `carry`.
    """
    # Both parts and their sum are rounded in the same way for equal totals.
    multiple = total.high.astype(dtype) * (2**LIMB_BITS) + total.low.astype(dtype)
    return multiple * jnp.asarray(spacing, dtype)


def rows_per_sum(
    sensitivity: Number, noise_std: Number, batch_size: int
) -> tuple[int | Int32[Array, ""], bool | Bool[Array, ""]]:
    """Returns the number of rows that add up within 32 bits, and whether S and σS are in range.

    In range are a finite bound, and noise that 32-bit floats hold and that can hide a row. Numbers
    out of range are an InputError, or False if one of them is traced.
    """
    if scalars.is_known(sensitivity) and not math.isfinite(sensitivity):
        raise InputError(f"noise cannot hide a sum that is not bounded (sensitivity {sensitivity})")
    check_std(noise_std)
    if scalars.is_known(sensitivity, noise_std):
        # The largest entry of a row. The margins (2.2e-5 and 3) exceed those of the traced case
        # (2e-5 and 2). So a microbatch size that fits here, outside of the program, also fits
        # inside, where σ is traced.
        most = math.ceil(sensitivity * (1 + 2.2e-5) / spacing_of(noise_std)) + 3
        if most > MOST_OF_ROW or most * batch_size > MOST_OF_ALL:
            raise InputError(
                f"noise of standard deviation {noise_std:.3g} is too small for a sensitivity of "
                f"{sensitivity:.3g} and {batch_size} rows: raise the noise multiplier"
            )
        return MOST_OF_SUM // most, True
    # The same in 32-bit floats, with room for their rounding beside the 1e-5 of `ROUNDING`.
    row_bound = sensitivity * (1 + 2e-5) / spacing_of(noise_std)
    in_range = (
        jnp.isfinite(row_bound)
        & (sensitivity >= 0)
        & (noise_std >= LEAST_STD)
        & (noise_std <= MOST_STD)
        & (row_bound <= MOST_OF_ROW)
        & (row_bound * (batch_size * (1 + 1e-6)) <= float(MOST_OF_ALL))
    )
    bound = jnp.where(in_range, row_bound, MOST_OF_ROW)
    return jax.lax.div(np.int32(MOST_OF_SUM), jnp.ceil(bound).astype(jnp.int32) + 2), in_range


def fitting_size(microbatch_size: int, num_rows: int | Int32[Array, ""]) -> int:
    """Returns the microbatch size as asked, or the largest power of 2 that fits if it does not.

    `num_rows` rows fit a sum. Powers of 2 keep the sizes few, because each one is compiled. If the
    number of rows is traced, the size is as asked, and the sum is NaN if the rows do not fit.
    """
    if not isinstance(num_rows, int) or num_rows >= microbatch_size:
        return microbatch_size
    return 2 ** (num_rows.bit_length() - 1)


def add_share(noise: GaussianNoise, total: Total, device: Array | int, num_devices: int) -> Total:
    """Adds one device's share of the noise to the device's sum, `[entries]`.

    The shares of all devices make up the noise of the whole sum: entry i gets draw number i. The
    result is not from `carry`.
    """
    num_entries = total.low.size
    draws = noise.draws_of_device(num_entries, device, num_devices)
    # A device draws a slice of the noise, but its sum has all entries: outside of the slice it adds
    # zeros.
    if num_devices > 1:
        zeros = jnp.zeros(num_devices * len(draws), jnp.int32)
        draws = jax.lax.dynamic_update_slice_in_dim(zeros, draws, device * len(draws), 0)
    draws = draws[:num_entries]
    return Total(total.high + (draws >> LIMB_BITS), total.low + (draws & LIMB_MASK))


def correlate(
    fresh: Int32[Array, " n"], past: Int32[Array, "past n"], strategy: Sequence[float]
) -> Int32[Array, " n"]:
    r"""Returns $n_t = z_t - \lfloor \sum_{j \ge 1} c_j n_{t-j} \rfloor$, exactly.

    See `bam.core.strategy`. `fresh` is z_t. `past` is the earlier noise, newest first. The strategy
    must pass its `check`.
    """
    # 8 bits times 32 bits overflow, so the past is split into its lowest 12 bits and the rest.
    weights = [round(c * strategies.UNITS) for c in strategy[1:]]
    high = sum(k * (n >> 12) for k, n in zip(weights, past, strict=True))
    low = sum(k * (n & (2**12 - 1)) for k, n in zip(weights, past, strict=True))
    return fresh - ((high << 4) + (low >> 8))
