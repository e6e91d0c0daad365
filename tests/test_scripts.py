"""The commands, as a user runs them."""

import json
import re
from pathlib import Path

from bam.training import config as base
from tests.cases import Command, run_command

ROOT = Path(__file__).parents[1]
DEMO = json.loads((ROOT / "docs/demo/sweep.json").read_text())


def test_with_debug_an_error_shows_its_traceback_and_then_its_line(tmp_path):
    command = ("bam", "train", "--config=configs/digits.py:dp_sgd", "--config.epsilo=3")
    done = run_command(*command, "--debug", f"--workdir={tmp_path}/run")
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    trace, _, last = done.stderr.rpartition("error: ")
    assert trace.startswith("Traceback") and "in parse\n" in trace
    assert "no key 'epsilo'" in last and last.count("\n") == 1


def test_a_required_flag_that_is_missing_or_empty_is_one_line_that_says_what_it_is():
    for command, message in (
        (("bam", "sweep", "--workdir=w"), "--config is required: configs/NAME.py"),
        (("bam", "export", "--out="), "--workdir is required: folder"),
    ):
        done = run_command(*command)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1


def test_every_method_of_the_base_config_exists():
    for method in base.METHODS:
        assert base.get_config(method).method.name == method


def settings_of(rows):
    """Label -> method, C and learning rate of the demo's rows."""
    configs = {row["label"]: row["config"] for row in rows}
    return {
        label: (config["method"], config["clip_norm"], config["optimizer"]["learning_rate"])
        for label, config in configs.items()
    }


def test_the_demo_trains_what_its_search_chose_in_the_home_folder(tmp_path):
    """Shells leave `~` as it is after "=": it is no folder of that name."""
    with Command(
        "scripts.demo", "--workdir=~/demo", "--num_seeds=1", "--config.num_steps=2",
        "--config.accountant=rdp", "--config.diagnostics.every=1",
        "--config.diagnostics.num_examples=32", HOME=str(tmp_path),
    ) as command:  # fmt: skip
        done = command.wait()
    tmp_path /= "demo"
    assert done.returncode == 0 and not Path("~").exists(), done.stderr
    assert f"picture: {tmp_path / 'sweep.png'}" in done.stdout.splitlines()[-1]
    assert (tmp_path / "sweep.png").stat().st_size > 20_000
    trained = settings_of(json.loads((tmp_path / "sweep.json").read_text())["rows"])
    assert trained == settings_of(DEMO["rows"])
    reported = re.search(r"bam report --workdir=runs/demo/(\S+)", (ROOT / "Makefile").read_text())
    assert (tmp_path / reported.group(1) / "summary.json").exists()
