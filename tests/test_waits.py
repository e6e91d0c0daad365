"""What takes a while is said, in a line that ends in what came of it."""

import io
import os
import re
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bam import waits
from bam.audit import canary, one_run
from bam.cli import audit, command, main, options, screen
from bam.data import datasets
from bam.errors import InputError
from bam.features import extraction
from bam.sweep import studies
from bam.training import loading, loop
from tests import runs, test_one_run
from tests.cases import forget_data, run_command

AT_ONCE = 0.0


class Screen:
    """A log that keeps what it is told, as a file has it or a terminal."""

    def __init__(self, in_place=False):
        self.in_place, self.drawn, self.said = in_place, [], []

    def __call__(self, line):
        self.said.append(line)

    def draw(self, line):
        self.drawn.append(line)

    def draws_in_place(self):
        return self.in_place


@pytest.fixture
def at_once(monkeypatch):
    """However short a wait is, it is said, once the thread that says so runs."""
    for name in ("KEEP_AFTER", "DRAW_AFTER"):
        monkeypatch.setattr(waits, name, AT_ONCE)
    monkeypatch.setattr(waits, "REDRAW_EVERY", 0.01)
    thread = waits.threading.Thread

    class Prompt(thread):
        def start(self):
            super().start()
            time.sleep(0.05)

    monkeypatch.setattr(waits.threading, "Thread", Prompt)


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def rows(self):
        """What is to be read on it."""
        rows = [""]
        for text in self.getvalue().split("\n"):
            for part in text.split("\r\x1b[K"):
                rows[-1] = part if part != text else text
            rows.append("")
        return [row for row in rows if row]


class File(io.StringIO):
    def rows(self):
        return self.getvalue().splitlines()


def output(patch, kind):
    """Standard output from now on: pytest sets its own before each test."""
    patch.setenv("TERM", "xterm")
    patch.setenv("COLUMNS", "80")
    patch.setattr(sys, "stdout", kind())
    return sys.stdout


def without_seconds(rows):
    return [re.sub(r"[0-9.]+ s(?=,|$)", "N s", row) for row in rows]


def test_a_file_has_one_line_which_begins_while_it_lasts(at_once, monkeypatch):
    file = output(monkeypatch, File)
    with waits.awaited(screen.show, "reading"):
        assert file.getvalue() == "reading …"
    assert without_seconds([file.getvalue()[:-1]]) == ["reading … N s"]
    assert file.getvalue().endswith(" s\n")


@pytest.mark.parametrize("kind", [File, Terminal])
def test_what_is_short_leaves_no_line(monkeypatch, kind):
    monkeypatch.setattr(waits, "KEEP_AFTER", 60.0)
    monkeypatch.setattr(waits, "DRAW_AFTER", AT_ONCE)
    out = output(monkeypatch, kind)
    with waits.awaited(screen.show, "reading"):
        time.sleep(0.1)
        assert out.rows() == ["reading …"] * (kind is Terminal)  # it goes
    assert not out.rows()
    screen.say("done")
    assert out.rows() == ["done"]


def test_a_terminal_has_a_bar_in_place_and_then_the_end(at_once, monkeypatch):
    terminal = output(monkeypatch, Terminal)
    with waits.awaited(screen.show, "judging") as wait:
        for wait.share, bar in (
            (0.25, "━━━━━─────────────── 25%"),
            (0.5, "━━━━━━━━━━────────── 50%"),
        ):
            time.sleep(0.2)
            assert terminal.rows() == [f"judging … {bar}"]
    assert without_seconds(terminal.rows()) == ["judging … N s"]


def test_a_line_is_never_wider_than_the_terminal(at_once, monkeypatch):
    terminal = output(monkeypatch, Terminal)
    with waits.awaited(screen.show, "x" * 200):
        assert [len(row) for row in terminal.rows()] == [79]


def test_an_estimate_is_a_bar_which_does_not_end_before_its_time():
    wait = waits.Wait("step 2 of 9", about=100.0)
    wait.began -= 25
    assert wait.progress() == "step 2 of 9, about 100 s … ━━━━━─────────────── 25%"
    wait.began -= 975
    assert wait.progress().endswith(" 99%")
    assert wait.end() == "step 2 of 9, about 100 s … 17 min"
    assert len(wait.progress()) <= 80


@pytest.mark.parametrize("kind", [File, Terminal])
def test_other_lines_stand_by_themselves(at_once, monkeypatch, kind):
    out = output(monkeypatch, kind)
    monkeypatch.setattr(waits, "REDRAW_EVERY", 60.0)
    with waits.awaited(screen.show, "reading"):
        screen.say("are held in memory")
    begun = ["reading …"] * (kind is File)
    assert without_seconds(out.rows()) == [*begun, "are held in memory", "reading … N s"]


def test_an_error_has_a_line_of_its_own_and_the_wait_no_end(at_once, monkeypatch):
    file = output(monkeypatch, File)
    monkeypatch.setattr(sys, "stderr", file)

    def fails():
        with waits.awaited(screen.show, "reading"):
            raise InputError("no such thing")

    assert command.status_of(fails) == 2
    assert file.rows() == ["reading …", "error: no such thing"]


def test_a_warning_has_a_line_of_its_own(at_once, monkeypatch):
    file = output(monkeypatch, File)
    with warnings.catch_warnings(), waits.awaited(screen.show, "reading"), command._put_back():
        file.write(warnings.formatwarning("odd", UserWarning, __file__, 1))  # as Python does
    assert without_seconds(file.rows()) == ["reading …", "warning: odd", "reading … N s"]


def test_that_nobody_reads_is_no_fault_of_the_thread(at_once, monkeypatch, capsys):
    class Closed(File):
        def write(self, text):
            raise BrokenPipeError

    output(monkeypatch, Closed)

    def reads():
        with waits.awaited(screen.show, "reading"):
            pass

    assert command.status_of(reads) == options.UNREAD
    assert capsys.readouterr().err == ""


def test_a_log_that_cannot_draw_hears_of_no_wait(at_once):
    said, screen = [], Screen()
    for log in (said.append, screen):
        with waits.awaited(log, "reading"):
            pass
    assert said == [] and screen.drawn == ["reading …"] and len(screen.said) == 1


HIT, MISS = waits._EVENTS


@pytest.mark.parametrize(
    ("events", "end"),
    [
        ((), " s"),
        ((HIT,), " s, from the cache"),
        ((HIT, MISS), " s, kept in the cache"),
        (("/jax/other",), " s"),
    ],
)
def test_the_end_says_whether_the_cache_has_the_program(at_once, events, end):
    screen = Screen()
    with waits.compiling(screen, "the step"):
        for event in events:
            jax.monitoring.record_event(event)
    assert screen.drawn == ["compiling the step …"] and screen.said[0].endswith(end)


def test_jax_tells_of_its_cache_on_disk(at_once, monkeypatch):
    name = "jax_persistent_cache_min_compile_time_secs"
    before, number, screen = getattr(jax.config, name), os.urandom(4).hex(), Screen()
    jax.config.update(name, 0.0)
    try:
        for _ in range(2):  # the same program of two functions
            with waits.compiling(screen, "it"):
                jax.jit(lambda x: x * (int(number, 16) / 2**32) + 1.0)(jnp.ones(3))
    finally:
        jax.config.update(name, before)
    assert [x.partition(", ")[2] for x in screen.said] == ["kept in the cache", "from the cache"]


def lines(screen):
    """What was said, without its seconds."""
    return [line.partition(" …")[0] for line in screen.said]


def test_a_run_says_that_it_compiles_judges_and_measures(at_once):
    screen = Screen()
    trainer = loop.build(runs.tiny(**{"diagnostics.every": 3}), runs.own_data())
    loop.train(trainer, 0, log=screen)
    assert lines(screen) == [
        *("compiling the step", "measuring the clipping bias", "step 1 of 3"),
        *("evaluating 37 test images", "measuring the clipping bias"),
    ]
    assert max(map(len, screen.said)) <= 80


def test_an_audit_of_one_run_says_that_its_first_step_compiles(at_once):
    screen = Screen()
    one_run.run(test_one_run.built(), test_one_run.NUM_CANARIES, 0, log=screen)
    assert lines(screen).count("compiling the step") == 2  # nothing ahead, and then the step
    assert lines(screen)[1:3] == ["compiling the step", "step 1 of 3"]


def test_a_step_is_announced_if_those_before_were_long(at_once, monkeypatch):
    def said(long):
        monkeypatch.setattr(loop, "LONG", long)
        screen = Screen(in_place=True)
        loop.train(runs.trainer(), 0, log=screen)
        return [x for x in screen.drawn if x.startswith("step")], screen.said

    drawn, kept = said(0.0)
    assert {x.partition(",")[0].partition(" …")[0] for x in drawn} == {
        f"step {n} of 3" for n in (1, 2, 3)
    }
    assert all("about" in x for x in drawn if x.startswith("step 2"))
    assert not [x for x in kept if x.startswith("step")]  # a terminal needs them no more
    drawn, _ = said(60.0)  # the control: of the first nothing was known
    assert {x.partition(" …")[0] for x in drawn} == {"step 1 of 3"}


def test_the_plan_is_known_before_images_are_mapped(monkeypatch):
    forget_data()
    happened = []
    extract = extraction.extract
    monkeypatch.setattr(
        extraction, "extract", lambda *args: happened.append("mapped") or extract(*args)
    )
    config = runs.digits.get_config("dp_sgd")
    config.update({"accountant": "rdp", "num_steps": 3, "expected_batch_size": 20})
    config.features.update({"name": "scattering", "groups": 9})
    config.model.name, config.dataset.holdout = "linear", 37
    built = loop.build(config)
    assert not happened and built.plan.num_examples == 1400 and built.num_params
    blank = built.listing.train.images
    assert not np.any(blank) and not any(blank.strides)  # they take no memory
    mapped = built.dataset.train.images
    assert happened == ["mapped"] and np.any(mapped) and mapped.shape == blank.shape
    again = loop.build(config)
    assert again.dataset is built.dataset and happened == ["mapped"]


def test_blank_rows_take_no_memory():
    blank, rows = np.broadcast_to(np.float16(0), (5, 2, 1)), np.array([[0, 3], [4, 4]])
    selected = datasets.select(blank, rows)
    assert selected.shape == blank[rows].shape == (2, 2, 2, 1) and not any(selected.strides)
    np.testing.assert_array_equal(selected, blank[rows])
    assert any(datasets.select(np.zeros((5, 2, 1)), rows).strides)  # the control


def test_mapping_says_about_how_long(at_once, monkeypatch):
    monkeypatch.setattr(extraction, "CHUNK", 32)
    screen, data = Screen(), runs.own_data()
    extraction.extract(data, lambda x: x + 1.0, {}, log=screen)
    assert lines(screen) == ["compiling the feature map"] + [
        f"computing features of {n} images, about 0.0 s" for n in (60, 37)
    ]


def test_reading_is_said(at_once):
    forget_data()
    screen = Screen()
    loading.make_dataset(runs.digits.get_config().dataset, log=screen)
    assert lines(screen) == ["reading digits"]
    loading.make_dataset(runs.digits.get_config().dataset, log=screen)
    assert lines(screen) == ["reading digits"]  # the control: it was kept


def test_an_audit_says_what_it_runs(at_once, monkeypatch):
    drawn = Screen()
    config = audit.config_of("dp_sgd", 2, 1, 3.0)
    quiet = canary.scores(config, 8, 2)
    told = canary.scores(config, 8, 2, log=drawn)
    assert lines(drawn) == ["4 runs, half of them with the canary"]
    np.testing.assert_array_equal(quiet, told)
    monkeypatch.setattr(screen, "show", drawn)
    monkeypatch.setattr(audit.whole_run, "audit", lambda trainer: {})
    audit.whole_run_p_values("dp_sgd", 3.0)
    assert lines(drawn)[1:] == ["the noise and batches of 3 runs of 120 steps"]


def test_commands_say_what_is_awaited(at_once, tmp_path_factory, tmp_path):
    runs.copy(tmp_path_factory, "unseeded", tmp_path / "run")
    for name, line in {
        "report": "drawing the figures … ",
        "export": "writing the release … ",
    }.items():
        flags = [f"--out={tmp_path / 'release'}"] if name == "export" else []
        done = run_command("bam", name, f"--workdir={tmp_path / 'run'}", *flags)
        assert done.returncode == 0 and done.stdout.startswith(line), done.stderr


@pytest.mark.parametrize("kind", [File, Terminal])
def test_the_imports_of_a_command_have_a_line_on_a_terminal_alone(at_once, monkeypatch, kind):
    monkeypatch.delitem(sys.modules, "bam.cli.report", raising=False)
    module = types.ModuleType("report")
    module.main = lambda argv: 0
    monkeypatch.setattr(main.importlib, "import_module", lambda name: module)
    out = output(monkeypatch, kind)
    assert main.main(["report"]) == 0
    assert without_seconds(out.rows()) == ["loading bam … N s"] * (kind is Terminal)


def test_a_wait_is_named_after_its_run_beside_the_bar_of_many_runs(at_once):
    said, beside = [], []
    log = studies.BesideBar(said.append, beside.append)
    log.run = "a/seed0"
    with waits.awaited(log, "compiling the step", about=9.0):
        pass
    assert beside[0] == "a/seed0: compiling the step, about 9.0 s" and beside[-1] == "a/seed0"
    assert len(said) == 1 and said[0].startswith("compiling the step, about 9.0 s … ")


SCRIPT = """
import runpy, sys
from bam import waits
waits.KEEP_AFTER = 0.0
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("module", "arguments", "line"),
    [
        ("examples.own_images.generate", ["images"], "drawing 3,000 images … "),
        (
            "scripts.benchmarks.depth",
            ["--out=depth", "--depths=2", "--trials=1", "--methods=dp_sgd", "--width=4"],
            "compiling 1 method of 2 layers … ",
        ),
    ],
    ids=["generate", "depth"],
)
def test_scripts_say_what_is_awaited(module, arguments, line, tmp_path):
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, module, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": root},
        check=False,
    )
    assert done.returncode == 0 and done.stdout.startswith(line), done.stderr


def test_a_dry_run_prints_its_plan_before_it_maps_or_times(at_once, capsys):
    forget_data()
    flags = ["--config=digits:dp_sgd", "--config.dry_run", "--config.accountant=rdp"]
    flags += ["--config.model.name=linear", "--config.features.name=scattering"]
    assert main.main(["train", *flags, "--config.num_steps=3"]) == 0
    said = capsys.readouterr().out.splitlines()

    def place(beginning):
        (number,) = [i for i, line in enumerate(said) if line.startswith(beginning)]
        return number

    order = ("reading digits …", "planning …", "dp_sgd on digits", "compiling the feature map")
    order += (
        "computing features of 1,437 images",
        "compiling a step on cpu",
        "timing a step on cpu",
        "about 0.",
    )
    assert list(map(place, order)) == sorted(map(place, order))


def test_a_line_that_is_drawn_shows_no_escape_sequence_of_a_name(capsys):
    screen.show.draw("reading a\x1b[31mb …")
    screen.show.draw("")
    shown = capsys.readouterr().out
    assert "\x1b[31m" not in shown and shown.startswith("reading a")
