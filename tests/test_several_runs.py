"""ε of several runs on the same data is that of their losses together: never less, seldom more."""

import json
import math
import shutil

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

import bam
from bam.cli import privacy
from bam.privacy import accounting, tradeoff
from bam.privacy.accounting import PoissonSteps
from bam.privacy.joint_epsilon import joint_epsilon
from tests.cases import refused, run_command

FIRST, SECOND = PoissonSteps(1.1, 0.05, 300), PoissonSteps(0.9, 0.02, 500)
PLAN = {"num_examples": 1000, "expected_batch_size": 50, "num_steps": 40, "delta": 1e-5}


def planned(**changes):
    return bam.make_plan(**{**PLAN, "epsilon": 2.0, **changes})


def test_parts_of_a_run_cost_what_the_whole_run_costs():
    parts = [FIRST._replace(num_steps=n) for n in (1, 99, 200)]
    whole = bam.epsilon(**FIRST._asdict(), delta=1e-5)
    assert accounting.joint_epsilon(parts, 1e-5) == pytest.approx(whole, rel=1e-5)


def test_gaussians_without_sampling_are_one_gaussian():
    steps = [PoissonSteps(10.0, 1.0, 30), PoissonSteps(25.0, 1.0, 200), PoissonSteps(4.0, 1.0, 1)]
    mu = math.sqrt(sum(x.num_steps / x.noise_multiplier**2 for x in steps))
    least = tradeoff.epsilon_of_mu(mu, 1e-6)
    assert least <= accounting.joint_epsilon(steps, 1e-6) <= least * (1 + 1e-4)


def test_different_runs_cost_what_dp_accounting_says_in_any_order():
    ours = accounting.joint_epsilon([FIRST, SECOND], 1e-5)
    accountant = PLDAccountant()
    for steps in (FIRST, SECOND):
        accountant.compose(accounting.poisson_event(*steps))
    assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
    assert accounting.joint_epsilon([SECOND, FIRST], 1e-5) == pytest.approx(ours, rel=1e-6)
    by_rdp = dp_accounting.rdp.RdpAccountant()
    for steps in (FIRST, SECOND):
        by_rdp.compose(accounting.poisson_event(*steps))
    assert ours < by_rdp.get_epsilon(1e-5)
    alone = [bam.epsilon(**x._asdict(), delta=1e-5) for x in (FIRST, SECOND)]
    assert max(alone) < ours < 0.9 * sum(alone)


@pytest.mark.thorough
def test_plans_together_leave_room_for_the_draws_of_each():
    plan, other = planned(), planned(num_steps=10, mechanism={"name": "banded", "bands": 2})
    assert joint_epsilon([plan], plan.delta) == pytest.approx(plan.epsilon, rel=1e-9)
    events = [plan.dp_event, other.dp_event]
    room = plan.overflow + other.overflow
    assert joint_epsilon([plan, other], 1e-5) == accounting.joint_epsilon(events, 1e-5 - room)
    assert joint_epsilon([plan, other], 1e-5) > accounting.joint_epsilon(events, 1e-5)


USERS = {"group_size": 3}
AT_MOST = {"num_examples_given": True}


@pytest.mark.parametrize(
    ("changes", "delta", "message"),
    [
        ({"epsilon": math.inf}, 1e-5, "a run without privacy has no epsilon"),
        (USERS, 1e-5, "do not protect the same: their unit is example and user"),
        (AT_MOST, 1e-5, "their adjacency is zero_out and add_or_remove_one"),
        ({"mechanism": "random_allocation"}, 1e-5, "mechanism random_allocation is not composed"),
        ({}, 2e-8, "delta must be above 2e-08 and below 1/N = 0.001, got 2e-08"),
        ({}, 1e-3, "delta must be above 2e-08 and below 1/N = 0.001, got 0.001"),
        ({}, 2.01e-8, None),
    ],
)
@pytest.mark.filterwarnings("ignore::bam.privacy.pld.LooseBoundWarning")
def test_plans_that_have_no_epsilon_together_are_refused(changes, delta, message):
    plans = [planned(), planned(**changes)]
    if message is None:
        assert joint_epsilon(plans, delta) > 2.0
    else:
        refused(message, joint_epsilon, plans, delta)


def test_what_pld_cannot_resolve_or_hold_is_refused():
    many = [FIRST._replace(num_steps=10**6)] * 3
    refused("cannot resolve delta 1e-10", accounting.joint_epsilon, many, 1e-10)
    little = [PoissonSteps(0.3, 0.5, 400)] * 4
    refused("epsilon would be about", accounting.joint_epsilon, little, 1e-5)


def test_nothing_together_has_no_epsilon():
    refused("needs at least one plan", joint_epsilon, [], 1e-5)
    refused("needs at least one mechanism", accounting.joint_epsilon, [], 1e-5)
    for wrong in ({"num_steps": 0}, {"sampling_prob": 0.0}, {"noise_multiplier": math.inf}):
        refused("must be positive", accounting.joint_epsilon, [FIRST._replace(**wrong)], 1e-5)


# The command.


@pytest.fixture
def plans(tmp_path):
    """Folders of two runs, one of them of a loop of one's own."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "plan.json").write_text(json.dumps(planned().to_json()))
    given = {key: value for key, value in PLAN.items() if key != "num_steps"}
    private = bam.PrivateTraining(**given, num_epochs=2, epsilon=3.0, clip=bam.clip_by_l2_norm(1.0))
    private.save(tmp_path / "second", {})
    private.close()
    return tmp_path / "first", tmp_path / "second"


def test_the_command_says_epsilon_alone_together_and_the_sum(plans, tmp_path):
    out = tmp_path / "all.json"
    done = run_command(
        "bam", "privacy", f"--plan={plans[0]}", f"--plan={plans[1]}/plan.json", "--delta=2e-5",
        f"--json={out}",
    )  # fmt: skip
    numbers = json.loads(out.read_text())
    assert [x["plan"] for x in numbers["plans"]] == [str(plans[0]), f"{plans[1]}/plan.json"]
    both = [planned(), planned(epsilon=3.0)]
    assert numbers["together"]["epsilon"] == pytest.approx(joint_epsilon(both, 2e-5), rel=1e-9)
    assert numbers["sum"]["epsilon"] == pytest.approx(sum(x.epsilon for x in both), rel=1e-9)
    assert numbers["sum"]["delta"] == pytest.approx(2e-5) and numbers["together"]["delta"] == 2e-5
    lines = [line for line in done.stdout.split("\n") if line.startswith("ε = ")]
    assert [line.split()[-1] for line in lines[2:]] == ["together", "sum"], done.stdout
    assert "no two runs had the same seed" in done.stdout


def test_a_copy_of_a_plan_is_counted_and_said(plans, tmp_path, capsys):
    copy = shutil.copy(plans[0] / "plan.json", tmp_path / "copy.json")
    doubt = "two plans are equal: if they are of one training, name it once\n"
    privacy.account_for_all([str(plans[0]), str(copy)], None, "")
    out = capsys.readouterr().out
    assert doubt in out and out.startswith("Runs on the same data: 2")
    privacy.account_for_all([str(plans[0])], None, "")  # the control
    assert doubt not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("population", "neighbours"),
    [
        ({}, "one example replaced by nothing, its place left empty (zero-out)"),
        (USERS, "one user replaced by nothing, its place left empty (zero-out)"),
        (USERS | AT_MOST, "one user added or removed"),
    ],
)
def test_the_command_names_the_unit_of_its_plans(population, neighbours, tmp_path, capsys):
    for name in ("a", "b"):
        record = planned(**population).to_json()
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    names = [str(tmp_path / f"{name}.json") for name in ("a", "b")]
    privacy.account_for_all(names, None, str(tmp_path / "out.json"))
    assert capsys.readouterr().out.startswith(
        f"Runs on the same data: 2, neighbours: {neighbours}\n"
    )
    unit = json.loads((tmp_path / "out.json").read_text())["unit"]
    assert f"one {unit} " in neighbours
    other = planned(**({} if unit == "user" else USERS))
    (tmp_path / "b.json").write_text(json.dumps(other.to_json()))
    units = "user and example" if unit == "user" else "example and user"
    message = f"their unit is {units}; their epsilons are not one number"
    refused(message, privacy.account_for_all, names, None, "")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--plan={0}", "--plan={0}/plan.json"], "--plan names one run twice"),
        (["--plan={0}", "--noise_multiplier=1"], "--plan has σ, q and T"),
        (["--plan={0}", "--plot=a.png"], "--plan has σ, q and T"),
        (["--plan={0}/nothing"], "nothing: missing"),
        (["--plan={0}", "--delta=0"], "delta must be above"),
        (["--plan={0}", "--delta=0.5"], "below 1/N"),
        (["--plan="], "--plan= is empty"),
        (["--plan={0}", "--json={0}/plan.json"], "would overwrite a run's plan"),
        (["--noise_multiplier=1", "--num_steps=3"], "--sampling_prob is required"),
        (["--noise_multiplier=1", "--sampling_prob=0.1"], "--num_steps is required"),
        ([], "give one of --noise_multiplier and --target_epsilon"),
    ],
)
def test_flags_that_cannot_be_are_one_line(flags, message, plans):
    command = [x.format(*plans) for x in flags]
    done = run_command("bam", "privacy", *command)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and message in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_delta_is_the_plans_own_unless_it_is_given(plans, tmp_path):
    path = plans[0] / "plan.json"
    path.write_text(json.dumps(planned(delta=1e-6).to_json()))
    done = run_command("bam", "privacy", f"--plan={plans[0]}", f"--json={tmp_path / 'x.json'}")
    assert done.returncode == 0, done.stderr
    numbers = json.loads((tmp_path / "x.json").read_text())["together"]
    assert numbers["delta"] == 1e-6
    assert numbers["epsilon"] == pytest.approx(planned(delta=1e-6).epsilon, rel=1e-9)


def test_a_record_whose_epsilon_is_too_small_is_refused(plans):
    path = plans[0] / "plan.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"epsilon": record["epsilon"] * 0.99}))
    done = run_command("bam", "privacy", f"--plan={plans[0]}")
    assert done.returncode == 2 and "is claimed, but its plan gives" in done.stderr
