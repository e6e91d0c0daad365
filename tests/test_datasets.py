"""Every source gives the same arrays, and every fault is one line that names file and row."""

import gzip
import hashlib
import io
import json
import os
import pickle
import shutil
import struct
import sys
import tarfile
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bam.data import datasets
from bam.data.common import DataError, Split, decode_images
from bam.data.sources import archives, parquet
from tests import prepared_folder
from tests.cases import encode, refused, write_parquet

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (12, 32, 32, 3), np.uint8)
LABELS = (np.arange(12) * 7 % 10).astype(np.int32)
TRAIN, TEST = Split(IMAGES[:10], LABELS[:10]), Split(IMAGES[10:], LABELS[10:])

SHARED = Path(os.environ.get("BAM_DATA") or Path(__file__).parents[2] / "shared" / "data")


def assert_is_toy(dataset, num_classes=10):
    assert dataset.num_classes == num_classes
    for found, expected in ((dataset.train, TRAIN), (dataset.test, TEST)):
        assert found.images.dtype == np.uint8
        assert found.labels.dtype == np.int32
        np.testing.assert_array_equal(found.images, expected.images)
        np.testing.assert_array_equal(found.labels, expected.labels)


def fails(match, name, source, path, **options):
    """`load` fails with one line that matches."""
    refused(match, datasets.load, name, source, path, kind=DataError, **options)


# Names and built-in sets.


@pytest.mark.parametrize("source", [None, "", "sklearn"])
def test_digits_need_no_source_and_no_path(source):
    digits = datasets.load("digits", source, "")
    assert digits.train.images.shape == (1437, 8, 8, 1)
    assert digits.test.images.shape == (360, 8, 8, 1)
    assert digits.train.images.max() == 255


def test_breast_cancer_is_floats_with_public_scales():
    found = datasets.load("breast_cancer")
    assert found.train.images.shape == (455, 1, 1, 30)
    assert found.test.images.shape == (114, 1, 1, 30)
    assert found.train.images.dtype == np.float32
    shares = [np.mean(split.labels) for split in (found.train, found.test)]
    assert shares[0] == pytest.approx(shares[1], abs=0.01)
    # The normalised range of a radius from 0 to 30 is [-2, 2], whatever the data are.
    assert (0 - found.mean[0]) / found.std[0] == -2
    assert (30 - found.mean[0]) / found.std[0] == 2


def test_normalize_scales_bytes_but_not_features():
    digits = datasets.load("digits")
    image = digits.train.images[0]
    expected = (image.astype(np.float32) / 255 - digits.mean) / digits.std
    np.testing.assert_array_equal(datasets.normalize(digits, image), expected)
    traced = jax.jit(lambda x: datasets.normalize(digits, x))(image)
    np.testing.assert_allclose(traced, expected, atol=1e-6)
    table = datasets.load("breast_cancer")
    np.testing.assert_allclose(
        datasets.normalize(table, table.test.images) * table.std + table.mean,
        table.test.images,
        rtol=1e-5,
        atol=1e-4,
    )


def test_constants_have_the_shapes_of_their_data():
    for facts in datasets.DATASETS.values():
        assert len(facts.mean) == len(facts.std) == facts.shape[2]


def test_unknown_names_sources_and_absent_paths_are_refused():
    fails("unknown data set 'svhn'; choose from digits", "svhn", None, "somewhere")
    fails("'CIFAR10': did you mean cifar10\\? choose from digits", "CIFAR10", None, "somewhere")
    fails("cifar10 has no source 'web'; choose from tfds, parquet, archive", "cifar10", "web", "x")
    fails("digits has no source 'tfds'", "digits", "tfds", "x")
    fails("cifar10 from source parquet needs --config.dataset.path", "cifar10", "parquet", None)
    fails("no such file or folder", "cifar10", "archive", "no/such/place")


# Images and labels.


def test_grey_palette_and_transparent_images_become_one_or_three_channels():
    grey = decode_images([encode(IMAGES[0, :, :, :1])], "x")
    np.testing.assert_array_equal(grey[0], IMAGES[0, :, :, :1])
    transparent = decode_images([encode(IMAGES[0], mode="RGBA")], "x")
    np.testing.assert_array_equal(transparent[0], IMAGES[0])
    flat = np.full((4, 4, 3), 255, np.uint8)
    np.testing.assert_array_equal(decode_images([encode(flat, mode="P")], "x")[0], flat)


GOOD = [encode(image) for image in TRAIN.images]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([], "x: has no rows"),
        ([GOOD[0], b"not an image"], "x: row 1: unreadable image: cannot identify"),
        ([GOOD[0], GOOD[0][: len(GOOD[0]) // 2]], r"x: row 1: unreadable image: .*truncated"),
        ([GOOD[0], GOOD[0], None], "x: row 2: no image bytes"),
        (
            [GOOD[0], encode(IMAGES[0, :16])],
            r"row 1: image of shape \(16, 32, 3\), expected \(32, 32",
        ),
        ([GOOD[0], encode(IMAGES[0, :, :, :1])], r"row 1: image of shape \(32, 32, 1\)"),
        ([encode(np.zeros((4, 4, 1), np.uint16))], "mode I;16 is neither 8-bit grey nor RGB"),
    ],
)
def test_bad_images_are_named_by_row(images, message):
    refused(message, decode_images, images, "x", kind=DataError)


# Parquet.


@pytest.fixture
def folder(tmp_path):
    write_parquet(tmp_path / "train.parquet", *TRAIN)
    write_parquet(tmp_path / "test.parquet", *TEST)
    return tmp_path


def test_parquet_is_read_row_by_row(folder):
    assert_is_toy(datasets.load("cifar10", "parquet", folder))


def test_cifar100_in_parquet_has_fine_labels(tmp_path):
    write_parquet(tmp_path / "train.parquet", *TRAIN, "image", "fine_label")
    write_parquet(tmp_path / "test.parquet", *TEST, "image", "fine_label")
    assert_is_toy(datasets.load("cifar100", "parquet", tmp_path), num_classes=100)


def test_a_custom_folder_takes_its_name_from_itself_and_classes_from_metadata(tmp_path):
    folder = tmp_path / "flowers"
    folder.mkdir()
    write_parquet(folder / "train.parquet", *TRAIN, names=[f"kind {i}" for i in range(13)])
    write_parquet(folder / "test.parquet", *TEST)
    found = datasets.load("folder", path=folder)
    assert_is_toy(found, num_classes=13)
    assert found.name == "flowers"
    np.testing.assert_array_equal(found.mean, [0.5] * 3)
    np.testing.assert_array_equal(found.std, [0.25] * 3)


def test_shards_are_joined_in_order_and_all_needed(folder):
    (folder / "train.parquet").unlink()
    for i, rows in enumerate((slice(0, 6), slice(6, 10))):
        part = TRAIN.images[rows], TRAIN.labels[rows]
        write_parquet(folder / f"train-0000{i}-of-00002.parquet", *part)
    assert_is_toy(datasets.load("cifar10", "parquet", folder))
    (folder / "train-00000-of-00002.parquet").unlink()
    fails("has 1 train shard, not as many as train-00001-of-00002", "cifar10", "parquet", folder)


def test_a_missing_parquet_split_and_a_truncated_file_are_named(folder):
    file = folder / "train.parquet"
    whole = file.read_bytes()
    for length in (0, 100, len(whole) - 10):
        file.write_bytes(whole[:length])
        fails("train.parquet: not a readable Parquet file", "cifar10", "parquet", folder)
    file.write_bytes(whole)
    (folder / "test.parquet").unlink()
    fails("no test.parquet; expected train.parquet and test", "cifar10", "parquet", folder)


def labels_with(row, label):
    return [*TRAIN.labels[:row].tolist(), label, *TRAIN.labels[row + 1 :].tolist()]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": [*GOOD[:3], b"broken", *GOOD[4:]]}, "row 3: unreadable image"),
        ({"images": [None, *GOOD[1:]]}, "row 0: no image bytes"),
        ({"images": TRAIN.images[:, :28, :28, :1]}, r"row 0: image of shape \(28, 28, 1\), expect"),
        ({"labels": labels_with(2, 10)}, "row 2: label 10 is not from 0 to 9"),
        ({"labels": labels_with(1, -1)}, "row 1: label -1"),
        ({"labels": labels_with(4, None)}, "row 4: no label"),
        ({"labels": pa.array(["cat"] * 10)}, "column label is string, not an integer or a number"),
        ({"labels": pa.array([0.5] * 10)}, "has 1 classes, expected 10"),
        ({"image": "picture"}, "no column image or img among picture, label"),
    ],
)
def test_parquet_faults_name_file_and_row(folder, changes, message, streamed):
    given = {"images": TRAIN.images, "labels": TRAIN.labels} | changes
    write_parquet(folder / "train.parquet", **given)

    def read():
        stays = lambda num_bytes: streamed  # noqa: E731
        train = datasets.load("cifar10", "parquet", folder, stays=stays).train
        for row in range(10):
            train.images[[row]]

    refused(f"train.parquet: {message}", read, kind=DataError)


def test_a_column_of_images_that_is_no_struct_is_refused(folder):
    pq.write_table(pa.table({"img": [1, 2], "label": [0, 1]}), folder / "train.parquet")
    fails("column img is int64, not a struct with bytes", "cifar10", "parquet", folder)


# Official archives, in miniature: two rows a batch, and their own checksums and row counts.


def planes(images):
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def cifar_files(kind, number):
    """File name and bytes of each member of a miniature archive."""
    stem = f"cifar-{number}" + ("-batches" if number == 10 else "")
    folder = stem + {
        ("python", 10): "-py",
        ("binary", 10): "-bin",
    }.get((kind, number), f"-{kind}")
    suffix = ".bin" if kind == "binary" else ""
    if number == 10:
        parts = {f"data_batch_{i + 1}": slice(2 * i, 2 * i + 2) for i in range(5)}
        parts["test_batch"] = slice(10, 12)
    else:
        parts = {"train": slice(0, 10), "test": slice(10, 12)}
    files = {}
    for name, rows in parts.items():
        pixels, labels = planes(IMAGES[rows]), LABELS[rows]
        if kind == "python":
            key = b"labels" if number == 10 else b"fine_labels"
            batch = {b"data": pixels, key: labels.tolist(), b"batch_label": b"a batch"}
            content = pickle.dumps(batch, protocol=2)
        else:
            coarse = [np.full((len(labels), 1), 3, np.uint8)] if number == 100 else []
            records = [*coarse, labels[:, None].astype(np.uint8), pixels]
            content = np.concatenate(records, axis=1).tobytes()
        files[f"{folder}/{name}{suffix}"] = content
    return files


def write_tar(archive, files):
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def write_files(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(content)


@pytest.fixture
def small(monkeypatch):
    for name, facts in datasets.DATASETS.items():
        monkeypatch.setitem(datasets.DATASETS, name, facts._replace(rows=(10, 2)))


def trust(monkeypatch, archive):
    digest = hashlib.md5(archive.read_bytes(), usedforsecurity=False).hexdigest()
    monkeypatch.setitem(archives.MD5, archive.name, digest)


@pytest.mark.parametrize("number", [10, 100])
@pytest.mark.parametrize("kind", ["python", "binary"])
def test_cifar_is_the_same_from_archive_folder_of_it_and_extracted(
    kind, number, tmp_path, monkeypatch, small
):
    files = cifar_files(kind, number)
    archive = tmp_path / f"cifar-{number}-{kind}.tar.gz"
    write_tar(archive, files)
    trust(monkeypatch, archive)
    extracted = tmp_path / "extracted"
    write_files(extracted, files)
    inner = extracted / next(iter(files)).split("/")[0]
    for path in (archive, tmp_path, extracted, inner):
        for source in (None, "archive"):
            assert_is_toy(datasets.load(f"cifar{number}", source, path), number)


def test_an_altered_archive_is_refused_before_it_is_opened(tmp_path, monkeypatch, small):
    archive = tmp_path / "cifar-10-python.tar.gz"
    write_tar(archive, cifar_files("python", 10))
    fails("MD5 .*, expected c58f30108f718f92", "cifar10", "archive", archive)
    trust(monkeypatch, archive)
    archive.write_bytes(archive.read_bytes()[:-5000])
    fails("cifar-10-python.tar.gz: MD5 .* truncated or altered", "cifar10", "archive", archive)
    trust(monkeypatch, archive)  # even a trusted one fails in one line
    fails("cifar-10-python.tar.gz: not a readable archive", "cifar10", "archive", archive)


def test_an_archive_without_a_batch_is_refused(tmp_path, monkeypatch, small):
    archive = tmp_path / "cifar-10-binary.tar.gz"
    files = cifar_files("binary", 10)
    del files["cifar-10-batches-bin/data_batch_3.bin"]
    write_tar(archive, files)
    trust(monkeypatch, archive)
    fails("lacks data_batch_3.bin: download it again", "cifar10", "archive", archive)


def test_extracted_cifar_faults_name_file_and_row(tmp_path, small):
    files = cifar_files("binary", 10)
    write_files(tmp_path, files)
    batch = tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin"
    whole = batch.read_bytes()
    batch.write_bytes(whole[:-1])
    fails("data_batch_2.bin: truncated in row 1", "cifar10", "archive", tmp_path)
    batch.write_bytes(whole[:3073])
    fails("has 9 rows, but the official split has 10", "cifar10", "archive", tmp_path)
    batch.write_bytes(whole[:3073] + b"\x0b" + whole[3074:])
    fails("data_batch_2.bin: row 1: label 11 is not from 0 to 9", "cifar10", "archive", tmp_path)
    batch.unlink()
    fails("data_batch_2.bin: missing", "cifar10", "archive", tmp_path)
    fails("neither cifar-100-python.tar.gz or cifar-100-b", "cifar100", "archive", tmp_path)


class Calls:
    """Pickled, it asks for a function call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    ("function", "arguments", "asked"),
    [
        (os.mkdir, ("pwned",), "posix.mkdir|nt.mkdir"),
        (eval, ("1",), "builtins.eval|__builtin__.eval"),
        (getattr, ("x", "y"), r".*\.getattr"),
        (np.load, ("x",), r"numpy.*\.load"),
    ],
)
def test_a_malicious_pickle_is_refused_and_runs_nothing(
    function, arguments, asked, protocol, tmp_path, monkeypatch, small
):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, cifar_files("python", 10))
    evil = {b"data": Calls(function, *arguments), b"labels": [1]}
    batch = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    batch.write_bytes(pickle.dumps(evil, protocol))
    fails(
        f"data_batch_1: the pickle was refused, because it imports ({asked})",
        "cifar10",
        "archive",
        tmp_path,
    )
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "batch",
    [
        {b"data": np.zeros((1, 3072), np.float32), b"labels": [0]},
        {b"data": np.zeros((2, 3072), np.uint8).T, b"labels": [0]},
        {b"data": np.zeros((1, 3072), np.uint8), b"labels": ["0"]},
        {b"data": np.zeros((1, 3072), np.uint8)},
        {b"data": [[0] * 3072], b"labels": [0]},
        [1, 2],
    ],
)
def test_a_pickle_of_something_else_is_no_batch(batch):
    content = pickle.dumps(batch, protocol=2)
    with pytest.raises(DataError, match="x: not a CIFAR batch"):
        archives.parse_pickle(content, "x", b"labels")


def test_a_truncated_pickle_is_no_batch():
    content = cifar_files("python", 10)["cifar-10-batches-py/test_batch"]
    for length in range(0, len(content) - 1, 997):
        with pytest.raises(DataError, match="x: not a CIFAR batch"):
            archives.parse_pickle(content[:length], "x", b"labels")


@pytest.fixture
def imagenet32(tmp_path, small):
    for i in range(10):
        rows = slice(i, i + 1)
        np.savez(
            tmp_path / f"train_data_batch_{i + 1}.npz",
            data=planes(IMAGES[rows]),
            labels=LABELS[rows] + 1,
            mean=np.zeros(3072),
        )
    np.savez(tmp_path / "val_data.npz", data=planes(IMAGES[10:]), labels=LABELS[10:] + 1)
    return tmp_path


def test_imagenet32_batches_count_labels_from_zero(imagenet32):
    assert_is_toy(datasets.load("imagenet32", "archive", imagenet32), 1000)


def test_imagenet32_may_stay_in_the_folders_of_its_two_archives(imagenet32):
    for file in sorted(imagenet32.glob("*.npz")):
        folder = imagenet32 / f"Imagenet32_{file.name.partition('_')[0]}_npz"
        folder.mkdir(exist_ok=True)
        file.rename(folder / file.name)
    assert_is_toy(datasets.load("imagenet32", None, imagenet32), 1000)


def test_imagenet32_faults_name_the_batch(imagenet32):
    batch = imagenet32 / "train_data_batch_4.npz"
    whole = batch.read_bytes()
    batch.write_bytes(whole[:-100])
    fails("train_data_batch_4.npz: not a readable batch", "imagenet32", "archive", imagenet32)
    np.savez(batch, data=planes(IMAGES[3:4]), labels=[0])
    fails("batch_4.npz: row 0: label -1 is not from", "imagenet32", "archive", imagenet32)
    np.savez(batch, data=IMAGES[3:4], labels=[1])
    fails(r"batch_4.npz: uint8 \(1, 32, 32, 3\)", "imagenet32", "archive", imagenet32)
    np.savez(batch, data=np.array([Calls(eval, "1")], object), labels=[1])
    fails("batch_4.npz: not a readable batch: .*allow_pickle", "imagenet32", "archive", imagenet32)
    batch.unlink()
    fails("train_data_batch_4.npz: missing", "imagenet32", "archive", imagenet32)


def idx(array):
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


MNIST_IMAGES = IMAGES[:, :28, :28, 0]


@pytest.fixture(params=[".gz", ""])
def mnist(request, tmp_path, small):
    for stem, rows in (("train", slice(0, 10)), ("t10k", slice(10, 12))):
        for part, array in (("images-idx3", MNIST_IMAGES), ("labels-idx1", LABELS)):
            content = idx(array[rows])
            packed = gzip.compress(content) if request.param else content
            (tmp_path / f"{stem}-{part}-ubyte{request.param}").write_bytes(packed)
    return tmp_path, request.param


def test_mnist_idx_files_are_read_zipped_or_not(mnist):
    found = datasets.load("mnist", "archive", mnist[0])
    np.testing.assert_array_equal(found.train.images[..., 0], MNIST_IMAGES[:10])
    np.testing.assert_array_equal(found.test.labels, LABELS[10:])


def test_mnist_is_read_where_torchvision_puts_it(mnist):
    folder = mnist[0] / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for file in [*mnist[0].glob("*-ubyte*")]:
        file.rename(folder / file.name)
    found = datasets.load("mnist", None, mnist[0])
    np.testing.assert_array_equal(found.train.images[..., 0], MNIST_IMAGES[:10])
    np.testing.assert_array_equal(found.test.labels, LABELS[10:])


def test_mnist_faults_name_the_file(mnist):
    folder, suffix = mnist
    images = folder / f"train-images-idx3-ubyte{suffix}"
    whole = images.read_bytes()
    images.write_bytes(whole[:-5])
    fails("train-images-idx3-ubyte.*(truncated|bytes after the head)", "mnist", "archive", folder)
    images.write_bytes((folder / f"train-labels-idx1-ubyte{suffix}").read_bytes())
    fails("train-images-idx3.*not an idx file of bytes with 3 axes", "mnist", "archive", folder)
    images.write_bytes(b"")
    fails("train-images-idx3-ubyte", "mnist", "archive", folder)
    images.write_bytes(whole)
    labels = folder / f"t10k-labels-idx1-ubyte{suffix}"
    content = idx(np.array([4, 10]))
    labels.write_bytes(gzip.compress(content) if suffix else content)
    fails("t10k-labels-idx1-ubyte: row 1: label 10", "mnist", "archive", folder)
    labels.unlink()
    fails("t10k-labels-idx1-ubyte: missing", "mnist", "archive", folder)


# Prepared by tensorflow-datasets.


@pytest.mark.parametrize(
    ("name", "stock", "split"),
    [
        ("cifar10", "cifar10", "test"),
        ("cifar100", "cifar100", "test"),
        ("imagenet32", "imagenet_resized/32x32", "validation"),
    ],
)
def test_what_is_written_is_read_back_without_tensorflow(name, stock, split, tmp_path):
    import tensorflow_datasets as tfds

    prepared_folder.write(name, TRAIN, TEST, tmp_path)
    found = datasets.load(name, "tfds", tmp_path)
    assert_is_toy(found, found.num_classes)
    # It also is what tensorflow-datasets itself would look for.
    row = tfds.data_source(stock, split=split, data_dir=tmp_path, download=False)[1]
    np.testing.assert_array_equal(row["image"], TEST.images[1])
    assert row["label"] == TEST.labels[1]
    assert "tensorflow" not in sys.modules


def test_the_newest_version_is_read_by_its_numbers_and_no_unfinished_one(tmp_path):
    other = Split(TEST.images[:3], TEST.labels[:3])
    folder = prepared_folder.write("cifar10", other, TEST, tmp_path)
    folder.rename(folder.with_name("incomplete.9.9.9"))
    shutil.copytree(folder.with_name("incomplete.9.9.9"), folder)
    prepared_folder.write("cifar10", TRAIN, TEST, tmp_path / "newer")
    shutil.copytree(tmp_path / "newer" / "cifar10" / folder.name, folder.with_name("10.0.0"))
    assert_is_toy(datasets.load("cifar10", "tfds", tmp_path), 10)


def test_grey_images_survive_preparation(tmp_path):
    train, test = (Split(s.images[:, :28, :28, :1], s.labels) for s in (TRAIN, TEST))
    prepared_folder.write("mnist", train, test, tmp_path)
    found = datasets.load("mnist", path=tmp_path)
    np.testing.assert_array_equal(found.train.images, train.images)


def test_tfds_without_a_path_reads_its_own_default_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    fails("cifar10 is not prepared here; without tensorflow-datasets, download", "cifar10", "", "")


def test_damaged_prepared_files_are_refused(tmp_path):
    folder = prepared_folder.write("cifar10", TRAIN, TEST, tmp_path)
    file = next(folder.glob("*-train.array_record*"))
    whole = file.read_bytes()
    for content in (b"", whole[: len(whole) // 2], whole[:-65536]):
        file.write_bytes(content)
        fails("3.0.2: train: damaged files", "cifar10", "tfds", tmp_path)
    file.unlink()
    fails("3.0.2: train: damaged files", "cifar10", "tfds", tmp_path)
    info = folder / "dataset_info.json"
    described = json.loads(info.read_text())
    info.write_text(json.dumps(described | {"splits": described["splits"][:1]}))
    file.write_bytes(whole)
    fails("3.0.2: test: no such split", "cifar10", "tfds", tmp_path)
    info.write_text(json.dumps(described | {"fileFormat": "tfrecord"}))
    fails("prepared as tfrecord, not array_record: prepare it again", "cifar10", "tfds", tmp_path)
    info.write_text("{")
    fails("3.0.2: not a prepared data set", "cifar10", "tfds", tmp_path)


# The real data, where they are. The smaller file serves as both splits: decoding takes time.


@pytest.fixture
def real(request, tmp_path):
    file = SHARED / request.param / "test.parquet"
    if not file.is_file():
        pytest.skip(f"no {request.param} here; set BAM_DATA to its parent folder")
    for split in ("train", "test"):
        (tmp_path / f"{split}.parquet").symlink_to(file)
    return tmp_path


@pytest.mark.thorough
@pytest.mark.parametrize("real", ["cifar10_jpeg"], indirect=True)
def test_real_cifar10_has_a_thousand_test_images_a_class(real):
    train, test, num_classes = parquet.read(real)
    assert num_classes == 10  # from the class names
    assert train.images.shape == (10_000, 32, 32, 3)
    assert np.bincount(test.labels).tolist() == [1000] * 10
    mean = test.images.mean((0, 1, 2)) / 255
    np.testing.assert_allclose(mean, datasets.DATASETS["cifar10"].mean, atol=5e-3)


@pytest.mark.parametrize("real", ["mnist"], indirect=True)
def test_real_mnist_is_bit_exact(real):
    test = datasets.load("mnist", "parquet", real).test
    assert test.images.shape == (10_000, 28, 28, 1)
    assert test.labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    counts = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert np.bincount(test.labels).tolist() == counts
    # The published SHA-256 of t10k-images-idx3-ubyte, unpacked.
    digest = hashlib.sha256(idx(test.images[..., 0])).hexdigest()
    assert digest == "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"


@pytest.mark.parametrize("num_examples", [1, 300, 1436])
def test_held_out_examples_leave_the_training_split_and_replace_the_test_split(num_examples):
    dataset = datasets.load("digits")
    numbered = dataset._replace(
        train=dataset.train._replace(labels=np.arange(1437, dtype=np.int32))
    )
    found = datasets.hold_out(numbered, num_examples)
    assert len(found.test.labels) == len(found.test.images) == num_examples
    assert sorted([*found.train.labels, *found.test.labels]) == list(range(1437))
    for split in (found.train, found.test):
        np.testing.assert_array_equal(split.images, dataset.train.images[split.labels])


def test_nothing_held_out_is_the_data_set_itself_and_all_of_it_is_refused():
    dataset = datasets.load("digits")
    assert datasets.hold_out(dataset, 0) is dataset
    with pytest.raises(ValueError, match="from 0 to 1436, got 1437"):
        datasets.hold_out(dataset, 1437)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32])
def test_examples_with_labels_of_any_shape_and_type_are_set_aside(shape, dtype):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 9, (50, 2, 2, 1), np.uint8)
    train = datasets.Split(images, rng.normal(0, 5, (50, *shape)).astype(dtype))
    dataset = datasets.Dataset("", train, train, 2, np.zeros(1), np.ones(1))
    found = datasets.hold_out(dataset, 20)
    assert (len(found.train.labels), found.test.labels.shape) == (30, (20, *shape))
    order = rng.permutation(50)
    moved = dataset._replace(train=datasets.Split(*(x[order] for x in train)))
    again = datasets.hold_out(moved, 20).test
    as_rows = lambda split: sorted(x.tobytes() for x in split.labels)  # noqa: E731
    assert as_rows(again) == as_rows(found.test)


def test_every_part_of_a_label_decides_who_is_set_aside():
    def hashes(labels):
        images = np.zeros((len(labels), 1, 1, 1), np.uint8)
        return datasets.image_hashes(datasets.Split(images, np.asarray(labels))).tolist()

    first, *others = hashes([[1, 2, 3], [1, 2, 4], [1, 3, 2], [2, 2, 3]])
    assert first not in others
    assert len(set(hashes([0.0, 0.25, 0.5]))) == 3
    assert hashes(np.array([1, -2], np.int16)) == hashes(np.array([1, -2], np.int64))
    assert hashes([1, -2]) == [0x291CB38C0870CAF4, 0x9E1CE2CBC41DAD36]  # of 0.2.0
