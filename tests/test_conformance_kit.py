"""The conformance kit accepts what is right, and says what is wrong with what is not."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bam
from bam import testing
from bam.audit.audited import with_step
from bam.core.noise import advance_noise
from bam.privacy import mechanisms
from bam.privacy.plan import make_plan
from bam.training import loop, parts
from configs import digits
from configs.extensions import name_parts
from examples import (
    adaptive_clipping,
    automatic_clipping,
    disk,
    dp_adam_bc,
    dp_psac,
    low_pass,
    penalty_schedule,
    random_smoothing,
    scale_then_privatize,
    slaclip,
)
from tests.cases import ORACLES, mlp_batch, mlp_loss, mlp_params, row
from tests.check_mechanism import check_mechanism


def of_four_bands(num_examples, batch_size):
    return mechanisms.banded(num_examples, batch_size, bands=4)


PLAN = make_plan(
    num_examples=1000, expected_batch_size=100, num_steps=20, epsilon=2.0, delta=1e-5,
    accountant="rdp",
)  # fmt: skip
CLIP_NORM = 0.5

TRANSFORMS = {
    "clip_by_l2_norm": bam.clip_by_l2_norm(0.5),
    "normalize": bam.normalize(0.5),
    "clip_per_layer": bam.clip_per_layer(0.5),
    "chain": bam.chain(optax.scale(3.0), bam.clip_by_l2_norm(0.5)),
    "automatic clipping": automatic_clipping.clip(PLAN, CLIP_NORM),
    "DP-PSAC": dp_psac.clip(PLAN, CLIP_NORM),
    "scale, then privatise": scale_then_privatize.clip(PLAN, CLIP_NORM),
    "DiSK": disk.clip(PLAN, CLIP_NORM, kappa=0.7),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_our_transforms_conform(transform):
    testing.check_transform(transform)


def test_adaptive_clipping_conforms():
    testing.check_transform(adaptive_clipping.clip(PLAN, CLIP_NORM), keeps_structure=False)
    with pytest.raises(AssertionError, match="another structure"):
        testing.check_transform(adaptive_clipping.clip(PLAN, CLIP_NORM))


def test_slaclip_conforms_and_pays_nothing_for_its_slack():
    transform = slaclip.clip(PLAN, CLIP_NORM)
    assert transform.sensitivity == 1.0
    testing.check_transform(transform, keeps_structure=False)


@pytest.mark.parametrize("make_oracle", ORACLES.values(), ids=ORACLES.keys())
def test_our_oracles_conform(make_oracle):
    testing.check_oracle(make_oracle)


def test_random_smoothing_conforms_and_is_dp_sgd_without_a_radius():
    testing.check_oracle(
        lambda loss_fn: random_smoothing.oracle(loss_fn, 0.1),
        is_dp_sgd=lambda loss_fn: random_smoothing.oracle(loss_fn, 0.0),
    )


# Broken on purpose, each in a way that was seen in real code.


def bounded(update, sensitivity=0.5):
    return bam.BoundedTransformation(lambda params: (), update, sensitivity)


def scaled(grads, factor):
    return jax.tree.map(lambda g: factor * g, grads)


def no_epsilon_guard(grads, state, params=None):
    return scaled(grads, 0.5 / optax.tree.norm(grads)), state


def forgets_nan(grads, state, params=None):
    return scaled(grads, jnp.minimum(1.0, 0.5 / (optax.tree.norm(grads) + 1e-6))), state


def each_leaf_alone(grads, state, params=None):
    clip = bam.clip_by_l2_norm(0.5)
    return jax.tree.map(lambda g: clip.update(g, None)[0], grads), state


def clips_values(grads, state, params=None):
    return jax.tree.map(lambda g: jnp.nan_to_num(jnp.clip(g, -0.5, 0.5)), grads), state


def widens(grads, state, params=None):
    bounded, _ = bam.clip_by_l2_norm(0.5).update(grads, None)
    return jax.tree.map(lambda g: g.astype(jnp.float16), bounded), state


def to_half_each(grads, state, params=None):
    """Right for two leaves: each to C/√2."""
    grads, _ = bam.clip_by_l2_norm(1e6).update(grads, None)
    clip = bam.clip_by_l2_norm(0.5 / 2**0.5)
    return jax.tree.map(lambda g: clip.update(g, None)[0], grads), state


def growing():
    """A threshold that follows the mean, while the declared bound stays where it was."""

    def update(grads, state, params=None):
        bounded, _ = bam.clip_by_l2_norm(0.5).update(grads, None)
        return scaled_as(bounded, state), state

    def follow(mean, state):
        return mean, jnp.where(optax.tree.norm(mean) > 0.1, 1.2, 0.8) * state

    return bam.BoundedTransformation(lambda params: jnp.float32(0.9), update, 0.5, follow)


def scaled_as(grads, factor):
    return jax.tree.map(lambda g: (factor * g).astype(g.dtype), grads)


def clips_then_scales(grads, state, params=None):
    bounded, _ = bam.clip_by_l2_norm(0.5).update(grads, None)
    return scaled(bounded, 1.01), state


def drops_a_leaf(grads, state, params=None):
    bounded, _ = bam.clip_by_l2_norm(0.5).update(grads, None)
    return {"w": bounded["w"]}, state


class Remembers:
    """Clips to the mean norm it has seen so far: one example changes the others' gradients."""

    def __init__(self):
        self.norms = []

    def __call__(self, grads, state, params=None):
        norm = optax.tree.norm(grads)
        if not isinstance(norm, jax.core.Tracer):
            self.norms.append(float(jnp.nan_to_num(norm, posinf=1.0)))
        bound = min(0.5, sum(self.norms) / max(1, len(self.norms)))
        return bam.clip_by_l2_norm(max(bound, 1e-6)).update(grads, None)[0], state


def mixes_the_batch(grads, state, params=None):
    """Under a vmap that names no axis a batch cannot be seen, but through a callback it can."""
    bounded, _ = bam.clip_by_l2_norm(0.5).update(grads, None)

    def halve_if_batched(x):
        return np.asarray(x) * (0.5 if np.ndim(x) > 2 else 1.0)

    def one(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(halve_if_batched, shape, x, vmap_method="expand_dims")

    return jax.tree.map(one, bounded), state


def branches_in_python(grads, state, params=None):
    return (grads if optax.tree.norm(grads) < 0.5 else scaled(grads, 0.0)), state


def calls_the_host(grads, state, params=None):
    bounded, _ = bam.clip_by_l2_norm(0.5).update(grads, None)
    same = lambda x: jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)  # noqa: E731
    return jax.tree.map(same, bounded), state


def grows_in_python():
    """Its `finish` looks at the mean, which a compiled step does not know."""

    def finish(mean, state):
        return mean, (0.5 * state if optax.tree.norm(mean) > 0.1 else state)

    clip = bam.clip_by_l2_norm(0.5)
    return bam.BoundedTransformation(
        lambda params: jnp.float32(1), lambda g, s, p=None: (clip.update(g, ())[0], s), 0.5, finish
    )


BROKEN = {
    "an optax transform": (optax.clip_by_global_norm(0.5), "declares no sensitivity"),
    "no bound": (bounded(no_epsilon_guard, np.inf), "is not a finite bound"),
    "division by a zero norm": (bounded(no_epsilon_guard), "size 0 is not finite"),
    "nan passes": (bounded(forgets_nan), "is not finite"),
    "each leaf to the whole bound": (bounded(each_leaf_alone), "above its sensitivity 0.5"),
    "each value to the bound": (bounded(clips_values), "above its sensitivity 0.5"),
    "another dtype": (bounded(widens), "shapes or dtypes change"),
    "two leaves assumed": (bounded(to_half_each), "above its sensitivity 0.5 .three leaves"),
    "a bound that grows": (growing(), "above its sensitivity 0.5 after 40 steps"),
    "scaled after clipping": (bounded(clips_then_scales), "above its sensitivity 0.5"),
    "a leaf is missing": (bounded(drops_a_leaf), "another structure"),
    "a memory": (bounded(Remembers()), "(without it|called twice)"),
    "examples mix": (bounded(mixes_the_batch), "examples mix"),
    "a branch of Python's": (
        bounded(branches_in_python), r"^its update does not run compiled, in jax.jit: Tracer.*: .+",
    ),
    "a call of the host": (
        bounded(calls_the_host), r"^its update does not run for a batch of rows, in jax.vmap: .+",
    ),
    "a branch in finish": (grows_in_python(), r"^its finish does not run compiled, in jax.jit: .+"),
    "optax's clip, trusted": (
        bounded(optax.clip_by_global_norm(0.5).update), "not finite|above its sensitivity",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("transform", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_transform_is_refused_and_told_why(transform, message):
    with pytest.raises(AssertionError, match=message):
        testing.check_transform(transform)


def stay(params, previous):
    return params


def oracle_with(grad):
    return lambda loss_fn: bam.Oracle(stay, lambda params, example: grad(loss_fn, params, example))


def own_unit_direction(loss_fn, params, example):
    grads = jax.grad(loss_fn)(params, example)
    norm = optax.tree.norm(grads)
    moved = jax.tree.map(lambda p, g: p + 0.1 * g / norm, params, grads)
    return jax.grad(loss_fn)(moved, example)


def random_of_the_host(loss_fn, params, example):
    factor = np.random.default_rng().uniform(0.5, 1.5)
    return jax.tree.map(lambda g: factor * g, jax.grad(loss_fn)(params, example))


def of_another_dtype(loss_fn, params, example):
    return optax.tree.cast(jax.grad(loss_fn)(params, example), jnp.float16)


def of_the_loss_only(loss_fn, params, example):
    return jax.tree.leaves(jax.grad(loss_fn)(params, example))


def of_a_branch(loss_fn, params, example):
    grads = jax.grad(loss_fn)(params, example)
    return grads if optax.tree.norm(grads) > 0 else params


def of_the_host(loss_fn, params, example):
    same = lambda x: jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)  # noqa: E731
    return jax.tree.map(same, jax.grad(loss_fn)(params, example))


BROKEN_ORACLES = {
    "0/0 at a minimum": (oracle_with(own_unit_direction), "where the gradient is zero"),
    "random numbers of the host": (oracle_with(random_of_the_host), "without it|called twice"),
    "a branch of Python's": (
        oracle_with(of_a_branch), "^its gradient does not run compiled, in jax.jit: Tracer.*: .+",
    ),
    "a call of the host": (
        oracle_with(of_the_host), "^its gradient does not run for a batch of examples, in jax.vmap",
    ),
    "another dtype": (oracle_with(of_another_dtype), "other shapes or dtypes"),
    "another structure": (oracle_with(of_the_loss_only), "another structure"),
    "an ascent that divides by zero": (
        lambda loss_fn: bam.Oracle(
            lambda params, g: optax.tree.scale(1 / optax.tree.norm(g), params), jax.grad(loss_fn)
        ),
        "ascend returns values that are not finite",
    ),
    "an ascent with a branch of Python's": (
        lambda loss_fn: bam.Oracle(
            lambda params, g: params if optax.tree.norm(g) > 0 else g, jax.grad(loss_fn)
        ),
        "^its ascend does not run compiled, in jax.jit: Tracer.*: .+",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("make_oracle", "message"), BROKEN_ORACLES.values(), ids=BROKEN_ORACLES.keys()
)
def test_a_broken_oracle_is_refused_and_told_why(make_oracle, message):
    with pytest.raises(AssertionError, match=message):
        testing.check_oracle(make_oracle)


def test_an_ascent_is_given_zeros_at_first_as_in_training_and_need_not_take_none():
    def ascend(params, previous):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, previous)

    testing.check_oracle(lambda loss_fn: bam.Oracle(ascend, jax.grad(loss_fn)))


def test_an_oracle_that_should_be_dp_sgd_and_is_not_is_refused():
    with pytest.raises(AssertionError, match="must be DP-SGD"):
        testing.check_oracle(bam.dp_sgd, is_dp_sgd=lambda loss_fn: bam.bam_sam(loss_fn, 0.1))


# What each extension is for.


def test_dp_adam_bc_divides_by_the_signal_where_adam_divides_by_the_noise():
    """Gradients of ones and noise of the plan's size: v̂ − Φ is 1, and Adam's v̂ is 1 + Φ."""
    deviation = PLAN.noise_multiplier * CLIP_NORM / PLAN.expected_batch_size
    signal = 2 * deviation
    optimizer = dp_adam_bc.optimizer(PLAN, CLIP_NORM, CLIP_NORM, learning_rate=1.0, floor=1e-8)
    state = optimizer.init(jnp.zeros(20_000))
    for key in jax.random.split(jax.random.key(0), 200):
        noisy = signal + deviation * jax.random.normal(key, (20_000,))
        updates, state = optimizer.update(noisy, state)
    square = optax.tree.bias_correction(state["second"], 0.999, 200)
    assert float(jnp.mean(square)) == pytest.approx(signal**2 + deviation**2, rel=0.02)
    assert float(jnp.mean(updates)) == pytest.approx(-1.0, rel=0.05)  # Adam's: −0.89


def test_the_low_pass_filter_keeps_a_constant_and_averages_noise():
    smooth = low_pass.filter(decay=0.9)
    state = smooth.init(jnp.zeros(20_000))
    for key in jax.random.split(jax.random.key(0), 100):
        filtered, state = smooth.update(3.0 + jax.random.normal(key, (20_000,)), state)
    assert float(jnp.mean(filtered)) == pytest.approx(3.0, abs=0.02)
    # (1 − κ)/(1 + κ) of the noise's variance is left
    assert float(jnp.var(filtered)) == pytest.approx(0.1 / 1.9, rel=0.05)


def test_the_adaptive_clip_norm_finds_the_quantile_of_the_norms():
    transform = adaptive_clipping.clip(PLAN, CLIP_NORM, quantile=0.7, learning_rate=0.5)
    assert transform.sensitivity == pytest.approx(1.0, abs=0.05)
    rng = np.random.default_rng(0)
    norms = rng.uniform(1.0, 3.0, 100).astype(np.float32)  # quantile 0.7: 2.4
    directions = rng.normal(size=(100, 5))
    grads = jnp.asarray(norms[:, None] * directions / np.linalg.norm(directions, axis=1)[:, None])
    tx = bam.privatize(transform, PLAN.noise_multiplier, 100, bam.seeded_key(0))
    state = tx.init(jnp.zeros(5))
    update = jax.jit(tx.update)
    found = []
    for _ in range(80):
        mean, state = update(grads.astype(jnp.float32), state, mask=None)
        found.append(float(state.clip))
    assert mean.shape == (5,)
    assert np.mean(found[40:]) == pytest.approx(2.4, abs=0.2)


@pytest.mark.parametrize(("options", "scale"), [({}, 0.5), ({"per_clip_norm": False}, 100.0)])
def test_a_step_of_adaptive_clipping_is_as_long_whatever_the_clip_norm_has_become(options, scale):
    """Unless it is asked to follow: a gradient of 200, clipped at 100, then counts as 100."""
    clip = adaptive_clipping.clip(PLAN, CLIP_NORM, **options)
    assert clip.sensitivity == adaptive_clipping.clip(PLAN, CLIP_NORM).sensitivity > 1
    bounded, state = clip.update(jnp.array([0.0, 200.0]), jnp.float32(100))
    np.testing.assert_allclose(clip.finish(bounded, state)[0], [0.0, scale], rtol=1e-5)


def test_the_filter_takes_the_place_of_momentum():
    """The first steps are those of what follows the filter, and a constant is not delayed twice."""
    for optimizer, length in (
        (low_pass.sgd(PLAN, CLIP_NORM, CLIP_NORM, 1.0), 3.0 / CLIP_NORM),
        (low_pass.adam(PLAN, CLIP_NORM, CLIP_NORM, 1.0), 1.0),
    ):
        state = optimizer.init(jnp.zeros(1))
        steps = []
        for gradient in (3.0, 3.0, 0.0, 0.0):
            step, state = optimizer.update(jnp.array([gradient]), state)
            steps.append(-float(step[0]))
        assert steps[:2] == pytest.approx([length, length], rel=1e-4)
        assert 0 < steps[3] < steps[2] < length  # f alone: no momentum carries it on


def disk_steps(kappa, num_steps=4):
    """The trainer of a run of DiSK on digits, by plain SGD, and its states."""
    config = digits.get_config("dp_sgd")
    config.update({"num_steps": num_steps, "expected_batch_size": 20, "accountant": "rdp"})
    config.model.name, config.microbatch_size = "linear", 7
    options = {"kappa": kappa, "gamma": 0.5}
    sections = {
        "method": {"name": "examples.disk:oracle", "learning_rate": 0.1, **options},
        "clip": {"name": "examples.disk:clip", "kappa": kappa},
        "optimizer": {"name": "sgd", "momentum": 0.0},
    }
    if kappa is None:
        sections = {"optimizer": sections["optimizer"]}
    config = name_parts(config, sections)
    config.optimizer.learning_rate = 0.1
    built, states = loop.build(config), []

    def step(*given):
        states.append(jax.device_get(given[0]))
        return built.step(*given)

    result = loop.train(with_step(built, step), 0)
    return built, [*states, jax.device_get(result.state)]


def test_disk_that_trusts_a_step_alone_is_dp_sgd():
    equal = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-8)  # noqa: E731
    for ours, theirs in zip(disk_steps(1.0)[1], disk_steps(None)[1], strict=True):
        jax.tree.map(equal, ours.params, theirs.params)


def test_disk_looks_ahead_where_the_last_step_pointed_and_filters():
    kappa, gamma = 0.7, 0.5
    built, states = disk_steps(kappa)
    example = {"image": jnp.ones((1, 8, 8, 1)), "label": jnp.int32(3)}
    own = parts.make_oracle(built.config.method, built.parts.model.loss)
    plain = lambda params: jax.grad(built.parts.model.loss)(params, example)  # noqa: E731
    released = []
    for before, after in itertools.pairwise(states[1:]):
        moved = jax.tree.map(np.subtract, before.params, states[len(released)].params)
        there = jax.tree.map(lambda p, d: p + gamma * d, before.params, moved)
        a = (1 - kappa) / (kappa * gamma)
        expected = optax.tree.add(
            optax.tree.scale(a, plain(there)), optax.tree.scale(1 - a, plain(before.params))
        )
        gradient = own.grad(own.ascend(before.params, before.private.previous), example)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), gradient, expected)
        # What is filtered is what is released: the step itself, over the rate.
        step = jax.tree.map(lambda x, y: (x - y) / -0.1, after.params, before.params)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, atol=1e-3), step, after.private.previous
        )
        released.append(after)
    transform = disk.clip(PLAN, CLIP_NORM, kappa)
    running = transform.init(jnp.zeros(2))
    for mean, expected in (([1.0, -2.0], [0.7, -1.4]), ([0.0, 1.0], [0.21, 0.28])):
        filtered, running = transform.finish(jnp.array(mean), running)
        np.testing.assert_allclose(filtered, expected, rtol=1e-6)


def test_scaling_follows_what_was_released_and_moves_noise_to_large_coordinates():
    transform = scale_then_privatize.clip(PLAN, 1.0, floor=0.1, decay=0.5)
    rng = np.random.default_rng(0)
    grads = rng.normal(size=(3, 4, 2)) * [5.0, 0.05]  # [steps, examples, coordinates]
    state, moments = transform.init(jnp.zeros(2)), np.zeros(2)
    for of_step in grads:
        clipped = [transform.update(jnp.float32(g), state)[0] for g in of_step]
        released, state = transform.finish(sum(clipped) / 4, state)
        # The slow way, one example and one coordinate at a time.
        total = np.zeros(2)
        for g in of_step:
            scaled = g / (np.sqrt(moments) + 0.1)
            total += scaled / max(1.0, np.linalg.norm(scaled))
        expected = total / 4 * (np.sqrt(moments) + 0.1)
        moments = 0.5 * moments + 0.5 * expected**2
        np.testing.assert_allclose(released, expected, rtol=1e-5)
        np.testing.assert_allclose(state, moments, rtol=1e-5)
    noise, _ = transform.finish(jnp.ones(2), state)
    assert noise[0] > 1.5 * noise[1]


def test_psac_weighs_small_gradients_less_than_automatic_clipping_does():
    grad = {"w": jnp.float32([0.003, 0.004])}
    norm, r, clip_norm = 0.005, 0.1, CLIP_NORM
    transform = dp_psac.clip(PLAN, CLIP_NORM, r=r)
    weighed, _ = transform.update(grad, transform.init(grad))
    expected = clip_norm * norm / (norm + r / (norm + r))
    assert float(optax.tree.norm(weighed)) == pytest.approx(expected, rel=1e-5)
    long, _ = transform.update({"w": grad["w"] * 1e5}, transform.init(grad))
    assert float(optax.tree.norm(long)) == pytest.approx(clip_norm, rel=1e-3)


@pytest.mark.parametrize("norm", [0.0, 0.1, 0.37, 0.5, 2.0])
def test_slaclip_writes_the_slack_into_as_much_length_as_is_left(norm):
    transform = slaclip.clip(PLAN, CLIP_NORM, num_slots=9)  # C = 0.5: pieces of a third of it
    made, _ = transform.update({"w": jnp.float32([0, norm])}, transform.init(None))
    slack, share = np.asarray(made["slack"]), min(norm / 0.5, 1)
    assert slack.sum() == pytest.approx(3 * (1 - share), abs=1e-6)
    assert (np.diff(slack) <= 0).all()
    assert slack.max() <= 1 / 3 + 1e-6
    length = np.hypot(np.linalg.norm(slack), float(optax.tree.norm(made["grads"])))
    assert length <= 1 + 1e-6
    if norm == 0:
        assert length == pytest.approx(1, abs=1e-6)


def test_slaclip_grows_where_all_is_clipped_and_shrinks_where_nothing_is():
    transform = slaclip.clip(PLAN, CLIP_NORM, num_slots=4)
    of_length = lambda norm: transform.update({"w": jnp.float32([norm])}, jnp.float32(0.5))[0]  # noqa: E731
    _, grown = transform.finish(of_length(5.0), jnp.float32(0.5))
    assert float(grown) == pytest.approx(0.5 * np.exp(0.2 * 0.5))  # γ = 1/2
    kept, shrunk = transform.finish(of_length(0.2), jnp.float32(0.5))
    # Slack 0.6 of C, in pieces of 1/2: 1, 0.2 and nothing of them.
    assert float(shrunk) == pytest.approx(0.5 * np.exp(0.2 * (0.5 - 1)))
    assert float(kept["w"][0]) == pytest.approx(0.2)
    _, least = transform.finish(of_length(0.01), jnp.float32(0.1))
    assert float(least) == pytest.approx(0.1)


def loss_of_row(params, example):
    return mlp_loss(params, example["row"])


@pytest.mark.parametrize(("linear", "at_half"), [(True, 0.05), (False, 0.1)])
def test_the_scheduled_penalty_begins_as_bam_and_ends_as_dp_sgd(linear, at_half):
    testing.check_oracle(
        lambda loss_fn: penalty_schedule.oracle(loss_fn, 0.1, 10, linear),
        is_dp_sgd=lambda loss_fn: penalty_schedule.oracle(loss_fn, 0.0, 10, linear),
    )
    params, batch = mlp_params(), mlp_batch(4)
    example = {"row": row(batch, 0)}
    scheduled = jax.jit(penalty_schedule.oracle(loss_of_row, 0.1, 10, linear).grad)
    at_step = lambda step: scheduled(params, example | {"step": jnp.int32(step)})  # noqa: E731
    for step, oracle in (
        (0, bam.bam_sam(loss_of_row, 0.1)),
        (5, bam.bam_sam(loss_of_row, at_half)),
        (10, bam.dp_sgd(loss_of_row)),
        (99, bam.dp_sgd(loss_of_row)),
    ):
        expected_grads = jax.jit(oracle.grad)(params, example)
        same = np.testing.assert_array_equal  # to the bit, but where λ is computed
        if linear and step < 10:
            same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
        jax.tree.map(same, at_step(step), expected_grads)
    assert float(optax.tree.norm(optax.tree.sub(at_step(0), at_step(10)))) > 1e-3


def test_no_second_gradient_is_computed_once_the_penalty_has_ended():
    params, batch, step = mlp_params(), {"row": mlp_batch(4)}, jnp.zeros(4, jnp.int32)
    grad = penalty_schedule.oracle(loss_of_row, 0.1, 10, linear=False).grad

    def operations(function, *rows):
        mapped = jax.make_jaxpr(jax.vmap(function))(*rows)
        return [equation.primitive.name for equation in mapped.eqns]

    chosen = operations(lambda row: grad(params, row | {"step": step[0]}), batch)
    assert "cond" in chosen and "dot_general" not in chosen
    # A step for each example would be a condition on it: both gradients of all.
    both = operations(lambda row, step: grad(params, row | {"step": step}), batch, step)
    assert "dot_general" in both


# Mechanisms.


@pytest.mark.parametrize("make", [mechanisms.poisson, of_four_bands])
def test_our_mechanisms_conform(make):
    check_mechanism(make)


def constant(sigma, num_steps):
    """Costs ε for no step, too."""
    return of_four_bands(1000, 50).event(sigma, 40)


def wrong_mechanism(**changes):
    return lambda n, l: dataclasses.replace(of_four_bands(n, l), **changes)  # noqa: E741


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (wrong_mechanism(draw=mechanisms.poisson(1000, 50).draw), "twice within them"),
        (wrong_mechanism(draw=lambda seed, step: np.array([5, 3])), "sorted, different rows"),
        (wrong_mechanism(draw=lambda seed, step: np.arange(9)), "same batch"),
        (wrong_mechanism(event=mechanisms.poisson(1000, 50).event), "another noise than σ/‖c‖"),
        (wrong_mechanism(event=constant), "no step"),
    ],
)
def test_a_broken_mechanism_is_refused_and_told_why(make, message):
    with pytest.raises(AssertionError, match=message):
        check_mechanism(make)


def test_noise_of_another_covariance_than_declared_is_refused(monkeypatch):
    right = advance_noise
    monkeypatch.setattr(
        "tests.check_mechanism.advance_noise",
        lambda state, sigma, s, c: right(state, sigma, s, (*c[:-1], 0.0)),
    )
    with pytest.raises(AssertionError, match="another covariance"):
        check_mechanism(of_four_bands)
