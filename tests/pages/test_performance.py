"""Pages say what the files of measurements and results say, and the scripts that measure run."""

import json
from pathlib import Path

import pytest

from bam import tables
from bam.cli import run_lines
from bam.sweep import studies
from bam.training import loop
from configs import digits
from scripts.benchmarks import performance
from scripts.lib import pages

ROOT = Path(__file__).parents[2]
DEMO = json.loads((ROOT / "docs/demo/sweep.json").read_text())


def test_the_page_shows_the_measurements_that_are_kept():
    page = (ROOT / "docs/performance.md").read_text()
    assert pages.fill(page, performance.page_tables(ROOT / "benchmarks")) == page


def test_a_ratio_is_the_median_of_the_rounds(tmp_path):
    for file in (ROOT / "benchmarks").glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    peers = json.loads((tmp_path / "peers_cpu.json").read_text())
    peers["observations"] = {name: times[:3] for name, times in peers["observations"].items()}
    peers["observations"]["ours_dp_sgd"] = [2.0, 4.2, 9.0]
    peers["observations"]["jax_privacy"] = [2.0, 2.0, 3.0]
    (tmp_path / "peers_cpu.json").write_text(json.dumps(peers))
    ratios = performance.page_tables(tmp_path)["ratios"].splitlines()
    assert "| DP-SGD / jax-privacy | 2.10 [1.55, 2.55] | – |" in ratios


def test_memory_does_not_grow_with_the_batch():
    peak = json.loads((ROOT / "benchmarks/step_cpu.json").read_text())["peak_memory_mb"]
    assert peak["4096"] == pytest.approx(peak["256"], rel=5e-3)


def test_a_page_without_a_place_for_a_table_is_refused():
    with pytest.raises(ValueError, match="no place for steps"):
        pages.fill("# Nothing here", {"steps": "| a |"})


def test_the_pages_show_the_tables_that_commands_wrote():
    shown = {page: pages.FILE.findall(page.read_text()) for page in (ROOT / "docs").glob("*.md")}
    assert sum(map(len, shown.values())) > 5
    for page in shown:
        assert pages.fill_page(page, ROOT) == page.read_text(), f"{page}: scripts.lib.pages"


def test_no_audit_that_is_shown_gives_away_more_than_it_claims():
    rows = json.loads((ROOT / "docs/audit.json").read_text(encoding="utf-8"))
    of_one_run = [row for row in rows if row.get("kind") == "one_run"]
    of_methods = [row for row in rows if "kind" not in row]
    assert {row["dataset"] for row in of_one_run} == {"digits", "mnist"}
    assert {(r["method"], r["sampling_prob"]) for r in of_methods} == {
        (method, q) for method in ("dp_sgd", "dp_sat", "bam_sam", "bam_exact") for q in (1.0, 0.25)
    }
    for row in rows:
        assert row["empirical_epsilon_lower"] <= row["claimed_epsilon"]
    for row in of_methods:
        if row["sampling_prob"] == 1:
            assert row["empirical_epsilon_lower"] >= 0.8 * row["claimed_epsilon"]
        # Rows of 0.1.0 have the noise of empty steps; later ones that of whole runs, and batches.
        p_values = row.get("whole_run_p_values") or row["noise_p_values"]
        assert min(p_values.values()) > 1e-3
    for row in of_one_run:
        any_mechanism, lower, independent = (
            row[f"empirical_epsilon_lower{which}"]
            for which in ("_any_mechanism", "", "_independent")
        )
        assert 0 < any_mechanism < lower < independent <= row["claimed_epsilon"]
        assert independent >= 2 / 3 * row["claimed_epsilon"]
        assert row["num_examples"] >= row["num_canaries"]


def test_the_plan_that_is_explained_is_that_of_the_config_it_names():
    text = (ROOT / "docs/batches.md").read_text(encoding="utf-8")
    assert run_lines.describe_plan(loop.build(digits.get_config("dp_sgd"))) in text


def test_the_demos_table_is_that_of_its_runs():
    made = DEMO["rows"]
    table = tables.markdown(studies.columns({}, made), made)
    assert table == (ROOT / "docs/demo/sweep.md").read_text()
    readme = (ROOT / "README.md").read_text()
    assert table in readme or "<!-- demo table" not in readme


def test_the_demos_settings_were_chosen_with_other_seeds():
    tried = json.loads((ROOT / "docs/demo/settings.json").read_text())
    searched = {seed for row in tried["rows"] for seed in row["seeds"]}
    assert tried["held_out"] > 0 and searched
    assert searched.isdisjoint(seed for row in DEMO["rows"] for seed in row["seeds"])
