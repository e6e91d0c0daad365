"""What is found once by timing, and what happens when it is not there or cannot be."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from bam.training import config as base
from bam.training import devices, loop, public_clip, rundir, tuning
from tests.cases import assert_close


@pytest.fixture(autouse=True)
def nothing_found_yet(monkeypatch):
    monkeypatch.setattr(tuning, "_chosen", {})


def never(*unused):
    raise AssertionError("only measured times are asked for here")


def costs(seconds, asked):
    """Timings that are given: size -> seconds per example, of a memory that grows with the size."""

    def measured(make_step, size, num_devices, limit, log):
        asked.append(size)
        return seconds[size], 100 * size

    return measured


@pytest.mark.parametrize(
    ("seconds", "expected", "asked_for"),
    [
        ({4: 1.0, 8: 0.5}, 8, [4, 8]),
        ({4: 1.0, 8: 0.99}, 4, [4, 8]),
        ({4: 1.0, 8: np.inf}, 4, [4, 8]),
        ({4: np.inf, 1: 1.0}, 1, [4, 1]),
    ],
)
def test_the_least_time_per_example_is_found_once(monkeypatch, seconds, expected, asked_for):
    asked = []
    monkeypatch.setattr(tuning, "_seconds_per_example", costs(seconds, asked))
    for _ in range(2):
        assert tuning.fastest(never, ["facts"], (4, 8)) == expected
    assert asked == asked_for


def test_where_the_first_size_does_not_fit_smaller_ones_are_tried(monkeypatch):
    asked = []
    seconds = {64: np.inf, 8: np.inf, 1: 1.0}
    monkeypatch.setattr(tuning, "_seconds_per_example", costs(seconds, asked))
    assert tuning.fastest(never, "facts", (64, 256)) == 1
    assert asked == [64, 8, 1]


def test_what_the_memory_cannot_hold_is_not_even_compiled(monkeypatch):
    asked = []
    seconds = {4: 1.0, 8: 0.5, 16: 0.1}
    monkeypatch.setattr(tuning, "_seconds_per_example", costs(seconds, asked))
    monkeypatch.setattr(devices, "memory", lambda: 1000.0)
    assert tuning.fastest(never, "facts", (4, 8, 16)) == 8
    assert asked == [4, 8]


def test_what_the_plan_of_memory_refuses_is_not_run(monkeypatch):
    class Compiled:
        def memory_analysis(self):
            return SimpleNamespace(temp_size_in_bytes=2000)

        def __call__(self):
            raise AssertionError("it was run")

    said = []
    monkeypatch.setattr(devices, "memory", lambda: 1000.0)
    with pytest.raises(ValueError, match="does not fit the memory"):
        tuning.fastest(lambda size, number: (Compiled(), ()), "facts", (4,), log=said.append)
    assert sum("do not fit" in line for line in said) == 2  # of 4 and of 1


def test_other_facts_are_another_question(monkeypatch):
    asked = []
    monkeypatch.setattr(tuning, "_seconds_per_example", costs({4: 1.0}, asked))
    for facts in ("a", "b"):
        assert tuning.fastest(never, facts, (4,)) == 4
    assert len(asked) == 2


def test_no_size_is_above_the_largest_and_every_device_has_whole_microbatches(monkeypatch):
    tried = []

    def a_sum(config, model, num_classes, shape, mesh, size, num_examples):
        tried.append((size, num_examples))
        step = jax.jit(lambda: np.zeros(()))
        return step.lower().compile(), ()

    monkeypatch.setattr(tuning, "_sum", a_sum)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(tuning, "WORTH_IT", 1e9)
    config = tiny(microbatch_size="auto", expected_batch_size=5)
    assert loop.build(config).config.microbatch_size == 1
    assert tried == []  # there is nothing to choose
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    monkeypatch.setattr(devices, "mesh", lambda hardware: mesh)
    assert loop.build(tiny(microbatch_size="auto")).config.microbatch_size == 8
    assert tried == [(1, 8 * 4), (8, 2 * 8 * 4)]


def test_more_views_are_fewer_examples_at_a_time():
    assert tuning.accelerator_sizes("tpu", 16) == [4, 16, 64]
    assert tuning.accelerator_sizes("tpu", 4) == [16, 64, 256]
    assert tuning.accelerator_sizes("tpu", 1) == [8, 32, 128]
    assert tuning.accelerator_sizes("tpu", 5000) == [1, 4, 16]
    assert tuning.accelerator_sizes("gpu", 16) == [64, 256]


def test_large_examples_are_taken_one_at_a_time_on_a_cpu_without_timing(monkeypatch):
    monkeypatch.setattr(tuning, "_sum", never)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(AssertionError, match="only measured times"):  # small ones are timed
        loop.build(tiny(microbatch_size="auto"))
    monkeypatch.setattr(tuning, "LARGE_EXAMPLE", 1e3)
    assert loop.build(tiny(microbatch_size="auto")).config.microbatch_size == 1


def test_a_plan_that_cannot_be_fails_before_anything_is_timed(monkeypatch):
    monkeypatch.setattr(tuning, "_sum", never)
    with pytest.raises(ValueError, match=r"delta 0\.5 must be positive"):
        loop.build(tiny(microbatch_size="auto", delta=0.5))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [({"microbatch_size": "some"}, "microbatch_size some must be"),
     ({"microbatch_size": 0}, "microbatch_size 0 must be"),
     ({"convolution": "fft"}, "unknown convolution 'fft'")],
)  # fmt: skip
def test_no_clip_norm_is_computed_for_a_step_that_cannot_be(monkeypatch, overrides, message):
    monkeypatch.setattr(public_clip, "clip_norm", never)
    with pytest.raises(ValueError, match=message):
        loop.build(tiny(**overrides, public_clip={"quantile": 0.5}))


def test_a_step_that_never_fits_is_one_clear_error_and_other_errors_are_not_hidden():
    def make_step(size, num_examples):
        raise jax.errors.JaxRuntimeError(message)

    message = "RESOURCE_EXHAUSTED: Out of memory"
    with pytest.raises(ValueError, match="gradient of one example does not fit"):
        tuning.fastest(make_step, "facts", (4,))
    message = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        tuning.fastest(make_step, "facts", (4,))


def tiny(**changes):
    config = base.get_config("dp_sgd")
    config.update({"num_steps": 2, "expected_batch_size": 8, "accountant": "rdp"})
    config.model.width = 4
    config.update(changes)
    return config


def test_a_run_records_what_it_found_and_goes_on_with_it(tmp_path, monkeypatch):
    asked = []
    seconds = {1: 2.0, 8: 1.0}
    monkeypatch.setattr(tuning, "_seconds_per_example", costs(seconds, asked))
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    config = tiny(microbatch_size="auto", seed=0)
    stop_at_once = lambda: True  # noqa: E731
    with pytest.raises(loop.StoppedError):
        loop.train(loop.build(config), 0, tmp_path, should_stop=stop_at_once)
    tuning._chosen.clear()
    seconds[8] = 3.0  # another day, another answer
    rundir.check_resumable(tmp_path, config)
    resumed = loop.build(rundir.with_recorded(config, tmp_path))
    result = loop.train(resumed, 0, tmp_path)
    assert result.summary["microbatch_size"] == 8
    assert result.summary["convolution"] == "matmul"
    assert len(asked) == 2
    assert config.microbatch_size == "auto"


def test_the_timed_step_is_real_and_formulations_and_microbatches_give_one_result():
    built = loop.build(tiny(microbatch_size="auto"))
    assert built.config.microbatch_size in (1, 8)
    states = [
        loop.train(loop.build(tiny(convolution=form, microbatch_size=size)), 0).state.params
        for form, size in (("matmul", 1), ("xla", 1), ("matmul", 8))
    ]
    for state in states[1:]:
        assert_close(state, states[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"microbatch_size": "fast"}, 'microbatch_size fast must be "auto" or from 1'),
        ({"microbatch_size": 2.5}, 'microbatch_size 2.5 must be "auto" or from 1'),
        ({"microbatch_size": True}, 'microbatch_size True must be "auto" or from 1'),
        ({"convolution": "fft"}, "unknown convolution 'fft'; choose from auto, matmul, xla"),
        ({"precision": "int8"}, "unknown precision 'int8'; choose from float32"),
    ],
)
def test_impossible_choices_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        loop.build(tiny(**changes))
