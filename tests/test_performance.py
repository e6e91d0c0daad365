"""docs/performance.md says what the files in benchmarks/ say."""

import json
from pathlib import Path

import pytest

from bam.training import loop
from configs import digits
from scripts.benchmarks import performance
from scripts.lib import pages
from tests import cases

ROOT = Path(__file__).parents[1]


def test_the_page_shows_the_measurements_that_are_kept():
    page = (ROOT / "docs/performance.md").read_text()
    assert pages.fill(page, performance.tables_of(ROOT / "benchmarks", "cpu")) == page


def test_a_ratio_is_the_median_of_the_rounds(tmp_path):
    step = {
        "batch": 2,
        "views": 4,
        "flops_per_example": 5e5,
        "matmul_observations_gflops": [1.0, 1.0, 1.0],
        "peak_memory_mb": {"256": 100.0, "4096": 120.0},
        "nonprivate_ms": 1.0,
        "observations_ms": {
            "nonprivate_ms": [1.0, 2.0, 4.0],
            "dp_sgd_ms": [2.0, 2.0, 2.0],
            "dp_sat_ms": [2.0, 2.0, 2.0],
            "bam_sam_ms": [4.2, 4.2, 4.2],
            "bam_exact_ms": [5.0, 5.0, 5.0],
            "dp_sgd_views_ms": [1.0, 1.0, 1.0],
            "bam_sam_one_view_ms": [1.0, 1.0, 1.0],
        },
    }
    (tmp_path / "step_cpu.json").write_text(json.dumps(step))
    table = performance.tables_of(tmp_path, "cpu")["ratios"].splitlines()
    shown = {
        line.split(" | ")[0].lstrip("| "): line.rstrip(" |").split(" | ")[1:] for line in table
    }
    assert shown["DP-SAT / DP-SGD"] == ["1.00", "1.00 to 1.00"]
    assert shown["BAM-SAM / DP-SGD, K = 1"][0] == "2.10"
    assert shown["DP-SGD's arithmetic rate / matrix products' rate"][0] == "0.25"
    assert shown["peak memory, batch 4096 / batch 256"][0] == "1.20"
    assert shown["DP-SGD / jax-privacy `clipped_grad`"] == ["not measured"]


def test_a_page_without_a_place_for_a_table_is_refused():
    with pytest.raises(ValueError, match="no place for steps"):
        pages.fill("# Nothing here", {"steps": "| a |"})


def test_the_pages_show_the_tables_that_commands_wrote():
    root = Path(__file__).parents[1]
    for page, places in pages.PAGES.items():
        text = (root / page).read_text(encoding="utf-8")
        for table in places.values():
            assert (root / table).read_text(encoding="utf-8") in text, table


def audit_rows(kind=None):
    rows = json.loads((ROOT / "docs/audit.json").read_text(encoding="utf-8"))
    return [row for row in rows if row.get("kind") == kind]


def test_the_audit_that_is_shown_is_of_every_method_and_none_gives_away_more_than_it_claims():
    rows = audit_rows()
    assert {(r["method"], r["sampling_prob"]) for r in rows} == {
        (method, q) for method in ("dp_sgd", "dp_sat", "bam_sam", "bam_exact") for q in (1.0, 0.25)
    }
    for row in rows:
        assert row["empirical_epsilon_lower"] <= row["claimed_epsilon"]
        if row["sampling_prob"] == 1:
            assert row["empirical_epsilon_lower"] >= 0.8 * row["claimed_epsilon"]
        # Rows of 0.1.0 have the noise of empty steps; later ones that of whole runs, and batches.
        found = row.get("whole_run_p_values") or row["noise_p_values"]
        assert min(found.values()) > 1e-3


def test_one_run_each_on_digits_and_mnist_is_shown_and_gives_away_less_than_it_claims():
    rows = audit_rows("one_run")
    assert {row["dataset"] for row in rows} == {"digits", "mnist"}
    for row in rows:
        bounds = [row[f"empirical_epsilon_lower{which}"] for which in ("", "_any_mechanism")]
        assert 0 < min(bounds) <= max(bounds) <= row["claimed_epsilon"]
        assert row["num_examples"] >= row["num_canaries"]


def test_the_plan_that_is_explained_is_that_of_the_config_it_names():
    text = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
    assert loop.build(digits.get_config("dp_sgd")).plan.describe() in text


def test_the_accelerators_script_goes_on_where_it_stopped(tmp_path):
    def call(seconds):
        return cases.run_command(
            "scripts.benchmarks.accelerator", "--device=x", f"--workdir={tmp_path}/runs",
            f"--out={tmp_path}", f"--seconds={seconds}", "--reduced",
        )  # fmt: skip

    done = {"end": "done", "seconds": 1.0, "last": []}
    names = ("test_chacha", "test_exact_sums", "step", "depth")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/pieces.json").write_text(json.dumps(dict.fromkeys(names, done)))
    stopped = call(5)
    assert stopped.returncode == 0, stopped.stderr
    assert "peers and what follows: the same command goes on there" in stopped.stdout
    kept = json.loads((tmp_path / "accelerator_x.json").read_text())
    assert list(kept["pieces"]) == list(names)
