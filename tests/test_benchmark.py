"""The benchmark of methods: what it searches, pairs and keeps, on digits."""

import json

import pytest

from tests import cases

pytestmark = pytest.mark.usefixtures("without_the_tests_type_checks")


def run(folder, *flags):
    return cases.run_command(
        "scripts.paper.benchmark", "--data=digits", "--epsilons=2",
        "--methods=dp_sgd,random_allocation", f"--workdir={folder}/runs",
        f"--out={folder}/benchmark", *flags,
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmark")
    assert "no time of dp_sgd, dp_sgd_2" in run(folder).stderr
    assert run(folder, "--time").returncode == 0
    done = run(folder)
    assert done.returncode == 0, done.stderr
    return folder, json.loads((folder / "benchmark.json").read_text()), done.stdout


def test_every_cell_is_searched_on_held_out_images_and_has_paired_seeds(finished):
    runs = finished[1]["runs"]
    searched = [name for name in runs if "/dp_sgd/search/" in name]
    assert len(searched) >= 5
    assert {runs[name]["config"]["dataset.holdout"] for name in searched} == {200}
    assert {runs[name]["config"]["seed"] for name in searched} == {1000}
    for method in ("dp_sgd", "random_allocation"):
        seeds = [name for name in runs if name.startswith(f"digits/epsilon=2/{method}/seed")]
        assert len(seeds) >= 5
        assert not any("dataset.holdout" in runs[name]["config"] for name in seeds)
    assert {run["commit"] for run in runs.values()} == set(finished[1]["made"])
    assert all(run["epsilon"] <= 2 for run in runs.values())


def test_a_row_is_of_the_best_setting_and_the_pairs_of_its_seeds(finished):
    folder, made, _ = finished
    rows = json.loads((folder / "benchmark_rows.json").read_text())["rows"]
    of = {row["method"]: row for row in rows}
    own = of["random_allocation"]
    best = max(
        run["accuracy"]
        for name, run in made["runs"].items()
        if "/random_allocation/search/" in name
    )
    setting = f"{own['optimizer.learning_rate']:.3g},{own['clip_norm']:.3g}"
    chosen = made["runs"][f"digits/epsilon=2/random_allocation/search/{setting}"]
    assert chosen["accuracy"] == best
    pairs = [
        run["accuracy"] - made["runs"][name.replace("random_allocation", "dp_sgd")]["accuracy"]
        for name, run in made["runs"].items()
        if "/random_allocation/seed" in name
    ]
    assert own["gain"]["num"] == len(pairs) == own["seeds"]
    assert own["gain"]["mean"] == pytest.approx(sum(pairs) / len(pairs))
    assert of["dp_sgd"]["gain"] is None and of["dp_sgd"]["slowdown"] == 1
    assert (folder / "benchmark_digits.png").stat().st_size > 10_000


def test_the_counterpart_is_the_batch_whose_step_takes_as_long(finished):
    times = json.loads((finished[0] / "benchmark_times.json").read_text())["milliseconds"]["digits"]
    rows = json.loads((finished[0] / "benchmark_rows.json").read_text())["rows"]
    of = {row["method"]: row for row in rows}
    own = times["random_allocation"][0]
    assert of["random_allocation"]["slowdown"] == pytest.approx(own / times["dp_sgd"][0])
    away = {name: abs(times[name][0] - own) for name in times if name.startswith("dp_sgd")}
    assert len(away) == 4 and of["random_allocation"]["counterpart"] == min(away, key=away.get)


def test_finished_runs_are_in_the_file_alone_and_not_trained_again(finished, tmp_path):
    for name in ("benchmark.json", "benchmark_times.json"):
        (tmp_path / name).write_text((finished[0] / name).read_text())
    done = run(tmp_path, "--draw")
    assert done.returncode == 0 and "/seed" not in done.stdout
    assert not list((tmp_path / "runs").glob("*"))
    assert (tmp_path / "benchmark.md").read_text() == (finished[0] / "benchmark.md").read_text()


def test_a_budget_that_is_spent_ends_it_with_what_is_there(finished, tmp_path):
    times = "benchmark_times.json"
    (tmp_path / times).write_text((finished[0] / times).read_text())
    done = run(tmp_path, "--core_hours=1e-9")
    assert done.returncode == 3
    assert "unknown: x" in run(tmp_path, "--methods=x").stderr
