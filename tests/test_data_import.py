"""What `bam data import` says: a sum of all images that there are, and a command that trains."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict
from PIL import Image

from bam.data import datasets
from bam.data.common import DataError, manifest
from bam.data.preprocessing import Preprocessing
from bam.images import importing, listing, persons, pixels
from bam.release import load, predict
from bam.training import config as base
from bam.training import loading
from configs import digits, folder
from tests.cases import random_images, refused, run_command, thoroughly
from tests.image_files import dicom

# Of an image beside two good ones of each class: its folder, name, suffix and what it is.
ENTRIES = st.tuples(
    st.sampled_from(("A", "B", "", "A/deeper", "B/.hidden", "C/x")),
    st.sampled_from(("1", "2", "1_mask", "2-gt", "Ünï", ".3", "é%", "a b")),
    st.sampled_from((".png", ".gif", ".PNG", ".txt", "")),
    st.sampled_from(("good", "good", "damaged", "empty", "link", "nowhere", "itself", "folder")),
)
SPLITS = ("", "train/", "test/", "val/")


def write(path, kind, number=0, shape=(9, 9)):
    """Writes one entry of a tree, and returns False if there is one of that name."""
    if os.path.lexists(path):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    grey = np.random.default_rng(number).integers(0, 255, shape, np.uint8)
    match kind:
        case "good" | "damaged":
            Image.fromarray(grey).save(path, "PNG")
            if kind == "damaged":
                path.write_bytes(path.read_bytes()[:50])
        case "empty":
            path.touch()
        case "folder":
            path.mkdir()
        case "link":
            others = sorted(x for x in path.parent.iterdir() if x.is_file())
            path.symlink_to(others[0].name if others else "none")
        case _:
            path.symlink_to("none" if kind == "nowhere" else path.name)
    return True


def images_in(top):
    """How many images a person counts: names with an image's suffix, none of them hidden."""
    count = 0
    for place, folders, names in os.walk(top):
        folders[:] = [x for x in folders if not x.startswith(".")]
        for name in names:
            # A link that leads nowhere counts, whatever its suffix.
            is_broken = not os.path.exists(os.path.join(place, name))
            is_image = listing.suffix_of(name) in listing.SUFFIXES or is_broken
            count += is_image and not name.startswith(".")
    return count


def last_sum(done):
    """The number of images, and the sum of its parts, in the last line but one of an import."""
    line = done.stdout.splitlines()[-2]
    whole, parts = re.fullmatch(r"([\d,]+) images: (.+); .*", line).groups()
    numbers = [int(x.split()[0].replace(",", "")) for x in parts.split(", ")]
    return int(whole.replace(",", "")), sum(numbers), line


def account_for(entries, split, validation, masks, in_table):
    """The import's sum for a tree beside a count of its own."""
    with tempfile.TemporaryDirectory() as place:
        top, out = Path(place) / "top", Path(place) / "out"
        roots = ("train/", "test/") if split else ("",)
        for number, root in enumerate(roots):
            for k, name in enumerate("ABAB"):
                write(top / f"{root}{name}" / f"good{k}.png", "good", 10 * number + k)
        (top / "A").mkdir(parents=True, exist_ok=True)
        for number, (folder, name, suffix, kind) in enumerate(entries):
            write(top / f"{split}{folder}" / f"{name}{suffix}", kind, 100 + number)
        options = [f"--out={out}", "--size=8", "--test=0.5", *masks]
        if in_table:
            images = sorted(x for x in listing.tree(top).images if "\\" not in str(x))
            kept = [x for k, x in enumerate(images) if k % 3 or "good" in x.name]
            rows = [f'"{x.relative_to(top)}",{"AB"[k % 2]}' for k, x in enumerate(kept)]
            (top / "t.csv").write_text("\n".join(["file,label", *rows, rows[-1]]))
            options += [f"--labels={top / 't.csv'}", "--classes=A,B"]
        done = run_command("bam", "data", "import", str(top), *options, *validation)
        if done.returncode:
            assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
            assert not out.exists()
            return False
        whole, parts, line = last_sum(done)
        assert whole == parts == images_in(top), (line, sorted(top.rglob("*")))
        counts = manifest(out)["num_examples"]
        assert f"{counts['train']} to train, {counts['test']} to test" in line
        return True


SHOWN = [("A", "1", ".png", "good"), ("A", "1_mask", ".png", "good"), ("", "2", ".gif", "damaged")]


@pytest.mark.parametrize("in_table", (False, True))
@pytest.mark.parametrize("entry", [*SHOWN, ("B", "2", ".PNG", "link"), ("A", "1", "", "nowhere")])
def test_an_import_accounts_for_each_image(entry, in_table):
    assert account_for([SHOWN[0], entry], "", [], ["--masks"] if in_table else [], in_table)


@pytest.mark.thorough
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(ENTRIES, max_size=12),
    st.sampled_from(SPLITS),
    st.sampled_from(([], ["--validation=leave"], ["--validation=train"])),
    st.sampled_from(([], ["--masks"])),
    st.booleans(),
)
def test_an_import_accounts_for_each_image_of_a_random_tree(
    entries, split, validation, masks, in_table
):
    account_for(entries, split, validation, masks, in_table)


KINDS = {
    "a name that a shell would cut": ("my images & more", {}),
    "users in folders": ("A/u1 A/u2 B/u3 B/u4", {"user_from": "folder"}),
    "classes in a table": ("", {"labels": "t.csv", "classes": "A,B"}),
    "users in a table": ("", {"labels": "t.csv", "classes": "A,B", "user_column": "who"}),
    "several labels": ("", {"labels": "t.csv", "label_column": "cough,fever"}),
    "several labels of users": (
        "",
        {"labels": "t.csv", "label_column": "cough,fever", "user_column": "who"},
    ),
    "a number": ("", {"labels": "t.csv", "label_column": "age", "number": "true"}),
    "two numbers' users": (
        "",
        {"labels": "t.csv", "label_column": "age", "number": "true", "user_column": "who"},
    ),
    "colour": ("", {"channels": "3"}),
    "not square": ("", {"size": "8x12"}),
    "a window": ("", {"window": "0,100"}),
    "scans": (".dcm", {"user_column": "PatientID"}),
}
FAST = ("a name that a shell would cut", "several labels of users")


@pytest.mark.parametrize("kind", thoroughly(KINDS, *FAST))
def test_the_printed_command_trains(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layout, options = KINDS[kind]
    users = layout.split() if "/" in layout else ["A", "B"]
    top = tmp_path / (layout if " & " in layout else "images")
    rows = ["file,label,cough,fever,age,who"]
    for number in range(60):
        label = users[number % len(users)]
        name = f"{label}/{number}"
        if layout == ".dcm":
            path = top / f"{name}.dcm"
            path.parent.mkdir(parents=True, exist_ok=True)
            numbers = np.random.default_rng(number).integers(0, 255, (8, 8), np.uint8)
            path.write_bytes(dicom(numbers, PatientID=f"p{number // 2}"))
        else:
            write(top / f"{name}.png", "good", number)
        rows.append(
            f"{name}.png,{label},{number % 2},{number // 2 % 2},{number / 60},u{number // 2}"
        )
    (tmp_path / "t.csv").write_text("\n".join(rows))
    given = {"size": "8", "channels": "1", "out": "da ta", **options}
    flags = [f"--{key}={value}" for key, value in given.items()]
    done = run_command("bam", "data", "import", str(top), *flags, "--test=0.4")
    assert done.returncode == 0, done.stderr
    printed = shlex.split(done.stdout.splitlines()[-1].removeprefix("train on them: "))
    assert "--config.dataset.path=da ta" in printed
    has_users = "user" in "".join(options)
    assert ("--config.dataset.group_size=4" in printed) == has_users
    done = run_command(*printed, "--config.num_steps=2", "--config.num_epochs=0")
    assert done.returncode == 0, done.stderr
    facts = manifest(tmp_path / "da ta")
    num_units = facts["num_users"] or facts["num_examples"]["train"]
    assert f"one of {num_units} {'users' if has_users else 'examples'}" in done.stdout
    done = run_command("bam", "export", "--workdir=run", "--out=release")
    assert done.returncode == 0, done.stderr
    image = next(x for x in sorted(top.rglob("*")) if x.is_file())
    done = run_command("bam", "predict", "--release=release", str(image))
    assert done.returncode == 0 and done.stdout.count("\n") == 2, done.stderr


def test_data_that_were_made_anew_are_read_anew(tmp_path):
    """In one process, at one path, with the same config: rows of the files that are there."""
    config = folder.get_config("dp_sgd")
    config.dataset.path = str(tmp_path / "out")
    sizes = []
    for number in (40, 60):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        for k in range(number):
            write(tmp_path / "top" / "AB"[k % 2] / f"{k}.png", "good", k)
        done = run_command(
            "bam", "data", "import", str(tmp_path / "top"), f"--out={tmp_path / 'out'}", "--size=8"
        )
        assert done.returncode == 0, done.stderr
        read = loading.make_dataset(config.dataset)
        assert loading.make_dataset(config.dataset) is read  # kept where nothing has changed
        sizes.append(len(read.train.labels) + len(read.test.labels))
        assert config.expected_batch_size == len(read.train.labels) // 2
    assert sizes == [40, 60]


LOSSES = {  # numbers of six of twelve pictures -> what is said of them, with --window=0,4095
    "of one colour": (np.float32, (0, 0.9), "lie between 0 and 1, ", "--window=0,4095"),
    "white": (np.uint16, (50_000, 60_000), "lie between 49152 and 65535, ", "--window=0,4095"),
    "nothing": (np.uint16, (0, 4095), "", ""),
    "not a number": (np.float32, (np.nan, np.nan), "6 of the pictures are of one colour", ""),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_pictures_that_a_window_empties_are_counted(kind, tmp_path):
    dtype, (low, high), *expected = LOSSES[kind]
    rng = np.random.default_rng(0)
    for number in range(12):
        (tmp_path / "top" / "AB"[number % 2]).mkdir(parents=True, exist_ok=True)
        ends = (low, high) if number < 6 else (0, 4095)
        numbers = (ends[0] + (ends[1] - ends[0]) * rng.uniform(size=(9, 9))).astype(
            dtype if number < 6 else np.uint16
        )
        np.save(tmp_path / "top" / "AB"[number % 2] / f"{number}.npy", numbers)
    flags = [f"--out={tmp_path / 'out'}", "--size=8", "--window=0,4095", "--test=0.4"]
    done = run_command("bam", "data", "import", str(tmp_path / "top"), *flags)
    assert done.returncode == 0, done.stderr
    assert all(x in done.stdout for x in expected), done.stdout
    is_lost = "NOT PRIVATE: 6 of the pictures are of one colour" in done.stdout
    assert is_lost == (kind != "nothing")
    assert ("lie between" in done.stdout) == (kind in ("of one colour", "white"))


def test_pictures_of_few_pixels_or_colours_are_counted(tmp_path):
    grey = np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8)
    for number, image in enumerate(
        [grey[:1, :1], grey[:3, :3], grey[:2], 255 * (grey[:8, :8] > 99), grey]
    ):
        for name in "AB":
            (tmp_path / "top" / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.astype(np.uint8)).save(tmp_path / "top" / name / f"{number}.png")
    flags = [f"--out={tmp_path / 'out'}", "--test=0.5"]
    done = run_command("bam", "data", "import", str(tmp_path / "top"), *flags, "--size=16")
    assert done.returncode == 0, done.stderr
    assert "2 of the pictures are of one colour" in done.stdout
    assert "4 of the pictures are enlarged more than four times" in done.stdout
    flags = [f"--out={tmp_path / 'small'}", "--test=0.5"]
    done = run_command("bam", "data", "import", str(tmp_path / "top"), *flags, "--size=8")
    assert "2 of the pictures are of two or three colours" in done.stdout
    assert "enlarged" not in done.stdout


UNITS = st.lists(  # of each unit: the labels of its images
    st.lists(st.sampled_from("ABC"), min_size=1, max_size=3), min_size=3, max_size=14
)


def divided(units, least_hashes):
    """The units in training, of those that are there: number -> labels of its images."""
    examples = [
        listing.Example(f"{k}/{i}.png", label, f"u{k}")
        for k, labels in units.items()
        for i, label in enumerate(labels)
    ]
    return {x.user for x in least_hashes(examples) if x.split == "train"}


def share_of_each(examples):
    """What one would do first: of each class the fifth that has the least hashes."""
    num = Counter(x.label for x in examples)
    parts = [[x for x in examples if x.label == label] for label in num]
    return [
        x for part in parts for y in (importing.stratify(part, round(len(part) / 3)),) for x in y
    ]


@settings(max_examples=200, deadline=None)
@given(UNITS, st.integers(1, 3))
def test_adding_one_to_a_stratified_import_changes_one_in_training(units, num_test):
    """So that ε is for one image, or for one user, with any classes and whoever else is there."""
    everyone = dict(enumerate(units))
    split = lambda examples: importing.stratify(examples, num_test)  # noqa: E731
    try:
        trained = divided(everyone, split)
    except DataError as error:
        assert "leaves none to train on" in str(error)
        return
    for one in everyone:
        rest = {k: labels for k, labels in everyone.items() if k != one}
        with contextlib.suppress(DataError):
            assert len(trained ^ divided(rest, split)) <= 1


def test_a_share_of_each_class_would_change_two():
    changes = set()
    for seed in range(30):
        images = {k: "A" for k in range(seed, seed + 8)}
        trained = divided(images, share_of_each)
        for one in images:
            rest = {k: x for k, x in images.items() if k != one}
            changes.add(len(trained ^ divided(rest, share_of_each)))
    assert max(changes) == 2


def test_a_stratified_import_has_so_many_test_images_of_each_class(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(60):
        write(
            tmp_path / "top" / ("ill" if number < 5 else "well") / f"{number}.png", "good", number
        )
    plain = run_command("bam", "data", "import", "top", "--out=a", "--size=8", "--test=0.02")
    assert "--stratify=1 takes 1 of each class" in plain.stdout
    done = run_command("bam", "data", "import", "top", "--out=b", "--size=8", "--stratify=3")
    assert done.returncode == 0, done.stderr
    shown = run_command("bam", "data", "show", "b").stdout
    assert re.search(r"ill +2 +3", shown) and re.search(r"well +52 +3", shown)
    wrong = run_command("bam", "data", "import", "top", "--out=c", "--size=8", "--stratify=5")
    assert wrong.returncode == 2
    assert "class ill has 5 images: --stratify=5 leaves none to train on" in wrong.stderr
    tree_of_splits = tmp_path / "split"
    for k, place in enumerate(("train/A", "train/A", "train/B", "train/B", "test/A", "test/A")):
        write(tree_of_splits / place / f"{k}.png", "good", k)
    wrong = run_command("bam", "data", "import", "split", "--out=c", "--stratify=1")
    assert wrong.returncode == 2 and "the images have a test split" in wrong.stderr
    for more in ("--test_folder=top", "--label_column=a,b", "--number"):
        wrong = run_command("bam", "data", "import", "top", "--out=c", "--stratify=1", more)
        assert wrong.returncode == 2 and "--stratify" in wrong.stderr
    assert not (tmp_path / "c").exists()


def test_labels_are_mapped_to_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = ["file,a,b"]
    for number in range(24):
        write(tmp_path / "top" / f"{number}.png", "good", number)
        rows.append(f"{number}.png,{('ja', 'nein')[number % 2]},{number // 2 % 2}")
    (tmp_path / "top" / "t.csv").write_text("\n".join(rows))
    base = ("bam", "data", "import", "top", "--out=out", "--size=8", "--labels=t.csv")
    plain = run_command(*base, "--label_column=a,b")
    assert plain.returncode == 2 and "; --map=yes:1,no:0 converts other words" in plain.stderr
    done = run_command(*base, "--label_column=a,b", "--map=ja:1,nein:0,vielleicht:0")
    assert done.returncode == 0, done.stderr
    assert "--map=vielleicht:0: no image has the label vielleicht (NOT PRIVATE)" in done.stdout
    assert done.stdout.splitlines()[-2].endswith("; 2 labels each")
    more = ("--label_column=a", "--classes=ill,well", "--map=ja:ill,nein:well")
    done = run_command(*base[:4], "--out=more", *base[5:], *more)
    assert done.returncode == 0 and "; 2 classes" in done.stdout, done.stderr
    for wrong in ("--map=ja", "--map=ja:", "--map=:", "--map=ja:1,ja:0"):
        done = run_command(*base, "--label_column=a,b", wrong)
        assert done.returncode == 2 and "expected FROM:TO, each FROM once" in done.stderr


def test_a_target_is_learned_in_its_scale_and_predicted_in_its_units(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = ["file;kg"]
    for number in range(80):
        write(tmp_path / "top" / f"{number}.png", "good", number)
        rows.append(f"{number}.png;" + f"{70 + number % 2 / 2:.1f}".replace(".", ","))
    (tmp_path / "t.csv").write_text("\n".join(rows))
    base = ("bam", "data", "import", "top", "--size=8", "--labels=t.csv", "--label_column=kg")
    plain = run_command(*base, "--out=plain", "--number")
    assert "give other --target_offset and --target_scale" in plain.stdout
    scaled = ("--target_offset=70", "--target_scale=0.5")
    done = run_command(*base, "--out=out", "--number", *scaled)
    assert done.returncode == 0 and "labels lie" not in done.stdout, done.stderr
    table = pq.read_table(next((tmp_path / "out").glob("train*")))
    assert set(table["label"].to_pylist()) == {0.0, 1.0}
    command = shlex.split(done.stdout.splitlines()[-1].removeprefix("train on them: "))
    done = run_command(*command, "--config.num_steps=1", "--config.num_epochs=0")
    assert done.returncode == 0, done.stderr
    assert run_command("bam", "export", "--workdir=run", "--out=release").returncode == 0
    facts = json.loads((tmp_path / "release" / "model.json").read_text())
    assert facts["preprocessing"]["target"] == [70.0, 0.5]
    images = [f"top/{number}.png" for number in range(80)]
    done = run_command("bam", "predict", "--release=release", *images)
    values = [float(line.rpartition(",")[2]) for line in done.stdout.splitlines()[1:]]
    assert all(65 < x < 75 for x in values)
    # The run's figure is in the same units: that of its test images beside what is predicted.
    test = pq.read_table(next((tmp_path / "out").glob("test*")))
    released = load.load("release", "")
    read = np.stack(
        [np.asarray(Image.open(io.BytesIO(x["bytes"]))) for x in test["image"].to_pylist()]
    )
    outputs = (
        70
        + 0.5
        * np.asarray(
            released.logits(
                released.params, read[..., None].repeat(3, -1) if read.ndim == 3 else read
            )
        )[:, 0]
    )
    error = np.abs(outputs - (70 + 0.5 * np.array(test["label"].to_pylist()))).mean()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["test_mean_absolute_error"] == pytest.approx(error, rel=1e-4)
    assert summary["figures"]["mean_absolute_error"][0] == pytest.approx(error, rel=1e-4)
    for wrong in (
        (*scaled, "--classes=70,80"),
        (*scaled[:1], "--target_scale=0", "--number"),
        ("--target_scale=nan", "--number"),
        ("--target_scale=1e-300", "--number"),  # of which float32 makes infinities
    ):
        done = run_command(*base, "--out=no", *wrong)
        assert done.returncode == 2 and "target" in done.stderr, done.stderr
    assert not (tmp_path / "no").exists()


def test_folders_that_may_be_persons_are_no_classes_unless_they_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(40):
        write(tmp_path / "top" / f"{1 + number % 12}" / f"{number}.png", "good", number)
    done = run_command("bam", "data", "import", "top", "--out=out", "--size=8")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert "top: 12 folders with 40 images: are they persons? Names of classes are" in done.stderr
    names = f"--classes={','.join(map(str, range(1, 13)))}"
    done = run_command("bam", "data", "import", "top", "--out=out", "--size=8", names)
    assert done.returncode == 0, done.stderr
    for number in range(40, 60):
        write(tmp_path / "top" / f"{1 + number % 12}" / f"{number}.png", "good", number)
    done = run_command("bam", "data", "import", "top", "--out=more", "--size=8")
    assert done.returncode == 0, done.stderr
    assert manifest(tmp_path / "more")["classes"] == [str(x) for x in range(1, 13)]


NAMES = {  # names of folders -> whether they are refused as persons
    "Mueller_Hans_1950 Weber_Eva_1961 Wolf_Uwe_1944": True,
    "mueller-hans-19500131 weber-eva-01.02.1961 wolf-uwe-1944-12-24": True,
    "P000 P001 P002": True,
    "p1 p2 p3": True,
    "patient_001 patient_002 patient_003": True,
    "Patient1 Patient2 Patient3": True,
    "sub-1 sub-2 sub-CTR03": True,
    "Proband_1 Proband_2 Fall_3": True,
    "case_7 case_8 case_9": True,
    "10234 10235 10236": True,
    "001 002 003": True,
    "Mueller^Hans Weber^Eva Wolf^Uwe": True,
    "LIDC-0001 LIDC-0002 LIDC-0003": True,
    "P000 P001 P002 ill": True,
    "LIDC-IDRI-0001 TCGA-02-0001 C3L-00001": True,
    "001_S_3001 OAS1_0001_MR1 BraTS20_Training_001": True,
    "siteA_patient_001 patient1a Patientin_1": True,
    "1950-03-01 Mueller_1950-03-01 1944-12-24_Wolf_Uwe": True,
    "a@b.org c@b.org 1.2.840.113619.2.55": True,
    # The controls.
    "P000 P001": False,
    "P000 P001 P002 ill well other": False,
    "class_0 class_1 class_2": False,
    "class_100 class_101 class_102": False,
    "grade_1 grade_2 grade_3": False,
    "stage2 stage3 stage4": False,
    "0 1 2 3 4 5 6 7 8 9": False,
    "10 20 99": False,
    "n01440764 n01443537 n01484850": False,
    "2019 2020 2021": False,
    "BIRADS_3 BIRADS_4 BIRADS_5": False,
    "covid19 flu cold": False,
    "type-2_diabetes grade_3_tumour t_shirt": False,
    "basal_cell_carcinoma melanoma nevus": False,
    "001.Black_footed_Albatross 002.Laysan_Albatross 003.Sooty_Albatross": False,
}


@pytest.mark.parametrize("names", NAMES)
def test_folders_that_are_named_like_persons_are_refused(names):
    check = lambda: persons.check_names(Path("top"), names.split(), "")  # noqa: E731
    if NAMES[names]:
        refused("top: 3 of . folders are named like .*: are they persons?", check, kind=DataError)
    else:
        check()


def test_patients_names_do_not_become_public_and_the_classes_names_are_printed(tmp_path):
    for number in range(36):
        for top, name in (
            ("patients", f"Mueller_Hans_{1950 + number % 3}"),
            ("sides", f"{('train', 'test')[number % 2]}/{('Ann', 'Bob')[number % 2]}"),
            ("classes", "A\x1bBC"[number % 4]),
        ):
            write(tmp_path / top / name / f"{number}.png", "good", number)

    def run(top, *more):
        arguments = (str(tmp_path / top), f"--out={tmp_path / 'out'}", "--size=8", *more)
        return run_command("bam", "data", "import", *arguments)

    for top, why in (
        ("patients", "3 of 3 folders are named like persons, as Mueller_Hans_1950"),
        ("sides", "no class has images in both train and test"),
    ):
        done = run(top)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert f"{why}: are they persons?" in done.stderr, done.stderr
        assert "--user_from=folder" in done.stderr and "--classes=" in done.stderr
        assert not (tmp_path / "out").exists()
    done = run("classes")
    line = "the names of the classes become public with the model: \\x1b, A, B, C\n"
    assert done.returncode == 0 and line in done.stdout, done.stderr
    declared = run("sides", "--classes=Ann,Bob")  # the control
    assert "are they persons" not in declared.stderr and "become public" not in declared.stdout


def test_a_number_is_of_one_column(tmp_path, monkeypatch):
    """Two values, "1,5", would pass for a decimal comma."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("file;a;b\n1.png;1;5\n2.png;1;6\n")
    write(tmp_path / "top" / "1.png", "good")
    flags = ["--labels=t.csv", "--label_column=a,b", "--number"]
    done = run_command("bam", "data", "import", "top", "--out=out", *flags)
    assert done.returncode == 2 and "--number takes one label column" in done.stderr


def test_a_large_offset_hides_no_difference():
    """Of seconds since 1970 float32 knows two minutes."""
    facts = {"preprocessing": {"target": [1.7e9, 3600]}, "loss": "squared_error", "classes": [""]}
    dataset = random_images("folder", 2, 2, 0.5, 1)._replace(preprocessing=facts["preprocessing"])
    outputs = np.float32([[0.0], [0.001]])
    assert np.ptp(datasets.in_units(dataset, outputs)) == pytest.approx(3.6)
    table = predict.table(facts, list(outputs))
    assert table == [["value"], ["1700000000"], ["1700000003.6"]]


def test_numbers_are_shown_in_their_units(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = ["file,kg"]
    for number in range(41):
        split = "train" if number < 21 else "test"
        write(tmp_path / "top" / split / f"{number}.png", "good", number)
        rows.append(f"{split}/{number}.png,{60 + number % 21}")
    (tmp_path / "top" / "train" / "t.csv").write_text("\n".join(rows[:22]).replace("train/", ""))
    (tmp_path / "top" / "test" / "t.csv").write_text(
        "\n".join([rows[0], *rows[22:]]).replace("test/", "")
    )
    flags = ["--labels=t.csv", "--label_column=kg", "--number", "--target_offset=70"]
    done = run_command("bam", "data", "import", "top", "--out=out", "--size=8", *flags)
    assert done.returncode == 0 and "21 to train, 20 to test" in done.stdout, done.stderr
    shown = run_command("bam", "data", "show", "out").stdout
    assert "21 images to train, 20 to test, 8 × 8 × 3; numbers; 0 files left out" in shown
    assert re.search(r"train +60 +65 +70 +75 +80", shown)
    done = run_command("bam", "data", "show", "out", "--out=sheet.png")
    assert done.returncode == 0, done.stderr
    with Image.open("sheet.png") as sheet:
        assert sheet.size[1] < 600


def scans(top, layout, **tags):
    """Writes twelve small DICOM files into each folder.

    Each tag is given by name, as a function of folder and number.
    """
    for place in layout.split():
        (top / place).mkdir(parents=True)
        for number in range(12):
            numbers = np.random.default_rng(number).integers(0, 255, (8, 8), np.uint8)
            own = {name: of(place.split("/"), number) for name, of in tags.items()}
            (top / place / f"{number}.dcm").write_bytes(dicom(numbers, **own))


def series(place, number):
    return f"1.2.{sum(map(ord, ''.join(place)))}"


FOLDERS_OF_PERSONS = {
    # name: (folders, PatientID, SeriesInstanceUID, flags, what is refused, or "" and what is said)
    "patients, not named": ("Ann Bob Cy", lambda x, i: x[0], series, (),
        "class Ann have one PatientID: are they persons. .* and give --user_from=folder; if they"),
    "patients, named": ("Ann Bob Cy", lambda x, i: x[0], series, ("--user_column=PatientID",),
        r"class Ann are of one user: are they persons\? .*FOLDER/CLASS/PERSON/…; if they are"),
    "no PatientID": ("Ann Bob", lambda x, i: "", series, (), "have one SeriesInstanceUID"),
    "anonymised": ("Ann Bob", lambda x, i: "ANON", series, (), "have one SeriesInstanceUID"),
    "patients above their studies": ("Ann/s1 Ann/s2 Bob/s1 Bob/s2", lambda x, i: x[0], series,
        ("--user_from=folder",),
        "have one PatientID: .*: --user_from=folder takes the folders below the classes; if they"),
    "patients in two spellings": ("Ann Bob Cy", lambda x, i: "0" * (i % 2) + f"{ord(x[0][0])}",
        lambda x, i: f"{series(x, 0)}.{i}", (), "have one PatientID"),
    "one patient among classes": ("ill/Ann well/Bob well/Cy", lambda x, i: x[1], series,
        ("--user_from=folder",), "class ill are of one user"),
    # The controls.
    "patients declared as classes": ("Ann Bob Cy", lambda x, i: x[0], series,
        ("--classes=Ann,Bob,Cy",), ""),
    "classes of patients": ("ill well", lambda x, i: f"{x[0]}{i // 4}",
        lambda x, i: f"{series(x, 0)}.{i}", (), ""),
    "classes of folders of patients": ("ill/Ann ill/Bob well/Cy well/Di", lambda x, i: x[1],
        series, ("--user_from=folder",), ""),
    "slices of one phantom": ("ill well", lambda x, i: "one", lambda x, i: "1.2.3", (), ""),
    "nothing known": ("ill well", lambda x, i: "", lambda x, i: "", (), ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOLDERS_OF_PERSONS)
def test_folders_of_one_person_each_are_no_classes_whatever_their_number(kind, tmp_path):
    layout, patient, of_series, more, message = FOLDERS_OF_PERSONS[kind]
    scans(tmp_path / "top", layout, PatientID=patient, SeriesInstanceUID=of_series)
    flags = (f"--out={tmp_path / 'out'}", "--size=8", "--channels=1", "--test=0.4", *more)
    done = run_command("bam", "data", "import", str(tmp_path / "top"), *flags)
    if not message:
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stdout
    assert re.search(message, done.stderr), done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [(), ("--classes=Ann,Bob",)])
def test_a_picture_beside_scans_does_not_make_a_person_a_class(more, tmp_path):
    scans(tmp_path / "top", "Ann Bob", PatientID=lambda x, i: x[0], SeriesInstanceUID=series)
    for number, name in enumerate(("Ann", "Bob")):
        write(tmp_path / "top" / name / "preview.png", "good", number)
    flags = (f"--out={tmp_path / 'out'}", "--size=8", "--channels=1", "--test=0.4", *more)
    done = run_command("bam", "data", "import", str(tmp_path / "top"), *flags)
    if more:  # the control
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 2
    assert "all DICOM files of class Ann have one PatientID: are they persons" in done.stderr


@pytest.mark.parametrize("kind", ["--number", ""])
def test_folders_of_numbers_are_not_published_as_classes(kind, tmp_path):
    for age in range(40, 52):
        for number in range(2):
            write(tmp_path / "top" / f"{age}" / f"{number}.png", "good", 2 * age + number)
    flags = (f"--out={tmp_path / 'out'}", "--size=8", "--test=0.4", *filter(None, [kind]))
    done = run_command("bam", "data", "import", str(tmp_path / "top"), *flags)
    assert (done.returncode == 0) == bool(kind), done.stderr
    if kind:
        assert manifest(tmp_path / "out")["classes"] == []
    else:  # the control
        assert "12 folders with 24 images: are they persons?" in done.stderr


@pytest.mark.parametrize("issuers", ["A B", "A A", "A -", "- -"])
def test_one_patient_id_of_two_hospitals_is_refused(issuers, tmp_path):
    names = [x.replace("-", "") for x in issuers.split()]
    scans(
        tmp_path / "top", "ill well", PatientID=lambda x, i: f"{i // 2}",
        SeriesInstanceUID=lambda x, i: f"1.{i}", IssuerOfPatientID=lambda x, i: names[i % 2],
    )  # fmt: skip
    flags = (f"--out={tmp_path / 'out'}", "--size=8", "--channels=1", "--test=0.4")
    done = run_command(
        "bam", "data", "import", str(tmp_path / "top"), *flags, "--user_column=PatientID"
    )
    assert done.returncode == 2 * (issuers == "A B"), done.stderr
    if issuers == "A B":
        assert done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()
        why = "1.dcm: PatientID '0' has the issuer 'B' here and 'A' in another file, so it may name"
        assert why in done.stderr and "--labels=TABLE" in done.stderr


def test_folders_below_the_users_are_counted():
    files = lambda top, spec: [write(top / x, "good", k) for k, x in enumerate(spec)]  # noqa: E731
    with tempfile.TemporaryDirectory() as place:
        below = [f"{c}/site{i}/p{c}{k}/0.png" for c in "AB" for i in (0, 1) for k in range(3)]
        files(Path(place) / "sites", below)
        files(Path(place) / "persons", [f"{c}/p{k}/0.png" for c in "AB" for k in range(3)])
        lines = []
        for name in ("persons", "sites"):
            listing.in_class_folders(Path(place) / name, users="folder", log=lines.append)
    (line,) = [x for x in lines if "is taken as the user" in x]  # the control has none
    assert line.startswith("NOT PRIVATE: the folder directly below a class is taken as the user")
    assert "12 folders below users' folders, as A/site0/pA0." in line


def test_columns_that_nobody_needs_may_hold_what_python_cannot(tmp_path):
    for number in range(4):
        write(tmp_path / f"{number}.png", "good", number)
    times = pa.array([10**18 + 7 * i for i in range(4)], pa.timestamp("ns"))
    table = {"file_name": [f"{i}.png" for i in range(4)], "label": [*"ABAB"], "who": [*"xxyy"]}
    pq.write_table(
        pa.table({**table, "taken": times, "patient_since": times}), tmp_path / "t.parquet"
    )
    columns = {"file": "file", "label": "label", "user": "who"}
    lines = []
    read = listing.in_table(tmp_path, tmp_path / "t.parquet", columns, log=lines.append)
    assert [x.user for x in read.examples] == [*"xxyy"]
    # The controls: a column of ids that nobody named is told of, and a named one is refused.
    del columns["user"]
    table["patient_id"] = table.pop("who")
    pq.write_table(pa.table({**table, "taken": times}), tmp_path / "t.parquet")
    listing.in_table(tmp_path, tmp_path / "t.parquet", columns, log=lines.append)
    assert "column patient_id has 2 values in 4 rows" in lines[-1]
    with pytest.raises(DataError, match=r"t\.parquet: column taken: .*: save it as text"):
        listing.in_table(tmp_path, tmp_path / "t.parquet", columns | {"user": "taken"})


def test_headers_of_all_files_are_read_where_the_first_ones_agree_alone(tmp_path, monkeypatch):
    rare = lambda x, i: "p" if i % 12 != 5 else f"{x[0]} {i}"  # noqa: E731
    scans(tmp_path, "A B", PatientID=rare, SeriesInstanceUID=lambda x, i: f"1.{x == ['A']:d}.{i}")
    examples = listing.in_class_folders(tmp_path).examples
    read, tags = [], pixels.dicom_tags
    monkeypatch.setattr(persons, "SAMPLE", 3)
    monkeypatch.setattr(pixels, "dicom_tags", lambda *x: read.append(x) or tags(*x))
    persons.check_each(tmp_path, examples, "")
    assert len(read) <= 10  # not all 24: a patient and several series are no reason to read on
    persons.check_each(tmp_path, [x._replace(user="u") for x in examples], "file")
    assert len(read) <= 10


def test_a_pipe_among_scans_is_left_out_and_not_waited_for(tmp_path):
    scans(tmp_path / "top", "A B", PatientID=lambda x, i: f"{x[0]}{i}")
    os.mkfifo(tmp_path / "top" / "A" / "0_pipe.dcm")
    flags = (f"--out={tmp_path / 'out'}", "--size=8", "--channels=1", "--test=0.4")
    for more in ("", "--user_column=PatientID"):
        place = flags[0] + "2" * bool(more)
        done = run_command(
            "bam", "data", "import", str(tmp_path / "top"), place, *flags[1:], *filter(None, [more])
        )
        assert done.returncode == 0 and "left out: A/0_pipe.dcm" in done.stdout, done.stderr


def test_many_folders_below_the_classes_are_persons_once_and_no_hint_repeats_a_flag(tmp_path):
    spec = [f"top/p{k}/s{i}/{i}.png" for k in range(12) for i in range(3)]
    for number, name in enumerate(spec):
        write(tmp_path / name, "good", number)
    run = lambda *x: run_command(  # noqa: E731
        "bam", "data", "import", str(tmp_path / "top"), f"--out={tmp_path / 'o'}", "--size=8", *x
    )
    plain, followed = run(), run("--user_from=folder")
    assert plain.returncode == followed.returncode == 2
    assert "12 folders with 36 images: are they persons?" in plain.stderr
    assert "and give --user_from=folder" in plain.stderr
    assert "12 folders with 36 images: are they persons?" in followed.stderr
    assert "give --user_from=folder" not in followed.stderr
    assert "--user_from=folder takes the folders below the classes" in followed.stderr


def of_persons(top, num_persons, num_images):
    """A tree of two classes, and a table with `who`."""
    rows = ["file,label,who"]
    for number in range(num_persons * num_images):
        person = number // num_images
        write(top / f"{number}.png", "good", number)
        rows.append(f"{number}.png,{'AB'[person % 2]},{person}")
    (top / "t.csv").write_text("\n".join(rows))
    return ("bam", "data", "import", str(top), "--labels=t.csv", "--classes=A,B", "--size=8",
            "--user_column=who")  # fmt: skip


def test_images_that_the_printed_command_leaves_unused_are_counted(tmp_path):
    few = of_persons(tmp_path / "few", 8, 4)
    done = run_command(*few, f"--out={tmp_path / 'a'}", "--test=0.4")
    assert done.returncode == 0 and "unused" not in done.stdout, done.stderr
    many = of_persons(tmp_path / "many", 8, 7)
    (tmp_path / "many" / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n")  # left out
    done = run_command(*many, f"--out={tmp_path / 'b'}", "--test=0.4")
    facts = manifest(tmp_path / "b")
    num, num_users = facts["num_examples"]["train"], facts["num_users"]
    expected = f"NOT PRIVATE: group_size=4, in the command below, leaves {num - 4 * num_users} of"
    assert f"{expected} {num} training images unused" in done.stdout, done.stdout


def test_the_advice_to_stratify_counts_users_where_the_flag_does(tmp_path):
    command = of_persons(tmp_path / "top", 20, 6)
    done = run_command(*command, f"--out={tmp_path / 'a'}", "--test=0.1")
    assert "; --stratify=2 takes 2 users of each class" in done.stdout, done.stdout
    done = run_command(*command, f"--out={tmp_path / 'b'}", "--stratify=2")
    assert manifest(tmp_path / "b")["num_examples"] == {"train": 96, "test": 24}
    num_images = 60 // 5  # a fifth of a class, counted in images, is more than its users
    done = run_command(*command, f"--out={tmp_path / 'c'}", f"--stratify={num_images}")
    assert done.returncode == 2 and "leaves none to train on" in done.stderr


def test_ids_that_are_written_in_several_ways_are_counted_as_one_users(tmp_path):
    command = of_persons(tmp_path / "top", 8, 3)
    table = tmp_path / "top" / "t.csv"
    done = run_command(*command, f"--out={tmp_path / 'a'}", "--test=0.4")
    assert "several ways" not in done.stdout  # the control
    text = table.read_text().replace("\n3.png,B,1", "\n3.png,B,0001")
    table.write_text(
        text.replace("\n6.png,A,2", "\n6.png,A,2.0").replace("\n7.png,A,2", "\n7.png,A,+2")
    )
    done = run_command(*command, f"--out={tmp_path / 'b'}", "--test=0.4")
    assert "NOT PRIVATE: 2 users are written in several ways, as 12 and 0012 are" in done.stdout
    a, b = (manifest(tmp_path / x) for x in "ab")
    assert (a["num_users"], a["num_examples"]) == (b["num_users"], b["num_examples"])
    table.write_text(text.replace("\n6.png,A,2", "\n6.png,A,9.00720E+17"))
    done = run_command(*command, f"--out={tmp_path / 'c'}", "--test=0.4")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "t.csv: row 8: who: id '9.00720E+17' is a rounded number" in done.stderr


def test_users_that_were_changed_are_read_anew(tmp_path):
    """In one process, with the same config: the file of `dataset.groups`."""
    config = digits.get_config("dp_sgd")
    file = tmp_path / "ids.npy"
    config.dataset.update({"groups": str(file), "group_size": 4})
    counts = []
    for divisor in (1, 4):
        np.save(file, np.arange(1437) // divisor)
        read = loading.make_dataset(config.dataset)
        assert loading.make_dataset(config.dataset) is read  # kept where nothing has changed
        counts.append(len(np.unique(read.users)))
    assert counts == [1437, 360]


TABLE = Path("table.txt")


def of_the_table():
    ids = np.loadtxt(TABLE, dtype=np.int64)
    return random_images("toy", 12, 6, 0.4, 0.3)._replace(users=ids)


def by_the_table():
    factor = float(np.loadtxt(TABLE)[0])
    return lambda images: images * factor / 100


@pytest.mark.parametrize("part", ["dataset", "features"])
def test_a_function_of_ones_own_is_called_for_each_run(part, tmp_path, monkeypatch):
    """What it reads is not known: here a file that no option names."""
    monkeypatch.chdir(tmp_path)
    config = digits.get_config("dp_sgd")
    if part == "dataset":
        base.name_part(config, "dataset", f"{__name__}:of_the_table")
    else:
        base.name_part(config, "features", f"{__name__}:by_the_table")
        config.features.cache = str(tmp_path / "kept")
    values = []
    for number in (1, 1, 2):
        np.savetxt(TABLE, np.full(12, number), "%d")
        read = loading.make_dataset(config.dataset, config.features)
        values.append(read.users[0] if part == "dataset" else float(read.train.images.max()))
    assert values[0] == values[1] and values[2] == pytest.approx(2 * values[0])
    # The control: data of bam's own are kept.
    plain = digits.get_config("dp_sgd").dataset
    assert loading.make_dataset(plain) is loading.make_dataset(plain)


def test_features_that_a_run_keeps_beside_the_data_are_no_change_of_the_data(tmp_path):
    section = {"name": "folder", "path": str(tmp_path), "source": ""}
    digest = lambda: loading._files_of(ConfigDict(section))  # noqa: E731
    (tmp_path / "1.0").mkdir()
    first = digest()
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / "x.npy").write_bytes(b"1")
    assert digest() == first
    (tmp_path / "1.0" / "x.array_record").write_bytes(b"1")
    assert digest() != first


def test_a_folder_of_masks_is_a_class_only_for_those_who_say_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(40):
        write(
            tmp_path / "top" / ("images", "masks")[number % 2] / f"{number // 2}.png",
            "good",
            number,
        )
    base = ("bam", "data", "import", "top", "--size=8")
    done = run_command(*base, "--out=out")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert "images and masks may be images and their masks, not classes" in done.stderr
    assert done.stderr.endswith("If they are classes, add --classes=images,masks\n")
    for number, more in enumerate(("--classes=images,masks", "--masks", "--map=masks:m")):
        done = run_command(*base, f"--out=out{number}", more)
        assert done.returncode == 0 and "2 classes" in done.stdout, done.stderr
    shutil.move("top/masks", "top/images/masks")
    for number in range(20):
        write(tmp_path / "top" / "others" / f"{number}.png", "good", number)
    done = run_command(*base, "--out=four")
    assert done.returncode == 0, done.stderr
    assert last_sum(done)[:2] == (60, 60) and " 20 masks; 2 classes" in done.stdout
    assert "ignored: 20 masks, as images/masks/0.png: --masks uses them" in done.stdout


def test_files_that_a_user_names_are_predicted_whatever_they_are(tmp_path):
    write(tmp_path / "masks" / "1.png", "good")
    write(tmp_path / "masks" / "1_mask.png", "good", 1)
    tags = {"ImageType": ["ORIGINAL", "PRIMARY", "LOCALIZER"], "BurnedInAnnotation": "YES"}
    (tmp_path / "x.dcm").write_bytes(dicom(np.full((9, 9), 7, np.uint8), **tags))
    paths = [tmp_path / "x.dcm", *sorted((tmp_path / "masks").iterdir())]
    assert [*predict.images_of(paths)] == paths
    eight = Preprocessing((8, 8), 1)
    assert (pixels.decode(paths[0], eight) == 7).all()
