"""What a release says of image files: what the run said of them, and one line for all else."""

import csv
import dataclasses
import hashlib
import io
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

from bam import models
from bam.cli import export as export_command
from bam.cli import predict as predict_command
from bam.data import common, datasets
from bam.data.common import DataError
from bam.data.preprocessing import Preprocessing
from bam.data.sources import parquet
from bam.images import importing, listing
from bam.release import export, load, predict
from bam.text import visible
from bam.training import loop, summary
from configs import digits
from tests.cases import made_once, refused, run_command
from tests.image_files import dicom

CLASSES = ("disc, large", "square|`\n", "é")  # as CSV, Markdown and terminals do not like them
SHAPE = (6, 9, 3)


def picture(number, size=(20, 31), mode="RGB"):
    """Returns an image of noise that is bright at a place of its class.

    Every fifth image is bright at the place of another class.
    """
    drawn = np.random.default_rng(number).integers(0, 150, (*size, 3), np.uint8)
    drawn[:, 10 * ((number + (number % 5 == 0)) % 3) :][:, :10] += 40
    return Image.fromarray(drawn).convert(mode)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of photographs, its imported folder, a run on it and its release."""
    return made_once(tmp_path_factory, "photographs", make_folder)


def make_folder(root):
    for number in range(120):
        place = root / "photographs" / CLASSES[number % 3]
        place.mkdir(parents=True, exist_ok=True)
        kind = ("png", "bmp", "tif", "webp")[number % 4]
        picture(number, (20 + number % 5, 31), ("RGB", "L")[number % 2]).save(
            place / f"{number}.{kind}"
        )
    examples = listing.in_class_folders(root / "photographs").examples
    made = Preprocessing(SHAPE[:2], SHAPE[2], background="black")
    options = importing.Options(made, CLASSES, 0.3, strict=True)
    importing.run(root / "photographs", examples, root / "data", options)
    config = digits.get_config("dp_sgd")
    config.dataset.update({"name": "folder", "path": str(root / "data")})
    config.update({"num_steps": 6, "accountant": "rdp", "expected_batch_size": 40, "epsilon": 8.0})
    config.optimizer.learning_rate = 0.02
    config.model.name = "linear"
    config.eval.every = 0
    loop.train(loop.build(config), None, root / "run")
    export.export(root / "run", root / "release")


@pytest.fixture
def release(folder, tmp_path):
    """A copy, to be spoiled."""
    return shutil.copytree(folder / "release", tmp_path / "release")


def edit(release, **changes):
    path = release / "model.json"
    facts = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in facts.items() if v is not None}))


def predicted(released, files, top=None):
    made = predict.preprocessing_of(released)
    outputs = list(predict.outputs_of(released, made, files))
    header, *rows = predict.table(released.facts, outputs, top)
    return header, rows, outputs


@pytest.fixture(scope="module")
def test_files(folder, tmp_path_factory):
    """The bytes of the test images of the imported folder, in folders of their classes."""
    place = tmp_path_factory.mktemp("test_files")
    [file] = (folder / "data").glob("test-*.parquet")
    table = parquet.pq.read_table(file)
    for number, row in enumerate(table.to_pylist()):
        (place / CLASSES[row["label"]]).mkdir(exist_ok=True)
        (place / CLASSES[row["label"]] / f"{number:03}.png").write_bytes(row["image"]["bytes"])
    return place


def summary_of(folder):
    return json.loads((folder / "run" / "summary.json").read_text())


def test_predictions_of_the_test_files_have_the_accuracy_of_the_run(folder, test_files):
    released = load.load(folder / "release")
    images = predict.images_of([test_files])
    header, cells, outputs = predicted(released, [*images])
    right = sum(label == row[0] for label, row in zip(images.values(), cells, strict=True))
    accuracy = summary_of(folder)["test_accuracy"]
    assert right / len(images) == accuracy and 0 < accuracy < 1
    assert header == ["class", "probability", *(f"p({name})" for name in CLASSES)]
    pixels = np.stack([np.asarray(Image.open(file)) for file in images])
    logits = np.asarray(released.logits(released.params, pixels))
    np.testing.assert_allclose(np.stack(outputs), logits, rtol=1e-5, atol=1e-5)
    expected = np.asarray(jax.nn.softmax(logits))
    found = np.array([row[2:] for row in cells], float)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert [float(row[1]) for row in cells] == found.max(axis=1).tolist()


def test_original_files_become_the_pixels_that_were_trained_and_tested_on(folder):
    examples = listing.in_class_folders(folder / "photographs").examples
    tested = [x for x in examples if importing.split_of(x, 0.3) == "test"]
    files = [folder / "photographs" / x.file for x in tested]
    _, cells, _ = predicted(load.load(folder / "release"), files)
    right = sum(file.parent.name == row[0] for file, row in zip(files, cells, strict=True))
    assert right / len(files) == summary_of(folder)["test_accuracy"]


def test_a_release_says_its_input_and_nothing_else_of_the_data(folder):
    facts = json.loads((folder / "release" / "model.json").read_text())
    assert facts["classes"] == list(CLASSES) and facts["loss"] == "cross_entropy"
    made = Preprocessing(SHAPE[:2], SHAPE[2], background="black")
    assert Preprocessing.from_json(facts["preprocessing"]) == made
    content = (folder / "release" / "weights.safetensors").read_bytes()
    assert facts["weights_sha256"] == hashlib.sha256(content).hexdigest()
    manifest = (folder / "data" / "manifest.json").read_text()
    released = "".join(x.read_text() for x in (folder / "release").glob("*.[jm]*"))
    for text in ("test-00000", 'num_examples": {', "left_out"):
        assert text in manifest and text not in released


@pytest.mark.parametrize(
    ("manifest", "classes", "shape"),
    [
        (None, CLASSES, None),
        ({"classes": ["x"]}, CLASSES, None),
        ({"preprocessing": {"size": [8, 9], "channels": 1}}, CLASSES, (8, 9, 1)),
        ({"preprocessing": {"size": [8, 9], "channels": 1}, "classes": 3}, CLASSES, (8, 9, 1)),
        ({"preprocessing": {"size": [8, 9], "channels": 1}, "classes": [3]}, ("3",), (8, 9, 1)),
    ],
)
def test_names_are_those_of_the_manifest_or_the_file(folder, tmp_path, manifest, classes, shape):
    for file in (folder / "data").glob("train-*.parquet"):
        shutil.copy(file, tmp_path)
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    names, made = parquet.describe(tmp_path)
    assert names == classes and (made and Preprocessing.from_json(made).shape) == shape


def test_the_command_names_the_classes_that_become_public(folder, tmp_path, capsys):
    arguments = [f"--workdir={folder / 'run'}", f"--out={tmp_path / 'out'}"]
    assert export_command.main(arguments) == 0
    line = "names of the classes, public with the model: disc, large, square|`\\n, é\n"
    assert capsys.readouterr().out.endswith(line)


def test_names_that_are_not_one_for_each_class_are_not_released():
    config = digits.get_config("dp_sgd")
    config.update({"num_steps": 1, "accountant": "rdp"})
    built = loop.build(config)
    facts = dict.fromkeys(("step", "steps_begun", "seconds"), 1)
    for names, stated in ((range(10), [*"0123456789"]), (("a", "b"), [])):
        dataset = built.dataset._replace(classes=tuple(names))
        own = dataclasses.replace(built, load=lambda dataset=dataset: dataset)
        assert summary.summarize(own, None, facts)["classes"] == stated


@pytest.mark.parametrize(
    "key", ["loss", "classes", "preprocessing", "bfloat16", "weights_sha256", "mean"]
)
def test_a_release_of_an_earlier_version_is_refused_in_one_line(release, key):
    edit(release, **{key: None})
    refused(f"has no '{key}': it is damaged, or of an earlier version", load.load, release)


def test_where_a_release_states_neither_names_nor_sizes_numbers_and_the_image_shape_are_taken(
    release,
):
    edit(release, classes=[], preprocessing={})
    released = load.load(release)
    assert released.facts["classes"] == ["0", "1", "2"]
    assert predict.preprocessing_of(released) == Preprocessing(SHAPE[:2], SHAPE[2])
    edit(release, loss="binary")
    assert predict.table(load.load(release).facts, []) == [["p(0)", "p(1)", "p(2)"]]


@pytest.mark.parametrize(
    ("loss", "num_classes", "top", "header", "cells"),
    [
        (
            "cross_entropy",
            3,
            2,
            ["class", "probability", "class_2", "probability_2"],
            "b 0.5 a 0.3",
        ),
        ("cross_entropy", 3, 1, ["class", "probability"], "b 0.5"),
        (
            "cross_entropy",
            2,
            9,
            ["class", "probability", "class_2", "probability_2"],
            "a 0.5 b 0.5",
        ),
        ("binary", 2, None, ["p(a)", "p(b)"], "0.5 0.75"),
        ("squared_error", 1, None, ["value"], "-1.5"),
        ("my:loss", 2, None, ["value_a", "value_b"], "0 1e+30"),
    ],
)
def test_columns_are_as_the_loss_has_them(loss, num_classes, top, header, cells):
    outputs = {
        "b 0.5 a 0.3": np.log([0.3, 0.5, 0.2]), "b 0.5": np.log([0.3, 0.5, 0.2]) + 3,
        "a 0.5 b 0.5": np.zeros(2), "0.5 0.75": np.array([0, np.log(3)]),
        "-1.5": np.array([-1.5]), "0 1e+30": np.array([0, 1e30]),
    }  # fmt: skip
    both = [outputs[cells].astype(np.float32), DataError("unread")]
    facts = {"loss": loss, "classes": [*"abc"][:num_classes], "preprocessing": {}}
    table = predict.table(facts, both, top)
    assert table == [header, cells.split(), [""] * len(header)]


def test_files_are_listed_once_without_junk_and_through_links(tmp_path):
    below = tmp_path / "photographs" / "a" / "b"
    below.mkdir(parents=True)
    for name in ("1.png", "2.JPG", "._1.png", "notes.txt", ".hidden.png"):
        (below / name).write_bytes(b"")
    for junk in ("__MACOSX", "@eaDir", ".thumbnails"):
        (tmp_path / "photographs" / junk).mkdir()
        (tmp_path / "photographs" / junk / "1.png").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "photographs")
    link = tmp_path / "link" / "a" / "b"
    assert predict.images_of([tmp_path / "link", link / "1.png", link / "notes.txt"]) == {
        link / "1.png": "", link / "2.JPG": "a", link / "notes.txt": "",
    }  # fmt: skip
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    for name, message in (
        ("empty", "no images in this folder .*: name files without such a suffix one by one"),
        ("no", "no such"),
        ("pipe.png", "no such"),
    ):
        with pytest.raises(DataError, match=message):
            predict.images_of([tmp_path / name])


def test_a_file_that_cannot_be_read_leaves_the_others_as_they_are(folder, tmp_path):
    released = load.load(folder / "release")
    files = [tmp_path / f"{number}.png" for number in range(2 * predict.TOGETHER + 1)]
    for number, file in enumerate(files):
        picture(number, (11 + number, 40), ("RGB", "RGBA", "L", "P", "1")[number % 5]).save(file)
    _, _, alone = predicted(released, files[3:4])
    files[2].write_bytes(b"no image")
    _, cells, outputs = predicted(released, files)
    assert isinstance(outputs[2], DataError) and cells[2] == [""] * 5
    assert sum(isinstance(x, DataError) for x in outputs) == 1 and len(outputs) == len(files)
    np.testing.assert_array_equal(outputs[3], alone[0])
    broken = jax.tree.map(lambda x: x * jnp.nan, released.params)
    [fault] = predicted(released._replace(params=broken), files[3:4])[2]
    assert "outputs are not finite" in str(fault)


def test_any_number_of_files_is_one_compilation(folder, tmp_path):
    picture(0).save(tmp_path / "0.png")
    released = load.load(folder / "release")
    for number in (1, 2, 40):
        predicted(released, [tmp_path / "0.png"] * number)
    assert released.logits._cache_size() == 1


def test_the_network_is_given_so_many_images_as_its_memory_allows(folder, tmp_path, monkeypatch):
    released, files = load.load(folder / "release"), [tmp_path / f"{i}.png" for i in range(5)]
    for number, file in enumerate(files):
        picture(number).save(file)
    made = predict.preprocessing_of(released)
    assert predict.num_together(released, made) == predict.TOGETHER
    whole = list(predict.outputs_of(released, made, files))
    sizes = []

    def seen(params, images):
        sizes.append(len(images))
        return released.logits(params, images)

    seen.lower = released.logits.lower
    for memory in (60_000, 14_000):
        monkeypatch.setattr(predict.memory, "machine", lambda memory=memory: memory)
        few, sizes[:] = list(predict.outputs_of(released._replace(logits=seen), made, files)), []
        np.testing.assert_allclose(few, whole, rtol=1e-5, atol=1e-5)
        assert 1 <= predict.num_together(released, made) < predict.TOGETHER
    monkeypatch.setattr(predict.memory, "machine", lambda: 100)
    with pytest.raises(DataError, match=r"the network takes .* bytes for an image of \(6, 9, 3\)"):
        predict.outputs_of(released, made, files)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (
            {"features": {"name": "scattering"}},
            "does not record the size or the type of its images",
        ),
        ({"features": {"name": "backbone", "digest": "5e88"}}, "--weights=FILE, .*SHA-256 is 5e88"),
        ({"raw_dtype": "float32"}, "takes numbers, not image files"),
        (
            {"features": {"name": "my:map"}, "preprocessing": {"size": [6, 9], "channels": 3}},
            "takes features .my:map., not image files",
        ),
        ({"image_shape": [1, 1, 30]}, "a height and a width from 4"),
        ({"image_shape": [8, 8]}, "size .8,."),
        ({"preprocessing": {"size": [8, 8], "channels": 2}}, "channels must be .*got 2"),
        ({"preprocessing": {"size": [6, 9], "channels": 3, "run": "os:system"}}, "preprocessing"),
        (
            {"preprocessing": {"size": [6, 8], "channels": 3}},
            "does not take images of shape .6, 8, 3",
        ),
    ],
)
def test_inputs_that_are_no_image_files_are_refused(folder, facts, message):
    released = load.load(folder / "release")
    stated = released.facts | {"preprocessing": {}} | facts
    with pytest.raises(DataError, match=message):
        is_mapped = load.features_name(stated) == "scattering"
        stated |= {"raw_shape": None} if is_mapped else {}
        takes = load.input_type(stated, is_mapped)
        predict.preprocessing_of(released._replace(facts=stated, takes=takes))


@pytest.mark.parametrize(
    ("constants", "imported", "are_pixels"),
    [
        (([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]), {}, True),  # of CIFAR-10
        (([0.5] * 3, [0.25] * 3), {}, True),  # of Parquet files of one's own
        (([100.0] * 3, [30.0] * 3), {}, False),
        (([100.0] * 3, [30.0] * 3), {"size": [6, 9], "channels": 3}, True),
    ],
)
def test_a_release_that_does_not_record_its_images_type_is_of_pixels_if_it_shows(
    constants, imported, are_pixels, folder
):
    facts = load.load(folder / "release").facts
    facts = {k: v for k, v in facts.items() if k not in ("raw_shape", "raw_dtype")}
    facts |= {"mean": constants[0], "std": constants[1], "preprocessing": imported}
    takes = load.input_type(facts, False)
    assert (takes is not None and takes.dtype == np.uint8) == are_pixels
    takes = load.input_type(facts | {"raw_dtype": "float32"}, False)  # the control
    assert takes.dtype == np.float32


def test_outputs_for_each_pixel_are_no_row_of_a_table(folder):
    released = load.load(folder / "release")
    with pytest.raises(DataError, match=r"outputs of shape \(6, 9, 3\) are not a row"):
        predict.preprocessing_of(released._replace(logits=lambda params, images: images))


@pytest.mark.parametrize(
    "changes",
    [
        {"weights_sha256": "0" * 64},
        {"weights_sha256": 3},
        {"classes": ["a", "b"]},
        {"classes": ["a", "b", 3]},
        {"classes": "abc"},
        {"preprocessing": [1]},
        {"bfloat16": {"a": 1}},
        {"loss": 7},
    ],
)
def test_a_release_that_was_edited_is_refused(release, changes):
    edit(release, **changes)
    with pytest.raises(ValueError, match=r"is damaged"):
        load.load(release)


def test_a_map_of_drawn_images_that_names_no_weights_is_refused(release):
    edit(release, features={"name": "prior"})
    with pytest.raises(ValueError, match=r"other weights of features.name=prior \(none named\)"):
        load.load(release)


def test_edited_weights_are_refused_unless_both_are_edited(release):
    path = release / "weights.safetensors"
    weights = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file({k: x + 1 for k, x in weights.items()}, path)
    with pytest.raises(ValueError, match="its SHA-256 is not the one in model"):
        load.load(release)
    edit(release, weights_sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    np.testing.assert_array_equal(load.load(release).params["bias"], weights["bias"] + 1)


def listed(num_classes):
    """A network whose parameters are a list of a tuple, an array and a dict, in two types."""

    def init(key, inputs):
        first = jax.random.normal(key, (inputs[0].size, num_classes), jnp.bfloat16)
        return [(first, None), jnp.zeros(num_classes, jnp.bfloat16), {"scale": jnp.ones(())}]

    def apply(params, inputs):
        (weight, _), bias, rest = params
        return (inputs.reshape(len(inputs), -1) @ weight + bias) * rest["scale"]

    return init, apply


@pytest.mark.thorough
def test_parameters_of_any_tree_and_in_bfloat16_are_released(tmp_path):
    config = digits.get_config("dp_sgd")
    config.update({"num_steps": 1, "accountant": "rdp", "expected_batch_size": 9})
    config.model = {"name": "tests.test_predict:listed"}
    config.eval.every = 0
    built = loop.build(config)
    result = loop.train(built, None, tmp_path / "run")
    export.export(tmp_path / "run", tmp_path / "out", own_model="tests.test_predict:listed")
    weights = safetensors.numpy.load_file(tmp_path / "out" / "weights.safetensors")
    assert {k: str(x.dtype) for k, x in weights.items()} == dict.fromkeys(
        ("0/0", "1", "2/scale"), "float32"
    )
    facts = json.loads((tmp_path / "out" / "model.json").read_text())
    assert facts["bfloat16"] == ["0/0", "1"]
    released = load.load(tmp_path / "out", "tests.test_predict:listed")
    assert released.params["0"]["0"].dtype == jnp.bfloat16
    assert jax.tree.all(
        jax.tree.map(lambda a, b: (a == b).all(), released.params, result.state.averaged)
    )
    judged = loop.evaluate(built, released.params)
    assert judged["test_accuracy"] == result.summary["test_accuracy"]


def test_parameters_of_one_name_are_refused_before_a_run():
    zeros = lambda key, inputs: {"a": {"b": jnp.zeros(3)}, "a/b": jnp.zeros(2)}  # noqa: E731
    with pytest.raises(ValueError, match="two of the network's parameters have one name: a/b"):
        models.as_functions((zeros, lambda params, inputs: inputs), (3,))


def test_json_says_what_csv_says_and_names_come_from_standard_input(
    folder, test_files, tmp_path, monkeypatch
):
    run = ("bam", "predict", f"--release={folder / 'release'}")
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"")
    there = map(str, predict.images_of([test_files]))
    names = [*(x for x in there if "\n" not in x), str(bad)]
    for suffix in ("csv", "json"):
        given = io.TextIOWrapper(io.BytesIO(os.fsencode("\r\n".join([*names, "", ""]))))
        monkeypatch.setattr("sys.stdin", given)
        done = run_command(*run, "-", "--top=2", f"--out={tmp_path / 'out'}.{suffix}")
        assert done.returncode == 2 and f"1 of {len(names)} files" in done.stderr, done.stderr
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text(), newline="")))
    records = json.loads((tmp_path / "out.json").read_text())
    assert [x["file"] for x in records] == names
    assert records[-1].pop("file") and set(records.pop().values()) == {None}
    for row, record in zip(rows, records, strict=False):
        assert row["class"].lstrip("'") == record["class"].lstrip("'")
        assert float(row["probability_2"]) == record["probability_2"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"x/\xff.png\r\n"), "utf-8"))
    done = run_command(*run, "-")
    assert done.stderr == "error: x/\\udcff.png: no such file or folder\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    done = run_command(*run, "-")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: standard input has no file name: write one name a line\n"


def test_the_command_writes_a_table_and_says_what_it_could_not_read(folder, test_files, tmp_path):
    out, bad = tmp_path / "out.csv", test_files / CLASSES[0] / "bad,\n.png"
    run = ("bam", "predict", f"--release={folder / 'release'}")
    done = run_command(*run, str(test_files), f"--out={out}", "--top=2")
    assert done.returncode == 0, done.stderr
    assert out.stat().st_mode & 0o777 == 0o600  # for its owner alone
    accuracy = summary_of(folder)["test_accuracy"]
    assert f"accuracy {accuracy:.2%}" in done.stderr and "NOT PRIVATE" in done.stderr
    rows = list(csv.DictReader(io.StringIO(out.read_text(), newline="")))
    assert [row["file"] for row in rows] == [str(x) for x in predict.images_of([test_files])]
    assert set(rows[0]) == {"file", "class", "probability", "class_2", "probability_2"}
    assert {row["class"] for row in rows} <= set(CLASSES)
    for name in CLASSES:
        seen = [row["class"] for row in rows if row["file"].startswith(f"{test_files}/{name}/")]
        right = seen.count(name)
        share = f"{visible(name)} {right / len(seen):.2%} ({right} of {len(seen)})"
        assert share in done.stderr, done.stderr
    (one_class := tmp_path / "one").mkdir()
    (one_class / CLASSES[0]).symlink_to(test_files / CLASSES[0])
    done = run_command(*run, str(one_class), f"--out={tmp_path / 'one.csv'}")
    assert all(f"{visible(name)} –" in done.stderr for name in CLASSES[1:]), done.stderr
    bad.write_bytes(b"")
    some = str(next(iter((test_files / CLASSES[1]).iterdir())))
    Image.fromarray(np.full((9, 9), 4000, np.uint16)).save(tmp_path / "dark.png")
    done = run_command(*run, some, str(bad), str(tmp_path / "dark.png"))
    bad.unlink()
    assert done.returncode == 2 and "1 of 3 files could not be read" in done.stderr
    assert "warning: 1 file of 16 bits (0 to 65,535) would look dark" in done.stderr
    first, second, _ = csv.DictReader(io.StringIO(done.stdout))
    assert first["class"] and second["file"] == str(bad) and not second["class"]


def test_names_reach_a_terminal_written_out_and_a_table_without_formulas(
    folder, tmp_path, monkeypatch
):
    names = ("=1+1.png", "a\x1b[2Jb.png", "@7.png", "bad\x1b[2J.png")
    for number, name in enumerate(names[:-1]):
        picture(number).save(tmp_path / name)
    (tmp_path / names[-1]).write_bytes(b"no image")
    command = ["bam", "predict", f"--release={folder / 'release'}", *names]
    monkeypatch.chdir(tmp_path)
    done = run_command(*command)
    assert "\x1b" not in done.stderr and r"bad\x1b[2J.png" in done.stderr, done.stderr
    files = [row["file"] for row in csv.DictReader(io.StringIO(done.stdout, newline=""))]
    assert files == ["'=1+1.png", names[1], "'@7.png", names[3]]


@pytest.mark.thorough
def test_a_command_that_cannot_be_is_one_line_before_any_work(folder, release, tmp_path):
    picture(0).save(tmp_path / "0.png")
    (tmp_path / "exists.csv").write_text("mine")
    (tmp_path / "bad.png").write_text("bad")
    image = str(tmp_path / "0.png")
    for arguments, message in (
        ([], "bam predict --release=DIR FILE"),
        ([image, f"--out={tmp_path / 'exists.csv'}"], "exists; choose another --out"),
        ([image], f"{folder / 'run'} is not a release: it has no model.json"),
        ([str(tmp_path / "bad.png"), f"--out={tmp_path / 'new.csv'}"], "1 of 1 files"),
        ([image, "--top=0"], "--top"),
    ):
        where = folder / "run" if "not a release" in message else release
        done = run_command("bam", "predict", f"--release={where}", *arguments)
        assert done.returncode == 2 and message in done.stderr.splitlines()[-1], done.stderr
        assert "Traceback" not in done.stderr and not done.stdout
    assert (tmp_path / "exists.csv").read_text() == "mine" and not (tmp_path / "new.csv").exists()


@pytest.mark.parametrize(
    ("name", "label"),
    [("A/1.png", "A"), ("train/A/1.png", "A"), ("Test/B/x/1.png", "B"), ("test/1.png", "test"),
     ("1.png", ""), ("A/train/1.png", "A")],
)  # fmt: skip
def test_the_folder_of_a_class_may_lie_in_that_of_a_split(tmp_path, name, label):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8)).save(tmp_path / name)
    assert predict.images_of([tmp_path]) == {tmp_path / name: label}


def test_the_command_names_what_it_leaves_out_and_pictures_that_are_no_scans(
    tmp_path, release, capsys
):
    scan = np.random.default_rng(0).integers(0, 255, (9, 9)).astype(np.uint8)
    Image.fromarray(scan).save(tmp_path / "s0.png")

    def see(*more):
        arguments = [f"--release={release}", *map(str, more or [tmp_path])]
        assert predict_command.main(arguments) == 0
        return capsys.readouterr()

    def silent(text):
        return "ignored" not in text and "DICOM" not in text

    assert silent(see().err)  # the control
    (tmp_path / "IM0001").write_bytes(dicom(scan))
    assert (
        "ignored: 1 without a suffix, as " + f"{tmp_path}/IM0001: name such files one by one"
        in see().err
    )
    assert silent(see(tmp_path, tmp_path / "IM0001").err)
    for name, tags in (
        ("scout.dcm", {"ImageType": ["ORIGINAL", "PRIMARY", "LOCALIZER"]}),
        ("name.dcm", {"BurnedInAnnotation": "YES"}),
    ):
        (tmp_path / name).write_bytes(dicom(scan, **tags))
    done = see()
    assert (
        "warning: 2 DICOM files of kinds that bam data import leaves out (localizers, pictures "
        f"with burnt-in annotation), as {tmp_path}/name.dcm: their predictions may mean nothing"
    ) in done.err
    assert done.err.count("DICOM") == 1 and "scout.dcm" in done.out and "name.dcm" in done.out


def test_a_release_that_does_not_fit_its_files_says_its_size_and_window(tmp_path, release):
    deep = np.random.default_rng(0).integers(3, 4000, (9, 9)).astype(np.uint16)
    np.save(tmp_path / "deep.npy", deep)
    np.save(tmp_path / "float.npy", deep / 4000)
    seen = lambda name: run_command("bam", "predict", f"--release={release}", str(tmp_path / name))  # noqa: E731
    assert (
        "look dark or grey (NOT PRIVATE), and the release has no window\n"
        in seen("deep.npy").stderr
    )
    done = seen("float.npy")
    assert "float.npy: InputError: there is no window for signed or floating" in done.stderr
    assert "--window" not in done.stderr
    edit(release, preprocessing={"size": SHAPE[:2], "channels": SHAPE[2], "window": [5000, 6000]})
    done = seen("deep.npy")
    fitted = " × ".join(map(str, SHAPE))
    expected = f"at the release's size ({fitted}) and window (5000, 6000): {tmp_path}"
    assert done.returncode == 0 and expected in done.stderr
    done = run_command(
        "bam", "predict", f"--release={release}", "--format=json", str(tmp_path / "deep.npy")
    )
    assert set(json.loads(done.stdout)[0]) >= {"file", "class", "probability"}


@pytest.mark.parametrize(
    ("target", "texts"),
    [
        ((70.0, 0.5), ["70", "70.5", "70.6173"]),  # six digits, if they are enough
        ((2.0**30, 1.0), ["1073741824", "1073741825", "1073741825.235"]),
        ((1577836800.0, 864000.0), ["1577836800", "1578700800", "1578903466.7"]),
        ((0.0, 1e-300), ["0", "1e-300", "1.23457e-300"]),
    ],
)
def test_a_large_offset_hides_no_difference(target, texts):
    outputs = np.float32([[0], [1], [1.2345678]])
    facts = {"classes": ["0"], "loss": "squared_error", "preprocessing": {"target": list(target)}}
    rows = [row[0] for row in predict.table(facts, list(outputs))[1:]]
    np.testing.assert_allclose([float(x) for x in rows], [float(x) for x in texts], rtol=1e-6)
    assert len(set(rows)) == 3 and rows[:2] == texts[:2]
    one = np.zeros(1, np.float32)
    split = common.Split(np.zeros((1, 8, 8, 3), np.uint8), one)
    dataset = datasets.Dataset("x", split, split, 1, one, one, preprocessing={"target": target})
    numbers = datasets.in_units(dataset, outputs)
    np.testing.assert_allclose((numbers - target[0]) / target[1], outputs, atol=1e-6)
