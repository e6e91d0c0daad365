"""What is found once by timing, and what happens when it is not there or cannot be."""

import math

import jax
import pytest

from bam.training import config as base
from bam.training import loop, public_clip, rundir, tuning
from tests.cases import assert_close


@pytest.fixture(autouse=True)
def nothing_found_yet(monkeypatch):
    monkeypatch.setattr(tuning, "_chosen", {})


def never(*unused):
    raise AssertionError("nothing is to be timed here")


def tiny(**changes):
    config = base.get_config("dp_sgd")
    config.update({"num_steps": 2, "expected_batch_size": 8, "accountant": "rdp"})
    config.model.width = 4
    config.update(changes)
    return config


@pytest.mark.parametrize(
    ("platform", "seconds", "largest", "expected"),
    [
        ("cpu", {1: 0.01, 8: 0.005}, 100, 8),
        ("cpu", {1: 0.01, 8: 0.0099}, 100, 1),
        ("cpu", {1: 0.01, 8: math.inf}, 100, 1),  # it does not fit
        ("cpu", {1: 0.01}, 7, 1),  # none above the batch's size
        ("gpu", {1: 1.0, 8: 0.5, 64: 0.1, 512: 0.1}, 4096, 64),
        ("tpu", {1: 1.0, 8: 0.5, 64: math.inf}, 4096, 8),
    ],
)
def test_a_larger_size_is_taken_while_it_saves_time(
    monkeypatch, platform, seconds, largest, expected
):
    asked = []
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert tuning.fastest(lambda x: asked.append(x) or seconds[x], largest) == expected
    assert asked == list(seconds)


def test_an_example_that_never_fits_is_one_clear_error_and_other_errors_are_not_hidden(monkeypatch):
    def fails(*unused, **options):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(tuning.engine, "clipped_sum", fails)
    message = "RESOURCE_EXHAUSTED: Out of memory"
    with pytest.raises(ValueError, match="gradient of one example does not fit"):
        loop.build(tiny(microbatch_size="auto"))
    message = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        loop.build(tiny(microbatch_size="auto"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"microbatch_size": "auto", "delta": 0.5}, r"delta 0\.5 must be positive"),
        ({"microbatch_size": "some"}, 'microbatch_size some must be "auto" or from 1'),
        ({"microbatch_size": 0}, "microbatch_size 0 must be"),
        ({"microbatch_size": 2.5}, 'microbatch_size 2.5 must be "auto" or from 1'),
        ({"microbatch_size": True}, 'microbatch_size True must be "auto" or from 1'),
        ({"convolution": "fft"}, "unknown convolution 'fft'; choose from auto, matmul, xla"),
        ({"precision": "int8"}, "unknown precision 'int8'; choose from float32"),
    ],
)
def test_what_cannot_be_fails_before_anything_is_timed(monkeypatch, changes, message):
    monkeypatch.setattr(tuning, "_seconds", never)
    with pytest.raises(ValueError, match=message):
        loop.build(tiny(**changes))
    if "precision" not in changes:  # nor is a clip norm computed
        monkeypatch.setattr(public_clip, "clip_norm", never)
        with pytest.raises(ValueError, match=message):
            loop.build(tiny(**changes, public_clip={"quantile": 0.5}))


def test_a_run_records_what_it_found_and_goes_on_with_it(tmp_path, monkeypatch):
    asked, seconds = [], {1: 0.01, 8: 0.005}
    monkeypatch.setattr(tuning, "_seconds", lambda *x: asked.append(x[-1]) or seconds[x[-1]])
    config = tiny(microbatch_size="auto", seed=0)
    with pytest.raises(loop.StoppedError):
        loop.train(loop.build(config), 0, tmp_path, should_stop=lambda: True)
    loop.build(config)  # times nothing in the same process
    assert asked == [1, 8]
    loop.build(tiny(microbatch_size="auto", precision="bfloat16"))  # another question
    assert asked == [1, 8, 1, 8]
    tuning._chosen.clear()
    seconds[8] = 0.02  # another day, another answer
    rundir.check_resumable(tmp_path, config)
    resumed = loop.build(rundir.with_recorded(config, tmp_path))
    summary = loop.train(resumed, 0, tmp_path).summary
    assert summary["microbatch_size"] == 8 and summary["convolution"] == "matmul"
    assert len(asked) == 4 and config.microbatch_size == "auto"


@pytest.mark.slow
def test_the_timed_step_is_real_and_formulations_and_microbatches_give_one_result():
    assert loop.build(tiny(microbatch_size="auto")).config.microbatch_size in (1, 8)
    states = [
        loop.train(loop.build(tiny(convolution=form, microbatch_size=size)), 0).state.params
        for form, size in (("matmul", 1), ("xla", 1), ("matmul", 8))
    ]
    for state in states[1:]:
        assert_close(state, states[0], rtol=1e-4, atol=1e-5)
