"""Preparation converts official files, leaves nothing half-done, and gives up at once offline."""

import sys

import numpy as np
import pytest

from bam.data import datasets
from bam.data.common import DataError
from bam.data.sources import archives, prepared
from scripts import prepare_data
from tests.cases import run_command


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """A miniature of the binary CIFAR-10 distribution, extracted."""
    monkeypatch.setitem(archives.ROWS, "cifar10", (5, 1))
    folder = tmp_path / "official" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        (folder / f"{name}.bin").write_bytes(bytes([i]) + bytes([40 * i]) * 3072)
    return folder.parent


def test_an_official_archive_becomes_a_prepared_data_set(archive, tmp_path):
    folder = prepare_data.prepare("cifar10", tmp_path / "out", str(archive))
    assert folder == tmp_path / "out" / "cifar10" / "3.0.2"
    found = datasets.load("cifar10", "tfds", tmp_path / "out")
    assert found.train.labels.tolist() == [0, 1, 2, 3, 4]
    assert found.train.images[:, 0, 0, 0].tolist() == [0, 40, 80, 120, 160]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["cifar10"]
    assert "tensorflow" not in sys.modules


def test_a_prepared_data_set_is_never_overwritten(archive, tmp_path):
    prepare_data.prepare("cifar10", tmp_path, str(archive))
    with pytest.raises(DataError, match=r"3\.0\.2: is there already; remove it"):
        prepare_data.prepare("cifar10", tmp_path, str(archive))


def test_a_bad_archive_leaves_nothing(archive, tmp_path):
    (archive / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(b"\x0c" + bytes(3072))
    with pytest.raises(DataError, match=r"test_batch\.bin: row 0: label 12"):
        prepare_data.prepare("cifar10", tmp_path / "out", str(archive))
    assert not (tmp_path / "out").exists()


def test_an_interrupted_preparation_leaves_nothing(archive, tmp_path, monkeypatch):
    encode = prepared._png
    seen = []

    def stop_midway(image: np.ndarray) -> bytes:
        seen.append(image)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return encode(image)

    monkeypatch.setattr(prepared, "_png", stop_midway)
    with pytest.raises(KeyboardInterrupt):
        prepare_data.prepare("cifar10", tmp_path / "out", str(archive))
    assert list((tmp_path / "out").iterdir()) == []


def test_the_command_fails_in_one_line(tmp_path):
    done = run_command(
        "scripts.prepare_data", "--name=cifar10", f"--path={tmp_path}", f"--archive={tmp_path}"
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error:")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_an_archive_the_command_says_what_to_fetch(tmp_path):
    for name, stock in prepared.STOCK.items():
        done = run_command("scripts.prepare_data", f"--name={name}", f"--path={tmp_path}")
        assert done.returncode == 2
        assert done.stderr == (
            f"error: --archive is required: download {stock.url} and name the file or its folder\n"
        )
    assert list(tmp_path.iterdir()) == []
