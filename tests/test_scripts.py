"""The commands, as a user runs them."""

import json
import sys
from pathlib import Path

import pytest
from absl import flags
from ml_collections import config_flags

from bam.cli import console, sweeps, tables
from bam.training import config as base
from scripts import compare
from scripts.paper import logistic, table1
from tests.cases import Command, run_command


def test_a_misspelled_key_is_one_line_on_stderr_and_nothing_is_written(tmp_path):
    workdir = tmp_path / "run"
    done = run_command(
        "bam", "train", "--config=configs/digits.py:bam_sam", f"--workdir={workdir}",
        "--config.epsilo=3",
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no key 'epsilo': did you mean epsilon" in done.stderr
    assert not workdir.exists()


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("learning_rate", "optimizer.learning_rate"),
        ("optimiser.learning_rate", "optimizer.learning_rate"),
        ("method.radus", "method.radius or method.name"),
        ("path", "dataset.path or public_clip.path"),
        ("xyzzyqq", ""),
    ],
)
def test_of_an_unknown_key_the_nearest_is_named(key, nearest, monkeypatch):
    given = flags.FlagValues()
    monkeypatch.setattr(flags, "FLAGS", given)
    argv = ["command", "--config=configs/digits.py:bam_sam", f"--config.{key}=3"]
    monkeypatch.setattr(sys, "argv", argv)
    config_flags.DEFINE_config_file("config", flag_values=given)
    with pytest.raises((AttributeError, KeyError)):
        given(argv)
    hint = f": did you mean {nearest}?" if nearest else ""
    assert console._unknown_key(argv) == f"the config has no key {key!r}{hint}"


def test_a_config_file_that_does_not_run_is_not_taken_for_an_unknown_key(tmp_path):
    file = tmp_path / "mistaken.py"
    file.write_text("def get_config(method):\n    return {}['nothing']\n")
    done = run_command("bam", "train", f"--config={file}:dp_sgd", "--workdir=w")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "the config file does not run: KeyError('nothing')" in done.stderr


def test_with_debug_an_error_shows_its_traceback_and_then_its_line(tmp_path):
    for command, frame, line in (
        (("bam", "export", f"--workdir={tmp_path}", "--out=o"), "_read_run", "it has no config"),
        (
            ("bam", "train", "--config=configs/digits.py:dp_sgd", "--config.epsilo=3"),
            "_parse_flags",
            "no key 'epsilo'",
        ),
    ):
        done = run_command(*command, "--debug")
        assert done.returncode == 2
        trace, _, last = done.stderr.rpartition("error: ")
        assert trace.startswith("Traceback") and f"in {frame}\n" in trace
        assert line in last and last.count("\n") == 1
        assert "Traceback" not in run_command(*command).stderr


def test_comparing_two_methods_makes_the_table_and_the_picture(tmp_path):
    command = (
        "scripts.compare", "--config=configs/digits.py", f"--workdir={tmp_path}/c",
        "--methods=dp_sgd,bam_exact", "--num_seeds=2", "--config.model.name=linear",
        "--config.num_steps=3", "--config.accountant=rdp", "--config.diagnostics.every=1",
        "--config.diagnostics.num_examples=32",
    )  # fmt: skip
    stopped = run_command(*command, "--max_seconds=0.001")
    assert "4 runs are not finished; the same command goes on" in stopped.stdout, stopped.stderr
    assert not (tmp_path / "c" / "table.md").exists()
    done = run_command(*command)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "c" / "summary.json").read_text())
    assert [row["method"] for row in rows] == ["dp_sgd", "bam_exact"]
    keys = {
        "method", "epsilon", "delta", "noise_multiplier", "num_seeds", "test_accuracy_mean",
        "test_accuracy_sd", "bias_norm_mean", "seconds",
    }  # fmt: skip
    assert all(keys <= set(row) and None not in row.values() for row in rows)
    assert all(row["epsilon"] <= 3.0 and row["num_seeds"] == 2 for row in rows)
    assert (tmp_path / "c" / "comparison.png").stat().st_size > 10_000
    assert "BAM (exact)" in done.stdout
    again = run_command(
        "scripts.compare", f"--runs={tmp_path}/c/bam_exact,{tmp_path}/c/dp_sgd/seed1",
        f"--workdir={tmp_path}/again",
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    found = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert found[0] == rows[1]  # both seeds of one, and one of the other
    assert [row["num_seeds"] for row in found] == [2, 1]


def test_a_comparison_rounds_epsilon_and_delta_up():
    summary = {"dataset": "digits", "seed": 0, "epsilon": 1.2341, "delta": 1.44441e-5}
    assert "(1.24, 1.45e-05)-DP" in compare.title([sweeps.Run({}, [], summary)])
    row = {key: None for key in (
        "bias_norm_mean", "gradient_norm_mean", "relative_bias_mean", "cosine_mean",
        "test_accuracy_sd",
    )}  # fmt: skip
    row |= {"method": "dp_sgd", "epsilon": 1.2341, "test_accuracy_mean": 0.9, "seconds": 1.0}
    assert compare.COLUMNS["ε"](row) == "1.24"
    assert compare.COLUMNS["ε"](row | {"epsilon": None}) == "–"


def test_comparing_nothing_is_one_line(tmp_path):
    for wrong, message in (
        ((), "--config is required"),
        ((f"--runs={tmp_path}",), "holds no finished run"),
    ):
        done = run_command("scripts.compare", f"--workdir={tmp_path}/c", *wrong)
        assert done.returncode == 2
        assert message in done.stderr and done.stderr.count("\n") == 1


def test_a_required_flag_that_is_missing_or_empty_is_one_line_that_says_what_it_is():
    for command, message in (
        (("scripts.search", "--workdir=w"), "--config is required: configs/NAME.py"),
        (("scripts.paper.logistic", "--out=o", "--workdir="), "--workdir is required: folder"),
        (("bam", "export", "--workdir=w"), "--out is required: folder to write"),
    ):
        done = run_command(*command)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1


def test_the_markdown_table_has_a_row_per_method_and_dashes_for_no_privacy():
    row = {
        "method": "non_private", "epsilon": None, "delta": 1e-5, "noise_multiplier": 0.0,
        "num_seeds": 1, "test_accuracy_mean": 0.5, "test_accuracy_sd": None,
        "bias_norm_mean": None, "gradient_norm_mean": None, "relative_bias_mean": None,
        "cosine_mean": None, "seconds": 1.0,
    }  # fmt: skip
    lines = tables.markdown(compare.COLUMNS, [row]).splitlines()
    assert lines[2] == "| non-private | – | 50.0 | – | – | – | – | 1.0 |"


def test_the_contact_sheet_is_drawn_in_the_home_folder(tmp_path):
    """Shells leave `~` as it is after "=": it is no folder of that name."""
    with Command(
        "scripts.contact_sheet", "--config=configs/digits.py", "--out=~/sheets/views.png",
        "--num_examples=2", "--config.augment.views=3", "--config.augment.shift=1",
        HOME=str(tmp_path),
    ) as command:  # fmt: skip
        done = command.wait()
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "sheets/views.png").stat().st_size > 5_000
    assert not Path("~").exists()


def test_every_method_of_the_base_config_exists():
    for method in base.METHODS:
        assert base.get_config(method).method.name == method


def test_the_readme_shows_the_table_that_the_demo_printed():
    root = Path(__file__).parents[1]
    table = (root / "docs/demo/table.md").read_text()
    rows = json.loads((root / "docs/demo/summary.json").read_text())
    assert table == tables.markdown(compare.COLUMNS, rows)
    assert table in (root / "README.md").read_text()


def test_the_results_page_shows_the_logistic_table_that_was_run():
    docs = Path(__file__).parents[1] / "docs"
    run_ = json.loads((docs / "results/logistic.json").read_text())
    lines = logistic.as_cells(run_["rows"], run_["non_private_sklearn"])
    table = tables.markdown(logistic.COLUMNS, lines)
    assert table == (docs / "results/logistic.md").read_text()
    assert table in (docs / "results.md").read_text()
    assert logistic.non_private_accuracy() == run_["non_private_sklearn"]


def test_the_results_page_shows_the_tables_that_were_run():
    docs = Path(__file__).parents[1] / "docs"
    page, small = (docs / "results.md").read_text(), docs / "results/cifar10_small"
    rows = json.loads((small / "table1.json").read_text())["rows"]
    table = tables.markdown(table1.COLUMNS, rows, table1.LEFT)
    assert table == (small / "table1.md").read_text()
    for table in ("table1.md", "search.md"):
        assert (small / table).read_text() in page
    assert all(len(row["seeds"]) >= 5 for row in rows)
    mnist = json.loads((docs / "results/mnist/summary.json").read_text())
    assert f"**{100 * mnist['test_accuracy']:.2f} %**" in page
    assert mnist["test_accuracy"] >= 0.96
