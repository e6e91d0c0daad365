"""Keys of ChaCha20: secret keys, and keys derived from a seed.

A key is 32 random bytes of the operating system (`secret_key`), or derived from a seed
(`seeded_key`). Every random number of a seeded run comes from one of the keys in `KEY_LABELS`.
"""

import contextlib
import functools
import hashlib
import hmac
import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from bam.core.forks import Process, this_process
from bam.core.tracing import is_tracing
from bam.errors import InputError

SEED_BITS = 256  # of the longest seed, because a key has no more
# Label of each key that a seed gives -> the use of the key.
KEY_LABELS = {
    "noise": "noise on every sum, and places of the rows in their microbatches",
    "batches": "who is in a batch, the parts of the data, and the rows' places in a padded batch",
    "whose batch": "which run a batch of `PrivateTraining` is of, so that another's is refused",
    "coins": "which canaries an audit of one run includes",
    "weights": "initial weights",
    "views": "random views and mixtures, and an example's `key`",
}
# JAX's own keys have 64 bits, and its random numbers are not cryptographic, so no guarantee rests
# on them. All other keys are ChaCha20's.
JAX_LABELS = {"weights": 0, "views": 2}
# Most keys that are recognised later, the newest ones: a process that makes a key for each of its
# sums must not grow for ever.
MOST_KEYS = 2**20

# Digest of a secret key's words -> the process that made the key. A fork has a copy of this table.
_made_in: dict[bytes, Process] = {}


def secret_key() -> UInt32[Array, "8"]:
    """Returns a new key that nobody can know: 32 random bytes of the operating system.

    RuntimeError while JAX traces, because the key would be a constant of the compiled program,
    which would add the same noise every time it runs. Pass keys as arguments instead.

    Examples:
      >>> key = secret_key()
      >>> key.shape, bool((key == secret_key()).all())
      ((8,), False)
    """
    _check_untraced("secret_key")
    key = jnp.asarray(np.frombuffer(secrets.token_bytes(32), np.uint32))
    # The digest reads the key, and JAX keeps what was read on the host: a fork cannot read a GPU.
    remember(_made_in, digest(key), this_process())
    return key


def seeded_key(seed: int, label: str = "noise") -> UInt32[Array, "8"]:
    """Returns the key of a seed and a label, to repeat a run.

    Anyone who knows the seed knows the key. Keys of different labels reveal nothing about each
    other. A label is one of `KEY_LABELS` or any other text. InputError for a seed that is not an
    integer from 0 to 2^256 - 1, or for a label in `JAX_LABELS`; RuntimeError while JAX traces, as
    for `secret_key`.

    Examples:
      >>> bool((seeded_key(0) == seeded_key(0)).all()), bool((seeded_key(0) == seeded_key(1)).all())
      (True, False)
    """
    _check_untraced("seeded_key")
    if label in JAX_LABELS:
        raise InputError(f"the key {label!r} of a seed is JAX's: choose another label")
    return jnp.asarray(_derived_key(seed, label))


def _check_untraced(function: str) -> None:
    if is_tracing():
        raise RuntimeError(
            f"{function} inside a traced function (jit, scan, vmap, grad) would be a constant of "
            "the compiled program, the same noise at every call: pass the key as an argument"
        )


def host_key(seed: int, label: str) -> UInt32[np.ndarray, " words"]:
    """Returns the key that a seed derives for one of `KEY_LABELS`, as a host array.

    It is the 8 words of `seeded_key`: HKDF-SHA-256 (RFC 5869) of the seed's bytes and the label.
    For `JAX_LABELS` it is the 2 words of a JAX key, by NumPy's `SeedSequence`. Every bit of the
    seed counts, where a JAX key made from the seed directly would keep 32. ValueError for another
    label.
    """
    if label not in KEY_LABELS:
        raise ValueError(
            f"no key {label!r} of a seed; add its label to KEY_LABELS: {', '.join(KEY_LABELS)}"
        )
    return _derived_key(seed, label)


@functools.lru_cache(maxsize=64)
def _derived_key(seed: int, label: str) -> UInt32[np.ndarray, " words"]:
    if not isinstance(seed, int | np.integer) or not 0 <= seed < 2**SEED_BITS:
        raise InputError(f"a seed must be an integer from 0 to 2^{SEED_BITS} - 1, got {seed}")
    if label in JAX_LABELS:
        sequence = np.random.SeedSequence(int(seed), spawn_key=(0xA5, JAX_LABELS[label]))
        key = sequence.generate_state(2)
    else:
        # The label is HKDF's `info`: keys of different labels are independent.
        derived = hkdf(int(seed).to_bytes(SEED_BITS // 8, "little"), b"bam", label.encode())
        key = np.frombuffer(derived, "<u4").astype(np.uint32)
    key.flags.writeable = False
    return key


def hkdf(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """Returns the first 32 bytes of HKDF-SHA-256 (RFC 5869)."""
    extracted = hmac.digest(salt, secret, hashlib.sha256)
    return hmac.digest(extracted, info + b"\x01", hashlib.sha256)


def check_key(key: object) -> None:
    """Checks that a value is a key of this process.

    InputError for anything but a key, RuntimeError for a secret key made before a fork.
    """
    shape, dtype = getattr(key, "shape", None), getattr(key, "dtype", None)
    if shape != (8,) or dtype != np.uint32:
        what = f"{dtype}{list(shape)}" if shape is not None else type(key).__name__
        raise InputError(f"a noise key is 8 uint32 words, as bam.secret_key() returns, got {what}")
    # Only a fork has secret keys of another process.
    if not this_process().num_forks or isinstance(key, jax.core.Tracer):
        return
    if _made_in.get(digest(np.asarray(key)), this_process()) != this_process():
        raise RuntimeError(
            "this bam.secret_key() was made before the process was forked, and the other process "
            "would add the same noise: make a key in each process"
        )


def is_secret(key: UInt32[Array | np.ndarray, "8"]) -> bool:
    """Returns whether `secret_key` made a key of these words, here or before a fork."""
    return digest(key) in _made_in


def digest(key: UInt32[Array | np.ndarray, "8"]) -> bytes:
    """Returns the SHA-256 of a key's words, from which nobody can compute the key."""
    return hashlib.sha256(np.asarray(key).tobytes()).digest()


def remember(table: dict[bytes, Any], row: bytes, value: Any) -> None:
    """Adds a row to a table of digests, and removes the oldest one of more than `MOST_KEYS`."""
    table[row] = value
    while len(table) > MOST_KEYS:
        with contextlib.suppress(KeyError, RuntimeError):  # another thread adds a row
            del table[next(iter(table))]
