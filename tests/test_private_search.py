"""The command: what it draws once, what it shows, what may be released of it and what not."""

import contextlib
import dataclasses
import io
import json
import re
import shutil
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bam
from bam import files
from bam.cli import privacy, sweep
from bam.data import datasets
from bam.privacy import recorded_plan, selection, statement
from bam.release import export
from bam.sweep import comparison, private_search
from bam.sweep.method_config import method_config
from bam.training import config as base
from bam.training import loading, loop, score
from configs import digits
from tests.cases import digits_of_numbers, made_once, mostly, recomputed, refused, run_command

FILE = str(base.__file__).replace("bam/training/config.py", "configs/digits.py")


def search(
    workdir, *, rates="0.001,0.1", holdout=0, held_out=None, trials=(3.0, 1.0, 10.0), stop=False,
    settings=None, **overrides,
):  # fmt: skip
    """What a search of these settings prints, that reads its data anew."""
    loading.kept_datasets.clear()
    overrides = {"model.name": "linear", "num_steps": 3, "microbatch_size": 64, **overrides}
    study = comparison.make_study(
        lambda method, names: method_config(FILE, method, overrides, private_search.FIXED, names),
        ["dp_sgd"], settings or {"optimizer.learning_rate": rates.split(",")}, holdout,
    )  # fmt: skip
    chosen = selection.Selection(*trials)
    held_out = bool(holdout) if held_out is None else held_out
    grid = {
        label: private_search.as_trial(config, chosen, held_out)
        for label, config in study.groups.items()
    }
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        private_search.search(grid, workdir, lambda: stop, print, sweep.show_plan)
    return printed.getvalue()


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A whole search of three trials, and what it said."""

    def make(folder):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(selection.Selection, "num_trials", lambda self, uniform: 3)
            (folder / "said").write_text(search(folder / "search"))

    folder = made_once(tmp_path_factory, "private_search", make)
    return folder / "search", (folder / "said").read_text()


def test_the_best_score_is_chosen_and_the_total_is_planned(searched):
    workdir, said = searched
    found = json.loads((workdir / "trials.json").read_text())
    scores = [trial["score"] for trial in found["trials"]]
    chosen = (workdir / "chosen").resolve()
    assert chosen.name == str(int(np.argmax(scores)))
    marked = [path.parent.name for path in (workdir / "trials").glob(f"*/{export.CHOSEN}")]
    assert marked == [chosen.name]
    plan = json.loads((chosen / "plan.json").read_text())
    assert plan["mechanism"] == "best_of_trials"
    assert plan["mechanism_options"] == {
        "trials_mean": 3.0, "trials_shape": 1.0, "score_noise_multiplier": 10.0,
    }  # fmt: skip
    keys = ("noise_multiplier", "sampling_prob", "num_steps")
    total = selection.epsilon(
        selection.Selection(3, 1, 10),
        delta=plan["delta"] - plan["overflow"],
        **{key: plan[key] for key in keys},
    )
    assert plan["epsilon"] == total and 2.999 < total <= 3
    for number in range(len(scores)):
        trial = json.loads((workdir / "trials" / str(number) / "plan.json").read_text())
        assert trial["noise_multiplier"] == plan["noise_multiplier"]
        config = json.loads((workdir / "trials" / str(number) / "config.json").read_text())
        assert (config["seed"], config["eval"]["every"]) == (None, 0)
    lines = said.splitlines()
    assert lines[0].startswith("(3, 1e-05)-DP for the whole search: the best of a random number")
    ignored = re.search(r"too little to claim after a search +[\d.]+ +([\d.]+)", said)
    grid = re.search(r"a grid of 3 such trials, by composition +[\d.]+ +([\d.]+)", said)
    assert ignored and grid and float(ignored[1]) < 2.5 < 3 < float(grid[1])


@pytest.mark.parametrize(("mean", "num_steps"), [(2.0, 3), (3.0, 300), (8.0, 300)])
def test_a_search_costs_less_than_its_grid_by_composition(mean, num_steps):
    trials = dataclasses.asdict(selection.Selection(mean, 1.0, 10.0))
    plan = bam.make_plan(
        num_examples=1437, expected_batch_size=256, num_steps=num_steps, epsilon=3.0, delta=1e-5,
        mechanism={"name": "best_of_trials", **trials},
    )  # fmt: skip
    total, grid, one, training = private_search.costs(plan)
    assert training["pld"] < one["pld"] < total["pld"] == plan.epsilon <= 3 < grid["pld"]
    assert total["rdp"] > 1.2 * total["pld"]


def test_nothing_is_shown_of_the_number_of_trials_or_of_those_not_chosen(searched):
    workdir, said = searched
    found = json.loads((workdir / "trials.json").read_text())
    *_, chosen, last = said.splitlines()
    assert "%" not in said and said.count("chosen:") == 1 and "chosen:" in chosen
    assert str(workdir / "chosen") in last
    assert "trials/" not in said  # a folder's number says that there are as many
    best = max(trial["score"] for trial in found["trials"]) / score.unit_of(10.0)
    assert f"about {best:.0f} images" in chosen
    assert stat.S_IMODE(workdir.stat().st_mode) == 0o700


def test_the_same_command_draws_nothing_again(searched):
    workdir, _ = searched
    before = (workdir / "trials.json").read_bytes()
    search(workdir)
    assert (workdir / "trials.json").read_bytes() == before
    for changed in ({"trials": (3.0, 0.0, 10.0)}, {"ema_decay": 0.5}, {"rates": "0.1"}):
        with pytest.raises(ValueError, match="is of another search"):
            search(workdir, **changed)


def test_a_search_that_is_done_keeps_no_key_of_its_data(searched, tmp_path):
    path = searched[0] / "trials.json"
    found = files.read_json(path)
    assert "data_key" not in found and len(found["data"]) == 32
    assert not list(searched[0].rglob("data_key"))
    copy = shutil.copytree(searched[0], tmp_path / "s", symlinks=True)
    files.write_json(copy / "trials.json", found | {"data_key": "00" * 32})  # of 0.2.0
    search(copy)
    assert files.read_json(copy / "trials.json") == found
    found["trials"][0]["score"] = None  # a search that goes on needs it
    files.write_json(copy / "trials.json", found)
    with pytest.raises(ValueError, match="is of another search"):
        search(copy)


MISSING = [(rows, path) for rows in (150, 0) for path in ("none", "some", "all")]


@pytest.mark.parametrize(
    ("judged_on", "path"), mostly(MISSING, slow=[x for x in MISSING if x[1] == "some"])
)
def test_no_missing_value_in_the_data_decides_whether_a_search_ends(path, judged_on, tmp_path):
    missing = {"dataset.name": "tests.cases:digits_of_numbers", "dataset.path": path}
    said = search(tmp_path / "s", holdout=judged_on, trials=(1.01, 1.0, 10.0), **missing)
    held_out = datasets.hold_out(digits_of_numbers(path), 150).test.images
    assert np.isnan(held_out).any() == (path != "none")
    assert "chosen:" in said and "diverged" not in said
    export.export(tmp_path / "s" / "chosen", tmp_path / "out")
    for trial in (tmp_path / "s" / "trials").iterdir():
        assert ("figures" in files.read_json(trial / "summary.json")) == (not judged_on)
    if judged_on:  # no figure of a held-out image but the noised score
        for trial in (tmp_path / "s" / "trials").iterdir():
            text = (trial / "metrics.jsonl").read_text()
            assert text.count("\n") == 1 and "test_" not in text
            assert files.read_json(trial / "summary.json")["test_accuracy"] is None
            assert "test_loss" not in files.read_json(trial / "summary.json")
        text = (tmp_path / "out" / "PRIVACY.md").read_text()
        tested = statement.render({"tests": "none"}, "tested")
        assert f"| accuracy on test examples | {tested};" in text


def test_an_image_changes_the_score_by_one_at_most_whatever_it_is():
    config = digits.get_config("dp_sgd")
    config.accountant, config.model.name, config.num_steps = "rdp", "linear", 1
    dataset = digits_of_numbers("none")
    experiment = loop.build(config, dataset)
    params = experiment.init(0).params
    split = datasets.Split(*(x[:100] for x in dataset.train))
    before = score.num_correct(experiment, params, split)
    for number in (np.nan, np.inf, -np.inf, 3e38):
        for row in (0, 50):
            images = split.images.copy()
            images[row] = number
            changed = score.num_correct(experiment, params, split._replace(images=images))
            assert abs(changed - before) <= 1
    everything = split._replace(images=np.full_like(split.images, np.nan))
    assert score.num_correct(experiment, params, everything) == 0
    diverged = jax.tree.map(lambda x: x * np.nan, params)
    assert score.num_correct(experiment, diverged, split) == 0


def test_a_search_that_is_stopped_goes_on_with_the_trials_it_drew(tmp_path):
    moved = tmp_path / "moved.txt"
    data = {"dataset.name": "tests.cases:digits_moved_by", "dataset.path": str(moved)}
    moved.write_text("0")
    stopped = search(tmp_path / "s", stop=True, **data)
    assert stopped.endswith("stopped; the same command continues it\n")
    path = tmp_path / "s" / "trials.json"
    drawn = [trial["setting"] for trial in json.loads(path.read_text())["trials"]]
    assert not (tmp_path / "s" / "chosen").exists()
    moved.write_text("1")
    with pytest.raises(ValueError, match="is of another search"):
        search(tmp_path / "s", **data)
    moved.write_text("0")
    found = files.read_json(path)  # as another version of the accountant might have planned it
    found["plan"]["noise_multiplier"] = np.nextafter(found["plan"]["noise_multiplier"], np.inf)
    files.write_json(path, found)
    shutil.rmtree(tmp_path / "s" / "trials", ignore_errors=True)
    search(tmp_path / "s", **data)
    trials = json.loads(path.read_text())["trials"]
    assert [trial["setting"] for trial in trials] == drawn
    planned = files.read_json(tmp_path / "s" / "chosen" / "plan.json")["noise_multiplier"]
    assert planned == found["plan"]["noise_multiplier"]
    assert None not in [trial["score"] for trial in trials]


def test_the_chosen_trial_is_released_with_the_total_and_no_other_is_released(searched, tmp_path):
    workdir, _ = searched
    chosen = (workdir / "chosen").resolve()
    export.export(workdir / "chosen", tmp_path / "out")
    text = (tmp_path / "out" / "PRIVACY.md").read_text()
    epsilon = json.loads((chosen / "plan.json").read_text())["epsilon"]
    assert statement.render({"seeded": False, "epsilon": 3, "delta": "1e-05"}, "claim") in text
    assert f"| ε, rounded up | 3 | {epsilon} |" in text
    facts = {"searched": True, "trials_mean": 3, "exact_trials_mean": 3.0}
    facts |= {"trials_shape": 1.0, "score_noise": 10.0, "settings_answered": False}
    for name in ("chosen_on_these_data", "search_rows", "settings_chosen", "run_chosen"):
        assert statement.render(facts, name) in text
    assert "bam privacy" not in text  # it knows single runs alone
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["mechanism"]["trials_mean"] == 3.0
    plan = recorded_plan.read_plan(tmp_path / "out" / "plan.json")
    assert plan.to_json().items() <= files.read_json(chosen / "plan.json").items()
    message = "the privacy loss of mechanism best_of_trials is not composed with others"
    refused(message, privacy.account_for_all, [str(tmp_path / "out")], None, "")
    others = [path for path in (workdir / "trials").iterdir() if path != chosen]
    for other in others:
        with pytest.raises(ValueError, match="one trial of a private search, and not the chosen"):
            export.export(other, tmp_path / "other")
    assert others and not (tmp_path / "other").exists()
    exact = json.loads((chosen / "summary.json").read_text())["test_accuracy"]
    for path in (tmp_path / "out").iterdir():
        assert repr(exact).encode() not in path.read_bytes()


def test_the_statement_s_lines_print_the_total_that_it_claims(searched, tmp_path):
    export.export(searched[0] / "chosen", tmp_path / "out")
    text = (tmp_path / "out" / "PRIVACY.md").read_text()
    claimed = float(re.search(r"They print ([\d.]+),", text, re.MULTILINE)[1])
    assert recomputed(text) == pytest.approx(claimed, rel=1e-9)


def test_records_of_a_choice_that_claim_too_little_are_refused(searched, tmp_path):
    for number, change in enumerate(
        (
            {"mechanism": "poisson", "mechanism_options": {}},
            {"mechanism_options": {"trials_mean": 30.0}},
            {"noise_multiplier": 1.0},
        )
    ):
        run = shutil.copytree((searched[0] / "chosen").resolve(), tmp_path / str(number))
        for name in ("plan", "summary"):
            found = files.read_json(run / f"{name}.json")
            for key, value in change.items():
                found[key] = found[key] | value if value and isinstance(value, dict) else value
            files.write_json(run / f"{name}.json", found)
        with pytest.raises(ValueError, match=r"its plan gives|not that of the run's last step"):
            export.export(run, tmp_path / "out")


def test_an_error_of_a_trial_does_not_say_its_number(tmp_path, monkeypatch):
    def train(trainer, seed, folder, **options):
        raise bam.InputError(f"{folder} is damaged")

    monkeypatch.setattr(loop, "train", train)
    with pytest.raises(ValueError, match=r"a trial of .*/s is damaged") as refused:
        search(tmp_path / "s")
    assert "trials/" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"held_out": True}, "--score=held_out and --holdout=N belong together"),
        ({"holdout": 9, "held_out": False}, "belong together"),
        ({"seed": 1}, "sets seed itself"),
        ({"accountant": "gdp"}, "accountant gdp is asymptotic"),
        (
            {"accountant": "rdp", "trials": (3.0, -0.5, 10.0)},
            "accountant rdp needs trials_shape from 0",
        ),
        ({"checkpoint.every": 0}, "releases a checkpoint: set --config.checkpoint.every"),
        ({"trials": (3.0, np.inf, 10.0)}, "trials_shape must be above -1"),
        ({"trials": (3.0, 1.0, 0.1)}, "the choice alone costs epsilon"),
        ({"epsilon": np.inf}, "no privacy at epsilon inf"),
        (
            {"mechanism.bands": 3},
            "for Poisson batches, not .*bands=3.*: use --config.mechanism.name=poisson",
        ),
        ({"mechanism.name": "full_batch"}, "for Poisson batches, not full_batch"),
    ],
)
def test_a_mistaken_private_search_draws_nothing(given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        search(tmp_path / "s", **given)
    assert not (tmp_path / "s").exists()


def command(workdir, *more):
    return run_command(
        "bam", "sweep", "--config=digits", "--methods=dp_sgd", f"--workdir={workdir}",
        "--config.model.name=linear", "--config.num_steps=3", "--config.microbatch_size=64", *more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (("--private", "--num_seeds=3"), "leave out --best and --num_seeds"),
        (("--noprivate",), "need --private"),
        (
            ("--private", "--smaller=4"),
            "leave out --smaller and --out",
        ),  # its ε would be ten times as large
        (("--private", "--out=table"), "leave out --smaller and --out"),
        (("--private", "--set=accountant=pld,rdp"), "all settings must have one plan"),
        (("--private", "--set=eval.every=1,2"), "--private sets eval.every: leave it out"),
    ],
)
def test_flags_that_a_private_search_has_no_use_for_are_one_line(flag, message, tmp_path):
    done = command(tmp_path / "s", "--trials_mean=3", *flag)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "s").exists()


def test_a_search_that_is_stopped_says_so_by_its_exit_status(tmp_path):
    done = command(tmp_path / "s", "--private", "--max_seconds=0.001")
    assert (done.returncode, done.stderr) == (
        3,
        "",
    ) and "the same command continues it" in done.stdout


DAMAGES = {
    "no trials": lambda drawn: drawn.pop("trials"),
    "an empty list": lambda drawn: drawn.update(trials=[]),
    "a number": lambda drawn: drawn.update(trials=3),
    "a list of numbers": lambda drawn: drawn.update(trials=[3]),
    "no score": lambda drawn: drawn["trials"][0].pop("score"),
    "a text for a score": lambda drawn: drawn["trials"][0].update(score="1"),
    "a flag for a score": lambda drawn: drawn["trials"][0].update(score=True),
    "a list for a setting": lambda drawn: drawn["trials"][0].update(setting=[1]),
    "a key that is none": lambda drawn: drawn.update(data_key="zz"),
    "a number for a plan": lambda drawn: drawn.update(plan=3),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_a_search_has_drawn_is_read_whole_or_refused_in_one_line(damage, searched, tmp_path):
    path = tmp_path / "trials.json"
    drawn = files.read_json(searched[0] / "trials.json")
    DAMAGES[damage](drawn)
    files.write_json(path, drawn)
    with pytest.raises(bam.InputError, match=r"trials\.json is damaged.* its ε adds") as refused:
        search(tmp_path)
    assert "\n" not in str(refused.value) and list(tmp_path.iterdir()) == [path]


def test_a_setting_that_the_grid_lacks_is_of_another_search(searched, tmp_path):
    drawn = files.read_json(searched[0] / "trials.json")
    drawn["trials"][0]["setting"] = "x"
    files.write_json(tmp_path / "trials.json", drawn)
    with pytest.raises(bam.InputError, match="is of another search"):
        search(tmp_path)


def test_settings_of_other_plans_with_equal_noise_are_refused(tmp_path, monkeypatch):
    """The search's ε is one plan's: another number of steps has another."""
    build = loop.build

    def with_equal_noise(config, **options):
        trainer = build(config, **options)
        equal = dataclasses.replace(trainer.plan, noise_multiplier=9.0)
        mean = dataclasses.replace(trainer.parts.gradient.mean, noise_multiplier=9.0)
        gradient = dataclasses.replace(trainer.parts.gradient, mean=mean)
        parts = dataclasses.replace(trainer.parts, gradient=gradient)
        return dataclasses.replace(trainer, plan=equal, parts=parts)

    monkeypatch.setattr(loop, "build", with_equal_noise)
    steps = {"optimizer.learning_rate": ["0.1"], "num_steps": ["3", "30"]}
    with pytest.raises(
        bam.InputError, match="all settings must have one plan: remove what changes"
    ):
        search(tmp_path / "s", settings=steps)
    search(tmp_path / "s", settings=steps | {"num_steps": ["3"]}, stop=True)  # the control


def test_the_data_of_every_setting_are_compared_when_a_search_goes_on(tmp_path):
    moved = [tmp_path / name for name in ("a", "b")]
    for path in moved:
        path.write_text(path.name.replace("a", "0").replace("b", "1"))
    data = {"dataset.name": "tests.cases:digits_moved_by"}
    settings = {"dataset.path": [str(path) for path in moved]}
    for path in (None, *moved):
        if path:
            text = path.read_text()
            path.write_text("2")
            with pytest.raises(bam.InputError, match="is of another search"):
                search(tmp_path / "s", settings=settings, stop=True, **data)
            path.write_text(text)
        search(tmp_path / "s", settings=settings, stop=True, **data)


def test_a_delta_that_pld_cannot_resolve_leaves_its_column_empty(tmp_path):
    said = search(tmp_path / "s", stop=True, delta=1e-30, accountant="rdp")
    rows = re.findall(r"^ (a grid|one such|its training).* ([0-9.]+) +(\S+)", said, re.M)
    assert [row[2] for row in rows] == ["–"] * 3 and float(rows[0][1]) > 0


def test_a_trial_is_scored_on_held_out_images_if_told_though_it_trains_a_part(tmp_path):
    part = "--config.trainable=bias"  # it is scored as the whole model
    held_out = ("--score=held_out", "--holdout=150", "--trials_mean=1.01", part)
    done = command(tmp_path / "s", "--private", *held_out)
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "s" / "chosen" / "plan.json").read_text())
    assert plan["num_examples"] == 1437 - 150
    export.export(tmp_path / "s" / "chosen", tmp_path / "out")
    text = (tmp_path / "out" / "PRIVACY.md").read_text()
    assert statement.render({"holdout": "covered", "num_held_out": 150}, "held_out") in text


def test_the_number_of_correct_predictions_is_that_of_the_whole_split():
    config = digits.get_config("dp_sgd")
    config.accountant, config.model.name, config.num_steps = "rdp", "linear", 1
    experiment = loop.build(config)
    params = experiment.init(0).params
    whole = experiment.dataset.test
    found = score.num_correct(experiment, params, whole)
    expected = loop.evaluate(experiment, params)["test_accuracy"] * len(whole.labels)
    assert found == round(expected)
    alone = [
        score.num_correct(experiment, params, datasets.Split(*(x[i : i + 1] for x in whole)))
        for i in range(5)
    ]
    first = datasets.Split(*(x[:5] for x in whole))
    assert sum(alone) == score.num_correct(experiment, params, first)
    assert jnp.isfinite(params["weight"]).all()
