"""A training by a loop of one's own that is killed and resumed never spends more than its plan."""

import dataclasses
import gc
import itertools
import os
import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bam
from bam import files, provenance
from bam.core import seeds
from bam.privacy import processes
from bam.privacy.ledger import Ledger
from bam.privacy.run import PrivateRun
from tests.cases import refused
from tests.own_loop import DATA, NUM_STEPS, PLAN, begin, resume, take
from tests.run_folder import begun, contents, made_by, newest, rewrite_header

ZEROS = jnp.zeros(2)


@pytest.fixture
def folder(tmp_path):
    """A training without a seed that ended two steps after it was saved, at its fourth."""
    private, tx, tree = begin()
    private.save(tmp_path, tree)
    tree = take(private, tx, tree, 4)
    private.save(tmp_path, tree)
    take(private, tx, tree, 2)
    private.close()
    return tmp_path


def equal(a, b):
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def test_without_a_seed_lost_steps_count_and_all_noise_is_new(folder):
    private, tx, tree = resume(folder)
    tag = tree[1][0].tag
    assert private.steps_begun == 6 and private.epsilon_spent == private.plan.epsilon_after(6)
    noise = []
    take(private, tx, tree, NUM_STEPS, noise)
    assert len(noise) == NUM_STEPS - 6 and private.epsilon_spent == private.plan.epsilon
    with pytest.warns(UserWarning, match="all 8 steps"):
        assert list(private.batches(DATA)) == []
    private.close()
    again, _, tree = resume(folder)  # all steps are begun: what was saved is all there is
    assert list(again.batches(DATA)) == [] and again.steps_begun == NUM_STEPS
    again.close()
    assert not equal(tag, tree[1][0].tag)


def test_what_was_saved_is_given_back_but_for_secrets(tmp_path, monkeypatch):
    seed = random.Random(7).getrandbits(256)
    with monkeypatch.context() as patch:  # the seed that the operating system gives
        words = np.frombuffer(seed.to_bytes(32), np.uint32)
        patch.setattr(processes, "random_words", lambda num_words: words)
        private, tx, tree = begin()
    tree = take(private, tx, tree, 3)
    others = {"half": jnp.ones(3, jnp.bfloat16), "count": np.int64(7), "none": None, "e": []}
    others["scalar"] = jnp.float32(0.5)
    private.save(tmp_path, (tree, others))
    key = np.asarray(tree[1][0].privatize.noise.key).tobytes()
    assert key == np.asarray(seeds.seeded_key(seed)).tobytes()
    files = b"".join(contents(tmp_path).values())
    assert key not in files and seeds.host_key(seed, "batches").tobytes() not in files
    assert (tmp_path / "steps_begun").read_bytes() == b"..."  # it began before it was saved
    assert tmp_path.stat().st_mode & 0o777 == 0o700 or os.umask(0o77) is None
    private.close()
    private, _, like = resume(tmp_path, restored=False)
    again, same = private.restore((like, jax.tree.map(lambda x: 0 * x, others)))
    assert equal(same, others) and same["half"].dtype == jnp.bfloat16
    assert equal(again[0], tree[0]) and equal(again[1][1:], tree[1][1:])
    mine, theirs = again[1][0], tree[1][0]
    assert equal(mine.previous, theirs.previous) and not equal(mine.tag, theirs.tag)
    assert not equal(mine.privatize.noise.key, theirs.privatize.noise.key)
    private.close()


def test_with_a_seed_the_key_is_in_the_file(tmp_path):  # the control: it would be seen
    private, _, tree = begin(seed=1)
    private.save(tmp_path, tree)
    key = np.asarray(tree[1][0].privatize.noise.key).tobytes()
    assert key in b"".join(contents(tmp_path).values())


def test_leaves_that_are_keys_or_no_numbers_are_refused_before_a_folder_is_made(tmp_path):
    private, _, tree = begin()
    for leaves in (jax.tree.leaves(tree), {"f": jnp.tanh}, ["text"]):
        with pytest.raises(ValueError, match="cannot be saved"):
            private.save(tmp_path / "new", leaves)
    assert not (tmp_path / "new").exists()


def damaged(name, change):
    def damage(folder):
        path = newest(folder) if name == "checkpoint" else folder / name
        path.write_bytes(change(path.read_bytes()))

    return damage


def of_another_training(folder):
    private, *_ = begin(num_epochs=3)
    private.save(folder / "other", None)
    shutil.copy(folder / "other" / "plan.json", folder)


def with_a_checkpoint_of_another_training(folder):
    private, *_ = begin(num_epochs=3)
    private.save(folder / "other", None)
    shutil.copy(newest(folder / "other"), newest(folder))


def renamed(folder):
    newest(folder).rename(folder / "checkpoints" / "5.npz")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "plan.json").unlink(), "has no saved training"),
        (damaged("plan.json", lambda x: x[:-40]), r"^[^:]*plan\.json is damaged: not JSON$"),
        (damaged("checkpoint", lambda x: x[:-40]), r"4\.npz could not be read: if it is damaged"),
        (damaged("checkpoint", lambda x: b""), r"4\.npz could not be read: if it is damaged"),
        (damaged("checkpoint", lambda x: x[:200] + b"X" + x[201:]), "could not be read"),
        (renamed, r"5\.npz was renamed: it is the checkpoint of step 4"),
        (lambda folder: (folder / "steps_begun").unlink(), "steps_begun is missing"),
        (damaged("steps_begun", lambda x: x[:3]), "has 3 steps, but other records have 4"),
        (damaged("steps_begun", lambda x: x + b"x"), "steps_begun is damaged"),
        (of_another_training, r"plan\.json has num_steps = 15, but this run has 10"),
        (with_a_checkpoint_of_another_training, r"4\.npz has num_steps = 15, but this run has 10"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused_in_one_line_and_left_alone(folder, damage, message):
    damage(folder)
    before = contents(folder)
    with pytest.raises(ValueError, match=message) as refused:
        resume(folder)
    assert "\n" not in str(refused.value)
    assert contents(folder) == before


def test_a_file_named_by_no_number_is_no_checkpoint(folder):
    (folder / "checkpoints" / "\u00b2.npz").write_bytes(b"")  # a digit that int() does not read
    private, *_ = resume(folder)
    assert private.steps_begun == 6
    private.close()


def test_without_its_newest_checkpoint_a_training_goes_on_from_the_one_before(folder):
    newest(folder).write_bytes(b"")
    with pytest.raises(ValueError, match="move it away to resume from the one before it"):
        resume(folder)
    newest(folder).rename(folder / "away")
    private, _, tree = resume(folder)
    assert private.steps_begun == 6 and not np.any(tree[0])  # it was saved before its first step
    numbers = [int(batch.step) for batch in private.batches(DATA)]
    assert numbers == [1, 2, 3, 4]  # six of ten were lost
    private.close()


@pytest.mark.parametrize(("seed", "lost"), [(None, 2), (3, 0)])
def test_steps_are_numbered_by_those_taken_and_lost_ones_count_without_a_seed(tmp_path, seed, lost):
    private, tx, tree = begin(seed=seed)
    tree = take(private, tx, tree, 4)
    private.save(tmp_path, tree)
    take(private, tx, tree, 2)
    private.close()
    private, tx, tree = resume(tmp_path, seed=seed)
    batch = next(private.batches(DATA))
    assert (int(batch.step), private.steps_begun) == (5, 5 + lost)
    _, state = tx.update(batch, tree[1], tree[0])
    assert int(state[0].privatize.noise.step) == 5
    assert len(list(private.batches(DATA))) == NUM_STEPS - 5 - lost
    private.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_epochs": 4}, "num_steps = 10, but this run has 20"),
        ({"num_examples": 61}, "num_examples = 60, but this run has 61"),
        ({"expected_batch_size": 10}, "expected_batch_size = 12, but this run has 10"),
        ({"delta": 1e-4}, r"delta = 0\.001, but this run has 0\.0001"),
        ({"accountant": "pld"}, "accountant = 'rdp', but this run has 'pld'"),
        (
            {"mechanism": {"name": "banded", "bands": 2}},
            r"mechanism_options = \{\}, but this run has \{'bands': 2\}",
        ),
        ({"epsilon": 4.0}, "target_epsilon = 3.0, but this run has 4.0"),
        ({"epsilon": 2.0}, r"plan\.json: the plan's epsilon 2\.99\d* is above the target, 2\.0"),
        ({"clip": bam.clip_by_l2_norm(2.0)}, "sensitivity = 1.0, but this run has 2.0"),
        ({"seed": 1}, "seed = None, but this run has 1"),
        ({"trainable": "x"}, "trainable = '', but this run has 'x'"),
        ({"num_examples_given": True}, "num_examples_given = False, but this run has True"),
        ({"groups": np.arange(60), "group_size": 1}, "unit = 'example', but this run has 'user'"),
    ],
)
def test_another_training_does_not_go_on_in_a_folder(folder, changes, message):
    with pytest.raises(ValueError, match=message) as refused:
        bam.PrivateTraining.resume(folder, **(PLAN | changes))
    assert "\n" not in str(refused.value)
    resume(folder)[0].close()  # the control


def test_one_call_begins_in_a_folder_and_goes_on_there(tmp_path):
    for folder in (tmp_path / "new", tmp_path):  # one that is made, and an empty one
        private, tx, tree = begin(folder=folder)
        assert (folder / "plan.json").exists() and private.steps_begun == 0
        assert equal(private.restore(tree)[0], tree[0]) and private.plan == begin()[0].plan
        private.close()
        private, tx, tree = begin(folder=folder)  # nothing was saved yet
        tree = take(private, tx, private.restore(tree), 4)
        private.save(folder, tree)
        private.close()
        private, tx, like = begin(folder=folder)
        restored = private.restore(like)
        assert equal(restored[0], tree[0]) and not equal(like[0], tree[0])
        take(private, tx, restored, NUM_STEPS)
        private.close()
        assert begun(folder) == private.steps_begun == NUM_STEPS


def test_a_training_that_goes_on_plans_nothing_and_takes_the_recorded_noise(folder, monkeypatch):
    plan = bam.PrivateTraining(**PLAN).plan
    path, other = folder / "plan.json", np.nextafter(plan.noise_multiplier, np.inf)
    runs, make = [], PrivateRun.__init__
    monkeypatch.setattr("bam.privacy.recorded_plan.with_epsilon", lambda _: pytest.fail("it plans"))
    monkeypatch.setattr(PrivateRun, "__init__", lambda *given: (runs.append(0), make(*given))[1])
    for noise in (plan.noise_multiplier, other):  # as another version might have planned it
        files.write_json(path, files.read_json(path) | {"noise_multiplier": noise})
        rewrite_header(newest(folder), lambda header: header | {"record": files.read_json(path)})
        private = bam.PrivateTraining(**PLAN, folder=folder)
        private.close()
        assert private.plan.noise_multiplier == noise
    assert len(runs) == 2
    with pytest.raises(pytest.fail.Exception):  # the control
        bam.PrivateTraining(**PLAN)


@pytest.mark.parametrize("of_plan", [False, True], ids=["arguments", "plan"])
def test_a_training_goes_on_by_its_version_of_bam_alone(tmp_path, of_plan):
    plan = bam.PrivateTraining(**PLAN).plan
    arguments = {"plan": plan, "clip": PLAN["clip"]} if of_plan else dict(PLAN)
    arguments["folder"] = tmp_path
    private = bam.PrivateTraining(**arguments)
    next(private.batches(DATA))
    private.close()
    patch = ".".join([*provenance.versions()["bam"].split(".")[:2], "999"])
    made_by(tmp_path, "0.3.0")
    content = contents(tmp_path)
    only = (
        r"holds a training of bam 0\.3\.0, which only that version continues: go on with that one"
    )
    refused(only, bam.PrivateTraining, **arguments)
    assert contents(tmp_path) == content
    made_by(tmp_path, patch)  # the control
    assert bam.PrivateTraining(**arguments).steps_begun == 1


def test_a_folder_is_one_trainings_and_one_processs_at_a_time(folder, tmp_path):
    private, _, tree = resume(folder)
    with pytest.raises(BlockingIOError, match="is in use in this process"):
        resume(folder)
    with pytest.raises(ValueError, match="this training is already saved in"):
        private.save(tmp_path / "elsewhere", tree)
    other, _, new = begin()
    with pytest.raises(ValueError, match="holds a training: save this one in another folder"):
        other.save(folder, new)
    private.close()
    with pytest.raises(ValueError, match="this private run is closed"):
        next(private.batches(DATA))
    with pytest.raises(ValueError, match="holds a training: save this one in another folder"):
        other.save(folder, new)
    with pytest.raises(ValueError, match="has no saved training"):
        resume(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists() and not (tmp_path / "elsewhere").exists()


def test_a_training_that_is_dropped_gives_its_folder_back(folder):
    private, tx, tree = resume(folder)
    take(private, tx, tree, 1)
    del private, tx, tree
    gc.collect()
    resume(folder)[0].close()


def test_other_data_and_other_arrays_are_refused(folder):
    private, _, like = resume(folder, restored=False)
    for data in (DATA[:, :1], DATA.astype(np.float64), {"x": DATA, "y": DATA}):
        with pytest.raises(ValueError, match="the training began with data"):
            private.batches(data)
    for other in ((*like, ZEROS), like[0], (jnp.zeros(3), like[1]), (ZEROS.astype(int), like[1])):
        with pytest.raises(ValueError, match=r"4\.npz has .*, but this training has"):
            private.restore(other)
    with pytest.raises(ValueError, match="this training was not saved"):
        begin()[0].restore(like)
    private.close()


class KilledError(BaseException):
    """Stands for the end of the process: nothing in `bam` handles it."""


def killed_at(monkeypatch, number):
    """Kills before or after the `number`-th time that something reaches the disk or is counted."""
    calls = itertools.count()

    def dangerous(function):
        def call(*arguments, **options):
            if next(calls) == number:
                raise KilledError
            result = function(*arguments, **options)
            if next(calls) == number:
                raise KilledError
            return result

        return call

    monkeypatch.setattr(os, "fsync", dangerous(os.fsync))
    monkeypatch.setattr(Path, "replace", dangerous(Path.replace))
    monkeypatch.setattr(Ledger, "begin", dangerous(Ledger.begin))


def given_when_killed(folder, monkeypatch, numbers):
    """Batches given by a training that is killed at each of these points and then let alone."""
    given, private = 0, bam.PrivateTraining(**PLAN)
    for number in (*numbers, -1):
        with monkeypatch.context() as patch:
            killed_at(patch, number)
            try:
                private.close()
                assert given == 0 or (folder / "plan.json").exists()
                private = bam.PrivateTraining(**PLAN, folder=folder)
                for batch in private.batches(DATA):
                    given += 1
                    if batch.step % 3 == 0:
                        private.save(folder)
            except KilledError:
                pass
    private.close()
    return given


POINTS = [*([n] for n in range(0, 60, 4)), [20] * 9]
POINTS += [random.Random(seed).sample(range(60), 8) for seed in range(4)]


@pytest.mark.parametrize("numbers", POINTS, ids=str)
def test_batches_given_are_in_the_ledger_and_the_ledger_in_the_plan(tmp_path, monkeypatch, numbers):
    given = given_when_killed(tmp_path, monkeypatch, numbers)
    assert 0 < given <= begun(tmp_path) == NUM_STEPS


def test_steps_of_before_a_folder_are_in_its_ledger_once_a_training_can_go_on_there(
    tmp_path, monkeypatch
):
    is_going_on = set()
    for number in range(60):
        private = bam.PrivateTraining(**PLAN)
        assert len([*zip(range(3), private.batches(DATA), strict=False)]) == 3
        folder = tmp_path / str(number)
        with monkeypatch.context() as patch:
            killed_at(patch, number)
            try:
                private.save(folder)
                is_saved = True
            except KilledError:
                is_saved = False
        private.close()
        is_going_on.add((folder / "plan.json").exists())
        if (folder / "plan.json").exists():
            again = bam.PrivateTraining.resume(folder, **PLAN)
            assert again.steps_begun == 3
            again.close()
    assert is_saved and is_going_on == {True, False}


def test_without_a_ledger_killed_trainings_give_more_batches_than_planned(tmp_path, monkeypatch):
    """Control."""
    read = Ledger.__init__
    monkeypatch.setattr(Ledger, "__init__", lambda self, path, *rest: read(self, None, *rest))
    assert given_when_killed(tmp_path, monkeypatch, [20] * 9) > NUM_STEPS


def test_a_batch_is_given_when_its_step_is_on_the_disk(tmp_path, monkeypatch):
    """A power cut keeps what was forced to the disk, and perhaps no more."""
    forced, fsync, counts = {}, os.fsync, str(tmp_path / "steps_begun")

    def note_fsync(descriptor):
        fsync(descriptor)
        forced[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size

    monkeypatch.setattr(os, "fsync", note_fsync)
    private, *_ = begin()
    private.save(tmp_path)
    given = [(int(batch.step), forced[counts]) for batch in private.batches(DATA)]
    private.close()
    assert given == [(step, step) for step in range(1, NUM_STEPS + 1)]
    monkeypatch.setattr(Ledger, "force", lambda self: None)  # the control
    private, *_ = begin()
    private.save(tmp_path / "other")
    next(private.batches(DATA))
    private.close()
    assert forced.get(str(tmp_path / "other" / "steps_begun"), 0) == 0


def test_of_correlated_noise_the_steps_that_a_period_lacks_count_as_begun(tmp_path):
    for seed, num_begun in ((None, 8), (3, 5)):  # a seed's noise goes on: the control
        settings = {"mechanism": {"name": "banded", "bands": 4}, "seed": seed}
        folder, settings = tmp_path / str(seed), PLAN | settings
        private = bam.PrivateTraining(**settings)
        private.save(folder)
        for _ in zip(range(5), private.batches(DATA), strict=False):
            pass
        private.save(folder)
        private.close()
        private = bam.PrivateTraining.resume(folder, **settings)
        private.close()
        assert private.steps_begun == num_begun


@pytest.mark.parametrize(("num_saved", "num_begun"), [(10, 10), (9, 12)])
def test_after_the_last_step_a_period_lacks_nothing(num_saved, num_begun, tmp_path):
    """The control is a run killed before it ends, where the resumed run counts more steps."""
    options = {"num_examples": 60, "expected_batch_size": 12, "delta": 1e-3, "accountant": "rdp"}
    banded = {"name": "banded", "bands": 4}
    plan = bam.make_plan(**options, num_steps=14, epsilon=3.0, mechanism=banded)
    plan = dataclasses.replace(plan, spare_steps=4)
    for _ in range(2):
        run = PrivateRun(plan)
        run.open(tmp_path, plan.to_json())
        for step in [] if run.steps_begun else run.steps():
            if step == num_saved:
                run.save(None)
        run.close()
    assert run.steps_begun == begun(tmp_path) == num_begun
