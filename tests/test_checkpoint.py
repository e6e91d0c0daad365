"""A run that cannot go on, or cannot be saved, says why; what it has saved is left as it is."""

import contextlib
import dataclasses
import errno
import json
import os
import pickle
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest

from bam.training import loop, rundir
from bam.training.checkpoint import Checkpoints
from tests.cases import assert_same_bits, stop_after, tiny_digits

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
        rundir.check_resumable(stopped, tiny("dp_sgd", seed=0, model__name="auto"))
    with pytest.raises(ValueError, match="holds a run with seed = 0, not 1"):
        loop.train(experiment, 1, stopped)
    assert (stopped / "metrics.jsonl").read_text() == before


def test_resuming_on_other_data_or_another_plan_is_refused(experiment, stopped, monkeypatch):
    dataset = experiment.dataset
    images = dataset.train.images.copy()
    images[5, 3, 3] += 1
    other = dataset._replace(train=dataset.train._replace(images=images))
    with pytest.raises(ValueError, match="other training data"):
        loop.train(loop.build(tiny("dp_sgd"), other), 0, stopped)
    plan = dataclasses.replace(experiment.plan, num_steps=4)
    with pytest.raises(ValueError, match=r"plan's num_steps = 3, not 4"):
        loop.train(dataclasses.replace(experiment, plan=plan), 0, stopped)
    (stopped / "config.json").unlink()
    with pytest.raises(ValueError, match="has checkpoints but no config"):
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
        with pytest.raises(BlockingIOError, match="another process is training in"):
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
    for foreign in ("other run", "junk"):
        shutil.rmtree(stopped / "checkpoints")
        if foreign == "other run":
            shutil.copytree(tmp_path / "other" / "checkpoints", stopped / "checkpoints")
        else:
            (stopped / "checkpoints" / "2").mkdir(parents=True)
            (stopped / "checkpoints" / "2" / "state").write_bytes(b"junk")
        before = sorted(p for p in stopped.rglob("*") if p.is_file())
        with pytest.raises(ValueError, match="checkpoints/2 could not be read"):
            loop.train(experiment, 0, stopped)
        assert sorted(p for p in stopped.rglob("*") if p.is_file()) == before


def test_reading_a_checkpoint_unpickles_nothing(experiment, stopped, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a pickle can run anything")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    with Checkpoints(stopped / "checkpoints") as checkpoints:
        step, _, _ = checkpoints.restore(experiment.init(0))
    assert step == 2
    with pytest.raises(AssertionError, match="run anything"):
        pickle.loads(pickle.dumps(1))


def test_a_checkpoint_returns_what_was_saved_keys_included(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore({"w": np.zeros(3)}) is None
        checkpoints.save(5, {"w": jnp.arange(3.0), "key": jax.random.key(7)}, {"a": 1.5})
        step, state, facts = checkpoints.restore({"w": jnp.zeros(3), "key": jax.random.key(0)})
    assert (step, state["w"].tolist(), facts) == (5, [0, 1, 2], {"a": 1.5})
    assert state["key"] == jax.random.key(7)


def saved_steps(workdir):
    folder = workdir / "checkpoints"
    return [int(p.name) for p in folder.iterdir() if p.name.isdigit()] if folder.exists() else []


@contextlib.contextmanager
def no_file_beyond(num_bytes):
    """What a full disk does, done to this process alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_without_room_for_a_checkpoint_nothing_is_begun_and_nothing_is_lost(
    experiment, stopped, capfd
):
    before = sorted(p for p in stopped.rglob("*") if p.is_file())
    never = lambda row: pytest.fail("a step was taken")  # noqa: E731
    with no_file_beyond(2**16), pytest.raises(OSError, match=r"needs 1\.\d MiB in .*too large"):
        loop.train(experiment, 0, stopped, on_row=never)
    assert sorted(p for p in stopped.rglob("*") if p.is_file()) == before

    with Checkpoints(stopped / "checkpoints") as checkpoints:
        step, state, facts = checkpoints.restore(experiment.init(0))
        with no_file_beyond(2**16), pytest.raises(OSError, match="Earlier ones are as they were"):
            checkpoints.save(step + 1, state, facts)
        checkpoints.save(step + 1, state, facts)  # there is room again
    assert sorted(saved_steps(stopped)) == [step, step + 1]
    assert capfd.readouterr().err == ""  # none of Orbax's traces


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        ValueError("OUT_OF_RANGE: Failed to write 9 bytes [os_error_code='28']"),
        TypeError("a leaf that is no array"),
        OSError(errno.EROFS, "Read-only file system"),
    ],
)
def test_a_checkpoint_that_cannot_be_written_is_said_in_the_words_of_its_cause(
    error, tmp_path, monkeypatch
):
    def fails(*unused, **keys):
        raise error

    monkeypatch.setattr(orbax.checkpoint.CheckpointManager, "save", fails)
    kind = type(error) if isinstance(error, TypeError) else OSError
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(kind) as raised:
        checkpoints.save(1, {"weights": np.zeros(3)}, {})
    number = 28 if isinstance(error, ValueError) else getattr(error, "errno", None)
    assert (os.strerror(number) if number else str(error)) in str(raised.value)
    assert "is the disk full" not in str(raised.value)
