"""The benchmark of methods: what it searches, pairs and keeps, on digits."""

import json

import numpy as np
import pytest

from tests.cases import run_command

pytestmark = pytest.mark.usefixtures("without_the_tests_type_checks")


def run(folder, methods="dp_sgd,random_allocation"):
    return run_command(
        "scripts.paper.benchmark", "--data=digits", "--epsilons=2",
        f"--methods={methods}", f"--workdir={folder}/runs", f"--out={folder}/benchmark",
    )  # fmt: skip


# Median and quartiles in milliseconds; the batch whose step takes as long is DP-SGD's own.
TIMES = {"dp_sgd": 10, "dp_sgd_2": 20, "dp_sgd_3": 30, "dp_sgd_4": 40, "random_allocation": 12}
TIMES = {"milliseconds": {"digits": {name: [ms, ms, ms] for name, ms in TIMES.items()}}}
MISSING = {"dp_sgd/search/0.01,0.333", "dp_sgd/seed4"}


def finished_runs():
    """A search of rates, then of C, and ten seeds of both methods, but for what is missing."""
    accuracies = {}
    for method, better in (("dp_sgd", 0.0), ("random_allocation", 1.0)):
        for setting in ("0.005,1", "0.02,1", "0.01,0.333", "0.01,3"):
            accuracies[f"{method}/search/{setting}"] = 60.0
        accuracies[f"{method}/search/0.01,1"] = 101.0  # above whatever is trained
        for seed in range(10):
            accuracies[f"{method}/seed{seed}"] = 70.0 + seed + better * (1 + seed % 2)
    run = {"seconds": 1.0, "noise_multiplier": 1.0, "epsilon": 2.0, "config": {}, "commit": "a"}
    return {
        f"digits/epsilon=2/{name}": {"accuracy": accuracy} | run
        for name, accuracy in accuracies.items()
        if name not in MISSING
    }


def test_what_is_missing_is_trained_and_rows_are_of_the_best_settings_by_paired_seeds(tmp_path):
    given = finished_runs()
    (tmp_path / "benchmark.json").write_text(json.dumps({"runs": given, "made": {}}))
    assert "no time of dp_sgd, dp_sgd_2" in run(tmp_path).stderr
    (tmp_path / "benchmark_times.json").write_text(json.dumps(TIMES))
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    runs, rows = (json.loads((tmp_path / f"benchmark{x}.json").read_text()) for x in ("", "_rows"))
    rows = {row["method"]: row for row in rows["rows"]}
    trained = {name: run for name, run in runs["runs"].items() if name not in given}
    searched, final = (trained[f"digits/epsilon=2/{name}"] for name in sorted(MISSING))
    assert len(trained) == 2 and given.items() <= runs["runs"].items()
    assert {run["commit"] for run in trained.values()} == set(runs["made"])
    # A setting is judged on held-out images by a seed of its own, and within the same ε.
    assert searched["config"]["dataset.holdout"] == 200 and searched["config"]["seed"] == 1000
    assert "dataset.holdout" not in final["config"]
    assert all(run["epsilon"] <= 2 for run in trained.values())
    ours, theirs = (
        np.array([runs["runs"][f"digits/epsilon=2/{x}/seed{i}"]["accuracy"] for i in range(10)])
        for x in ("random_allocation", "dp_sgd")
    )
    row = rows["random_allocation"]
    assert row["gain"]["num"] == 10
    assert row["gain"]["mean"] == pytest.approx((ours - theirs).mean())
    assert (row["optimizer.learning_rate"], row["clip_norm"]) == (0.01, 1.0)
    assert row["slowdown"] == pytest.approx(1.2) and row["counterpart"] == "dp_sgd"
    assert rows["dp_sgd"]["gain"] is None and rows["dp_sgd"]["slowdown"] == 1
    assert (tmp_path / "benchmark_digits.png").stat().st_size > 10_000


def test_an_unknown_method_is_one_line(tmp_path):
    done = run(tmp_path, "x")
    assert done.returncode == 2 and "unknown: x" in done.stderr and done.stderr.count("\n") == 1
