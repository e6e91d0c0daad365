"""A run without a seed, killed and resumed at will, never takes more steps than its ε covers."""

import contextlib
import dataclasses
import json
import os
import random
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from bam import files, provenance
from bam.audit.audited import with_step
from bam.core import sampling
from bam.privacy import checkpoint, ledger, statement
from bam.privacy.ledger import Ledger
from bam.privacy.run import PrivateRun
from bam.release import export
from bam.training import loop
from bam.training.rundir import RunFiles
from configs import digits
from tests import runs
from tests.cases import assert_same_bits, mostly, refused
from tests.run_folder import (
    begun,
    contents,
    header_of,
    newest,
    no_file_beyond,
    processes_of,
    releases,
    rows_of,
    saved_steps,
)  # fmt: skip

NUM_STEPS = 5


class KilledError(BaseException):
    """Stands for the end of the process: nothing in `bam` handles it."""


def tiny(method="dp_sgd", **overrides):
    config = digits.get_config(method)
    settings = {"model.name": "linear", "accountant": "rdp", "num_steps": NUM_STEPS}
    settings |= {"eval.every": 1, "checkpoint.every": 2}
    config.update_from_flattened_dict(settings | overrides)
    return config


POINTS = ("counted", "computed", "shown", "unsaved", "saved")


class Steps:
    """Runs an experiment, counts the steps it computes by itself, and kills it at some point.

    The points, in the loop's order: a step is "counted" (its batch is about to be drawn), then
    "computed", "shown" (its row is written and printed), still "unsaved", and "saved".
    """

    def __init__(self, experiment, monkeypatch):
        self.computed, self.seen = 0, set()
        self.before_step = lambda: None
        self.kill, self.passed = ("never", 0), 0
        step, sample, write = experiment.step, sampling.poisson_sample, checkpoint.write

        def counted_step(*arguments):
            self.before_step()
            self.computed += 1
            state = step(*arguments)
            self.at("computed")
            return state

        def killable_sample(*arguments):
            self.at("counted")
            return sample(*arguments)

        def killable_write(*arguments):
            write(*arguments)
            self.at("saved")

        monkeypatch.setattr(sampling, "poisson_sample", killable_sample)
        monkeypatch.setattr(checkpoint, "write", killable_write)
        self.experiment = with_step(experiment, counted_step)

    def at(self, point):
        self.passed += point == self.kill[0]
        if (point, self.passed) == self.kill:
            raise KilledError

    def run(self, workdir, seed=None, kill=("never", 0), **options):
        self.kill, self.passed = kill, 0

        def stop():
            self.at("unsaved")
            return False

        on_row = lambda row: row["step"] and self.at("shown")  # noqa: E731
        return loop.train(self.experiment, seed, workdir, on_row, stop, **options)

    def run_killed(self, workdir, kills, seed=None):
        """Runs a training that is killed at each of these points and then let alone.

        It returns the summary.
        """
        for kill in kills:
            try:
                return self.run(workdir, seed, kill).summary  # too few steps left to be killed in
            except KilledError:
                assert not (workdir / "summary.json").exists()
            finally:  # now: TensorBoard's files of one second have one name
                self.seen |= releases(workdir)
        summary = self.run(workdir, seed).summary
        self.seen |= releases(workdir)
        return summary


@pytest.fixture(scope="module")
def experiment():
    return loop.build(tiny())


@pytest.fixture(scope="module")
def spared():
    return loop.build(tiny(spare_steps=2))


@pytest.fixture
def steps(experiment, monkeypatch):
    return Steps(experiment, monkeypatch)


@pytest.fixture
def killed(steps, tmp_path):
    """A run that was killed after its fourth row, two steps after its checkpoint."""
    with pytest.raises(KilledError):
        steps.run(tmp_path, kill=("shown", 4))
    return tmp_path


RANDOM = random.Random(0)
RANDOMLY = [[(RANDOM.choice(POINTS), RANDOM.randint(1, 3)) for _ in range(5)] for _ in range(3)]
OFTEN = [*([(point, 1)] * 7 for point in POINTS), *([(point, 3), (point, 1)] for point in POINTS)]
TWICE = [[(point, 1), (point, 1)] for point in POINTS]
KILLS = [*OFTEN, *RANDOMLY, *TWICE]


@pytest.mark.parametrize("kills", mostly(KILLS, slow=[*RANDOMLY[1:], *TWICE]), ids=str)
def test_steps_computed_and_seen_are_in_the_ledger_and_the_ledger_in_the_plan(
    steps, tmp_path, kills
):
    plan = steps.experiment.plan
    summary = steps.run_killed(tmp_path, kills)
    assert steps.computed <= plan.num_steps
    assert steps.computed <= begun(tmp_path) <= plan.num_steps
    assert len(steps.seen) <= steps.computed
    rows = rows_of(tmp_path)
    assert summary["steps_begun"] == rows[-1]["steps_begun"] == begun(tmp_path)
    assert summary["steps_taken"] == rows[-1]["step"] <= summary["steps_begun"]
    assert rows[-1]["epsilon"] == plan.epsilon_after(begun(tmp_path)) <= summary["epsilon"]
    assert all(row["epsilon"] == plan.epsilon_after(row["steps_begun"]) for row in rows)
    with pytest.raises(FileExistsError, match="finished run"):
        steps.run(tmp_path)


def test_without_a_ledger_a_killed_run_takes_and_shows_more_steps_than_planned(
    steps, tmp_path, monkeypatch
):
    """Control: the rule of 0.1.0."""
    read = Ledger.__init__
    monkeypatch.setattr(Ledger, "__init__", lambda self, path, *rest: read(self, None, *rest))
    summary = steps.run_killed(tmp_path, [("shown", 1)] * 7)
    assert steps.computed == len(steps.seen) == 7 + NUM_STEPS
    assert summary["steps_begun"] == summary["num_steps"] == NUM_STEPS  # which it denies


def test_lost_steps_end_the_run_earlier_and_one_line_says_so(steps, killed):
    said = []
    result = steps.run(killed, log=said.append)
    assert said == [
        "2 steps were lost in a crash and their privacy is spent, so this run ends after step 3 of "
        "5; a new run can plan for that with --config.spare_steps=2",
        "continues from step 2 of 3",
    ]
    assert int(result.state.step) == 3
    counts = [(row["step"], row["steps_begun"]) for row in result.rows]
    assert counts == [(1, 1), (2, 2), (3, 5)]
    summary = json.loads((killed / "summary.json").read_text())
    assert [summary[key] for key in ("steps_taken", "steps_begun", "num_steps")] == [3, 5, 5]
    assert saved_steps(killed)[-1] == header_of(killed)["step"] == 3


def test_when_all_steps_were_lost_before_a_checkpoint_only_fresh_weights_are_left(steps, tmp_path):
    summary = steps.run_killed(tmp_path, [("shown", 1)] * NUM_STEPS)
    assert (summary["steps_taken"], summary["steps_begun"]) == (0, NUM_STEPS)
    assert rows_of(tmp_path)[-1]["epsilon"] == summary["epsilon"]


def test_spare_steps_are_planned_for_with_more_noise_and_make_up_for_lost_ones(
    experiment, spared, monkeypatch, tmp_path
):
    assert spared.plan.noise_multiplier > experiment.plan.noise_multiplier
    assert spared.plan.epsilon <= spared.config.epsilon
    assert (spared.plan.num_steps, spared.plan.training_steps) == (NUM_STEPS + 2, NUM_STEPS)
    assert "5 steps and 2 spare ones" in spared.plan.describe()
    steps = Steps(spared, monkeypatch)
    for lost, taken, line in [
        (1, NUM_STEPS, "1 step was lost in a crash and its privacy is spent: 2 spare steps were"),
        (2, NUM_STEPS, "2 steps were lost in a crash and their privacy is spent: 2 spare steps"),
        (3, NUM_STEPS - 1, "3 steps were lost in a crash and their privacy is spent, so this run "
         "ends after step 4 of 5"),
    ]:  # fmt: skip
        workdir, said = tmp_path / str(lost), []
        for _ in range(lost):
            with pytest.raises(KilledError):
                steps.run(workdir, kill=("shown", 1))
        summary = steps.run(workdir, log=said.append).summary
        assert len(said) == 1 and said[0].startswith(line)
        assert (summary["steps_taken"], summary["steps_begun"]) == (taken, taken + lost)
    plan = json.loads((workdir / "plan.json").read_text())
    assert (plan["num_steps"], plan["spare_steps"]) == (NUM_STEPS + 2, 2)


def test_a_run_that_loses_nothing_takes_its_steps_and_no_spare_one(spared, tmp_path):
    calls = iter(range(3))
    with pytest.raises(loop.StoppedError, match="after step 3 of 5"):
        loop.train(spared, None, tmp_path, should_stop=lambda: next(calls, None) is None)
    assert begun(tmp_path) == 3  # told to stop, it loses nothing
    lines = []
    result = loop.train(spared, None, tmp_path, log=lines.append)
    assert lines == [f"continues from step 3 of {NUM_STEPS}"]
    assert int(result.state.step) == begun(tmp_path) == NUM_STEPS
    assert result.rows[-1]["epsilon"] < result.summary["epsilon"]


def test_with_a_seed_lost_steps_are_repeated_to_the_bit_and_need_no_ledger(
    experiment, steps, tmp_path
):
    whole = loop.train(experiment, 0)
    kills = [("shown", 1), ("shown", 4), ("computed", 2)]
    summary = steps.run_killed(tmp_path, kills, seed=0)
    assert summary["steps_taken"] == summary["steps_begun"] == NUM_STEPS < steps.computed
    assert not (tmp_path / "steps_begun").exists()
    losses = [np.float32(row["test_loss"]) for row in whole.rows]
    assert steps.seen == set(enumerate(losses, start=1))  # all that was ever to be seen
    last = runs.last_state(tmp_path, experiment)
    assert_same_bits(last.params, whole.state.params)


def test_ordinary_training_has_nothing_to_spend_and_needs_no_ledger(monkeypatch, tmp_path):
    steps = Steps(loop.build(tiny("non_private")), monkeypatch)
    assert steps.run_killed(tmp_path, [("shown", 3), ("shown", 3)])["steps_taken"] == NUM_STEPS
    assert not (tmp_path / "steps_begun").exists()


def test_a_step_is_on_the_disk_before_its_batch_is_drawn_or_anything_of_it_is_seen(
    steps, tmp_path, monkeypatch
):
    """A power cut keeps what was forced to the disk, and perhaps no more."""
    forced, counted, seen = {}, [], []
    fsync, add_row, write = os.fsync, RunFiles.add_row, checkpoint.write
    drawn, batch = [], PrivateRun.batch

    def note_fsync(descriptor):
        fsync(descriptor)
        forced[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size

    def note_row(files, row):
        seen.append((row["step"], forced[str(tmp_path / "steps_begun")]))
        add_row(files, row)

    def note_write(folder, header, tree):
        seen.append((header["step"], forced[str(tmp_path / "steps_begun")]))
        write(folder, header, tree)

    def note_batch(run, step):
        drawn.append((step, forced.get(str(tmp_path / "steps_begun"))))
        return batch(run, step)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(RunFiles, "add_row", note_row)
    monkeypatch.setattr(checkpoint, "write", note_write)
    monkeypatch.setattr(PrivateRun, "batch", note_batch)
    steps.before_step = lambda: counted.append(begun(tmp_path))
    steps.run(tmp_path)
    assert counted == [1, 2, 3, 4, 5]
    assert str(tmp_path) in forced  # the folder, and so the file's name
    assert seen == [(n, n) for n in (1, 2, 2, 3, 4, 4, 5, 5)]
    assert drawn == [(n, n) for n in (1, 2, 3, 4, 5)]
    monkeypatch.setattr(Ledger, "force", lambda self: None)  # the control
    forced.clear()
    drawn.clear()
    (tmp_path / "other").mkdir()
    with pytest.raises(KilledError):
        steps.run(tmp_path / "other", kill=("computed", 1))
    assert drawn == [(1, None)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "steps_begun is missing, so the spent epsilon is unknown"),
        (b"", "steps_begun has 0 steps, but other records have 4"),
        (b".", "steps_begun has 1 steps, but other records have 4"),
        (b"...", "steps_begun has 3 steps, but other records have 4"),  # more than its checkpoint
    ],
)
def test_a_ledger_that_is_missing_or_cut_is_refused_and_nothing_is_changed(
    steps, killed, content, message
):
    (killed / "steps_begun").unlink()
    if content is not None:
        (killed / "steps_begun").write_bytes(content)
    before = contents(killed)
    with pytest.raises(ValueError, match=message) as refused:
        steps.run(killed)
    assert "\n" not in str(refused.value)
    assert contents(killed) == before


def test_metrics_whose_steps_begun_are_no_numbers_are_refused_in_one_line(steps, killed):
    path = killed / "metrics.jsonl"
    path.write_text(path.read_text().replace('"steps_begun": 4', '"steps_begun": "x"'))
    refused("steps_begun is not an integer", lambda: steps.run(killed))


def test_a_ledger_below_what_was_begun_when_the_checkpoint_was_saved_is_refused(steps, tmp_path):
    with pytest.raises(KilledError):
        steps.run(tmp_path, kill=("shown", 2))
    with pytest.raises(KilledError):
        steps.run(tmp_path, kill=("saved", 1))  # of step 2, when 4 were begun
    (tmp_path / "steps_begun").write_bytes(b"...")
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="steps_begun has 3 steps, but other records have 4"):
        steps.run(tmp_path)


def test_without_a_checkpoint_what_was_begun_counts_and_the_ledger_is_needed(steps, killed):
    shutil.rmtree(killed / "checkpoints")
    content = (killed / "steps_begun").read_bytes()
    (killed / "steps_begun").unlink()
    with pytest.raises(ValueError, match="steps_begun is missing"):
        steps.run(killed)
    (killed / "steps_begun").write_bytes(content)
    for cut in range(4):  # the metrics know of four
        (killed / "steps_begun").write_bytes(content[:cut])
        with pytest.raises(ValueError, match=f"has {cut} steps, but other records have 4"):
            steps.run(killed)
    (killed / "steps_begun").write_bytes(content)
    assert steps.run(killed).summary["steps_taken"] == 1
    assert begun(killed) == steps.computed == NUM_STEPS


def test_a_ledger_without_its_config_or_of_another_plan_is_refused(experiment, steps, killed):
    shutil.rmtree(killed / "checkpoints")
    plan = dataclasses.replace(experiment.plan, spare_steps=1)
    with pytest.raises(ValueError, match="has spare_steps = 0, but this run has 1"):
        loop.train(dataclasses.replace(experiment, plan=plan), None, killed)
    for name, message in (
        ("plan.json", r"has processes\.jsonl, but no run"),
        ("processes.jsonl", r"counts steps, but its folder has no plan\.json"),
    ):
        (killed / name).rename(killed / f"{name}.away")
        with pytest.raises(ValueError, match=message):
            steps.run(killed)
    for name in ("plan.json", "processes.jsonl"):
        (killed / f"{name}.away").rename(killed / name)
    (killed / "config.json").unlink()
    with pytest.raises(ValueError, match=r"holds steps of a run, but its config\.json is missing"):
        steps.run(killed)
    assert begun(killed) == 4


def test_two_processes_that_no_lock_keeps_apart_take_no_step_that_is_not_counted(steps, tmp_path):
    """On some network file systems a lock keeps nobody out."""

    def intrude(row):
        if row["step"] == 2 and steps.computed == 2:
            (tmp_path / "lock").unlink()
            with pytest.raises(KilledError):
                steps.run(tmp_path, kill=("shown", 1))

    with pytest.raises(BlockingIOError, match="another process is training in"):
        loop.train(steps.experiment, None, tmp_path, on_row=intrude)
    assert (steps.computed, begun(tmp_path)) == (3, 4)  # the fourth was counted, then refused
    assert steps.run(tmp_path).summary["steps_taken"] == 3
    assert (steps.computed, begun(tmp_path)) == (4, NUM_STEPS)


def test_a_step_that_cannot_be_counted_is_not_taken(experiment, tmp_path):
    path = tmp_path / "steps_begun"
    path.touch()
    ledger = Ledger(path, experiment.plan, 0, 0)
    message = r"no step can be counted in .*steps_begun: File too large"
    with no_file_beyond(0), pytest.raises(OSError, match=message):
        ledger.begin()
    assert ledger.begun == 0 == path.stat().st_size
    ledger.begin()  # there is room again
    assert ledger.begun == 1 == path.stat().st_size
    ledger.close()


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("name", [1, 4])
def test_a_checkpoint_under_the_name_of_another_step_is_refused(steps, killed, name, seed):
    workdir = killed / "seeded" if seed == 0 else killed
    if seed == 0:
        with pytest.raises(KilledError):
            steps.run(workdir, 0, ("shown", 4))
    newest(workdir).rename(workdir / "checkpoints" / f"{name}.npz")
    taken = steps.computed
    with pytest.raises(
        ValueError, match=rf"checkpoints/{name}\.npz was renamed: it is the checkpoint of step 2"
    ):
        steps.run(workdir, seed)
    assert steps.computed == taken


def fingerprint(workdir):
    """What a checkpoint says of the training data."""
    return header_of(workdir)["digests"]["training data"]


def test_a_checkpoint_alone_and_a_finished_run_confirm_no_guess_at_the_training_data(
    experiment, steps, killed, tmp_path
):
    other = tmp_path / "other"
    with pytest.raises(KilledError):
        steps.run(other, kill=("shown", 4))
    ours, theirs = (fingerprint(folder) for folder in (killed, other))
    assert ours != theirs  # of the same data, under keys that no checkpoint holds
    key = (killed / "data_key").read_bytes()
    held = [p for p in (killed / "checkpoints").rglob("*") if p.is_file()]
    assert not any(key in p.read_bytes() or bytes.fromhex(key.decode()) in p.read_bytes()
                   for p in held)  # fmt: skip

    dataset = experiment.dataset  # control: what it is for
    images = dataset.train.images.copy()
    images[5, 3, 3] += 1
    changed = dataset._replace(train=dataset.train._replace(images=images))
    with pytest.raises(ValueError, match="other training data, or lacks its data_key"):
        loop.train(
            dataclasses.replace(experiment, listing=changed, load=lambda: changed), None, killed
        )

    (other / "data_key").unlink()
    with pytest.raises(ValueError, match="other training data, or lacks its data_key"):
        steps.run(other)
    steps.run(killed)
    assert not (killed / "data_key").exists()


def test_a_runs_folder_and_its_data_key_are_for_its_owner_alone_whatever_the_umask(
    experiment, tmp_path, monkeypatch
):
    seen, to_disk = {}, files.to_disk

    def watched(file):  # before what was written has its name
        seen[Path(file.name).name.split(".")[0]] = os.fstat(file.fileno()).st_mode & 0o777
        to_disk(file)

    monkeypatch.setattr(files, "to_disk", watched)
    before = os.umask(0)
    try:
        thread = threading.get_ident()
        (tmp_path / f"data_key.{os.getpid()}.{thread}.partial").touch()  # what a crash left
        for folder in (tmp_path / "sweep/run", tmp_path):
            with contextlib.closing(PrivateRun(experiment.plan)) as run:
                run.open(folder, experiment.record, lambda key: {"training data": key.hex()})
            assert (folder / "data_key").stat().st_mode & 0o777 == seen.pop("data_key") == 0o600
    finally:
        os.umask(before)
    assert (tmp_path / "sweep/run").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "sweep").stat().st_mode & 0o777 == 0o777  # not a run's


# What took the steps.


def at_commits(monkeypatch, *commits):
    """Each process, that is each call of `loop.train`, is at the next commit."""
    left = iter(commits)
    current = []
    init = RunFiles.__init__

    def enter(*arguments):
        current[:] = [next(left)]
        init(*arguments)

    monkeypatch.setattr(RunFiles, "__init__", enter)
    monkeypatch.setattr(provenance, "git_commit", lambda: current[0])


@pytest.mark.parametrize("seed", [None, 0])
def test_a_process_is_on_the_disk_before_its_first_step_is_counted(
    steps, tmp_path, monkeypatch, seed
):
    add_process, noted = ledger.add_process, []

    def note(folder, process):
        add_process(folder, process)
        counted = 0 if seed == 0 else begun(folder)
        noted.append((processes_of(folder), counted, steps.computed))

    monkeypatch.setattr(ledger, "add_process", note)
    with pytest.raises(KilledError):
        steps.run(tmp_path, seed, kill=("computed", 1))
    assert noted == [([(1, provenance.git_commit())], 0, 0)]
    monkeypatch.setattr(ledger, "add_process", lambda *_: None)  # the control
    with pytest.raises(KilledError):
        steps.run(tmp_path / "late", seed, kill=("computed", 1))
    assert processes_of(tmp_path / "late") == []


@pytest.mark.thorough
def test_a_run_that_was_killed_and_resumed_elsewhere_names_every_code(steps, tmp_path, monkeypatch):
    at_commits(monkeypatch, "aaa", "bbb", "bbb", "ccc", "ccc")
    kills = [("shown", 1), ("computed", 1), ("saved", 1)]
    summary = steps.run_killed(tmp_path / "run", kills)
    firsts = [(x["first_step"], x["commit"]) for x in summary["processes"]]
    assert firsts == processes_of(tmp_path / "run")
    assert firsts == [(1, "aaa"), (2, "bbb"), (3, "bbb"), (5, "ccc")]
    assert summary["steps_begun"] == NUM_STEPS
    export.export(tmp_path / "run", tmp_path / "out")
    text = (tmp_path / "out" / "PRIVACY.md").read_text()
    taken = [(x.first, x.last, x.process["commit"]) for x in statement.shares_of(summary)]
    assert taken == [(1, 1, "aaa"), (2, 4, "bbb"), (5, 5, "ccc")]
    assert statement.taken_by(summary) in text


def test_with_a_seed_every_process_is_named_too(steps, tmp_path, monkeypatch):
    at_commits(monkeypatch, "aaa", "bbb")
    summary = steps.run_killed(tmp_path, [("shown", 3)], seed=0)
    assert processes_of(tmp_path) == [(1, "aaa"), (3, "bbb")]
    assert [x.process["commit"] for x in statement.shares_of(summary)] == ["aaa", "bbb"]


def test_a_run_that_stands_at_its_end_is_of_those_that_took_its_steps(steps, tmp_path, monkeypatch):
    at_commits(monkeypatch, "aaa", "bbb", "ccc")
    with pytest.raises(KilledError):
        steps.run(tmp_path, kill=("saved", 3))
    assert [x["commit"] for x in steps.run(tmp_path).summary["processes"]] == ["aaa"]
    (alone,) = steps.run(None).summary["processes"]  # in memory
    assert alone["first_step"] == 1


@pytest.mark.parametrize("seed", [None, 0])
def test_a_list_of_processes_that_is_gone_or_damaged_is_refused_and_nothing_is_changed(
    steps, tmp_path, seed
):
    with pytest.raises(KilledError):
        steps.run(tmp_path, seed, kill=("shown", 4))
    path, whole = tmp_path / "processes.jsonl", (tmp_path / "processes.jsonl").read_text()
    other = json.dumps(json.loads(whole) | {"commit": "another"}) + "\n"
    for content, message in (
        (None, "is missing"),
        ("", "differs from the run's other records"),
        (other, "differs from the run's other records"),
        (whole[:-9], "is damaged"),
        ("{}\n", "is damaged"),
        ("\0" * 99, "is damaged"),
        ("[" * 100_000, "is damaged"),
        (whole.replace('"first_step": 1', '"first_step": 0'), "is damaged"),
    ):
        path.unlink(missing_ok=True)
        path.write_text(content) if content is not None else None
        before = contents(tmp_path)
        with pytest.raises(
            ValueError, match=rf"processes\.jsonl {message}, so the code and devices"
        ) as error:
            steps.run(tmp_path, seed)
        assert "\n" not in str(error.value)
        assert contents(tmp_path) == before
    path.write_text(whole)  # the control
    assert steps.run(tmp_path, seed).summary["steps_taken"] >= NUM_STEPS - 2


def test_a_run_whose_processes_were_not_recorded_is_not_continued(steps, tmp_path):
    with pytest.raises(KilledError):
        steps.run(tmp_path, kill=("unsaved", 2))  # after step 1, before a checkpoint knows of it
    (tmp_path / "processes.jsonl").unlink()
    message = r"has no processes\.jsonl for steps 1 to 1"
    refused(message, steps.run, tmp_path)


def test_a_new_run_takes_no_list_of_another(steps, tmp_path):
    (tmp_path / "processes.jsonl").write_text("")
    for seed in (None, 0):
        with pytest.raises(ValueError, match=r"has processes\.jsonl, but no run"):
            steps.run(tmp_path, seed)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("seed", [None, 0])
def test_a_kill_at_the_end_of_a_run_leaves_no_key_of_its_data(steps, tmp_path, monkeypatch, seed):
    write = files.write_bytes

    def killed(when):
        def write_and_die(path, *given):
            if path.name == "summary.json" and when == "before":
                raise KilledError
            write(path, *given)
            if path.name == "summary.json":
                raise KilledError

        return write_and_die

    for when in ("before", "after"):
        monkeypatch.setattr(files, "write_bytes", killed(when))
        with pytest.raises(KilledError):
            steps.run(tmp_path, seed)
        assert not (tmp_path / "data_key").exists()
        assert (tmp_path / "summary.json").exists() == (when == "after")
    monkeypatch.setattr(files, "write_bytes", write)
    for other in (seed, 1):  # whoever asks
        with pytest.raises(ValueError if other != seed else FileExistsError):
            steps.run(tmp_path, other)
        assert not (tmp_path / "data_key").exists()
