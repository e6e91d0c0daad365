"""The files that lie at a path decide its source, and every doubt is one line with a flag."""

import pytest

from bam.cli.main import main
from bam.data import datasets, recognition
from bam.data.common import DataError, Split
from bam.training import config as base
from bam.training import loading
from tests import prepared_folder
from tests.cases import refused, write_parquet
from tests.test_datasets import TEST, TRAIN, assert_is_toy, cifar_files, write_files

PARQUET = ("train.parquet", "test.parquet")
PYTHON, PREPARED = "cifar-10-python.tar.gz", "cifar10/3.0.2/dataset_info.json"


@pytest.fixture
def small(monkeypatch):
    for name, entry in datasets.DATASETS.items():
        monkeypatch.setitem(datasets.DATASETS, name, entry._replace(rows=(10, 2)))


@pytest.fixture
def folder_of(tmp_path):
    """A function that makes a folder with files of these names, whose content nothing reads."""

    def make(*names):
        folder = tmp_path / "data"
        folder.mkdir()
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"")
        return folder

    return make


@pytest.mark.parametrize(
    ("name", "files", "source"),
    [
        ("cifar10", PARQUET, "parquet"),
        ("cifar10", ("train-00000-of-00002.parquet", "test-00000-of-00001.parquet"), "parquet"),
        ("folder", (*PARQUET, "manifest.json", "features/scattering.npy"), "parquet"),
        ("cifar10", (PYTHON,), "archive"),
        ("cifar10", ("cifar-10-binary.tar.gz",), "archive"),
        ("cifar10", (PYTHON, "cifar-10-batches-py/data_batch_1"), "archive"),  # as torchvision
        ("cifar10", ("cifar-10-batches-bin/data_batch_1.bin",), "archive"),
        ("cifar10", ("data_batch_4",), "archive"),
        ("cifar100", ("cifar-100-python.tar.gz", PYTHON), "archive"),
        ("cifar100", ("cifar-100-binary/test.bin",), "archive"),
        ("imagenet32", ("train_data_batch_1.npz", "val_data.npz"), "archive"),
        ("imagenet32", ("Imagenet32_train_npz/train_data_batch_1.npz",), "archive"),
        ("mnist", ("train-images-idx3-ubyte.gz",), "archive"),
        ("mnist", ("MNIST/raw/t10k-labels-idx1-ubyte",), "archive"),  # as torchvision
        ("cifar10", (PREPARED, "downloads/extracted/x"), "tfds"),
        ("imagenet32", ("imagenet_resized/32x32/0.1.0/dataset_info.json",), "tfds"),
    ],
)
def test_files_say_by_their_names_which_source_reads_them(name, files, source, folder_of):
    folder = folder_of(*files)
    assert datasets.source_of(name, None, folder) == source
    assert datasets.source_of(name, "", str(folder)) == source
    assert datasets.source_of(name, "tfds", folder) == "tfds"  # a named one decides


def test_an_official_archive_is_recognised_as_a_file(folder_of):
    assert datasets.source_of("cifar10", None, folder_of(PYTHON) / PYTHON) == "archive"


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        (
            "cifar10",
            (PYTHON, *PARQUET),
            r"data holds two kinds of data, Parquet files \(test.parquet, train.parquet\) and "
            r"official files \(cifar-10-python.tar.gz\): choose one with "
            "--config.dataset.source=parquet or --config.dataset.source=archive",
        ),
        ("cifar10", (PREPARED, "train.parquet"), r"two kinds .* tensorflow-datasets \(cifar10/3"),
        ("cifar10", (), "data holds no data of cifar10, it is empty: expected cifar-10-python"),
        ("cifar10", ("a.csv",), "only a.csv: expected .*; or train.parquet and test.parquet, as"),
        ("imagenet32", ("x",), "expected train_data_batch_1.npz to train_data_batch_10.npz and"),
        ("mnist", ("x",), "expected train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-im"),
        ("folder", ("x",), "holds no Parquet files, only x: expected train.parquet and test"),
        (
            "cifar100",
            (PYTHON,),
            "set --config.dataset.name=cifar10, because there are official files of cifar10",
        ),
        ("folder", (PREPARED,), "set --config.dataset.name=cifar10, because there are files of te"),
        (
            "cifar10",
            ("README.md", "plain_text/train-00000-of-00001.parquet"),
            r"only README.md, plain_text: set --config.dataset.path=\S*data/plain_text, where",
        ),
        (
            "cifar10",
            ("cifar10/train.parquet", "mnist/train.parquet"),
            r"only cifar10, mnist: set --config.dataset.path=\S*data/cifar10, where such files lie",
        ),
        (
            "cifar10",
            ("train/cat/1.PNG", "test/cat/2.PNG"),
            r"import images by `bam data import \S*/data --out=DATA`, and set --config.dataset.pa",
        ),
        (
            "imagenet32",
            ("Imagenet32_train_npz.zip", "Imagenet32_val_npz.zip"),
            "unpack Imagenet32_train_npz.zip and Imagenet32_val_npz.zip there",
        ),
    ],
)
def test_two_kinds_of_data_and_none_are_one_line_with_what_was_found(
    name, files, message, folder_of
):
    folder = folder_of(*files)
    refused(message, datasets.source_of, name, None, folder, kind=DataError)
    refused(message, datasets.load, name, None, folder, kind=DataError)


@pytest.mark.parametrize("below", ["cifar10", "cifar10/3.0.2"])
def test_a_folder_inside_of_tensorflow_datasets_own_names_that_one(below, folder_of):
    folder = folder_of(PREPARED)
    message = f"set --config.dataset.path={folder}, where such files lie"
    refused(message, datasets.source_of, "cifar10", None, folder / below, kind=DataError)


@pytest.mark.parametrize("source", [None, "parquet", "archive", "tfds"])
def test_a_path_that_is_absent_or_another_file_is_refused(source, folder_of):
    folder = folder_of(*PARQUET, "sub/cifar-100-python.tar.gz")
    load = datasets.load
    refused("data/no: no such file or folder", load, "cifar10", source, folder / "no")
    message = r"train.parquet is a file: set --config.dataset.path to its folder, or to a file cifa"
    refused(message, load, "cifar10", source, folder / "train.parquet")
    other = folder / "sub" / "cifar-100-python.tar.gz"
    refused("is a file: set --config.dataset.name=cifar100", load, "cifar10", source, other)


def test_all_files_of_a_large_folder_are_counted(folder_of):
    folder = folder_of(*(f"{i:04d}.txt" for i in range(1203)))
    refused("only 0000.txt, .*0004.txt and 1198 more", datasets.source_of, "mnist", None, folder)


def test_a_source_that_is_named_for_other_files_is_refused(folder_of):
    folder, load = folder_of(PYTHON), datasets.load
    message = r"holds official files \(cifar-10-python.tar.gz\), not Parquet files: leave out "
    refused(f"{message}--config.dataset.source=parquet", load, "cifar10", "parquet", folder)
    refused(message, load, "cifar10", "parquet", folder / PYTHON)


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("cifar10", ("train.parquet",), "no test.parquet; expected train.parquet and test.parquet"),
        ("cifar10", ("test.parquet",), "no train.parquet; expected train.parquet and test"),
        (
            "cifar10",
            tuple(f"cifar-10-batches-py/data_batch_{i}" for i in range(1, 6)),
            "cifar-10-batches-py/test_batch: missing",
        ),
        ("cifar100", ("test.bin",), "data/train.bin: missing"),
        ("mnist", ("t10k-labels-idx1-ubyte",), "data/train-images-idx3-ubyte: missing"),
        (
            "imagenet32",
            tuple(f"train_data_batch_{i}.npz" for i in range(1, 11)),
            "data/val_data.npz: missing",
        ),
        ("cifar10", ("cifar10/3.0.2.incompleteABC/dataset_info.json",), "holds no data of cifar10"),
    ],
)
def test_half_of_a_data_set_is_refused_before_any_file_is_read(name, files, message, folder_of):
    # The files are empty, so that a reader would fail with another message.
    refused(message, datasets.load, name, None, folder_of(*files), kind=DataError)


def test_a_complete_version_is_read_beside_a_part_of_another(tmp_path, small):
    write_files(tmp_path, cifar_files("binary", 10))
    python = cifar_files("python", 10)
    write_files(tmp_path, {x: python[x] for x in python if not x.endswith("test_batch")})
    assert_is_toy(datasets.load("cifar10", None, tmp_path))


def parquet(folder):
    for split, name in ((TRAIN, "train.parquet"), (TEST, "test.parquet")):
        write_parquet(folder / name, *split)


def prepared(folder):
    prepared_folder.write("cifar10", TRAIN, TEST, folder)


def official(folder):
    write_files(folder, cifar_files("python", 10))


@pytest.mark.parametrize(
    ("write", "source"), [(parquet, "parquet"), (prepared, "tfds"), (official, "archive")]
)
def test_recognised_data_are_those_of_the_named_source_to_the_byte(write, source, tmp_path, small):
    write(tmp_path)
    config = base.get_config("dp_sgd")
    config.dataset.update({"name": "cifar10", "path": str(tmp_path)})
    digests, files = [], []
    for named in ("", source):
        config.dataset.source = named
        data = loading.make_dataset(config.dataset, config.features)
        assert_is_toy(data)
        digests.append(datasets.fingerprint(b"key", data.train, data.test))
        files.append(loading._files_of(config.dataset))
    assert digests[0] == digests[1] and files[0] == files[1]
    other = Split(data.train.images[::-1], data.train.labels[::-1])
    assert datasets.fingerprint(b"key", other, data.test) != digests[0]


def test_what_a_source_cannot_do_is_refused_for_a_recognised_one_too(tmp_path):
    official(tmp_path)
    config = base.get_config("dp_sgd")
    config.dataset.update({"name": "cifar10", "path": str(tmp_path), "memory": "stream"})
    refused("source archive cannot be streamed", loading.make_dataset, config.dataset)


def test_ids_of_users_are_read_from_recognised_parquet_files(tmp_path):
    ids = [i // 2 for i in range(10)]
    write_parquet(tmp_path / "train.parquet", *TRAIN, writer=ids)
    write_parquet(tmp_path / "test.parquet", *TEST)
    config = base.get_config("dp_sgd")
    config.dataset.update({"name": "cifar10", "path": str(tmp_path)})
    config.dataset.update({"groups": "writer", "group_size": 2})
    assert loading.make_dataset(config.dataset).users.tolist() == ids


@pytest.mark.parametrize("command", ["train", "clip_norm"])
def test_a_doubt_ends_a_command_in_one_line_before_any_work(command, folder_of, capsys):
    folder = folder_of(PYTHON, *PARQUET)
    arguments = {
        "train": ["--config=cifar10:bam_sam", f"--config.dataset.path={folder}", "--workdir=run"],
        "clip_norm": ["--config=digits:dp_sgd", "--public=cifar10", f"--path={folder}"],
    }[command]
    assert main([command, *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {folder} holds two kinds of data") and said.count("\n") == 1


def test_every_source_has_a_name_and_every_data_set_its_files_in_words():
    kinds = {x for entry in datasets.DATASETS.values() for x in entry.sources} - {"sklearn"}
    assert set(recognition.KINDS) == kinds
    for name, entry in datasets.DATASETS.items():
        if "archive" in entry.sources:
            assert len([*recognition._describe_files(name)]) == len(entry.sources)


def test_a_config_that_changes_after_its_data_were_read_reads_others(tmp_path):
    config = base.get_config("dp_sgd")
    config.dataset.name = "folder"
    for number in range(4):  # more than are kept
        folder = tmp_path / str(number)
        folder.mkdir()
        train = Split(TRAIN.images, TRAIN.labels * 0 + number)
        for split, name in ((train, "train"), (TEST, "test")):
            write_parquet(folder / f"{name}.parquet", *split, names=[*map(str, range(10))])
        config.dataset.path = str(folder)
        read = loading.make_dataset(config.dataset, config.features)
        assert set(read.train.labels.tolist()) == {number}
        assert loading.make_dataset(config.dataset, config.features) is read
