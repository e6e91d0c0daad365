"""What is written is on the disk, with its name, when the call returns."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bam import files
from bam.data import datasets
from bam.data.preprocessing import Preprocessing
from bam.features import extraction
from bam.images import importing, listing
from bam.privacy import checkpoint, ledger
from bam.release import export
from bam.training import loop
from configs import digits


class Disk:
    """What a power cut would leave: a file's bytes, a folder's names, as they were last forced."""

    def __init__(self, monkeypatch):
        self.kept, fsync = {}, os.fsync

        def forced(file):
            fsync(file)
            number = file if isinstance(file, int) else file.fileno()
            inode = os.fstat(number).st_ino
            path = os.readlink(f"/proc/self/fd/{number}")
            self.kept[inode] = content(path)

        monkeypatch.setattr(os, "fsync", forced)

    def lacks(self, path):
        """Files and folders, from `path` down, that are not as they were last forced to disk."""
        every = (path, *path.rglob("*"))
        return [x.name for x in every if self.kept.get(x.stat().st_ino) != content(x)]


def content(path):
    path = Path(path)
    return sorted(x.name for x in path.iterdir()) if path.is_dir() else path.read_bytes()


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def imported(folder):
    for number in range(20):
        place = folder / "images" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), number, np.uint8)).save(place / f"{number}.png")
    options = importing.Options(Preprocessing((8, 8), 1), ("a", "b"), 0.25, strict=True)
    examples = listing.in_class_folders(folder / "images").examples
    importing.run(folder / "images", examples, folder / "new" / "out", options)


def of_features(folder):
    extraction.extract(datasets.load("digits"), lambda x: x, {}, folder / "new" / "features")


def saved(folder):
    files.make_folder(folder / "new" / "checkpoints")
    for step in (1, 2, 3):
        checkpoint.write(folder / "new" / "checkpoints", {"step": step}, {"weights": np.zeros(3)})


def begun(folder):
    files.make_folder(folder / "new" / "run")
    ledger.create(folder / "new" / "run" / "steps_begun")


def summary(folder):
    files.make_folder(folder / "new")
    files.write_json(folder / "new" / "summary.json", {})


@pytest.mark.parametrize("write", [imported, of_features, saved, begun, summary])
def test_what_is_written_outlives_a_power_cut_as_does_its_name(write, disk, tmp_path):
    write(tmp_path)
    may_lack = ["checkpoints"] if write is saved else []  # an older one comes back, and is whole
    if write is saved:
        steps = (tmp_path / "new" / "checkpoints").iterdir()
        assert sorted(x.name for x in steps) == ["2.npz", "3.npz"]
    assert disk.lacks(tmp_path / "new") == may_lack
    last = sorted((tmp_path / "new").rglob("*"))[-1]
    if last.is_file():  # the negative control
        last.write_bytes(last.read_bytes() + b" ")
        assert disk.lacks(tmp_path / "new") == [*may_lack, last.name]


@pytest.mark.thorough
def test_a_release_outlives_a_power_cut(disk, tmp_path):
    config = digits.get_config("dp_sgd")
    config.update({"accountant": "rdp", "num_steps": 1, "expected_batch_size": 20})
    config.model.name, config.microbatch_size = "linear", 7
    loop.train(loop.build(config), None, tmp_path / "run")
    export.export(tmp_path / "run", tmp_path / "new" / "release")
    assert disk.lacks(tmp_path / "new") == []
    run = {"config.json", "plan.json", "steps_begun", "metrics.jsonl", "summary.json"}
    assert not run & set(disk.lacks(tmp_path / "run"))


def test_a_file_system_that_forces_no_folders_is_written_to_all_the_same(monkeypatch, tmp_path):
    fsync = os.fsync

    def of_files_alone(file):
        if os.path.isdir(f"/proc/self/fd/{file}"):
            raise OSError(22, "Invalid argument")
        fsync(file)

    monkeypatch.setattr(os, "fsync", of_files_alone)
    files.write_json(tmp_path / "a.json", {"a": 1})
    assert files.read_json(tmp_path / "a.json") == {"a": 1}

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_json(tmp_path / "a.json", {"a": 2})
    assert files.read_json(tmp_path / "a.json") == {"a": 1}


@pytest.mark.parametrize("name", ["lock", "steps_begun"])
def test_a_pipe_is_no_lock_and_no_ledger_and_is_not_waited_for(tmp_path, name):
    use = {
        "lock": lambda folder: files.lock(folder).close(),
        "steps_begun": lambda folder: ledger.create(folder / name),
    }[name]
    os.mkfifo(tmp_path / name)
    with pytest.raises(
        PermissionError, match=rf"{name} cannot be written: it is not a regular file"
    ):
        use(tmp_path)
    (tmp_path / name).unlink()
    use(tmp_path)  # the control
