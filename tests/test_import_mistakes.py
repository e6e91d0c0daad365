"""A line of `bam data import` on a mistake names it, and says what to do next."""

import errno
import re
import shlex

import numpy as np
import pytest
from PIL import Image

from bam import files
from bam.cli import data
from bam.data.common import DataError
from bam.images import listing
from tests.cases import refused, run_command


def save(path, grey=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8), grey, np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path):
    """Four images of two parts, as of HAM10000."""
    for number in range(4):
        save(tmp_path / "images" / f"part_{number // 2 + 1}" / f"ISIC_{number}.png", 20 * number)
    return tmp_path / "images"


def table(folder, *lines):
    path = folder.parent / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def in_table(folder, lines, labels="label", **options):
    columns = {"file": "file", "label": labels}
    return listing.in_table(folder, table(folder, *lines), columns, **options)


def test_a_name_without_folders_is_found_in_any_folder_below(folder):
    rows = ["file,label", *(f"ISIC_{x},{'ab'[x % 2]}" for x in range(4))]
    found = [x.file for x in in_table(folder, rows).examples]
    assert found == [f"part_{x // 2 + 1}/ISIC_{x}.png" for x in range(4)]
    # The controls: a name with a folder is that file alone, and of two files none is taken.
    refused("row 2: no file part_1/ISIC_3", in_table, folder, ["file,label", "part_1/ISIC_3,a"])
    save(folder / "part_2" / "ISIC_0.png", 200)
    message = "no file ISIC_0 in .*several could be meant: part_1/ISIC_0.png, part_2/ISIC_0.png"
    refused(message, in_table, folder, rows, kind=DataError)


def test_a_blank_among_several_labels_is_named_and_can_be_made_a_zero(folder, tmp_path):
    rows = ["file,No Finding,Cardiomegaly,Edema", "ISIC_0,1.0,,"]
    rows += ["ISIC_1,0.0,1.0,-1.0", "ISIC_2,,1.0,0.0", "ISIC_3,1.0,,"]
    labels = "No Finding,Cardiomegaly,Edema"
    message = "row 2 lacks a value of Cardiomegaly, Edema; --map=:0 makes zeros of blanks$"
    refused(message, in_table, folder, rows, labels, kind=DataError)
    command = ("bam", "data", "import", str(folder), f"--out={tmp_path / 'data'}", "--size=8")
    command += (f"--labels={tmp_path / 'table.csv'}", f"--label_column={labels}")
    refusal = run_command(*command, "--map=:0")
    message = "label '0,1,-1.0' is not a 0 or 1 for each of"
    assert refusal.returncode == 2 and message in refusal.stderr
    assert "; --map=yes:1,no:0 converts other words, and --map=-1:0 numbers" in refusal.stderr
    for advice in ("--map=:0,-1:0", "--map=:0,-1.0:0", "--map=:0,-1.00:0,-1:0"):
        done = run_command(*command[:4], f"--out={tmp_path / advice[6:]}", *command[5:], advice)
        assert done.returncode == 0 and "4 images: " in done.stdout, done.stderr
        assert "no image has the label" not in done.stdout


def test_a_label_is_replaced_by_its_value_and_first_by_its_text():
    examples = [listing.Example("", x) for x in ("1", "1.0", "01", "10", "1.05", "x")]

    def replace(*pairs):
        return " ".join(x.label for x in data._replace_labels(examples, pairs, "", lines.append))

    lines = []
    assert replace("1:a") == "a 1.0 01 10 1.05 x"  # two classes stay two
    assert replace("10.0:a") == "1 1.0 01 a 1.05 x"
    assert replace("1.0:a", "1:b") == "b a 01 10 1.05 x"
    assert not lines
    assert replace("2:a") == "1 1.0 01 10 1.05 x" and "no image has the label 2 " in lines[0]
    refused("--map names the label 10 twice", replace, "10.0:a", "10.00:b")


def test_classes_with_one_image_are_all_named(tmp_path):
    for name, num in (("ape", 2), ("bee", 1), ("cat", 1), ("dog", 2)):
        for number in range(num):
            save(tmp_path / name / f"{number}.png", number)
    message = "class bee has one image, as has cat; a class needs two images, so move the folders"
    refused(message, listing.in_class_folders, tmp_path, kind=DataError)


def test_many_files_that_cannot_be_read_for_one_reason_are_one_line(tmp_path):
    for name in ("a", "b"):
        for number in range(8):
            save(tmp_path / "in" / name / f"{number}.png", 9 * number)
    for number in range(40):
        (tmp_path / "in" / "a" / f"broken_{number:02d}.png").write_bytes(b"no image")
    np.save(tmp_path / "in" / "b" / "axis.npy", np.zeros(5))
    out = tmp_path / "out"
    done = run_command("bam", "data", "import", str(tmp_path / "in"), f"--out={out}", "--size=8")
    assert done.returncode == 0, done.stderr
    lines = [x for x in done.stdout.splitlines() if x.startswith("left out: ")]
    assert len(lines) == 2 and "axis.npy" in lines[1]
    assert lines[0].startswith("left out: 40 files, as a/broken_00.png (")
    assert lines[0].endswith("manifest.json lists all")
    share = "NOT PRIVATE: 72% of the images cannot be read: see why before you train\n"  # 41 of 57
    assert share in done.stdout
    assert all(f"broken_{x:02d}.png" in (out / "manifest.json").read_text() for x in range(40))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("data.npz", "save each image as a file of its own, PNG or .npy, in FOLDER/CLASS"),
        ("data.npy", "save each image as a file of its own"),
        ("train.parquet", "--config.dataset.source=parquet --config.dataset.path=FOLDER to bam t"),
        ("labels.csv", "give the folder of the images it names, and --labels=.*labels.csv"),
        ("0.png", "give the folder of the classes, FOLDER/CLASS/IMAGE"),
        ("data.rar", "unpack it"),
    ],
)
def test_a_file_in_place_of_a_folder_is_told_what_to_give(name, advice, tmp_path):
    (tmp_path / name).write_bytes(b"")
    message = f"{name}: a file, not a folder: .*{advice}"
    refused(message, listing.in_class_folders, tmp_path / name, kind=DataError)


def test_a_folder_of_parquet_files_is_told_to_be_trained_on(tmp_path):
    for name in ("train.parquet", "test.parquet"):
        (tmp_path / name).write_bytes(b"")
    message = "import nothing, and add to bam train --config.dataset.source=parquet --config.datas"
    refused(message, listing.in_class_folders, tmp_path, kind=DataError)


def test_a_file_that_a_row_names_is_not_said_to_be_ignored(folder):
    (folder / "part_1" / "ISIC_0.png").rename(folder / "part_1" / "IM0")
    (folder / "part_1" / "note").write_text("")
    said = []
    rows = ["file,label", "part_1/IM0,a", "ISIC_1,b", "ISIC_2,a", "ISIC_3,b"]
    assert len(in_table(folder, rows, log=said.append).examples) == 4
    assert [x for x in said if x.startswith("ignored: 1 no suffix")] and "2 no" not in str(said)


@pytest.mark.parametrize("word", ["-1", "NA", "N/A", "-1.0", "?"])
def test_an_id_that_means_missing_is_named_with_the_number_of_its_rows(folder, word):
    ids = ["p1", word, "", word]
    path = table(folder, "file,label,pid", *(f"ISIC_{x},a,{y}" for x, y in enumerate(ids)))
    columns = {"file": "file", "label": "label", "user": "pid"}
    why = f"row 3 has no user: pid '{re.escape(word)}' means missing .docs/users.md., in 2 rows: "
    refused(why + "leave them out or name", listing.in_table, folder, path, columns, kind=DataError)
    table(folder, "file,label,pid", "ISIC_0,a,")  # the control: nothing is written there
    refused("row 2 lacks a value of pid$", listing.in_table, folder, path, columns, kind=DataError)


def test_a_folder_that_the_table_names_is_found_above(folder):
    path = table(folder, "file,label", "images/part_1/ISIC_0.png,a")
    columns = {"file": "file", "label": "label"}
    message = f"row 2: no file images/part_1/.*; it lies in {folder.parent}: import that folder$"
    table_inside = path.rename(folder / "table.csv")
    refused(message, listing.in_table, folder, table_inside, columns, kind=DataError)


@pytest.mark.parametrize("name", ["image_id", "Image Index", "Path", "filename"])
def test_a_column_that_may_name_the_files_is_offered(folder, name):
    message = f"no column file among lesion, {name}, label: give --file_column={shlex.quote(name)}$"
    refused(message, in_table, folder, [f"lesion,{name},label", "1,ISIC_0,a"], kind=DataError)
    refused("no column file among x, label$", in_table, folder, ["x,label", "1,a"], kind=DataError)


def test_a_label_whose_name_begins_like_path_is_not_offered_as_the_files_name(folder):
    rows = ["pathology,picture,label", "x,ISIC_0,a"]
    refused("give --file_column=picture$", in_table, folder, rows, kind=DataError)


def test_a_full_disk_is_said_with_the_name_of_the_file(tmp_path):
    path = tmp_path / "x.json"

    def fill(number):
        with files.write_atomically(path):
            raise OSError(number, "text")

    with pytest.raises(OSError, match=re.escape(f"No space left on device: '{path}'")):
        fill(errno.ENOSPC)
    with pytest.raises(OSError, match=r"\] text$"):  # the control
        fill(errno.EIO)
    assert not list(tmp_path.iterdir())
