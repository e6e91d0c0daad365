"""Groups of runs are declared, trained once, and set beside their baseline by seed."""

import json

import pytest

from bam.cli import sweeps
from bam.training import config as base
from bam.training import rundir
from tests.cases import run_command

TINY = ("--config.model.name=linear", "--config.accountant=rdp", "--config.num_steps=2")


def rows_of(folder):
    made = json.loads((folder / "sweep.json").read_text())
    assert made["commit"] and made["versions"]["jax"]
    return {row["label"]: row for row in made["rows"]}


def test_a_sweep_trains_what_is_missing_and_pairs_by_seed_at_equal_settings(tmp_path):
    command = ("bam", "sweep", "--config=digits", "--methods=dp_sgd,bam_sam:0.5",
               "--set=optimizer.learning_rate=0.001,0.01", "--holdout=300",
               f"--workdir={tmp_path}", *TINY)  # fmt: skip
    stopped = run_command(*command, "--num_seeds=1", "--max_seconds=0.001")
    assert stopped.returncode == 3 and "4 runs are not finished" in stopped.stdout
    one = run_command(*command, "--num_seeds=1")
    assert one.returncode == 0, one.stderr
    assert one.stdout.count("% in ") == 4
    rows = rows_of(tmp_path)
    for label, row in rows.items():
        assert row["baseline"] == label.replace("bam_sam:0.5", "dp_sgd")
    best = run_command(*command, "--num_seeds=2", "--best=1")
    assert best.returncode == 0 and best.stdout.count("% in ") == 2  # second seeds of the best
    rows = rows_of(tmp_path)
    assert [label.split(" ")[0] for label in rows] == ["dp_sgd", "bam_sam:0.5"]
    baseline, other = rows.values()
    gains = [a - b for a, b in zip(other["accuracies"], baseline["accuracies"], strict=True)]
    assert other["gain"]["mean"] == pytest.approx(sum(gains) / 2)
    assert other["baseline"] == baseline["label"] and baseline["gain"] is None
    assert baseline["seeds"] == other["seeds"] == [1000, 1001]
    folder = tmp_path / "bam_sam_0.5_optimizer.learning_rate=0.01/seed1000"
    config = json.loads((folder / "config.json").read_text())
    assert (config["method"]["radius"], config["optimizer"]["learning_rate"]) == (0.5, 0.01)
    assert config["dataset"]["holdout"] == 300


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--methods=dp_sgd:1", "dp_sgd takes no strength"),
        ("--methods=", "--methods is required"),
        ("--set=learning_rate=1", "did you mean optimizer.learning_rate?"),
        ("--set=clip_norm", "KEY=VALUE,VALUE is needed"),
        ("--set=clip_norm=much", "clip_norm=much"),
        ("--set=seed=1,2", "by this command itself"),
        ("--config.seed=3", "sets seed itself"),
    ],
)
def test_a_slip_is_one_line_before_any_work(flag, message, tmp_path):
    done = run_command("bam", "sweep", "--config=digits", flag, f"--workdir={tmp_path}/w", *TINY)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "w").exists()


def test_values_have_the_type_of_their_key():
    config = base.get_config("bam_sam")
    for key, text, value in (
        ("clip_norm", "2", 2.0), ("num_steps", "7", 7), ("model.name", "linear", "linear"),
        ("optimizer.learning_rate", "1e-3", 1e-3), ("model.width", "8", 8),
    ):  # fmt: skip
        sweeps.set_key(config, key, text)
        found = rundir.flat(config.to_dict())[key]
        assert found == value and type(found) is type(value)
