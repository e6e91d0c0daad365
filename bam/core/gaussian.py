r"""The discrete normal: rounded Gaussian noise, drawn in integers.

`gaussian` draws round(Z), where Z has standard deviation 2^20, by comparing words of ChaCha20
(`chacha.py`) with tables of integers. So it draws the same bits on every device, and its law is
known exactly: `tests/test_grid.py` computes it. It differs from the true law by less than 1e-24 in
total variation, and reaches ±11.7 standard deviations.
"""

import decimal
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, Integer, PyTree, UInt, UInt16, UInt32

from bam.core import program, scalars
from bam.core.chacha import Stream, blocks, check_step
from bam.core.scalars import Number
from bam.errors import InputError

# Standard deviation of the noise in multiples of the grid's spacing. Gradients are cut to the grid,
# which is finer than the noise by this factor.
NOISE_STD = 2**20
# A draw is COARSE·a + b. Both are discrete Gaussians with standard deviations near 1365 and 1382.
# b is 1.8 times as wide as a's steps and fills the gaps between them to a relative 1e-27.
COARSE = 768
FINE_STD = decimal.Decimal(18 * COARSE) / 10
# Rounding a Gaussian adds 1/12 to its variance.
COARSE_STD = (((NOISE_STD**2 + decimal.Decimal(1) / 12) - FINE_STD**2) / COARSE**2).sqrt()
SLOT_BITS, TABLE_BITS = 15, 111  # bits that choose an entry of a table; all bits of a look-up
PLANES, TIE_PLANES = 3, 4  # 32-bit words of a draw; further words if these leave it undecided
MOST_BLOCKS = 2**12  # blocks of 16 words computed at once: they fit a processor's cache
# A GPU waits for its host in every round of a loop, so few large groups are fastest there. A group
# takes some 200 MB.
MOST_BLOCKS_OF_GPU = 2**18

# Between these, neither the noise nor its spacing overflows or underflows 32-bit floats.
LEAST_STD, MOST_STD = 1e-30, 1e30


@program.record
class GaussianNoise:
    """Noise for one sum. Independent noise is drawn where it is added, correlated noise before.

    Attributes:
      key: `[8]` words, see `bam.core.seeds`.
      std: standard deviation of every entry (of the fresh part, if `correlated`); 0 means no noise.
        If it is traced, the sum is NaN unless it is positive and in range.
      step: an integer from 0 to 2^32 - 1, which no other sum has with this key.
      correlated: `[entries]`, the noise in multiples of the spacing; None: independent noise.

    Raises:
      InputError: if `std` is negative, not finite, or beyond what 32-bit floats hold with room.
    """

    key: UInt32[Array, "8"]
    std: Number
    step: Integer[Array, ""] | int = 0
    correlated: Int32[Array, " entries"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "std", scalars.argument("std, a standard deviation,", self.std))
        for name in ("key", "step", "correlated"):
            if isinstance(value := getattr(self, name), np.ndarray):
                object.__setattr__(self, name, value.copy())
        check_std(self.std)

    @property
    def spacing(self) -> Number:
        """The spacing of the grid that the noise lies on."""
        return spacing_of(self.std)

    def draws_of_device(
        self, num_entries: int, device: Array | int = 0, num_devices: int = 1
    ) -> Int32[Array, " share"]:
        """Returns a device's share of the noise of a sum, in multiples of the spacing.

        All shares have one length. Concatenated, they are the noise of all entries, with some
        unneeded draws at the end. InputError for more than 2^32 entries, or for an invalid key.
        """
        if num_entries > 2**32:
            raise InputError(
                f"a sum with {num_entries} entries is too large: noise is drawn for at most 2^32"
            )
        if self.correlated is not None:
            length = -(-num_entries // num_devices)
            padded = jnp.pad(self.correlated, (0, length * num_devices - num_entries))
            return jax.lax.dynamic_slice_in_dim(padded, device * length, length)
        # Small tiles for short sums, so that about eight devices can share the work. Tiles of
        # different devices always differ.
        num_blocks = min(MOST_BLOCKS, -(-max(1, num_entries) // (8 * 16)))
        num_tiles = -(-num_entries // (16 * num_blocks * num_devices))
        first = jnp.asarray(device * num_tiles).astype(jnp.uint32)
        tiles = first + jnp.arange(num_tiles, dtype=jnp.uint32)
        check_step(self.step)
        return gaussian(self.key, self.step, tiles, num_blocks)


def check_std(std: Number) -> None:
    """Checks a standard deviation.

    InputError for one that floats do not hold: negative, tiny, huge or NaN.
    """
    if scalars.is_known(std) and not (std == 0 or LEAST_STD <= std <= MOST_STD):
        raise InputError(
            f"noise needs a standard deviation of 0 or from {LEAST_STD} to {MOST_STD}, which "
            f"32-bit floats hold, got {std}: choose a clip norm nearer to 1"
        )


def spacing_of(noise_std: Number) -> Number:
    """Returns the spacing of the grid that noise with a standard deviation lies on: std / 2^20."""
    return noise_std / NOISE_STD


@functools.partial(jax.jit, static_argnames="num_blocks")
def gaussian(
    key: UInt32[Array, "8"],
    step: Array | int,
    tiles: UInt32[Array, " tiles"],
    num_blocks: int = MOST_BLOCKS,
) -> Int32[Array, " n"]:
    r"""Draws round(Z) independently, $Z \sim N(0, 2^{40})$, 16 · `num_blocks` times for each tile.

    A tile's draws depend only on the key, the step, the tile's number and `num_blocks`, so each
    device can draw a part. A draw compares two random numbers of 111 bits with two tables. Only
    their first 47 bits are drawn; once in 2^32 times the others decide, and are drawn, too. Draws
    lie between ±2^24.
    """

    def draw_tiles(some: UInt32[Array, " some"]) -> Int32[Array, " draws"]:
        shape, tables = (16, len(some), num_blocks), alias_tables()

        def words(plane: Array) -> UInt32[Array, "16 some blocks"]:
            # A stream's blocks are numbered tile by tile, and within a tile plane by plane.
            is_tie = plane >= PLANES
            stream = jnp.where(is_tie, int(Stream.NOISE_TIES), int(Stream.NOISE))
            num = jnp.where(is_tie, TIE_PLANES, PLANES).astype(jnp.uint32)
            row = num * some + (plane - jnp.where(is_tie, PLANES, 0)).astype(jnp.uint32)
            counts = jnp.arange(num_blocks, dtype=jnp.uint32)[None]
            numbers = row[:, None] * np.uint32(num_blocks) + counts
            return blocks(key, numbers.ravel(), (step, stream, 0)).reshape(shape)

        def choose(planes: Array) -> tuple[Choice, Choice]:
            coarse, fine, both = planes[:PLANES]
            return choose_slots(coarse, both >> 17), choose_slots(fine, both & (2**15 - 1))

        def is_tied(planes: Array) -> Bool[Array, ""]:
            a, b = (
                _entry(t.first, c.slot) == c.first
                for t, c in zip(tables, choose(planes), strict=True)
            )
            return jnp.any(a | b)

        # One loop for planes and ties, so that ChaCha20 is compiled once.
        def add_plane(state: PyTree) -> PyTree:
            plane, planes, tied = state
            planes = jax.lax.dynamic_update_index_in_dim(planes, words(plane), plane, 0)
            tied = jax.lax.cond(plane == PLANES - 1, is_tied, lambda _: tied, planes)
            return plane + 1, planes, tied

        planes = jnp.zeros((PLANES + TIE_PLANES, *shape), jnp.uint32)
        start = jnp.zeros((), jnp.int32), planes, jnp.zeros((), bool)
        _, planes, tied = jax.lax.while_loop(
            lambda state: state[0] < jnp.where(state[2], PLANES + TIE_PLANES, PLANES),
            add_plane,
            start,
        )

        def draw(with_ties: bool) -> Int32[Array, "16 some blocks"]:
            ties = tuple(planes[PLANES:]) if with_ties else ()
            a, b = (
                look_up(t, c, rest)
                for t, c, rest in zip(tables, choose(planes), (ties[:2], ties[2:]), strict=True)
            )
            return COARSE * a + b

        # Ties are rare, so a second look-up for all draws costs nothing on average.
        draws = jax.lax.cond(tied, lambda: draw(True), lambda: draw(False))
        return draws.swapaxes(0, 1).ravel()

    def draw_groups(
        tiles: UInt32[Array, " tiles"], most_blocks: int = MOST_BLOCKS
    ) -> Int32[Array, " draws"]:
        num_groups = -(-len(tiles) // max(1, most_blocks // num_blocks))
        # Copies of the last tile fill the last group; their draws are dropped.
        padded = jnp.pad(tiles, (0, -len(tiles) % num_groups), mode="edge")
        draws = jax.lax.map(draw_tiles, padded.reshape(num_groups, -1)).ravel()
        return draws[: 16 * num_blocks * len(tiles)]

    if len(tiles) * num_blocks <= MOST_BLOCKS:
        return draw_tiles(tiles)
    on_gpu = functools.partial(draw_groups, most_blocks=MOST_BLOCKS_OF_GPU)
    return jax.lax.platform_dependent(tiles, cuda=on_gpu, rocm=on_gpu, default=draw_groups)


class Choice(NamedTuple):
    """47 of 111 random bits: 15 choose a slot, 32 are compared with its threshold's first word."""

    slot: UInt32[Array, "*n"]
    first: UInt32[Array, "*n"]


def choose_slots(word: UInt32[Array, "*n"], more: UInt32[Array, "*n"]) -> Choice:
    """Returns a slot, and the first word of the random number to compare with the slot's threshold.

    They are made of one word and 15 more bits.
    """
    return Choice(word >> (32 - SLOT_BITS), (word << SLOT_BITS) | more)


def look_up(
    table: "AliasTable", choice: Choice, rest: tuple[UInt32[Array, "*n"], ...]
) -> Int32[Array, "*n"]:
    """Returns the draw: the slot or its alias, less 2^14.

    It is the slot if the number is below the slot's threshold, otherwise the alias. `rest` are two
    more words of the number, which decide ties; () if there is none.
    """
    below = choice.first < _entry(table.first, choice.slot)
    if rest:
        second, third = _entry(table.second, choice.slot), _entry(table.third, choice.slot)
        tied = choice.first == _entry(table.first, choice.slot)
        below |= tied & ((rest[0] < second) | ((rest[0] == second) & (rest[1] < third)))
    slot = jnp.where(below, choice.slot, _entry(table.alias, choice.slot).astype(jnp.uint32))
    return slot.astype(jnp.int32) - 2 ** (SLOT_BITS - 1)


def _entry(column: UInt[np.ndarray, " slots"], slot: UInt32[Array, "*n"]) -> UInt[Array, "*n"]:
    return jnp.asarray(column).at[slot].get(mode="promise_in_bounds")  # all 2^15 slots exist


class AliasTable(NamedTuple):
    """Walker's alias method in integers: one entry of each column for each slot.

    A slot's threshold has 96 bits, in three words. Random numbers from the threshold on give the
    alias.
    """

    first: UInt32[np.ndarray, " slots"]
    second: UInt32[np.ndarray, " slots"]
    third: UInt32[np.ndarray, " slots"]
    alias: UInt16[np.ndarray, " slots"]  # short, so that a processor's cache holds more of it


@functools.cache
def alias_tables() -> tuple[AliasTable, AliasTable]:
    """Returns the tables of a and of b, which take 0.3 s, once per process."""
    return alias_table(weights(COARSE_STD)), alias_table(weights(FINE_STD))


def weights(std: decimal.Decimal) -> list[int]:
    r"""Probabilities of a discrete Gaussian, $p_a \propto e^{-a^2 / 2 s^2}$, in units of 2^-111.

    For a = -2^14, …, 2^14 - 1. Each is rounded down; the rest goes to a = 0, so that they add up to
    2^111.
    """
    with decimal.localcontext(prec=90):
        scale = decimal.Decimal(2) ** 256
        step = int(scale * (-1 / std**2).exp())  # fixed-point numbers of 256 bits
        ratio = int(scale * (-1 / (2 * std**2)).exp())  # p_{a+1} / p_a
    # p_0, p_1, …: each is the one before times a ratio that itself shrinks by a constant factor.
    half = [2**256]
    for _ in range(2 ** (SLOT_BITS - 1)):
        half.append(half[-1] * ratio >> 256)
        ratio = ratio * step >> 256
    law = half[:0:-1] + half[:-1]
    total = sum(law)
    units = [(p << TABLE_BITS) // total for p in law]
    units[2 ** (SLOT_BITS - 1)] += 2**TABLE_BITS - sum(units)
    return units


def alias_table(probabilities: list[int]) -> AliasTable:
    """Returns the table with exactly these probabilities, by Vose's algorithm.

    The probabilities add up to 2^111.
    """
    # Every slot is chosen with the same probability, `share`. A slot with less takes the rest from
    # a slot with more, which becomes its alias.
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
    # A slot without an alias is its own alias, so its threshold does not matter. It is 2^96, one
    # bit more than three words hold, so they hold 0.
    return AliasTable(
        first=np.array([t >> 64 & 2**32 - 1 for t in threshold], np.uint32),
        second=np.array([t >> 32 & 2**32 - 1 for t in threshold], np.uint32),
        third=np.array([t & 2**32 - 1 for t in threshold], np.uint32),
        alias=np.array(alias, np.uint16),
    )
