"""Whatever is given: a clear one-line error or a correct result, never a silently wrong ε."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import bam
from bam.core import sampling
from bam.core.clipping import ROUNDING
from bam.data import datasets
from bam.privacy import plan as plans
from bam.training import loop
from bam.training.build import build
from configs import digits
from tests.cases import norm64, refused

# The same cases in every run; a new fault is found by raising `max_examples` by hand. A failure is
# reported as it is found: making it smaller would take minutes of accounting.
quick = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)

# Numbers of every size, zero, denormal, infinite or not a number.
any_float = st.one_of(
    st.sampled_from([0.0, -0.0, 5e-324, 1e-300, 1e-40, 1.0, 256.0, 1e300, math.inf, math.nan]),
    st.floats(),
    st.floats(0, 10),
)
any_int = st.one_of(st.integers(-3, 3000), st.sampled_from([2**31, 2**40, 10**18, -(10**18)]))
KEYS = {
    "epsilon": any_float,
    "delta": st.one_of(any_float, st.floats(1e-12, 1e-3)),
    "clip_norm": any_float,
    "expected_batch_size": any_int,
    "num_steps": any_int,
    "num_epochs": any_int,
    "microbatch_size": st.one_of(any_int, any_float, st.sampled_from(["auto ", "", True, None])),
    "seed": any_int,
    "ema_decay": any_float,
    "input_clip_norm": any_float,
    "optimizer.learning_rate": any_float,
    "augment.views": any_int,
    "augment.shift": any_int,
    "dataset.num_classes": any_int,
    "dataset.holdout": any_int,
    "eval.every": any_int,
    "diagnostics.num_examples": any_int,
    "method.radius": any_float,
}


@st.composite
def overrides(draw):
    keys = draw(st.lists(st.sampled_from(sorted(KEYS)), min_size=1, max_size=4, unique=True))
    return {key: draw(KEYS[key]) for key in keys}


def tiny(changes):
    config = digits.get_config("dp_sat")
    config.model.name, config.accountant, config.num_steps = "linear", "rdp", 4
    config.update_from_flattened_dict(changes)
    return config


@settings(quick, max_examples=40)
@given(overrides())
@example({"epsilon": 1e-300})
@example({"epsilon": 256.0, "expected_batch_size": 1437})
@example({"clip_norm": 1e300})
@example({"num_steps": 10**18})
@example({"optimizer.learning_rate": 2e198})
def test_any_config_is_refused_in_one_line_or_gives_a_plan_that_holds(changes):
    try:
        built = build(tiny(changes))
    except (ValueError, TypeError) as error:
        assert "\n" not in str(error)
        return
    plan, config = built.plan, built.config
    assert 0 < plan.epsilon <= config.epsilon
    assert 0 < plan.delta < 1 / plan.num_examples
    assert plan.sampling_prob == config.expected_batch_size / plan.num_examples <= 1
    assert plan.epsilon_after(plan.num_steps) == plan.epsilon
    assert plan.num_steps == config.num_steps or config.num_steps == 0
    # What is added is finite in the arithmetic that adds it, and not nothing.
    noise_std = np.float32(plan.noise_multiplier) * np.float32(built.sensitivity)
    assert 0 < np.float32(noise_std / config.expected_batch_size) < math.inf
    json.loads(json.dumps(plan.to_json(), allow_nan=False))


sigmas = st.floats(0.3, 20)
probabilities = st.floats(1e-4, 0.6)  # q = 1 has another, exact formula


@settings(quick, max_examples=10)
@given(sigmas, probabilities, st.integers(1, 2000), st.floats(1e-8, 1e-2))
def test_epsilon_falls_with_noise_and_delta_and_grows_with_steps_and_sampling(
    sigma, q, num_steps, delta
):
    def spent(sigma=sigma, q=q, num_steps=num_steps, delta=delta):
        return bam.epsilon(
            noise_multiplier=sigma, sampling_prob=q, num_steps=num_steps, delta=delta,
            accountant="rdp",
        )  # fmt: skip

    slack = 1.001  # of an upper bound
    assert spent(sigma=1.5 * sigma) <= spent() * slack
    assert spent(delta=2 * delta) <= spent() * slack
    assert spent() <= spent(num_steps=2 * num_steps) * slack
    assert spent() <= spent(q=1.5 * q) * slack


@settings(quick, max_examples=4)
@given(st.floats(0.1, 20), st.floats(0.005, 1.0), st.integers(1, 200))
def test_the_noise_that_is_chosen_keeps_epsilon_below_its_target_and_close(target, q, num_steps):
    mechanism = {"delta": 1e-5, "sampling_prob": q, "num_steps": num_steps, "accountant": "rdp"}
    sigma = bam.noise_multiplier(target_epsilon=target, **mechanism)
    assert bam.epsilon(noise_multiplier=sigma, **mechanism) <= target
    # Control: a twentieth less noise would not do.
    assert bam.epsilon(noise_multiplier=0.95 * sigma, **mechanism) > target or sigma < 0.1


SHAPES = [((), (3,)), ((0,), (2, 2)), ((5,), (1, 3, 2)), ((0,), (0,))]
DTYPES = ["float32", "float16", "bfloat16"]
any_row = st.sampled_from(["ordinary", "huge", "denormal", "zero", "nan", "inf"])


def fill(kind, shape, rng):
    x = rng.normal(size=shape)
    if kind in ("nan", "inf"):
        x = np.asarray(x)
        x.flat[:1] = float(kind)
        return x
    return x * {"ordinary": 1.0, "huge": 1e4, "denormal": 1e-41, "zero": 0.0}[kind]


@settings(quick, max_examples=30)
@given(
    st.lists(st.tuples(any_row, st.booleans()), max_size=7),
    st.sampled_from(SHAPES),
    st.sampled_from(DTYPES),
    st.sampled_from([1e-6, 0.5, 1.0, 100.0]),
    st.integers(1, 9),
)
def test_the_clipped_sum_is_numpys_and_bounded_for_any_rows_shapes_and_dtypes(
    rows, shapes, dtype, clip_norm, microbatch_size
):
    rng = np.random.default_rng(0)
    mask = np.array([keep for _, keep in rows], bool)
    grads = tuple(
        jnp.asarray(
            np.array([fill(kind, shape, rng) for kind, _ in rows]).reshape(len(rows), *shape), dtype
        )
        for shape in shapes
    )
    params = tuple(jnp.zeros(shape, dtype) for shape in shapes)
    total, norms = bam.clipped_sum(
        lambda params, grad: grad, bam.clip_by_l2_norm(clip_norm), params, grads,
        mask=jnp.asarray(mask), microbatch_size=microbatch_size,
    )  # fmt: skip
    expected = [np.zeros(shape) for shape in shapes]
    for i in np.flatnonzero(mask):
        grad = [np.asarray(leaf[i], np.float64) for leaf in grads]
        norm = norm64(grad)
        if math.isfinite(norm):
            scale = min(1.0, clip_norm / norm) if norm else 1.0
            expected = [e + scale * g for e, g in zip(expected, grad, strict=True)]
            assert norms[i] == pytest.approx(norm, rel=1e-3, abs=1e-37)
        else:
            assert not np.isfinite(norms[i])
    tolerance = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 5e-2}[dtype] * clip_norm
    for found, want in zip(total, expected, strict=True):
        assert found.dtype == jnp.float32
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, want, rtol=0, atol=tolerance * max(1, mask.sum()))
    assert norm64(total) <= clip_norm * mask.sum() * (1 + 1e-6)


OWN_CLIPS = {
    "clip_by_l2_norm": (bam.clip_by_l2_norm, 5.2e-6),
    "normalize": (bam.normalize, 5.4e-6),
    "clip_per_layer": (bam.clip_per_layer, 5.2e-6),
    "a chain": (lambda c: bam.chain(optax.scale(3.0), bam.clip_by_l2_norm(c)), 5.2e-6),
}


@settings(quick, max_examples=25)
@given(
    st.sampled_from(sorted(OWN_CLIPS)),
    st.lists(st.integers(1, 400), min_size=1, max_size=4),
    st.floats(-11, 11),
    st.floats(-8, 5),
    st.floats(0, 12),
    st.integers(0, 2**32),
)
@example("clip_by_l2_norm", [1], 0.0, 0.0, 0.0, 0)
@example("clip_by_l2_norm", [400] * 4, -10.0, -18.5, 0.0, 1)  # squares underflow
@example("clip_per_layer", [400, 1], 0.0, 18.0, 3.0, 2)
def test_what_our_clips_return_is_as_short_as_their_docstrings_prove(
    name, sizes, log_bound, log_ratio, spread, seed
):
    make, rounding = OWN_CLIPS[name]
    bound, rng = 10**log_bound, np.random.default_rng(seed)
    grad = [rng.normal(size=n) * 10 ** rng.uniform(-spread, 0, n) for n in sizes]
    scale = 10**log_ratio * bound / norm64(grad)
    grad = [np.clip(scale * g, -1e18, 1e18).astype(np.float32)[None] for g in grad]
    clip = make(bound)
    summed = jax.jit(lambda w, g: bam.clipped_sum(lambda w, g: g, clip, w, g, mask=None))
    total, _ = summed([jnp.zeros(n) for n in sizes], grad)
    # Entries whose squares underflow add at most their own size, see `clip_by_l2_norm`.
    unseen = 1e-19 * math.sqrt(sum(sizes)) * bound / max(norm64(grad), bound)
    assert norm64(total) <= clip.sensitivity * (1 + rounding) + unseen
    assert norm64(total) <= clip.sensitivity * ROUNDING
    if name in ("clip_by_l2_norm", "a chain") and norm64(grad) > 2 * bound > 1e-9:
        # Control: the bound is reached, so two ROUNDINGs more are seen.
        assert norm64(total) * (1 + 2e-5) > clip.sensitivity * ROUNDING


@settings(quick, max_examples=40)
@given(st.integers(0, 2**130), st.integers(0, 10**6), st.integers(0, 300), st.floats(0, 1))
def test_a_poisson_draw_of_any_size_is_padded_whole(seed, step, num_examples, q):
    drawn = sampling.poisson_sample(seed, step, num_examples, q)
    batch = sampling.pad(drawn, sampling.usual_capacity(num_examples, q), seed, step)
    assert batch.mask.sum() == len(drawn)
    np.testing.assert_array_equal(np.sort(batch.indices[batch.mask]), drawn)
    assert len(np.unique(drawn)) == len(drawn)
    again = sampling.poisson_sample(seed, step, num_examples, q)
    np.testing.assert_array_equal(drawn, again)


def small_dataset(labels, num_classes, images=None):
    labels = np.asarray(labels, np.int32)
    if images is None:
        images = np.random.default_rng(0).normal(size=(len(labels), 2, 2, 1)).astype(np.float32)
    split = datasets.Split(images, labels)
    return datasets.Dataset(
        "small", split, split, num_classes, np.zeros(1, np.float32), np.ones(1, np.float32)
    )


ZEROS = np.zeros((4, 2, 2, 1), np.float32)


def config_of_small(**changes):
    return tiny({"expected_batch_size": 4, "microbatch_size": 2, "num_steps": 2} | changes)


def test_a_class_without_examples_is_trained_like_any_other():
    built = build(config_of_small(), small_dataset([0, 2, 0, 2, 2, 0], num_classes=4))
    result = loop.train(built, 0)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.state.params))
    assert result.state.params["bias"].shape == (4,)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (small_dataset([0, 1, 4, 1, 0, 1], num_classes=4), "label .* from 0 to 3"),
        (small_dataset([0, 1, -1, 1, 0, 1], num_classes=4), "label .* from 0 to 3"),
        (small_dataset([0, 0, 0, 0, 0], num_classes=1), "at least 2 classes"),
        (small_dataset([], num_classes=4), "the training split is empty"),
        (
            small_dataset([0, 1, 0, 1], num_classes=2, images=np.zeros((3, 2, 2, 1), np.float32)),
            "3 training images but 4 labels",
        ),
        (small_dataset([[0], [1], [0], [1]], num_classes=2), "labels of int32 and shape"),
        (
            small_dataset([0, 1, 0, 1], 2)._replace(test=datasets.Split(ZEROS, ZEROS[:, 0, 0, 0])),
            "test labels of float32 and shape",
        ),
        (small_dataset([0, 1, 0, 1], 2)._replace(mean=np.zeros(3)), "a number for each channel"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_trained_on_are_refused_in_one_line(dataset, message):
    refused(message, build, config_of_small(), dataset)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e3])
def test_an_example_that_is_not_finite_changes_no_weight_and_is_counted(bad):
    labels = [0, 1, 0, 1, 1, 0]
    clean = small_dataset(labels, 2)
    images = clean.train.images.copy()
    images[3] = bad
    spoilt = small_dataset(labels, 2, images)
    rows = sampling.pad(np.arange(6), 6, 0, 0)
    without = sampling.pad(np.array([0, 1, 2, 4, 5]), 6, 0, 0)
    built = build(config_of_small(), spoilt)
    step = lambda state, rows: built.step(state, built.batch(state, rows))  # noqa: E731
    after = step(built.init(0), rows)
    dropped = not math.isfinite(bad)
    assert int(after.private.num_nonfinite) == dropped
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after.params))
    expected = step(built.init(0), without)
    same = np.allclose(after.private.previous["bias"], expected.private.previous["bias"], atol=1e-6)
    assert same == dropped  # control: a finite one, however large, does count


@settings(quick, max_examples=5)
@given(st.integers(1, 50), st.integers(1, 8), st.floats(0.1, 10))
def test_a_plan_covers_its_steps_and_not_one_more(expected_batch_size, num_steps, epsilon):
    plan = plans.make_plan(
        num_examples=50, expected_batch_size=expected_batch_size, num_steps=num_steps,
        epsilon=epsilon, delta=1e-3, accountant="rdp",
    )  # fmt: skip
    spent = [plan.epsilon_after(step) for step in range(num_steps + 1)]
    assert spent == sorted(spent)
    assert spent[0] == 0
    assert spent[-1] == plan.epsilon <= epsilon
    with pytest.raises(plans.BudgetExhaustedError):
        plan.check_steps(num_steps + 1)
