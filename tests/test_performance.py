"""docs/performance.md says what the files in benchmarks/ say."""

import json
from pathlib import Path

import pytest

from scripts import performance

ROOT = Path(__file__).parents[1]


def test_the_page_shows_the_measurements_that_are_kept():
    page = (ROOT / "docs/performance.md").read_text()
    assert performance.fill(page, performance.tables(ROOT / "benchmarks", "cpu")) == page


def test_a_ratio_is_the_median_of_the_rounds_and_is_met_or_not(tmp_path):
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
    table = performance.tables(tmp_path, "cpu")["targets"].splitlines()
    found = {line.split(" | ")[0].lstrip("| "): line.split(" | ")[1:] for line in table[2:]}
    assert found["DP-SGD / ours, not private"][1:3] == ["1.00", "0.75 to 1.50"]
    assert found["DP-SGD / ours, not private"][3].startswith("yes")
    assert found["BAM-SAM / DP-SGD, K = 1"][1] == "2.10"
    assert found["BAM-SAM / DP-SGD, K = 1"][3].startswith("**no**")
    assert found["DP-SGD arithmetic rate / matrix products' rate"][1] == "0.25"
    assert found["DP-SGD arithmetic rate / matrix products' rate"][3].startswith("**no**")
    assert found["peak memory, batch 4096 / batch 256"][1] == "1.20"
    assert found["DP-SGD / PyTorch, not private"][1] == "not measured"


def test_a_page_without_a_place_for_a_table_is_refused():
    with pytest.raises(ValueError, match="no place for steps"):
        performance.fill("# Nothing here", {"steps": "| a |"})
