"""What is found once by timing, and what happens when it is not there or cannot be."""

import jax
import numpy as np
import pytest

from bam import devices, public_clip, report, train, tuning
from configs import base
from tests.cases import assert_close


@pytest.fixture(autouse=True)
def nothing_found_yet(monkeypatch):
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(tuning, "_file", lambda: None)


def never(*unused):
    raise AssertionError("only measured times are asked for here")


def costs(seconds, asked):
    """A `make_step` whose timings are given: (convolution, size) -> seconds per example."""

    def measured(make_step, form, size, num_devices):
        asked.append((form, size))
        return seconds[form, size]

    return measured


@pytest.mark.parametrize(
    ("seconds", "expected", "num_asked"),
    [
        ({("xla", 4): 2.0, ("matmul", 4): 1.0, ("matmul", 8): 0.5}, ("matmul", 8), 3),
        ({("xla", 4): 1.0, ("matmul", 4): 2.0, ("xla", 8): 0.99}, ("xla", 4), 3),
        ({("xla", 4): 1.0, ("matmul", 4): np.inf, ("xla", 8): np.inf}, ("xla", 4), 3),
    ],
)
def test_the_least_time_per_example_is_found_once(monkeypatch, seconds, expected, num_asked):
    asked = []
    monkeypatch.setattr(tuning, "_seconds_per_example", costs(seconds, asked))
    for _ in range(2):
        found = tuning.fastest(never, ["facts"], {"xla": (4, 8), "matmul": (4, 8)})
        assert found == expected
    assert len(asked) == num_asked


def test_other_facts_are_another_question(monkeypatch):
    asked = []
    monkeypatch.setattr(tuning, "_seconds_per_example", costs({("xla", 4): 1.0}, asked))
    for facts in ("a", "b"):
        assert tuning.fastest(never, facts, {"xla": (4,)}) == ("xla", 4)
    assert len(asked) == 2


def test_no_size_is_above_the_largest_and_every_device_has_whole_microbatches(monkeypatch):
    tried = []

    def timed_sum(config, num_classes, shape, mesh, form, size):
        return lambda num_examples: tried.append((size, num_examples)) or np.zeros(())

    monkeypatch.setattr(tuning, "_timed_sum", timed_sum)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(tuning, "WORTH_IT", 1e9)
    config = tiny(microbatch_size="auto", expected_batch_size=5)
    assert train.build(config).config.microbatch_size == 1
    assert set(tried) == {(1, 8)}
    tried.clear()
    tuning._chosen.clear()
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    monkeypatch.setattr(devices, "mesh", lambda: mesh)
    assert train.build(tiny(microbatch_size="auto")).config.microbatch_size == 8
    assert set(tried) == {(1, 8 * 4), (8, 2 * 8 * 4)}


def test_a_plan_that_cannot_be_fails_before_anything_is_timed(monkeypatch):
    monkeypatch.setattr(tuning, "_timed_sum", never)
    with pytest.raises(ValueError, match=r"delta 0\.5 must be positive"):
        train.build(tiny(microbatch_size="auto", delta=0.5))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [({"microbatch_size": "some"}, "microbatch_size some must be"),
     ({"microbatch_size": 0}, "microbatch_size 0 must be"),
     ({"convolution": "fft"}, "unknown convolution 'fft'")],
)  # fmt: skip
def test_no_clip_norm_is_computed_for_a_step_that_cannot_be(monkeypatch, overrides, message):
    monkeypatch.setattr(public_clip, "clip_norm", never)
    with pytest.raises(ValueError, match=message):
        train.build(tiny(**overrides, public_clip={"quantile": 0.5}))


def test_the_answer_outlives_the_process_and_a_broken_file_is_found_again(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(tuning, "_seconds_per_example", costs({("xla", 4): 1.0}, asked))
    monkeypatch.setattr(tuning, "_file", lambda: tmp_path / "new" / "tuning.json")
    for num_asked in (1, 1):
        tuning._chosen.clear()
        assert tuning.fastest(never, "facts", {"xla": (4,)}) == ("xla", 4)
        assert len(asked) == num_asked
    (tmp_path / "new" / "tuning.json").write_text('{"broken')
    tuning._chosen.clear()
    tuning.fastest(never, "facts", {"xla": (4,)})
    assert len(asked) == 2


def test_a_step_that_never_fits_is_one_clear_error_and_other_errors_are_not_hidden():
    def make_step(form, size):
        def step(num_examples):
            raise jax.errors.JaxRuntimeError(message)

        return step

    message = "RESOURCE_EXHAUSTED: Out of memory"
    with pytest.raises(ValueError, match="not even 4 examples at once fit"):
        tuning.fastest(make_step, "facts", {"xla": (4,)})
    message = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        tuning.fastest(make_step, "facts", {"xla": (4,)})


def tiny(**changes):
    config = base.get_config("dp_sgd")
    config.update({"num_steps": 2, "expected_batch_size": 8, "accountant": "rdp"})
    config.model.width = 4
    config.update(changes)
    return config


def test_a_run_records_what_it_found_and_goes_on_with_it(tmp_path, monkeypatch):
    asked = []
    seconds = {("matmul", 1): 2.0, ("matmul", 8): 1.0}
    monkeypatch.setattr(tuning, "_seconds_per_example", costs(seconds, asked))
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    config = tiny(microbatch_size="auto", seed=0)
    stop_at_once = lambda: True  # noqa: E731
    with pytest.raises(train.StoppedError):
        train.train(train.build(config), 0, tmp_path, should_stop=stop_at_once)
    tuning._chosen.clear()
    seconds["matmul", 8] = 3.0  # another day, another answer
    report.check_resumable(tmp_path, config)
    resumed = train.build(report.with_recorded(config, tmp_path))
    result = train.train(resumed, 0, tmp_path)
    assert result.summary["microbatch_size"] == 8
    assert result.summary["convolution"] == "matmul"
    assert len(asked) == 2
    assert config.microbatch_size == "auto"


def test_the_timed_step_is_real_and_formulations_and_microbatches_give_one_result():
    built = train.build(tiny(microbatch_size="auto"))
    assert built.config.microbatch_size in (1, 8)
    states = [
        train.train(train.build(tiny(convolution=form, microbatch_size=size)), 0).state.params
        for form, size in (("matmul", 1), ("xla", 1), ("matmul", 8), ("xla", 8))
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
        train.build(tiny(**changes))
