"""The whole loop on the embedded digits, with logistic regression to keep compilation short."""

import dataclasses
import functools
import json
import math
import re
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from scipy import stats

import bam
from bam import models
from bam.audit.audited import with_step
from bam.core import oracles, sampling
from bam.core.seeds import JAX_LABELS, KEY_LABELS, host_key, seeded_key
from bam.part_table import USERS_OWN
from bam.privacy import private_gradient
from bam.privacy.plan import BudgetExhaustedError
from bam.training import config as base
from bam.training import duration, keys, loading, loop, parts, rundir, trainer
from configs import digits
from tests import runs
from tests.cases import compilations, mostly, refused, tiny_digits
from tests.run_folder import saved_steps

PLAIN = private_gradient.PlainGradient
PRIVATE_METHODS = ("dp_sgd", "dp_sat", "bam_sam", "bam_exact")


STEEP = {"optimizer__name": "sgd", "optimizer__learning_rate": 1.0}


@pytest.fixture(scope="module")
def experiment():
    return loop.build(tiny_digits(ema_decay=0.5, **STEEP))


@functools.cache
def learned(method):
    """A run of enough steps to learn digits."""
    return loop.train(loop.build(tiny_digits(method, num_steps=25, epsilon=8.0)), seed=0)


def with_gradient(parts, **changes):
    return dataclasses.replace(parts, gradient=dataclasses.replace(parts.gradient, **changes))


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


@pytest.mark.parametrize("method", mostly(PRIVATE_METHODS, slow={"dp_sgd", "bam_exact"}))
def test_every_private_method_learns_far_above_chance(method):
    summary = learned(method).summary
    assert summary["test_accuracy"] > 0.75
    assert summary["epsilon"] <= 8.0


@pytest.mark.parametrize("method", [*PRIVATE_METHODS, "examples.random_smoothing:oracle"])
def test_a_private_method_at_an_infinite_epsilon_is_refused(method):
    config = tiny_digits(epsilon=math.inf)
    config.method.name = method
    with pytest.raises(ValueError, match=f"method {method} has no privacy .*:non_private"):
        loop.build(config)


def test_non_private_training_adds_no_noise_and_claims_no_epsilon():
    for epsilon in (3.0, math.inf):
        assert not loop.build(tiny_digits("non_private", epsilon=epsilon)).plan.private
    result = loop.train(loop.build(tiny_digits("non_private", num_steps=25)), seed=0)
    assert result.summary["test_accuracy"] > 0.85
    assert result.summary["epsilon"] is None
    assert result.summary["noise_multiplier"] == 0


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(experiment):
    first, again, other = (loop.train(experiment, seed).state.params for seed in (0, 0, 1))
    np.testing.assert_array_equal(flat(first), flat(again))
    assert not np.allclose(flat(first), flat(other))


def test_a_run_takes_exactly_the_planned_steps(experiment):
    result = loop.train(experiment, seed=0)
    assert int(result.state.step) == experiment.plan.num_steps == 4
    assert int(result.state.private.privatize.noise.step) == 4
    with pytest.raises(BudgetExhaustedError, match="covers 4 steps"):
        experiment.plan.check_steps(5)


def test_a_trainer_of_one_plan_with_the_noise_of_another_is_refused(experiment):
    plan = dataclasses.replace(experiment.plan, noise_multiplier=9.0)
    with pytest.raises(ValueError, match="the parts have the noise of another plan"):
        dataclasses.replace(experiment, plan=plan)
    # The control: with that noise, or with the same noise in a plan that differs elsewhere.
    mean = dataclasses.replace(experiment.parts.gradient.mean, noise_multiplier=9.0)
    parts = with_gradient(experiment.parts, mean=mean)
    assert dataclasses.replace(experiment, plan=plan, parts=parts).record["noise_multiplier"] == 9.0
    dataclasses.replace(experiment, plan=dataclasses.replace(experiment.plan, spare_steps=1))


def test_a_trainer_of_one_config_or_data_with_the_parts_of_another_is_refused(experiment):
    config = experiment.config.copy_and_resolve_references()
    config.ema_decay, dataset = 0.123, experiment.dataset._replace(mean=np.float32(0.123))
    facts = {x.name: getattr(experiment.parts.gradient, x.name) for x in dataclasses.fields(PLAIN)}
    for changed in (
        {"config": config},
        {"listing": dataset},
        {"parts": with_gradient(experiment.parts, microbatch_size=1)},
        {"parts": dataclasses.replace(experiment.parts, gradient=PLAIN(**facts))},
    ):
        with pytest.raises(ValueError, match="the parts "):
            dataclasses.replace(experiment, **changed)
    assert experiment.with_microbatch_size(2).parts.gradient.microbatch_size == 2  # the control
    refused("microbatch_size must be from 1", experiment.with_microbatch_size, 0)


def test_one_step_equals_privatize_in_a_plain_optax_chain(experiment):
    dataset, plan = experiment.dataset, experiment.plan
    state = experiment.init(3)
    start = jax.tree.map(jnp.copy, state.params)  # the step donates `state`
    rows = sampling.poisson_sample(3, 1, plan.num_examples, plan.sampling_prob)
    batch = sampling.pad(rows, experiment.plan.capacity, 0, 0)
    after = experiment.step(state, experiment.batch(state, batch))

    module = models.create("linear", 10, 1)
    model = models.as_functions(module, (8, 8, 1))
    named = np.where(batch.mask, batch.indices, 0)
    images = (dataset.train.images[named] / 255.0 - dataset.mean) / dataset.std
    examples = {
        "image": jnp.asarray(images, jnp.float32)[:, None],
        "label": dataset.train.labels[named],
    }
    tx = optax.chain(
        bam.privatize(
            bam.clip_by_l2_norm(1.0),
            plan.noise_multiplier,
            plan.expected_batch_size,
            bam.seeded_key(3),
        ),
        optax.sgd(1.0),
    )

    @jax.jit
    def updates_of(params, state, examples, mask):
        grads = jax.vmap(oracles.dp_sgd(model.loss).grad, in_axes=(None, 0))(params, examples)
        return tx.update(grads, state, params, mask=mask)[0]

    updates = updates_of(start, tx.init(start), examples, jnp.asarray(batch.mask))
    np.testing.assert_allclose(
        flat(after.params), flat(optax.apply_updates(start, updates)), atol=1e-6
    )


def test_noise_through_a_whole_run_of_empty_batches_has_the_planned_size(experiment):
    """Chi-square on the released updates must reject both too little and too much noise."""
    plan = experiment.plan
    empty = sampling.pad(np.zeros(0, np.int64), experiment.plan.capacity, 0, 0)
    state = experiment.init(0)
    releases = []
    for _ in range(8):
        before = flat(state.params)
        state = experiment.step(state, experiment.batch(state, empty))
        releases.append(flat(state.params) - before)
    released = np.array(releases)
    planned = plan.noise_multiplier * experiment.clip_norm / plan.expected_batch_size

    def accepted(std):
        quantile = stats.chi2.cdf(np.sum((released / std) ** 2), released.size)
        return 1e-6 < quantile < 1 - 1e-6

    assert accepted(planned)
    wrong = (2 / 3, 3 / 2, 1 / math.sqrt(2), 1 / plan.expected_batch_size)
    assert not any(accepted(planned * factor) for factor in wrong)
    correlations = np.corrcoef(released) - np.eye(8)
    assert np.abs(correlations).max() < 6 / math.sqrt(released.shape[1])  # steps independent


def test_dp_sat_ascends_along_the_last_private_gradient_only(experiment):
    dp_sat = loop.build(tiny_digits("dp_sat", method__radius=5.0, **STEEP))
    rows = sampling.pad(np.arange(200), experiment.plan.capacity, 0, 0)
    step = lambda e, state: e.step(state, e.batch(state, rows))  # noqa: E731
    one, one_plain = (step(e, e.init(0)) for e in (dp_sat, experiment))
    np.testing.assert_array_equal(flat(one.params), flat(one_plain.params))  # nothing to follow yet
    assert np.linalg.norm(flat(one.private.previous)) > 0
    two, two_plain = step(dp_sat, one), step(experiment, one_plain)
    assert not np.allclose(flat(two.params), flat(two_plain.params))


@pytest.mark.parametrize("method", ["dp_sgd", "non_private"])
@pytest.mark.parametrize("of_round", [0.001, 0.2, 7.0, 40.0])
def test_an_estimate_tells_the_fixed_part_of_a_step_from_that_of_its_examples(
    monkeypatch, method, of_round
):
    """A fake clock, so that no step is slow: each microbatch of 16 takes `of_round`."""
    built, clock, timings = loop.build(tiny_digits(method, microbatch_size=16)), 0.0, []

    def step(state, batch):
        nonlocal clock
        num_rounds = duration.num_rounds(batch.mask, 16, 1, method != "non_private")
        timings.append(0.2 + of_round * num_rounds)
        clock += timings[-1]
        return state

    monkeypatch.setattr(duration.time, "perf_counter", lambda: clock)
    plan = built.plan
    batches = [sampling.pad(np.arange(256), plan.capacity, 3, number) for number in range(50)]
    rounds = [duration.num_rounds(x.mask, 16, 1, plan.private) for x in batches]
    seconds = plan.training_steps * (0.2 + of_round * np.mean(rounds))
    estimate = duration.estimate_seconds(with_step(built, step), built.place_rows())
    assert plan.expected_batch_size == 256 and min(rounds) >= 16
    assert estimate.seconds == pytest.approx(seconds, rel=0.1)
    assert estimate.least < seconds < estimate.most < 1.8 * estimate.least
    assert sum(timings) < 100  # one is not waited for longer than needed
    # What an estimate said that timed one size alone where that takes a second.
    alone = plan.training_steps * (0.2 + of_round)
    assert (alone < estimate.least / 5) == (of_round > 0.05)


def test_places_behind_the_data_take_no_time_in_an_estimate(monkeypatch):
    """With a public N of ten times the data, and one slow timing of the fixed part."""
    config = tiny_digits(microbatch_size=16, num_examples=14370, expected_batch_size=256)
    built, clock, calls = loop.build(config), 0.0, 0

    def step(state, batch):
        nonlocal clock, calls
        calls += 1
        num_rounds = duration.num_rounds(batch.mask, 16, 1, True)
        clock += 0.2 * (10 if calls == 2 else 1) + 0.02 * num_rounds
        return state

    monkeypatch.setattr(duration.time, "perf_counter", lambda: clock)
    num_drawn = round(256 * len(built.dataset.train.labels) / 14370)
    batches = [sampling.pad(np.arange(num_drawn), built.plan.capacity, 3, t) for t in range(50)]
    rounds = np.mean([duration.num_rounds(x.mask, 16, 1, True) for x in batches])
    assert num_drawn < 30 and rounds < 10
    estimate = duration.estimate_seconds(with_step(built, step), built.place_rows())
    seconds = built.plan.training_steps * (0.2 + 0.02 * rounds)
    assert estimate.least < seconds < estimate.most
    assert estimate.most < built.plan.training_steps * (0.2 + 0.02 * 16)  # of a whole batch


@pytest.mark.parametrize("method", ["dp_sgd", "non_private"])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_the_rounds_of_a_batch_are_those_that_its_step_runs(method, num_devices):
    config, seen = tiny_digits(method, microbatch_size=8), []
    built = loop.build(config, hardware=jax.devices()[:num_devices])

    def counted(params, example):
        jax.debug.callback(lambda _: seen.append(1), example["label"])
        return built.parts.loss(params, example)

    parts = with_gradient(built.parts, oracle=oracles.dp_sgd(counted))
    watched = dataclasses.replace(built, parts=dataclasses.replace(parts, loss=counted))
    for num_rows in (0, 1, 40, 256):
        batch = sampling.pad(np.arange(num_rows), built.plan.capacity, 0, num_rows)
        seen.clear()
        state = watched.init(0)
        jax.block_until_ready(watched.step(state, watched.batch(state, batch)))
        jax.effects_barrier()
        rounds = duration.num_rounds(batch.mask, 8, num_devices, built.plan.private)
        # One device runs them all, others may run fewer.
        assert 8 * rounds <= len(seen) <= 8 * num_devices * rounds
        assert bool(rounds) == bool(num_rows)


def test_random_views_change_with_the_step_and_the_seed_alone(experiment):
    views = {"augment__views": 3, "augment__shift": 2, "augment__flip": "horizontal"}
    viewed = loop.build(tiny_digits(**views, **STEEP))
    first, again, other = (loop.train(viewed, seed).state.params for seed in (0, 0, 1))
    np.testing.assert_array_equal(flat(first), flat(again))
    assert not np.allclose(flat(first), flat(other))
    plain = loop.train(experiment, seed=0).state.params
    assert not np.allclose(flat(first), flat(plain))


def test_every_bit_of_a_seed_counts_and_streams_differ():
    seeds = (0, 1, 2**32, 2**40, 2**127, 2**255)
    keys = {host_key(seed, label).tobytes() for seed in seeds for label in KEY_LABELS}
    assert len(keys) == len(seeds) * len(KEY_LABELS)
    assert all(host_key(0, label).shape == (2,) for label in JAX_LABELS)


def test_the_table_of_keys_is_whole():
    page = Path("docs/pitfalls.md").read_text()
    assert list(KEY_LABELS) == re.findall(
        r"^\| `([^`]+)` \| .* \| (?:ChaCha20|JAX) \|$", page, re.M
    )
    sources = "".join(path.read_text() for path in Path("bam").rglob("*.py"))
    used = re.findall(r'(?:host_key|stream_key|_run\.key)\((?:.*, )?"([^"]+)"\)', sources)
    assert set(used) == set(KEY_LABELS)
    with pytest.raises(ValueError, match=r"^no key 'nose' of a seed; .* KEY_LABELS: noise, "):
        host_key(0, "nose")
    with pytest.raises(ValueError, match=r"^the key 'views' of a seed is JAX's"):
        seeded_key(0, "views")


def test_without_a_seed_randomness_is_new_each_time_and_the_noise_key_is_never_saved(
    experiment, tmp_path
):
    loop.train(experiment, 0)
    program = experiment.step.__wrapped__.func
    compiled = program._cache_size()  # whoever gives the key, it is the same program
    first, other = (loop.train(experiment, None).state for _ in range(2))
    assert not np.allclose(flat(first.params), flat(other.params))

    steps = iter(range(2))
    with pytest.raises(loop.StoppedError):
        loop.train(experiment, None, tmp_path, should_stop=lambda: next(steps, 9) == 1)
    assert saved_steps(tmp_path) == [1]
    saved = runs.last_state(tmp_path, experiment)
    assert not saved.private.privatize.noise.key.any()
    assert saved.private.privatize.noise.step == 1

    result = loop.train(experiment, None, tmp_path)
    assert result.state.private.privatize.noise.key.any()
    assert result.state.private.privatize.noise.step == result.state.step == 4
    assert result.summary["seed"] is None
    assert result.summary["noise_key"] == "operating system"
    assert result.rows[-1]["epsilon"] == experiment.plan.epsilon_after(4)
    with pytest.raises(ValueError, match="seed = None, not 0"):
        loop.train(experiment, 0, tmp_path)
    assert program._cache_size() == compiled


def test_diagnostics_never_alter_training():
    without = learned("bam_sam")
    config = tiny_digits("bam_sam", num_steps=25, epsilon=8.0, diagnostics__every=1)
    seen = loop.train(loop.build(config), seed=0)
    np.testing.assert_array_equal(flat(without.state.params), flat(seen.state.params))
    assert not any("not_private" in key for row in without.rows for key in row)
    assert all("not_private/bias_norm" in row for row in seen.rows)


def test_averaged_weights_follow_the_warmed_up_moving_average(experiment):
    rows = sampling.pad(np.arange(100), experiment.plan.capacity, 0, 0)
    state = experiment.init(0)
    average = flat(state.params)
    for step in range(3):
        state = experiment.step(state, experiment.batch(state, rows))
        decay = min(0.5, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * flat(state.params)
    np.testing.assert_allclose(flat(state.averaged), average, atol=1e-6)


def test_a_run_writes_its_config_plan_metrics_and_summary(experiment, tmp_path):
    workdir = tmp_path / "run"
    result = loop.train(experiment, seed=7, workdir=workdir)
    plan = json.loads((workdir / "plan.json").read_text())
    summary = json.loads((workdir / "summary.json").read_text())
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert plan == experiment.record
    assert rows == result.rows
    assert rows[-1]["epsilon"] == pytest.approx(plan["epsilon"])
    assert (summary["seed"], summary["noise_key"]) == (7, "seed")
    required = {
        "method", "dataset", "model", "num_params", "epsilon", "delta", "accountant",
        "noise_multiplier", "sampling_prob", "num_steps", "expected_batch_size", "clip_norm",
        "seed", "test_accuracy", "seconds", "device", "versions",
    }  # fmt: skip
    assert required <= set(summary)
    config = json.loads((workdir / "config.json").read_text())
    assert config["method"]["name"] == "dp_sgd"
    assert config["seed"] == 7
    assert list((workdir / "tensorboard").iterdir())


def test_a_workdir_that_holds_a_run_is_refused_and_left_alone(experiment, tmp_path):
    loop.train(experiment, seed=0, workdir=tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(FileExistsError, match="already holds a finished run"):
        loop.train(experiment, seed=0, workdir=tmp_path)
    with pytest.raises(ValueError, match="holds a run with seed = 0, not 1"):
        loop.train(experiment, seed=1, workdir=tmp_path)
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


# Refusals: a table for each layer, asked directly; and that a run that is built asks them all.


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"expected_batch_size": 0, "num_steps": 0}, "expected_batch_size must be"),
        ({"optimizer__learning_rate": 0.0}, "learning_rate"),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"eval__every": -1}, "eval.every"),
        ({"augment__views": 0}, "augment.views"),
        ({"augment__flip": "sideways"}, "augment.flip"),
        ({"input_clip_norm": -1.0}, "input_clip_norm"),
        ({"num_steps": -1}, "num_steps"),
        ({"spare_steps": -1}, "spare_steps must be at least 0"),
    ],
)
def test_a_config_that_cannot_be_gets_one_line_that_names_the_fix(overrides, message):
    refused(message, base.check, tiny_digits(**overrides))


PLAN = {"num_examples": 1437, "expected_batch_size": 256, "num_steps": 4, "epsilon": 3.0}
PLAN |= {"delta": 1e-5, "accountant": "rdp"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be positive"),
        ({"epsilon": math.nan}, "epsilon must be positive"),
        ({"delta": 1 / 1437}, "below 1/N"),
        ({"expected_batch_size": 1438}, "exceeds the 1437 training examples"),
        ({"accountant": "gdp"}, "guarantees no epsilon"),
        ({"accountant": "moments"}, "unknown accountant 'moments'"),
    ],
)
def test_a_plan_that_cannot_be_gets_one_line_that_names_the_fix(changes, message):
    refused(message, bam.make_plan, **(PLAN | changes))


PARTS = {
    "model": lambda section: parts.make_model(section, 10),
    "optimizer": lambda section: parts.make_optimizer(section, bam.make_plan(**PLAN), 1.0, 1.0),
    "method": lambda section: parts.make_oracle(section, lambda params, example: 0.0),
    "dataset": loading.make_dataset,
    "clip": lambda section: parts.make_clip(section, bam.make_plan(**PLAN), 1.0),
    "loss": parts.make_loss,
    "features": parts.make_features,
}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model__name": "vit"}, "unknown model 'vit'"),
        ({"dataset__name": "svhn"}, "unknown data set 'svhn'"),
        ({"dataset__source": "tfds"}, "digits has no source 'tfds'"),
        ({"optimizer__name": "lion"}, "unknown optimizer 'lion'"),
        ({"method__name": "bam"}, "unknown method 'bam'"),
        ({"method__name": "bam_sam"}, "method bam_sam does not take"),
    ],
)
def test_a_part_that_cannot_be_gets_one_line_that_names_the_fix(overrides, message):
    section = next(iter(overrides)).partition("__")[0]
    refused(message, PARTS[section], tiny_digits(**overrides)[section])


@pytest.mark.parametrize("size", [0, 1438])
def test_a_microbatch_that_cannot_be_gets_one_line_that_names_the_fix(size):
    message = f"microbatch_size must be from 1 to 1437, .*, got {size}"
    refused(message, trainer.check_microbatch_size, size, 1437)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"epsilon": 0.0}, "epsilon must be positive"),
        ({"delta": 1 / 1437}, "below 1/N"),
        ({"clip_norm": -1.0}, "clip_norm must be"),
        ({"accountant": "gdp"}, "guarantees no epsilon"),
        ({"expected_batch_size": 1438}, "exceeds the 1437 training examples"),
        ({"microbatch_size": 1438}, r"microbatch_size must be from 1 to 1437, .*, got 1438"),
        ({"optimizer__name": "lion"}, "unknown optimizer 'lion'"),
        *(
            ({"method": method} | overrides, message)
            for method in ("bam_sam", "bam_exact")
            for overrides, message in [
                ({"method__ascent_views": 2}, "has 1 views"),
                ({"method__ascent_params": "no such layer"}, "at least one True"),
                ({"method__ascent_params": "("}, "not a regular expression"),
            ]
        ),
    ],
)
def test_a_run_is_not_built_of_what_its_check_its_plan_or_its_gradient_refuses(overrides, message):
    refused(message, loop.build, tiny_digits(**overrides))


def test_a_misspelled_config_key_is_refused():
    with pytest.raises(AttributeError, match="epsilon"):
        digits.get_config("dp_sgd").epsilo = 1.0


def test_a_model_with_batchnorm_is_refused_and_told_why():
    class WithBatchNorm(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(nn.BatchNorm(use_running_average=False)(x))

    with pytest.raises(ValueError, match="BatchNorm mixes the examples"):
        models.as_functions(WithBatchNorm(), (4,))


def test_every_integer_has_a_bound_and_every_float_is_a_number():
    """But for the seed, all of whose bits count, and ε, which is the plan's to check."""
    flat = rundir.flat(tiny_digits("bam_sam").to_dict())
    numbers = {k: x for k, x in flat.items() if isinstance(x, int | float) and x is not True}
    numbers = {k: x for k, x in numbers.items() if x is not False and k not in ("seed", "epsilon")}
    assert len(numbers) >= 25
    for key, value in numbers.items():
        most = keys.BY_NAME[key].most if key in keys.BY_NAME else keys.MOST_OF_ANY
        for wrong in [most + 1, 10**30] if isinstance(value, int) else [math.nan, math.inf]:
            config = tiny_digits("bam_sam")
            config.update_from_flattened_dict({key: wrong})
            limit = f"at most {most}, got" if isinstance(value, int) else "finite"
            with pytest.raises(ValueError, match=f"{key} must be {limit}") as raised:
                base.check(config)
            assert "\n" not in str(raised.value)


@pytest.mark.parametrize("section", USERS_OWN)
@pytest.mark.parametrize("name", ["os:system", "os:abort", "builtins:print", "subprocess:run"])
def test_a_function_of_pythons_own_library_is_not_called(section, name):
    config = tiny_digits()
    config[section].name = name
    refused(f"{section} {name} is from Python's standard library", PARTS[section], config[section])


@pytest.mark.parametrize("section", USERS_OWN)
def test_a_run_is_not_built_of_a_function_of_pythons_own_library(section):
    config = tiny_digits()
    config[section].name = "os:system"
    refused(f"{section} os:system is from Python's standard library", loop.build, config)


@pytest.mark.parametrize("wrong", ["all", "half", "none"])
def test_a_run_whose_gradients_are_never_finite_says_so_once_and_is_as_before(wrong):
    config = tiny_digits(num_steps=5, eval__every=1)
    dataset = loading.make_dataset(config.dataset, config.features)
    images = np.array(dataset.train.images, np.float32)
    images[:: {"all": 1, "half": 2, "none": len(images)}[wrong]] = np.inf
    built = loop.build(config, dataset._replace(train=dataset.train._replace(images=images)))
    lines = []
    result = loop.train(built, 0, log=lines.append)
    warned = [x for x in lines if x.startswith("NOT PRIVATE: no gradient of the first 3 steps was")]
    assert len(warned) == (wrong == "all")  # the others are the controls
    assert not any("finite" in key for row in result.rows for key in row)
    silent = loop.train(built, 0)
    assert flat(result.state.params).tobytes() == flat(silent.state.params).tobytes()


# σ in place of ε.


def test_a_flag_for_the_noise_unsets_epsilon_and_the_other_way_round():
    config = base.get_config()
    base.add_options(config, {"noise_multiplier": 1.1})
    config.noise_multiplier = 1.1
    base.check(config)
    assert config.epsilon is None
    base.add_options(config, {"epsilon": 2.0})
    config.epsilon = 2
    base.check(config)
    assert config.noise_multiplier is None and config.epsilon == 2.0
    refused(
        "both set the noise", base.add_options, config, {"epsilon": 2.0, "noise_multiplier": 1.1}
    )
    config.noise_multiplier = 1.1
    refused("^set epsilon or noise_multiplier, and the other one to None$", base.check, config)
    config.epsilon = config.noise_multiplier = None
    refused("^set epsilon or noise_multiplier, and the other one to None$", base.check, config)
    config.method.name = "non_private"
    base.check(config)  # which needs neither


def test_a_run_of_a_given_noise_tells_the_epsilon_of_its_plan(tmp_path):
    config = tiny_digits()
    by_epsilon = loop.build(config).plan
    config.epsilon, config.noise_multiplier = None, by_epsilon.noise_multiplier
    assert loop.build(config).plan == by_epsilon
    config.noise_multiplier *= 2
    trainer = loop.build(config)
    result = loop.train(trainer, 0, tmp_path)
    assert result.summary["epsilon"] == trainer.plan.epsilon < by_epsilon.epsilon
    assert result.summary["noise_multiplier"] == config.noise_multiplier


def test_the_seconds_of_a_first_run_leave_out_the_compilation_of_its_step(monkeypatch):
    check, counts = trainer.Trainer.check_step, {}
    take = loop._Watch.take

    def checked(self, *given, **options):
        counts["before"] = compilations(lambda: check(self, *given, **options))
        time.sleep(2)

    def taken(self, *given):
        results = []
        counts["within"] = compilations(lambda: results.append(take(self, *given)))
        return results[0]

    monkeypatch.setattr(trainer.Trainer, "check_step", checked)
    monkeypatch.setattr(loop._Watch, "take", taken)
    built = loop.build(tiny_digits(num_steps=1, expected_batch_size=201, microbatch_size=7))
    assert loop.train(built, seed=0).summary["seconds"] < 2
    assert counts["before"] > 0 == counts["within"]
