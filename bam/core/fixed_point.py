r"""Sums and noise in integers, where nothing is rounded.

A bounded gradient is cut, towards zero, to integer multiples of a *spacing*; the multiples are
added as integers, in any order the same; Gaussian noise in integer multiples is added to them; only
then is the total a floating-point number again. Two things follow:

* one example changes the sum by its own entries and by nothing else, whatever the others are: there
  is no rounding that its presence could tip over;
* the noised sum is the *rounded* Gaussian mechanism. For an integer x, round(x + Z) is
  x + round(Z): adding rounded noise to integers is rounding the noised sum, which is
  post-processing. Every output is possible with and without any one example.

`gaussian` draws round(Z), Z of standard deviation 2^20, by comparing words of ChaCha20
(`chacha.py`) with tables of integers, so it is the same to the bit on every device, and its law is
known exactly: `tests/test_grid.py` computes it. It is off by less than 1e-24 in total variation,
and reaches ±10.7 standard deviations.
"""

import dataclasses
import decimal
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Integer, PyTree, UInt32

from bam.core import scalars
from bam.core import strategy as strategies
from bam.core.chacha import Stream, blocks, nonce
from bam.core.clipping import ROUNDING
from bam.errors import InputError

# Standard deviation of the noise in multiples of the spacing: so much finer than the noise is the
# grid that gradients are cut to.
NOISE_STD = 2**20
# A draw is COARSE·a + b. Both are discrete Gaussians, of standard deviations near 1365 and 1382;
# b, 1.8 times as wide as a's steps, fills the gaps between them to a relative 1e-27.
COARSE = 768
FINE_STD = decimal.Decimal(18 * COARSE) / 10
# Rounding a Gaussian adds 1/12 to its variance.
COARSE_STD = (((NOISE_STD**2 + decimal.Decimal(1) / 12) - FINE_STD**2) / COARSE**2).sqrt()
SLOT_BITS, TABLE_BITS = 15, 111  # of the random number that looks an entry up; of all of it
MOST_BLOCKS = 2**12  # of 16 words each, computed at once: they fit a processor's cache

# So that neither the noise nor its spacing overflows or underflows 32-bit floats.
LEAST_STD, MOST_STD = 1e-30, 1e30

LIMB_BITS = 16
LIMB_MASK = 2**LIMB_BITS - 1


class Total(NamedTuple):
    """A sum in integers, high · 2^16 + low: 32 bits are too few."""

    high: Int32[Array, "..."]
    low: Int32[Array, "..."]  # from 0 to 2^16 - 1 once the total is `carried`


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["key", "step", "drawn"], meta_fields=["std"]
)
@dataclasses.dataclass(frozen=True)
class GaussianNoise:
    """Noise for one sum, drawn where it is added; or before, if it depends on earlier noise.

    Attributes:
      key: `[8]` words, see `bam.core.chacha`.
      std: standard deviation of every entry, of the fresh part if `drawn`; 0 is none.
      step: an integer from 0 to 2^32 - 1, with this key of no other sum.
      drawn: `[entries]`, the noise in multiples of the spacing; None: independent, of the key.

    Raises:
      InputError: if `std` is negative, not finite, or beyond what 32-bit floats hold with room.
    """

    key: UInt32[Array, "8"]
    std: float
    step: Integer[Array, ""] | int = 0
    drawn: Int32[Array, " entries"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "std", scalars.real("std", self.std))
        for name in ("key", "step", "drawn"):
            object.__setattr__(self, name, scalars.unchanging(getattr(self, name)))
        check_std(self.std)

    @property
    def spacing(self) -> float:
        """Of the grid that the noise lies on."""
        return spacing_of(self.std)

    def share(
        self, num_entries: int, device: Array | int = 0, num_devices: int = 1
    ) -> Int32[Array, " share"]:
        """A device's share of the noise of a sum, in multiples of the spacing.

        The shares are of equal length; one after the other they are the noise of all entries, and
        some that are not needed. InputError for more than 2^32 entries, or for what is no key.
        """
        if num_entries > 2**32:
            raise InputError(f"a sum of {num_entries} entries is more than there are numbers for")
        if self.drawn is not None:
            length = -(-num_entries // num_devices)
            padded = jnp.pad(self.drawn, (0, length * num_devices - num_entries))
            return jax.lax.dynamic_slice_in_dim(padded, device * length, length)
        # Eight tiles or more, for as many devices.
        num_blocks = min(MOST_BLOCKS, -(-max(1, num_entries) // (8 * 16)))
        num_tiles = -(-num_entries // (16 * num_blocks * num_devices))
        tiles = device * num_tiles + jnp.arange(num_tiles, dtype=jnp.uint32)
        return gaussian(self.key, self.step, tiles.astype(jnp.uint32), num_blocks)


def check_std(std: float) -> None:
    """InputError for a standard deviation that floats do not hold: negative, tiny, huge or NaN."""
    if not (std == 0 or LEAST_STD <= std <= MOST_STD):
        raise InputError(
            f"noise needs a standard deviation of 0 or from {LEAST_STD} to {MOST_STD}, which "
            f"32-bit floats hold, got {std}: choose a clip norm nearer to 1"
        )


def spacing_of(noise_std: float) -> float:
    """The spacing of the grid that noise of a standard deviation lies on."""
    return noise_std / NOISE_STD


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


@functools.partial(jax.jit, static_argnames="num_blocks")
def gaussian(
    key: UInt32[Array, "8"],
    step: Array | int,
    tiles: UInt32[Array, " tiles"],
    num_blocks: int = MOST_BLOCKS,
) -> Int32[Array, " n"]:
    r"""Independent draws of round(Z), $Z \sim N(0, 2^{40})$, 16 · `num_blocks` for each tile.

    Those of a tile depend on the key, the step, the tile's number and the blocks of a tile alone,
    so devices can draw a part each. A draw compares two numbers of 111 random bits with two tables;
    of each only the first 47 bits are drawn, unless the others decide, once in 2^32 times. Draws
    are between ±2^24.
    """

    def draw_tiles(some: UInt32[Array, " some"]) -> Int32[Array, " draws"]:
        def words(stream: Stream, num: int) -> UInt32[Array, "num some 16 blocks"]:
            first = (num * num_blocks * some)[:, None]
            numbers = (first + jnp.arange(num * num_blocks, dtype=jnp.uint32)[None]).ravel()
            drawn = blocks(key, numbers, nonce(stream, step))
            return drawn.reshape(16, len(some), num, num_blocks).transpose(2, 1, 0, 3)

        coarse, fine, both = words(Stream.NOISE, 3)
        chosen = choose_slots(coarse, both >> 17), choose_slots(fine, both & (2**15 - 1))
        tables = alias_tables()
        tied = functools.reduce(
            jnp.logical_or,
            (
                jnp.any(_entry(t.first, c.slot) == c.first)
                for t, c in zip(tables, chosen, strict=True)
            ),
        )

        def draw(rests: Sequence[tuple[Array, ...]]) -> Int32[Array, "some 16 blocks"]:
            a, b = (look_up(t, c, r) for t, c, r in zip(tables, chosen, rests, strict=True))
            return COARSE * a + b

        def draw_with_ties() -> Int32[Array, "some 16 blocks"]:
            rest = words(Stream.NOISE_TIES, 4)
            return draw([(rest[0], rest[1]), (rest[2], rest[3])])

        return jax.lax.cond(tied, draw_with_ties, lambda: draw([(), ()])).ravel()

    if len(tiles) * num_blocks <= MOST_BLOCKS:
        return draw_tiles(tiles)
    return jax.lax.map(draw_tiles, tiles[:, None]).ravel()


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


class Choice(NamedTuple):
    """The first 47 of 111 random bits: the slot that is looked up, and 32 of its threshold."""

    slot: UInt32[Array, "*n"]
    first: UInt32[Array, "*n"]


def choose_slots(word: UInt32[Array, "*n"], more: UInt32[Array, "*n"]) -> Choice:
    """Of a word, and 15 bits more."""
    return Choice(word >> (32 - SLOT_BITS), (word << SLOT_BITS) | more)


def look_up(
    table: "AliasTable", choice: Choice, rest: tuple[UInt32[Array, "*n"], ...]
) -> Int32[Array, "*n"]:
    """The slot or, from its threshold on, the alias; without `rest` there is no tie."""
    below = choice.first < _entry(table.first, choice.slot)
    if rest:
        second, third = _entry(table.second, choice.slot), _entry(table.third, choice.slot)
        tied = choice.first == _entry(table.first, choice.slot)
        below |= tied & ((rest[0] < second) | ((rest[0] == second) & (rest[1] < third)))
    slot = jnp.where(below, choice.slot, _entry(table.alias, choice.slot))
    return slot.astype(jnp.int32) - 2 ** (SLOT_BITS - 1)


def _entry(column: UInt32[np.ndarray, " slots"], slot: UInt32[Array, "*n"]) -> UInt32[Array, "*n"]:
    return jnp.asarray(column).at[slot].get(mode="promise_in_bounds")  # all 2^15 slots exist


class AliasTable(NamedTuple):
    """Walker's alias method in integers, one entry of each column for a slot.

    A slot's threshold has 96 bits, in three words. The alias stands for random numbers from it on.
    """

    first: UInt32[np.ndarray, " slots"]
    second: UInt32[np.ndarray, " slots"]
    third: UInt32[np.ndarray, " slots"]
    alias: UInt32[np.ndarray, " slots"]


@functools.cache
def alias_tables() -> tuple[AliasTable, AliasTable]:
    """Those of a and of b; 0.3 s once per process."""
    return alias_table(weights(COARSE_STD)), alias_table(weights(FINE_STD))


def weights(std: decimal.Decimal) -> list[int]:
    r"""Probabilities of a discrete Gaussian, $p_a \propto e^{-a^2 / 2 s^2}$, in units of 2^-111.

    They are of a = -2^14, …, 2^14 - 1, each rounded down, but for the one of a = 0, which makes
    them add up to 2^111.
    """
    with decimal.localcontext(prec=90):
        scale = decimal.Decimal(2) ** 256
        step = int(scale * (-1 / std**2).exp())  # fixed-point numbers of 256 bits
        ratio = int(scale * (-1 / (2 * std**2)).exp())  # p_{a+1} / p_a
    half = [2**256]
    for _ in range(2 ** (SLOT_BITS - 1)):
        half.append(half[-1] * ratio >> 256)
        ratio = ratio * step >> 256
    whole = half[:0:-1] + half[:-1]
    total = sum(whole)
    units = [(p << TABLE_BITS) // total for p in whole]
    units[2 ** (SLOT_BITS - 1)] += 2**TABLE_BITS - sum(units)
    return units


def alias_table(probabilities: list[int]) -> AliasTable:
    """A table that gives just these probabilities, which add up to 2^111, by Vose's algorithm."""
    share = 2 ** (TABLE_BITS - SLOT_BITS)
    num_slots = len(probabilities)
    left, threshold, alias = list(probabilities), [share] * num_slots, list(range(num_slots))
    small = [slot for slot, weight in enumerate(left) if weight < share]
    large = [slot for slot, weight in enumerate(left) if weight > share]
    while small:
        poor, rich = small.pop(), large[-1]
        threshold[poor], alias[poor] = left[poor], rich
        left[rich] -= share - left[poor]
        if left[rich] <= share:
            large.pop()
            if left[rich] < share:
                small.append(rich)
    # A slot that needs no alias is its own, so its threshold does not matter: of 2^96, which has
    # one bit more than three words, they hold 0.
    return AliasTable(
        first=np.array([t >> 64 & 2**32 - 1 for t in threshold], np.uint32),
        second=np.array([t >> 32 & 2**32 - 1 for t in threshold], np.uint32),
        third=np.array([t & 2**32 - 1 for t in threshold], np.uint32),
        alias=np.array(alias, np.uint32),
    )
