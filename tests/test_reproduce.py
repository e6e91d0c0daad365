"""Table 1 and the search are run cell by cell, each cell once."""

import fcntl
import json

import pytest

from bam.cli import sweeps
from bam.training import loop, rundir
from configs import digits
from tests.cases import run_command


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


def test_overwriting_deletes_earlier_runs_of_the_group_and_nothing_else(tmp_path):
    for folder in ("a/seed0", "a/seed7", "b/seed0"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    (tmp_path / "a" / "notes.txt").write_text("mine")
    events = []
    sweeps.run(
        {"a/seed0": tiny(0)}, tmp_path, lambda: False, lambda name, text: events.append(name),
        overwrite=True,
    )  # fmt: skip
    assert events == ["a/seed0"]
    assert not (tmp_path / "a/seed7").exists()
    assert (tmp_path / "a/notes.txt").exists()
    assert (tmp_path / "b/seed0/config.json").exists()


def test_a_run_that_another_process_trains_is_not_deleted_nor_any_beside_it(tmp_path):
    recorded = [tmp_path / folder / "config.json" for folder in ("a/seed0", "a/seed7")]
    for path in recorded:
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    overwrite = lambda: sweeps.run(  # noqa: E731
        {"a/seed0": tiny(0)}, tmp_path, lambda: False, lambda name, text: None, overwrite=True
    )
    with (recorded[1].parent / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="seed7"):
            overwrite()
        assert all(path.exists() for path in recorded)
    overwrite()
    assert not recorded[1].exists()


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


TINY = ("--config.model.name=linear", "--config.accountant=rdp", "--config.num_steps=2")


def test_reproduce_resumes_and_prints_what_ran_and_what_did_not(tmp_path):
    command = ("scripts.paper.reproduce", "--table=1", "--datasets=digits", "--epsilons=8",
               "--methods=dp_sgd,bam_sam", f"--workdir={tmp_path}", *TINY)  # fmt: skip
    stopped = run_command(*command, "--seeds=2", "--max_seconds=0.001")
    assert stopped.returncode == 0, stopped.stderr
    assert "not run" in stopped.stdout
    assert "0 of 4 runs finished" in stopped.stdout
    done = run_command(*command, "--seeds=2")
    assert done.returncode == 0, done.stderr
    assert "4 of 4 runs finished" in done.stdout
    table = json.loads((tmp_path / "table1.json").read_text())
    assert [(r["epsilon"], r["method"]) for r in table["rows"]] == [
        (8, "dp_sgd"), (8, "bam_sam"),
    ]  # fmt: skip
    assert all(r["seeds"] == [0, 1] for r in table["rows"])
    assert (tmp_path / "digits.png").stat().st_size > 10_000
    assert all(r["epsilon"] <= 8 for r in table["runs"].values())
    kept = table["configs"]["digits/epsilon8/bam_sam"]  # what the command line set is in no file
    assert (kept["model"]["name"], kept["num_steps"], kept["seed"]) == ("linear", 2, None)
    looked = run_command(*command, "--seeds=3", "--notrain")
    assert "4 of 6 runs finished" in looked.stdout


@pytest.mark.parametrize(
    ("flag", "message"),
    [("--datasets=cifar11", "no config configs/cifar11.py"),
     ("--config.epsilon=3", "sets epsilon itself"),
     ("--config.no_such=3", "no key 'no_such'"),
     ("--config.dataset.holdout=9", "sets dataset.holdout itself"),
     ("--methods=bam_sam", "methods have dp_sgd")],
)  # fmt: skip
def test_a_mistaken_reproduction_is_one_line_and_writes_nothing(flag, message, tmp_path):
    workdir = tmp_path / "table"
    done = run_command(
        "scripts.paper.reproduce", "--datasets=digits", flag, f"--workdir={workdir}", *TINY
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert not workdir.exists()


def test_a_search_judges_every_strength_on_held_out_images(tmp_path):
    command = ("scripts.search", "--config=configs/digits.py", f"--workdir={tmp_path}/search",
               "--holdout=300", *TINY)  # fmt: skip
    uneven = run_command(*command, "--dp_sat=0.1", "--bam_sam=0.1,0.2")
    assert uneven.returncode == 2
    assert "the same number of strengths" in uneven.stderr
    done = run_command(*command, "--dp_sat=0.1", "--bam_sam=0.2")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "search/search.json").read_text())
    assert [(r["method"], r["strength"], r["num_runs"]) for r in rows] == [
        ("dp_sgd", 0, 1), ("dp_sat", 0.1, 1), ("bam_sam", 0.2, 1),
    ]  # fmt: skip
    plan = json.loads((tmp_path / "search/dp_sgd/0/seed1000/plan.json").read_text())
    assert plan["sampling_prob"] == 256 / (1437 - 300)


def test_a_search_tries_every_method_at_every_setting(tmp_path):
    command = ("scripts.search", "--config=configs/digits.py", f"--workdir={tmp_path}",
               "--holdout=300", *TINY, "--dp_sat=", "--bam_sam=0.2", "--learning_rates=0.001,0.01",
               "--clip_norms=0.5")  # fmt: skip
    done = run_command(*command)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "search.json").read_text())
    assert [(r["method"], r["strength"], r["learning_rate"], r["clip_norm"]) for r in rows] == [
        ("dp_sgd", 0, 0.001, 0.5), ("dp_sgd", 0, 0.01, 0.5),
        ("bam_sam", 0.2, 0.001, 0.5), ("bam_sam", 0.2, 0.01, 0.5),
    ]  # fmt: skip
    run = tmp_path / "bam_sam/0.2_learning_rate0.01_clip_norm0.5/seed1000"
    config = json.loads((run / "config.json").read_text())
    assert (config["optimizer"]["learning_rate"], config["clip_norm"]) == (0.01, 0.5)
    head = (tmp_path / "search.md").read_text().splitlines()[0]
    assert head == "| method | strength | learning rate | clip norm | runs | held-out accuracy, % |"
    twice = run_command(*command, "--config.clip_norm=2")
    assert twice.returncode == 2
    assert "clip_norm" in twice.stderr


def test_a_search_gives_the_best_trials_of_each_method_more_seeds(tmp_path):
    command = ("scripts.search", "--config=configs/digits.py", f"--workdir={tmp_path}",
               "--holdout=300", *TINY, "--dp_sat=", "--bam_sam=0.2", "--best=1", "--num_seeds=2",
               "--learning_rates=0.0001,0.01")  # fmt: skip
    done = run_command(*command)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "search.json").read_text())
    assert [len(row["accuracies"]) for row in rows] == [1, 2, 1, 2]
    for few, many in (rows[:2], rows[2:]):
        assert few["accuracies"][0] < many["accuracies"][0]
        assert few["num_runs"] == 1 and many["num_runs"] == 2


def test_the_bias_benchmark_gives_every_entry_the_same_search_and_goes_on(tmp_path):
    out = tmp_path / "out" / "bias.json"
    command = ("scripts.paper.bias_benchmark", "--config=configs/digits.py", "--holdout=300",
               f"--workdir={tmp_path}/runs", f"--out={out}", "--entries=slaclip,psac",
               "--learning_rates=0.001,0.003", "--num_seeds=2", *TINY,
               "--config.model.name=linear", "--config.checkpoint.every=10",
               "--config.diagnostics.num_examples=64")  # fmt: skip
    done = run_command(*command)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    tried = [(trial["name"], len(trial["tried"])) for trial in found["searched"]]
    assert tried == [("dp_sgd", 1)] * 2 + [("slaclip", 2)] * 4 + [("psac", 2)] * 6
    names = [row["name"] for row in found["rows"]]
    assert names == ["dp_sgd", "slaclip", "psac"]
    for row in found["rows"]:
        assert row["seeds"] == [0, 1]
        assert row["sensitivity"] == 1  # nothing is paid by any of these
        assert row["bias"]["against_plain/cosine"]["num"] == 2
    assert found["rows"][0]["gain"] is None
    lines = out.with_suffix(".md").read_text().splitlines()
    assert lines[0].startswith("| entry | chosen | seeds | accuracy % | paired gain | p |")
    out.unlink()
    again = run_command(*command)  # nothing is trained again
    assert json.loads(out.read_text())["rows"] == found["rows"], again.stderr


def test_bias_is_measured_again_at_other_weights_of_the_baseline(tmp_path):
    out = tmp_path / "bias.json"
    command = ("scripts.paper.bias_benchmark", "--config=configs/digits.py", "--holdout=300",
               f"--workdir={tmp_path}/runs", f"--out={out}", "--entries=adam_bc", "--num_seeds=1",
               *TINY, "--config.model.name=linear", "--config.checkpoint.every=10")  # fmt: skip
    for rates in ("0.001", "0.05"):  # adam_bc is tried at rates of its own
        done = run_command(*command, f"--learning_rates={rates}")
        assert done.returncode == 0, done.stderr
        plain, other = json.loads(out.read_text())["rows"]
        # Neither has a clip of its own, so at the same weights it is the same bias.
        assert plain["bias"] == other["bias"]


def test_clip_norms_that_public_data_would_replace_are_refused(tmp_path):
    done = run_command("scripts.search", "--config=configs/digits.py", f"--workdir={tmp_path}/s",
                       "--holdout=300", *TINY, "--clip_norms=0.5,1",
                       "--config.public_clip.quantile=0.5")  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: --clip_norms: public_clip sets C")
