"""One object, one use: shared, forked, threaded, mapped or resumed, no noise is added twice."""

import contextlib
import dataclasses
import errno
import functools
import gc
import hashlib
import json
import os
import sys
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import Partial

import bam
from bam import files, provenance
from bam.core import forks, private_mean, pytree, seeds
from bam.privacy import clip_words, ledger, run
from tests import cases
from tests.own_loop import DATA, PLAN, begin, resume, take
from tests.run_folder import contents, header_of, newest, rewrite_header

CLIP, W = bam.clip_by_l2_norm(1.0), jnp.zeros(2)
ORACLE = bam.dp_sgd(lambda w, x: 0.5 * jnp.sum((w - x) ** 2))
ROWS = jnp.asarray(DATA[:8])
USERS = {
    "num_examples": 20, "expected_batch_size": 4, "groups": np.arange(60) // 3, "group_size": 3,
}  # fmt: skip


def started(oracle=ORACLE, params=W, **changes):
    """A training's transform, its first state and its first batch."""
    private = bam.PrivateTraining(**(PLAN | changes))
    tx = private.gradient(oracle)
    return private, tx, tx.init(params), next(private.batches(DATA))


def refused(match, fn, *args, error=ValueError):
    with pytest.raises(error, match=match) as raised:
        fn(*args)
    assert "\n" not in str(raised.value)


# One process.


def in_a_fork(fn):
    """Returns what a function returns in a child process, or the text of its error.

    JAX computes nothing in the child.
    """
    read, write = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # JAX's threads are not in the child
        child = os.fork()
    if not child:
        try:
            text = str(fn())
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text


def rows_drawn(private):
    return hashlib.sha256(np.asarray(next(private.batches(DATA)).examples)).hexdigest()


def test_a_fork_of_the_process_cannot_draw_take_or_save_a_step(tmp_path):
    private, tx, state, batch = started()
    uses = {
        "batches": lambda: next(private.batches(DATA)),
        "update": lambda: tx.update(batch, state, W),
        "save": lambda: private.save(tmp_path / "folder"),
        "gradient": lambda: bam.PrivateTraining.gradient(private, ORACLE),
    }
    for use in uses.values():
        text = in_a_fork(use)
        assert text.startswith("RuntimeError: this private run was made in process")
        assert "repeat its batches and its noise" in text
    assert private.steps_begun == 1 and not (tmp_path / "folder").exists()
    tx.update(batch, state, W)  # the control: the process itself goes on


def test_a_fork_that_is_not_refused_draws_the_same_batches(monkeypatch):  # the control
    monkeypatch.setattr(forks, "check_not_forked", lambda process, what: None)
    private = bam.PrivateTraining(**PLAN)
    assert in_a_fork(lambda: rows_drawn(private)) == rows_drawn(private)


def test_a_key_or_a_transform_of_before_a_fork_is_refused_after_it():
    key, seeded = bam.secret_key(), bam.seeded_key(0)
    tx = bam.privatize(CLIP, 1.0, 4, bam.secret_key())
    for same in (key, np.array(key)):
        text = in_a_fork(lambda same=same: seeds.check_key(same))
        assert "RuntimeError: this bam.secret_key()" in text
    assert "this bam.secret_key()" in in_a_fork(lambda: bam.gaussian_noise(CLIP, 1.0, key))
    assert "this private transform was made in process" in in_a_fork(lambda: tx.init(W))
    bam.gaussian_noise(CLIP, 1.0, key)  # the control
    # The controls in a fork: a seed's key, and one that is made there.
    assert in_a_fork(lambda: seeds.check_key(seeded)) == "None"
    assert in_a_fork(lambda: seeds.check_key(bam.secret_key())) == "None"


def test_the_tables_of_keys_do_not_grow_for_ever_and_hold_no_key(monkeypatch):
    monkeypatch.setattr(seeds, "MOST_KEYS", 3)
    monkeypatch.setattr(seeds, "_made_in", {})
    keys = [bam.secret_key() for _ in range(5)]
    assert [seeds.is_secret(key) for key in keys] == [False, False, True, True, True]
    words = [np.asarray(key).tobytes() for key in keys]
    assert not set(words) & seeds._made_in.keys()
    assert not seeds.is_secret(bam.seeded_key(0))


def test_a_fork_with_its_parents_id_is_refused_too(monkeypatch):
    """As in a PID namespace of its own, where the first process always has the id 1."""
    monkeypatch.setattr(os, "getpid", lambda: 1234)  # of parent and child
    private, parts = bam.PrivateTraining(**PLAN), bam.privatize(CLIP, 1.0, 4, bam.secret_key())
    uses = [lambda: next(private.batches(DATA)), lambda: parts.init(W)]
    for use in uses:
        assert "would repeat its batches and its noise" in in_a_fork(use)
        use()  # the control: in the process itself
    with monkeypatch.context() as patch:  # the second control: ids alone would let it pass
        patch.setattr(forks, "this_process", lambda: forks.Process(os.getpid(), 0))
        assert "RuntimeError" not in in_a_fork(lambda: next(private.batches(DATA)))


# One thread.


class NoLock:
    def __enter__(self):
        return self

    def __exit__(self, *unused):
        pass


def gradients_of_two_threads(monkeypatch):
    """How many of two threads get the gradient of one batch, at other weights each."""

    class Slow(bam.PrivateTraining):
        """Lets the other thread run between looking whether a batch was used and noting it."""

        def __setattr__(self, name, value):
            if name == "_used" and value:
                time.sleep(0.01)
            super().__setattr__(name, value)

    monkeypatch.setattr(bam, "PrivateTraining", Slow)
    _, tx, state, batch = started()
    gradients, together = [], threading.Barrier(2)

    def update(weights):
        together.wait()
        with contextlib.suppress(ValueError):
            gradients.append(tx.update(batch, state, weights))

    threads = [threading.Thread(target=update, args=(W + shift,)) for shift in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(gradients)


def test_of_two_threads_one_gets_a_batchs_gradient(monkeypatch):
    assert gradients_of_two_threads(monkeypatch) == 1


def test_without_the_lock_both_threads_get_it(monkeypatch):  # the control
    monkeypatch.setattr(run.threading, "RLock", NoLock)
    assert gradients_of_two_threads(monkeypatch) == 2


@pytest.mark.parametrize("is_saved", [False, True])
def test_no_step_begins_and_nothing_is_saved_once_a_training_is_closed(tmp_path, is_saved):
    private, tx, tree = begin()
    if is_saved:
        private.save(tmp_path, tree)
    tree = take(private, tx, tree, 2)
    batches = private.batches(DATA)
    drawn = next(batches)
    private.close()
    later = [
        lambda: next(batches),
        lambda: list(private.batches(DATA)),
        lambda: tx.update(drawn, tree[1], tree[0]),
        lambda: private.save(tmp_path, tree),
    ]
    before = contents(tmp_path)
    for use in later:
        refused("this private run is closed", use)
    assert before == contents(tmp_path)
    assert private.steps_begun == 3


def test_threads_that_write_one_file_both_succeed_and_a_full_disk_leaves_nothing(
    tmp_path, monkeypatch
):
    path, errors = tmp_path / "file", []

    def write(content):
        try:
            for _ in range(30):
                files.write_bytes(path, content)
        except OSError as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=write, args=(bytes([i]) * 1000,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not errors and len(set(path.read_bytes())) == 1

    def full(file):
        raise OSError(errno.ENOSPC, "no space left on device")

    content = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            files.write_bytes(path, b"new")
    assert [x.name for x in tmp_path.iterdir()] == ["file"] and path.read_bytes() == content


@pytest.mark.parametrize("with_another", [False, True])
def test_a_ledger_that_is_removed_or_replaced_meanwhile_ends_the_training(tmp_path, with_another):
    private, tx, tree = begin()
    private.save(tmp_path, tree)
    take(private, tx, tree, 2)
    (tmp_path / "steps_begun").unlink()
    if with_another:
        (tmp_path / "steps_begun").touch()
    with pytest.raises(OSError, match="removed or replaced since training began"):
        next(private.batches(DATA))
    assert private.steps_begun == 2
    private.close()


# One batch.


def appended(batch):
    flipped = batch._replace(examples=-np.asarray(batch.examples))
    return batch._replace(
        examples=np.concatenate([batch.examples, flipped.examples]),
        mask=np.concatenate([batch.mask, batch.mask]),
    )


def reshaped(batch):
    return batch._replace(examples=np.repeat(np.asarray(batch.examples)[:, None], 2, axis=1))


def test_rows_of_another_shape_are_refused_also_where_traced():
    total = bam.dp_sgd(lambda w, x: jnp.sum(w * jnp.sum(x)))
    _, tx, state, batch = started(total)
    refused("the batch was drawn with shapes", tx.update, reshaped(batch), state, W)
    refused("the batch was drawn with shapes", jax.jit(tx.update), reshaped(batch), state, W)
    tx.update(batch, state, W)  # the control: it was not used up


def padding_filled(batch):
    rows = np.array(batch.examples)
    rows[~batch.mask] = rows[batch.mask][0]
    return batch._replace(examples=rows, mask=np.ones_like(batch.mask))


def one_moved(batch):
    mask = np.array(batch.mask)
    mask[[np.flatnonzero(mask)[0], np.flatnonzero(~mask)[0]]] = False, True
    return batch._replace(mask=mask)


def padded(batch):
    return appended(batch)._replace(mask=np.concatenate([batch.mask, 0 * batch.mask > 1]))


@pytest.mark.parametrize("change", [appended, padding_filled, one_moved, padded])
def test_rows_or_a_mask_that_were_changed_are_refused_and_gives_nan_where_traced(change):
    _, tx, state, batch = started()
    refused("its mask was changed", tx.update, change(batch), state, W)
    assert np.isnan(jax.jit(tx.update)(change(batch), state, W)[0]).all()
    augmented = batch._replace(examples=np.asarray(batch.examples) * 2.0)  # the control
    assert np.isfinite(tx.update(augmented, state, W)[0]).all()


def test_a_step_cannot_be_renumbered_in_place_or_by_replacement_to_be_taken_again():
    _, tx, state, batch = started()
    _, state = tx.update(batch, state, W)
    with pytest.raises(ValueError, match="read-only"):
        batch.step[...] += 1
    later = batch._replace(step=np.asarray(batch.step + 1))
    refused("does not follow the state", tx.update, later, state, W)
    assert np.isnan(jax.jit(tx.update)(later, state, W)[0]).all()


def as_list(batch):
    return batch._replace(mask=batch.mask.tolist())


def as_floats(batch):
    return batch._replace(mask=batch.mask.astype(np.float32))


def step_in_a_list(batch):
    return batch._replace(step=np.array([1], np.int32))


@pytest.mark.parametrize("change", [as_list, as_floats, step_in_a_list])
def test_fields_of_a_batch_of_another_kind_are_one_line(change, without_the_tests_type_checks):
    _, tx, state, batch = started()
    refused("of this batch were changed", tx.update, change(batch), state, W)


@pytest.mark.parametrize("shape", [(-1, 1), (1, -1), (-1,)])
def test_rows_of_one_user_cannot_be_made_several_users(shape, without_the_tests_type_checks):
    _, tx, state, batch = started(**USERS)
    rows = np.reshape(batch.examples, (*shape, 2))
    apart = batch._replace(examples=rows, mask=batch.mask.reshape(shape))
    for update in (tx.update, jax.jit(tx.update)):
        refused(
            "the batch was drawn with shapes|of this batch were changed", update, apart, state, W
        )
    tx.update(batch, state, W)  # the control


def test_the_plan_of_a_training_cannot_be_replaced():
    private = bam.PrivateTraining(**PLAN)
    with pytest.raises(AttributeError):
        private.plan = private.plan


def test_threads_that_share_the_batches_end_when_all_are_drawn():
    private, steps, begun = bam.PrivateTraining(**PLAN), [], threading.Barrier(4)

    def draw():
        batches = private.batches(DATA)
        steps.append(int(next(batches).step))
        begun.wait(60)  # a thread that began after the last batch would get a warning
        steps.extend(int(batch.step) for batch in batches)

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(steps) == list(range(1, 11)) and private.steps_begun == 10


def test_batches_of_every_step_and_mask_have_other_tags():
    """A batch's tag is made of its training's tag, its step and which rows are there."""
    private = bam.PrivateTraining(**(PLAN | {"num_epochs": 20}))
    batches = list(private.batches(DATA))
    tags = {np.asarray(batch.tag).tobytes() for batch in batches}
    assert len(tags) == len(batches) == 100


def test_a_mask_with_one_place_more_or_less_is_refused_at_every_place():
    _, tx, state, batch = started()
    for place in range(len(batch.mask)):
        mask = np.array(batch.mask)
        mask[place] = ~mask[place]
        refused("its mask was changed", tx.update,
                batch._replace(mask=mask), state, W)  # fmt: skip
    tx.update(batch, state, W)  # the control


# One training in a folder.


OTHER_CLIP = r"clip = 'bam\.core\.clipping\.ClipByL2Norm\(clip_norm=1\.0\)"
OTHER_GROUPS = "belongs to a run with other groups, or in another order, or lacks its data_key"


def in_words(fn):
    return [fn(f"user {i:02d}") for i in USERS["groups"]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"groups": USERS["groups"][::-1]},
            OTHER_GROUPS,
        ),
        (
            {"groups": np.where(USERS["groups"] == 1, 99, USERS["groups"])},
            OTHER_GROUPS,
        ),
        ({"clip": bam.normalize(1.0)}, OTHER_CLIP),
        (
            {"clip": bam.chain(optax.scale(2.0), CLIP)},
            OTHER_CLIP,
        ),
    ],
)
def test_a_training_of_other_groups_or_another_clip_does_not_go_on(tmp_path, changes, message):
    private, _, tree = begin(**USERS)
    private.save(tmp_path, tree)
    private.close()
    refused(message, lambda: bam.PrivateTraining.resume(tmp_path, **(PLAN | USERS | changes)))
    clip = bam.clip_by_l2_norm(np.float64(1))
    for groups in (USERS["groups"].astype(np.int32), in_words(str)):  # the control
        resume(tmp_path, **(USERS | {"groups": groups, "clip": clip}))[0].close()


@pytest.mark.parametrize("large", [2**60, 10**5000], ids=["float", "digits"])
def test_users_of_large_numbers_that_change_places_do_not_go_on(large, tmp_path):
    groups = [large + int(x) for x in USERS["groups"]]  # NumPy has floats or objects for them
    groups[:3] = [0.0] * 3  # beside a float, NumPy makes floats of all, which are equal then
    private, _, tree = begin(**USERS | {"groups": groups})
    private.save(tmp_path, tree)
    private.close()
    moved = PLAN | USERS | {"groups": [*groups[:3], *groups[6:9], *groups[3:6], *groups[9:]]}
    refused(OTHER_GROUPS, lambda: bam.PrivateTraining.resume(tmp_path, **moved))
    resume(tmp_path, **USERS | {"groups": groups})[0].close()  # the control


def test_the_names_of_users_are_not_in_the_folder(tmp_path):
    for name in ("a", "b"):  # under another key each
        private, _, tree = begin(**USERS | {"groups": np.array(in_words(str))})
        private.save(tmp_path / name, tree)
        private.close()
    everything = b"".join(contents(tmp_path / "a").values())
    a, b = (header_of(tmp_path / name)["digests"] for name in ("a", "b"))
    assert b"user 01" not in everything and a.keys() == b.keys() and a != b


def test_groups_whose_key_is_gone_or_damaged_are_refused_unless_all_steps_are_taken(tmp_path):
    private, tx, tree = begin(**USERS)
    private.save(tmp_path, tree)
    key = (tmp_path / "data_key").read_bytes()
    assert (tmp_path / "data_key").stat().st_mode & 0o777 == 0o600
    others = [x for place, x in contents(tmp_path).items() if place.name != "data_key"]
    assert not any(bytes.fromhex(key.decode()) in x or key in x for x in others)
    private.close()
    (tmp_path / "data_key").write_text("00")
    refused("data_key is damaged", lambda: resume(tmp_path, **USERS))
    (tmp_path / "data_key").unlink()
    refused("or lacks its data_key", lambda: resume(tmp_path, **USERS))
    (tmp_path / "data_key").write_bytes(key)
    private, tx, tree = resume(tmp_path, **USERS)  # the control
    private.save(tmp_path, take(private, tx, tree, 10))
    private.close()
    (tmp_path / "data_key").unlink()
    private, *_ = resume(tmp_path, **USERS)
    assert list(private.batches(DATA)) == []


def scaled_tanh(factor, grads, state, params=None):
    return jax.tree.map(lambda g: factor * jnp.tanh(g), grads), state


def no_state(params):
    return ()


def clip_of_ones_own(factor, kept=1.0):
    """Declares one number and keeps another, which is in no record."""

    def finish(mean, state):
        return jax.tree.map(lambda x: kept * x, mean), state

    return bam.BoundedTransformation(no_state, Partial(scaled_tanh, factor), 2.0, finish)


def test_a_clip_of_ones_own_is_known_by_its_names_and_declared_numbers(tmp_path):
    private, _, tree = begin(clip=clip_of_ones_own(0.5))
    private.save(tmp_path, tree)
    private.close()
    refused("0=0.5", lambda: resume(tmp_path, clip=clip_of_ones_own(0.25)))
    resume(tmp_path, clip=clip_of_ones_own(0.5, kept=2.0))[0].close()


class Counter:
    """A clip's functions as methods, and an object that can be called."""

    def update(self, grads, state, params=None):
        return grads, state

    def __call__(self, mean, state):
        return mean, state

    __eq__ = __hash__ = None


@dataclasses.dataclass(frozen=True)
class Known:
    """An object that JAX does not know as a pytree, whose numbers are compared, too."""

    factor: float

    def update(self, grads, state, params=None):
        return grads, state


def of_numbers(numbers):
    return bam.BoundedTransformation(no_state, Partial(scaled_tanh, numbers), 1.0)


def test_clips_of_other_numbers_or_names_have_other_words_without_addresses():
    own = lambda update, finish=None: bam.BoundedTransformation(no_state, update, 1.0, finish)  # noqa: E731
    clips = [
        *(bam.clip_by_l2_norm(1.0), bam.clip_by_l2_norm(2.0), bam.normalize(1.0)),
        *(bam.normalize(1.0, 0.02), bam.clip_per_layer(1.0), bam.clip_per_layer({"a": 1.0})),
        *(bam.clip_per_layer({"b": 1.0}), bam.chain(optax.scale(2.0), CLIP)),
        *(own(Counter().update), own(Counter().update, Counter())),
        *(own(functools.partial(scaled_tanh, x)) for x in (1.0, 2.0)),
    ]
    words = [clip_words.in_words(clip) for clip in clips]
    assert len(set(words)) == len(words) and "0x" not in "".join(words)
    assert words[0] == "bam.core.clipping.ClipByL2Norm(clip_norm=1.0)"
    again = clip_words.in_words(own(Counter().update, Counter()))
    assert again == words[9] and "Counter" in again
    for one, other in (  # the same clip
        (bam.clip_by_l2_norm(jnp.float32(1)), bam.clip_by_l2_norm(1.0)),
        (of_numbers(0.5), of_numbers(np.float64(0.5))),
        (of_numbers(np.ones(2000, np.float32)), of_numbers(jnp.ones(2000))),
        (own(Known(0.5).update), own(Known(np.float64(0.5)).update)),
    ):
        assert clip_words.in_words(one) == clip_words.in_words(other)
    large = np.ones(2000, np.float32)
    large[1000] = 2
    for one, other in (
        (of_numbers(large), of_numbers(np.ones(2000, np.float32))),
        (own(Known(0.5).update), own(Known(0.25).update)),
    ):
        words = [clip_words.in_words(x) for x in (one, other)]
        assert words[0] != words[1] and max(map(len, words)) < 300


def test_a_training_that_took_no_step_gives_its_folder_back_when_it_is_dropped(tmp_path):
    private = bam.PrivateTraining(**PLAN)
    private.save(tmp_path)
    del private
    gc.collect()
    private, *_ = resume(tmp_path)
    del private, _
    gc.collect()
    resume(tmp_path)[0].close()


DAMAGED = r"0\.npz could not be read: if it is damaged, move it away"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], DAMAGED),
        ({"step": "1"}, DAMAGED),
        ({"step": -1}, DAMAGED),
        ({"step": True}, DAMAGED),
        ({"step": 1}, DAMAGED),  # of none begun
        ({"steps_begun": None}, DAMAGED),
        ({"leaves": [1]}, DAMAGED),
        ({"leaves": [["x", "no such dtype", [2]]]}, DAMAGED),
        ({"record": None}, DAMAGED),
        ({"more": []}, DAMAGED),
        ({"new": 1}, DAMAGED),
        ({"record": {}}, r"0\.npz has num_examples = None, but this run has 20"),
        ({"record": {"noise_multiplier": "much"}}, "noise_multiplier = 'much', but this run has"),
        ({"record": {"epsilon": [1]}}, r"epsilon = \[1\], but this run has"),
        ({"digests": {"groups, or in another order": [1, 2]}}, "to a run with other groups"),
        ({"digests": {"groups, or in another order": "\ud800"}}, "to a run with other groups"),
        ({"processes": [{}]}, r"processes\.jsonl is missing, so the code and devices"),
        ({"steps_begun": 4}, "has 0 steps, but other records have 4"),
    ],
)
def test_facts_that_are_damaged_are_one_line(
    tmp_path, header, message, without_the_tests_type_checks
):
    private, _, tree = begin(**USERS)
    private.save(tmp_path, tree)
    private.close()

    def change(old):
        if not isinstance(header, dict):
            return header
        record = header.get("record") and {"record": old["record"] | header["record"]}
        return old | header | (record or {})

    path = newest(tmp_path)
    content = path.read_bytes()
    rewrite_header(path, change)
    refused(message, lambda: resume(tmp_path, **USERS))
    gc.collect()  # one that was opened is dropped
    path.write_bytes(content)
    resume(tmp_path, **USERS)[0].close()  # the control


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", r"plan\.json is damaged: not JSON"),
        ("[]", r"plan\.json"),
        ("{}", r"plan\.json"),
        ({"noise_multiplier": "much"}, "must be of type float"),
        ({"noise_multiplier": 0.5}, r"plan\.json: epsilon .* is claimed, but its plan gives"),
        ({"epsilon": [1]}, "must be of type float"),
        ({"clip": "another"}, r"plan\.json has clip = 'another', but this run has"),
    ],
)
def test_a_record_that_is_damaged_or_was_edited_is_one_line(
    tmp_path, record, message, without_the_tests_type_checks
):
    private, _, tree = begin()
    private.save(tmp_path, tree)
    private.close()
    path = tmp_path / "plan.json"
    old = files.read_json(path)
    path.write_text(record if isinstance(record, str) else json.dumps(old | record))
    before = contents(tmp_path)
    refused(message, lambda: resume(tmp_path))
    assert contents(tmp_path) == before
    files.write_json(path, old)
    resume(tmp_path)[0].close()  # the control


def test_a_folder_in_place_of_the_ledger_is_one_line(tmp_path):
    private, _, tree = begin()
    private.save(tmp_path, tree)
    private.close()
    (tmp_path / "steps_begun").unlink()
    (tmp_path / "steps_begun").mkdir()
    refused("steps_begun is damaged: it is not a regular file", lambda: resume(tmp_path))


def test_a_statement_names_the_code_of_every_process_that_took_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "git_commit", lambda: "commit A")
    private, tx, tree = begin()
    tree = take(private, tx, tree, 2)
    private.save(tmp_path, tree)  # the steps of before count
    take(private, tx, tree, 1)
    private.close()
    monkeypatch.setattr(provenance, "git_commit", lambda: "commit B")
    private, tx, tree = resume(tmp_path)
    take(private, tx, tree, 2)
    private.write_statement(tmp_path / "PRIVACY.md", "sixty points")
    text = (tmp_path / "PRIVACY.md").read_text(encoding="utf-8")
    assert "commit A" in text and "commit B" in text
    firsts = [row["first_step"] for row in ledger.read_processes(tmp_path)]
    assert firsts == [1, 4]
    private.save(tmp_path, tree)
    private.close()
    (tmp_path / "processes.jsonl").unlink()
    refused("processes.jsonl is missing", lambda: resume(tmp_path))


# One state, one noise.


def total(weights, key, shift=0.0):
    noise = bam.gaussian_noise(CLIP, 1.0, key)
    grad_fn = lambda w, x: w - x + shift  # noqa: E731
    return bam.clipped_sum(grad_fn, CLIP, weights, ROWS, mask=None, noise=noise)[0]


def keys(*shape):
    num = int(np.prod(shape))
    return jnp.stack([bam.secret_key() for _ in range(num)]).reshape(*shape, 8)


TWICE = "the same noise would be added more than once"


def test_an_ensemble_of_one_private_transform_is_refused_where_its_state_is_made():
    tx = bam.privatize(CLIP, 1.0, 4, bam.secret_key())
    for init in (jax.vmap(tx.init), jax.jit(tx.init)):
        refused("outside of jit and vmap", init, jnp.zeros((2, 2)), error=RuntimeError)

    def member(key, grads):  # the control: a key for each
        tx = bam.privatize(CLIP, 1.0, 4, key)
        return tx.update(grads, tx.init(W), W, mask=None)[0]

    of_each = jax.vmap(member)(keys(2), jnp.stack([ROWS, ROWS]))
    assert np.isfinite(of_each).all() and not np.array_equal(*of_each)


def broadcast(tree):
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (2, *jnp.shape(x))), tree)


def test_equal_keys_are_refused_where_vmap_shows_them_and_give_nan_elsewhere():
    equal, weights = broadcast(bam.secret_key()), jnp.ones((2, 2))
    refused(TWICE, jax.vmap(total), weights, equal)
    assert np.isnan(jax.jit(jax.vmap(total))(weights, equal)).all()
    tx = bam.privatize(CLIP, 1.0, 4, bam.secret_key())
    state, rows = broadcast(tx.init(W)), jnp.stack([ROWS, ROWS + 1])
    update = jax.vmap(lambda grads, state: tx.update(grads, state, W, mask=None)[0])
    refused(TWICE, update, rows, state)
    assert np.isnan(jax.jit(update)(rows, state)).all()
    assert np.isfinite(jax.jit(jax.vmap(total))(weights, keys(2))).all()  # the controls
    steps = state._replace(noise=state.noise._replace(step=jnp.arange(2)))
    assert (
        np.isfinite(update(rows, steps)).all() and np.isfinite(jax.jit(update)(rows, steps)).all()
    )


def test_a_vmap_of_a_vmap_needs_keys_that_differ_in_both():
    inner, weights = jax.vmap(total, (None, 0)), jnp.ones((2, 2))
    both = jax.vmap(inner)
    refused(TWICE, jax.vmap(inner, (0, None)), weights, keys(2))
    refused(TWICE, both, weights, broadcast(keys(2)))
    stepped = lambda key, step: bam.clipped_sum(  # noqa: E731
        ORACLE.grad, CLIP, W, ROWS, mask=None, noise=bam.gaussian_noise(CLIP, 1.0, key, step)
    )[0]
    product = jax.vmap(jax.vmap(stepped, (None, 0)), (0, None))
    assert np.isfinite(product(keys(3), jnp.arange(2))).all()  # the control
    a, b, c = keys(3)
    overlapping = jnp.stack([jnp.stack([a, b]), jnp.stack([b, c])])
    refused(TWICE, both, weights, overlapping)
    assert np.isnan(jax.jit(both)(weights, overlapping)).all()
    assert np.isfinite(both(weights, keys(2, 2))).all()  # the control


@pytest.mark.parametrize("compiled", [False, True])
def test_a_vmap_over_something_that_the_gradient_closes_over_is_refused(compiled):
    wrap = jax.jit if compiled else lambda fn: fn
    noise = bam.gaussian_noise(CLIP, 1.0, bam.secret_key())

    def shifted(shift, noise):
        grad_fn = lambda w, x: w - x + shift  # noqa: E731
        return bam.clipped_sum(grad_fn, CLIP, W, ROWS, mask=None, noise=noise)[0]

    refused(TWICE, wrap(jax.vmap(shifted, (0, None))), jnp.arange(2.0), noise)
    each = lambda shift, key: shifted(shift, bam.gaussian_noise(CLIP, 1.0, key))  # noqa: E731
    assert np.isfinite(wrap(jax.vmap(each))(jnp.arange(2.0), keys(2))).all()  # the control
    shift = [0.0]
    _, tx, state, batch = started(bam.dp_sgd(lambda w, x: 0.5 * jnp.sum((w - x + shift[0]) ** 2)))

    def update(value, batch, state):
        shift[:] = [value]
        return tx.update(batch, state, W)[0]

    refused(TWICE, wrap(jax.vmap(update, (0, None, None))), jnp.arange(2.0), batch, state)


def test_no_map_of_a_private_training_runs_whatever_it_maps_over():
    _, tx, state, batch = started()
    weights = jnp.zeros((2, 2))
    for axes, args in [
        ((None, None, 0), (batch, state, weights)),
        ((None, 0, 0), (batch, broadcast(state), weights)),
        ((0, 0, 0), (broadcast(batch), broadcast(state), weights)),
        ((0, None, None), (broadcast(batch), state, W)),
    ]:
        refused(TWICE, jax.vmap(tx.update, axes), *args)
        refused(TWICE, jax.jit(jax.vmap(tx.update, axes)), *args)
    assert np.isfinite(tx.update(batch, state, W)[0]).all()  # the control


def on_devices(fn, *specs, check=False):
    mesh = Mesh(np.array(cases.several_devices(2)), ("devices",))
    specs = [PartitionSpec("devices") if spec else PartitionSpec() for spec in specs]
    out = PartitionSpec("devices")
    return jax.shard_map(fn, mesh=mesh, in_specs=tuple(specs), out_specs=out, check_vma=check)


def test_devices_with_one_key_get_nan_and_a_private_training_is_refused_there():
    weights, key = jnp.ones((2, 2)), bam.secret_key()
    replicated = on_devices(lambda w, key: total(w[0], key)[None], True, False)
    each = on_devices(lambda w, key: total(w[0], key[0])[None], True, True)
    for wrap in (lambda fn: fn, jax.jit):
        assert np.isnan(wrap(replicated)(weights, key)).all()
        assert np.isfinite(wrap(each)(weights, keys(2))).all()  # the control
    assert np.isnan(
        jax.pmap(total, in_axes=(0, None), devices=cases.several_devices(2))(weights, key)
    ).all()
    _, tx, state, batch = started()
    update = on_devices(lambda w, b, s: tx.update(b, s, w[0])[0][None], True, False, False)
    refused("shard_map or pmap", jax.jit(update), weights, batch, state)


def test_two_trainings_of_one_seed_are_warned_of_while_both_exist():
    first = bam.PrivateTraining(**PLAN, seed=5)
    with pytest.warns(RuntimeWarning, match="another transform has an equal key"):
        bam.PrivateTraining(**PLAN, seed=5)
    with warnings.catch_warnings(action="error"):
        bam.PrivateTraining(**PLAN, seed=6)
        bam.PrivateTraining(**PLAN), bam.PrivateTraining(**PLAN)
        first.close()
        bam.PrivateTraining(**PLAN, seed=5)


# The structure of a state, which `optax.tree.map_params` asks `init` for.


def transforms(**changes):
    """A transform of each kind, with correlated noise or not."""
    private = bam.PrivateTraining(**(PLAN | changes))
    strategy = private.plan.mechanism.strategy
    return bam.privatize(CLIP, 1.0, 4, bam.secret_key(), strategy), private.gradient(ORACLE)


@pytest.mark.parametrize("changes", [{}, {"mechanism": {"name": "banded", "bands": 2}}])
def test_asking_for_the_structure_of_a_state_is_no_init(changes):
    others = transforms(**changes)
    for tx, other in zip(transforms(**changes), others, strict=True):
        tx, other = (optax.chain(x, optax.adam(0.1)) for x in (tx, other))
        plus_one = functools.partial(optax.tree.map_params, tx, lambda x: x + 1)
        plus_one(other.init(W))  # before `init`, which it does not use up
        state = tx.init(W)
        mapped = plus_one(state)
        moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), state, mapped)
        names = np.array(pytree.names(state))[jax.tree.leaves(moved)]
        assert {x.rpartition("/")[2] for x in names} <= {"mu", "nu", "previous"} and len(names) > 1
    # A real second state is refused as before.
    part, whole = others
    refused("for other parameters and would add the same noise", part.init, jnp.zeros(3))
    refused("init a second time", whole.init, W, error=RuntimeError)


def structure_of(tx):
    """What `init` gives to `optax.tree.map_params`."""
    states = []
    optax.tree.map_params(lambda x: states.append(tx.init(x)), lambda x: x, None)
    return states[0]


def test_the_structure_of_a_state_has_no_key_and_draws_no_noise():
    part, whole = transforms()
    _, other, _, batch = started()
    for update in (
        lambda: part.update(ROWS, structure_of(part), W, mask=None),
        lambda: whole.update(batch, structure_of(whole), W),
        lambda: other.update(batch, structure_of(other), W),
    ):
        with pytest.raises((ValueError, TypeError)):
            update()
    part.update(ROWS, part.init(W), W, mask=None)  # the control


# What JAX and optax would say in many lines.


ACCUMULATED = "optax.MultiSteps cannot wrap a private gradient.*lower microbatch_size"
WRAPS = {"eager": lambda fn: fn, "jit": jax.jit}
MULTI_STEPS = {
    "mean": {},
    "sum": {"use_grad_mean": False},
    "finite": {"should_skip_update_fn": optax.skip_not_finite},
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("params", [W, {"w": W}, jnp.zeros(())], ids=["array", "dict", "scalar"])
@pytest.mark.parametrize("options", MULTI_STEPS.values(), ids=MULTI_STEPS)
def test_multi_steps_around_privatize_is_one_line_and_draws_no_noise(
    options, params, wrap, monkeypatch
):
    tx = optax.chain(bam.privatize(CLIP, 1.0, 4, bam.secret_key()), optax.sgd(0.1))
    around = optax.MultiSteps(tx, 2, **options)
    state = around.init(params)
    rows = jax.tree.map(lambda x: jnp.ones((8, *x.shape)), params)

    def update(transform, state, mask, given=params):
        fn = lambda rows, state: transform.update(rows, state, given, **mask)  # noqa: E731
        return wrap(fn)(rows, state)

    with monkeypatch.context() as patch:
        patch.setattr(private_mean, "advance_noise", None)
        for mask in ({}, {"mask": None}, {"mask": jnp.ones(8, bool)}):
            refused(ACCUMULATED, update, around, state, mask)
            refused(ACCUMULATED, update, around, state, mask, None)  # without parameters
    updates, _ = update(tx, state.inner_opt_state, {"mask": None})
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)  # the control


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("options", MULTI_STEPS.values(), ids=MULTI_STEPS)
def test_multi_steps_around_a_private_training_is_one_line_and_uses_no_batch_up(
    options, wrap, without_the_tests_type_checks
):
    private = bam.PrivateTraining(**PLAN)
    tx = optax.chain(private.gradient(ORACLE), optax.sgd(0.1))
    around = optax.MultiSteps(tx, 2, **options)
    state, batch = around.init(W), next(private.batches(DATA))
    refused(ACCUMULATED, wrap(around.update), batch, state, W, error=TypeError)
    updates, _ = wrap(tx.update)(batch, state.inner_opt_state, W)
    assert np.isfinite(updates).all()  # the control


def test_multi_steps_around_a_private_training_of_several_parameters_is_refused_by_jax():
    """JAX never calls the transform, and `docs/own_loop.md` quotes its error."""
    private = bam.PrivateTraining(**PLAN)
    oracle = bam.dp_sgd(lambda p, x: 0.5 * jnp.sum((p["w"] - x) ** 2))
    tx, params = optax.MultiSteps(private.gradient(oracle), 2), {"w": W}
    state, batch = tx.init(params), next(private.batches(DATA))
    with pytest.raises(ValueError, match=r"pytree structure error(.|\n)*DrawnBatch"):
        tx.update(batch, state, params)


def test_private_gradients_may_be_averaged_by_multi_steps():
    private = bam.PrivateTraining(**PLAN)
    averaged = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
    tx = optax.chain(private.gradient(ORACLE), averaged)
    state = tx.init(W)
    updates = []
    for batch in private.batches(DATA):
        update, state = tx.update(batch, state, W)
        updates.append(np.any(update != 0))
    assert updates == [False, True] * 5


@pytest.mark.parametrize("params", [W, jnp.zeros(())], ids=["array", "scalar"])
def test_an_ordinary_gradient_is_one_line_without_a_word_on_multi_steps(params):
    tx = bam.privatize(CLIP, 1.0, 4, bam.secret_key())
    state = tx.init(params)
    update = lambda grads, given: tx.update(grads, state, given, mask=None)  # noqa: E731
    for given in (params, None):
        refused(
            r"use jax\.vmap\(jax\.grad\(loss_fn\), in_axes=\(None, 0\)\)$", update, params, given
        )
    refused("a gradient for each of 1 parameters, got 2", update, {"a": ROWS, "b": ROWS}, params)
    update(jnp.ones((8, *params.shape)), None)  # the control


def test_a_sharding_constraint_in_the_loss_with_a_mesh_is_one_line():
    mesh = Mesh(np.array(cases.several_devices(2)), ("devices",))
    where = NamedSharding(mesh, PartitionSpec("devices"))
    oracle = bam.dp_sgd(
        lambda w, x: 0.5 * jnp.sum(jax.lax.with_sharding_constraint(w - x, where) ** 2)
    )
    _, tx, state, batch = started(oracle, mesh=mesh)
    refused("leave sharding constraints out of the loss", tx.update, batch, state, W)


def test_a_name_like_that_of_a_sharding_constraint_is_no_constraint():
    @jax.jit
    def my_sharding_constraint_free(w, x):
        return 0.5 * jnp.sum(checkpoint_name(w - x, "no_sharding_constraint") ** 2)

    mesh = Mesh(np.array(cases.several_devices(2)), ("devices",))
    _, tx, state, batch = started(bam.dp_sgd(my_sharding_constraint_free), mesh=mesh)
    assert jnp.all(jnp.isfinite(tx.update(batch, state, W)[0]))


def test_a_shard_map_in_the_loss_with_a_mesh_is_one_line():
    mesh = Mesh(np.array(cases.several_devices(2)), ("devices",))
    every = PartitionSpec()
    half = jax.shard_map(lambda x: x / 2, mesh=mesh, in_specs=every, out_specs=every)
    oracle = bam.dp_sgd(lambda w, x: jnp.sum(half(w - x) ** 2))
    _, tx, state, batch = started(oracle, mesh=mesh)
    refused("cannot be computed on one device of the mesh", tx.update, batch, state, W)


def test_parameters_without_an_array_are_one_line():
    match = "the parameters are a tree without arrays"
    refused(match, bam.PrivateTraining(**PLAN).gradient(ORACLE).init, {})
    tx = bam.privatize(CLIP, 1.0, 4, bam.secret_key())
    refused("got a tree without an array", lambda: tx.update({}, tx.init({}), {}, mask=None))
    no_gradient = lambda: bam.clipped_sum(lambda w, x: w, CLIP, {}, ROWS, mask=None)  # noqa: E731
    refused("the gradient is a tree without arrays", no_gradient)


def test_a_key_of_jax_random_is_saved_as_such(tmp_path):
    private, _, tree = begin()
    key, keys_of_views = jax.random.key(7), jax.random.split(jax.random.key(8, impl="rbg"), 3)
    private.save(tmp_path, (tree, key, keys_of_views))
    private.close()
    private, _, like = resume(tmp_path, restored=False)
    others = jax.random.key(0), jax.random.split(jax.random.key(0, impl="rbg"), 3)
    _, again, views = private.restore((like, *others))
    assert again == key and (views == keys_of_views).all()
    refused(r"but this training has", private.restore, (like, others[1], others[0]))
    private.close()
