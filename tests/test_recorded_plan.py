"""A run goes on by the plan that it has recorded, if that plan's ε still holds."""

import dataclasses
import functools
import json
import math
import shutil

import numpy as np
import pytest

from bam import files, provenance
from bam.privacy import recorded_plan
from bam.privacy.plan import PrivacyPlan, make_plan
from bam.training import loop
from tests.cases import assert_same_bits, mostly, refused, run_command, stop_after, tiny_digits
from tests.run_folder import contents, made_by

NUM_STEPS = 3


def tiny(method="dp_sgd"):
    return tiny_digits(method, num_steps=NUM_STEPS, checkpoint__every=1)


def stop(experiment, workdir, seed=None):
    with pytest.raises(loop.StoppedError):
        loop.train(experiment, seed, workdir, should_stop=stop_after(1))


def resume(workdir, seed=None, config=None, dataset=None, **options):
    built = loop.build(config or tiny(), dataset, folder=workdir)
    return loop.train(built, seed, workdir, **options)


@pytest.fixture(scope="module")
def now():
    return loop.build(tiny())


@pytest.fixture(scope="module")
def stopped(now, tmp_path_factory):
    """A run without a seed that was stopped after its first step."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    stop(now, folder)
    return folder


CHANGED = {"last bit": 1 + 2**-52, "looser": 1.01}


@functools.cache
def with_another_version(changed):
    """The experiment as it was built when the accountant chose another σ."""
    chosen = recorded_plan.with_epsilon

    def with_epsilon(asked):
        plan = chosen(asked)
        return dataclasses.replace(plan, noise_multiplier=plan.noise_multiplier * CHANGED[changed])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded_plan, "with_epsilon", with_epsilon)
        return loop.build(tiny())


ONLY_BY_0_3 = (
    "holds a training of bam 0.3.0, which only that version continues: go on with that one"
)


def change(workdir, **values):
    path = workdir / "plan.json"
    path.write_text(json.dumps(files.read_json(path) | values))  # with NaN, which `json` reads


RUNS = [("last bit", None), ("looser", 0), ("last bit", 0), ("looser", None)]


@pytest.mark.parametrize(("changed", "seed"), mostly(RUNS, slow=RUNS[2:]))
def test_an_interrupted_run_goes_on_by_its_own_plan(now, changed, tmp_path, seed):
    before = with_another_version(changed)
    stop(before, tmp_path / "run", seed)
    sigma = before.plan.noise_multiplier
    assert sigma != now.plan.noise_multiplier
    with pytest.raises(ValueError, match=f"has noise_multiplier = {sigma}, but this run has "):
        loop.train(now, seed, tmp_path / "run")
    result = resume(tmp_path / "run", seed)
    assert files.read_json(tmp_path / "run/plan.json") == before.record
    assert result.summary["noise_multiplier"] == sigma
    if seed is not None:  # then what is drawn is known, too
        whole = loop.train(before, seed, tmp_path / "whole")
        assert_same_bits(result.state.params, whole.state.params)
        others = loop.train(now, seed, tmp_path / "now").state.params["weight"]
        same = np.array_equal(others, whole.state.params["weight"])
        assert same == (changed == "last bit")  # the control


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (
            {"noise_multiplier": 0.99},
            r"plan\.json: epsilon 2\.\d+ is claimed, but its plan gives 3",
        ),
        ({"epsilon": 0.99}, r"plan\.json: epsilon 2\.\d+ is claimed, but its plan gives 2"),
        ({"noise_multiplier": 0.9, "epsilon": 1.2}, r"epsilon 3\.\d+ is above the target, 3"),
        ({"epsilon": 2.0}, r"epsilon 5\.\d+ is above the target, 3"),
        ({"epsilon": math.nan}, "epsilon must be of .*float.*, got nan"),
        ({"sampling_prob": 0.5}, "the record contradicts itself in its neighbours"),
        ({"num_steps": 2}, "is claimed, but its plan gives"),
        ({"group_size": 3, "unit": "user"}, "has unit = 'user', but this run has 'example'"),
        ({"delta": 10.0, "overflow": 10.0}, "has delta = "),
        ({"clip_norm": 0.5}, "has clip_norm = "),
        ({"sensitivity": 2}, "has sensitivity = "),
        ({"overflow": 0.5}, "the record contradicts itself"),
        ({"spare_steps": 0, "num_steps": 1 / NUM_STEPS}, "has num_steps = 1, but this run has 3"),
        ({"noise_multiplier": 2}, "npz has noise"),
    ],
)
def test_a_plan_that_was_edited_is_refused_before_any_step(
    now, stopped, tmp_path, factors, message
):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    plan = now.record
    new = {"group_size", "unit"}  # values; all others are multiplied
    edited = {key: x if key in new else plan[key] * x for key, x in factors.items()}
    change(tmp_path, **edited | {k: int(x) for k, x in edited.items() if k == "num_steps"})
    content = contents(tmp_path)
    never = lambda row: pytest.fail("a step was taken")  # noqa: E731
    with pytest.raises(ValueError, match=message) as refused:
        resume(tmp_path, on_row=never)
    assert "\n" not in str(refused.value)
    assert contents(tmp_path) == content


@pytest.mark.usefixtures("without_the_tests_type_checks")
@pytest.mark.parametrize(
    "values",
    [{"noise_multiplier": None}, {"noise_multiplier": "3"}, {"epsilon": None}, {"epsilon": [3.0]}],
)
def test_a_plan_without_its_numbers_is_refused(now, tmp_path, values):
    files.write_json(tmp_path / "plan.json", now.plan.to_json() | values)
    with pytest.raises(ValueError, match=r"plan\.json: .*choose another folder"):
        loop.build(tiny(), folder=tmp_path)


def test_a_run_on_another_number_of_examples_is_refused(now, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    train = now.dataset.train
    fewer = now.dataset._replace(train=train._replace(images=train[0][1:], labels=train[1][1:]))
    with pytest.raises(ValueError, match="has num_examples = 1437, but this run has 1436"):
        resume(tmp_path, dataset=fewer)


def test_ordinary_training_has_no_plan_to_edit(tmp_path):
    config = tiny("non_private")
    stop(loop.build(config), tmp_path, 0)
    change(tmp_path, noise_multiplier=10.0, epsilon=2.0)
    with pytest.raises(ValueError, match=r"noise_multiplier = 10\.0, but this run has 0\.0"):
        resume(tmp_path, 0, config)


def train_in(workdir):
    """Has the command go on with a run of `stopped`."""
    return run_command(
        "bam", "train", "--config=configs/digits.py:dp_sgd", "--config.model.name=linear",
        "--config.model.width=16", "--config.accountant=rdp", "--config.num_steps=3",
        f"--workdir={workdir}",
    )  # fmt: skip


def test_a_command_refuses_an_edited_plan_in_one_line(now, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    change(tmp_path, noise_multiplier=0.9 * now.plan.noise_multiplier)
    refused = train_in(tmp_path)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "is claimed, but its plan gives" in refused.stderr


def test_a_command_refuses_an_unfinished_run_of_another_version_in_one_line(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    made_by(tmp_path, "0.3.0")
    refused = train_in(tmp_path)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert refused.stderr.endswith(f"{ONLY_BY_0_3}, or choose another folder\n")


@pytest.mark.parametrize("given", [False, True], ids=["planned", "given"])
def test_a_run_goes_on_by_its_version_of_bam_alone(now, stopped, tmp_path, given):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    goes_on = functools.partial(loop.train, now, None) if given else resume
    patch = ".".join([*provenance.versions()["bam"].split(".")[:2], "999"])
    made_by(tmp_path, "0.3.0")
    content = contents(tmp_path)
    refused(ONLY_BY_0_3, goes_on, tmp_path)
    assert contents(tmp_path) == content
    made_by(tmp_path, patch)  # the control
    assert goes_on(tmp_path).summary["steps_begun"] == NUM_STEPS


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
        ({"delta": 5e-324, "accountant": "rdp"}, "delta 5e-324 must be at least 1e-100 and below"),
        ({"mechanism": {}}, "mechanism must be a name, or a mapping with a name, got {}"),
        ({"mechanism": 5}, "mechanism must be a name, or a mapping with a name, got 5"),
    ],
)
def test_a_plan_of_numbers_that_are_none_is_refused(wrong, message):
    right = {"num_examples": 200, "expected_batch_size": 20, "num_steps": 2, "delta": 1e-4}
    with pytest.raises(ValueError, match=message):
        make_plan(**(right | {"epsilon": 3.0} | wrong))


def test_a_trainer_is_not_built_on_a_plan_of_a_larger_epsilon(now):
    config = now.config.copy_and_resolve_references()
    config.epsilon = now.plan.epsilon / 2
    with pytest.raises(ValueError, match=r"the plan's epsilon .* is above the target"):
        loop.build(config, plan=now.plan)
    config.epsilon = 2 * now.plan.epsilon  # a smaller one may be taken
    assert loop.build(config, plan=now.plan).plan == now.plan


def test_the_printed_plan_says_that_mu_is_but_for_delta(now):
    (line,) = [x for x in now.plan.describe().splitlines() if "mu = " in x]
    assert line.startswith("Gaussian DP, but for delta: mu = ")
