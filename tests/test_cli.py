"""One command: its help, its completion, what it says of a slip, and its exit status."""

import subprocess
import sys

import pytest

from bam.cli import configs, main
from tests.cases import run_command


def test_without_a_command_all_are_listed_with_an_example(capsys, monkeypatch):
    for arguments in ([], ["help"], ["--help"]):
        monkeypatch.setattr(sys, "argv", ["bam", *arguments])
        main.main()
        shown = capsys.readouterr().out
        assert "bam train --config=digits:bam_sam --workdir=" in shown
        assert all(f"\n  {name} " in shown for name in main.COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "bam has no command 'trian': did you mean train?"),
        (["completion", "tcsh"], "bam has no command 'completion tcsh'"),
    ],
)
def test_an_unknown_command_is_one_line_and_exit_status_2(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bam", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and message in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config=digts:bam_sam", "there is no config 'digts': did you mean digits?"),
        ("--config=digits:bam", "unknown method 'bam'"),
    ],
)
def test_a_slip_in_a_configs_name_is_one_line(flag, message):
    done = run_command("bam", "train", flag, "--workdir=w")
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("key", "near"), [("learning_rate", "optimizer.learning_rate"), ("epsilo", "epsilon")]
)
def test_a_misspelt_key_names_the_nearest(key, near):
    done = run_command("bam", "train", "--config=digits:dp_sgd", f"--config.{key}=1")
    assert done.returncode == 2
    assert done.stderr == f"error: the config has no key {key!r}: did you mean {near}?\n"


def test_a_run_that_is_stopped_has_an_exit_status_of_its_own_and_goes_on(tmp_path):
    settings = ("--config=digits:dp_sgd", "--config.model.name=linear", "--config.num_steps=3")
    command = ("bam", "train", *settings, "--config.accountant=rdp", f"--workdir={tmp_path}/run")
    stopped = run_command(*command, "--max_seconds=0.001")
    assert stopped.returncode == 3 and "the same command goes on" in stopped.stdout
    assert run_command(*command).returncode == 0


def test_a_shipped_config_goes_by_its_name_and_a_file_by_its_path():
    digits = str(configs.shipped()["digits"])
    assert configs.with_files(["a", "--config=digits:bam_sam"]) == [
        "a",
        f"--config={digits}:bam_sam",
    ]
    assert configs.with_files(["--config", "digits"]) == ["--config", digits]
    kept = ["--config=configs/digits.py:dp_sgd", "--config.model.name=linear", "--workdir=digits"]
    assert configs.with_files(kept) == kept
    assert {"base", "cifar10", "imagenet32"} <= configs.shipped().keys()


def test_a_shell_completes_commands_flags_and_configs():
    assert main.words([]) == list(main.COMMANDS)
    assert {"--config=", "--workdir=", "--max_seconds="} <= set(main.words(["train"]))
    assert "digits" in main.words(["train", "--config", "="])
    assert main.words(["nothing"]) == []
    for script in main.COMPLETION.values():
        assert "bam completion words" in script
    checked = subprocess.run(["bash", "-n"], input=main.COMPLETION["bash"], text=True)
    assert checked.returncode == 0


@pytest.mark.parametrize("folder", ["", "configs"])
def test_a_config_file_of_ones_own_builds_on_shipped_ones_or_on_those_beside_it(folder, tmp_path):
    own = tmp_path / folder
    own.mkdir(exist_ok=True)
    if folder:
        (own / "__init__.py").write_text("")
        (own / "digits.py").write_text(
            "from bam.training import config\nget_config = config.get_config\n"
        )
    (own / "mine.py").write_text(
        "from configs import digits\n\n\n"
        "def get_config(method):\n"
        "    config = digits.get_config(method)\n"
        "    config.dataset.name, config.dry_run = 'digits', True\n"
        "    config.expected_batch_size, config.model.name = 64, 'linear'\n"
        "    return config\n"
    )
    done = run_command("bam", "train", f"--config={own}/mine.py:dp_sgd", f"--workdir={tmp_path}/w")
    assert done.returncode == 0, done.stderr
