"""The fastest microbatch size is timed when it is asked for, and never inside of a run."""

import math
import os

import jax
import pytest
from jax import monitoring

from bam import memory
from bam.cli import train
from bam.cli.main import main
from bam.training import config as base
from bam.training import duration, loop, named_configs, tuning
from bam.training import trainer as trainers
from configs import digits, folder
from tests.cases import assert_close, refused, tiny_digits


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


@pytest.mark.parametrize(("gain", "size"), [(1.5, 1), (4.0, 8)])  # the second: a control
def test_a_size_that_computes_twice_the_rows_must_save_more_than_half_of_a_rows_time(
    monkeypatch, gain, size
):
    """A fake clock: in microbatches of 8 a row takes 1 / `gain` of its time alone."""
    monkeypatch.setattr(tuning, "sizes", lambda: (1, 8))
    monkeypatch.setattr(tuning, "_seconds", lambda trainer, size: {1: 1.0, 8: 1 / gain}[size])
    built = loop.build(tiny())
    batches = duration.drawn_batches(built, 50)
    alone, together = (duration.rows_per_example(built, batches, n) for n in (1, 8))
    assert alone < 1.3 and 2 * alone < together < 4 * alone
    assert tuning.fastest_size(built) == size


def test_an_example_that_never_fits_is_one_clear_error_and_other_errors_are_not_hidden(monkeypatch):
    def fails(*unused, **options):
        raise jax.errors.JaxRuntimeError(message)

    experiment = loop.build(tiny())
    monkeypatch.setattr(tuning.engine, "clipped_sum", fails)
    message = "RESOURCE_EXHAUSTED: Out of memory"
    with pytest.raises(ValueError, match="gradient of one example does not fit"):
        tuning.fastest_size(experiment)
    message = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        tuning.fastest_size(experiment)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"microbatch_size": "auto"},
            "microbatch_size must be .* got auto; .* --config.dry_run --tune",
        ),
        ({"microbatch_size": "auto", "delta": 0.5}, "microbatch_size must be .* got auto"),
        ({"microbatch_size": 0}, "microbatch_size must be .* got 0"),
        ({"microbatch_size": 2.5}, "microbatch_size must be from 1 .* got 2.5"),
        ({"microbatch_size": True}, "microbatch_size must be from 1 .* got True"),
        (
            {"convolution": "fft"},
            "unknown convolution 'fft'; choose from matmul, xla, grouped, tpu, or ''",
        ),
        (
            {"convolution": "auto"},
            "unknown convolution 'auto'; choose from matmul, xla, grouped, tpu",
        ),
        ({"precision": "int8"}, "unknown precision 'int8'; choose from float32"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        loop.build(tiny(**changes))


def compilations(monkeypatch, call):
    """How many programs XLA compiles, or takes from its cache, in a call."""
    seen = []

    def listener(event, seconds, **unused):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    monitoring.register_event_duration_secs_listener(listener)
    try:
        call()
    finally:
        monitoring.unregister_event_duration_listener(listener)
    return len(seen)


@pytest.mark.parametrize("method", ["dp_sgd", "dp_sat", "bam_sam", "bam_exact", "non_private"])
def test_a_run_is_built_without_compiling_anything(monkeypatch, method):
    config = digits.get_config(method)
    config.accountant = "rdp"
    jax.clear_caches()
    assert compilations(monkeypatch, lambda: loop.build(config)) == 0


def test_what_counts_compilations_sees_them(monkeypatch):  # the control
    jax.clear_caches()
    assert compilations(monkeypatch, lambda: jax.random.key(0)) > 0


def test_a_run_without_a_formulation_computes_by_the_platform_and_goes_on_there(tmp_path):
    config = tiny_digits(seed=0)
    assert config.convolution == ""
    with pytest.raises(loop.StoppedError):
        loop.train(loop.build(config), 0, tmp_path, should_stop=lambda: True)
    summary = loop.train(loop.build(config), 0, tmp_path).summary
    assert summary["convolution"] == "matmul"
    assert '"convolution": ""' in (tmp_path / "config.json").read_text()


def test_a_folders_model_follows_its_features_until_it_is_named():
    config = folder.get_config("dp_sgd")
    assert config.model.name == "convnet"
    config.features.name = "prior"
    assert config.model.name == "linear"
    config.model.name = "resnet9"
    assert config.copy_and_resolve_references().model.name == "resnet9"


# The command.


DRY = ["train", "--config=digits:dp_sgd", "--config.dry_run", "--config.accountant=rdp"]


def test_a_dry_run_times_sizes_if_it_is_asked_and_prints_the_flag_to_add(monkeypatch, capsys):
    asked = []

    def seconds(trainer, size):
        asked.append(size)
        return {1: 0.01, 8: 0.005}[size]

    monkeypatch.setattr(tuning, "_seconds", seconds)
    estimate = duration.Estimate(60, 50, 80)
    monkeypatch.setattr(duration, "estimate_seconds", lambda trainer, rows: estimate)
    monkeypatch.setattr(trainers.Trainer, "check_step", lambda *args: None)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert main(DRY) == 0
    assert asked == [] and "microbatch_size" not in capsys.readouterr().out
    assert main([*DRY, "--tune"]) == 0
    said = capsys.readouterr().out
    assert asked == [1, 8]
    assert "fastest of 1, 8 on cpu: --config.microbatch_size=8\n" in said
    assert said.endswith("about 60 s (50 s to 80 s) of training on this device, 8 at a time\n")


def test_sizes_are_timed_in_a_dry_run_alone(tmp_path, capsys):
    assert main(["train", "--config=digits:dp_sgd", f"--workdir={tmp_path}", "--tune"]) == 2
    assert capsys.readouterr().err == "error: --tune needs --config.dry_run\n"


def test_a_size_that_is_a_word_is_one_line_that_names_the_flag(capsys):
    assert main([*DRY, "--config.microbatch_size=auto"]) == 2
    assert capsys.readouterr().err.endswith("bam train --config.dry_run --tune finds the fastest\n")


def test_the_estimate_is_of_the_size_that_was_found(monkeypatch):
    sizes = []
    monkeypatch.setattr(tuning, "_seconds", lambda trainer, size: {1: 8.0, 8: 1.0}[size])
    size_of = lambda x: (x.config.microbatch_size, x.parts.gradient.microbatch_size)  # noqa: E731
    estimate = duration.Estimate(60, 50, 80)
    monkeypatch.setattr(
        duration, "estimate_seconds", lambda x, rows: sizes.append(size_of(x)) or estimate
    )
    experiment = loop.build(tiny())
    for tune in (False, True):
        train.dry_run(experiment, tune, lambda line: None)
    assert sizes == [(32, 32), (8, 8)] and size_of(experiment) == (32, 32)


def test_a_dry_run_of_a_step_that_does_not_fit_goes_on_with_a_size_that_does(monkeypatch):
    lines, built = [], loop.build(tiny())

    def check_step(trainer, state, rows):
        if trainer.config.microbatch_size > 8:
            raise memory.TooLargeError("--config.microbatch_size=8 fits", 8)

    monkeypatch.setattr(trainers.Trainer, "check_step", check_step)
    monkeypatch.setattr(duration, "estimate_seconds", lambda x, rows: duration.Estimate(60, 50, 80))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    train.dry_run(built, False, lines.append)
    estimate = "about 60 s (50 s to 80 s) of training on this device"
    assert lines == ["--config.microbatch_size=8 fits", f"{estimate}, 8 at a time"]
    # The controls: a size that fits has no line, and without any size that fits there is no time.
    train.dry_run(built.with_microbatch_size(8), False, lines.append)
    assert lines[2:] == [estimate]

    def refuse(trainer, state, rows):
        raise memory.TooLargeError("a single example takes more")

    monkeypatch.setattr(trainers.Trainer, "check_step", refuse)
    refused("a single example", train.dry_run, built, False, lines.append)


def test_an_estimate_says_that_the_machine_is_busy_before_its_own_work(monkeypatch):
    lines, built = [], loop.build(tiny())
    monkeypatch.setattr(trainers.Trainer, "check_step", lambda *args: None)
    monkeypatch.setattr(duration, "estimate_seconds", lambda x, rows: duration.Estimate(60, 50, 80))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    for load in (12.0, 4.0):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        train.dry_run(built, False, lines.append)
    busy = "; other programs use this machine, so it may be too long"
    assert [line.endswith(busy) for line in lines] == [True, False]


def test_a_run_of_days_on_a_cpu_is_told_of_the_changes_that_apply_to_its_config(monkeypatch):
    gpu, lines = "a GPU is faster (docs/accelerators.md)", []
    less = f"{gpu}; training takes less time with"
    views, small = "--config.augment.views=1", "--config=cifar10_small:bam_sam"
    assert train.advise(named_configs.load("cifar10:bam_sam")) == (
        f"{less} fewer views or a smaller network: {views} or {small}"
    )
    assert train.advise(named_configs.load("cifar100:bam_sam")) == f"{less} fewer views: {views}"
    assert train.advise(named_configs.load("cifar10_small:bam_sam")) == gpu
    monkeypatch.setattr(trainers.Trainer, "check_step", lambda *args: None)
    for seconds in (3 * 86400.0, 86400.0):  # the second: a control
        estimate = duration.Estimate(seconds, seconds, seconds)
        monkeypatch.setattr(
            duration, "estimate_seconds", lambda x, rows, estimate=estimate: estimate
        )
        train.dry_run(loop.build(tiny()), False, lines.append)
    assert [line == gpu for line in lines] == [False, True, False]


@pytest.mark.parametrize(("epsilon", "most"), [(50.0, 256), (3.0, 1000)])  # the second: control
def test_no_more_rows_are_added_at_once_than_32_bits_hold_however_the_size_is_set(epsilon, most):
    built, other = (loop.build(tiny(epsilon=epsilon, microbatch_size=n)) for n in (1000, 16))
    changed = other.with_microbatch_size(1000)
    assert [x.parts.gradient.microbatch_size for x in (built, changed, other)] == [most, most, 16]
    assert changed.config.microbatch_size == built.config.microbatch_size == 1000


@pytest.mark.slow
def test_the_timed_step_is_real_and_formulations_and_microbatches_give_one_result():
    assert tuning.fastest_size(loop.build(tiny())) in (1, 8)
    states = [
        loop.train(loop.build(tiny(convolution=form, microbatch_size=size)), 0).state.params
        for form, size in (("matmul", 1), ("xla", 1), ("grouped", 8), ("matmul", 8))
    ]
    for state in states[1:]:
        assert_close(state, states[0], rtol=1e-4, atol=1e-5)
