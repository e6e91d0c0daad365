"""Pages say what the files of measurements and results say; what measures, runs."""

import json
from pathlib import Path

import pytest

from bam.training import loop
from configs import digits
from scripts.benchmarks import performance
from scripts.lib import pages
from tests import cases

ROOT = Path(__file__).parents[2]


def test_the_page_shows_the_measurements_that_are_kept():
    page = (ROOT / "docs/performance.md").read_text()
    assert pages.fill(page, performance.page_tables(ROOT / "benchmarks")) == page


def test_a_ratio_is_the_median_of_the_rounds():
    rounds = {"a": [2.0, 4.2, 9.0], "b": [2.0, 2.0, 3.0], "one": [1.2]}
    assert performance._ratio(rounds, "a", "b") == ["2.10", "1.55 to 2.55"]
    assert performance._ratio(rounds, "one", "one") == ["1.00", "–"]


def test_a_page_without_a_place_for_a_table_is_refused():
    with pytest.raises(ValueError, match="no place for steps"):
        pages.fill("# Nothing here", {"steps": "| a |"})


def test_the_pages_show_the_tables_that_commands_wrote():
    shown = {page: pages.FILE.findall(page.read_text()) for page in (ROOT / "docs").glob("*.md")}
    assert sum(map(len, shown.values())) > 60
    for page in shown:
        assert pages.filled(page, ROOT) == page.read_text(), f"{page}: scripts.lib.pages"


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
        bounds = [row[f"empirical_epsilon_lower{which}"] for which in ("", "_any_mechanism")]
        assert 0 < min(bounds) <= max(bounds) <= row["claimed_epsilon"]
        assert row["num_examples"] >= row["num_canaries"]


def test_the_plan_that_is_explained_is_that_of_the_config_it_names():
    text = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
    assert loop.build(digits.get_config("dp_sgd")).plan.describe() in text


def test_the_accelerators_script_goes_on_where_it_stopped(tmp_path):
    done = {"test_chacha": {"end": "done", "seconds": 1.0, "last": []}}
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/pieces.json").write_text(json.dumps(done))
    stopped = cases.run_command(
        "scripts.benchmarks.accelerator", "--device=x", f"--workdir={tmp_path}/runs",
        f"--out={tmp_path}", "--seconds=5",
    )  # fmt: skip
    assert stopped.returncode == 0, stopped.stderr
    assert "test_exact_sums and what follows: the same command goes on there" in stopped.stdout
    assert json.loads((tmp_path / "accelerator_x.json").read_text())["pieces"] == done
