"""What a run computes does not depend on how many devices share it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bam
from bam.core import engine
from bam.privacy import private_gradient
from bam.training import config as base
from bam.training import devices, loop
from tests.cases import (
    assert_close,
    assert_same_bits,
    compilations,
    distance,
    mlp_batch,
    mlp_loss,
    mostly,
    several_devices,
)
from tests.cases import mlp_params as make_params

PARAMS = make_params()
SAM = bam.bam_sam(mlp_loss, 0.1)


@pytest.fixture
def use(monkeypatch):
    """`use(n)` makes n devices visible and returns their mesh."""

    def use(num_devices):
        visible = several_devices(num_devices)
        monkeypatch.setattr(devices, "visible", lambda: visible)
        return devices.mesh(devices.visible())

    return use


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_the_program_that_is_checked_against_the_memory_is_that_of_the_steps(use, num_devices):
    use(num_devices)
    config = base.get_config("dp_sgd")
    config.update({"accountant": "rdp", "num_steps": 4, "expected_batch_size": 64})
    config.model.name = "linear"
    built = loop.build(config)
    state, run = built.init(0), built.training(0).run
    rows = built.place_rows()
    built.check_step(state, rows)
    drawn, mask = next(rows.read(run.batch, range(1, 5)))
    batch = private_gradient.batch_of(drawn, mask, 1, np.asarray(state.private.tag))
    assert compilations(lambda: built.step(state, batch)) == 0
    if num_devices > 1:  # the control: rows that are placed otherwise
        elsewhere = batch._replace(examples=drawn | {"row": np.asarray(drawn["row"])})
        assert compilations(lambda: built.step(built.init(0), elsewhere)) > 0


@functools.cache  # compiled once for all masks
def total_with(mesh, oracle, microbatch_size=2):
    clip = bam.clip_by_l2_norm(1.0)

    @jax.jit
    def total(batch, mask):
        return bam.clipped_sum(
            oracle.grad, clip, PARAMS, batch, mask=mask, microbatch_size=microbatch_size, mesh=mesh
        )

    return total


@pytest.mark.parametrize("num_rows", [0, 1, 7, 16, 19])
@pytest.mark.parametrize("num_devices", [2, 8])
def test_the_devices_sums_add_up_to_the_sum(use, num_devices, num_rows):
    batch, mask = mlp_batch(19), jnp.arange(19) < num_rows
    expected, norms = total_with(use(1), SAM)(batch, mask)
    total, shared_norms = total_with(use(num_devices), SAM)(batch, mask)
    assert_close(total, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(shared_norms, norms, rtol=1e-5)  # in the order of the rows


@pytest.mark.parametrize("num_devices", mostly([1, 2, 8], slow=[1, 2]))
def test_every_entry_of_the_noise_is_added_once_by_exactly_one_device(use, num_devices):
    """Leaves of 12, 4 and 4 entries, so that slices of them are padded."""
    mesh, oracle = use(num_devices), bam.dp_sgd(mlp_loss)
    noise = bam.GaussianNoise(bam.seeded_key(5), 2.0)

    @jax.jit
    def total(num_rows, noise):
        return bam.clipped_sum(
            oracle.grad, bam.clip_by_l2_norm(1.0), PARAMS, mlp_batch(9),
            mask=jnp.arange(9) < num_rows, microbatch_size=2, mesh=mesh, noise=noise,
        )[0]  # fmt: skip

    drawn = noise.draws_of_device(20)[:20] * noise.spacing
    pieces = [piece.reshape(x.shape) for piece, x in zip(
        jnp.split(drawn, [4, 16]), jax.tree.leaves(PARAMS), strict=True)]  # fmt: skip
    pure = jax.tree.unflatten(jax.tree.structure(PARAMS), pieces)
    assert_same_bits(total(0, noise), pure)
    expected = jax.tree.map(jnp.add, total(7, None), pure)
    assert_close(total(7, noise), expected, atol=7 * noise.spacing)


def body_of_shard_map(jaxpr):
    """The one `shard_map` in a program, also inside of functions that it calls."""
    for equation in jaxpr.eqns:
        inner = equation.params.get("jaxpr")
        inner = getattr(inner, "jaxpr", inner)
        if equation.primitive.name == "shard_map":
            return inner
        if inner is not None and (body := body_of_shard_map(inner)):
            return body
    return None


def test_each_device_adds_its_noise_before_the_sums_are_added_up(use):
    """The all-reduce is the last that happens: what it returns is returned as it is."""
    mesh, oracle = use(4), bam.dp_sgd(mlp_loss)
    key = bam.seeded_key(0)

    def total(key):
        return bam.clipped_sum(
            oracle.grad, bam.clip_by_l2_norm(1.0), PARAMS, mlp_batch(8), mask=None, mesh=mesh,
            noise=bam.GaussianNoise(key, 1.0),
        )[0]  # fmt: skip

    body = body_of_shard_map(jax.make_jaxpr(total)(key).jaxpr)
    sums = [e for e in body.eqns if "psum" in e.primitive.name]
    reduced = {v for e in sums for v in e.outvars}
    assert len(reduced) == 2  # high and low parts of the integers of all entries
    assert all(v.aval.dtype == jnp.int32 for v in reduced)
    assert reduced <= set(body.outvars)


def test_more_devices_than_rows_and_rows_that_are_not_finite_change_nothing(use):
    x, y = mlp_batch(3)
    batch = (x.at[1, 0].set(jnp.nan), y)
    oracle, mask = bam.dp_sgd(mlp_loss), jnp.ones(3, bool)
    expected, norms = total_with(use(1), oracle)(batch, mask)
    total, shared_norms = total_with(use(8), oracle, microbatch_size=16)(batch, mask)
    assert_close(total, expected)
    np.testing.assert_array_equal(np.isnan(shared_norms), [False, True, False])
    np.testing.assert_allclose(shared_norms[::2], norms[::2], rtol=1e-5)


def test_ordinary_training_is_shared_too(use):
    batch = mlp_batch(11)
    mask = jnp.arange(11) < 9

    def total(mesh):
        return jax.jit(lambda p, b: engine.plain_sum(mlp_loss, p, b, mask=mask, mesh=mesh))

    sums = [total(use(n))(PARAMS, batch) for n in (1, 4)]
    assert_close(sums[1], sums[0])


def config_of(method):
    config = base.get_config(method)
    config.update({"num_steps": 3, "expected_batch_size": 24, "microbatch_size": 4})
    config.accountant = "rdp"
    config.model = {"name": "linear", "width": 1}
    config.augment.update({"views": 2, "shift": 1})
    config.eval.every = 1
    return config


@functools.cache
def on_one_device(method):
    return loop.train(loop.build(config_of(method), hardware=jax.devices()[:1]), seed=3)


RUNS = [("dp_sat", 8), ("dp_sat", 2), ("bam_exact", 8)]


@pytest.mark.parametrize(("method", "num_devices"), mostly(RUNS, slow=RUNS[1:]))
def test_a_run_is_the_same_on_any_number_of_devices(method, num_devices):
    one = on_one_device(method)
    experiment = loop.build(config_of(method), hardware=several_devices(num_devices))
    result = loop.train(experiment, seed=3)
    assert result.summary["num_devices"] == num_devices
    assert_same_bits(result.state.params, one.state.params)
    assert_same_bits(  # the same noise: key and count
        jax.tree.map(_as_data, result.state.private), jax.tree.map(_as_data, one.state.private)
    )
    assert [r["epsilon"] for r in result.rows] == [r["epsilon"] for r in one.rows]
    for leaf in jax.tree.leaves(result.state.params):
        copies = [shard.data for shard in leaf.addressable_shards]
        assert len(copies) == num_devices
        assert all((np.asarray(c) == np.asarray(copies[0])).all() for c in copies)
    # Control: what another seed does is seen.
    other = loop.train(experiment, seed=4)
    assert distance(other.state.params, one.state.params) > 1e-3


def _as_data(x):
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@pytest.mark.parametrize("num_devices", [2, 8])
def test_the_copies_of_data_on_several_cpu_devices_take_what_one_may(use, num_devices):
    use(1)
    alone = devices.room_for_data()
    use(num_devices)
    assert 0 <= alone - num_devices * devices.room_for_data() < num_devices
