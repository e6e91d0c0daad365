"""Secret random words by ChaCha20: for the noise on devices, and for the batches on the host.

ChaCha20's block function (RFC 8439) turns a key of 256 bits, a block number and a nonce of 96 bits
into 16 words of 32 bits. No way is known to tell its words from random ones without the key. The
same code serves JAX and NumPy arrays.

`seeds.py` makes the keys. Each use of a key has its own `Stream`. The stream and the step are words
of the nonce, so no two sums, and no two batches, share a block of words.
"""

import enum
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, UInt32

from bam.core.seeds import check_key
from bam.errors import InputError

CONSTANTS = np.frombuffer(b"expand 32-byte k", "<u4")
LANES = np.arange(4, dtype=np.int32)

Words = TypeVar("Words", np.ndarray, Array)
StepLike = TypeVar("StepLike", bound=int | Array | np.integer)


class Stream(enum.IntEnum):
    """The use of random words: the second word of the nonce."""

    NOISE = 0
    NOISE_TIES = 1  # further words for draws that NOISE left undecided
    PLACES = 2  # of rows in their microbatches
    BATCH = 3
    BATCH_TIES = 4  # further words for draws that BATCH left undecided
    PARTS = 6  # which part of the data each example is in
    BATCH_PLACES = 7  # of rows in a padded batch
    COINS = 8  # of an audit's canaries


def nonce(stream: Stream, step: StepLike, attempt: int = 0) -> tuple[StepLike, int, int]:
    """Returns the nonce of a stream in a step, which is an integer below 2^32.

    Each `attempt` has other words.
    """
    check_step(step)
    return step, int(stream), attempt


def check_step(step: Any) -> None:
    """Raises an InputError, in one line, unless the step is an integer from 0 to 2^32 - 1.

    For a traced step only shape and dtype are checked; the caller promises the range.
    """
    dtype = jnp.result_type(step)
    if jnp.ndim(step) or not jnp.issubdtype(dtype, jnp.integer):
        raise InputError(f"a step must be an integer from 0 to 2^32 - 1, got {step!r}")
    if isinstance(step, jax.core.Tracer):
        return
    if not 0 <= int(step) < 2**32:
        raise InputError(f"a step must be an integer from 0 to 2^32 - 1, got {step}")


def blocks(key: Array | np.ndarray, numbers: Words, nonce: Sequence[int | Array]) -> Words:
    """Returns ChaCha20's blocks with these numbers (`[n]` uint32), `[16, n]`.

    Row i has word i of each block. The key has 8 words, little-endian, and the nonce 3 (RFC 8439,
    section 2.3). NumPy numbers give NumPy words. InputError for an invalid key.
    """
    check_key(key)
    xp: Any = np if isinstance(numbers, np.ndarray) else jnp
    last = [np.uint32(x) if isinstance(x, int) else x for x in nonce]
    fixed = xp.concatenate([CONSTANTS, key, xp.stack([xp.asarray(x, np.uint32) for x in last])])
    # Word 12 counts the blocks; all others are the same for each.
    same = xp.broadcast_to(fixed[:, None], (15, len(numbers)))
    start = xp.concatenate([same[:12], numbers[None], same[12:]])
    rows = tuple(start.reshape(4, 4, -1))
    if xp is jnp:  # rolled, and four words at a time: it compiles in under a second
        rows = _twenty_rounds(rows)
    else:
        for _ in range(10):
            rows = _two_rounds(rows)
    ends: Words = xp.concatenate(rows) + start
    return ends


def words(key: np.ndarray, num: int, nonce: Sequence[int]) -> UInt32[np.ndarray, " num"]:
    """Returns the first words of a stream, in order, for the host."""
    return blocks(key, np.arange(-(-num // 16), dtype=np.uint32), nonce).T.ravel()[:num]


@jax.jit
def _twenty_rounds(rows: PyTree) -> PyTree:
    return jax.lax.fori_loop(np.int32(0), np.int32(10), lambda _, rows: _two_rounds(rows), rows)


def _two_rounds(rows: PyTree) -> PyTree:
    """Returns the rows `[4, n]` after quarter rounds of the columns, and then of the diagonals.

    The first turn of the rows makes diagonals columns, and the second moves them back. The turns
    are constants, so a compiler can fuse them with the rounds.
    """
    for by in (1, 3):
        a, b, c, d = _quarter_round(*rows)
        rows = a, b[(LANES + by) % 4], c[(LANES + 2) % 4], d[(LANES - by) % 4]
    return rows


def _quarter_round(a: Words, b: Words, c: Words, d: Words) -> tuple[Words, Words, Words, Words]:
    a = a + b
    d = _rotate(d ^ a, 16)
    c = c + d
    b = _rotate(b ^ c, 12)
    a = a + b
    d = _rotate(d ^ a, 8)
    c = c + d
    b = _rotate(b ^ c, 7)
    return a, b, c, d


def _rotate(x: Words, bits: int) -> Words:
    return (x << bits) | (x >> (32 - bits))
