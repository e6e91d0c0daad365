"""A stranger's files run nothing, take no more memory than they should, and decide nothing."""

import ast
import contextlib
import csv
import io
import json
import os
import pickle
import struct
import sys
import threading
import time
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

import bam
from bam import tables
from bam.cli import command, jax_setup, screen
from bam.data import datasets
from bam.data.common import DataError, Split, decode_images
from bam.data.sources import archives
from bam.images import pixels
from bam.privacy import checkpoint
from bam.text import csv_text
from bam.training import loading, public_clip
from configs import digits
from tests import prepared_folder
from tests.cases import at_most, refused, write_parquet
from tests.run_folder import rewrite_header

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (12, 32, 32, 3), np.uint8)
LABELS = (np.arange(12) % 5).astype(np.int32)
TRAIN, TEST = Split(IMAGES[:10], LABELS[:10]), Split(IMAGES[10:], LABELS[10:])


def fails(match, *arguments, **options):
    """`load` fails with one line that matches."""
    with pytest.raises(DataError, match=match) as caught:
        datasets.load(*arguments, **options)
    assert "\n" not in str(caught.value)


@pytest.fixture
def small(monkeypatch):
    for name, known in datasets.DATASETS.items():
        monkeypatch.setitem(datasets.DATASETS, name, known._replace(rows=(10, 2)))


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A module `data.evil` that can be imported, and the file that it then makes."""
    marker = tmp_path / "marker"
    package = tmp_path / "stranger" / "data"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()")
    monkeypatch.syspath_prepend(package.parent)
    for name in ("data", "data.evil"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield marker
    for name in ("data", "data.evil"):
        sys.modules.pop(name, None)


# What a file may run: nothing.


def named_inside(features):
    features["featuresDict"]["features"]["image"]["pythonClassName"] = "data.evil.X"
    return features


@pytest.mark.parametrize(
    "rename",
    [
        named_inside,
        lambda features: features | {"pythonClassName": "data.evil.X"},
        lambda features: {"type": "data.evil.X", "content": {}},  # as old versions wrote it
    ],
    ids=["a feature", "all features", "old form"],
)
def test_a_prepared_folder_imports_no_module_that_it_names(rename, tmp_path, evil):
    import tensorflow_datasets as tfds

    folder = prepared_folder.write("cifar10", TRAIN, TEST, tmp_path)
    features, info = folder / "features.json", folder / "dataset_info.json"
    features.write_text(json.dumps(rename(json.loads(features.read_text()))))
    described = json.loads(info.read_text())
    info.write_text(json.dumps(described | {"moduleName": "data.evil"}))
    found = datasets.load("cifar10", "tfds", tmp_path)
    np.testing.assert_array_equal(found.train.images, TRAIN.images)
    assert not evil.exists()
    with contextlib.suppress(Exception):
        tfds.builder_from_directory(folder)
    assert evil.exists()  # the library itself imports it


def test_a_prepared_folder_names_no_file_outside_itself(tmp_path):
    stranger, own = tmp_path / "stranger", tmp_path / "own"
    prepared_folder.write("cifar10", Split(255 - TRAIN.images, TRAIN.labels), TEST, own)
    folder = prepared_folder.write("cifar10", TRAIN, TEST, stranger)
    info = folder / "dataset_info.json"
    described = json.loads(info.read_text())
    for split in described["splits"]:
        split["filepathTemplate"] = f"{own}/cifar10/3.0.2/{split['filepathTemplate']}"
    info.write_text(json.dumps(described))
    found = datasets.load("cifar10", "tfds", stranger)
    np.testing.assert_array_equal(found.train.images, TRAIN.images)


def test_an_image_is_no_program(tmp_path, monkeypatch):
    """Pillow has EPS images drawn by Ghostscript."""
    from PIL import EpsImagePlugin

    marker, ghostscript = tmp_path / "marker", tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\n[ $1 = --version ] || touch {marker}\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(DataError, match="x: row 0: unreadable image: cannot identify"):
        decode_images([program], "x")
    assert not marker.exists()
    with contextlib.suppress(Exception):
        Image.open(io.BytesIO(program)).load()
    assert marker.exists()  # Pillow itself has it run


def test_a_checkpoint_imports_nothing_that_it_names(tmp_path, evil):
    state = {"weights": jnp.arange(6.0).reshape(2, 3)}
    header = {"record": {}, "digests": {}, "processes": [], "step": 1, "steps_begun": 1, "more": {}}
    path, pickled = tmp_path / "1.npz", b"cdata.evil\nX\n."
    array = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
    for name, dtype, content in (
        ("arr_0.npy", "float32", pickled),
        ("arr_1.npy", "float32", pickled),
        ("arr_1.npy", "float32", b"\x93NUMPY\x01\x00\x76\x00" + array + pickled),
        ("arr_1.npy", "object", b"\x93NUMPY\x01\x00\x76\x00" + array + pickled),
        ("more.npy", "data.evil.X", pickled),
    ):
        checkpoint.write(tmp_path, header, state)
        rewrite_header(path, lambda header, x=dtype: header | {"leaves": [["weights", x, [2, 3]]]})
        with zipfile.ZipFile(path) as file:
            parts = {part: file.read(part) for part in file.namelist()}
        with zipfile.ZipFile(path, "w") as file:
            for part, its_content in (parts | {name: content}).items():
                file.writestr(part, its_content)
        refused("could not be read: if it is damaged", checkpoint.restore, path, state)
    assert not evil.exists()
    with contextlib.suppress(AttributeError):
        pickle.loads(pickled)
    assert evil.exists()


@pytest.fixture
def chosen(tmp_path, monkeypatch):
    """Where `use_compilation_cache` would have JAX keep programs: `chosen()`."""
    found = {}
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax, "config", type("Config", (), {"update": found.__setitem__}))

    def choose():
        found.clear()
        jax_setup.use_compilation_cache()
        return found.get("jax_compilation_cache_dir")

    return choose


def test_compiled_programs_are_kept_in_a_folder_of_the_users_own(tmp_path, monkeypatch, chosen):
    (tmp_path / ".jax_cache").mkdir()  # came with the folder we are in
    folder = tmp_path / "cache" / "bam" / "jax"
    assert chosen() == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert chosen() == str(tmp_path / "home" / ".cache" / "bam" / "jax")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    assert chosen() is None  # JAX reads it itself


def test_a_cache_that_others_own_or_write_to_is_passed_over(tmp_path, monkeypatch, chosen, capsys):
    folder = Path(chosen())
    for part in (folder, folder.parent):
        part.chmod(0o770)
        assert chosen() is None
        assert (
            f"the next run compiles again: other users can write to {part}"
            in capsys.readouterr().err
        )
        part.chmod(0o755)
    assert chosen() == str(folder)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    assert chosen() is None
    assert capsys.readouterr().err.count("belongs to another user") == 1
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert chosen() is None
    assert capsys.readouterr().err.count("\n") == 1


# What a name may do to a terminal or a spreadsheet: nothing.

EVIL = "a\x1b[2J\u202eb\n=1\r\u200f"


def refuse(error):
    raise error


def test_a_name_moves_no_cursor_adds_no_line_and_hides_nothing(capsys):
    screen.say(f"left out: {EVIL}", "plain: é, 日本, – ε\xa0".strip())
    screen.show("a plan\nof two lines")
    screen.table(tables.text(EVIL, "n"), [[f"[bold]{EVIL}", "1"]], EVIL)
    screen.say(EVIL, error=True)
    for error in (DataError(EVIL), bam.InputError(EVIL)):
        assert command.status_of(lambda error=error: refuse(error), debug=True) == 2
    assert command.status_of(lambda: [][EVIL]) == 1  # a fault
    assert command.status_of(lambda: exec("raise ValueError(EVIL)", {"EVIL": EVIL})) == 1
    shown = capsys.readouterr()
    for text in shown:
        assert all(c == "\n" or c.isprintable() for c in text), repr(text)
        assert "\\x1b[2J\\u202eb" in text
    assert shown.out.splitlines()[1:4] == ["plain: é, 日本, – ε", "a plan", "of two lines"]
    assert "[bold]" in shown.out  # no markup of the table's
    print(EVIL)  # the control
    assert "\x1b" in capsys.readouterr().out


def test_every_command_prints_through_the_screen():
    # A line, one that is drawn, and the cursor: the first two print what is visible alone.
    folder, alone = Path(screen.__file__).parent, {"screen.py": 2, "signals.py": 1}
    for file in folder.glob("*.py"):
        calls = [x for x in ast.walk(ast.parse(file.read_text())) if isinstance(x, ast.Name)]
        assert sum(x.id == "print" for x in calls) == alone.get(file.name, 0), file


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        ("=1+1", "'=1+1"), ("@SUM(A1)", "'@SUM(A1)"), ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"),
        ("-2+3", "'-2+3"), ("＝1", "'＝1"), ("\t=1", "'\t=1"), ("\r=1", "'\r=1"), ("-", "'-"),
        ("-1.5", "-1.5"), ("-1e-05", "-1e-05"), ("+3", "+3"), ("7", "7"), (-1.5, "-1.5"),
        (-2, "-2"), ("a=1", "a=1"), ("", ""), ("-1\n=1", "'-1\n=1"), (None, ""),
    ],
)  # fmt: skip
def test_no_text_in_csv_is_a_formula_and_numbers_stay(cell, written, tmp_path):
    text = csv_text([["a", cell]])
    assert list(csv.reader(io.StringIO(text, newline=""))) == [["a", written]]
    tables.write_csv(tmp_path / "t.csv", [{"name": cell, "x": 0.123456789}])
    with (tmp_path / "t.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["name", "x"], [written, "0.123457"]]


# How much memory a file may take.


class Python2(pickle._Pickler):
    """Writes texts as Python 2 did, which made the official archives."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_text(self, text):
        content = text if isinstance(text, bytes) else text.encode()
        self.write(pickle.BINSTRING + struct.pack("<I", len(content)) + content)
        self.memoize(text)

    dispatch[bytes] = dispatch[str] = save_text


def test_a_batch_of_python_2_is_read():
    batch = {b"batch_label": b"training batch 1 of 5", b"fine_labels": LABELS.tolist()}
    batch |= {
        b"coarse_labels": [1] * 12,
        b"data": IMAGES.reshape(12, -1),
        b"filenames": [b"a"] * 12,
    }
    file = io.BytesIO()
    Python2(file, 2).dump(batch)
    pixels, labels = archives.parse_pickle(file.getvalue(), "x", b"fine_labels")
    np.testing.assert_array_equal(pixels, IMAGES.reshape(12, -1))
    np.testing.assert_array_equal(labels, LABELS)


def test_a_description_of_brackets_is_refused_and_a_device_is_not_read(tmp_path, small):
    folder = prepared_folder.write("cifar10", TRAIN, TEST, tmp_path)
    (folder / "dataset_info.json").write_text("[" * 500_000)
    fails("3.0.2: not a prepared data set", "cifar10", "tfds", tmp_path)
    (tmp_path / "train-images-idx3-ubyte").symlink_to("/dev/zero")
    fails("train-images-idx3-ubyte: missing", "mnist", "archive", tmp_path)


def test_a_prepared_split_has_no_more_rows_than_the_official_one(tmp_path, monkeypatch):
    prepared_folder.write("cifar10", TRAIN, TEST, tmp_path)
    few = datasets.DATASETS["cifar10"]._replace(rows=(9, 2))
    monkeypatch.setitem(datasets.DATASETS, "cifar10", few)
    fails("train: has 10 rows, but the official split has 9", "cifar10", "tfds", tmp_path)


def png(height, width):
    """A black grey image, whose pixels need not be in memory."""
    packer = zlib.compressobj(1)
    rows = b"".join(packer.compress(bytes(1 + width)) for _ in range(height)) + packer.flush()

    def chunk(kind, content):
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


def test_an_image_of_another_size_is_not_unpacked():
    good, large = png(28, 28), png(9_000, 9_000)
    assert decode_images([good], "x").shape == (1, 28, 28, 1)
    with (
        at_most(64),
        pytest.raises(DataError, match=r"x: row 1: image of shape \(9000, 9000, 1\), expect"),
    ):
        decode_images([good, large], "x")


def test_what_exceeds_the_machines_memory_is_refused_before_it_is_read(folder, monkeypatch):
    datasets.load("cifar10", "parquet", folder)
    monkeypatch.setattr("bam.memory.free", lambda: 2**10)
    fails(
        r"train.parquet: \d+ KiB are needed in memory, and 1 KiB are free",
        "cifar10",
        "parquet",
        folder,
    )


def test_images_of_many_row_groups_are_read_in_order(folder):
    file = folder / "train.parquet"
    pq.write_table(pq.read_table(file), file, row_group_size=3, use_dictionary=False)
    found = datasets.load("cifar10", "parquet", folder)
    np.testing.assert_array_equal(found.train.images, TRAIN.images)
    np.testing.assert_array_equal(found.train.labels, TRAIN.labels)


@pytest.mark.parametrize("total", [100, 400])
def test_threads_together_take_no_more_than_one_budget(monkeypatch, total):
    monkeypatch.setitem(pixels.decoding_room, "free", total)
    taken, most, lock = 0, 0, threading.Lock()

    def decode(num_bytes):
        nonlocal taken, most
        with pixels.reserve_memory(num_bytes):
            with lock:
                taken += num_bytes
                most = max(most, taken)
            time.sleep(0.005)
            with lock:
                taken -= num_bytes

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(decode, [30, 100, 20, 50] * 8))
    assert most <= total and pixels.decoding_room["free"] == total
    assert most > 200 if total == 400 else most > 90  # the control: more are let in at once
    refused("takes up to .* bytes; at most", decode, pixels.DECODING + 1)


# The number of classes is public.


@pytest.fixture
def folder(tmp_path):
    write_parquet(tmp_path / "train.parquet", *TRAIN)
    write_parquet(tmp_path / "test.parquet", *TEST)
    return tmp_path


def test_classes_that_nobody_names_are_not_counted(folder):
    remedies = "schema metadata .*, or add --config.dataset.num_classes"
    fails(
        rf"train.parquet: .*not counted from the private labels: .*{remedies}",
        "folder",
        None,
        folder,
    )
    assert datasets.load("folder", None, folder, num_classes=7).num_classes == 7
    for names in ("abcdefghij", [], None, 5):
        write_parquet(folder / "train.parquet", *TRAIN, names=names)
        if names != []:
            fails("not counted from the private labels", "folder", None, folder)


def test_one_private_label_changes_no_model(folder):
    train = folder / "train.parquet"
    large = Split(TRAIN.images, np.where(np.arange(10) == 3, 9, TRAIN.labels))
    for names, options in ((None, {"num_classes": 10}), ([f"kind {i}" for i in range(10)], {})):
        for split in (TRAIN, large):
            write_parquet(train, *split, names=names)
            assert datasets.load("folder", None, folder, **options).num_classes == 10
    write_parquet(train, *large)
    fails("train.parquet: row 3: label 9 is not from 0 to 4", "folder", None, folder, num_classes=5)


def test_numbers_of_classes_that_disagree_are_refused(folder):
    write_parquet(folder / "train.parquet", *TRAIN, names=[*"abcde"])
    fails("train.parquet: has 5 classes, expected 6", "folder", None, folder, num_classes=6)
    assert datasets.load("folder", None, folder, num_classes=5).num_classes == 5
    fails(
        "digits has 10 classes, not 9: leave out --config.dataset.num_classes",
        "digits",
        num_classes=9,
    )
    assert datasets.load("digits", num_classes=10).num_classes == 10
    fails("num_classes must be at least 0, got -1", "folder", None, folder, num_classes=-1)


def test_a_config_says_how_many_classes_there_are(folder):
    config = digits.get_config("dp_sgd")
    config.dataset.update({"name": "folder", "path": str(folder)})
    with pytest.raises(ValueError, match=r"--config\.dataset\.num_classes"):
        loading.make_dataset(config.dataset)
    config.dataset.num_classes = 8
    assert loading.make_dataset(config.dataset).num_classes == 8


# Which examples are private.


def test_two_names_of_one_folder_are_one_data_set(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    (folder.parent / "other").symlink_to(folder)
    config = digits.get_config("dp_sgd")
    config.model.name, config.num_steps = "linear", 1
    config.expected_batch_size = config.microbatch_size = 2
    config.dataset.update({"name": "folder", "path": f"~/{folder.name}"})
    with config.unlocked():
        config.dataset.num_classes = 5
    for path in (folder, folder.parent / "other", folder / ".." / folder.name):
        with pytest.raises(ValueError, match="is the private data set"):
            public_clip.check(config, public_clip.PublicData("folder", path=str(path)))
    public_clip.check(config, public_clip.PublicData("folder", path=str(folder.parent)))


def by_position(dataset, num_examples):
    """How 0.1.0 held examples out."""
    total = len(dataset.train.labels)
    aside = np.zeros(total, bool)
    aside[np.arange(num_examples) * total // num_examples] = True
    train, test = (Split(*(x[rows] for x in dataset.train)) for rows in (~aside, aside))
    return dataset._replace(train=train, test=test)


def moved(hold_out, dataset, num_examples, row):
    """How many examples of either split another one, in `row`, adds, takes away or exchanges."""

    def splits(keep):
        found = hold_out(dataset._replace(train=Split(*(x[keep] for x in dataset.train))), 300)
        return [{image.tobytes() for image in split.images} for split in (found.train, found.test)]

    everything = np.arange(len(dataset.train.labels))
    with_it, without = splits(everything), splits(everything != row)
    return [len(one ^ other) for one, other in zip(with_it, without, strict=True)]


def test_an_example_more_is_one_more_to_train_on_and_exchanges_at_most_one_other():
    dataset = datasets.load("digits")
    _, different = np.unique(dataset.train.images, axis=0, return_index=True)
    dataset = dataset._replace(train=Split(*(x[np.sort(different)] for x in dataset.train)))
    rows = range(0, len(different), 29)
    found = [moved(datasets.hold_out, dataset, 300, row) for row in rows]
    assert all(train == 1 and test in (0, 2) for train, test in found)
    assert {test for _, test in found} == {0, 2}
    # Held out by position, they are others from there on.
    assert max(train for train, _ in (moved(by_position, dataset, 300, row) for row in rows)) > 100


def test_what_is_held_out_does_not_depend_on_the_order():
    dataset = datasets.load("digits")
    order = RNG.permutation(len(dataset.train.labels))
    shuffled = dataset._replace(train=Split(*(x[order] for x in dataset.train)))

    def held_out(dataset):
        test = datasets.hold_out(dataset, 300).test
        return sorted((i.tobytes(), int(y)) for i, y in zip(*test, strict=True))

    assert held_out(dataset) == held_out(shuffled)
    labels = datasets.hold_out(dataset, 300).test.labels
    assert np.bincount(labels, minlength=10).min() > 15  # of every class some, 30 expected
