"""Many runs: each is trained once, set beside its baseline by seed, and a study declares them."""

import fcntl
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

import bam
from bam import files
from bam.cli import screen
from bam.privacy.run import PrivateRun
from bam.sweep import comparison, runs, studies
from bam.training import config as base
from bam.training import loop, named_configs, rundir
from configs import digits
from tests import runs as finished_runs
from tests.cases import grid, run_command
from tests.run_folder import saved_steps

TINY = ("--config.model.name=linear", "--config.accountant=rdp", "--config.num_steps=2")


def tiny(seed, **overrides):
    config = digits.get_config("dp_sgd")
    config.model.name = "linear"
    config.update({"seed": seed, "num_steps": 2, "accountant": "rdp"})
    config.update_from_flattened_dict(overrides)
    return config


def train(wanted, workdir, should_stop=lambda: False, on_event=None):
    """Trains what is missing, and returns the names of what happened, in order."""
    events = []
    runs.train(wanted, workdir, should_stop, on_event or (lambda name, _: events.append(name)))
    return events


def test_finished_runs_are_not_trained_again_and_seeds_share_one_compilation(tmp_path, monkeypatch):
    built, build = [], loop.build
    counted = lambda *given, **options: built.append(1) or build(*given, **options)  # noqa: E731
    monkeypatch.setattr(loop, "build", counted)
    two = {"a/seed0": tiny(0), "a/seed1": tiny(1)}
    assert train(two, tmp_path) == ["a/seed0", "a/seed1"]
    assert len(built) == 1
    first = (tmp_path / "a/seed0/summary.json").read_bytes()
    assert train(two | {"a/seed2": tiny(2)}, tmp_path) == ["a/seed2"]
    assert (tmp_path / "a/seed0/summary.json").read_bytes() == first
    assert set(runs.read_finished({"a/seed0": tiny(0), "b": tiny(5)}, tmp_path)) == {"a/seed0"}
    with pytest.raises(ValueError, match=r"holds a run with epsilon = 3\.0, not 1\.0"):
        train({"a/seed0": tiny(0, epsilon=1.0)}, tmp_path)


def test_the_bar_names_the_run_and_counts_each_step_while_it_trains(tmp_path, monkeypatch):
    shown, seen = {"description": "", "completed": 0}, []

    class Bar:
        """A bar of progress whose text and steps are kept whenever they change."""

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def add_task(self, text, total):
            return 0

        def update(self, task, **change):
            shown.update({k: x for k, x in change.items() if k in shown})
            seen.append((shown["description"], shown["completed"]))

    monkeypatch.setattr(studies, "progress_bar", lambda disable: Bar())
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    groups = {"a": {"a/seed0": tiny(0)}, "b": {"b/seed0": tiny(1)}}
    studies.run_missing(groups, tmp_path, lambda: False, lambda line: None)
    named = [(text.partition(":")[0], num) for text, num in seen]
    in_order = list(dict.fromkeys(x for x in named if x[0] != "planning" and x[0]))
    assert in_order == [
        *(("a/seed0", num) for num in (0, 1, 2)),
        *(("b/seed0", num) for num in (2, 3, 4)),
    ]


def test_the_text_of_the_bar_is_cut_before_its_numbers():
    out = io.StringIO()
    screen_of_80 = Console(file=out, force_terminal=True, width=80, color_system=None)
    with studies.progress_bar(console=screen_of_80, auto_refresh=False) as bar:
        bar.add_task("cifar10_medium_bam_sam_epsilon=10/seed0: compiling", total=3600)
        bar.refresh()
    assert "cifar10_medium_bam_sam_epsilon=10/seed0" in out.getvalue()
    assert "0/3600 steps" in out.getvalue()


def test_a_lock_of_a_folder_that_was_removed_since_is_no_lock(tmp_path, monkeypatch):
    flock = fcntl.flock

    def removed_before(file, operation):
        (tmp_path / "lock").unlink()
        (tmp_path / "lock").touch()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    with pytest.raises(BlockingIOError):
        files.lock(tmp_path)


def test_a_stopped_run_goes_on_where_it_stopped_and_others_wait(tmp_path):
    wanted, events = {"a": tiny(0), "b": tiny(1)}, []
    # Asked after building each run, before a, after its steps 0 and 1.
    answers = iter([False, False, False, False, True])
    train(wanted, tmp_path, lambda: next(answers), lambda *event: events.append(event))
    assert events == [("a", "stopped after step 1 of 2")]
    assert runs.read_finished(wanted, tmp_path) == {}
    assert train(wanted, tmp_path) == ["a", "b"]
    assert saved_steps(tmp_path / "a")[-1] == 2


def test_a_run_that_another_process_trains_is_left_to_it(tmp_path):
    events = []

    def intrude():
        events.extend(train({"a": tiny(0), "b": tiny(1)}, tmp_path))
        return True

    with pytest.raises(loop.StoppedError):
        loop.train(loop.build(tiny(0)), 0, tmp_path / "a", should_stop=intrude)
    assert events == ["b", "a"]  # trained what was free, then said what was not


def test_a_run_that_becomes_free_is_trained_after_all(tmp_path):
    trainer, events = loop.build(tiny(0)), []
    holder = PrivateRun(trainer.plan, 0)
    holder.open(tmp_path / "a", trainer.record)

    def on_event(name, text):
        events.append(name)
        holder.close()  # the other process ends while this one trains b

    train({"a": tiny(0), "b": tiny(1)}, tmp_path, on_event=on_event)
    assert events == ["b", "a"]
    assert set(runs.read_finished({"a": tiny(0), "b": tiny(1)}, tmp_path)) == {"a", "b"}


def test_a_mistake_in_the_last_run_costs_no_training_of_the_first(tmp_path):
    with pytest.raises(ValueError, match="expected_batch_size"):
        train({"a": tiny(0), "b": tiny(0, expected_batch_size=0)}, tmp_path)
    assert not (tmp_path / "a").exists()


def rows_of(path):
    """Label -> row of what a study wrote, whose gains are those of its accuracies."""
    made = json.loads(path.read_text())
    assert made["commit"] and made["versions"]["jax"]
    rows = {row["label"]: row for row in made["rows"]}
    for row in rows.values():
        assert row["config"]["seed"] is None and row["config"]["dataset"]["path"] == ""
        if row["gain"]:
            theirs = rows[row["baseline"]]["accuracies"]
            pairs = zip(row["accuracies"], theirs, strict=True)
            gain = comparison.estimate([ours - other for ours, other in pairs])
            assert row["gain"]["mean"] == pytest.approx(gain.mean)
    return rows


def test_a_sweep_trains_what_is_missing_pairs_by_seed_and_draws_the_bias(tmp_path):
    command = ("bam", "sweep", "--config=digits", "--methods=dp_sgd,bam_sam:0.5",
               "--set=optimizer.learning_rate=0.001,0.01", "--holdout=300",
               "--config.diagnostics.every=1", "--config.diagnostics.num_examples=16",
               f"--workdir={tmp_path}", *TINY)  # fmt: skip
    stopped = run_command(*command, "--num_seeds=1", "--max_seconds=0.001")
    assert stopped.returncode == 3 and "4 runs are not finished" in stopped.stdout
    best = run_command(*command, "--num_seeds=2", "--best=1")
    assert best.returncode == 0, best.stderr
    assert best.stdout.count("% in ") == 4 + 2  # all settings, then second seeds of the best
    rows = rows_of(tmp_path / "sweep.json")
    assert [label.split(" ")[0] for label in rows] == ["dp_sgd", "bam_sam:0.5"]
    baseline, other = rows.values()
    assert other["baseline"] == baseline["label"] and baseline["gain"] is None
    assert baseline["seeds"] == other["seeds"] == [1000, 1001]
    folder = tmp_path / "bam_sam_0.5_optimizer.learning_rate=0.01/seed1000"
    config = json.loads((folder / "config.json").read_text())
    assert (config["method"]["radius"], config["optimizer"]["learning_rate"]) == (0.5, 0.01)
    assert config["dataset"]["holdout"] == 300
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["sampling_prob"] == 256 / (1437 - 300)
    assert studies.LEGEND in best.stdout.splitlines()
    assert "NOT PRIVATE" in best.stdout
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
    head = (tmp_path / "sweep.md").read_text().splitlines()[0]
    assert head.endswith("| ‖bias‖ | ‖ĝ‖ | ratio | cosine | seconds |")


FILE = str(base.__file__).replace("bam/training/config.py", "configs/digits.py")


def test_every_setting_stands_beside_the_baseline_at_the_same():
    study = grid("dp_sgd,bam_sam:0.5", ["optimizer.learning_rate=0.001,0.01"])
    assert len(study.groups) == 4
    for label in study.groups:
        assert study.baseline(label) == label.replace("bam_sam:0.5", "dp_sgd")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"methods": "dp_sgd:1"}, "--methods=dp_sgd:1: dp_sgd has no strength"),
        ({"methods": "bam_sam:x"}, "'x' is not a number"),
        ({"methods": "dp_sgd,bam_sam:0.1,bam_sam:0.10"}, "bam_sam:0.10 repeats another group"),
        ({"settings": ["clip_norm=1,1.0"]}, "dp_sgd clip_norm=1.0 repeats another group"),
        ({"settings": ["learning_rate=1"]}, "the config has no key 'learning_rate'"),
        ({"settings": ["clip_norm"]}, "--set=clip_norm is not KEY=VALUE,VALUE"),
        ({"settings": ["clip_norm=much"]}, "clip_norm=much"),
        ({"settings": ["seed=1,2"]}, "--set=seed=1,2: seed is set twice, or by this command"),
        ({"seed": 3}, "sets seed itself"),
        ({"no_such": 3}, "no_such"),
        ({"dataset.holdout": 9}, "sets dataset.holdout itself"),
        ({"smaller": 3}, "--config.expected_batch_size that it divides, not 256"),
    ],
)
def test_a_slip_is_said_before_any_work(given, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")) as refused:
        grid(**given)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--methods=", "--methods is required"),
        ("--config.seed=3", "sets seed itself"),
        (
            "--metric=f1",
            "the loss cross_entropy has no metric 'f1'; choose --metric from accuracy, auroc, ",
        ),
    ],
)
def test_a_slip_of_a_command_is_one_line_before_any_work(flag, message, tmp_path):
    done = run_command("bam", "sweep", "--config=digits", flag, f"--workdir={tmp_path}/w", *TINY)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "w").exists()


def test_smaller_batches_have_as_much_noise_for_an_example():
    [config] = grid(holdout=200, smaller=4).groups.values()
    plan = bam.make_plan(
        num_examples=1237, expected_batch_size=256, num_steps=3, epsilon=3.0, delta=1e-5,
    )  # fmt: skip
    smaller = loop.build(config).plan
    assert smaller.expected_batch_size == 64
    assert smaller.noise_multiplier / 64 == pytest.approx(plan.noise_multiplier / 256, rel=1e-3)
    assert smaller.epsilon > 3 * plan.epsilon


def test_values_have_the_type_of_their_key():
    config = base.get_config("bam_sam")
    for key, text, value in (
        ("clip_norm", "2", 2.0), ("num_steps", "7", 7), ("model.name", "linear", "linear"),
        ("optimizer.learning_rate", "1e-3", 1e-3), ("model.width", "8", 8),
    ):  # fmt: skip
        comparison.set_key(config, key, text)
        found = rundir.flat(config.to_dict())[key]
        assert found == value and type(found) is type(value)


STUDIES = {  # command -> its arguments, number of groups, a column
    "logistic": (("--out=OUT/study", "--num_seeds=2", "--epsilons=5"), 2, "paired gain"),
    "reproduce": (
        ("--datasets=digits", "--epsilons=8", "--methods=dp_sgd,bam_sam", "--num_seeds=2"),
        2,
        "paper, % ± SD",
    ),
}
NOT_TINY = {
    "logistic": ("--config.accountant=rdp", "--config.num_steps=1"),
}


@pytest.mark.parametrize("name", [*STUDIES])
def test_every_study_trains_its_groups_and_sets_them_beside_each_other(name, tmp_path):
    arguments, num_groups, column = STUDIES[name]
    arguments = [x.replace("OUT", str(tmp_path)) for x in (*arguments, *NOT_TINY.get(name, TINY))]
    done = run_command(f"scripts.paper.{name}", f"--workdir={tmp_path}", *arguments, timeout=600)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert studies.LEGEND in printed
    assert any(line.startswith("paper: mean ± SD") for line in printed) == (name == "reproduce")
    [made] = [p for p in tmp_path.glob("*.json") if p.name in ("study.json", "table1.json")]
    rows = rows_of(made)
    assert len(rows) == num_groups
    assert f"| {column} |" in made.with_suffix(".md").read_text().splitlines()[0]
    [picture] = tmp_path.glob("*.png")
    assert picture.stat().st_size > 10_000
    assert printed[-1] == f"picture: {picture}"


@pytest.mark.parametrize(
    ("name", "flag", "message"),
    [
        ("reproduce", "--datasets=cifar11", "no config configs/cifar11.py"),
        ("reproduce", "--config.epsilon=3", "sets epsilon itself"),
        ("reproduce", "--methods=bam_sam", "--methods must contain dp_sgd"),
        ("logistic", "--out=", "--out is required"),
        ("figures", "--methods=dp_sgd:1", "dp_sgd has no strength"),
    ],
)
def test_a_mistaken_study_is_one_line_and_writes_nothing(name, flag, message, tmp_path):
    more = {"reproduce": "--datasets=digits", "figures": "--figure=2"}.get(name, "--out=o")
    given = [flag] if more.partition("=")[0] == flag.partition("=")[0] else [more, flag]
    done = run_command(f"scripts.paper.{name}", *given, f"--workdir={tmp_path}/w")
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "w").exists()


def table_1_row(num_seeds=3, name="cifar10_medium", gain=-1.1):
    """A row of Table 1, as a study of the paper writes it."""
    half = None if num_seeds == 1 else 0.32
    return {
        "label": f"{name} bam_sam ε=10", "name": name, "method": {"name": "bam_sam"},
        "metric": "accuracy", "baseline": f"{name} dp_sgd ε=10", "epsilon": 10.0,
        "target_epsilon": 10.0, "paper": (79.7, 0.13), "paper_gain": 1.1,
        "seeds": list(range(num_seeds)), "accuracy": {"mean": 68.2, "half_width": half},
        "gain": {"mean": gain, "half_width": half, "num": num_seeds},
        "p": None if num_seeds == 1 else 0.004,
        "minimum_detectable_effect": 0.7, "seconds": 361.2, **dict.fromkeys(comparison.MEASURED),
    }  # fmt: skip


def test_table_1_shows_our_gain_beside_the_papers_in_80_columns(monkeypatch, capsys):
    from scripts.paper import reproduce

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    rows = [table_1_row()]
    columns = studies.columns(reproduce.COLUMNS, rows)
    always = [*studies.main_columns(columns, rows), "paper's gain"]
    assert always == ["accuracy, %", "paired gain", "p", "paper's gain"]
    screen.table(columns, rows, file=Path("table1.md"), always=always)
    shown = capsys.readouterr().out
    assert "-1.10 ± 0.32" in shown and "+1.1 " in shown and "68.20 ± 0.32" in shown
    assert "79.70" not in shown and "< 0.01" in shown
    assert max(map(len, re.sub(r"\x1b\[[\d;]*m", "", shown).splitlines())) <= 80


def test_a_gain_of_one_seed_is_said_to_say_nothing(tmp_path):
    line = "one seed: a difference between single runs says nothing"
    assert studies.remarks([table_1_row(num_seeds=1), table_1_row()]) == [line]
    assert studies.remarks([table_1_row(), table_1_row() | {"gain": None}]) == []  # the control


def test_table_1_of_another_network_says_so():
    from scripts.paper import reproduce

    for name in ("cifar10", "cifar10_small", "digits"):
        config = named_configs.load(f"configs/{name}.py:dp_sgd")
        line = reproduce.other_network(name, config)
        assert line.startswith("cifar10_small is not") == (name == "cifar10_small"), line
        assert bool(line) == (name == "cifar10_small")


@pytest.mark.parametrize(("num", "title"), [(1, "1 seed, no intervals"), (3, "3 seeds, 95 %")])
def test_a_picture_of_one_seed_has_no_intervals(num, title, tmp_path, monkeypatch):
    from scripts.paper import reproduce

    drawn = []
    monkeypatch.setattr(reproduce.plot, "save", lambda figure, path: drawn.append(figure))
    reproduce.draw([table_1_row(num)], tmp_path / "x.png")
    [figure] = drawn
    assert f"cifar10_medium, {title}" in figure.get_suptitle()
    left = figure.axes[0]
    assert [x.has_yerr for x in left.containers] == [num > 1]
    reproduce.plt.close(figure)


def test_the_papers_numbers_stand_beside_ours():
    from scripts.paper import reproduce

    column = reproduce.COLUMNS["paper, % ± SD"]
    assert column({"paper": (68.2, 0.27)}) == "68.2 ± 0.27"
    assert column({"paper": (14.7, None)}) == "14.70"
    assert column({"paper": None}) == "–"
    best = {e: max(of, key=lambda m: of[m][0]) for e, of in reproduce.TABLE_1["cifar10"].items()}
    assert best == dict.fromkeys((1.0, 2.0, 10.0), "bam_sam")


def test_a_comparison_takes_a_run_that_diverged_for_the_worst(tmp_path, tmp_path_factory):
    found = {}
    for name, run in (("good", "diagnosed"), ("bad", "diverged")):
        folder = finished_runs.copy(tmp_path_factory, run, tmp_path / name)
        found[name] = {0: runs.read(folder)}
    config = finished_runs.tiny()
    compared = comparison.Study({"good": config, "bad": config}, lambda label: "good")
    good, bad = (comparison.summary_row(compared, name, found) for name in ("good", "bad"))
    json.dumps([good, bad], allow_nan=False)
    assert bad["accuracy"]["mean"] == 0 < good["accuracy"]["mean"]
    assert bad["gain"]["mean"] == -good["accuracy"]["mean"]
    rows = [{"step": step, "not_private/snr": value} for step, value in ((1, None), (2, 3.0))]
    assert comparison.mean_diagnostic({0: found["bad"][0]._replace(rows=rows)}, "snr") == [3.0]
    assert comparison.mean_diagnostic({0: found["bad"][0]._replace(rows=rows[:1])}, "snr") == []
