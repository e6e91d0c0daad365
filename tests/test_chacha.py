"""ChaCha20 is RFC 8439's, keys are what they are said to be, and no block is used twice."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

import bam
from bam.core import chacha, gaussian, places, sampling, seeds
from bam.core.chacha import Stream

KEY = np.frombuffer(bytes(range(32)), "<u4").astype(np.uint32)


def as_words(text):
    return np.frombuffer(bytes.fromhex(text), "<u4").astype(np.uint32)


# RFC 8439, section 2.3.2, and appendix A.1, test vectors 1 to 5: key, block, nonce, key stream.
ZEROS = np.zeros(8, np.uint32)
VECTORS = [
    (KEY, 1, "000000090000004a00000000",
     "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
     "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"),
    (ZEROS, 0, "00" * 12,
     "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
     "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"),
    (ZEROS, 1, "00" * 12,
     "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
     "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"),
    (as_words("00" * 31 + "01"), 1, "00" * 12,
     "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
     "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0"),
    (as_words("00ff" + "00" * 30), 2, "00" * 12,
     "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
     "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096"),
    (ZEROS, 0, "00" * 11 + "02",
     "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
     "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "number", "nonce", "expected"), VECTORS)
def test_the_known_answers_of_the_rfc(key, number, nonce, expected):
    numbers, nonce = np.array([7, number], np.uint32), tuple(as_words(nonce).tolist())
    for made in (
        chacha.blocks(key, numbers, nonce),
        jax.jit(chacha.blocks)(jnp.asarray(key), jnp.asarray(numbers), nonce),
    ):
        assert np.asarray(made)[:, 1].astype("<u4").tobytes().hex() == expected


def test_a_million_words_are_those_of_another_library():
    num_blocks = 62_500
    first = 2**32 - num_blocks  # the last that there are
    nonce = 3, 2**32 - 1, 5
    full_nonce = np.array([first, *nonce]).astype("<u4").tobytes()
    cipher = Cipher(algorithms.ChaCha20(KEY.tobytes(), full_nonce), mode=None).encryptor()
    expected = np.frombuffer(cipher.update(bytes(64 * num_blocks)), "<u4").reshape(-1, 16)
    numbers = first + np.arange(num_blocks, dtype=np.uint32)
    for numbers_of in (np.asarray, jnp.asarray):
        made = chacha.blocks(KEY, numbers_of(numbers), nonce)
        np.testing.assert_array_equal(np.asarray(made).T, expected)
    some = chacha.words(KEY, 100, nonce)
    whole = chacha.blocks(KEY, np.arange(7, dtype=np.uint32), nonce).T.ravel()
    np.testing.assert_array_equal(some, whole[:100])


def test_the_key_of_a_seed_is_hkdf_sha_256_of_it():
    for seed, label in ((0, "noise"), (2**256 - 1, "batches")):
        derived = HKDF(SHA256(), 32, salt=b"bam", info=label.encode())
        expected = derived.derive(seed.to_bytes(32, "little"))
        assert seeds.host_key(seed, label).astype("<u4").tobytes() == expected
        assert np.asarray(bam.seeded_key(seed, label)).astype("<u4").tobytes() == expected


def test_x64_default_generators_and_eager_execution_do_not_matter():
    expected = np.asarray(bam.GaussianNoise(bam.seeded_key(1), 1.0, 2).draws_of_device(100))
    key = bam.seeded_key(1)
    noise = lambda: bam.GaussianNoise(key, 1.0, 2).draws_of_device(100)  # noqa: E731
    with jax.enable_x64(True):
        np.testing.assert_array_equal(jax.jit(noise)(), expected)
    with jax.default_prng_impl("rbg"), jax.debug_nans(True):
        np.testing.assert_array_equal(jax.jit(noise)(), expected)
    with jax.disable_jit():
        np.testing.assert_array_equal(noise(), expected)


# No block twice.


def in_python(go_on, body, state):
    while go_on(state):
        state = body(state)
    return state


def blocks_of_runs(monkeypatch):
    """Every (key, block, nonce) that two steps of everything that draws ask for, and by what."""
    asked, original = [], chacha.blocks

    def noted(key, numbers, nonce):
        nonce = tuple(int(x) for x in nonce)
        key = np.asarray(key).tobytes()
        asked.append([(key, int(number), nonce) for number in np.asarray(numbers).tolist()])
        return original(key=np.frombuffer(key, np.uint32), numbers=numbers, nonce=nonce)

    for module in (chacha, gaussian, places):
        monkeypatch.setattr(module, "blocks", noted)
    monkeypatch.setattr(jax.lax, "cond", lambda *args: True if len(args) == 4 else args[1]())
    monkeypatch.setattr(jax.lax, "while_loop", in_python)
    monkeypatch.setattr(jax.lax, "map", lambda f, xs: jnp.stack([f(x) for x in xs]))
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
    monkeypatch.setattr(gaussian, "MOST_BLOCKS", 8)
    monkeypatch.setattr(gaussian, "gaussian", gaussian.gaussian.__wrapped__)  # not compiled
    clip, key = bam.clip_by_l2_norm(1.0), bam.seeded_key(0)
    for step in (1, 2):
        noise = bam.gaussian_noise(clip, 1.0, key, step)
        noise.draws_of_device(384)  # whole groups: what fills one repeats blocks, and is dropped
        bam.core.places.draw(noise, jnp.ones(40, bool), 4, 1)
        sampling.poisson_sample(0, step, 10**5, 0.3)
        sampling.pad(np.arange(5), 10, 0, step)
    sampling.cycle_parts.cache_clear()
    sampling.cyclic_sample(0, 1, 50, 0.5, 3)
    return asked


def test_no_two_sums_or_batches_share_a_block(monkeypatch):
    asked = [block for call in blocks_of_runs(monkeypatch) for block in call]
    # The last call draws a batch of a step that has one already: the seed's own, again.
    assert len(asked) > 2 * 12_500 / 4
    used = {nonce[1] for _, _, nonce in asked}
    assert used >= set(Stream) - {Stream.COINS}
    repeated = {block[2] for block, times in collections.Counter(asked).items() if times > 1}
    assert repeated <= {(1, Stream.BATCH, 0), (1, Stream.BATCH_TIES, 0)}


def test_entries_streams_and_steps_have_numbers_of_their_own():
    """By construction, tiles of 3 (4) · b blocks have numbers of their own, up to 2^32 entries."""
    for num_blocks, words in itertools.product((1, 63, gaussian.MOST_BLOCKS), (3, 4)):
        last_tile = -(-(2**32) // (16 * num_blocks)) + 7  # seven more for eight devices
        assert words * num_blocks * (last_tile + 1) <= 2**32
    nonces = {chacha.nonce(s, t, a) for s in Stream for t in (0, 1, 2**32 - 1) for a in (0, 1)}
    assert len(nonces) == len(Stream) * 6


# Keys.


@pytest.mark.parametrize(
    "key",
    [jax.random.key(0), np.zeros(2, np.uint32), np.zeros(8, np.int32), bytes(32), 3,
     np.zeros((1, 8), np.uint32)],
    ids=["of JAX", "64 bits", "signed", "bytes", "a number", "two axes"],
)  # fmt: skip
def test_what_is_no_key_is_refused_in_one_line(key, without_the_tests_type_checks):
    clip = bam.clip_by_l2_norm(1.0)
    for use in (
        lambda: bam.privatize(clip, 1.0, 4, key),
        lambda: bam.gaussian_noise(clip, 1.0, key),
        lambda: chacha.blocks(key, np.arange(1, dtype=np.uint32), (0, 0, 0)),
    ):
        with pytest.raises(ValueError, match=r"^a noise key is 8 uint32 words, .*, got [^\n]*$"):
            use()


def test_a_secret_key_is_new_each_time_and_never_a_constant_of_a_compiled_program():
    keys = [np.asarray(bam.secret_key()).tobytes() for _ in range(50)]
    assert len(set(keys)) == 50 and {len(key) for key in keys} == {32}
    traced = {
        "jit": lambda f: jax.jit(f)(0.0),
        "scan": lambda f: jax.lax.scan(lambda c, x: (f(c), x), 0.0, jnp.ones(3)),
        "vmap": lambda f: jax.vmap(f)(jnp.ones(3)),
        "grad": lambda f: jax.grad(f)(1.0),
    }
    for apply in traced.values():
        with pytest.raises(RuntimeError, match="pass the key as an argument"):
            apply(lambda x: x + bam.secret_key()[0])
        with pytest.raises(RuntimeError, match="pass the key as an argument"):
            apply(lambda x: x + bam.seeded_key(0)[0])


def test_one_key_in_two_transforms_is_refused():
    clip = bam.clip_by_l2_norm(1.0)
    key = bam.secret_key()
    bam.privatize(clip, 1.0, 4, key)
    for same in (key, key.copy()):
        with pytest.raises(ValueError, match="both would add the same noise"):
            bam.privatize(clip, 1.0, 4, same)
    bam.privatize(clip, 1.0, 4, bam.secret_key())
    seeded = bam.seeded_key(77)
    bam.privatize(clip, 1.0, 4, seeded)
    with pytest.raises(ValueError, match="both would add the same noise"):
        bam.privatize(clip, 1.0, 4, seeded)
    with pytest.warns(RuntimeWarning, match="another transform has an equal key"):
        bam.privatize(clip, 1.0, 4, bam.seeded_key(77))  # to compare two trainings


def test_one_transform_for_two_sets_of_parameters_is_refused():
    """As in `optax.multi_transform`, with one transform under two labels."""
    tx = bam.privatize(bam.clip_by_l2_norm(1.0), 1.0, 4, bam.secret_key())
    with pytest.raises(RuntimeError, match="outside of jit"):  # which begins for no parameters
        jax.eval_shape(tx.init, {"a": jnp.zeros(5)})
    tx.init({"a": jnp.zeros(3)})
    for other in ({"b": jnp.zeros(3)}, {"a": jnp.zeros(4)}):
        with pytest.raises(ValueError, match="one transform for each, each with its own key"):
            tx.init(other)


def test_a_mask_cannot_be_forgotten():
    tx = bam.privatize(bam.clip_by_l2_norm(1.0), 1.0, 4, bam.secret_key())
    state = tx.init(jnp.zeros(2))
    with pytest.raises(ValueError, match="needs update"):
        tx.update(jnp.ones((3, 2)), state, jnp.zeros(2))
    assert tx.update(jnp.ones((3, 2)), state, jnp.zeros(2), mask=None)[0].shape == (2,)
    with pytest.raises(TypeError, match="mask"):
        bam.clipped_sum(lambda p, x: x, bam.clip_by_l2_norm(1.0), jnp.zeros(2), jnp.ones((3, 2)))


@pytest.mark.usefixtures("without_the_tests_type_checks")
@pytest.mark.parametrize(
    "step", [2**32, -1, 0.7, True, np.int64(2**40), np.float32(1), np.zeros(2, int)]
)
def test_a_step_that_would_be_another_is_refused_where_noise_is_added(step):
    noise = gaussian.GaussianNoise(bam.seeded_key(0), 1.0, step)
    with pytest.raises(ValueError, match=r"^a step must be an integer from 0 to 2\^32 - 1, got "):
        bam.clipped_sum(
            lambda w, x: x, bam.clip_by_l2_norm(1.0), jnp.zeros(3), jnp.ones((2, 3)),
            mask=None, noise=noise,
        )  # fmt: skip


@pytest.mark.usefixtures("without_the_tests_type_checks")
def test_a_traced_step_that_is_no_integer_is_refused():
    key = bam.seeded_key(0)
    share = jax.jit(lambda s: gaussian.GaussianNoise(key, 1.0, s).draws_of_device(3))
    with pytest.raises(ValueError, match=r"^a step must be an integer"):
        share(jnp.float32(0.4))
