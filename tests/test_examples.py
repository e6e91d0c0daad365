"""The examples run, and give what they promise."""

import json
import re
import sys
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from optax.contrib import schedule_free_eval_params

from bam import models, named
from bam.data import datasets
from bam.training import config as base
from bam.training import loading, loop, parts
from configs import extensions
from examples import with_equinox, with_flax, with_jax_privacy, with_train_state
from examples.own_images import walk
from examples.some_classes import some_classes
from tests.cases import Command, refused, run_command, tiny_digits


def test_jax_privacys_clipped_sum_of_bam_gradients_is_ours():
    assert with_jax_privacy.main() < 1e-5


def test_a_plain_flax_loop_learns_digits():
    assert with_flax.main() > 0.75


@pytest.mark.parametrize("train", [with_train_state.linen, with_train_state.with_nnx])
def test_flax_keeps_its_own_state_behind_the_private_gradient(train):
    accuracy, losses = train()
    assert accuracy > 0.85 and np.mean(losses[-5:]) < 0.4 * losses[0]


def test_an_equinox_model_is_trained():
    before, after = with_equinox.main()
    assert after < 0.8 * before


def steps_begun(folder):
    return (folder / "steps_begun").stat().st_size


def test_an_nnx_model_is_trained_to_its_epsilon_on_eight_devices_killed_and_resumed(tmp_path):
    folder, devices = tmp_path / "run", {"JAX_NUM_CPU_DEVICES": "8"}
    with Command("examples.with_nnx", str(folder), **devices) as killed:
        begun = lambda: (folder / "plan.json").exists() and steps_begun(folder)  # noqa: E731
        while begun() < 18:
            killed.check_runs()
        killed.send_signal(9)
    lost = begun()
    with Command("examples.with_nnx", str(folder), **devices) as resumed:
        done = resumed.wait()
    epsilon, accuracy = map(float, re.findall(r"\d\.\d+", done.stdout))
    assert 18 <= lost < 50 == steps_begun(folder)
    assert 2.99 < epsilon <= 3.0 and accuracy > 0.75


SIX = ("import", "show", "train", "report", "export", "predict")
SCANS = ("archive", "scans", "scans_train", "scans_export", "scans_predict")


def test_a_folder_of_ones_own_images_becomes_a_release_in_six_commands(tmp_path):
    small = "--config.num_steps=3 --config.accountant=rdp --config.model.name=linear "
    small += "--config.delta=1e-3 --config.expected_batch_size=9"
    done = run_command(
        "examples.own_images.walk", "--images=300", f"--train={small}",
        f"--out={tmp_path}", f"--only={','.join(SIX)},train_pixels",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "privacy for each single user" in done.stdout and "5 left out" in done.stdout
    assert {x.stem for x in tmp_path.glob("*.md")} == {*SIX, "train_pixels", "statement"}
    record = json.loads((tmp_path / "training.json").read_text())  # for the picture
    assert [row["step"] for row in record["metrics"]] == [record["plan"]["num_steps"]] == [3]
    assert (tmp_path / "sheet.png").stat().st_size > 10_000


@pytest.mark.thorough
def test_an_archive_and_scans_become_data_sets_and_numbers_are_predicted_in_kilograms():
    done = run_command("examples.own_images.walk", "--images=300", f"--only={','.join(SCANS)}")
    assert done.returncode == 0, done.stderr
    assert "120 to test, 1 left out, 6 in no row of the table; 3 classes" in done.stdout
    assert "3 left out; labels are numbers" in done.stdout
    values = [
        float(line.partition(",")[2]) for line in done.stdout.splitlines() if line[:6] == "scans/"
    ]
    error = float(re.findall(r"test mean absolute error ([\d.]+); files", done.stdout)[0])
    assert 1 < error < 10 and all(50 < x < 110 for x in values) and len(values) == 2


def test_the_page_of_ones_own_images_has_the_commands_that_are_run():
    page = Path("docs/own_images.md").read_text(encoding="utf-8").replace(" \\\n ", "")
    for command in walk.COMMANDS.values():
        assert f".venv/bin/{command}\n" in page


def tiny(name, **changes):
    config = extensions.get_config(name)
    config.model.name, config.accountant, config.num_steps = "linear", "rdp", 15
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    return config


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, inputs, train=True):
        inputs = nn.Dropout(0.5, deterministic=not train)(inputs.reshape(len(inputs), -1))
        return nn.Dense(10)(inputs)


class ToldOfTraining(nn.Module):
    @nn.compact
    def __call__(self, inputs, train):
        return Dropping()(inputs, train)


def dropping_out(num_classes, **options):
    return Dropping()


def told_of_training(num_classes, **options):
    return ToldOfTraining()


def looking_ahead(plan, clip_norm, sensitivity, **options):
    return optax.chain(optax.lookahead(optax.sgd(0.1), 5, 0.5))


def at_a_rate_in_words(plan, clip_norm, sensitivity, **options):
    return optax.sgd("a tenth")


def of_one_number(plan, clip_norm, sensitivity, **options):
    return optax.stateless(lambda grads, params: 0.0)


@pytest.mark.parametrize(
    ("section", "name", "message"),
    [
        ("clip", "nowhere.at_all:clip", "cannot be imported: No module named 'nowhere'"),
        ("clip", "examples.low_pass:no_such", "cannot be imported"),
        ("clip", "optax:trace", "has no `sensitivity`"),
        ("model", "examples.own_model:no_such", "cannot be imported"),
        ("model", "resnet10", "unknown model 'resnet10'"),
        ("dataset", "examples.own_dataset:parity", "does not take"),
        ("clip", "ghost", "unknown clip 'ghost'; choose from l2, normalize, per_layer"),
        ("method", "examples.random_smoothing:oracle", "does not take"),
        ("optimizer", "lion", "unknown optimizer 'lion'"),
        ("clip", ".relative:clip", "cannot be imported"),
        ("method", "numpy:ndim", "returns a int, without ascend, grad"),
        ("method", "builtins:id", "is from Python's standard library"),
        ("optimizer", "tests.cases:nothing", "returns a NoneType, without init, update"),
        ("model", "tests.cases:nothing", "a network must be a Flax Linen or NNX module"),
        ("model", "tests.cases:three_logits", r"logits \(1, 3\) for 1 inputs: one row of 10"),
        ("model", f"{__name__}:dropping_out", r"random numbers \['dropout'\], as Dropout does"),
        ("model", f"{__name__}:told_of_training", "told_of_training: TypeError: .* 'train'"),
        ("optimizer", f"{__name__}:looking_ahead", "leave lookahead out; --config.ema_decay"),
        ("optimizer", f"{__name__}:at_a_rate_in_words", "at_a_rate_in_words: TypeError: "),
        ("optimizer", f"{__name__}:of_one_number", "updates of another structure or shape"),
    ],
)
def test_a_part_that_cannot_be_is_one_line(section, name, message):
    config = tiny("dp_sgd")
    config[section].name = name
    if section == "dataset":
        config.dataset.path = "an option that it has not"
    refused(message, loop.build, config)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("integer", r"has a parameter int32\[64, 10\] at .*: make it float32 or bfloat16"),
        ("two outputs", "a network must return one array, not a tuple"),
    ],
)
def test_a_network_that_no_release_could_hold_is_refused_before_epsilon_is_spent(
    kind, message, without_the_tests_type_checks
):
    config = tiny("dp_sgd")
    config.model.name = "tests.cases:own_network"
    with config.unlocked():
        config.model.kind = kind
    refused(message, loop.build, config)
    for kind in ("dict", "list", "bfloat16"):  # the control
        config.model.kind = kind
        loop.build(config)


def test_options_of_ones_own_parts_may_be_lists():
    config = tiny("dp_sgd", dataset__name="tests.cases:given_dataset")
    with config.unlocked():
        config.dataset.files, config.dataset.how = ["a", "b"], {"scale": 2}
    assert loop.build(config).dataset.name == "{'files': ['a', 'b'], 'how': {'scale': 2}}"


@pytest.mark.parametrize("section", ["method", "clip", "optimizer", "model", "dataset", "features"])
def test_a_mistake_inside_a_function_of_ones_own_is_shown_where_it_is(section):
    config = tiny("dp_sgd")
    config[section].name = "tests.cases:broken"
    with pytest.raises(TypeError, match=r"has no len\(\)") as raised:
        loop.build(config)
    assert raised.traceback[-1].name == "broken"


def with_own(section, **options):
    """A config whose section names a function of tests/cases.py, and has options of one's own."""
    config = tiny("dp_sgd")
    with config.unlocked():
        config[section].update({"name": f"tests.cases:given_{section}", **options})
    return config


def test_a_key_that_is_set_is_passed_to_a_function_of_ones_own_be_it_false_or_zero():
    config = with_own("dataset", shuffle=False, skip=0, scale=0.0, note="")
    name = "{'note': '', 'scale': 0.0, 'shuffle': False, 'skip': 0}"
    assert loading.make_dataset(config.dataset).name == name

    assert parts.make_features(tiny("dp_sgd").features) is None
    images = np.arange(8.0).reshape(1, 2, 4, 1)
    for options, expected in (
        ({}, images[:, :, ::-1]),
        ({"mirror": False}, images / 3),
        ({"mirror": False, "groups": 0}, images),
    ):
        found = parts.make_features(with_own("features", **options).features)(images)
        np.testing.assert_array_equal(found, expected)

    config = tiny("dp_sgd")
    config.mechanism.update({"name": "banded", "bands": 0})
    with pytest.raises(ValueError, match="got 0"):
        loop.build(config)


@pytest.mark.parametrize("name", ["adaptive", "slaclip"])
def test_bias_is_measured_where_the_sum_holds_more_than_gradients(name):
    configs = [
        tiny(of, diagnostics__every=1, diagnostics__num_examples=32, clip_norm=0.5)
        for of in (name, "dp_sgd")
    ]
    if name == "adaptive":
        with configs[0].unlocked():
            configs[0].clip.per_clip_norm = False  # lengths are those of gradients
    with_more, plain = map(loop.build, configs)
    rows = plain.rows(np.arange(32))
    figures, expected = (e.diagnose(e.init(0), rows) for e in (with_more, plain))
    # Before the first step both clip at the same C.
    for key in ("bias_norm", "cosine", "fraction_clipped", "against_plain/bias_norm"):
        np.testing.assert_allclose(figures[key], expected[key], rtol=1e-4)
    private = with_more.init(0).private
    private = private._replace(privatize=private.privatize._replace(clip=np.float32(4.0)))
    later = with_more.diagnose(with_more.init(0)._replace(private=private), rows)
    assert later["bias_norm"] < 0.8 * figures["bias_norm"]


@pytest.mark.parametrize("clip", ["normalize", "per_layer"])
def test_our_other_clips_are_chosen_by_name(clip):
    config = tiny("dp_sgd", clip__name=clip, epsilon=8.0)
    assert loop.train(loop.build(config), 0).summary["test_accuracy"] > 0.3


def scaled(num_classes, factor, widths):
    assert isinstance(factor, np.ndarray) and widths == (4,)
    return models.create("linear", num_classes, 1)


def test_a_model_of_ones_own_gets_its_options_as_they_are():
    config = tiny_digits(num_steps=1)
    name = f"{__name__}:scaled"
    base.name_part(config, "model", name, factor=np.ones(2), widths=(4,))
    loop.build(config)


def test_a_model_and_a_data_set_of_ones_own_are_trained_from_their_config():
    own = {"dataset__name": "examples.own_dataset:parity", "model__name": "examples.own_model:mlp"}
    built = loop.build(tiny("dp_sgd", **own, model__width=32, dataset__holdout=37))
    assert built.num_params == 64 * 32 + 32 + 32 * 2 + 2
    assert built.dataset.num_classes == 2
    assert built.plan.num_examples == 1437 - 37
    assert loop.train(built, 0).summary["test_accuracy"] > 0.6


def test_some_classes_are_those_examples_in_their_order():
    whole, part = datasets.load("digits"), some_classes("digits", (8, 3))
    datasets.check(part)
    assert part.num_classes == 2 and part.name == "digits, classes 8, 3"
    for split, of in ((part.train, whole.train), (part.test, whole.test)):
        rows = np.isin(of.labels, (3, 8))
        np.testing.assert_array_equal(split.images, of.images[rows])
        np.testing.assert_array_equal(np.array([8, 3])[split.labels], of.labels[rows])
    for classes in ((1, 1), (3, 10), (-1, 2)):
        with pytest.raises(ValueError, match="of digits are not some of 0 to 9"):
            some_classes("digits", classes)


def test_only_what_a_config_names_is_imported_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_part.py").write_text("def made():\n    return 3\n")
    (tmp_path / "an_extra.py").write_text("raise SystemExit('run in place of a package')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", ".")])
    before = list(sys.path)
    assert named.import_function("part", "my_part:made")() == 3
    assert sys.path == before
    with pytest.raises(ModuleNotFoundError):
        import an_extra  # noqa: F401
    with pytest.raises(ValueError, match="my_part:other") as raised:
        named.import_function("part", "my_part:other")
    assert isinstance(raised.value.__cause__, AttributeError)
    assert sys.path == before


@pytest.mark.parametrize(
    ("text", "place"), [("x = (\n", "line 1: '(' was never closed"), ("x\n", "line 1: NameError")]
)
def test_a_module_of_ones_own_that_does_not_run_is_one_line_with_its_place(
    text, place, tmp_path, monkeypatch
):
    name = f"own_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"cannot be imported: .*{name}.py, {re.escape(place)}"):
        named.import_function("clip", f"{name}:clip")


def test_weights_are_evaluated_and_released_where_the_optimizer_says(tmp_path):
    for optimizer, expected in (
        ("lookahead", lambda state: state.opt_state[1]),
        ("schedule_free", lambda s: schedule_free_eval_params(s.opt_state, s.params)),
    ):
        trainer = loop.build(tiny(optimizer, num_steps=13))  # in the midst of a period of 5
        result = loop.train(trainer, 0, tmp_path / optimizer)
        released, there = loop.whole_model(result.state), expected(result.state)
        close = lambda x, y: np.allclose(x, y, rtol=1e-5, atol=1e-8)  # noqa: E731
        assert all(map(close, jax.tree.leaves(released), jax.tree.leaves(there)))
        # The control: the optimizer steps from elsewhere.
        from_where = jax.tree.leaves(result.state.params)
        assert not any(map(close, jax.tree.leaves(released), from_where))
        for name, figure in loop.evaluate(trainer, released).items():
            assert result.summary[name] == figure
