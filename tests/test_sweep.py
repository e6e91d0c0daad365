"""Many runs: each is trained once, set beside its baseline by seed, and a study declares them."""

import fcntl
import json

import jax
import jax.numpy as jnp
import pytest

import bam
from bam.cli import study, sweeps
from bam.sweep import comparison
from bam.training import config as base
from bam.training import loop, rundir
from configs import digits
from tests.cases import run_command

TINY = ("--config.model.name=linear", "--config.accountant=rdp", "--config.num_steps=2")


def tiny(seed, **overrides):
    config = digits.get_config("dp_sgd")
    config.model.name = "linear"
    config.update({"seed": seed, "num_steps": 2, "accountant": "rdp"})
    config.update_from_flattened_dict(overrides)
    return config


def test_finished_cells_are_not_trained_again_and_seeds_share_one_compilation(
    tmp_path, monkeypatch
):
    built, events = [], []
    build = loop.build
    monkeypatch.setattr(loop, "build", lambda config: built.append(1) or build(config))

    def run(all_cells):
        sweeps.run(all_cells, tmp_path, lambda: False, lambda name, text: events.append(name))

    run({"a/seed0": tiny(0), "a/seed1": tiny(1)})
    assert events == ["a/seed0", "a/seed1"]
    assert len(built) == 1
    first = (tmp_path / "a/seed0/summary.json").read_bytes()
    run({"a/seed0": tiny(0), "a/seed1": tiny(1), "a/seed2": tiny(2)})
    assert events == ["a/seed0", "a/seed1", "a/seed2"]
    assert (tmp_path / "a/seed0/summary.json").read_bytes() == first
    assert set(sweeps.finished({"a/seed0": tiny(0), "b": tiny(5)}, tmp_path)) == {"a/seed0"}

    with pytest.raises(ValueError, match=r"holds a run with epsilon = 3\.0, not 1\.0"):
        run({"a/seed0": tiny(0, epsilon=1.0)})


def test_a_lock_of_a_folder_that_was_removed_since_is_no_lock(tmp_path, monkeypatch):
    flock = fcntl.flock

    def removed_before(file, operation):
        (tmp_path / "lock").unlink()
        (tmp_path / "lock").touch()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    with pytest.raises(BlockingIOError):
        rundir.lock(tmp_path)


def test_a_stopped_cell_goes_on_where_it_stopped_and_others_wait(tmp_path):
    all_cells, events = {"a": tiny(0), "b": tiny(1)}, []
    # Asked after building each cell, before a, after its steps 0 and 1.
    answers = iter([False, False, False, False, True])

    def run(should_stop):
        sweeps.run(all_cells, tmp_path, should_stop, lambda name, text: events.append((name, text)))

    run(lambda: next(answers))
    assert events == [("a", "stopped after step 1 of 2")]
    assert sweeps.finished(all_cells, tmp_path) == {}
    run(lambda: False)
    assert [name for name, _ in events] == ["a", "a", "b"]
    assert (tmp_path / "a/checkpoints/2").is_dir()


def test_a_cell_that_another_process_trains_is_left_to_it(tmp_path):
    experiment = loop.build(tiny(0))
    events = []

    def intrude():
        sweeps.run(
            {"a": tiny(0), "b": tiny(1)}, tmp_path, lambda: False,
            lambda name, text: events.append(name),
        )  # fmt: skip
        return True

    with pytest.raises(loop.StoppedError):
        loop.train(experiment, 0, tmp_path / "a", should_stop=intrude)
    assert events == ["b", "a"]  # trained what was free, then said what was not


def test_a_cell_that_becomes_free_is_trained_after_all(tmp_path):
    experiment, events = loop.build(tiny(0)), []
    holder = rundir.RunFiles(tmp_path / "a", experiment.config, experiment.plan)

    def on_event(name, text):
        events.append(name)
        holder.__exit__()  # the other process ends while this one trains b

    sweeps.run({"a": tiny(0), "b": tiny(1)}, tmp_path, lambda: False, on_event)
    assert events == ["b", "a"]
    assert set(sweeps.finished({"a": tiny(0), "b": tiny(1)}, tmp_path)) == {"a", "b"}


def test_a_mistake_in_the_last_cell_costs_no_training_of_the_first(tmp_path):
    with pytest.raises(ValueError, match="expected_batch_size"):
        sweeps.run(
            {"a": tiny(0), "b": tiny(0, expected_batch_size=0)}, tmp_path, lambda: False, print
        )
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


def test_a_sweep_trains_what_is_missing_and_pairs_by_seed_at_equal_settings(tmp_path):
    command = ("bam", "sweep", "--config=digits", "--methods=dp_sgd,bam_sam:0.5",
               "--set=optimizer.learning_rate=0.001,0.01", "--holdout=300",
               f"--workdir={tmp_path}", *TINY)  # fmt: skip
    stopped = run_command(*command, "--num_seeds=1", "--max_seconds=0.001")
    assert stopped.returncode == 3 and "4 runs are not finished" in stopped.stdout
    one = run_command(*command, "--num_seeds=1")
    assert one.returncode == 0, one.stderr
    assert one.stdout.count("% in ") == 4
    rows = rows_of(tmp_path / "sweep.json")
    for label, row in rows.items():
        assert row["baseline"] == label.replace("bam_sam:0.5", "dp_sgd")
    best = run_command(*command, "--num_seeds=2", "--best=1")
    assert best.returncode == 0 and best.stdout.count("% in ") == 2  # second seeds of the best
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


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--methods=dp_sgd:1", "dp_sgd takes no strength"),
        ("--methods=", "--methods is required"),
        ("--methods=dp_sgd,bam_sam:0.1,bam_sam:0.10", "bam_sam:0.10 is there twice"),
        ("--set=clip_norm=1,1.0", "dp_sgd clip_norm=1.0 is there twice"),
        ("--set=learning_rate=1", "did you mean optimizer.learning_rate?"),
        ("--set=clip_norm", "KEY=VALUE,VALUE is needed"),
        ("--set=clip_norm=much", "clip_norm=much"),
        ("--set=seed=1,2", "by this command itself"),
        ("--config.seed=3", "sets seed itself"),
        ("--config.no_such=3", "no key 'no_such'"),
        ("--config.dataset.holdout=9", "sets dataset.holdout itself"),
    ],
)
def test_a_slip_is_one_line_before_any_work(flag, message, tmp_path):
    done = run_command("bam", "sweep", "--config=digits", flag, f"--workdir={tmp_path}/w", *TINY)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "w").exists()


def test_smaller_batches_have_as_much_noise_for_an_example(tmp_path):
    done = run_command(
        "bam", "sweep", "--config=configs/digits.py", "--methods=dp_sgd", "--holdout=200",
        "--num_seeds=1", "--smaller=4", "--config.num_steps=3", "--config.model.name=linear",
        f"--workdir={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [row] = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    plan = bam.make_plan(
        num_examples=1237, expected_batch_size=256, num_steps=3, target_epsilon=3.0, delta=1e-5,
        clip_norm=1.0,
    )  # fmt: skip
    assert row["config"]["expected_batch_size"] == 64
    assert row["noise_multiplier"] / 64 == pytest.approx(plan.noise_multiplier / 256, rel=1e-3)
    assert row["epsilon"] > 3 * plan.epsilon
    assert not (tmp_path / "sweep.png").exists()  # no bias was measured: the panels would be empty
    refused = run_command(
        "bam", "sweep", "--config=configs/digits.py", "--methods=dp_sgd", "--smaller=3",
        f"--workdir={tmp_path}/other",
    )  # fmt: skip
    assert "whose expected size it divides: 256" in refused.stderr


def test_values_have_the_type_of_their_key():
    config = base.get_config("bam_sam")
    for key, text, value in (
        ("clip_norm", "2", 2.0), ("num_steps", "7", 7), ("model.name", "linear", "linear"),
        ("optimizer.learning_rate", "1e-3", 1e-3), ("model.width", "8", 8),
    ):  # fmt: skip
        sweeps.set_key(config, key, text)
        found = rundir.flat(config.to_dict())[key]
        assert found == value and type(found) is type(value)


def test_a_sweep_shows_the_bias_that_was_measured_and_draws_it(tmp_path):
    done = run_command(
        "bam", "sweep", "--config=digits", "--methods=dp_sgd,non_private", "--num_seeds=1",
        f"--workdir={tmp_path}", *TINY, "--config.diagnostics.every=1",
        "--config.diagnostics.num_examples=16",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "NOT PRIVATE" in done.stdout
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
    head, _, row, free = (tmp_path / "sweep.md").read_text().splitlines()
    assert head.endswith("| ‖bias‖ | ‖ĝ‖ | ratio | cosine | seconds |")
    assert row.startswith("| dp_sgd | 3 | 1 | ") and free.startswith("| non_private | – | 1 | ")
    assert "| 0.000 |" in free and "| 0.000 |" not in row


OUT = ("--config=digits", "--out=OUT/study", "--num_seeds=1")
STUDIES = {  # command -> its arguments, number of groups, a column
    "correlated": ((*OUT, "--bands=2", "--methods=dp_sgd"), 2, "noise in sums"),
    "logistic": (("--out=OUT/study", "--num_seeds=2", "--epsilons=5"), 2, "paired gain"),
    "strengths": ((*OUT, "--methods=dp_sgd,bam_sam:0.1"), 2, "min. detectable"),
    "batches": (
        (*OUT, "--sizes=128,512", "--methods=dp_sgd", "--config.num_epochs=1"),
        2,
        "cosine",
    ),
    "reproduce": (
        ("--datasets=digits", "--epsilons=8", "--methods=dp_sgd,bam_sam", "--num_seeds=2"),
        2,
        "paper, %",
    ),
}
NOT_TINY = {
    "logistic": ("--config.num_steps=3",),
    "batches": TINY[:2],
}


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_trains_its_groups_and_sets_them_beside_each_other(name, tmp_path):
    arguments, num_groups, column = STUDIES[name]
    arguments = [x.replace("OUT", str(tmp_path)) for x in (*arguments, *NOT_TINY.get(name, TINY))]
    done = run_command(f"scripts.paper.{name}", f"--workdir={tmp_path}", *arguments, timeout=600)
    assert done.returncode == 0, done.stderr
    [made] = [p for p in tmp_path.glob("*.json") if p.name in ("study.json", "table1.json")]
    rows = rows_of(made)
    assert len(rows) == num_groups
    assert f"| {column} |" in made.with_suffix(".md").read_text().splitlines()[0]
    for picture in tmp_path.glob("*.png"):
        assert picture.stat().st_size > 10_000
    drawn = name in ("logistic", "strengths", "batches", "reproduce")
    assert len(list(tmp_path.glob("*.png"))) == drawn
    if name == "batches":
        small, large = (row["config"] for row in rows.values())
        assert large["optimizer"]["learning_rate"] == 4 * small["optimizer"]["learning_rate"]
        assert (large["num_steps"], small["num_steps"]) == (2, 11)  # of 1437 examples
        assert large["diagnostics"]["num_examples"] == 512


@pytest.mark.parametrize(
    ("name", "flag", "message"),
    [
        ("reproduce", "--datasets=cifar11", "no config configs/cifar11.py"),
        ("reproduce", "--config.epsilon=3", "sets epsilon itself"),
        ("reproduce", "--methods=bam_sam", "methods have dp_sgd"),
        ("batches", "--sizes=0", "--sizes must be integers"),
        ("batches", "--methods=", "--methods is required"),
        ("logistic", "--out=", "--out is required"),
        ("figures", "--methods=dp_sgd:1", "dp_sgd takes no"),
    ],
)
def test_a_mistaken_study_is_one_line_and_writes_nothing(name, flag, message, tmp_path):
    more = {"reproduce": "--datasets=digits", "batches": "--config=digits", "figures": "--figure=2"}
    done = run_command(
        f"scripts.paper.{name}", more.get(name, "--out=o"), flag, f"--workdir={tmp_path}/w"
    )
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "w").exists()


def test_the_papers_numbers_stand_beside_ours():
    from scripts.paper import reproduce

    assert reproduce.COLUMNS["paper, %"]({"paper": (68.2, 0.27)}) == "68.2 ± 0.3"
    assert reproduce.COLUMNS["paper, %"]({"paper": None}) == "–"
    best = {e: max(of, key=lambda m: of[m][0]) for e, of in reproduce.PAPER["cifar10"].items()}
    assert best == dict.fromkeys((1.0, 2.0, 10.0), "bam_sam")


def test_the_bias_benchmark_searches_trains_and_measures_at_one_place(tmp_path):
    found = []
    for rate, entries in (("0.001", "psac"), ("0.05", "dp_sgd")):
        done = run_command(
            "scripts.paper.bias_benchmark", "--config=digits", "--holdout=300",
            f"--entries={entries}",
            f"--workdir={tmp_path}/runs", f"--out={tmp_path}/bias", "--num_seeds=1", *TINY,
            "--config.checkpoint.every=10", "--config.diagnostics.num_examples=64",
            f"--learning_rates={rate}", timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        rows = rows_of(tmp_path / "bias.json").values()
        assert [len(row["searched"]) for row in rows] == [1, 3][: len(rows)]
        assert all(row["relative_sensitivity"] == 1 for row in rows)
        found += [row["bias"] for row in rows]
    plain, psac, plain_elsewhere = found
    assert plain != psac and plain != plain_elsewhere


def test_a_comparison_takes_a_run_that_diverged_for_the_worst(tmp_path):
    config = tiny(0, **{"eval.every": 1, "diagnostics.every": 1})
    built = loop.build(config)

    def diverging(state, *rows):
        state = built.step(state, *rows)
        params, averaged = jax.tree.map(lambda x: x * jnp.nan, (state.params, state.averaged))
        return state._replace(params=params, averaged=averaged)

    loop.train(built, 0, tmp_path / "good")
    loop.train(built.with_step(diverging), 0, tmp_path / "bad")
    found = {name: {0: sweeps.read(tmp_path / name)} for name in ("good", "bad")}
    compared = study.Study({"good": config, "bad": config}, lambda label: "good")
    good, bad = (study.row(compared, name, found) for name in ("good", "bad"))
    json.dumps([good, bad], allow_nan=False)
    assert bad["accuracy"]["mean"] == 0 < good["accuracy"]["mean"]
    assert bad["gain"]["mean"] == -good["accuracy"]["mean"]
    rows = [{"step": step, "not_private/snr": value} for step, value in ((1, None), (2, 3.0))]
    assert study.measured({0: found["bad"][0]._replace(rows=rows)}, "snr") == [3.0]
    assert study.measured({0: found["bad"][0]._replace(rows=rows[:1])}, "snr") == []
    assert [cell(bad) for cell in study.columns(compared, [good, bad]).values()]
