"""Preparation converts official files, leaves nothing half-done, and gives up at once offline."""

import importlib.machinery
import importlib.util
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bam.data import archives, datasets, prepared
from bam.data.common import DataError
from scripts import prepare_data


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


def test_without_tensorflow_a_download_says_what_to_fetch_and_where(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, stock in prepared.STOCK.items():
        with pytest.raises(DataError, match="needs, is not installed") as caught:
            prepare_data.prepare(name, tmp_path)
        assert stock.url in str(caught.value)
        assert "--archive=FOLDER" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def with_tensorflow(monkeypatch):
    spec = importlib.machinery.ModuleSpec("tensorflow", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


def slow_failure(*_, **__):
    time.sleep(1.5)
    raise OSError("name or service not known")


@pytest.mark.parametrize("network", ["refuses", "is silent", "does not even know the name"])
def test_offline_a_download_fails_in_seconds(network, tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "NETWORK_SECONDS", 0.5)
    for proxy in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(proxy, raising=False)
        monkeypatch.delenv(proxy.upper(), raising=False)
    with_tensorflow(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        if network == "refuses":
            server.close()
        if network == "does not even know the name":
            monkeypatch.setattr(socket, "getaddrinfo", slow_failure)
        stock = prepared.STOCK["cifar10"]._replace(url=url)
        monkeypatch.setitem(prepared.STOCK, "cifar10", stock)
        started = time.perf_counter()
        with pytest.raises(DataError, match=f"{url} does not answer. Download {url} to FOLDER"):
            prepare_data.prepare("cifar10", tmp_path)
        assert time.perf_counter() - started < 2
    assert list(tmp_path.iterdir()) == []


def test_the_command_fails_in_one_line(tmp_path):
    command = [sys.executable, "-m", "scripts.prepare_data", "--name=cifar10"]
    done = subprocess.run(
        [*command, f"--path={tmp_path}", f"--archive={tmp_path}"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error:")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
