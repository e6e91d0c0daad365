"""One command: its help, what it says of a slip, and its exit status."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from PIL import Image

import bam
from bam import extras, files, tables
from bam.cli import command, command_line, main, options, screen
from bam.data import datasets
from bam.models import finetune
from bam.named import call, import_function
from bam.part_table import SECTIONS
from bam.sweep import studies
from bam.sweep.method_config import method_config
from bam.text import SYNONYMS, csv_text
from bam.training import keys, loop, named_configs, schedules
from configs import digits
from tests.cases import heard, run_command, start


def test_without_a_command_all_are_listed_with_an_example(capsys):
    for arguments in ([], ["help"], ["--help"]):
        assert main.main(arguments) == 0
        shown = capsys.readouterr().out
        assert "bam train --config=digits:bam_sam --workdir=" in shown
        assert all(f"\n  {name} " in shown for name in options.COMMANDS)


def test_a_misspelt_command_is_one_line_without_its_arguments(capsys):
    assert main.main(["trian", "--config=digits:bam_sam", "--workdir=w"]) == 2
    assert capsys.readouterr().err == "error: bam has no command 'trian': did you mean train?\n"


@pytest.fixture
def refusal(capsys):
    """What `bam train` says of its arguments, in one line."""

    def said(*arguments):
        assert main.main(["train", *arguments]) == 2
        text = capsys.readouterr().err
        assert text.count("\n") == 1
        return text

    return said


NO_KEY = "error: the config has no key"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config=digts:bam_sam", "there is no config 'digts': did you mean digits?"),
        ("--config=digits:bam", "unknown method 'bam'"),
        ("--config.epsilo=1", f"{NO_KEY} 'epsilo': did you mean epsilon?\n"),
        (
            "--config.optimiser.name=sgd",
            f"{NO_KEY} 'optimiser.name': did you mean optimizer.name?\n",
        ),
        (
            "--config.method.radus=1",
            "error: method bam_sam has no option 'radus': did you mean method.radius? its options: "
            "ascent_params, ascent_views, mix, radius\n",
        ),
        (
            "--config.learning_rate=1",
            f"{NO_KEY} 'learning_rate': did you mean optimizer.learning_rate?\n",
        ),
        ("--config.zzz=1", f"{NO_KEY} 'zzz'\n"),
        ("--config.model=linear", "model is a section of the config"),
        ("--config.epsilon=abc", "--config.epsilon=abc: expected a number"),
    ],
)
def test_a_slip_in_a_config_or_key_is_one_line(flag, message, refusal):
    arguments = [flag] if "=dig" in flag else ["--config=digits:bam_sam", flag]
    assert message in refusal(*arguments)


SIGMA = "did you mean noise_multiplier?"
FIELD = {
    "--config.batch_size=1": "did you mean expected_batch_size?",
    "--config.sample_rate=0.1": "did you mean expected_batch_size, from which q = l/N follows?",
    "--config.ema=0.9": "did you mean ema_decay?",
    "--config.sigma=1": SIGMA,
    "--config.lambda=1": "did you mean method.radius?",
    "--config.method.lambda=1": "did you mean method.radius?",
    "--config.lr=1": "did you mean optimizer.learning_rate?",
    "--config.optimizer.lr=1": "did you mean optimizer.learning_rate?",
    "--config.max_grad_norm=1": "did you mean clip_norm?",
    "--config.l2_norm_clip=1": "did you mean clip_norm?",
    "--config.epochs=1": "did you mean num_epochs?",
    "--config.max_steps=1": "did you mean num_steps?",
    "--config.target_epsilon=1": "did you mean epsilon?",
    "--config.model.arch=vit": "did you mean model.name?",
    "--config.model.name=ResNet-9": "did you mean resnet9?",
    "--batch_size=1": "--batch_size is not a flag: did you mean --config.expected_batch_size?\n",
    "--lr=1": "--lr is not a flag: did you mean --config.optimizer.learning_rate?\n",
}


@pytest.mark.parametrize("flag", list(FIELD))
def test_a_word_of_the_field_gets_the_key_or_value_that_it_means(flag, refusal):
    assert FIELD[flag] in refusal("--config=digits:bam_sam", flag, "--config.dry_run")


@pytest.mark.parametrize("word", ["hf", "huggingface", "Hugging-Face"])
def test_a_source_by_another_name_gets_the_one_that_it_means(word, refusal):
    flags = ["--config=cifar10:dp_sgd", f"--config.dataset.source={word}", "--config.dry_run"]
    assert f"no source '{word}': did you mean parquet? choose from tfds, par" in refusal(*flags)


def test_the_strength_of_a_method_is_the_option_that_the_method_or_others_have(refusal):
    flags = ["--config.method.lambda=1", "--config.dry_run"]
    assert "did you mean method.penalty? its" in refusal("--config=digits:bam_exact", *flags)
    said = refusal("--config=digits:dp_sgd", *flags)
    assert "there is one with --config.method.name=dp_sat or bam_sam or bam_exact\n" in said


def test_a_sweep_gives_the_same_hints(capsys):
    arguments = ["sweep", "--config=digits", "--set=batch_size=1,2", "--workdir=none"]
    assert main.main(arguments) == 2
    assert "did you mean expected_batch_size?\n" in capsys.readouterr().err


def test_every_hint_is_a_key_or_a_value_and_no_key_needs_one():
    values = {*datasets.READERS, *SECTIONS["method"].rows}
    for ours in SYNONYMS:
        name = ours.partition(",")[0]
        assert name in keys.BY_NAME or name in values or _is_option(name), name
    assert not {x for words in SYNONYMS.values() for x in words} & set(keys.BY_NAME)


def _is_option(name):
    section, _, option = name.partition(".")
    rows = SECTIONS[section].rows.values() if section in SECTIONS else ()
    return any(option in row.public_options for row in rows)


def test_what_is_no_config_at_all_is_one_line(tmp_path, refusal):
    file = tmp_path / "mine.py"
    file.write_text("def get_config(method):\n    return None\n")
    assert "is not a config: get_config returns a" in refusal(
        f"--config={file}:a", "--config.epsilon=1"
    )


def test_a_shipped_config_goes_by_its_name_and_a_file_by_its_path():
    file = str(named_configs.shipped_configs()["digits"])
    assert named_configs.file_of("digits:bam_sam") == f"{file}:bam_sam"
    assert named_configs.file_of("digits") == file
    assert named_configs.file_of("configs/digits.py:dp_sgd") == "configs/digits.py:dp_sgd"
    for value in (["--config=digits:dp_sat"], ["--config", f"{file}:dp_sat"]):
        given = flags.FlagValues()
        options.define(given, options.COMMANDS["train"].flags)
        rest = command_line.parse(given, ["a", *value, "--config.epsilon=2"], "bam train")
        assert (rest, given.config.method.name, given.config.epsilon) == (["a"], "dp_sat", 2)
    assert {"base", "cifar10", "imagenet32"} <= named_configs.shipped_configs().keys()


@pytest.mark.thorough
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
    before = named_configs.config_modules()
    done = run_command("bam", "train", f"--config={own}/mine.py:dp_sgd", f"--workdir={tmp_path}/w")
    assert done.returncode == 0, done.stderr
    assert named_configs.config_modules() == before and before["configs.digits"] is digits


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
    with pytest.raises(bam.InputError) as of_sweep:
        method_config(str(file), "dp_sgd", {})
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
    with pytest.raises((ValueError, OSError), match=str(no_config)) as refused:
        finetune.load(str(no_config), "", {})
    assert "private words" not in str(refused.value) and "\n" not in str(refused.value)


def test_no_file_is_put_in_the_place_of_a_device_or_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for write in (lambda: files.check_writable(str(pipe)), lambda: files.write_text(pipe, "")):
        with pytest.raises(PermissionError, match="not a regular file"):
            write()
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


@pytest.mark.parametrize("content", ['{"a": 1}', '["text"]', "no JSON"])
def test_an_audit_does_not_go_on_in_a_file_of_something_else(content, tmp_path):
    file = tmp_path / "out.json"
    file.write_text(content)
    done = run_command("bam", "audit", f"--out={file}", "--trials=100")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and file.read_text() == content


def test_ctrl_c_stops_a_run_with_a_checkpoint_and_the_same_command_goes_on(tmp_path):
    settings = ["--config=digits:dp_sgd", "--config.model.name=linear", "--config.accountant=rdp"]
    settings += ["--config.eval.every=1", "--config.num_steps=100000", f"--workdir={tmp_path}/run"]
    process = start("train", *settings)
    while not process.stdout.readline().startswith("step"):
        assert process.poll() is None, process.stderr.read()
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 3 and not errors
    assert printed.endswith("the same command continues it\n")
    assert list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.thorough
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


@pytest.mark.parametrize("command", list(options.COMMANDS))
def test_asking_for_help_is_no_failure(command):
    done = run_command("bam", command, "--help")
    assert done.returncode == 0 and "--" in done.stdout, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    for flag in options.COMMANDS[command].flags:
        assert f"\n  --{flag.name}=" in done.stdout
    assert all(f"\n  {status} " in done.stdout for status in options.STATUSES)
    if "config" in {flag.name for flag in options.COMMANDS[command].flags}:
        names = {
            *named_configs.shipped_configs(),
            *(name for key in keys.KEYS for name in key.names),
        }
        assert names <= set(re.findall(r"\w+", done.stdout))


def test_help_imports_neither_jax_nor_scipy():
    program = (
        "import sys\n"
        "from bam.cli import main, options\n"
        "for arguments in ([], ['--version'], *([x, '--help'] for x in options.COMMANDS)):\n"
        "    assert main.main(arguments) == 0\n"
        "heavy = {'jax', 'scipy', 'optax', 'flax'}\n"
        "assert not heavy & {*sys.modules}\n"
        "assert main.main(['privacy', '--noise_multiplier=1', '--sampling_prob=1', "
        "'--num_steps=1']) == 0\n"
        "assert heavy & {*sys.modules}\n"  # the control
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_help_has_the_names_of_the_parts_that_there_are():
    tables = {f"{name}.name": section.rows for name, section in SECTIONS.items()}
    tables |= {
        "optimizer.schedule": schedules.SCHEDULES,
        "dataset.name": [*datasets.DATASETS, "folder"],
    }
    assert {key.name: set(key.names) for key in keys.KEYS if key.names} == {
        key: set(names) for key, names in tables.items()
    }


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
    assert stopped.returncode == 3 and "the same command continues it" in stopped.stdout
    done = run_command(*command, f"--workdir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert "training diverged: the test loss is not a finite number" in last


def mistake_of_ones_own():
    raise bam.InputError("there is\nnothing of that kind")


def seen_by_a_compiler():
    jax.jit(lambda x: bam.clip_by_l2_norm(-1.0))(0.0)


def of_bam_inside_of_another_library():
    jax.tree.map(lambda x: import_function("model", x), ["nothing:here"])


def missing_extra():
    raise extras.MissingExtraError("flax is not installed")


@pytest.mark.parametrize(
    "mistake",
    [
        mistake_of_ones_own,
        seen_by_a_compiler,
        of_bam_inside_of_another_library,
        missing_extra,
        lambda: Path("there is no such file").read_text(),
        lambda: bam.clip_by_l2_norm(-1.0),
    ],
)
def test_what_is_wrong_with_what_was_given_is_one_line(mistake, capsys):
    status = command.status_of(mistake)
    said = capsys.readouterr().err
    assert status == 2 and said.startswith("error: ") and said.count("\n") == 1


def test_code_that_catches_value_errors_goes_on_to_work():
    for mistake in (lambda: bam.clip_by_l2_norm(-1.0), lambda: datasets.load("nothing")):
        with pytest.raises(ValueError) as caught:
            mistake()
        assert isinstance(caught.value, bam.InputError)


@pytest.mark.usefixtures("without_the_tests_type_checks")  # which look at one entry at random
@pytest.mark.parametrize(
    ("fault", "is_of_bam"),
    [
        (lambda: int("three"), False),  # of this file
        (lambda: list(zip([1], [], strict=True)), False),
        (lambda: np.zeros(3).reshape(2), False),
        (lambda: json.loads("{"), False),  # inside of a library that this file calls
        (lambda: jnp.concatenate([]), False),
        (lambda: jax.jit(lambda x: x @ x)(np.zeros((2, 3))), False),
        (lambda: csv_text([[1], 2]), True),  # inside of bam
        (lambda: files.write_json(Path("no"), {1}), True),  # inside of a library that bam calls
    ],
)
def test_a_fault_is_not_said_to_be_bad_input_and_says_whose_it_is(fault, is_of_bam, capsys):
    assert command.status_of(fault) == 1
    above, *_, note = capsys.readouterr().err.splitlines()
    assert ("please report it" in note) == is_of_bam
    place = f"a fault of code that is not a part of bam: {__file__}, line "
    assert bool(re.search(re.escape(place) + r"\d+: \w+Error: ", note)) == (not is_of_bam)
    assert above.startswith("Traceback")


def test_a_fault_in_a_command_shows_where_it_is_and_whose_it_is(tmp_path):
    program = (
        "from bam.cli import command\n"
        "from bam.text import csv_text\n"
        "def main():\n"
        "    {}\n"
        "command.run_script(main)\n"
    )
    for fault, kind, told in (
        ("csv_text([[1], 2])", "TypeError: ", "please report it"),
        ("list(zip([1], [], strict=True))", "ValueError: zip()", "not a part of bam"),
    ):
        command = [sys.executable, "-c", program.format(fault)]
        done = subprocess.run(command, capture_output=True, text=True)
        *above, last = done.stderr.strip().splitlines()
        assert done.returncode == 1 and told in last
        assert above[0].startswith("Traceback") and above[-1].startswith(kind)


def test_a_fault_of_a_command_is_shown_and_is_status_1(monkeypatch, capsys):
    def fault(given):
        return len(given.num_steps)

    arguments = ["--noise_multiplier=1", "--sampling_prob=1", "--num_steps=1"]
    assert command.run("privacy", arguments, fault) == 1
    said = capsys.readouterr().err
    assert said.startswith("Traceback") and "has no len()" in said.splitlines()[-2]
    assert "a fault of" in said.splitlines()[-1]


def part_that_raises(kind, **options):
    raise {"value": ValueError, "input": bam.InputError}[kind](f"{kind}: I cannot\nbe built")


@pytest.mark.parametrize("kind", ["value", "input"])
def test_what_a_part_of_ones_own_refuses_is_bad_input_with_its_place(kind):
    with pytest.raises(bam.InputError) as refused:
        call("dataset mine", part_that_raises, kind=kind)
    assert f"{kind}: I cannot" in str(refused.value)
    assert (f"dataset mine: {__file__}, line " in str(refused.value)) == (kind == "value")


# As a function


MISTAKES = {
    "no arguments": (["train"], "--config is required: NAME:METHOD of a shipped config"),
    "an unknown flag": (
        ["train", "--config=digits:dp_sgd", "--wrkdir=w"],
        "--wrkdir is not a flag: did you mean --wo",
    ),
    "a flag twice": (
        ["train", "--config=digits:dp_sgd", "--workdir=v", "--workdir=w"],
        "--workdir is given twice",
    ),
    "a key twice": (
        ["train", "--config=digits:dp_sgd", "--config.epsilon=1", "--config.epsilon=2"],
        "--config.epsilon is given twice",
    ),
    "a key without --config.": (
        ["train", "--config=digits:dp_sgd", "--epsilon=1"],
        "key of the config: write --config.epsilon",
    ),
    "the last part of a key": (
        ["sweep", "--config=digits", "--learning_rate=1"], "write --config.optimizer.learning_rate",
    ),
    "a key without a config": (["train", "--config.epsilon=1"], "name the config first"),
    "a key of a command without a config": (["report", "--config.a=1"], "takes no config"),
    "no word": (["privacy", "--num_steps=many"], "--num_steps=many: expected a whole number"),
    "a surplus word": (["privacy", "surplus"], "'surplus'"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_slip_in_flags_is_one_line_that_says_what_was_meant(mistake, capsys):
    arguments, message = MISTAKES[mistake]
    assert main.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("\n") == 1


def test_a_flag_that_may_come_several_times_may(capsys):
    given = flags.FlagValues()
    options.define(given, options.COMMANDS["sweep"].flags)
    command_line.parse(given, ["--set=clip_norm=1,2", "--set=epsilon=1"], "bam sweep")
    assert given.set == ["clip_norm=1,2", "epsilon=1"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mistake",
    [
        "an unknown flag",
        pytest.param("a flag twice", marks=pytest.mark.thorough),
        pytest.param("a key without --config.", marks=pytest.mark.thorough),
    ],
)
def test_a_process_says_and_ends_as_the_function_does(mistake, capsys):
    arguments, _ = MISTAKES[mistake]
    main.main(arguments)
    said = capsys.readouterr().err
    process = start(*arguments)
    assert process.communicate(timeout=120) == ("", said) and process.returncode == 2


@pytest.mark.thorough
def test_a_command_leaves_nothing_for_the_next(tmp_path, capsys):
    """Twice in one process, with other arguments and another command between: as in two."""
    tiny = ["--config.model.name=linear", "--config.accountant=rdp", "--config.num_steps=3"]
    train = [
        [
            "train",
            f"--config=digits:{method}",
            *tiny,
            f"--config.seed={seed}",
            f"--workdir={folder}",
        ]
        for method, seed, folder in (("dp_sgd", 1, tmp_path / "a"), ("bam_sam", 2, tmp_path / "b"))
    ]
    privacy = [
        ["privacy", f"--noise_multiplier={sigma}", "--sampling_prob=0.5", "--num_steps=2"]
        for sigma in (1, 2)
    ]
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    others = warnings.formatwarning, sys.excepthook, dict(os.environ), list(sys.argv)
    said = {}
    for arguments in (train[0], privacy[0], train[1], privacy[1], ["train"], train[0][:2]):
        status = main.main(arguments)
        said[tuple(arguments)] = status, *capsys.readouterr()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    now = warnings.formatwarning, sys.excepthook, dict(os.environ), list(sys.argv)
    assert now == others
    assert said[tuple(train[0])][0] == 0 and said[tuple(train[0][:2])][0] == 2
    for arguments in (train[1], privacy[1]):
        again = [x.replace("/b", "/c") for x in arguments]
        process = start(*again)
        out, errors = process.communicate(timeout=240)
        here = said[tuple(arguments)]
        shown, there = (
            [
                re.sub(r"[\d.]+ s$|on \d? ?×? ?cpu", "", x)
                for x in text.splitlines()
                if " … " not in x
            ]
            for text in (here[1], out.replace("/c", "/b"))  # without what took three seconds
        )
        assert there == shown
        assert (process.returncode, errors) == (here[0], here[2])


def test_in_a_thread_a_command_leaves_signals_alone(tmp_path, capsys, monkeypatch):
    def asked_to_stop(trainer, seed, workdir, should_stop, **options):
        assert not should_stop()
        raise loop.StoppedError("stopped")

    monkeypatch.setattr(loop, "train", asked_to_stop)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    statuses = []
    command = ["train", "--config=digits:dp_sgd", "--config.model.name=linear"]
    command += ["--config.accountant=rdp", "--config.num_steps=2", f"--workdir={tmp_path}/run"]
    thread = threading.Thread(target=lambda: statuses.append(main.main(command)))
    thread.start()
    thread.join()
    assert statuses == [options.STOPPED], capsys.readouterr().err
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_ctrl_c_in_a_function_ends_it_and_not_the_process(capsys):
    def interrupted(given):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)

    arguments = ["--noise_multiplier=1", "--sampling_prob=1", "--num_steps=1"]
    with heard(signal.SIGINT):
        assert command.run("privacy", arguments, interrupted) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_prose_is_cut_between_words_on_a_terminal_alone(is_terminal, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    command = "  .venv/bin/bam train " + " ".join(f"--config.key{x}=1" for x in range(8))
    texts = f"{studies.LEGEND}\n\nshort  line\n{'x' * 100}\n{command}"
    screen.show(texts)
    printed = capsys.readouterr().out.splitlines()
    if is_terminal:
        assert len(printed[0]) <= 80 and printed[1].startswith("  ")
        assert printed[2:] == ["", "short  line", "x" * 100, command]
        assert " ".join(x.strip() for x in printed[:2]) == studies.LEGEND
    else:
        assert printed == texts.splitlines()


@pytest.mark.parametrize(
    ("width", "shown"),
    [(200, "group ε accuracy p seconds"), (72, "group ε accuracy p"), (63, "group accuracy p")],
)
def test_a_narrow_table_leaves_columns_out_and_cuts_none(width, shown, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    cells = [
        "bam_sam radius=0.05 learning_rate=0.002",
        "3.0",
        "75.42 ± 0.31",
        "0.01",
        "31 of all 90",
    ]
    columns = tables.text("group", "ε", "accuracy", "p", "seconds")
    screen.table(columns, [cells], file=Path("out.md"), always=["accuracy", "p"])
    text = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    header = next(line for line in text.splitlines() if line.strip())
    assert header.split() == shown.split()
    for name, cell in zip(columns, cells, strict=True):
        assert (cell in text) == (name in shown.split())
    left_out = [x for x in columns if x not in shown.split()]
    assert (f"{', '.join(left_out)}: out.md" in text) == bool(left_out)
