"""Keys of ChaCha20: secret ones, those that a seed gives its streams, and which of them are in use.

A key is 32 bytes of the operating system (`secret_key`) or is derived from a seed (`seeded_key`).
"""

import functools
import hashlib
import hmac
import os
import secrets
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, UInt32

from bam.core.tracing import being_traced
from bam.errors import InputError

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
