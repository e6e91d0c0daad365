"""Users in the place of examples: their rows, gradients and plan, and what is given away."""

import array
import collections
import csv
import dataclasses
import functools
import json
import re
from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import bam
from bam import errors, files
from bam.audit import canary, checks, one_run, whole_run
from bam.audit.audited import with_step
from bam.core import oracles
from bam.data import datasets, users
from bam.data.preprocessing import Preprocessing
from bam.data.sources import parquet
from bam.images import importing, listing
from bam.privacy import statement, user_ids
from bam.privacy.plan import Population
from bam.release import export
from bam.training import config as base
from bam.training import examples, loading, loop
from tests import runs
from tests.cases import (
    assert_close,
    assert_same_bits,
    mlp_batch,
    mlp_loss,
    mlp_params,
    norm64,
    random_images,
    refused,
    thoroughly,
    without_mu,
    write_parquet,
)

IMAGES = random_images("toy", 12, 6, 0.4, 0.3)
LABELS = IMAGES.train.labels
IDS = np.array([7, 5, 7, 7, 9, 7, 5, 7, 9, 7, 7, 3])  # 3: 1 row, 5: 2, 7: 7, 9: 2


def config_of(method="dp_sgd", size=3, **changes):
    config = base.get_config(method)
    config.update({"num_steps": 3, "microbatch_size": 2, "accountant": "rdp", "epsilon": 4.0})
    config.expected_batch_size = 2
    config.model = {"name": "linear", "width": 1}
    config.dataset.group_size = size
    config.update_from_flattened_dict(changes)
    return config


def build(ids=IDS, images=IMAGES, **options):
    return loop.build(config_of(**options), images._replace(users=ids))


# The rows of users.


def test_a_user_keeps_at_most_k_evenly_spaced_rows_and_users_are_in_the_order_of_their_ids():
    assert users.table(IDS, 3).tolist() == [[11, -1, -1], [1, 6, -1], [0, 3, 7], [4, 8, -1]]
    assert users.table(IDS, 1).tolist() == [[11], [1], [0], [4]]
    assert users.table(np.arange(4), 2).tolist() == [[0, -1], [1, -1], [2, -1], [3, -1]]


def test_no_user_has_a_say_in_which_rows_of_another_are_kept():
    ids = np.random.default_rng(0).integers(0, 20, 200)
    whole = users.table(ids, 5)
    for user in range(20):
        kept = np.flatnonzero(ids != user)
        without = users.table(ids[kept], 5)
        as_before = np.where(without < 0, -1, kept[without])
        np.testing.assert_array_equal(as_before, np.delete(whole, user, axis=0))
        own = whole[user][whole[user] >= 0]
        assert (ids[own] == user).all()
        assert len(own) == min(5, np.sum(ids == user)) == len(set(own.tolist()))


def test_the_training_split_has_a_row_for_each_user_and_marks_empty_places():
    made = users.group_by_user(IMAGES._replace(users=IDS), 3)
    assert made.train.images.shape == (4, 3, 4, 4, 1)
    labels = IMAGES.train.labels
    assert made.train.labels.tolist() == [
        [labels[11], -1, -1], [labels[1], labels[6], -1], labels[[0, 3, 7]].tolist(),
        [labels[4], labels[8], -1],
    ]  # fmt: skip
    np.testing.assert_array_equal(made.train.images[2], IMAGES.train.images[[0, 3, 7]])
    assert made.test is IMAGES.test
    assert users.group_by_user(IMAGES, 0) is IMAGES


# The gradient of a user.


def test_a_run_says_how_many_images_of_users_it_leaves_out():
    data, lines = IMAGES._replace(users=IDS), []
    loop.build(config_of(size=3), data, log=lines.append)
    line = "at most 3 images of each user are used; 4 of 12 are not (NOT PRIVATE)"
    assert line in lines  # 4 of the 7 of user 7
    lines.clear()
    loop.build(config_of(size=7), data, log=lines.append)  # the control
    assert not [x for x in lines if "at most" in x]


def test_with_one_example_each_a_run_is_the_ordinary_run_to_the_bit():
    views = {"augment.views": 3, "augment.shift": 1}
    ordinary = loop.build(config_of("bam_sam", 0, **views), IMAGES)
    of_users = build(np.arange(12), method="bam_sam", size=1, **views)
    found = [loop.train(built, seed=0).state.params for built in (ordinary, of_users)]
    assert_same_bits(*found)
    images, labels = of_users.dataset.train
    other = of_users.dataset._replace(train=datasets.Split(images, labels[::-1]))
    wrong = with_step(dataclasses.replace(of_users, load=lambda: other), of_users.step)
    wrong = loop.train(wrong, seed=0)  # the control
    assert norm64(wrong.state.params) != norm64(found[0])


def gradients(built, split=None, clipped=False):
    """Of each user alone, at the first weights."""
    state = built.init(0)
    split = split or built.dataset.train
    numbers = (np.array([i]) for i in range(built.plan.num_examples))
    rows = (examples.rows_at(split, number, built.mesh) for number in numbers)
    means = [built.mean_gradients(state, row)[0] for row in rows]
    return [jax.device_get(mean.clipped if clipped else mean.gradient) for mean in means]


@functools.cache
def three_each():
    return build()


METHODS = {
    "dp_sgd": {}, "dp_sat": {"radius": 0.1}, "bam_sam": {"radius": 0.1},
    "bam_exact": {"penalty": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("method", thoroughly(METHODS, "bam_exact"))
def test_a_run_and_a_loop_of_ones_own_take_the_same_gradient_of_a_user(method):
    options = {f"method.{key}": value for key, value in METHODS[method].items()}
    options |= {"num_steps": 4, "optimizer.learning_rate": 0.5, "seed": 0}
    built = build(method=method, optimizer={"name": "sgd", "learning_rate": 0.5}, **options)
    whole = loop.train(built, seed=0).state

    def loss(params, row):
        image, label = row
        return built.parts.model.loss(params, {"image": image[None], "label": label})

    private = bam.PrivateTraining(
        num_examples=4, expected_batch_size=2, num_epochs=2, epsilon=4.0, delta=1e-5, seed=0,
        accountant="rdp", clip=bam.clip_by_l2_norm(1.0), groups=IDS, group_size=3,
    )  # fmt: skip
    assert private.plan == built.plan
    params = built.init(0).params
    oracle = getattr(bam, method)(loss, **METHODS[method])
    tx = optax.chain(private.gradient(oracle), optax.sgd(0.5))
    state = tx.init(params)
    for batch in private.batches((datasets.normalize(IMAGES, IMAGES.train.images), LABELS)):
        updates, state = tx.update(batch, state, params)
        params = optax.apply_updates(params, updates)
    assert_close(params, whole.params, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_ascends_along_the_users_gradient_and_not_along_each_examples(method):
    params, rows = mlp_params(), mlp_batch(2)
    oracle = getattr(bam, method)(mlp_loss, **METHODS[method])
    at = oracle.ascend(params, params)
    joint = oracle.with_loss(oracles.mean_loss).grad(at, (rows, jnp.ones(2, bool)))
    separate = [oracle.grad(at, jax.tree.map(lambda x, i=i: x[i], rows)) for i in range(2)]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *separate)
    difference = jax.tree.map(jnp.subtract, joint, mean)
    apart = norm64(difference) / norm64(joint)
    if method.startswith("bam"):
        assert 0.01 < apart < 0.5
    else:
        assert apart < 1e-6
    alone = oracle.with_loss(oracles.mean_loss).grad(at, (rows, jnp.array([True, False])))
    assert_close(alone, separate[0], rtol=1e-5, atol=1e-6)


def test_an_oracle_without_a_gradient_of_a_user_is_refused_where_users_are_the_unit():
    def training(**users):
        return bam.PrivateTraining(
            num_examples=4, expected_batch_size=2, num_epochs=1, epsilon=4.0, delta=1e-5,
            accountant="rdp", clip=bam.clip_by_l2_norm(1.0), **users,
        )  # fmt: skip

    def method(loss_fn):
        return bam.Oracle(lambda params, previous: params, jax.grad(loss_fn))

    with pytest.raises(ValueError, match="cannot use group_size or trainable"):
        training(groups=IDS, group_size=3).gradient(method(mlp_loss))
    training(groups=IDS, group_size=3).gradient(oracles.method(method)(mlp_loss))
    training().gradient(method(mlp_loss))  # the control: of examples


def test_a_method_that_changes_anothers_gradient_changes_it_for_users_too():
    @oracles.method
    def doubled(loss_fn):
        inner = bam.bam_sam(loss_fn, 0.1)
        grad = lambda *at: jax.tree.map(lambda g: 2 * g, inner.grad(*at))  # noqa: E731
        return bam.Oracle(inner.ascend, grad)

    user = mlp_batch(2), jnp.ones(2, bool)
    inner, changed = (
        oracle.with_loss(oracles.mean_loss).grad(mlp_params(), user)
        for oracle in (bam.bam_sam(mlp_loss, 0.1), doubled(mlp_loss))
    )
    assert_close(changed, jax.tree.map(lambda g: 2 * g, inner), rtol=1e-6, atol=1e-7)


def test_a_users_gradient_is_the_mean_of_those_of_its_examples():
    alone = gradients(loop.build(config_of(size=0), IMAGES))
    of_users = gradients(three_each())
    for found, rows in zip(of_users, ([11], [1, 6], [0, 3, 7], [4, 8]), strict=True):
        mean = jax.tree.map(lambda *x: np.mean(x, axis=0), *(alone[row] for row in rows))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, mean)


def test_a_users_gradient_is_bounded_as_one_however_many_examples_it_has():
    large = IMAGES._replace(train=IMAGES.train._replace(labels=np.zeros(12, np.int32)))
    ids = np.repeat([0, 1], [10, 2])
    own = {"clip_norm": 0.1}
    clipped = gradients(build(ids, large, size=10, **own), clipped=True)
    assert [norm64(g) <= 0.1 * (1 + 1e-5) for g in clipped] == [True, True]
    alone = gradients(loop.build(config_of(size=0, **own), large), clipped=True)
    added = jax.tree.map(lambda *x: np.sum(x, axis=0), *alone[:10])
    assert norm64(added) > 3 * 0.1  # the control: what a person gives to a run that bounds examples


def test_an_empty_place_adds_nothing_whatever_it_holds():
    built = three_each()
    images, labels = (x.copy() for x in built.dataset.train)
    expected = gradients(built)
    images[labels < 0] = 255 - images[labels < 0]
    for found, right in zip(
        gradients(built, datasets.Split(images, labels)), expected, strict=True
    ):
        assert_same_bits(found, right)
    images[labels >= 0] = 255 - images[labels >= 0]  # the control
    wrong = gradients(built, datasets.Split(images, labels))
    assert all(norm64(a) != norm64(b) for a, b in zip(wrong, expected, strict=True))


def test_every_example_of_a_user_has_views_of_its_own():
    same = np.broadcast_to(IMAGES.train.images[:1], (12, 4, 4, 1))
    alike = IMAGES._replace(train=IMAGES.train._replace(images=same), users=np.repeat([0, 1], 6))
    config = config_of(size=6, **{"augment.views": 2, "augment.shift": 2})
    grouped = users.group_by_user(alike, 6)
    rows = examples.rows_at(grouped.train, np.array([0]), None)
    row = {name: x[0] for name, x in rows.items()} | {"place": jnp.int32(1)}
    inputs = examples.inputs_of(config, grouped)
    example = jax.jit(examples.example_of(inputs, jax.random.key(0), jnp.int32(0)))(row)
    like = examples.example_like(config, (4, 4, 1))
    assert {k: (x.shape, x.dtype) for k, x in example.items()} == {
        k: (x.shape, x.dtype) for k, x in like.items()
    }
    different = {np.asarray(view).tobytes() for view in example["image"]}
    assert len(different) > 8  # of 12, of 25 that can be
    assert example["present"].all()


# The plan.


def test_the_plan_counts_users():
    plan = without_mu(three_each().plan)
    assert (plan.num_examples, plan.sampling_prob) == (4, 0.5)
    assert (plan.unit, plan.group_size) == ("user", 3)
    assert "zero-out: one of 4 users" in plan.describe()
    assert plan.mechanism.sampling.startswith("Poisson: each user is in each batch")
    assert bam.PrivacyPlan.from_json(plan.to_json()) == plan
    ordinary = without_mu(loop.build(config_of(size=0), IMAGES).plan)
    assert "of 12 examples" in ordinary.describe()
    with pytest.raises(ValueError, match=r"below 1/N = 0\.25; .* publishing a user outright"):
        build(delta=0.26)
    with pytest.raises(ValueError, match="exceeds the 4 users"):
        build(expected_batch_size=5)


def test_a_plan_without_a_unit_is_refused_and_no_other_unit_is_made_up():
    plan = three_each().plan
    of_examples = bam.make_plan(
        num_examples=4, expected_batch_size=2, num_steps=3, epsilon=4.0, delta=1e-5,
        accountant="rdp",
    )  # fmt: skip
    earlier = {k: v for k, v in of_examples.to_json().items() if k not in ("unit", "group_size")}
    with pytest.raises(ValueError, match=r"group_size is missing \(records of bam 0\.1 and 0"):
        bam.PrivacyPlan.from_json(earlier)
    for unit, size in ("household", 0), ("user", 0), ("example", 3), ([], 3), ("user", "<b>"):
        with pytest.raises(ValueError, match=r"is invalid: .example. needs 0"):
            bam.PrivacyPlan.from_json(plan.to_json() | {"unit": unit, "group_size": size})
    with pytest.raises(ValueError, match="does not protect users"):
        bam.make_plan(
            num_examples=4, group_size=3, expected_batch_size=2, num_steps=3,
            epsilon=4.0, delta=1e-5, accountant="rdp",
            mechanism={
                "name": "best_of_trials", "trials_mean": 5.0, "trials_shape": 1.0,
                "score_noise_multiplier": 10.0,
            },
        )  # fmt: skip


# What is said.


@pytest.mark.thorough
def test_a_release_speaks_of_users_and_keeps_the_place_of_their_ids_to_itself(
    tmp_path, tmp_path_factory
):
    run = runs.copy(tmp_path_factory, "users", tmp_path / "run")
    config, plan, summary = (
        files.read_json(run / f"{name}.json") for name in ("config", "plan", "summary")
    )
    assert config["dataset"]["groups"].endswith("ids.npy")
    assert (summary["unit"], summary["group_size"]) == ("user", 4)
    assert (summary["num_examples"], summary["image_shape"]) == (15, [4, 4, 1])
    export.export(run, tmp_path / "out", nominal=True)
    said = (tmp_path / "out" / "config.json").read_text()
    assert json.loads(said)["dataset"]["group_size"] == 4
    assert "groups" not in json.loads(said)["dataset"]
    assert "ids.npy" not in said
    text = " ".join((tmp_path / "out" / "PRIVACY.md").read_text().split())
    facts = {
        "unit": "user",
        "group_size": 4,
        "num_examples_given": False,
        "trained_by": "bam train",
    }
    named = ("each", "protected", "other_examples", "promised_to", "most_examples", "gradient")
    for words in (statement.render(facts, name) for name in named):
        assert " ".join(words.split()) in text
    assert "| N, number of users | | 15 |" in text
    assert "each user is in each batch independently" in text
    for wrong in ("per example", "single training example", "one example", "number of training"):
        assert wrong not in text
    # The control: the same of a run that protects examples.
    examples = plan | {"unit": "example", "group_size": 0}
    plan = bam.PrivacyPlan.from_json(examples)
    how = {"data": "data", "diagnosed": False, "exported_by": "bam"}
    summary = summary | plan.to_json() | {"sampling": plan.mechanism.sampling}
    other = statement.fields_of_run(config, plan, summary, **how)
    assert other["unit"] == "example" and "user" not in statement.text_of(other)


# Where ids come from.


def write_shards(folder, *shards, **columns):
    images, labels = IMAGES.train
    for i, (start, end) in enumerate(shards):
        name = f"train-{i:05}-of-{len(shards):05}.parquet"
        own = {key: column[start:end] for key, column in columns.items()}
        write_parquet(folder / name, images[start:end], labels[start:end], **own)
    write_parquet(folder / "test.parquet", images[:3], labels[:3])


def test_ids_are_numbers_or_texts_of_a_column_in_the_order_of_the_shards(tmp_path):
    names = [f"writer {i}" for i in IDS]
    write_shards(
        tmp_path, (0, 7), (7, 12), number=IDS, text=names, half=IDS / 2, some=[None, *names[1:]],
        many=pa.array([[1]] * 12),
        coded=pa.array(names).dictionary_encode(),
    )  # fmt: skip

    def load(column):
        config = config_of(size=3, **{"dataset.name": "folder", "dataset.path": str(tmp_path)})
        config.dataset.update({"groups": column, "num_classes": 3})
        return loading.make_dataset(config.dataset, config.features)

    np.testing.assert_array_equal(load("number").users, IDS)
    np.testing.assert_array_equal(load("number").train.images, IMAGES.train.images)
    text, coded = load("text").users, load("coded").users
    np.testing.assert_array_equal(text, coded)
    assert [np.flatnonzero(text == x).tolist() for x in text] == [
        np.flatnonzero(x == IDS).tolist() for x in IDS
    ]
    for column, message in {
        "half": r"train-00000-of-00002\.parquet: row 0: column half: id 3\.5 is a fraction",
        "some": r"train-00000-of-00002\.parquet: row 0: column some has no user: its id is None",
        "many": r"column many is list<.*>, neither numbers nor text",
        "writer": "no column writer among image, label",
    }.items():
        with pytest.raises(ValueError, match=message):
            load(column)


@pytest.mark.parametrize(
    ("who", "read", "has_line"),
    [
        (None, None, False),
        (["a", "b", "a"], [0, 1, 0], False),
        (["a", "", "a"], None, True),
    ],
)
def test_users_of_the_test_set_are_read_from_its_files_whatever_is_protected(
    who, read, has_line, tmp_path
):
    images, labels = IMAGES.train
    train = [f"writer {i}" for i in IDS]
    write_parquet(tmp_path / "train.parquet", images, labels, user=train)
    more = {} if who is None else {"user": who}
    write_parquet(tmp_path / "test.parquet", images[:3], labels[:3], **more)
    (tmp_path / "manifest.json").write_text(json.dumps({"ids": "user"}))
    for size, groups in ((0, ""), (3, ""), (3, "user")):
        config, lines = config_of(size=size), []
        config.dataset.update({"name": "folder", "path": str(tmp_path), "groups": groups})
        config.dataset.num_classes = 3
        data = loading.make_dataset(config.dataset, config.features, lines.append)
        loading.kept_datasets.clear()
        found = data.test_users
        assert (found is None) == (read is None)
        if read is not None:
            assert [np.flatnonzero(found == x)[0] for x in found] == read
        told = [x for x in lines if "draw images, not persons" in x]
        assert len(told) == has_line and all("test.parquet" in x and "user" in x for x in told)
        assert (data.users is None) == (size == 0)
    # Held-out training examples stand in for the test set, and are not of its users.
    if read is not None:
        held_out = datasets.hold_out(data._replace(users=None), 4)
        assert len(held_out.test.labels) == 4 and held_out.test_users is None


def test_the_summary_of_a_run_draws_the_users_of_its_test_set(tmp_path):
    config = config_of(size=0)
    config.dataset.groups = ""
    users = np.arange(len(IMAGES.test.labels)) // 2
    built = loop.build(config, IMAGES._replace(test_users=users))
    drawn = loop.train(built, 0).summary["intervals_draw"]
    assert drawn == {"unit": "user", "number": len(np.unique(users))}
    plain = loop.train(loop.build(config, IMAGES), 0).summary["intervals_draw"]
    assert plain == {"unit": "image", "number": len(users)}
    refused("one for each test example", loop.build, config, IMAGES._replace(test_users=users[:-1]))


def test_ids_that_are_numbers_in_one_shard_and_text_in_another_are_one_persons(tmp_path):
    for shard, ids in enumerate(([7, 8], ["8", "07"])):
        pq.write_table(pa.table({"writer": ids}), tmp_path / f"train-{shard:05}-of-00002.parquet")
    first, second, *others = parquet.read_ids(tmp_path, "writer").tolist()
    assert others == [second, first] and first != second
    narrow = pa.table({"writer": pa.array([7, 8], pa.int32())})
    pq.write_table(narrow, tmp_path / "train-00001-of-00002.parquet")
    assert parquet.read_ids(tmp_path, "writer").tolist() == [7, 8, 7, 8]


LARGE = {
    "decimals": pa.array([2**64 + 5, 5, -5, 2**64 - 5], pa.decimal128(38, 0)),
    "unsigned": pa.array([2**64 - 5, 5, 2**64 - 2**31, 2**63 - 1], pa.uint64()),
}


@pytest.mark.parametrize("kind", LARGE)
def test_ids_beyond_64_bits_stay_different(kind, tmp_path):
    values = LARGE[kind]
    for number, part in enumerate((values[:2], values[2:])):
        file = tmp_path / f"train-0000{number}-of-00002.parquet"
        pq.write_table(pa.table({"who": pa.concat_arrays([part, part])}), file)
    ids = parquet.read_ids(tmp_path, "who")
    rows = [np.flatnonzero(ids == x).tolist() for x in ids]
    assert rows == [[0, 2], [1, 3]] * 2 + [[4, 6], [5, 7]] * 2
    assert user_ids.number_users(ids).max() == 3  # none became a number for a missing value
    small = [5, -5, 2**63 - 1, -(2**63) + 1]
    (tmp_path / "own").mkdir()
    write = lambda x: pq.write_table(pa.table({"who": x}), tmp_path / "own" / "train.parquet")  # noqa: E731
    write(pa.array(small, pa.decimal128(38, 0)))  # the control: as they are
    assert parquet.read_ids(tmp_path / "own", "who").tolist() == small
    write(pa.array([1, 2**64 - 1], pa.uint64()))
    with pytest.raises(ValueError, match=f"row 1: column who has no user: its id is {2**64 - 1},"):
        parquet.read_ids(tmp_path / "own", "who")


def test_text_in_a_column_that_is_not_utf8_is_one_line(tmp_path):
    ends = pa.array([0, 1, 2], pa.int32()).buffers()[1]
    for text, is_right in ((b"\xffa", False), (b"ba", True)):
        ids = pa.Array.from_buffers(pa.string(), 2, [None, ends, pa.py_buffer(text)])
        pq.write_table(pa.table({"who": ids}), tmp_path / "train.parquet")
        if is_right:  # the control
            assert len(set(parquet.read_ids(tmp_path, "who").tolist())) == 2
            continue
        as_labels = lambda top, name: listing.rows.read(top / "train.parquet", [name], print)  # noqa: E731
        for read in (parquet.read_ids, as_labels):
            with pytest.raises(
                errors.InputError, match=r"train\.parquet: (not a|column who: 'utf-8')"
            ):
                read(tmp_path, "who")


@pytest.mark.parametrize("are_apart", [False, True])
def test_users_of_both_splits_are_counted(are_apart, tmp_path):
    images, labels = IMAGES.train
    write_parquet(tmp_path / "train.parquet", images, labels, who=IDS)
    texts = ["12", "8", "13"] if are_apart else ["0007", "8", "5.0"]
    write_parquet(tmp_path / "test.parquet", images[:3], labels[:3], who=texts)
    config, lines = config_of(), []
    config.dataset.update({"name": "folder", "path": str(tmp_path), "groups": "who"})
    config.dataset.num_classes = 3
    loading.make_dataset(config.dataset, config.features, lines.append)
    told = [x for x in lines if "NOT PRIVATE: 2 users have rows in training and in test" in x]
    assert len(told) == (not are_apart)


def with_ids_of_its_own(**options):
    assert not options  # neither `groups` nor `group_size` is an option of the function
    return IMAGES._replace(users=IDS)


def mirrored(**options):
    return lambda images: images[:, :, ::-1]


def test_a_data_set_of_ones_own_brings_its_ids_and_features_keep_them():
    own = {"dataset.name": f"{__name__}:with_ids_of_its_own"}
    plain = loop.build(config_of(size=3, **own)).dataset.train
    changed = loop.build(
        config_of(size=3, **own, **{"features.name": f"{__name__}:mirrored"})
    ).dataset.train
    np.testing.assert_array_equal(plain.labels, three_each().dataset.train.labels)
    np.testing.assert_array_equal(changed.labels, plain.labels)
    expected = (plain.images[..., ::-1, :] / 255).astype(np.float16)
    np.testing.assert_allclose(changed.images, expected, atol=1e-3)
    with pytest.raises(ValueError, match=r"add --config\.dataset\.group_size=K"):
        loop.build(config_of(size=0, **own))
    with pytest.raises(ValueError, match="already has user ids"):
        loop.build(config_of(size=3, **own, **{"dataset.groups": "ids.npy"}))


def test_other_ids_are_other_data_to_a_run_that_is_resumed(tmp_path):
    built, other = three_each(), build(np.roll(IDS, 1))
    with pytest.raises(loop.StoppedError):
        loop.train(built, 0, tmp_path, should_stop=lambda: True)
    with pytest.raises(ValueError, match="other training data"):
        loop.train(other, 0, tmp_path)
    assert loop.train(built, 0, tmp_path).summary["steps_taken"] == 3


# Who is one person.

MISSING, REFUSED = "is missing", "is refused"
LONG = 9007199254740993  # 2^53 + 1, which a float cannot hold
SPELLINGS = [  # an id as a table or an array may hold it, and the person whom it names
    *[(x, "12") for x in (
        12, 12.0, "12", "12.0", "0012", "+12", "12.", "12,0", " 12 ", "12.00", "\ufeff12", b"12",
        np.int8(12), np.uint64(12), np.float32(12), np.float16(12), "00012.000000", Decimal("12.0"),
    )],
    *[(x, "0") for x in (0, "0", "000", "-0", 0.0, -0.0, "0.0")],
    *[(x, "-5") for x in (-5, "-5", "-05.0", -5.0)],
    *[(x, "é1") for x in ("é1", "e\u03011", "\u00a0é1\t", "é1\u200b", "é1".encode())],
    *[(x, str(LONG)) for x in (LONG, str(LONG), f"00{LONG}", np.int64(LONG))],
    *[(x, str(2**70 + 1)) for x in (2**70 + 1, str(2**70 + 1))],
    *[(x, x) for x in (
        "12E4", "1.5", "P-7", "a,b", "nancy", "#7", "1.234", "756.12", "#p1", "infant", "n.a.1",
        "err:x",
    )],
    *[(x, MISSING) for x in (
        "", " ", "NA", "na", "N/A", "n/a", "#N/A", "NULL", "null", "NaN", "NAN", "-nan", "None",
        "NONE", "NaT", "<NA>", "\\N", "(null)", "inf", "--", "-", "?", ".",
        "#DIV/0!", "#NV", "#N/V", "#WERT!", "#NOM?", "#SPILL!", "Err:502", "infinity", "+Inf",
        "+nan", "-nan(ind)", "-1.#IND00", "n.a.", "N. A.", "-1", "-1.0", "4294967295",
        None, float("nan"), np.float32("nan"), -1, -1.0, -(2**31), -(2**63), np.uint32(2**32 - 1),
        np.uint64(2**64 - 1), np.uint64(2**63), np.uint32(2**31), np.int32(-1),
    )],
    *[(x, REFUSED) for x in (
        float(2**53), 9.0072e17, -float(2**60), np.float32(2**24), np.float16(2**11), 1e300,
        float("inf"), "9.00720E+17", "1.2e5", "1E+11", "9,00720E+17", "-1.5e3", "1.E5", "2e-3",
        "9007199254740992.0", "1.000", "12,000", 1.5, np.float32(0.1), Decimal("1.10"), True,
        b"\xff1", b"A\0B", b"\0A",
    )],
]  # fmt: skip


def in_a_table(folder, value):
    """The user of a row of `bam data import --labels`."""
    (folder / "a.png").touch()
    if isinstance(value, str):
        table = folder / "t.csv"
        with table.open("w", newline="", encoding="utf-8") as opened:
            csv.writer(opened).writerows([("file", "label", "who"), ("a.png", "A", value)])
    elif isinstance(value, np.generic | bytes | Decimal):
        table = folder / "t.parquet"
        columns = {"file": ["a.png"], "label": ["A"], "who": pa.array([value])}
        pq.write_table(pa.table(columns), table)
    else:
        table = folder / "t.jsonl"
        table.write_text(json.dumps({"file": "a.png", "label": "A", "who": value}))
    columns = {"file": "file", "label": "label", "user": "who"}
    return listing.in_table(folder, table, columns).examples[0].user


def in_a_folder(folder, value):
    """The user of an image in FOLDER/CLASS/USER of `bam data import --user_from=folder`."""
    for name in ("A", "B"):
        for number in range(2):
            (folder / name / value).mkdir(parents=True, exist_ok=True)
            (folder / name / value / f"{number}.png").touch()
    return listing.in_class_folders(folder, users="folder").examples[0].user


def in_parquet(folder, value):
    """The name of a row's user in a column of Parquet files: that of a second file, if equal."""
    name = canonical(value)
    values = pa.array([value], pa.string() if value is None else None)
    for number, ids in enumerate((values, [name])):
        pq.write_table(pa.table({"who": ids}), folder / f"train-0000{number}-of-00002.parquet")
    first, second = parquet.read_ids(folder, "who")
    return name if first == second else f"not {name}"


def in_a_loop(folder, value):
    """The name of a row's user in `PrivateTraining(groups=)`: that of another row, if equal."""
    name = canonical(value)
    first, second = Population(2, 2, num_examples_given=True).number_users([value, name])
    return name if first == second else f"not {name}"


def in_npy(folder, value):
    """The name of a row's user in a `.npy` file: that of another row, if equal."""
    name = canonical(value)
    same: object = name
    if isinstance(value, np.generic | int | float):
        same = type(value)(name)
    elif isinstance(value, bytes):
        same = name.encode()
    images = IMAGES._replace(train=datasets.Split(IMAGES.train.images[:2], LABELS[:2]))
    np.save(folder / "ids.npy", np.array([value, same]))
    first, second = users.with_ids(images, str(folder / "ids.npy"), None).users
    return name if first == second else f"not {name}"


def canonical(value):
    """Returns what `SPELLINGS` expects of a value.

    For a value that is missing or refused it is any name.
    """
    name = next(x for y, x in SPELLINGS if y is value)
    return "12" if name in (MISSING, REFUSED) else name


DOORS = [in_a_table, in_a_folder, in_parquet, in_a_loop, in_npy]


def fits(door, value):
    """Whether the files that a door reads can hold a value."""
    text = isinstance(value, str)
    if door is in_a_folder:
        return text and "/" not in value and value not in ("", ".")
    if isinstance(value, Decimal) or (isinstance(value, int) and abs(value) > 2**64):
        return door is in_a_loop or (door is in_a_table and isinstance(value, Decimal))
    return door is not in_npy or (value is not None and not (text and value.endswith("\0")))


@pytest.mark.parametrize("door", DOORS)
def test_an_id_names_one_person_however_it_is_written_or_is_refused(door, tmp_path):
    wrong = {}
    for number, (value, expected) in enumerate(SPELLINGS):
        if not fits(door, value):
            continue
        (place := tmp_path / str(number)).mkdir()
        try:
            answer = door(place, value)
        except ValueError as error:
            assert "\n" not in str(error)
            nobody = "has no user" in str(error) or "lacks a value of who" in str(error)
            answer = MISSING if nobody else REFUSED
            assert re.search(r"row \d|/A/|column who is bool|got bool", str(error)), error
        if answer != expected:
            wrong[repr(value)] = answer
    assert wrong == {}


DIFFERENT = [
    "p1", "P1", "p01", "p-1", "12E4", "120000", "1.5", "1.50", "12a", "-12", "12", "é", "e", "a b",
    "a  b", "nancy", "0", "nat1", "9007199254740992", "9007199254740993", "1" + "0" * 5000, "7e",
    "1", "10", "１",
]  # fmt: skip


@pytest.mark.parametrize("door", ["table", "parquet", "loop", "npy"])
def test_different_ids_stay_different(door, tmp_path):  # the control
    num = len(DIFFERENT)
    if door == "table":
        with (tmp_path / "t.csv").open("w", newline="", encoding="utf-8") as opened:
            rows = [(f"{i}.png", "A", x) for i, x in enumerate(DIFFERENT)]
            csv.writer(opened).writerows([("file", "label", "who"), *rows])
        for name, _, _ in rows:
            (tmp_path / name).touch()
        columns = {"file": "file", "label": "label", "user": "who"}
        ids = [x.user for x in listing.in_table(tmp_path, tmp_path / "t.csv", columns).examples]
    elif door == "parquet":
        pq.write_table(pa.table({"who": DIFFERENT}), tmp_path / "train.parquet")
        ids = parquet.read_ids(tmp_path, "who").tolist()
    elif door == "loop":
        ids = Population(num, 2).number_users(DIFFERENT).tolist()
    else:
        np.save(tmp_path / "ids.npy", np.array(DIFFERENT))
        split = datasets.Split(np.zeros((num, 4, 4, 1), np.uint8), np.zeros(num, np.int32))
        images = IMAGES._replace(train=split)
        ids = users.with_ids(images, str(tmp_path / "ids.npy"), None).users.tolist()
    assert len(set(ids)) == len(ids) == num


def test_long_ids_that_were_floats_are_refused_and_as_texts_or_integers_are_all_there(tmp_path):
    persons = [2**53 + k for k in range(20)]
    assert len(set(map(float, persons))) == 11  # what a float makes of twenty persons
    for groups in (list(map(float, persons)), np.array(persons, float)):
        with pytest.raises(ValueError, match=r"row 0 \(from 0\): id .* float of at least 2\^53"):
            Population(11, 2).number_users(groups)
        pq.write_table(pa.table({"who": groups}), tmp_path / "train.parquet")
        with pytest.raises(ValueError, match=r"train\.parquet: row 0: .*float .*dtype=str"):
            parquet.read_ids(tmp_path, "who")
    for groups in (
        persons,
        list(map(str, persons)),
        np.array(persons),
        np.array(persons).astype(str),
    ):
        assert Population(20, 2).number_users(groups).tolist() == list(range(20))
        pq.write_table(pa.table({"who": groups}), tmp_path / "train.parquet")
        assert len(set(parquet.read_ids(tmp_path, "who").tolist())) == 20


@pytest.mark.parametrize(
    "wrong",
    ["a\0b", "\0a", "a\udcff", "\ud83d", b"\xff", b"A\0", b"A\0B\0", Decimal("sNaN")],
    ids=repr,
)
def test_text_that_is_damaged_is_no_id(wrong):
    """Escaped or cut at a NUL, it could be the id of another."""
    numbered = Population(2, 2, num_examples_given=True).number_users
    with pytest.raises(errors.InputError, match=r"row 1 \(from 0\)") as error:
        numbered(["x", wrong])
    assert "\n" not in str(error.value)
    for right in ("a\0\0", "a\\udcff", "é".encode(), Decimal("7.0")):  # the control
        assert numbered(["x", right]).max() == 1


class Nullable:
    """A column that makes an array of objects of itself, as one of pandas."""

    def __init__(self, *values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, object)


@pytest.mark.parametrize("kind", [list, tuple, collections.deque, collections.UserList])
def test_ids_of_a_sequence_are_read_one_by_one(kind):
    numbered = user_ids.number_users
    ids = [LONG, LONG - 1, 1.0]  # an array of them is one of floats, in which two are equal
    assert numbered(kind(ids)).tolist() == numbered(Nullable(*ids)).tolist() == [2, 1, 0]
    with pytest.raises(ValueError, match=r"row 1 .* its id is None"):
        numbered(Nullable(1, None))
    assert numbered(range(3)).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"float of at least 2\^24"):
        numbered(array.array("f", [1, 2**24]))
    for wrong in ("abc", {1: 2}, 5):  # the control
        with pytest.raises(ValueError, match="groups must be"):
            numbered(wrong)


def test_the_order_of_clean_ids_is_that_of_numbers_or_of_texts():
    numbered = Population(4, 2, num_examples_given=True).number_users
    for ids in ([10, 9, 100, -3], np.array([10, 9, 100, -3]), ["10", "9", "100", "-3"]):
        assert numbered(ids).tolist() == [2, 1, 3, 0]
    assert numbered(["b", "a", "B", "é"]).tolist() == [2, 1, 0, 3]
    assert numbered(np.array([b"b", b"a"])).tolist() == [1, 0]


def test_a_users_place_among_the_others_depends_on_nobody():
    ids = ["10", "9", "x", "100", "a", "0012"]
    whole = Population(6, 2).number_users(ids)
    for left_out in range(6):
        rest = [x for k, x in enumerate(ids) if k != left_out]
        order = np.argsort(np.argsort(np.delete(whole, left_out)))
        assert Population(5, 2).number_users(rest).tolist() == order.tolist()


def test_ids_in_two_columns_are_not_joined_into_anothers(tmp_path):
    rows = [("a.png", "A", "1,2", "3"), ("b.png", "A", "1", "2,3"), ("c.png", "A", "01", "2,3")]
    with (tmp_path / "t.csv").open("w", newline="") as opened:
        csv.writer(opened).writerows([("file", "label", "site", "who"), *rows])
    for name, *_ in rows:
        (tmp_path / name).touch()
    columns = {"file": "file", "label": "label", "user": "site,who"}
    first, *others = listing.in_table(tmp_path, tmp_path / "t.csv", columns).examples
    assert len({x.user for x in others}) == 1 and first.user != others[0].user


@pytest.mark.parametrize("who", [["12e5", "3af"], ["000", "001"], ["a|b", "a\\"]])
def test_ids_in_two_columns_are_not_read_as_a_number(who, tmp_path):
    """As 1,12e5, which is refused as a rounded number, or as 1,000."""
    rows = [("a.png", "A", "1", who[0]), ("b.png", "A", "1", who[1])]
    with (tmp_path / "t.csv").open("w", newline="") as opened:
        csv.writer(opened).writerows([("file", "label", "site", "who"), *rows])
    for name, *_ in rows:
        (tmp_path / name).touch()
    columns = {"file": "file", "label": "label", "user": "site,who"}
    read = listing.in_table(tmp_path, tmp_path / "t.csv", columns).examples
    names = [user_ids.user_id(x.user) for x in read]
    assert names == [x.user for x in read] and len(set(names)) == 2
    joined = [f"1,{x}" for x in who]
    if joined[0] == "1,12e5":  # the control
        refused("a rounded number", user_ids.user_id, joined[0])


# What is refused.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": -1}, "group_size must be at least 1"),
        ({"size": 0, "dataset.groups": "ids.npy"}, "dataset.groups needs dataset.group_size"),
        ({"size": 3}, "group_size=3 needs user ids: add --config.dataset.groups="),
        ({"dataset.groups": "missing.npy"}, "missing.npy: missing"),
        ({"dataset.groups": "writer"}, "is not a .npy file, and only Parquet files"),
        ({"dataset.holdout": 5}, "dataset.holdout does not work with dataset.group_size"),
        ({"method": "bam_sam", "method.ascent_views": 1}, "method.ascent_views does not work with"),
    ],
)
def test_what_cannot_be_with_users_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        loop.build(config_of(**changes))


def test_more_examples_of_each_user_than_the_memory_holds_are_refused():
    with pytest.raises(ValueError, match=r"4 users of 1000000000000 examples each: .* GiB"):
        build(size=10**12)


@pytest.mark.parametrize(
    "ids", [IDS[:-1], IDS.astype(float), IDS > 5, IDS[:, None], np.array(["a"] * 12)]
)
def test_ids_that_are_no_integer_for_each_row_are_refused(ids, tmp_path):
    with pytest.raises(ValueError, match="expected 12 integers, one for each training"):
        datasets.check(IMAGES._replace(users=ids))
    np.save(tmp_path / "ids.npy", ids)
    if ids.dtype.kind in "fU" and ids.ndim == 1:  # a file's whole numbers and texts are ids
        assert users.with_ids(IMAGES, str(tmp_path / "ids.npy"), None).users.shape == (12,)
        return
    message = r"expected 12 integers, one for each|ids\.npy: groups must be \[rows\] integers or"
    with pytest.raises(ValueError, match=message):
        users.with_ids(IMAGES, str(tmp_path / "ids.npy"), None)


NAN = float("nan")
NOBODY = [
    ["a", "b", NAN], ["a", "b", None], [1, 2, NAN], [1, 2, None], ["a", "b", ""], ["a", "b", " "],
    ["a", "b", np.datetime64("NaT")], ["a", "b", "<NA>"], np.array([b"a", b"b", b"nan"]),
    ["a", "b", "Nat"], [1, 2, -1],
    np.array(["2020-01-01", "2020-01-02", "NaT"], "M8[D]").astype(int),
    np.ma.masked_array([1, 2, 3], [0, 0, 1]), ["a", "b", np.ma.masked],
]  # fmt: skip


@pytest.mark.parametrize("ids", NOBODY, ids=repr)
def test_rows_without_an_id_are_no_user_and_refused_by_name(ids):
    rows_of_three = Population(3, 2)
    with pytest.raises(ValueError, match=r"row 2 \(from 0\) has no user: its id is ") as error:
        rows_of_three.number_users(ids)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("ids", [["a", "b", "Nat1"], [1, 0, -2], ["no", "x", "n a"]], ids=repr)
def test_ids_that_only_look_odd_are_users(ids):  # the control
    assert sorted(Population(3, 2).number_users(ids).tolist()) == [0, 1, 2]


def test_a_data_set_with_a_row_of_nobody_is_refused(tmp_path):
    ids = np.where(IDS == 3, -1, IDS)
    masked = np.ma.masked_array(IDS, IDS == 3)
    for given in (ids, masked):
        with pytest.raises(ValueError, match=r"row 11 \(from 0\) has no user"):
            users.group_by_user(IMAGES._replace(users=given), 3)
    np.save(tmp_path / "ids.npy", ids)
    with pytest.raises(ValueError, match=r"row 11 \(from 0\) has no user"):
        users.group_by_user(users.with_ids(IMAGES, str(tmp_path / "ids.npy"), None), 3)
    users.group_by_user(IMAGES._replace(users=IDS), 3)  # the control


@pytest.mark.parametrize("nobody", ["", "nan", "None"])
def test_a_column_or_an_import_with_a_row_of_nobody_is_refused(nobody, tmp_path):
    texts = pa.array(["a", nobody, "b", "a"])
    write_parquet(tmp_path / "train.parquet", IMAGES.train.images[:4], [0, 1, 0, 1], who=texts)
    with pytest.raises(ValueError, match="row 1: column who has no user: its id is "):
        parquet.read_ids(tmp_path, "who")
    images = [
        listing.Example(f"{i}.png", "AB"[i % 2], x) for i, x in enumerate([nobody, *"abcdef"])
    ]
    options = importing.Options(Preprocessing((8, 8), 1), ("A", "B"), 0.5, strict=False)
    with pytest.raises(ValueError, match=r"0\.png has no user.*, but others have"):
        importing.check(images, options)
    importing.check([x._replace(user=x.user or "g") for x in images[1:]], options)  # the control


def test_a_file_of_ids_that_is_damaged_or_holds_code_is_refused(tmp_path):
    file = tmp_path / "ids.npy"
    np.save(file, IDS)
    whole = file.read_bytes()
    for damaged in (whole[:-8], whole[:20], b""):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"ids\.npy: not a readable"):
            users.with_ids(IMAGES, str(file), None)
    for held in (np.array([print] * 12), IDS.astype(str).astype(object)):
        np.save(file, held, allow_pickle=True)
        with pytest.raises(ValueError, match=r"ids\.npy: not .*: save the ids with np\.save\("):
            users.with_ids(IMAGES, str(file), None)
    np.save(file, held.astype(str))  # the remedy
    assert users.with_ids(IMAGES, str(file), None).users.max() == 3


def test_one_run_is_audited_of_examples_only():
    with pytest.raises(ValueError, match="examples, not users"):
        one_run.build(config_of(), 5)


# The audit, whose canary is a whole user.

AUDITED = {"sampling_prob": 1.0, "num_steps": 4, "delta": 1e-5}


def audited(size, **changes):
    config = config_of(size=size, **{"num_steps": 4, "expected_batch_size": 8, **changes})
    config.optimizer.update({"name": "sgd", "learning_rate": 1e-3})
    config.microbatch_size = 1
    return config


@pytest.mark.thorough
def test_a_canary_that_is_a_whole_user_gives_away_no_more_than_is_claimed():
    scores = canary.scores(audited(3, method="bam_sam"), 8, 120, canary_size=4)
    assert 1.0 < canary.lower_bound(*scores, **AUDITED).epsilon_lower <= 4.0


def test_examples_bounded_one_by_one_and_claimed_for_their_user_are_caught():
    scores = canary.scores(audited(0), 8, 50, canary_size=4)
    assert canary.lower_bound(*scores, **AUDITED).epsilon_lower > 4.0


@pytest.mark.thorough
def test_whole_runs_of_users_are_what_the_plan_says():
    config = audited(2, num_steps=60, expected_batch_size=20)
    built = loop.build(config, canary.users_dataset(80, 3))
    run = whole_run.record(built, 0)
    assert run.members.shape == (60, 80)
    assert checks.failures(whole_run.p_values(built, [run]), 1e-3) == []
