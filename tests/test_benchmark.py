"""The benchmark of methods: what it searches, pairs and keeps, on digits."""

import json

import pytest

from tests import cases

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_the_tests_type_checks")]


def run(folder, *flags):
    return cases.run_command(
        "scripts.paper.benchmark", "--data=digits", "--epsilons=2",
        "--methods=dp_sgd,random_allocation", f"--workdir={folder}/runs",
        f"--out={folder}/benchmark", *flags,
    )  # fmt: skip


# Median and quartiles in milliseconds; the batch whose step takes as long is DP-SGD's own.
TIMES = {"dp_sgd": 10, "dp_sgd_2": 20, "dp_sgd_3": 30, "dp_sgd_4": 40, "random_allocation": 12}
TIMES = {"milliseconds": {"digits": {name: [ms, ms, ms] for name, ms in TIMES.items()}}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder; runs and rows by name, as the JSON files have them."""
    folder = tmp_path_factory.mktemp("benchmark")
    assert "no time of dp_sgd, dp_sgd_2" in run(folder).stderr
    (folder / "benchmark_times.json").write_text(json.dumps(TIMES))
    done = run(folder)
    assert done.returncode == 0, done.stderr
    made, rows = (json.loads((folder / f"benchmark{x}.json").read_text()) for x in ("", "_rows"))
    assert {run["commit"] for run in made["runs"].values()} == set(made["made"])
    return folder, made["runs"], {row["method"]: row for row in rows["rows"]}


def test_every_cell_is_searched_on_held_out_images_and_has_paired_seeds(finished):
    _, runs, rows = finished
    searched = [run for name, run in runs.items() if "/dp_sgd/search/" in name]
    assert len(searched) >= 5
    assert {run["config"]["dataset.holdout"] for run in searched} == {200}
    assert {run["config"]["seed"] for run in searched} == {1000}
    assert all(run["epsilon"] <= 2 for run in runs.values())
    gains = []
    for seed in range(rows["random_allocation"]["seeds"]):
        ours, theirs = (
            runs[f"digits/epsilon=2/{x}/seed{seed}"] for x in ("random_allocation", "dp_sgd")
        )
        assert "dataset.holdout" not in ours["config"] | theirs["config"]
        gains.append(ours["accuracy"] - theirs["accuracy"])
    gain = rows["random_allocation"]["gain"]
    assert gain["num"] == len(gains) >= 5
    assert gain["mean"] == pytest.approx(sum(gains) / len(gains))


def test_a_row_is_of_the_best_setting_beside_the_batch_whose_step_takes_as_long(finished):
    folder, runs, rows = finished
    own = rows["random_allocation"]
    searched = {x: r["accuracy"] for x, r in runs.items() if "/random_allocation/search/" in x}
    setting = f"{own['optimizer.learning_rate']:.3g},{own['clip_norm']:.3g}"
    chosen = searched[f"digits/epsilon=2/random_allocation/search/{setting}"]
    assert chosen == max(searched.values())
    assert own["slowdown"] == pytest.approx(1.2) and own["counterpart"] == "dp_sgd"
    assert rows["dp_sgd"]["gain"] is None and rows["dp_sgd"]["slowdown"] == 1
    assert (folder / "benchmark_digits.png").stat().st_size > 10_000


def test_finished_runs_are_in_the_file_alone_and_not_trained_again(finished, tmp_path):
    for name in ("benchmark.json", "benchmark_times.json"):
        (tmp_path / name).write_text((finished[0] / name).read_text())
    done = run(tmp_path, "--draw")
    assert done.returncode == 0 and "/seed" not in done.stdout
    assert not list((tmp_path / "runs").glob("*"))
    assert (tmp_path / "benchmark.md").read_text() == (finished[0] / "benchmark.md").read_text()
    assert "unknown: x" in run(tmp_path, "--methods=x").stderr


def test_steps_of_all_methods_and_batches_are_timed(tmp_path):
    assert run(tmp_path, "--time").returncode == 0
    times = json.loads((tmp_path / "benchmark_times.json").read_text())["milliseconds"]["digits"]
    assert times.keys() == TIMES["milliseconds"]["digits"].keys()
    assert all(0 < low <= median <= high for median, low, high in times.values())
