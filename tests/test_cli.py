"""One command: its help, its completion, what it says of a slip, and its exit status."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bam
from bam import files
from bam.cli import configs, console, main
from bam.named import imported
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


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("def get_config(method):\n    return (\n", 2, "'(' was never closed"),
        ("import no_such_module\n", 1, "No module named 'no_such_module'"),
        ("x = 1\ny = undefined\n", 2, "name 'undefined' is not defined"),
        ("def get_config(method):\n    return 1 / 0\n", 2, "ZeroDivisionError"),
        ("def get_config(method):\n    raise ValueError('my own')\n", 2, "my own"),
        ("def get_config(method):\n    return len(5)\n", 2, "has no len()"),
        ("def get_config(method):\n    return open('no such file')\n", 2, "No such file"),
        ("private words of somebody\nand more\n", 1, "invalid syntax"),
        ("x = '\0'\n", 1, "null bytes"),
    ],
)
@pytest.mark.parametrize("command", ["train", "sweep"])
def test_a_mistake_in_a_config_file_is_one_line_with_its_place(
    command, text, line, message, tmp_path
):
    file = tmp_path / "mine.py"
    file.write_text(text.replace("(method)", "(method='dp_sgd')"))
    flag = f"--config={file}:dp_sgd" if command == "train" else f"--config={file}"
    done = run_command("bam", command, flag, f"--workdir={tmp_path}/w")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {file}, line {line}: ") and message in done.stderr
    assert "private words" not in done.stderr and not (tmp_path / "w").exists()


def test_a_locked_key_that_a_config_file_sets_is_one_line_with_its_place(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from bam.training import config\n\n\n"
        "def get_config(method):\n"
        "    made = config.get_config(method)\n"
        "    made.epsilo = 1\n"
        "    return made\n"
    )
    done = run_command("bam", "train", f"--config={file}:dp_sgd", "--workdir=w")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"{file}, line 6: " in done.stderr and '"epsilo" does not exist' in done.stderr
    assert len(done.stderr) < 300 + len(str(file))


@pytest.fixture(params=["a pipe", "a folder", "a text", "nothing", "a large file"])
def no_config(request, tmp_path):
    file = tmp_path / "input"
    if request.param == "a pipe":  # reading it would wait for ever, as a device has no end
        os.mkfifo(file)
    elif request.param == "a folder":
        file.mkdir()
    elif request.param == "a text":
        file.write_text("private words of somebody\n")
    elif request.param == "a large file":
        with file.open("wb") as opened:
            opened.truncate(2**38)  # all of it a hole
    return file


@pytest.mark.parametrize("command", ["train", "sweep", "hardware", "audit"])
def test_what_is_no_config_file_is_one_line_and_is_not_read(command, no_config):
    python = no_config.with_suffix(".py")
    if no_config.exists() and not no_config.is_file():
        python.symlink_to(no_config)
    for file in (no_config, python):
        done = run_command("bam", command, f"--config={file}:dp_sgd", "--workdir=w", timeout=60)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert str(file) in done.stderr and "private words" not in done.stderr


def test_weights_that_are_no_ordinary_file_are_one_line(no_config):
    done = run_command(
        "bam",
        "train",
        "--config=digits:dp_sgd",
        "--config.dry_run",
        f"--config.init_from={no_config}",
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert str(no_config) in done.stderr and "private words" not in done.stderr


def test_no_file_is_put_in_the_place_of_a_device_or_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    settings = ("--noise_multiplier=1", "--sampling_prob=0.1", "--num_steps=3")
    done = run_command("bam", "privacy", *settings, f"--json={pipe}")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == f"error: {pipe} cannot be written: it is no ordinary file\n"
    with pytest.raises(PermissionError, match="no ordinary file"):
        files.write_text(pipe, "")
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


@pytest.mark.parametrize("content", ['{"a": 1}', '["text"]', "no JSON"])
def test_an_audit_does_not_go_on_in_a_file_of_something_else(content, tmp_path):
    file = tmp_path / "out.json"
    file.write_text(content)
    done = run_command("bam", "audit", f"--out={file}", "--trials=100")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and file.read_text() == content


def start(*arguments):
    """A process of its own: an interrupt reaches it as it would from a keyboard."""
    command = [sys.executable, "-m", "bam", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_stops_a_run_with_a_checkpoint_and_the_same_command_goes_on(tmp_path):
    settings = ["--config=digits:dp_sgd", "--config.model.name=linear", "--config.accountant=rdp"]
    settings += ["--config.eval.every=1", "--config.num_steps=100000", f"--workdir={tmp_path}/run"]
    process = start("train", *settings)
    while not process.stdout.readline().startswith("step"):
        assert process.poll() is None, process.stderr.read()
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 3 and not errors
    assert printed.endswith("the same command goes on from there\n")
    assert list((tmp_path / "run" / "checkpoints").iterdir())


def test_ctrl_c_ends_every_other_command_in_one_line(tmp_path):
    for folder in ("A", "B"):
        (tmp_path / "images" / folder).mkdir(parents=True)
        for number in range(2):
            os.mkfifo(tmp_path / "images" / folder / f"{number}.png")  # decoding waits for ever
    process = start("data", "import", f"{tmp_path}/images", f"--out={tmp_path}/out")
    while not (tmp_path / "out").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    time.sleep(1)  # all threads wait for the pipes now
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and errors == "error: interrupted\n"


@pytest.mark.parametrize("command", list(main.COMMANDS))
def test_asking_for_help_is_no_failure(command):
    done = run_command("bam", command, "--help")
    assert done.returncode == 0 and "--" in done.stdout, done.stderr


@pytest.mark.parametrize("arguments", [("--help",), ("privacy", "--help")])
def test_a_reader_that_leaves_is_no_traceback(arguments):
    process = start(*arguments)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() in (0, 141)


def test_a_misspelt_command_is_quoted_without_its_arguments(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bam", "trian", "--config=digits:bam_sam", "--workdir=w"])
    with pytest.raises(SystemExit):
        main.main()
    assert capsys.readouterr().err == "error: bam has no command 'trian': did you mean train?\n"


def test_a_run_that_diverges_says_so_and_ends_well(tmp_path):
    settings = ("--config=digits:dp_sgd", "--config.model.name=linear", "--config.num_steps=3")
    huge = ("--config.optimizer.name=sgd", "--config.optimizer.learning_rate=1e38")
    command = ("bam", "train", *settings, *huge, "--config.accountant=rdp")
    done = run_command(*command, f"--workdir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert "training diverged: the test loss is not a finite number" in last


def own_mistake():
    raise ValueError("there is\nnothing of that kind")


def seen_by_a_compiler():
    jax.jit(lambda x: bam.clip_by_l2_norm(-1.0))(0.0)


def of_bam_inside_of_another_library():
    jax.tree.map(lambda x: imported("model", x), ["nothing:here"])


@pytest.mark.parametrize(
    "mistake",
    [
        own_mistake,  # of a user's own code
        seen_by_a_compiler,
        of_bam_inside_of_another_library,
        lambda: Path("there is no such file").read_text(),
        lambda: bam.clip_by_l2_norm(-1.0),
    ],
)
def test_what_is_wrong_with_what_was_given_is_one_line(mistake, capsys):
    with pytest.raises(SystemExit) as ended, console.one_line_errors():
        mistake()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    "fault",
    [
        lambda: int("three"),
        lambda: list(zip([1], [], strict=True)),
        lambda: np.zeros(3) + np.zeros(4),
        lambda: jnp.concatenate([]),
        lambda: jax.jit(lambda x: jnp.stack([x, x[:2]]))(jnp.zeros(3)),
        lambda: json.loads("{"),
        lambda: np.zeros(3).reshape(2),
    ],
)
def test_a_fault_of_the_program_is_not_said_to_be_bad_input(fault, capsys):
    with pytest.raises(ValueError) as raised, console.one_line_errors():
        fault()
    assert "please report it" in raised.value.__notes__[-1]
    assert capsys.readouterr().err == ""


def test_a_fault_in_a_command_shows_where_it_is_and_asks_for_a_report(tmp_path):
    program = (
        "from bam.cli import console\n"
        "def main():\n"
        "    with console.one_line_errors():\n"
        "        list(zip([1], [], strict=True))\n"
        "console.run(main)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    *above, last = done.stderr.strip().splitlines()
    assert done.returncode == 1 and "please report it" in last
    assert above[0].startswith("Traceback") and above[-1].startswith("ValueError: zip()")
