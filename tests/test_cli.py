"""One command: its help, what it says of a slip, and its exit status."""

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
from absl import flags
from ml_collections import config_flags
from PIL import Image

import bam
from bam import files
from bam.cli import configs, console, main, sweeps
from bam.named import imported
from bam.training import loop
from configs import digits
from tests.cases import run_command


def test_without_a_command_all_are_listed_with_an_example(capsys, monkeypatch):
    for arguments in ([], ["help"], ["--help"]):
        monkeypatch.setattr(sys, "argv", ["bam", *arguments])
        main.main()
        shown = capsys.readouterr().out
        assert "bam train --config=digits:bam_sam --workdir=" in shown
        assert all(f"\n  {name} " in shown for name in main.COMMANDS)


def test_a_misspelt_command_is_one_line_without_its_arguments(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bam", "trian", "--config=digits:bam_sam", "--workdir=w"])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: bam has no command 'trian': did you mean train?\n"


@pytest.fixture
def refusal(monkeypatch, capsys):
    """What a command that takes `--config` says of its arguments, in one line."""

    def said(*arguments):
        given, argv = flags.FlagValues(), ["command", *arguments]
        config_flags.DEFINE_config_file("config", flag_values=given)
        monkeypatch.setattr(flags, "FLAGS", given)
        with pytest.raises(SystemExit) as ended, console.one_line_errors():
            argv[1:], file = configs.with_files(arguments)
            monkeypatch.setattr(sys, "argv", argv)
            console._parse_flags(file, argv)
        text = capsys.readouterr().err
        assert ended.value.code == 2 and text.count("\n") == 1
        return text

    return said


NO_KEY = "error: the config has no key"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config=digts:bam_sam", "there is no config 'digts': did you mean digits?"),
        ("--config=digits:bam", "unknown method 'bam'"),
        ("--config.epsilo=1", f"{NO_KEY} 'epsilo': did you mean epsilon?\n"),
        ("--config.optimiser.name=sgd", f"{NO_KEY} 'optimiser': did you mean optimizer?\n"),
        ("--config.method.radus=1", f"{NO_KEY} 'radus': did you mean radius?\n"),
        ("--config.learning_rate=1", f"{NO_KEY} 'learning_rate'\n"),
    ],
)
def test_a_slip_in_a_config_or_key_is_one_line(flag, message, refusal):
    arguments = [flag] if "=dig" in flag else ["--config=digits:bam_sam", flag]
    assert message in refusal(*arguments)


def test_what_is_no_config_at_all_is_one_line(tmp_path, refusal):
    file = tmp_path / "mine.py"
    file.write_text("def get_config(method):\n    return None\n")
    assert "the config file makes no config" in refusal(f"--config={file}:a", "--config.epsilon=1")


def test_a_shipped_config_goes_by_its_name_and_a_file_by_its_path():
    file = str(configs.shipped()["digits"])
    named = configs.with_files(["a", "--config=digits:bam_sam"])
    assert named == (["a", f"--config={file}:bam_sam"], file)
    assert configs.with_files(["--config", "digits"]) == (["--config", file], file)
    kept = ["--config=configs/digits.py:dp_sgd", "--config.model.name=linear", "--workdir=digits"]
    assert configs.with_files(kept) == (kept, "configs/digits.py")
    assert {"base", "cifar10", "imagenet32"} <= configs.shipped().keys()


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
        (
            "from bam.training import config\ndef get_config(method):\n"
            "    made = config.get_config(method)\n    made.epsilo = 1\n",
            4,
            '"epsilo" does not exist',
        ),
    ],
)
def test_a_mistake_in_a_config_file_is_one_line_with_its_place(
    text, line, message, tmp_path, refusal
):
    file = tmp_path / "mine.py"
    file.write_text(text.replace("(method)", "(method='dp_sgd')"))
    said = refusal(f"--config={file}:dp_sgd")
    assert said.startswith(f"error: {file}, line {line}: ") and message in said
    assert "private words" not in said and len(said) < 300 + len(str(file))
    with pytest.raises(ValueError) as of_sweep:
        sweeps.load(str(file), "dp_sgd", {})
    assert str(of_sweep.value).startswith(f"{file}, line {line}: ")


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


def test_what_is_no_config_file_is_named_and_not_read(no_config, refusal):
    python = no_config.with_suffix(".py")
    if no_config.exists() and not no_config.is_file():
        python.symlink_to(no_config)
    for file in (no_config, python):
        said = refusal(f"--config={file}:dp_sgd")
        assert str(file) in said and "private words" not in said


def test_weights_that_are_no_ordinary_file_are_one_line(no_config):
    config = digits.get_config("dp_sgd")
    config.init_from = str(no_config)
    with pytest.raises((ValueError, OSError), match=str(no_config)) as refused:
        loop.build(config)
    assert "private words" not in str(refused.value) and "\n" not in str(refused.value)


def test_no_file_is_put_in_the_place_of_a_device_or_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for write in (lambda: console.check_writable(str(pipe)), lambda: files.write_text(pipe, "")):
        with pytest.raises(PermissionError, match="no ordinary file"):
            write()
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
    Image.new("L", (11_000, 11_000)).save(tmp_path / "large.png")
    for folder in ("A", "B"):
        (tmp_path / "images" / folder).mkdir(parents=True)
        for number in range(99):  # decoding takes far longer than this test
            os.link(tmp_path / "large.png", tmp_path / "images" / folder / f"{number}.png")
    process = start("data", "import", f"{tmp_path}/images", f"--out={tmp_path}/out")
    while not (tmp_path / "out").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    time.sleep(1)  # all threads decode now
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


def test_a_stopped_run_has_an_exit_status_of_its_own_and_one_that_diverges_ends_well(tmp_path):
    settings = ("--config=digits:dp_sgd", "--config.model.name=linear", "--config.num_steps=3")
    huge = ("--config.optimizer.name=sgd", "--config.optimizer.learning_rate=1e38")
    command = ("bam", "train", *settings, *huge, "--config.accountant=rdp")
    stopped = run_command(*command, f"--workdir={tmp_path}/run", "--max_seconds=0.001")
    assert stopped.returncode == 3 and "the same command goes on" in stopped.stdout
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
