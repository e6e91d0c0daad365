"""A part is a row with its words and options: what is added here is found wherever it is read."""

import json
import math
import runpy

import jax
import pytest
from absl import flags
from ml_collections import ConfigDict

import bam
from bam import models
from bam.cli import command_line, options
from bam.cli.main import main
from bam.data.datasets import Dataset
from bam.errors import InputError
from bam.models.wide_resnet import WideResNet, WideResNetBam
from bam.part_table import CLIPS, SECTIONS, Part
from bam.privacy import statement
from bam.release import export
from bam.sweep import comparison
from bam.sweep.method_config import method_config
from bam.training import config as config_
from bam.training import keys, loop, named_configs, parts, rundir
from configs import cifar10, digits, imagenet32
from tests.cases import refused, run_command
from tests.runs import own_data, tiny

WORDS = "scaled down to an L2 norm of at most a share of C"


def shrink(clip_norm, share=0.5):
    return bam.clip_by_l2_norm(share * clip_norm)


def shrunk(words=WORDS, options=("share",)):
    """A clip that nobody has named yet, as a row of the table."""
    return Part("tests.test_parts:shrink", options, words)


def released(folder, monkeypatch, row):
    """Settings, statement and model facts of a run that names a row of the table of clips."""
    monkeypatch.setitem(CLIPS, "shrunk", row)
    config = tiny(num_steps=1)
    with config.unlocked():
        config.clip.update({"name": "shrunk", "share": 0.25})
    result = loop.train(loop.build(config, own_data()), None, folder / "run")
    assert result.summary["sensitivity"] == 0.25 and result.summary["clip_norm"] == 1.0
    export.export(folder / "run", folder / "out")
    settings = json.loads((folder / "out" / "config.json").read_text())
    return settings, (folder / "out" / "PRIVACY.md").read_text()


@pytest.mark.thorough
def test_a_clip_that_is_added_is_in_a_run_the_statement_and_a_release(tmp_path, monkeypatch):
    settings, text = released(tmp_path, monkeypatch, shrunk())
    assert settings["clip"] == {"name": "shrunk", "share": 0.25}
    assert f"| {WORDS} | `shrunk` |" in text
    assert (
        "| S, sensitivity | how far one example can move the sum, at most, in L2 | 0.25 |" in text
    )


def test_a_clip_without_words_is_said_to_be_bounded_by_s_and_no_option_is_told(
    tmp_path, monkeypatch
):  # the control
    settings, text = released(tmp_path, monkeypatch, shrunk("", ()))
    assert settings["clip"] == {"name": "shrunk"}
    unknown = statement.render({"bound": "own"}, "bounded")
    assert f"| {unknown} | `shrunk` |" in text and WORDS not in text


def test_a_clip_that_is_in_no_table_is_refused():
    refused("unknown clip 'shrunk'; choose from l2, normalize", loop.build, tiny(
        **{"clip.name": "shrunk"}), own_data())  # fmt: skip


# Options follow the part that is named.


def parsed(*arguments):
    """The config of a command line of `bam train`."""
    values = flags.FlagValues()
    options.define(values, options.COMMANDS["train"].flags)
    argv = [f"--config{x}" if x[0] in ".=" else x for x in arguments]
    command_line.parse(values, argv, "bam train")
    return values.config


@pytest.mark.parametrize(
    ("arguments", "section", "expected"),
    [
        (
            ("=digits:dp_sgd", ".model.name=resnet9", ".model.symmetries=2"),
            "model",
            {"name": "resnet9", "width": 64, "symmetries": 2},
        ),
        (
            ("=digits:dp_sgd", ".model.symmetries=2", ".model.name=resnet9"),  # in any order
            "model",
            {"name": "resnet9", "width": 64, "symmetries": 2},
        ),
        (
            ("=cifar10:dp_sgd", ".model.norm_last=true"),  # the config names the part
            "model",
            {**cifar10.get_config("dp_sgd").model.to_dict(), "norm_last": True},
        ),
        (
            ("=cifar10:dp_sgd", ".model.name=linear"),  # which has none of these options
            "model",
            {"name": "linear", "width": 1},
        ),
        (
            ("=digits:dp_sgd", ".method.name=bam_sam", ".method.radius=0.02"),
            "method",
            {"name": "bam_sam", "radius": 0.02, "mix": 1.0, "ascent_views": 0,
             "ascent_params": ""},
        ),
        (
            ("=digits:bam_exact", ".method.name=dp_sgd"),
            "method",
            {"name": "dp_sgd"},
        ),
        (
            ("=digits:dp_sgd", ".model.name", "resnet9", ".model.symmetries", "4"),
            "model",
            {"name": "resnet9", "width": 64, "symmetries": 4},
        ),
        (
            ("=digits:dp_sgd", ".clip.name=normalize", ".clip.gamma=0.1"),
            "clip",
            {"name": "normalize", "gamma": 0.1},
        ),
        (
            ("=digits:dp_sgd", ".optimizer.name=sgd", ".optimizer.momentum=0.9"),
            "optimizer",
            {"name": "sgd", "learning_rate": 0.01, "schedule": "constant", "warmup_steps": 0,
             "momentum": 0.9},
        ),
        (  # a function of one's own
            ("=digits:dp_sgd", ".clip.name=examples.dp_psac:clip", ".clip.r=0.1"),
            "clip",
            {"name": "examples.dp_psac:clip", "r": 0.1},
        ),
        (
            ("=digits:bam_exact", ".method.name=examples.penalty_schedule:oracle",
             ".method.radius=0.02", ".method.last_step=50"),
            "method",
            {"name": "examples.penalty_schedule:oracle", "radius": 0.02, "last_step": 50},
        ),
        (  # one that takes any
            ("=digits:dp_sgd", ".model.name=tests.cases:three_logits", ".model.x=some"),
            "model",
            {"name": "tests.cases:three_logits", "width": 16, "x": "some"},
        ),
        (
            ("=digits:dp_sgd", ".model.name=tests.test_parts:without_width"),
            "model",
            {"name": "tests.test_parts:without_width"},
        ),
    ],
)  # fmt: skip
def test_options_follow_the_part_that_is_named(arguments, section, expected):
    assert parsed(*arguments)[section].to_dict() == expected


def without_width(num_classes, depth: int = 3):
    """A network of one's own that has no width."""
    raise AssertionError("it is not made by a command line")


def test_a_config_that_sets_no_option_is_as_it_was():
    assert parsed("=digits:bam_sam", ".epsilon=3.0") == digits.get_config("bam_sam")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("=digits:dp_sgd", ".model.symmetries=2"),
            "model convnet has no option 'symmetries': its options: width; there is one with "
            "--config.model.name=resnet9",
        ),
        (
            ("=digits:dp_sgd", ".model.name=resnet9", ".model.symetries=2"),
            "model resnet9 has no option 'symetries': did you mean model.symmetries? its options: "
            "norm_last, scale_norm, symmetries, weight_standardisation, width",
        ),
        (
            ("=digits:dp_sgd", ".method.radius=0.05"),
            "method dp_sgd has no option 'radius': its options: none; there is one with "
            "--config.method.name=dp_sat or bam_sam",
        ),
        (
            ("=digits:bam_exact", ".method.lambda=0.05"),
            "method bam_exact has no option 'lambda': did you mean method.penalty? its options: "
            "ascent_params, ascent_views, penalty",
        ),
        (
            ("=digits:dp_sat", ".method.rho=0.05"),
            "method dp_sat has no option 'rho': did you mean method.radius? its options: radius",
        ),
        (
            ("=digits:dp_sgd", ".clip.gamma=0.05"),
            "clip l2 has no option 'gamma': its options: slack; there is one with "
            "--config.clip.name=normalize",
        ),
        (
            ("=digits:dp_sgd", ".model.name=tests.test_parts:without_width", ".model.width=2"),
            "model tests.test_parts:without_width has no option 'width': did you mean "
            "model.depth? its options: depth",
        ),
    ],
)
def test_an_option_that_the_part_lacks_is_refused_in_a_line_that_lists_its_options(
    arguments, message, capsys
):
    flagged = [f"--config{x}" for x in arguments]
    assert main(["train", *flagged, "--config.dry_run"]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_sweep_sets_options_of_the_parts_that_its_settings_name():
    config_of = lambda method, names: digits.get_config(method)  # noqa: E731
    study = comparison.make_study(
        config_of, ["dp_sgd"], {"model.symmetries": ["1", "2"], "model.name": ["resnet9"]}
    )
    assert [x.model.symmetries for x in study.groups.values()] == [1, 2]
    with pytest.raises(InputError, match="model convnet has no option 'symmetries': its options"):
        comparison.make_study(config_of, ["dp_sgd"], {"model.symmetries": ["1", "2"]})


def test_options_of_a_sweeps_command_line_follow_the_part_for_every_method():
    given = {"model.name": "resnet9", "model.symmetries": 2, "method.radius": 0.5}
    for method in ("dp_sgd", "bam_sam"):
        config = method_config("configs/digits.py", method, given)
        assert config.model.symmetries == 2
        assert config.method.get("radius") == (0.5 if method == "bam_sam" else None)


def test_what_a_sweep_sets_for_every_part_stays_when_its_settings_name_another():
    def widths(**overrides):
        study = comparison.make_study(
            lambda method, names: method_config("configs/cifar10.py", method, overrides, (), names),
            ["dp_sgd"],
            {"model.name": ["resnet9", "wide_resnet", "convnet"]},
        )
        return [config.model.width for config in study.groups.values()]

    assert widths(**{"model.width": 8}) == [8, 8, 8]
    assert widths() == [64, 4, 16]  # the control: that of the config, and those of the parts


# A part that the command line names is as it would be alone.

NAMES = {name: tuple(section.rows) for name, section in SECTIONS.items()}
SHIPPED = sorted(named_configs.shipped_configs())


@pytest.mark.parametrize("shipped", SHIPPED)
def test_a_part_that_a_flag_names_has_its_own_options_and_the_keys_of_the_section(shipped):
    before = parsed(f"={shipped}").to_dict()
    for section, name in [(s, name) for s, names in NAMES.items() for name in names]:
        own = {x: before[section][x] for x in keys.own(section)}
        alone = parsed("=base", f".{section}.name={name}")[section].to_dict()
        after = parsed(f"={shipped}", f".{section}.name={name}").to_dict()
        named = name == before[section]["name"]
        expected = before[section] if named else {**alone, **own, "name": name}
        assert after[section] == expected, (section, name)
        model_too = {"model": after["model"]} if section == "features" else {}  # of "folder"
        assert after == {**before, section: expected, **model_too}, (section, name)


@pytest.mark.parametrize("section", ["model", "clip", "optimizer", "method"])
def test_flags_set_the_options_of_the_part_that_another_flag_names(section):
    other = {bool: lambda x: not x, int: lambda x: x + 1, float: lambda x: x / 2 + 0.25}
    for name in NAMES[section]:
        options = {
            option: other.get(type(default), lambda x: x + "a")(default)
            for option, default in parts.options_of(section, name).items()
        }
        given = [f".{section}.{option}={value}" for option, value in options.items()]
        after = parsed("=cifar100:bam_exact", f".{section}.name={name}", *given)[section]
        assert {x: after[x] for x in options} == options


@pytest.mark.parametrize("name", NAMES["model"])
def test_a_network_that_a_flag_names_alone_is_as_its_maker_makes_it(name):
    model = parsed("=cifar10:dp_sgd", f".model.name={name}").model
    resnet9 = {"weight_standardisation": "centre"} if name == "resnet9" else {}  # the config's own
    assert parts.make_model(model, 10) == models.MODELS[name].make(10, **resnet9)


def num_params(model, num_classes=100):
    network = models.as_functions(parts.make_model(model, num_classes), (32, 32, 3))
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


def test_a_wide_resnet_in_place_of_a_resnet9_is_the_one_of_the_paper():
    model = parsed("=cifar100:bam_sam", ".model.name=wide_resnet").model
    assert num_params(model) == num_params(imagenet32.get_config().model) == 2_776_948
    model.width = cifar10.get_config().model.width  # the control: the channels of the ResNet-9
    assert num_params(model) == 700_109_428


def test_the_other_network_of_imagenet32_is_the_one_of_its_authors():
    model = parsed("=imagenet32:bam_sam", ".model.name=wide_resnet_bam").model
    assert parts.make_model(model, 10) == WideResNetBam(10)
    assert parts.make_model(imagenet32.get_config().model, 10) == WideResNet(10)


def test_a_method_that_a_flag_names_has_its_own_strength_and_a_config_sets_another():
    assert parsed("=cifar10:bam_sam", ".method.name=dp_sat").method.radius == 0.05
    given = parsed("=cifar10:bam_sam", ".method.name=dp_sat", ".method.radius=0.1")
    assert given.method.radius == 0.1
    assert parsed("=cifar10:dp_sat").method.radius == 0.086


def test_features_that_a_flag_takes_away_leave_no_option():
    config = parsed("=cifar10_scattering", ".features.name=")
    assert parts.make_features(config.features) is None
    assert parsed("=cifar10_scattering").features.whiten == 1.0


def test_bands_are_those_of_the_mechanism_that_is_named():
    file = "tests/test_parts.py:banded"
    assert parsed(f"={file}").mechanism.bands == 4
    assert parsed(f"={file}", ".mechanism.name=poisson").mechanism.bands is None


def get_config(kind):
    """The config of a user's file, of which a part is named in one of several ways."""
    config = config_.get_config("dp_sgd")
    if kind == "banded":
        config.mechanism.update({"name": "banded", "bands": 4})
    if kind == "replaced":
        config.optimizer = ConfigDict({"name": "sgd", "momentum": 0.9})
        config.model = ConfigDict({"name": "wide_resnet"})
        config.augment = {"views": 2}
        config.method = {"name": "bam_sam", "radius": 0.02}
    if kind == "named":
        config_.name_part(config, "optimizer", "sgd", momentum=0.9)
        config_.name_part(config, "model", "wide_resnet")
        config.augment.views = 2
        config_.name_part(config, "method", "bam_sam", radius=0.02)
    if kind == "own":
        config.model = ConfigDict({"name": "tests.test_parts:without_width", "depth": 2})
    return config


def test_a_section_that_a_file_replaces_has_the_keys_of_every_part():
    file = "tests/test_parts.py"
    assert parsed(f"={file}:replaced") == parsed(f"={file}:named")
    optimizer = parsed(f"={file}:replaced", ".optimizer.schedule=linear").optimizer
    assert optimizer.to_dict() == {
        "name": "sgd", "learning_rate": 2e-3, "schedule": "linear", "warmup_steps": 0,
        "momentum": 0.9,
    }  # fmt: skip
    own = parsed(f"={file}:own").model  # a function gets no option that it was not given
    assert own.to_dict() == {"name": "tests.test_parts:without_width", "depth": 2}
    for wrong in (".optimizer.nesterov=true", ".optimizer.schedul=linear"):
        refused("optimizer sgd has no option", parsed, f"={file}:replaced", wrong)


def test_a_section_that_a_flag_replaces_has_the_keys_of_every_part():
    config = parsed("=cifar10:dp_sgd", ".optimizer={'name': 'sgd', 'learning_rate': 1.0}")
    assert config.optimizer.to_dict() == {
        "name": "sgd", "learning_rate": 1.0, "schedule": "constant", "warmup_steps": 0,
    }  # fmt: skip


OPEN = {
    "placeholder": (
        "config_dict.required_placeholder(float)",
        "epsilon",
        "has a required_place",
    ),
    "none": ("ConfigDict({'name': None})", "model", "model.name is None: set --config.model.name="),
    "control": ("ConfigDict({'name': 'linear'})", "model", ""),
}


@pytest.mark.parametrize("kind", OPEN)
def test_a_value_that_a_config_leaves_open_is_refused_in_one_line(kind, tmp_path):
    value, key, message = OPEN[kind]
    (tmp_path / "own.py").write_text(
        "from ml_collections import ConfigDict, config_dict\nfrom configs import digits\n"
        "def get_config(method):\n    config = digits.get_config(method)\n    config.unlock()\n"
        f"    del config[{key!r}]\n    config[{key!r}] = {value}\n    return config\n"
    )
    file = f"--config={tmp_path / 'own.py'}:dp_sgd"
    done = run_command("bam", "train", file, "--config.num_steps=1", "--config.dry_run")
    assert (done.returncode, done.stderr.count("\n")) == ((2, 1) if message else (0, 0))
    assert message in done.stderr


def test_a_section_and_a_key_in_it_are_not_set_together():
    sections = "--config.model={'name': 'resnet9'}", "--config.model.width=3"
    command = ["bam", "train", "--config=digits", *sections, "--config.dry_run"]
    done = run_command(*command)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "--config.model replaces the whole section: set model.width in it" in done.stderr


@pytest.mark.parametrize("shipped", SHIPPED)
def test_every_config_that_is_shipped_has_every_key_of_its_sections(shipped):
    get_config = runpy.run_path(named_configs.file_of(shipped))["get_config"]
    config = rundir.flat(get_config().to_dict())  # before keys are added that it lacks
    assert {key.name for key in keys.KEYS if not key.of_part} - config.keys() == set()


def test_a_config_names_a_part_with_its_options_alone():
    config = cifar10.get_config("dp_sgd")
    config.optimizer.schedule = "cosine"
    config_.name_part(config, "model", "resnet9", symmetries=2)
    config_.name_part(config, "optimizer", "sgd", learning_rate=0.5)
    assert config.model.to_dict() == {"name": "resnet9", "width": 64, "symmetries": 2}
    assert config.optimizer.to_dict() == {
        "name": "sgd", "learning_rate": 0.5, "schedule": "cosine", "warmup_steps": 0,
    }  # fmt: skip
    refused(
        "optimizer sgd has no option 'momentun': did you mean optimizer.momentum",
        config_.name_part, config, "optimizer", "sgd", momentun=0.9,
    )  # fmt: skip


def test_a_build_refuses_a_surplus_option_and_lists_those_that_there_are():
    config = tiny()
    with config.unlocked():
        config.model.symmetries = 2
    refused(r"model linear does not take .* \(its options: none\)", loop.build, config, own_data())


# The table of keys.


def test_what_several_tables_said_of_a_key_stands_in_its_row():
    looked_at = {f"{x}.every" for x in ("eval", "checkpoint", "diagnostics")}
    assert looked_at | {"diagnostics.num_examples", "dry_run"} == keys.CHANGEABLE
    assert keys.PATHS == ("init_from", "dataset.path", "dataset.groups", "features.cache")
    assert set(keys.in_section("dataset")) >= {"source", "path", "num_classes"}
    assert not [x.name for x in keys.KEYS if x.path and x.public]


def test_a_data_set_must_have_the_fields_without_defaults():
    fields = Dataset._fields
    assert SECTIONS["dataset"].returned == tuple(
        x for x in fields if x not in Dataset._field_defaults
    )
