"""Data that stay in their files: the batches are those of data in memory, to the bit."""

import functools
import json
import re
import signal
import time

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from bam.data import datasets, stream
from bam.data.common import DataError
from bam.data.preprocessing import Preprocessing
from bam.features import extraction
from bam.images import importing, listing
from bam.training import examples, loading, loop
from configs import digits
from scripts.benchmarks import ahead
from tests import prepared_folder
from tests.cases import Command, assert_same_bits, forget_data, run_command

CLASSES = ("dark", "light")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Images of two classes in several files, of 30 users."""
    folder, out = tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("out") / "data"
    rng = np.random.default_rng(0)
    rows = ["file,label,user"]
    for number in range(120):
        label = number % 2
        pixels = rng.integers(100 * label, 100 * label + 150, (9, 9, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        rows.append(f"{number}.png,{CLASSES[label]},{number % 30}")
    table = folder / "table.csv"
    table.write_text("\n".join(rows))
    examples = listing.in_table(folder, table, {x: x for x in ("file", "label", "user")}).examples
    eight = Preprocessing((8, 8), 3)
    importing.run(folder, examples, out, importing.Options(eight, CLASSES, 0.25, strict=True))
    return out


@pytest.fixture(autouse=True)
def forget():
    forget_data()


def config_of(data, memory, **changes):
    config = digits.get_config("dp_sgd")
    config.update({"accountant": "rdp", "num_steps": 6, "expected_batch_size": 20, "seed": 1})
    config.dataset.update({"name": "folder", "path": str(data), "memory": memory})
    config.model.name, config.microbatch_size = "linear", 7
    config.update_from_flattened_dict(changes)
    return config


OF_USERS = {"dataset.groups": "user", "dataset.group_size": 3}


@pytest.mark.parametrize("changes", [{}, OF_USERS, {"dataset.holdout": 10}])
def test_batches_are_those_in_memory_to_the_bit_and_nothing_else_is_read(data, changes):
    in_memory, streamed = (loop.build(config_of(data, x, **changes)) for x in ("device", "stream"))
    assert isinstance(streamed.dataset.train.images, stream.StoredImages)
    assert streamed.dataset.train.images.shape == in_memory.dataset.train.images.shape
    train = in_memory.dataset.train
    batch_of = lambda step: in_memory.plan.batch(3, step)  # noqa: E731
    given = [x.place_rows().read(batch_of, range(1, 5)) for x in (in_memory, streamed)]
    for (numbers, expected_mask), (read, mask) in zip(*given, strict=True):
        assert numbers["row"].shape == (len(mask),) and numbers.keys() == {"row", "data"}
        rows, placed = examples.in_order(numbers)
        expected = jax.vmap(functools.partial(examples.take_row, data=placed))(rows)
        rows, placed = examples.in_order(read)
        assert placed is None
        jax.tree.map(np.testing.assert_array_equal, (rows, mask), (expected, expected_mask))
        for name, all_rows in (("image", train.images), ("label", train.labels)):
            rows = np.asarray(read[name]).reshape(len(mask), *all_rows.shape[1:])
            np.testing.assert_array_equal(rows[mask], all_rows[np.asarray(read["row"])[mask]])
            assert not rows[~mask].any()
    for a, b in zip(streamed.dataset.test, in_memory.dataset.test, strict=True):
        np.testing.assert_array_equal(a[:], b)


def test_a_draw_that_outgrows_its_rows_gives_the_run_in_memory_to_the_bit(data, monkeypatch):
    monkeypatch.setattr("bam.privacy.plan.PrivacyPlan.capacity", 5)
    monkeypatch.setattr(stream, "CHUNK", 4)
    changes = OF_USERS | {"num_steps": 3}
    runs = [loop.build(config_of(data, x, **changes)) for x in ("device", "stream")]
    sizes = {len(runs[0].plan.batch(1, step).indices) for step in (1, 2, 3)}
    assert min(sizes) > 5
    in_memory, streamed = (loop.train(run, 1) for run in runs)
    assert_same_bits(streamed.state.params, in_memory.state.params)


def test_a_set_of_tfds_is_read_row_by_row(tmp_path):
    rng = np.random.default_rng(0)
    train, test = (
        datasets.Split(rng.integers(0, 256, (n, 32, 32, 3), np.uint8), np.arange(n, dtype=np.int32))
        for n in (10, 5)
    )
    prepared_folder.write("cifar10", train, test, tmp_path)
    loaded = datasets.load("cifar10", path=tmp_path, stays=lambda num_bytes: num_bytes > 0)
    rows = np.array([[9, 0], [7, 7]])
    assert isinstance(loaded.train.images, stream.StoredImages)
    np.testing.assert_array_equal(loaded.train.images[rows], train.images[rows])
    np.testing.assert_array_equal(loaded.train.labels, train.labels)


def test_features_are_made_of_images_that_are_not_all_in_memory(data, tmp_path, monkeypatch):
    read = []
    decode = stream.decode_images
    monkeypatch.setattr(
        stream, "decode_images", lambda many, *how: read.append(len(many)) or decode(many, *how)
    )
    monkeypatch.setattr(extraction, "CHUNK", 32)
    made = [
        extraction.extract(
            loading.make_dataset(config_of(data, memory).dataset), lambda x: x**2, {}, tmp_path
        )
        for memory in ("stream", "device")
    ]
    np.testing.assert_array_equal(made[0].train.images, made[1].train.images)
    assert max(read) <= 32 < sum(read)


def test_what_is_done_with_which_size_is_said(data, monkeypatch):
    said = []
    monkeypatch.setattr(loading, "LARGE", 0)
    for room in (10**9, 10):
        monkeypatch.setattr("bam.training.devices.room_for_data", lambda room=room: room)
        forget_data()
        loading.make_dataset(config_of(data, "auto").dataset, log=said.append)
    assert "are held in memory: 0.0 GiB" in said[0]
    assert "are streamed from their files" in said[1]
    with pytest.raises(ValueError, match=r"unknown dataset\.memory 'disk'"):
        loading.make_dataset(config_of(data, "disk").dataset)
    archive = config_of(data, "stream", **{"dataset.name": "mnist", "dataset.source": "archive"})
    with pytest.raises(ValueError, match="source archive cannot be streamed"):
        loading.make_dataset(archive.dataset)


def in_shards(data, folder):
    """Writes the data set again with its training images in two files, and returns the second."""
    folder.mkdir()
    whole = pq.read_table(next(data.glob("train-*.parquet")))
    for number, part in enumerate((whole.slice(0, 50), whole.slice(50))):
        name = f"train-{number:05d}-of-00002.parquet"
        how = {"row_group_size": 8, "compression": "none", "write_statistics": False}
        pq.write_table(part, folder / name, **how)
    [test] = data.glob("test-*.parquet")
    (folder / test.name).write_bytes(test.read_bytes())
    return folder / name


def swapped(file):
    """Two images of a file in each other's place: its footer, and all sizes, are as they were."""
    images = [x["bytes"] for x in pq.read_table(file)["image"].to_pylist()]
    a, b = next((x, y) for x in images for y in images if len(x) == len(y) and x != y)
    whole = file.read_bytes()
    assert whole.count(a) == whole.count(b) == 1
    either = re.compile(b"|".join(map(re.escape, (a, b))))
    file.write_bytes(either.sub(lambda found: b if found[0] == a else a, whole))


def test_other_images_under_the_same_footers_are_other_data(data, tmp_path):
    file = in_shards(data, tmp_path / "data")
    config = config_of(tmp_path / "data", "stream")
    asked = iter(range(7))
    with pytest.raises(loop.StoppedError):
        loop.train(loop.build(config), 1, tmp_path / "run", should_stop=lambda: next(asked) == 2)
    said, kept = [], tmp_path / "features"

    def of_features():
        forget_data()
        of_images = loading.make_dataset(config.dataset)
        return extraction.extract(of_images, lambda x: x**2, {}, kept, said.append).train.images

    before = of_features()
    np.testing.assert_array_equal(of_features(), before)
    assert len(said) == 2  # nothing has changed: what is kept is used
    swapped(file)
    assert np.any(of_features() != before, axis=(1, 2, 3)).sum() == 2
    with pytest.raises(ValueError, match="belongs to a run with other training data"):
        loop.train(loop.build(config), 1, tmp_path / "run")
    swapped(file)
    loop.train(loop.build(config), 1, tmp_path / "run")


def test_other_rows_of_the_same_files_are_other_data(data):
    images = loading.make_dataset(config_of(data, "stream").dataset).train.images
    rows = np.arange(6)
    assert images.select(rows).content() == images.select(rows).content()
    assert images.select(rows).content() != images.select(rows[::-1]).content()


def test_a_damaged_image_or_label_is_named_by_its_row_in_its_file(data, tmp_path):
    file = in_shards(data, tmp_path / "data")
    table = pq.read_table(file)
    images, labels = (table[name].to_pylist() for name in ("image", "label"))
    images[21], labels[17] = {"bytes": b"nothing"}, 2
    kind = table.schema.field("image").type
    pq.write_table(table.set_column(0, "image", pa.array(images, kind)), file, row_group_size=16)
    config = config_of(tmp_path / "data", "stream")
    with pytest.raises(DataError, match=rf"{file.name}: row 21: unreadable image"):
        loading.make_dataset(config.dataset).train.images[[3, 71, 60]]
    pq.write_table(table.set_column(1, "label", pa.array(labels)), file)
    forget_data()
    with pytest.raises(DataError, match=rf"{file.name}: row 17: label 2 is not from 0 to 1"):
        loading.make_dataset(config.dataset)


def test_an_audit_of_one_run_needs_the_data_in_memory(data):
    from bam.audit import one_run

    with pytest.raises(ValueError, match=r"dataset\.memory=device"):
        one_run.build(config_of(data, "stream"), 4)


def test_a_stand_in_of_another_size_is_streamed_and_planned_for():
    blank = datasets.stand_in("imagenet32", 224)
    assert datasets.streams(blank) and blank.train.images.shape == (1_281_167, 224, 224, 3)
    made = ahead._dataset(config_of("", "auto", **{"dataset.name": "cifar10"}).dataset, 64)
    config = config_of("", "auto", **{"dataset.name": "cifar10", "microbatch_size": 1})
    built, program, _ = ahead.compile_step(config, made, jax.devices()[:1])
    arguments, capacity = program.memory_analysis().argument_size_in_bytes, built.plan.capacity
    assert capacity * 64 * 64 * 3 < arguments < 1.2 * capacity * 64 * 64 * 3 + 2**21


@pytest.mark.slow
def test_a_streamed_run_that_is_killed_ends_as_one_in_memory_that_was_not(data, tmp_path):
    command = (
        "bam", "train", "--config=configs/digits.py:dp_sgd", f"--workdir={tmp_path / 'stream'}",
        "--config.dataset.name=folder", f"--config.dataset.path={data}", "--config.seed=3",
        "--config.dataset.memory=stream", "--config.num_steps=40", "--config.microbatch_size=7",
        "--config.model.name=linear", "--config.expected_batch_size=20",
        "--config.checkpoint.every=1", "--config.accountant=rdp",
    )  # fmt: skip
    checkpoints = tmp_path / "stream" / "checkpoints"
    with Command(*command) as running:
        while not any(checkpoints.glob("*.npz")):
            running.check_runs()
            time.sleep(0.01)
        running.send_signal(signal.SIGKILL)
        assert running.wait().returncode == -signal.SIGKILL
    done = run_command(*command)
    assert done.returncode == 0, done.stderr
    loop.train(loop.build(config_of(data, "device", num_steps=40)), 3, tmp_path / "device")
    rows = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("stream", "device")
    ]
    assert [{**row, "seconds": 0} for row in rows[0]] == [{**row, "seconds": 0} for row in rows[1]]
    losses = [row["test_loss"] for row in rows[0]]
    assert len(set(losses)) == 4
