"""A run goes on by the plan that it has recorded, if that plan's ε still holds."""

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest

from bam import files
from bam.privacy.plan import PrivacyPlan, make_plan
from bam.training import loop, trainer
from configs import digits
from tests.cases import assert_same_bits, run_command

NUM_STEPS = 3


def tiny(**overrides):
    config = digits.get_config("dp_sgd")
    settings = {"model.name": "linear", "accountant": "rdp", "num_steps": NUM_STEPS}
    config.update_from_flattened_dict(settings | {"checkpoint.every": 1} | overrides)
    return config


def stop_after(num_steps):
    calls = iter(range(num_steps))
    return lambda: next(calls, None) is None


@pytest.fixture(scope="module")
def now():
    return loop.build(tiny())


@pytest.fixture(scope="module", params=[1 + 2**-52, 1.01], ids=["last bit", "looser"])
def before(now, request):
    """The experiment as it was built when the accountant chose another σ."""
    sigma = now.plan.noise_multiplier * request.param
    assert sigma != now.plan.noise_multiplier
    make_plan = trainer.make_plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            trainer,
            "make_plan",
            lambda **given: dataclasses.replace(make_plan(**given), noise_multiplier=sigma),
        )
        return loop.build(tiny())


def recorded(workdir, name="plan"):
    return files.read_json(workdir / f"{name}.json")


def change(workdir, **values):
    files.write_json(workdir / "plan.json", recorded(workdir) | values)


@pytest.mark.parametrize("seed", [0, None])
def test_an_interrupted_run_goes_on_by_its_own_plan_and_says_so(now, before, tmp_path, seed):
    with pytest.raises(loop.StoppedError):
        loop.train(before, seed, tmp_path / "run", should_stop=stop_after(2))
    said = []
    result = loop.train(now, seed, tmp_path / "run", log=said.append)
    sigma = before.plan.noise_multiplier
    (line,) = said
    assert f"goes on with its own noise multiplier, {sigma}," in line
    assert line.endswith(f"which choose {now.plan.noise_multiplier}") and "\n" not in line
    assert recorded(tmp_path / "run")["noise_multiplier"] == sigma
    assert result.summary["noise_multiplier"] == sigma
    if seed is not None:  # then what is drawn is known, too
        whole = loop.train(before, seed, tmp_path / "whole")
        assert_same_bits(result.state.params, whole.state.params)
        others = loop.train(now, seed, tmp_path / "now").state.params["weight"]
        same = np.array_equal(others, whole.state.params["weight"])
        assert same == (sigma < 1.001 * now.plan.noise_multiplier)  # the control


def test_of_a_run_that_is_as_planned_nothing_is_said(now, tmp_path):
    with pytest.raises(loop.StoppedError):
        loop.train(now, None, tmp_path, should_stop=stop_after(1))
    assert loop.train(now, None, tmp_path, log=pytest.fail).summary["steps_taken"] == NUM_STEPS


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (
            {"noise_multiplier": 0.99},
            r"plan\.json: epsilon 2\.\d+ is claimed, but its plan gives 3",
        ),
        ({"epsilon": 0.99}, r"plan\.json: epsilon 2\.\d+ is claimed, but its plan gives 2"),
        ({"noise_multiplier": 0.9, "epsilon": 1.2}, r"epsilon 3\.\d+ is above the config's 3"),
        ({"epsilon": 2.0}, r"epsilon 5\.\d+ is above the config's 3"),
        ({"epsilon": math.nan}, "epsilon must be of .*float.*, got nan"),
        ({"sampling_prob": 0.5}, "privacy plan's sampling_prob = "),
        ({"delta": 10.0}, "privacy plan's delta = "),
        ({"clip_norm": 0.5}, "privacy plan's clip_norm = "),
        ({"num_steps": 2}, "privacy plan's num_steps = 6, not 3"),
    ],
)
def test_a_plan_that_was_edited_is_refused_before_any_step(now, tmp_path, factors, message):
    with pytest.raises(loop.StoppedError):
        loop.train(now, None, tmp_path, should_stop=stop_after(1))
    plan = recorded(tmp_path)
    edited = plan | {key: plan[key] * factor for key, factor in factors.items()}
    (tmp_path / "plan.json").write_text(json.dumps(edited))  # with NaN, which `json` reads
    content = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    never = lambda row: pytest.fail("a step was taken")  # noqa: E731
    with pytest.raises(ValueError, match=message) as refused:
        loop.train(now, None, tmp_path, on_row=never)
    assert "\n" not in str(refused.value)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == content


@pytest.mark.parametrize(
    "values",
    [{"noise_multiplier": None}, {"noise_multiplier": "3"}, {"epsilon": None}, {"epsilon": [3.0]}],
)
def test_a_plan_without_its_numbers_is_refused(now, tmp_path, values):
    with pytest.raises(loop.StoppedError):
        loop.train(now, None, tmp_path, should_stop=stop_after(1))
    change(tmp_path, **values)
    with pytest.raises(ValueError, match=f"privacy plan's {next(iter(values))} = "):
        loop.train(now, None, tmp_path)


def test_a_larger_noise_than_the_checkpoints_were_made_with_is_refused(now, tmp_path):
    with pytest.raises(loop.StoppedError):
        loop.train(now, None, tmp_path, should_stop=stop_after(1))
    change(tmp_path, noise_multiplier=2 * now.plan.noise_multiplier)
    with pytest.raises(ValueError, match="checkpoints is of a run with the privacy plan's noise"):
        loop.train(now, None, tmp_path)


def test_ordinary_training_has_no_plan_to_edit(tmp_path):
    config = digits.get_config("non_private")
    config.update_from_flattened_dict({"model.name": "linear", "num_steps": NUM_STEPS})
    ordinary = loop.build(config)
    with pytest.raises(loop.StoppedError):
        loop.train(ordinary, 0, tmp_path, should_stop=stop_after(1))
    change(tmp_path, noise_multiplier=1.0, epsilon=2.0)
    with pytest.raises(ValueError, match=r"privacy plan's noise_multiplier = 1\.0, not 0"):
        loop.train(ordinary, 0, tmp_path)


def test_a_command_says_so_too_and_refuses_in_one_line(now, tmp_path):
    with pytest.raises(loop.StoppedError):
        loop.train(now, None, tmp_path, should_stop=stop_after(1))
    command = [
        "bam", "train", "--config=configs/digits.py:dp_sgd", "--config.model.name=linear",
        "--config.accountant=rdp", "--config.num_steps=3", f"--workdir={tmp_path}",
    ]  # fmt: skip
    sigma = now.plan.noise_multiplier
    change(tmp_path, noise_multiplier=0.9 * sigma)
    refused = run_command(*command)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "is claimed, but its plan gives" in refused.stderr
    shutil.rmtree(tmp_path / "checkpoints")  # as if it had been killed before its first one
    change(tmp_path, noise_multiplier=1.1 * sigma)
    done = run_command(*command)
    assert done.returncode == 0, done.stderr
    assert "this run goes on with its own noise multiplier" in done.stdout


ODD = [True, 2.5, "9", None, [], {}, math.nan, math.inf, -1, 0, 10**400, 5e-324]


@pytest.mark.usefixtures("without_the_tests_type_checks")
def test_a_stranger_record_of_odd_numbers_is_refused_by_a_value_error_or_is_a_plan(now):
    record = now.plan.to_json()
    assert PrivacyPlan.from_json(record) == now.plan
    for name in record:
        for odd in ODD:
            try:
                plan = PrivacyPlan.from_json(record | {name: odd})
                plan.check_epsilon()
            except ValueError as error:
                assert "\n" not in str(error)


@pytest.mark.usefixtures("without_the_tests_type_checks")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_steps": True}, "num_steps must be of .*int.*, got True"),
        ({"expected_batch_size": 20.5}, "expected_batch_size must be of .*int.*, got 20.5"),
        ({"delta": 5e-324, "accountant": "rdp"}, "delta 5e-324 must be positive and below"),
    ],
)
def test_a_plan_of_numbers_that_are_none_is_refused(wrong, message):
    right = {"num_examples": 200, "expected_batch_size": 20, "num_steps": 2, "delta": 1e-4}
    with pytest.raises(ValueError, match=message):
        make_plan(**(right | {"target_epsilon": 3.0, "clip_norm": 1.0} | wrong))
