"""A folder of images of any kind becomes one data set: same input, same bytes, and no surprise."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bam.data import datasets
from bam.data.common import DataError
from bam.data.preprocessing import Preprocessing
from bam.data.sources import parquet
from bam.images import importing, listing
from bam.training import loop
from configs import digits
from tests.cases import refused, run_command

EIGHT = Preprocessing((8, 8), 3)
OPTIONS = importing.Options(EIGHT, ("disc", "square"), 0.25, strict=False)


def picture(number, size=(20, 30), bright=200):
    pixels = np.random.default_rng(number).integers(0, 60, (*size, 3), np.uint8)
    pixels[5:-5, 5:-5] = bright
    return Image.fromarray(pixels)


@pytest.fixture
def folder(tmp_path):
    """40 images of two classes, in six formats and modes, and two that are damaged."""
    found = tmp_path / "photographs"
    for number in range(40):
        place = found / ("disc", "square")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        image, kind = picture(number, (20 + number % 7, 30)), number % 6
        if kind == 0:
            image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
        modes = {1: "RGBA", 2: "P", 3: "L"}
        image = image.convert(modes[kind]) if kind in modes else image
        image.save(place / f"{number}.{('png', 'png', 'png', 'tif', 'webp', 'jpg')[kind]}")
    (found / "disc" / "no_image.png").write_bytes(b"nothing")
    (found / "square" / "cut.jpg").write_bytes((found / "square" / "5.jpg").read_bytes()[:150])
    return found


def made(folder, out, options=OPTIONS, **more):
    return importing.run(folder, listing.in_class_folders(folder).examples, out, options, **more)


def contents(out):
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def test_every_format_and_depth_is_read_and_what_is_damaged_is_listed(folder, tmp_path):
    manifest = made(folder, tmp_path / "out")
    assert sorted(manifest["left_out"]) == ["disc/no_image.png", "square/cut.jpg"]
    assert sum(manifest["num_examples"].values()) == 40
    assert importing.read_manifest(tmp_path / "out") == manifest
    loaded = datasets.load("folder", path=tmp_path / "out")
    assert loaded.train.images.shape[1:] == (8, 8, 3) and loaded.num_classes == 2
    for split in (loaded.train, loaded.test):  # the middle is bright, the rim dark, in every format
        assert (split.images[:, 3:5, 3:5] > 150).all()
        assert (split.images[:, 0] < 150).all()
    with pytest.raises(DataError, match=r"(no_image\.png.*cannot identify|cut\.jpg.*Truncated)"):
        made(folder, tmp_path / "strict", OPTIONS._replace(strict=True))
    assert not (tmp_path / "strict" / importing.MANIFEST).exists()


def test_the_same_input_gives_the_same_bytes_and_a_stopped_import_goes_on(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(importing, "SHARD", 8)
    done = []
    made(folder, tmp_path / "one", num_workers=2, on_shard=lambda *x: done.append(x))
    assert done[-1] == (len(done), len(done)) and len(done) > 4
    made(folder, tmp_path / "two")
    expected = contents(tmp_path / "one")
    assert contents(tmp_path / "two") == expected
    for name in (importing.MANIFEST, sorted(expected)[-1]):  # as if it had been killed
        (tmp_path / "two" / name).unlink()
    with pytest.raises(DataError, match=r"has no manifest\.json: run bam data import"):
        importing.read_manifest(tmp_path / "two")
    made(folder, tmp_path / "two")
    assert contents(tmp_path / "two") == expected
    with pytest.raises(DataError, match="choose another --out"):
        made(folder, tmp_path / "two", OPTIONS._replace(preprocessing=EIGHT._replace(size=(9, 8))))
    picture(99).save(folder / "disc" / "0.png")  # another image of the same name
    with pytest.raises(DataError, match="choose another --out"):
        made(folder, tmp_path / "two")


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_what_is_imported_is_for_its_owner_alone_whatever_the_umask(
    folder, tmp_path, monkeypatch, umask
):
    monkeypatch.setattr(importing, "SHARD", 8)
    out, sheet = tmp_path / "out", tmp_path / "sheet.png"
    seen, replace = set(), Path.replace

    def noted(partial, path):  # before a file has its name, it has its content
        seen.add((partial.suffix, partial.stat().st_mode & 0o777))
        return replace(partial, path)

    monkeypatch.setattr(Path, "replace", noted)
    before = os.umask(umask)
    try:
        (tmp_path / "plain").write_bytes(b"")  # the control
        out.mkdir(mode=0o755)
        made(folder, out, num_workers=2)
        sheet_flags = ("bam", "data", "show", str(out), f"--out={sheet}")
        assert run_command(*sheet_flags).returncode == 0
        assert out.stat().st_mode & 0o777 == 0o700
        assert {x.stat().st_mode & 0o777 for x in (*out.iterdir(), sheet)} == {0o600}
        assert seen == {(".part", 0o600), (".partial", 0o600)}
        # A part that a crash left open to others does not stay so.
        (name := next(out.glob("*.parquet"))).unlink()
        name.with_suffix(".part").touch(mode=0o666)
        made(folder, out)
        assert name.stat().st_mode & 0o777 == 0o600
        for file in out.iterdir():  # nor does a file that is not written again
            file.chmod(0o644)
        written = name.stat().st_mtime_ns
        made(folder, out)
        assert name.stat().st_mtime_ns == written
        assert {x.stat().st_mode & 0o777 for x in out.iterdir()} == {0o600}
    finally:
        os.umask(before)
    assert (tmp_path / "plain").stat().st_mode & 0o777 == 0o666 & ~umask


def test_two_imports_at_once_into_one_folder_put_no_image_twice_into_training(folder, tmp_path):
    out, other = tmp_path / "out", OPTIONS._replace(test_share=0.5)

    def second(num_written, num):
        refused("out is in use in this process", made, folder, out, kind=BlockingIOError)
        refused("choose another --out", made, folder, out, other, kind=DataError)

    made(folder, out, on_shard=second)
    expected = contents(out)
    made(folder, out)  # the control: one after the other
    assert contents(out) == expected
    empty = tmp_path / "empty"  # both began when nothing was written
    on_checked = lambda: made(folder, empty, other)  # noqa: E731
    message = "imported from other files or with other options"
    refused(message, made, folder, empty, on_checked=on_checked, kind=DataError)
    assert importing.read_manifest(empty)["num_examples"]["test"] > 10


def test_a_file_that_the_manifest_does_not_list_is_not_trained_on(folder, tmp_path):
    out = tmp_path / "out"
    made(folder, out)
    (out / "train-draft.csv").touch()  # the control
    num_rows = len(parquet.read(out)[0].labels)
    for name in ("train.parquet", "test.parquet", "train-00001-of-00002.parquet"):
        (out / name).write_bytes((out / "test-00000-of-00001.parquet").read_bytes())
        message = f"{name} is not in manifest.json: remove it, or import again"
        refused(message, parquet.read, out, kind=DataError)
        (out / name).unlink()
    assert len(parquet.read(out)[0].labels) == num_rows


def test_a_record_that_a_killed_import_began_is_no_other_file(folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "import.json.71.72.partial").write_text("{")
    made(folder, out)
    made(folder, tmp_path / "control")
    assert contents(out) == contents(tmp_path / "control")
    for name in ("notes.txt", "import.json.partial.txt"):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / name).touch()
        refused("holds other files", made, folder, tmp_path / "other", kind=DataError)
        (tmp_path / "other" / name).unlink()


@pytest.mark.parametrize("change", [lambda x: b"", lambda x: x[:-1], lambda x: b"\0" * len(x)])
def test_a_file_that_a_power_cut_emptied_is_made_again(folder, tmp_path, monkeypatch, change):
    monkeypatch.setattr(importing, "SHARD", 8)
    out, done = tmp_path / "out", []
    made(folder, out)
    expected = contents(out)
    damaged = out / sorted(expected)[-1]
    damaged.write_bytes(change(expected[damaged.name]))
    with pytest.raises(DataError, match=rf"{damaged.name} is not the file that manifest\.json"):
        importing.read_manifest(out)
    made(folder, out, on_shard=lambda *x: done.append(x))
    assert contents(out) == expected and len(done) == 1  # that file alone
    assert importing.read_manifest(out)["left_out"].keys() == {
        "disc/no_image.png",
        "square/cut.jpg",
    }


def test_an_image_more_moves_no_other_to_another_split(folder, tmp_path):
    sides = lambda: {  # noqa: E731
        x.file: importing.split_of(x, 0.25) for x in listing.in_class_folders(folder).examples
    }
    before = sides()
    picture(50).save(folder / "disc" / "more.png")
    after = sides()
    assert {file: after[file] for file in before} == before and len(after) == len(before) + 1
    assert 0 < sum(side == "test" for side in before.values()) < 20


def table(tmp_path, rows, name="table.csv"):
    path = tmp_path / name
    path.write_text("\n".join(["image,diagnosis,patient,part", *rows]) + "\n")
    return path


COLUMNS = {"file": "image", "label": "diagnosis", "user": "patient"}


def test_a_table_names_files_labels_and_users_who_are_on_one_side(folder, tmp_path):
    files = sorted(
        str(x.relative_to(folder)) for x in folder.rglob("*.*") if x.stat().st_size > 160
    )
    rows = [f"{file},{file.split('/')[0]},person {i // 3}," for i, file in enumerate(files)]
    examples = listing.in_table(folder, table(tmp_path, rows), COLUMNS).examples
    manifest = importing.run(folder, examples, tmp_path / "out", OPTIONS)
    assert manifest["ids"] == "user"
    ids = parquet.read_ids(tmp_path / "out", "user")
    assert len(ids) == manifest["num_examples"]["train"] and len(set(ids.tolist())) > 5
    assert len(ids) % 3 in (0, len(files) % 3)  # whole users
    both = [
        listing.Example(files[i], "disc", "one", side) for i, side in enumerate(("train", "test"))
    ]
    with pytest.raises(DataError, match="user 'one' has images in both splits"):
        importing.check(both, OPTIONS)


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        (["disc/0.png,disc,p,", "disc/0.png,square,p,"], COLUMNS, "occurs again as row 2"),
        (["disc/77.png,disc,p,"], COLUMNS, "row 2: no file disc/77.png"),
        (["../table.csv,disc,p,"], COLUMNS, "row 2: no file"),
        (["disc/0.png,,p,"], COLUMNS, "row 2 lacks a value"),
        (["disc/0.png,disc,p,"], COLUMNS | {"user": "person"}, "no column person"),
        ([], COLUMNS, "has no rows"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_is_one_line(folder, tmp_path, rows, columns, message):
    refused(message, listing.in_table, folder, table(tmp_path, rows), columns, kind=DataError)


def test_folders_and_labels_that_cannot_be_are_one_line_and_nothing_is_written(folder, tmp_path):
    for name, message in (("none", "class none has no image"), ("one", "class one has one image")):
        (folder / name).mkdir()
        if name == "one":
            picture(0).save(folder / name / "0.png")
        with pytest.raises(DataError, match=message):
            listing.in_class_folders(folder)
        for file in (folder / name).iterdir():
            file.unlink()
        (folder / name).rmdir()
    refused("no such folder", listing.in_class_folders, folder / "x", kind=DataError)
    with pytest.raises(DataError, match=r"label 'square' is not one of the classes"):
        made(folder, tmp_path / "out", OPTIONS._replace(classes=("disc", "cross")))
    assert not (tmp_path / "out").exists()
    out = tmp_path / "all"
    with pytest.raises(DataError, match="for the test split"):
        made(folder, out, OPTIONS._replace(test_share=0.0))
    assert not (out / importing.MANIFEST).exists()


def test_a_bomb_is_left_out_before_it_is_decoded(folder, tmp_path):
    Image.new("1", (12_000, 12_000)).save(folder / "disc" / "bomb.png")
    manifest = made(folder, tmp_path / "out")
    assert "disc/bomb.png" in manifest["left_out"]


def test_the_commands_import_and_show_what_is_trained_on(folder, tmp_path):
    out, sheet = tmp_path / "out", tmp_path / "sheet.png"
    done = run_command(
        "bam", "data", "import", str(folder), f"--out={out}", "--size=8x12", "--workers=1"
    )
    assert done.returncode == 0, done.stderr
    assert "left out: disc/no_image.png" in done.stdout and "2 left out; 2 classes" in done.stdout
    assert (
        "No users are named" in done.stdout
        and "2 classes have fewer than 10 test images" in done.stdout
    )
    shown = run_command("bam", "data", "show", str(out), f"--out={sheet}")
    assert shown.returncode == 0, shown.stderr
    assert "NOT PRIVATE" in shown.stdout and sheet.stat().st_size > 5_000
    config = digits.get_config("dp_sgd")
    config.dataset.update({"name": "folder", "path": str(out)})
    config.update({"num_steps": 2, "accountant": "rdp", "expected_batch_size": 8})
    config.model.name = "linear"
    assert loop.train(loop.build(config), 0).summary["image_shape"] == [8, 12, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("data", "export", "x"),
            "usage: bam data import FOLDER --out=DATA, or bam data show DATA",
        ),
        (("data", "import", ".", "--out=o", "--labels=t.csv"), "--labels needs --classes"),
        (("data", "import", "x"), "--out is required"),
        (("data", "import", "x", "--out=o", "--size=8y9"), "--size=32 or --size=16x24"),
        (("data", "import", "x", "--out=o", "--size=8x9x9"), "a height and a width"),
        (("data", "import", "x", "--out=o", "--window=9,9"), "two finite numbers are needed"),
        (
            ("data", "import", ".", "--out=o", "--user_column=p"),
            "--user_column names a column of a table: add",
        ),
        (("train", "importt", "--config=digits:dp_sgd", "--workdir=w"), "'importt' is not a flag"),
    ],
)
def test_a_mistaken_command_is_one_line(arguments, message):
    done = run_command("bam", *arguments)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_an_import_of_an_older_bam_is_made_again(folder, tmp_path):
    manifest = made(folder, tmp_path / "out")
    begun = tmp_path / "out" / "import.json"
    noted = json.loads(begun.read_text())
    for facts in noted["files"].values():
        del facts["lost"], facts["numbers"]
    begun.write_text(json.dumps(noted))
    assert made(folder, tmp_path / "out") == manifest
