r"""Slots beside a clipped gradient: their noised means tell how gradient norms compare with C.

A gradient g that is shorter than C leaves room below C. Let D = C² − ‖g‖² be this room, or 0 if
the gradient is clipped. The clip writes K more numbers beside the gradient, the *slots*. With
λ = C/√K, slot j = 0, …, K − 1 is

$$ s_j = \mathrm{clip}(D - j \lambda^2, 0, \lambda^2) / \lambda, $$

so the first slot is filled first, and each holds at most λ. An entry between 0 and λ has
$s_j^2 \le \lambda s_j$, and $\lambda \sum_j s_j = D$. So $\|g\|^2 + \sum_j s_j^2 \le \|g\|^2 + D =
C^2$: the vector with its slots is not longer than C, the sensitivity stays C, and the noise of the
sum also covers the slots. They cost no ε.

**What a mean tells.** Let x = K D / C², from 0 for a clipped gradient to K for a zero one. Then
$s_j/\lambda = \mathrm{clip}(x - j, 0, 1) = \int_j^{j+1} [x > y]\, dy$. Therefore its mean m_j over
examples is $\int_j^{j+1} P(x > y)\, dy$, the average of a survival function over one cell. In
norms, $1 - m_j$ is the share of gradients with ‖g‖² ≥ C² (1 − y/K), averaged over y from j to
j + 1:

$$ P(\|g\| \ge C \sqrt{1 - j/K}) \le 1 - m_j \le P(\|g\| \ge C \sqrt{1 - (j+1)/K}). $$

So $1 - m_j$ is the share of gradients of norm at least about $r_j C$, with
$r_j = \sqrt{1 - (j + 1/2)/K}$. The share clipped, P(x = 0), is at most $1 - m_0$. If the squared
norms in the cells 0 and 1 are spread evenly, $m_0 - m_1$ is the share in a cell, and P(x = 0) =
$1 - m_0 - (m_0 - m_1)/2$. No slot tells a gradient just below C from a clipped one.

**Intervals.** The noise on a mean of slots, in units of λ, has the standard deviation
σ √K / l in a step. An example is in a batch with probability q, and the sum is divided by l, not by
the number drawn. So with u for a slot in units of λ, the mean of one step also has the variance
$(1 - q) E[u^2] / l$ of the draw.

**Rounding.** Slots are computed of D = C² − (1 + 4e-5) n², where n is the computed norm, which is
off by less than a relative 5e-6. Let u = 2^{-24}. If a slot is not 0, then n < C (1 − 1.9e-5), so
every computation of the norm is below C and the gradient is left as it is. The slots' roundings add
less than 15 u C² to their squares, so the whole has a squared norm below
$C^2 (1 + 15 u) + \|g\|^2 (1 - (1 + 4 \cdot 10^{-5}) (1 - 10^{-5}))$ and a norm below C (1 + 5e-7).
If all slots are 0, the whole is the clipped gradient. So the bound of the clip holds with slots,
and no second clip is needed.

Source: Zou, Wang, Zhu, Li, Dong, Sassone, Wu 2026, "SlaClip: Gradient Norm Slacks can be Indicator
for Adaptive Clipping in DP-SGD" (ICML). Their slots hold the slack C − ‖g‖. With squares the slots
use all of the room, and the first cell is half as wide.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bam.core import scalars
from bam.core.pytree import Grads
from bam.core.scalars import Number
from bam.errors import InputError

ROUNDING_ROOM = 4e-5  # of a squared norm, see above
# With 256 slots, the room for rounding is 1 % of a cell. The noise on a share is σ √K / l, so more
# slots than a few dozen rarely tell more.
MOST_SLOTS = 256
QUANTILE = 1.96  # of the normal distribution, for 95 %


class Slotted(NamedTuple):
    """A clipped gradient and its slots, or the noised mean of both."""

    grads: Grads
    slots: Float[Array, " slots"]


class SlotState(NamedTuple):
    """The noised means of the slots so far, in units of λ: as publishable as the weights.

    Attributes:
      last: those of the last step; zeros before the first.
      total: their sum over all steps.
      num_steps: the number of steps.
    """

    last: Float[Array, " slots"]
    total: Float[Array, " slots"]
    num_steps: Int[Array, ""]


class Share(NamedTuple):
    """An estimated share of gradients, from 0 to 1, with its 95 % interval.

    Examples:
      >>> print(Share(0.432, 0.401, 0.463))
      43.2 % (95 % interval: 40.1 % to 46.3 %)
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        value, low, high = (f"{100 * x:.1f} %" for x in self)
        return f"{value} (95 % interval: {low} to {high})"


class GradientNorms(NamedTuple):
    """What noised slots tell about the norms of gradients.

    ε covers it, so it may be published. A gradient that is not finite counts as clipped.

    Attributes:
      clipped: the share of gradients clipped, with a norm of at least C. Its interval allows for
        twice as many gradients just below C as in the first two cells on average.
      at_least: for each slot, the share of gradients with at least the norm r C.
      norms: the r, from nearly 1 down to nearly 0.
    """

    clipped: Share
    at_least: tuple[Share, ...]
    norms: tuple[float, ...]


def check(num_slots: object, name: str = "slack") -> int:
    """Returns the number of slots, 0 for none.

    InputError, which begins with `name`, unless it is 0 or a whole number from 2 to 256.
    """
    number = scalars.whole(name, num_slots)
    if number != 0 and not 2 <= number <= MOST_SLOTS:
        raise InputError(
            f"{name} must be 0 (off) or from 2 to {MOST_SLOTS} slots, got {number}: one slot tells "
            "no distribution, and more are narrower than rounding and noise allow"
        )
    return number


def beside(norm: Float[Array, ""], clip_norm: Number, num_slots: int) -> Float[Array, " slots"]:
    """Returns the slots beside a gradient with this computed norm, which may be NaN or infinite."""
    is_shorter = norm < clip_norm
    ratio = jnp.where(is_shorter, norm, 0.0) / jnp.where(is_shorter, clip_norm, 1.0)
    room = jnp.where(is_shorter, 1 - (1 + ROUNDING_ROOM) * jnp.square(ratio), 0.0)
    filled = jnp.clip(num_slots * room - jnp.arange(num_slots, dtype=room.dtype), 0, 1)
    return filled * jnp.where(is_shorter, clip_norm / math.sqrt(num_slots), 0.0)


def first_state(num_slots: int) -> SlotState:
    """Returns the state before the first step."""
    return SlotState(jnp.zeros(num_slots), jnp.zeros(num_slots), jnp.zeros((), jnp.int32))


def advance(state: SlotState, mean: Float[Array, " slots"], clip_norm: Number) -> SlotState:
    """Returns the state after a step with these noised means of slots."""
    unit = jnp.where(clip_norm > 0, clip_norm, 1.0) / math.sqrt(len(mean))
    last = (mean / unit).astype(state.last.dtype)
    return SlotState(last, state.total + last, state.num_steps + 1)


def gradient_norms(
    means: Sequence[float] | np.ndarray,
    *,
    noise_std: float,
    expected_batch_size: float,
    sampling_prob: float,
    num_steps: int = 1,
) -> GradientNorms:
    r"""Shares of gradients by their norm, with 95 % intervals, from noised means of slots.

    Args:
      means: m_j, in units of λ, the average over `num_steps` steps.
      noise_std: the standard deviation of the noise on these averages: σ √K / l for a step.
      expected_batch_size: l.
      sampling_prob: q.
      num_steps: the number of steps, whose draws are independent.

    Examples:
      >>> norms = gradient_norms([0.75, 0.5], noise_std=0.0, expected_batch_size=1e6,
      ...                        sampling_prob=1.0)
      >>> print(norms.clipped)
      12.5 % (95 % interval: 0.0 % to 25.0 %)
    """
    m = np.asarray(means, float)
    drawn = expected_batch_size * num_steps

    def share(value: float, noise: float, mean_square: float, more: float = 0.0) -> Share:
        # One more example, or the interval of a share that nobody was seen in would be too short.
        of_draw = (1 - sampling_prob) * (max(0.0, mean_square) + 1 / drawn) / drawn
        half = more + QUANTILE * math.hypot(noise, math.sqrt(of_draw))
        # NaN stays NaN, unlike with `min` and `max`.
        return Share(*np.clip([value, value - half, value + half], 0, 1).tolist())

    # The share in the first cell is at most twice its estimate if norms are spread smoothly.
    in_cell = max(0.0, m[0] - m[1])
    # v = 1.5 u_0 − 0.5 u_1 has v² ≤ u_1 + 2.25 (u_0 − u_1), whose mean bounds that of v².
    clipped = share(
        1 - m[0] - in_cell / 2,
        math.hypot(1.5, 0.5) * noise_std,
        m[1] + 2.25 * (m[0] - m[1]),
        in_cell / 2,
    )
    at_least = tuple(share(1 - mean, noise_std, mean) for mean in m)
    return GradientNorms(clipped, at_least, norms_of(len(m)))


def norms_of(num_slots: int) -> tuple[float, ...]:
    """Returns the norms r_j in units of C, in the middle of each cell."""
    return tuple(math.sqrt(1 - (j + 0.5) / num_slots) for j in range(num_slots))


def as_shares(norms: GradientNorms) -> dict[str, Share]:
    """Returns the shares by name: `share_clipped`, and `share_above_R` of norms of at least R C."""
    above = zip(norms.norms, norms.at_least, strict=True)
    return {"share_clipped": norms.clipped} | {f"share_above_{r:.3f}": x for r, x in above}


def of_shares(shares: Mapping[str, Sequence[float]]) -> GradientNorms:
    """Returns the norms whose `as_shares` a summary has.

    InputError for anything else.

    Examples:
      >>> of_shares({"share_clipped": [0.2, 0.1, 0.3], "share_above_0.866": [0.5, 0.4, 0.6],
      ...            "share_above_0.500": [0.9, 0.8, 1.0]}).at_least[1].value
      0.9
    """
    try:
        clipped = Share(*map(float, shares["share_clipped"]))
        above = {
            float(name.removeprefix("share_above_")): Share(*map(float, share))
            for name, share in shares.items() if name != "share_clipped"
        }  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"these are not shares of gradients by their norm: {error}") from None
    return GradientNorms(
        clipped, tuple(above[r] for r in sorted(above, reverse=True)), norms_of(len(above))
    )


def advice(norms: GradientNorms, clip_norm: float) -> str:
    """Returns a sentence on the clip norm C of a next training, as far as the figure supports one.

    The median norm is a usual C, which `bam clip_norm` takes from public data. Norms above C are
    not seen, so there is no number for a larger C. The ε of a next training adds to that of this
    one.

    Examples:
      >>> means = [0.9, 0.8, 0.45, 0.2]
      >>> large = {"noise_std": 0.01, "expected_batch_size": 1e4, "sampling_prob": 0.1}
      >>> print(advice(gradient_norms(means, **large), 2.0))  # doctest: +NORMALIZE_WHITESPACE
      half of the gradients have a norm of at least 1.28 (95 % interval: 1.25 to 1.3):
      to clip half of them, try C = 1.28
    """
    if norms.clipped.low > 0.5:
        return (
            f"{norms.clipped} of the gradients are clipped: their median norm is above "
            f"C = {clip_norm:.3g}, and the slots cannot tell how far"
        )
    if norms.clipped.high >= 0.5:
        return (
            f"{norms.clipped} of the gradients are clipped: C = {clip_norm:.3g} may be their "
            "median norm"
        )
    # A curve that lies higher crosses one half at a longer norm.
    middle, low, high = (
        clip_norm * _median([share[i] for share in norms.at_least], norms.norms) for i in range(3)
    )
    if not 0 < high <= 2 * low:
        return f"{norms.clipped} of the gradients are clipped: noise hides their median norm"
    return (
        f"half of the gradients have a norm of at least {middle:.3g} (95 % interval: {low:.3g} to "
        f"{high:.3g}): to clip half of them, try C = {middle:.3g}"
    )


def _median(at_least: Sequence[float], norms: Sequence[float]) -> float:
    """Returns the norm that half of the gradients have at least, by interpolation.

    It is 0 if fewer than half of them have at least the smallest of `norms`.
    """
    rising = np.maximum.accumulate(at_least)
    if rising[-1] < 0.5:
        return 0.0
    index = int(np.argmax(rising >= 0.5))
    if index == 0:
        return norms[0]
    before, after = rising[index - 1], rising[index]
    part = (0.5 - before) / (after - before)
    return norms[index - 1] + part * (norms[index] - norms[index - 1])
