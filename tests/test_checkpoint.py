"""A run that cannot go on, or cannot be saved, says why and leaves what it has saved as it is."""

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import pickle
import shutil
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bam.core import seeds
from bam.core.noise import CorrelatedNoiseState
from bam.privacy import checkpoint, run
from bam.training import loop, rundir
from tests import own_loop
from tests.cases import assert_same_bits, refused, stop_after, tiny_digits
from tests.run_folder import contents, header_of, newest, no_file_beyond, saved_steps

NUM_STEPS = 3


def tiny(method, **settings):
    ours = {"num_steps": NUM_STEPS, "eval__every": 1, "checkpoint__every": 1, "ema_decay": 0.9}
    return tiny_digits(method, **ours | {"augment__views": 2, "augment__shift": 1} | settings)


def without_seconds(rows):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


@pytest.fixture(scope="module")
def experiment():
    return loop.build(tiny("dp_sgd"))


@pytest.fixture
def stopped(experiment, tmp_path):
    """The workdir of a run that was stopped after its second step."""
    with pytest.raises(loop.StoppedError):
        loop.train(experiment, 0, tmp_path / "run", should_stop=stop_after(2))
    return tmp_path / "run"


def test_resuming_with_another_config_is_refused_naming_the_key(experiment, stopped):
    before = (stopped / "metrics.jsonl").read_text()
    others = {
        "epsilon": 4.0, "clip_norm": 2.0, "expected_batch_size": 200, "num_steps": 5, "delta": 1e-6,
        "optimizer.learning_rate": 1.0, "seed": 1,
    }  # fmt: skip
    for key, value in others.items():
        with pytest.raises(ValueError, match=f"holds a run with {key} = .*, not {value!r}"):
            rundir.check_resumable(stopped, tiny("dp_sgd", **{"seed": 0, key: value}))
    for method in ("dp_sat", "bam_sam", "bam_exact", "non_private"):  # with keys of their own
        with pytest.raises(ValueError, match=rf"method.name = 'dp_sgd', not '{method}'"):
            rundir.check_resumable(stopped, tiny(method, seed=0))
    with pytest.raises(ValueError, match=r"holds a run with model.name = 'linear', not 'convnet'"):
        rundir.check_resumable(stopped, tiny("dp_sgd", seed=0, model__name="convnet"))
    with pytest.raises(ValueError, match="holds a run with seed = 0, not 1"):
        loop.train(experiment, 1, stopped)
    assert (stopped / "metrics.jsonl").read_text() == before


def test_a_run_whose_record_lacks_keys_resumes_with_their_defaults_alone(experiment, stopped):
    record = json.loads((stopped / "config.json").read_text())
    del record["optimizer"]["schedule"], record["optimizer"]["warmup_steps"]
    del record["features"]["whiten"]
    (stopped / "config.json").write_text(json.dumps(record))
    for key, value in {"schedule": "linear", "warmup_steps": 1}.items():
        with pytest.raises(
            ValueError, match=f"holds a run with optimizer.{key} = .*, not {value!r}"
        ):
            rundir.check_resumable(stopped, tiny("dp_sgd", seed=0, **{f"optimizer.{key}": value}))
    whole = loop.train(experiment, 0)
    assert_same_bits(loop.train(experiment, 0, stopped).state.params, whole.state.params)


def test_resuming_on_other_data_or_another_plan_is_refused(experiment, stopped, monkeypatch):
    dataset = experiment.dataset
    images = dataset.train.images.copy()
    images[5, 3, 3] += 1
    other = dataset._replace(train=dataset.train._replace(images=images))
    with pytest.raises(ValueError, match="other training data"):
        loop.train(loop.build(tiny("dp_sgd"), other), 0, stopped)
    plan = dataclasses.replace(experiment.plan, spare_steps=1)  # whose ε holds
    with pytest.raises(ValueError, match="has spare_steps = 0, but this run has 1"):
        loop.train(dataclasses.replace(experiment, plan=plan), 0, stopped)
    (stopped / "config.json").unlink()
    with pytest.raises(ValueError, match=r"holds steps of a run, but its config\.json is missing"):
        loop.train(experiment, 0, stopped)


def test_a_run_that_lost_its_last_row_measures_it_again(experiment, tmp_path):
    whole = loop.train(experiment, 0, tmp_path)
    (tmp_path / "summary.json").unlink()
    (tmp_path / "metrics.jsonl").unlink()
    again = loop.train(experiment, 0, tmp_path)
    assert without_seconds(again.rows) == without_seconds(whole.rows[-1:])
    assert again.summary["test_accuracy"] == whole.summary["test_accuracy"]


def test_how_often_a_run_is_looked_at_may_change(experiment, stopped):
    looked = loop.build(tiny("dp_sgd", **{"eval__every": 0, "checkpoint__every": 0}))
    whole = loop.train(experiment, 0)
    assert_same_bits(loop.train(looked, 0, stopped).state.params, whole.state.params)


def test_two_runs_cannot_write_to_one_folder(experiment, tmp_path):
    def intrude():
        with pytest.raises(BlockingIOError, match="is in use in this process"):
            loop.train(experiment, 0, tmp_path / "run")
        return True

    with pytest.raises(loop.StoppedError):
        loop.train(experiment, 0, tmp_path / "run", should_stop=intrude)


def test_half_a_line_left_by_a_kill_is_cleaned_away(experiment, stopped):
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "epsilon": 1.')
    result = loop.train(experiment, 0, stopped)
    lines = (stopped / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == result.rows
    assert [row["step"] for row in result.rows] == [1, 2, 3]


def test_rows_that_are_no_text_are_refused_in_one_line(experiment, stopped):
    (stopped / "metrics.jsonl").write_bytes(b'{"step": 1, "\xff": 1}\n')
    refused(r"metrics\.jsonl is damaged: not JSON", loop.train, experiment, 0, stopped)


@pytest.mark.parametrize("name", ["lock", "data_key", "metrics.jsonl", "checkpoints/2.npz"])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(experiment, stopped, name):
    path = stopped / name
    path.rename(stopped / "away")
    os.mkfifo(path)
    opened = lambda: os.close(os.open(path, os.O_RDWR))  # noqa: E731
    waiting = threading.Timer(20, opened)  # whoever waited goes on, and fails
    waiting.start()
    with pytest.raises((OSError, ValueError), match=rf"{path.name}.*(not a regular file|read)"):
        loop.train(experiment, 0, stopped)
    assert waiting.is_alive()
    waiting.cancel()
    path.unlink()
    (stopped / "away").rename(path)
    assert loop.train(experiment, 0, stopped).rows[-1]["step"] == 3  # the control


def test_without_a_checkpoint_a_broken_off_run_starts_again(experiment, stopped):
    shutil.rmtree(stopped / "checkpoints")
    whole = loop.train(experiment, 0)
    again = loop.train(experiment, 0, stopped)
    assert_same_bits(again.state.params, whole.state.params)
    assert without_seconds(again.rows) == without_seconds(whole.rows)


def test_a_folder_that_cannot_be_written_is_said_before_any_step(experiment, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        loop.train(experiment, 0, tmp_path / "file" / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").mkdir()
    never = lambda row: pytest.fail("a step was taken")  # noqa: E731
    with pytest.raises(OSError, match="metrics"):
        loop.train(experiment, 0, tmp_path / "run", on_row=never)


def test_checkpoints_of_another_run_or_of_nothing_are_refused_and_left_alone(
    experiment, stopped, tmp_path
):
    other = loop.build(tiny("dp_sgd", **{"optimizer.name": "sgd"}))
    with pytest.raises(loop.StoppedError):
        loop.train(other, 0, tmp_path / "other", should_stop=stop_after(2))
    key = (stopped / "data_key").read_bytes()
    for foreign, message in (
        ("other run", "belongs to a run with other training data, or lacks its data_key"),
        ("other run and its key", r"2\.npz has private.*, but this training has opt_state"),
        ("junk", r"checkpoints/2\.npz could not be read: if it is damaged, move it away"),
    ):
        shutil.rmtree(stopped / "checkpoints")
        shutil.copytree(tmp_path / "other" / "checkpoints", stopped / "checkpoints")
        if foreign == "junk":
            newest(stopped).write_bytes(b"junk")
        is_whole = foreign == "other run and its key"
        content = (tmp_path / "other" / "data_key").read_bytes() if is_whole else key
        (stopped / "data_key").write_bytes(content)
        before = contents(stopped)
        refused(message, loop.train, experiment, 0, stopped)
        assert contents(stopped) == before


def test_a_damaged_checkpoint_is_one_line_and_without_it_a_run_goes_on_from_the_one_before(
    experiment, stopped, tmp_path
):
    whole = loop.train(experiment, 0)
    assert saved_steps(stopped) == [1, 2]
    path = newest(stopped)
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", content[:100] + b"x" + content[101:]):
        path.write_bytes(damaged)
        before = contents(stopped)
        message = r"2\.npz could not be read: if it is damaged, move it away to resume"
        refused(message, loop.train, experiment, 0, stopped)
        assert contents(stopped) == before
    path.rename(tmp_path / "away")
    resumed = loop.train(experiment, 0, stopped)
    assert_same_bits(resumed.state.params, whole.state.params)
    assert without_seconds(resumed.rows) == without_seconds(whole.rows)


def test_reading_a_checkpoint_unpickles_nothing(experiment, stopped, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a pickle can run anything")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    assert int(checkpoint.restore(newest(stopped), experiment.init(0)).step) == 2
    with pytest.raises(AssertionError, match="run anything"):
        pickle.loads(pickle.dumps(1))


# One file.

FACTS = {"record": {}, "digests": {}, "processes": [], "step": 5, "steps_begun": 5, "more": {}}
TREE = {"w": np.arange(3.0), "half": np.ones(2, np.float16)}


def written(folder, *steps):
    """Checkpoints of those steps, whose arrays have their number."""
    for step in steps:
        tree = {"w": np.full(3, float(step)), "half": TREE["half"]}
        checkpoint.write(folder, FACTS | {"step": step, "steps_begun": step}, tree)
    return checkpoint.newest(folder)


def steps_in(folder):
    """The step of each checkpoint there, which is whole."""
    whole = [checkpoint.restore(path, TREE)["w"][0] for path in folder.glob("*.npz")]
    assert sorted(whole) == sorted(int(path.stem) for path in folder.glob("*.npz"))
    return sorted(map(int, whole))


def test_a_checkpoint_returns_what_was_saved_keys_included(tmp_path):
    assert checkpoint.newest(tmp_path / "nothing") is None
    assert checkpoint.newest(tmp_path) is None
    header = FACTS | {"more": {"a": 1.5}}
    checkpoint.write(tmp_path, header, {"w": jnp.arange(3.0), "key": jax.random.key(7)})
    path = checkpoint.newest(tmp_path)
    state = checkpoint.restore(path, {"w": jnp.zeros(3), "key": jax.random.key(0)})
    assert (path.name, state["w"].tolist()) == ("5.npz", [0, 1, 2])
    assert state["key"] == jax.random.key(7)
    assert checkpoint.read_header(path).items() >= header.items()
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_newest_two_are_kept_and_those_of_later_steps_are_not(tmp_path):
    written(tmp_path, 2, 9)
    assert steps_in(tmp_path) == [2, 9]
    written(tmp_path, 10)  # newer than 9 by its number, not by its name
    assert steps_in(tmp_path) == [9, 10] and checkpoint.newest(tmp_path).name == "10.npz"
    written(tmp_path, 10)
    assert steps_in(tmp_path) == [9, 10]
    written(tmp_path, 4)  # what was saved last is what goes on
    assert steps_in(tmp_path) == [4]


def test_a_byte_that_is_changed_anywhere_is_seen_or_changes_nothing(tmp_path):
    path = written(tmp_path, 5)
    content, seen = path.read_bytes(), 0
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 32]) + content[place + 1 :])
        try:
            assert_same_bits(checkpoint.restore(path, TREE)["w"], np.full(3, 5.0))
        except ValueError as error:
            assert "could not be read" in str(error) and "\n" not in str(error)
            seen += 1
    assert seen > len(content) / 7 / 2
    for length in range(0, len(content), 101):
        path.write_bytes(content[:length])
        refused("could not be read", checkpoint.read_header, path)


def test_a_checkpoint_of_other_arrays_is_refused_by_name(tmp_path):
    path = written(tmp_path, 5)
    for like, message in (
        (
            {**TREE, "w": np.zeros(4)},
            r"5\.npz has w float64\[3\], but this training has w float64\[4\]",
        ),
        ({**TREE, "w": np.zeros(3, int)}, r"w float64\[3\], but this training has w int64\[3\]"),
        ({"w": TREE["w"]}, r"has half float16\[2\], but this training has w"),
        ({**TREE, "x": np.zeros(1)}, r"has nothing, but this training has x float64\[1\]"),
    ):
        refused(message, checkpoint.restore, path, like)
    assert_same_bits(checkpoint.restore(path, TREE)["half"], TREE["half"])  # the control


class KilledError(BaseException):
    """Stands for the end of the process: nothing in `bam` handles it."""


def killed_at(monkeypatch, number):
    """From the `number`-th time on that something reaches the disk, nothing does any more."""
    calls = itertools.count()

    def dangerous(function):
        def call(*arguments, **options):
            if next(calls) >= number:
                raise KilledError
            result = function(*arguments, **options)
            if next(calls) >= number:
                raise KilledError
            return result

        return call

    for holder, name in (
        (os, "fsync"), (Path, "replace"), (Path, "unlink"), (np, "savez"),
        (np.lib.format, "write_array"),
    ):  # fmt: skip
        monkeypatch.setattr(holder, name, dangerous(getattr(holder, name)))
    return calls


def test_a_kill_at_any_moment_of_a_save_leaves_whole_checkpoints_and_no_rest_stays(
    tmp_path, monkeypatch
):
    newest_left, rests = set(), 0
    for number in range(100):
        folder = tmp_path / str(number)
        folder.mkdir()
        written(folder, 1, 2)
        (folder / "2.npz.1.2.partial").touch()  # of another process
        with monkeypatch.context() as patch:
            killed_at(patch, number)
            try:
                written(folder, 3)
                is_killed = False
            except KilledError:
                is_killed = True
        left = steps_in(folder)
        assert left in ([1, 2], [1, 2, 3], [2, 3])  # with the kill between a write and a removal
        newest_left.add(max(left))
        rests += len(list(folder.glob("*.partial")))
        written(folder, 4)
        assert steps_in(folder) == [max(left), 4]
        assert sorted(x.name for x in folder.iterdir()) == [f"{x}.npz" for x in (max(left), 4)]
        if not is_killed:
            break
    assert not is_killed and number > 10 and newest_left == {2, 3} and rests > 5


def test_two_threads_that_save_one_run_save_whole_checkpoints(tmp_path, monkeypatch):
    def saved_by_two(folder):
        """Errors of two threads, each of which saves while the other does."""
        private, tx, tree = own_loop.begin()
        private.save(folder, tree)
        own_loop.take(private, tx, tree, 3)
        errors = []

        def save():
            try:
                for _ in range(5):
                    private.save(folder, {"w": np.zeros(3)})
            except OSError as error:
                errors.append(error)

        threads = [threading.Thread(target=save) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        private.close()
        return errors

    savez = np.savez
    monkeypatch.setattr(np, "savez", lambda *x: (savez(*x), time.sleep(0.01)))
    assert saved_by_two(tmp_path / "run") == []
    assert saved_steps(tmp_path / "run") == [0, 3]
    checkpoint.restore(newest(tmp_path / "run"), {"w": np.zeros(3)})
    assert not list((tmp_path / "run").rglob("*.partial"))
    monkeypatch.setattr(run.threading, "RLock", contextlib.nullcontext)  # the control
    assert saved_by_two(tmp_path / "other") != []


def test_without_room_for_a_checkpoint_nothing_is_begun_and_nothing_is_lost(
    experiment, stopped, capfd
):
    before = contents(stopped)
    never = lambda row: pytest.fail("a step was taken")  # noqa: E731
    with no_file_beyond(2**16), pytest.raises(OSError, match=r"needs 1\.\d MiB in .*too large"):
        loop.train(experiment, 0, stopped, on_row=never)
    assert contents(stopped) == before

    header, state = header_of(stopped), checkpoint.restore(newest(stopped), experiment.init(0))
    later, folder = header | {"step": 3, "steps_begun": 3}, stopped / "checkpoints"
    with no_file_beyond(2**12), pytest.raises(OSError, match="Earlier ones are as they were"):
        checkpoint.write(folder, later, state)
    assert contents(stopped) == before  # and no part of the one that failed
    checkpoint.write(folder, later, state)  # there is room again
    assert saved_steps(stopped) == [2, 3]
    assert capfd.readouterr().err == ""


# Where each is met: as the file is made, written, forced to the disk and given its name.
FAILURES = [
    (os, "open", OSError(errno.EROFS, "Read-only file system")),
    (np, "savez", OSError(errno.ENOSPC, "No space left on device")),
    (os, "fsync", OSError(errno.EDQUOT, "Disk quota exceeded")),
    (os, "fsync", OSError(errno.ENOSPC, "No space left on device")),
    (Path, "replace", OSError(errno.EROFS, "Read-only file system")),
    (np, "savez", TypeError("a leaf that is no array")),
]


@pytest.mark.parametrize(("holder", "name", "error"), FAILURES, ids=str)
def test_a_checkpoint_that_cannot_be_written_is_said_in_the_words_of_its_cause(
    holder, name, error, tmp_path, monkeypatch
):
    def fails(*unused, **keys):
        raise error

    written(tmp_path, 1, 2)
    before = contents(tmp_path)
    kind = type(error) if isinstance(error, TypeError) else OSError
    with monkeypatch.context() as patch, pytest.raises(kind) as raised:
        patch.setattr(holder, name, fails)
        written(tmp_path, 3)
    number = getattr(error, "errno", None)
    assert (os.strerror(number) if number else str(error)) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert ("Earlier ones are as they were" in str(raised.value)) == (kind is OSError)
    assert contents(tmp_path) == before
    written(tmp_path, 3)  # the control
    assert steps_in(tmp_path) == [2, 3]


# Secrets, in both doors.


def by_train(folder, seed):
    config = tiny("dp_sgd", **{"mechanism.name": "banded", "num_steps": 6})
    config.update_from_flattened_dict({"mechanism.bands": 3})
    with pytest.raises(loop.StoppedError):
        loop.train(loop.build(config), seed, folder, should_stop=stop_after(3))


def by_an_own_loop(folder, seed):
    bands = {"mechanism": {"name": "banded", "bands": 3}}
    private, tx, tree = own_loop.begin(seed=seed, **bands)
    private.save(folder, own_loop.take(private, tx, tree, 2))
    private.close()


def secrets_in(folder, door, seed, monkeypatch):
    """Which secrets of a run stand in its files, and which there are."""
    secrets, save = {}, run.PrivateRun.save

    def note(private, tree):
        is_noise = lambda x: isinstance(x, CorrelatedNoiseState)  # noqa: E731
        (noise,) = filter(is_noise, jax.tree.leaves(tree, is_leaf=is_noise))
        secrets.update({stream: private.key(stream).tobytes() for stream in seeds.KEY_LABELS})
        secrets["the noise's past"] = np.asarray(noise.past).tobytes()
        assert np.asarray(noise.past).any() and np.asarray(noise.key).tobytes() == secrets["noise"]
        secrets["the whole stream"] = private._root_seed.to_bytes(32)[-8:]
        save(private, tree)

    with monkeypatch.context() as patch:
        patch.setattr(run.PrivateRun, "save", note)
        door(folder, seed)
    everything = b"".join(contents(folder).values())
    return {name for name, secret in secrets.items() if secret in everything}, {*secrets}


@pytest.mark.parametrize("door", [by_train, by_an_own_loop])
def test_nothing_secret_is_in_any_file_of_a_run_without_a_seed(door, tmp_path, monkeypatch):
    shown, secrets = secrets_in(tmp_path / "secret", door, None, monkeypatch)
    assert shown == set() and secrets >= {"noise", "batches", "the noise's past"}
    seeded, _ = secrets_in(tmp_path / "seeded", door, 3, monkeypatch)  # the control
    assert seeded >= {"noise", "the noise's past"}
