"""Learning rates that change over a run."""

import jax
import numpy as np
import optax
import pytest

from bam.cli import run_lines
from bam.part_table import OPTIMIZERS
from bam.training import loop, schedules
from bam.training.schedules import Schedule
from configs import digits


def build(**changes):
    config = digits.get_config("dp_sgd")
    config.update({"accountant": "rdp", "num_steps": 6, "expected_batch_size": 20})
    config.model.name, config.optimizer.name = "linear", "sgd"
    config.update_from_flattened_dict(changes)
    return loop.build(config)


def rates(schedule, peak):
    rate = schedules.learning_rate(schedule, peak)
    values = [rate(t) if callable(rate) else rate for t in range(schedule.num_steps)]
    return np.array(values, np.float32)


def test_rates_are_those_of_optax_after_the_warm_up():
    cosine = optax.cosine_decay_schedule(2.0, 8)
    expected = [1.0, 2.0, *(cosine(t) for t in range(8))]
    np.testing.assert_allclose(rates(Schedule("cosine", 2, 10), 2.0), expected, rtol=1e-6)
    line = [2 * (1 - t / 5) for t in range(5)]
    np.testing.assert_allclose(rates(Schedule("linear", 0, 5), 2.0), line, rtol=1e-6)
    assert schedules.learning_rate(Schedule(), 2.0) == 2.0
    np.testing.assert_allclose(rates(Schedule("constant", 1, 3), 2.0), [2, 2, 2])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_takes_the_rate_of_each_step(name):
    schedule = {"optimizer.schedule": "linear", "optimizer.warmup_steps": 2}
    grads = {"w": np.ones(3, np.float32)}
    moved = {}
    for given in ({}, schedule):
        built = build(**{"optimizer.name": name, "optimizer.learning_rate": 0.5, **given})
        optimizer, state = built.parts.optimizer, built.parts.optimizer.init(grads)
        steps = []
        for _ in range(6):
            updates, state = optimizer.update(grads, state, grads)
            steps.append(float(updates["w"][0]))
        moved[bool(given)] = np.array(steps)
    ratio = moved[True] / moved[False]
    np.testing.assert_allclose(ratio, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25], rtol=1e-5)


def test_another_rate_of_a_schedule_compiles_nothing():
    count = []
    listen = lambda event, _, **__: "backend_compile" in event and count.append(event)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)

    def step(rate, **changes):
        changes |= {"optimizer.schedule": "cosine", "optimizer.learning_rate": rate}
        built = build(**changes)
        state = built.init(0)
        batch = built.batch(state, built.plan.batch(0, 1))
        before = len(count)
        state = built.step(state, batch)
        return jax.tree.leaves(state.params), len(count) - before

    first, _ = step(0.1)
    other, compiled = step(0.2)
    assert compiled == 0 and not np.array_equal(first[1], other[1])
    assert step(0.1, **{"optimizer.warmup_steps": 2})[1] > 0  # the control


def test_the_plan_says_how_the_rate_changes():
    built = build(**{"optimizer.schedule": "cosine", "optimizer.warmup_steps": 2})
    words = run_lines.describe_plan(built)
    assert words.endswith("\nlearning rate: rises over 2 steps and then falls to 0 as a cosine")
    assert "rate" not in run_lines.describe_plan(build())


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("optimizer.schedule", "step", "unknown optimizer.schedule 'step'; choose from constant"),
        ("optimizer.warmup_steps", 6, "optimizer.warmup_steps must be at least 0 and below the"),
        ("optimizer.warmup_steps", -1, "optimizer.warmup_steps must be at least 0, got -1"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_in_one_line(key, value, line):
    with pytest.raises(ValueError, match=line) as refusal:
        build(**{key: value})
    assert "\n" not in str(refusal.value)
