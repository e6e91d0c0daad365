"""Secret random words by ChaCha20: for the noise on devices, and for the batches on the host.

ChaCha20's block function (RFC 8439) makes 16 words of 32 bits of a key of 256 bits, a block number
and a nonce of 96 bits. Nobody is known to tell its words from random ones without the key. The same
lines serve JAX arrays and NumPy's.

A key is 32 bytes of the operating system (`secret_key`) or is derived from a seed (`seeded_key`).
Whoever draws with a key has a `Stream` of its own, which is a word of the nonce, as the step is; so
no two sums, and no two batches, share a block of words.
"""

import enum
import functools
import hashlib
import hmac
import os
import secrets
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, UInt32

from bam.core.tracing import being_traced
from bam.errors import InputError

CONSTANTS = np.frombuffer(b"expand 32-byte k", "<u4")
TURNS = [np.roll(np.arange(4), -by) for by in range(4)]

SEED_BITS = 256  # of a seed, at most: a key has no more
# All streams that come from a seed, by label: what each is for.
STREAMS = {
    "noise": "noise on every sum, and places of the rows in their microbatches",
    "batches": "who is in a batch, the parts of the data, and the rows' places in a padded batch",
    "whose batch": "which run a batch of `PrivateTraining` is of, so that another's is refused",
    "coins": "which canaries an audit of one run includes",
    "weights": "initial weights",
    "views": "random views and mixtures, and an example's `key`",
}
# Those that are JAX's own have 64 bits and are not cryptographic: no guarantee rests on them. All
# others are keys of ChaCha20.
JAX_STREAMS = {"weights": 0, "views": 2}

Words = TypeVar("Words", np.ndarray, Array)
StepLike = TypeVar("StepLike", bound=int | Array | np.integer)


class Stream(enum.IntEnum):
    """What words are drawn for: the second word of the nonce."""

    NOISE = 0
    NOISE_TIES = 1  # that decide what NOISE left undecided
    PLACES = 2  # of the rows in their microbatches
    BATCH = 3
    BATCH_TIES = 4
    PARTS = 6  # of the data, one of which each example is in
    SLOTS = 7  # of the rows in a padded batch
    COINS = 8  # of an audit's canaries


def nonce(stream: Stream, step: StepLike, attempt: int = 0) -> tuple[StepLike, int, int]:
    """The nonce of a stream's words in one step, an integer below 2^32; an attempt redraws them."""
    check_step(step)
    return step, int(stream), attempt


def check_step(step: Any) -> None:
    """Raises InputError, in one line, for what is no number of a step.

    Of a traced one the dtype alone is known; that it is below 2^32 is its caller's promise.
    """
    dtype = jnp.result_type(step)
    if jnp.ndim(step) or not jnp.issubdtype(dtype, jnp.integer):
        raise InputError(f"a step must be an integer from 0 to 2^32 - 1, got {step!r}")
    if isinstance(step, jax.core.Tracer):
        return
    if not 0 <= int(step) < 2**32:
        raise InputError(f"a step must be an integer from 0 to 2^32 - 1, got {step}")


def blocks(key: Array | np.ndarray, numbers: Words, nonce: Sequence[int | Array]) -> Words:
    """ChaCha20's blocks of these numbers, `[n]` uint32: word i of each in row i of `[16, n]`.

    The key has 8 words, little-endian, the nonce 3 (RFC 8439, section 2.3). Numbers of NumPy's give
    words of NumPy's. InputError for what is no key.
    """
    check_key(key)
    xp: Any = np if isinstance(numbers, np.ndarray) else jnp
    one = xp.ones_like(numbers)
    known = [*CONSTANTS, *(key[i] for i in range(8)), None, *nonce]
    known = [np.uint32(x) if isinstance(x, int) else x for x in known]
    start = [numbers if x is None else one * xp.asarray(x).astype(xp.uint32) for x in known]
    rows: PyTree = [start[i : i + 4] for i in range(0, 16, 4)]
    if xp is jnp:  # rolled: it compiles in a second, and is no slower
        rows = _ten_double_rounds(rows)
    else:
        rows = [np.stack(row) for row in rows]
        for _ in range(10):
            rows = _double_round(rows)
    ends: Words = xp.stack(
        [a + b for a, b in zip((x for r in rows for x in r), start, strict=True)]
    )
    return ends


def words(key: np.ndarray, num: int, nonce: Sequence[int]) -> UInt32[np.ndarray, " num"]:
    """The first words of a stream, in order, for the host."""
    return blocks(key, np.arange(-(-num // 16), dtype=np.uint32), nonce).T.ravel()[:num]


@jax.jit
def _ten_double_rounds(rows: PyTree) -> PyTree:
    return jax.lax.fori_loop(0, 10, lambda _, rows: _double_round(rows), rows)


def _double_round(rows: PyTree) -> PyTree:
    """Quarter rounds of the columns, then of the diagonals, of four rows of four words each."""
    a, b, c, d = _quarter_rounds(rows)
    a, b, c, d = _quarter_rounds([a, _turned(b, 1), _turned(c, 2), _turned(d, 3)])
    return [a, _turned(b, 3), _turned(c, 2), _turned(d, 1)]


def _quarter_rounds(rows: PyTree) -> PyTree:
    if isinstance(rows[0], np.ndarray):  # all columns at once: for NumPy every call counts
        return _quarter_round(*rows)
    return [list(row) for row in zip(*map(_quarter_round, *rows), strict=True)]


def _turned(row: PyTree, by: int) -> PyTree:
    return row[TURNS[by]] if isinstance(row, np.ndarray) else row[by:] + row[:by]


def _quarter_round(a: Words, b: Words, c: Words, d: Words) -> tuple[Words, Words, Words, Words]:
    a = a + b
    d = _rotated(d ^ a, 16)
    c = c + d
    b = _rotated(b ^ c, 12)
    a = a + b
    d = _rotated(d ^ a, 8)
    c = c + d
    b = _rotated(b ^ c, 7)
    return a, b, c, d


def _rotated(x: Words, bits: int) -> Words:
    return (x << bits) | (x >> (32 - bits))


def secret_key() -> UInt32[Array, "8"]:
    """A key that nobody can know, another at every call: 32 bytes of the operating system.

    A RuntimeError refuses a call while JAX traces: compiled, the key would be a constant of the
    program, and every run of it would add the same noise. Pass keys as arguments instead.

    Examples:
      >>> key = secret_key()
      >>> key.shape, bool((key == secret_key()).all())
      ((8,), False)
    """
    _check_untraced("secret_key")
    key = jnp.asarray(np.frombuffer(secrets.token_bytes(32), np.uint32))
    _secret[id(key)] = key
    return key


def seeded_key(seed: int, label: str = "noise") -> UInt32[Array, "8"]:
    """The key of a seed and a label, for runs to repeat: whoever knows the seed knows the key.

    Labels give keys that say nothing of each other; beside those of `STREAMS`, one's own may be any
    text. InputError for a seed that is not an integer from 0 to 2^256 - 1, or a label of JAX's;
    RuntimeError while JAX traces, as of `secret_key`.

    Examples:
      >>> bool((seeded_key(0) == seeded_key(0)).all()), bool((seeded_key(0) == seeded_key(1)).all())
      (True, False)
    """
    _check_untraced("seeded_key")
    if label in JAX_STREAMS:
        raise InputError(f"the stream {label!r} of a seed is JAX's: choose another label")
    return jnp.asarray(_derived_key(seed, label))


def _check_untraced(function: str) -> None:
    if being_traced():
        raise RuntimeError(
            f"{function} inside a traced function (jit, scan, vmap, grad) would be a constant of "
            "the compiled program, the same noise at every call: pass the key as an argument"
        )


def host_key(seed: int, label: str) -> UInt32[np.ndarray, " words"]:
    """What a seed gives a stream of `STREAMS`: all that is drawn of a seed is drawn of these.

    It is `seeded_key`, for the host, of 8 words, HKDF-SHA-256 (RFC 5869) of the seed's bytes and
    the label; of `JAX_STREAMS` the 2 words of a JAX key, by NumPy's `SeedSequence`. Every bit of a
    seed counts (a JAX key made from it directly would keep 32). ValueError for another label.
    """
    if label not in STREAMS:
        raise ValueError(f"no stream {label!r} of a seed; add it to STREAMS: {', '.join(STREAMS)}")
    return _derived_key(seed, label)


@functools.lru_cache(maxsize=64)
def _derived_key(seed: int, label: str) -> UInt32[np.ndarray, " words"]:
    if not isinstance(seed, int | np.integer) or not 0 <= seed < 2**SEED_BITS:
        raise InputError(f"a seed must be an integer from 0 to 2^{SEED_BITS} - 1, got {seed}")
    if label in JAX_STREAMS:
        sequence = np.random.SeedSequence(int(seed), spawn_key=(0xA5, JAX_STREAMS[label]))
        key = sequence.generate_state(2)
    else:
        derived = hkdf(int(seed).to_bytes(SEED_BITS // 8, "little"), b"bam", label.encode())
        key = np.frombuffer(derived, "<u4").astype(np.uint32)
    key.flags.writeable = False
    return key


def hkdf(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """The first 32 bytes of HKDF-SHA-256 (RFC 5869)."""
    extracted = hmac.digest(salt, secret, hashlib.sha256)
    return hmac.digest(extracted, info + b"\x01", hashlib.sha256)


def check_key(key: object) -> None:
    """Raises InputError, in one line, for what is no key; RuntimeError for one of before a fork."""
    if _secret_before_fork.get(id(key)) is key:
        raise RuntimeError(
            "this bam.secret_key() was made before the process was forked, and the other process "
            "would add the same noise: make a key in each process"
        )
    shape, dtype = getattr(key, "shape", None), getattr(key, "dtype", None)
    if shape != (8,) or dtype != np.uint32:
        what = f"{dtype}{list(shape)}" if shape is not None else type(key).__name__
        raise InputError(
            f"a key is 8 uint32 words, 32 bytes, as bam.secret_key() makes them, got {what}"
        )


_secret: weakref.WeakValueDictionary[int, Array] = weakref.WeakValueDictionary()  # by identity
_secret_before_fork: weakref.WeakValueDictionary[int, Array] = weakref.WeakValueDictionary()
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=lambda: _secret_before_fork.update(_secret))
_given: weakref.WeakValueDictionary[int, Array | np.ndarray] = (
    weakref.WeakValueDictionary()
)  # by identity
_in_use: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()  # by their words


def claimed(key: UInt32[Array | np.ndarray, "8"]) -> Callable[[PyTree], None]:
    """Takes a key for one transform; returns what checks that it starts for one set of parameters.

    A key that was given before is refused. Of another with the same words, as a seed gives them
    twice, a warning is issued while the transform that has them exists: in two trainings that are
    compared they are right, in one they are not. A key that is traced cannot be told from others.
    """
    check_key(key)
    started: list[object] = []

    def check_start(params: PyTree) -> None:
        these = jax.tree.structure(params), [jnp.shape(x) for x in jax.tree.leaves(params)]
        if started and started[0] != these:
            raise InputError(
                "this transform began for other parameters before, to which it adds the same "
                "noise: make one for each, with a key of its own"
            )
        started[:] = [these]

    if isinstance(key, jax.core.Tracer):
        return check_start
    if _given.get(id(key)) is key:
        raise InputError(
            "this key was given to a transform before, and two with one key add equal noise: "
            "make one for each, with bam.secret_key()"
        )
    words = hashlib.sha256(np.asarray(key).tobytes()).digest()
    if words in _in_use:
        warnings.warn(
            "another transform has a key of the same words, as of one seed, and adds equal noise: "
            "in one training, give each a label, seeded_key(seed, label)",
            RuntimeWarning,
            stacklevel=3,
        )
    _given[id(key)], _in_use[words] = key, check_start
    return check_start
