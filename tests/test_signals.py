"""Signals end a command at once, or let it finish what the same command continues."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bam.cli import options
from tests.cases import Command, heard

ROOT = Path(__file__).parents[1]
# The hash takes minutes, in which Python calls no handler.
IN_COMPILED_CODE = """
import hashlib
from bam.cli import signals
signals.end_at_interrupts()
print("begins", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""
WITH_A_CHILD = """
import os, signal, time
from bam.cli import signals
signals.end_at_interrupts()
ready, told = os.pipe()
child = os.fork()
if not child:
    os.write(told, b"1")
    time.sleep(600)
os.read(ready, 1)
os.kill(child, signal.SIGTERM)
print(os.waitpid(child, 0)[1])
time.sleep(3 * signals.GRACE)
print("lives")
"""

STOPPED = """
import os, signal, time
from bam.cli import signals
signals.end_at_interrupts()
with signals.put_back(signal.SIGINT, signal.SIGTERM):
    should_stop = signals.stop_after(0)
    os.kill(os.getpid(), signal.{name})
    while not should_stop():
        pass
    time.sleep(signals.GRACE / 5)  # the checkpoint is written
print("says how to continue", flush=True)
time.sleep(3 * signals.GRACE)
raise SystemExit(3)
"""


def python(code, *arguments):
    """A Python of its own, which hears signals as from a terminal."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    with heard(signal.SIGINT, signal.SIGTERM):
        return subprocess.Popen([sys.executable, "-c", code, *arguments], **pipes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_in_one_line_while_compiled_code_runs(number):
    with python(IN_COMPILED_CODE) as process:
        assert process.stdout.readline() == "begins\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (options.INTERRUPTED, "error: interrupted\n")


def test_a_signal_to_a_forked_child_ends_the_child_alone():
    with python(WITH_A_CHILD) as process:
        printed, errors = process.communicate(timeout=60)
    assert printed.split() == [str(int(signal.SIGTERM)), "lives"] and not errors
    assert process.returncode == 0


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_command_that_a_signal_stopped_soon_keeps_its_status(name):
    with python(STOPPED.format(name=name)) as process:
        printed, errors = process.communicate(timeout=60)
    assert (printed, errors) == ("says how to continue\n", "")
    assert process.returncode == options.STOPPED


# A module whose function, named first, takes for ever.
ENDLESS = """
import importlib, runpy, sys, time
def take_for_ever(*given):
    print("takes for ever", flush=True)
    time.sleep(60)
module, name = sys.argv.pop(1).rsplit(".", 1)
setattr(importlib.import_module(module), name, take_for_ever)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def end_within(function, number, *arguments):
    """Sends a signal to a module within a function, checks its end, and returns what it printed."""
    with python(ENDLESS, function, *arguments) as process:
        before = []
        while "takes for ever" not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
            before.append(line)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (options.INTERRUPTED, "error: interrupted\n")
    return before


def test_a_figure_ends_at_sigterm_after_its_training_and_the_same_command_trains_nothing(tmp_path):
    arguments = [
        "scripts.paper.figures", "--figure=6", f"--workdir={tmp_path}/runs",
        f"--out={tmp_path}/out", "--methods=dp_sgd", "--num_seeds=1", "--config=digits",
        "--config.model.name=linear", "--config.accountant=rdp", "--config.num_steps=2",
        "--config.diagnostics.every=0", "--config.eval.every=0",
    ]  # fmt: skip
    measuring = "bam.training.diagnostics.bias_by_batch_size"
    before = end_within(measuring, signal.SIGTERM, *arguments)
    assert any("  dp_sgd/seed0  " in line for line in before)
    with Command(*arguments) as again:
        done = again.wait()
    assert done.returncode == 0, done.stderr
    assert "  dp_sgd/seed0  " not in done.stdout  # it is not trained again
    assert (tmp_path / "out/figure6.png").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_bam_train_at_once_while_it_maps_images_to_features(number, tmp_path):
    arguments = [
        "bam", "train", "--config=digits:dp_sgd", f"--workdir={tmp_path}/run",
        "--config.model.name=linear", "--config.accountant=rdp", "--config.num_steps=2",
        "--config.features.name=scattering", "--config.features.groups=9",
    ]  # fmt: skip
    end_within("bam.features.extraction.extract", number, *arguments)
    assert not (tmp_path / "run").exists()


# The child tells this process to end, and would then sleep.
PIECE = """
import sys
from scripts.benchmarks import accelerator
accelerator._WORKDIR = type("Flag", (), {"value": sys.argv[1]})
end, ended = accelerator._end, []
accelerator._end = lambda process: (end(process), ended.append(process))
code = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)"
try:
    accelerator.run(accelerator.Piece("piece", ["-c", code]), 300.0)
except KeyboardInterrupt:
    print(ended[0].returncode)
"""


def test_the_accelerators_script_ends_its_piece_at_sigterm(tmp_path):
    with heard(signal.SIGINT, signal.SIGTERM):
        done = subprocess.run(
            [sys.executable, "-c", PIECE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True,
            timeout=200,
        )  # fmt: skip
    assert done.stdout.split() == [str(-signal.SIGTERM)], done.stderr
