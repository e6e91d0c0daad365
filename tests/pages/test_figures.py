"""The figures' numbers and pictures."""

import csv

import pytest

from bam.sweep import plot
from bam.training.methods import strength
from tests.cases import run_command


def read_csv(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_figures_of_training_and_of_trained_weights_come_with_their_numbers(tmp_path):
    def draw(figure):
        done = run_command(
            "scripts.paper.figures", f"--figure={figure}", f"--workdir={tmp_path}/runs",
            "--methods=dp_sgd,bam_sam:0.1", "--seeds=2",
            "--config=digits", "--config.model.name=linear", "--config.num_steps=2",
            "--config.accountant=rdp",
            "--config.diagnostics.every=1", "--config.diagnostics.num_examples=16",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert draw("2").count("%") == 4
    assert draw("5").count("%") == 0  # the runs are shared
    for name in ("figure2.png", "figure5.png"):
        assert (tmp_path / "runs" / name).stat().st_size > 10_000
    rows = read_csv(tmp_path / "runs" / "figure2.csv")
    assert {row["method"] for row in rows} == {"DP-SGD", "BAM (SAM), λ = 0.1"}
    assert {row["step"] for row in rows} == {"0", "1", "2"}
    for row in rows:
        assert float(row["mean"]) == pytest.approx(
            (float(row["seed 0"]) + float(row["seed 1"])) / 2, rel=1e-4
        )


def test_stronger_methods_are_darker_and_every_line_has_a_style_of_its_own():
    methods = [{"name": "bam_sam", "radius": r, "mix": 1.0} for r in (0.1, 0.01)]
    styles = plot.styles([*methods, {"name": "dp_sgd"}])
    assert list(styles) == ["BAM (SAM), λ = 0.1", "BAM (SAM), λ = 0.01", "DP-SGD"]
    assert sum(styles["BAM (SAM), λ = 0.1"]["color"]) < sum(styles["BAM (SAM), λ = 0.01"]["color"])
    assert len({str(style) for style in styles.values()}) == 3
    assert strength({"name": "bam_sam", "radius": 0.2, "mix": 0.5}) == 0.1
