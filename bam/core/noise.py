"""Noise on sums of bounded gradients.

The code that privatises a gradient is this folder, but for `oracles.py`, `sampling.py` and
`user_table.py`.

1. Each example's gradient passes a transform that declares a bound on its output, `sensitivity`
   (`clip_by_l2_norm`, `normalize`, `clip_per_layer`). The engine drops an example that breaks it.
2. The bounded gradients are *summed*, so one example changes the sum by at most `sensitivity`.
3. Gaussian noise with standard deviation `noise_multiplier · sensitivity` is added to the sum,
   once, in `engine.py`, which sums the microbatches.
4. The result is divided by the *expected* batch size, a public number.

The value of ε further rests on `sampling.py` and `privacy/`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Integer, UInt32

from bam.core import gaussian, grid, pytree, scalars
from bam.core.chacha import check_step
from bam.core.clipping import ROUNDING, Transform, sensitivity_of
from bam.core.gaussian import GaussianNoise
from bam.core.pytree import Params
from bam.core.scalars import Number
from bam.core.seeds import check_key
from bam.core.strategy import INDEPENDENT, as_numbers, norm
from bam.core.tracing import check_keys
from bam.errors import InputError

# With less, ε is in the thousands after a single step at q = 1. Integers overflow below about
# 0.002.
LEAST_NOISE_MULTIPLIER = 0.01
MOST_ROUNDING = 0.5  # largest part of correlated noise's deviation that covers its rounding


class GaussianNoiseState(NamedTuple):
    """The key of the noise and of the rows' places, and the number of steps that have used it."""

    key: UInt32[Array, "8"]
    step: Integer[Array, ""]


class CorrelatedNoiseState(NamedTuple):
    """Key and step, with the noise of the last b − 1 steps, which is as secret as the key.

    `past` is `[b - 1, entries]` int32, newest first, in multiples of the noise's spacing.
    """

    key: UInt32[Array, "8"]
    step: Integer[Array, ""]
    past: Int32[Array, "past entries"]


NoiseState = GaussianNoiseState | CorrelatedNoiseState


def init_noise(
    key: UInt32[Array, "8"],
    clip: Transform,
    params: Params,
    strategy: Sequence[float] = INDEPENDENT,
) -> NoiseState:
    """Returns the state before the first step, for sums of gradients that `clip` has bounded."""
    check_key(key)
    step = jnp.zeros((), jnp.int32)
    if len(strategy) == 1:
        return GaussianNoiseState(key, step)
    # A clip may return more numbers than a gradient has, and each gets noise.
    summand = jax.eval_shape(lambda x: clip.update(x, clip.init(x), x)[0], params)
    past = jnp.zeros((len(strategy) - 1, pytree.num_params(summand)), jnp.int32)
    return CorrelatedNoiseState(key, step, past)


def keyless(strategy: Sequence[float] = INDEPENDENT) -> NoiseState:
    """Returns the structure of a state, without a key from which noise could be drawn."""
    nothing = jnp.zeros(0, jnp.uint32)
    if len(strategy) == 1:
        return GaussianNoiseState(nothing, nothing)
    return CorrelatedNoiseState(nothing, nothing, nothing)


def with_new_key(state: NoiseState, key: Array) -> NoiseState:
    """Returns the state with another key and without past noise.

    So no earlier noise is taken back.
    """
    if isinstance(state, CorrelatedNoiseState):
        state = state._replace(past=jnp.zeros_like(state.past, device=state.past.sharding))
    return state._replace(key=key)


def advance_noise(
    state: NoiseState,
    noise_multiplier: Number,
    sensitivity: Number,
    strategy: Sequence[float] = INDEPENDENT,
) -> tuple[GaussianNoise, NoiseState]:
    r"""Returns the noise of one step, and the state for the next step.

    Give the noise to `clipped_sum`. S is the L2 sensitivity of the sum. The fresh part has the
    deviation σ·S (1 + 1e-5), which covers the error of computed norms, or more if it is correlated
    (below). Each step has its own random words (`chacha.py`), so the fresh part is independent
    across steps and across entries. A traced σ below 0.01 gives a deviation of NaN.

    With a strategy of b > 1 numbers (`strategy.py`) the noise is correlated: $n = C^{-1} z$, where
    z is the fresh part. Rounding n moves each of d entries by less than one grid step in b − 1
    later rows, together by at most $\sqrt{d (b-1)}$ grid steps in L2. That is added to the
    sensitivity $\|c\| S$ before z is scaled.
    """
    noise_multiplier = scalars.argument("noise_multiplier", noise_multiplier)
    sensitivity, strategy = scalars.argument("sensitivity", sensitivity), as_numbers(strategy)
    # All runs scale their noise by this function.
    std = noise_std(noise_multiplier, sensitivity)
    if not scalars.is_known(noise_multiplier):
        std = jnp.where(noise_multiplier >= LEAST_NOISE_MULTIPLIER, std, jnp.nan)
    is_noiseless = scalars.is_known(std) and std == 0
    if not isinstance(state, CorrelatedNoiseState) or is_noiseless:
        return GaussianNoise(state.key, std, state.step), state._replace(step=state.step + 1)
    num_entries = state.past.shape[1]
    share = rounding_share(noise_multiplier, strategy, num_entries)
    if not scalars.is_known(share):
        std = jnp.where(share <= MOST_ROUNDING, std, jnp.nan)
    # Not a quotient: XLA would make it a product if the divisor is a constant, with other bits.
    std = _number(_float32(std) * (np.float32(1) / (np.float32(1) - _float32(share))))
    fresh = GaussianNoise(state.key, std, state.step)
    independent = fresh.draws_of_device(num_entries)[:num_entries]
    correlated = grid.correlate(independent, state.past, strategy)
    past = jnp.concatenate([correlated[None], state.past[:-1]])
    state = state._replace(step=state.step + 1, past=past)
    return dataclasses.replace(fresh, correlated=correlated), state


def check_rounding(state: NoiseState, noise_multiplier: Number, strategy: Sequence[float]) -> None:
    """Raises InputError if there are too many parameters for noise of this strategy."""
    if isinstance(state, CorrelatedNoiseState):
        rounding_share(noise_multiplier, strategy, state.past.shape[1])


def rounding_share(noise_multiplier: Number, strategy: Sequence[float], num_entries: int) -> Number:
    """Returns the share of correlated noise that only covers its own rounding.

    InputError if it is more than half; a traced σ is not checked.
    """
    # In grid steps, the noise has deviation 2^20. It must be σ/‖c‖ times the whole sensitivity of
    # C x: ‖c‖ S plus the rounding.
    rounded = math.sqrt(num_entries * (len(strategy) - 1)) / norm(strategy)
    share = _float32(noise_multiplier) * np.float32(rounded / gaussian.NOISE_STD)
    if scalars.is_known(noise_multiplier) and share > MOST_ROUNDING:
        raise InputError(
            f"{num_entries} parameters are too many for noise that is correlated over "
            f"{len(strategy)} steps: its rounding would cost more than its correlation gains"
        )
    return _number(share)


def noise_std(noise_multiplier: Number, sensitivity: Number) -> Number:
    """Returns σ·S (1 + 1e-5) in 32-bit floats, with the same bits on the host and in a trace."""
    with np.errstate(over="ignore"):
        std = _float32(noise_multiplier) * _float32(sensitivity) * np.float32(ROUNDING)
    return _number(std)


def fitting_size(
    microbatch_size: int, noise_multiplier: Number, sensitivity: Number, num_rows: int
) -> int:
    """Returns the microbatch size as asked, or a smaller one if 32 bits cannot hold the sum."""
    std = noise_std(noise_multiplier, sensitivity)
    return grid.fitting_size(microbatch_size, grid.rows_per_sum(sensitivity, std, num_rows)[0])


def _number(x: Any) -> Number:
    return float(x) if isinstance(x, np.floating) else x


def _float32(x: Number) -> Any:
    return np.float32(x) if scalars.is_known(x) else jnp.asarray(x, jnp.float32)


def gaussian_noise(
    clip: Transform,
    noise_multiplier: Number,
    key: UInt32[Array, "8"],
    step: Integer[Array, ""] | int = 0,
) -> GaussianNoise:
    r"""Returns the `noise` of `clipped_sum`, for one sum of gradients that `clip` has bounded.

    Its deviation is σ·S (1 + 1e-5), which covers the rounding of bounds in 32-bit floats.

    Args:
      clip: a bounded per-example transform with sensitivity S.
      noise_multiplier: σ, at least 0.01.
      key: `[8]` words, as `bam.secret_key()` makes them. Each sum needs another key or another
        step.
      step: an integer from 0 to 2^32 - 1 that no other sum has with this key.

    Raises:
      InputError: if `clip` is not bounded, σ is out of range, the key is invalid, or the key is a
        constant of a traced program, where it must be an argument.

    Examples:
      >>> from bam import clip_by_l2_norm, secret_key
      >>> round(gaussian_noise(clip_by_l2_norm(0.5), 2.0, secret_key()).std, 7)
      1.00001
    """
    sensitivity = sensitivity_of(clip)
    noise_multiplier = scalars.argument("noise_multiplier", noise_multiplier)
    check_noise(noise_multiplier, sensitivity)
    check_key(key)
    check_step(step)
    if scalars.is_known(noise_multiplier) and noise_multiplier == 0:
        raise InputError(
            "noise_multiplier must be positive: for no noise pass noise=None to clipped_sum"
        )
    check_keys(key, step)
    state = GaussianNoiseState(key, jnp.array(step, jnp.uint32))
    return advance_noise(state, noise_multiplier, sensitivity)[0]


def check_noise(noise_multiplier: Number, sensitivity: Number) -> None:
    """Raises InputError for a σ or S that is known and out of range."""
    sigma, is_known = noise_multiplier, scalars.is_known
    if is_known(sigma) and not (math.isfinite(sigma) and sigma >= 0):
        raise InputError(f"noise_multiplier must be finite and at least 0, got {sigma}")
    if is_known(sigma) and 0 < sigma < LEAST_NOISE_MULTIPLIER:
        raise InputError(
            f"noise_multiplier {sigma} hides nothing: use 0 for none, or at least "
            f"{LEAST_NOISE_MULTIPLIER}"
        )
    if is_known(sensitivity) and not (math.isfinite(sensitivity) and sensitivity >= 0):
        raise InputError(f"sensitivity must be finite and at least 0, got {sensitivity}")
