"""Initial weights are JAX's own numbers, computed without a program for each network."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bam import models
from bam.models import interpreter
from bam.models.interpreter import BLOCK, interpret
from bam.training import loop
from configs import digits

KEY = jax.random.key(17)


@pytest.fixture
def compiled():
    """The number of programs that XLA has compiled since, or taken from a cache."""
    events = []

    def count(event, duration, **more):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    yield lambda: len(events)
    jax.monitoring.unregister_event_duration_listener(count)


def near(ours, theirs):
    """Whether two trees of numbers are one, up to rounding, and one in what is no float."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            if not np.array_equal(x, y):
                return False
            continue
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        if np.abs(x - y).max(initial=0) > 2e-6 * np.abs(y).max(initial=0):
            return False
    return True


# ---------------------------------------------------------------- Random bits.


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (5, 7), (2, BLOCK // 2), (3, BLOCK - 1)])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_random_bits_are_those_of_jax(shape, dtype):
    def draw(key):
        return jax.random.bits(key, shape, dtype)

    np.testing.assert_array_equal(interpret(draw, KEY), draw(KEY))


def test_keys_that_are_made_of_a_key_are_those_of_jax():
    def make(key):
        three = jax.random.split(key, 3)
        folded = jax.random.fold_in(three[1], 2**32 - 1)
        pairs = jax.random.split(jax.random.fold_in(folded, 0), (2, 5))
        return [jax.random.key_data(x) for x in (three, folded, pairs)]

    for ours, theirs in zip(interpret(make, KEY), make(KEY), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_wrong_rotation_gives_other_bits(monkeypatch):
    low = np.arange(4, dtype=np.uint32)

    def hashed():
        high, low_ = interpreter.threefry(np.uint32([1, 2]), np.zeros_like(low), low)
        return high ^ low_

    key = jax.random.wrap_key_data(jnp.uint32([1, 2]))
    np.testing.assert_array_equal(hashed(), jax.random.bits(key, (4,)))
    monkeypatch.setattr(interpreter, "ROTATIONS", ((13, 15, 26, 6), (17, 29, 16, 23)))
    assert not np.any(hashed() == np.asarray(jax.random.bits(key, (4,))))


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_another_generator_is_jax_s_own(impl):
    def draw(key):
        return jax.random.bits(jax.random.fold_in(key, 3), (6,))

    key = jax.random.key(3, impl=impl)
    np.testing.assert_array_equal(interpret(draw, key), draw(key))


def test_the_generator_s_older_form_is_jax_s_own():
    def draw(key):
        return jax.random.bits(jax.random.split(key)[0], (3, 5))

    with jax.threefry_partitionable(False):
        older = draw(KEY)
        np.testing.assert_array_equal(interpret(draw, KEY), older)
    assert not np.array_equal(interpret(draw, KEY), older)  # the control: the forms differ


# ---------------------------------------------------------------- Whatever an initialiser asks for.

ASKED = {
    "normal": lambda key: jax.random.normal(key, (3, 40)),
    "normal, bfloat16": lambda key: jax.random.normal(key, (40,), jnp.bfloat16),
    "truncated_normal": lambda key: jax.random.truncated_normal(key, -1.5, 2, (300,)),
    "uniform": lambda key: jax.random.uniform(key, (3, 40), minval=-3, maxval=0.1),
    "orthogonal": lambda key: jax.nn.initializers.orthogonal()(key, (4, 5)),
    "randint": lambda key: jax.random.randint(key, (50,), -3, 11),
    "permutation": lambda key: jax.random.permutation(key, 30),
    "choice": lambda key: jax.random.choice(key, 30, (4,), replace=False),
    "bernoulli": lambda key: jax.random.bernoulli(key, 0.3, (50,)),
    "gumbel": lambda key: jax.random.gumbel(key, (50,)),
    "exponential": lambda key: jax.random.exponential(key, (50,)),
    "gamma": lambda key: jax.random.gamma(key, 2.0, (5,)),
    "categorical": lambda key: jax.random.categorical(key, jnp.arange(4.0), shape=(20,)),
    "split": lambda key: [jax.random.normal(k, (4,)) for k in jax.random.split(key, 3)],
    "vmap": lambda key: jax.vmap(lambda k: jax.random.normal(k, (4,)))(jax.random.split(key, 3)),
    "scan": lambda key: jax.lax.scan(
        lambda k, _: (jax.random.fold_in(k, 1), jax.random.normal(k, (2,))), key, None, 4
    )[1],
    "eye and sums": lambda key: jnp.eye(3) - jax.random.normal(key, (3, 3)).mean(axis=0),
    "quotients": lambda key: jax.random.randint(key, (50,), -9, 9) // 2,
    "shifts": lambda key: jax.lax.shift_right_logical(jax.random.randint(key, (50,), -9, 9), 3),
    "truncation": lambda key: (9 * jax.random.normal(key, (50,))).astype(int),
    "softplus": lambda key: jax.nn.softplus(jax.random.normal(key, (50,))),
}


def test_each_row_is_of_an_operation_that_jax_has():
    from jax.extend.core import primitives

    # A misspelt one would be taken by JAX, slowly. Old versions have no `stop_gradient`.
    for name in interpreter.ROWS.keys() - {"stop_gradient"}:
        assert f"{name}_p" in dir(primitives), name
    assert "copy_of_it_p" not in dir(primitives)


@pytest.mark.thorough
@pytest.mark.parametrize("asked", ASKED)
def test_what_an_initialiser_asks_for_is_what_jax_computes(asked):
    function = ASKED[asked]
    theirs = jax.jit(function)(KEY)
    assert near(interpret(function, KEY), theirs)
    assert not near(interpret(function, jax.random.key(18)), theirs)  # the control


def test_64_bits_are_jax_s_own():
    with jax.enable_x64(True):
        assert near(interpret(ASKED["normal"], KEY), jax.jit(ASKED["normal"])(KEY))
        assert interpret(ASKED["normal"], KEY).dtype == np.float64


# ---------------------------------------------------------------- Networks.


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.hidden, self.head = nnx.Linear(12, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(x.reshape(len(x), -1))))


class OfOnesOwn(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(6, kernel_init=nn.initializers.orthogonal())(x.reshape(len(x), -1))
        rotation = self.param("rotation", lambda key: jax.random.permutation(key, jnp.eye(6)))
        return nn.Dense(3, kernel_init=nn.initializers.lecun_uniform())(nn.relu(x @ rotation))


NETWORKS = {
    "convnet": lambda: models.create("convnet", 3, 8),
    "ViT": lambda: models.create("vit_ti16", 3, 1, depth=1),
    "scanned": lambda: models.create("deep_residual", 3, 8, depth=3),
    "NNX": lambda: Mlp(nnx.Rngs(0)),
    "of one's own": OfOnesOwn,
}


def as_model(name, **options):
    shape = (16, 16, 3) if name == "ViT" else (2, 2, 3) if name != "convnet" else (8, 8, 3)
    return models.as_functions(NETWORKS[name](), shape, **options)


@pytest.mark.parametrize("name", NETWORKS)
def test_initial_weights_are_those_that_jit_gives(name):
    model = as_model(name)
    expected = jax.jit(model.init)(KEY)
    assert near(model.init(KEY), expected)
    assert near(model.init(jax.random.key(18)), expected) == (name == "NNX")  # whose weights are


def test_low_rank_factors_are_those_that_jit_gives():
    model = as_model("of one's own", lora_rank=2, lora_targets="Dense_0")
    assert near(model.init(KEY), jax.jit(model.init)(KEY))


def test_initial_weights_are_independent_draws_of_their_distribution():
    """A leaf has its mean, deviation and truncation.

    There is no correlation between neighbours, leaves or seeds.
    """

    class Wide(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(400)(x)  # normal of variance 1/400, cut off at 2 and rescaled
            return nn.Dense(400, kernel_init=nn.initializers.normal(0.05))(x)

    model = models.as_functions(Wide(), (400,))

    def leaves(seed):
        params = model.init(jax.random.key(seed))
        return [20 * np.asarray(params[f"Dense_{i}"]["kernel"], np.float64).ravel() for i in (0, 1)]

    def odd(x, cut):
        """What is wrong with 160,000 draws of deviation 1."""
        bound, num = 4.5 / np.sqrt(x.size), x.size
        pairs = [np.mean(x[:-by] * x[by:]) for by in (1, 2, 400, BLOCK)]
        wrong = {"mean": abs(x.mean()) > bound, "deviation": abs(x.std() - 1) > bound}
        wrong |= {
            "neighbours": max(map(abs, pairs)) > bound,
            "twice": len(np.unique(x)) < 0.97 * num,
        }
        edge = 2 / 0.87962566103423978  # of what is rescaled to a deviation of 1
        return {k for k, v in wrong.items() if v} | (
            {"cut"} if (np.abs(x).max() <= edge + 1e-6) != cut else set()
        )

    (a, b), (c, d) = leaves(0), leaves(1)
    for x, cut in ((a, True), (b, False), (c, True), (d, False)):
        assert not odd(x, cut)
    for x, y in itertools.combinations((a, b, c, d), 2):
        assert abs(np.mean(x * y)) < 4.5 / np.sqrt(x.size)
    # The controls: each fault is seen.
    assert odd(b + 0.02, False) == {"mean"}
    assert odd(1.02 * b, False) == {"deviation"}
    assert odd(a, False) == odd(b, True) == {"cut"}
    assert "neighbours" in odd((b + np.roll(b, 1)) / np.sqrt(2), False)
    assert {"neighbours", "twice"} <= odd(np.resize(b[:BLOCK], b.size), False)
    assert abs(np.mean(b * (0.02 * a + b))) > 4.5 / np.sqrt(b.size)


@pytest.mark.thorough
def test_no_network_of_other_shapes_compiles_anything(compiled):
    as_model("ViT").init(KEY)
    before = compiled()
    for width in (4, 12):
        network = models.create("convnet", width, width)
        models.as_functions(network, (8, 8, width)).init(jax.random.key(width))
    assert compiled() == before
    jax.jit(as_model("convnet").init)(KEY)  # the control: a program is counted
    assert compiled() == before + 1


def test_what_the_weights_do_not_need_is_not_computed():
    def refuse(x):
        raise AssertionError("computed")

    def init(key):
        weights = jax.random.normal(key, (3,))
        return weights, jax.pure_callback(refuse, weights, weights)

    assert interpret(lambda key: init(key)[0], KEY).shape == (3,)
    with pytest.raises(Exception, match="computed"):  # the control: it would be
        jax.block_until_ready(interpret(lambda key: init(key)[1], KEY))


@pytest.mark.thorough
def test_inside_a_trace_it_is_the_function_itself():
    model = as_model("convnet")
    both = jax.vmap(model.init)(jax.random.split(KEY, 2))
    one = model.init(jax.random.split(KEY, 2)[1])
    assert near(jax.tree.map(lambda x: x[1], both), one)
    assert jax.eval_shape(model.init, KEY).keys() == one.keys()


# ---------------------------------------------------------------- A run's first state.


def trainer(num_devices=1, **changes):
    config = digits.get_config("bam_sam")
    config.update({"accountant": "rdp", "num_steps": 3} | changes)
    return loop.build(config, hardware=jax.devices()[:num_devices])


def numbers(tree):
    """All arrays of a tree on the host, keys as their words."""
    keys = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    words = jax.tree.map(lambda x: jax.random.key_data(x) if keys(x) else x, tree)
    return jax.tree.leaves(jax.device_get(words))


def test_another_seed_rate_clip_norm_or_epsilon_compiles_no_first_state(compiled):
    changes = [{}, {"optimizer": {"learning_rate": 0.3}}, {"clip_norm": 0.4}, {"epsilon": 2.0}]
    trainers = [trainer(**change) for change in changes]
    trainers[0].init(0)
    before = compiled()
    for each in trainers:
        each.init(1)
    assert compiled() == before
    jax.jit(lambda: jnp.arange(7))()  # the control
    assert compiled() == before + 1


def test_a_first_state_is_the_same_on_one_device_and_on_eight():
    one, eight, other = trainer().init(5), trainer(8).init(5), trainer().init(6)
    assert len(jax.tree.leaves(eight.params)[0].devices()) == 8
    for x, y in zip(numbers(one), numbers(eight), strict=True):
        np.testing.assert_array_equal(x, y)
    kernels = [x.params["Dense_0"]["kernel"] for x in (one, other)]
    assert not np.array_equal(*kernels)  # the control: a seed makes them


def test_no_two_arrays_of_a_first_state_share_memory():
    state = trainer(mechanism={"name": "banded", "bands": 2}).init(5)
    arrays = jax.tree.leaves(state._replace(augment_key=jax.random.key_data(state.augment_key)))
    places = {x.unsafe_buffer_pointer() for x in arrays}
    assert len(places) == len(arrays) > 20
    same = jnp.zeros(3)
    assert len({x.unsafe_buffer_pointer() for x in (same, same)}) == 1  # the control
    out = interpret(lambda x: (x, x, jnp.zeros(3), jnp.broadcast_to(x[:1], 3)), same)
    assert len({x.unsafe_buffer_pointer() for x in (same, *out)}) == 5
