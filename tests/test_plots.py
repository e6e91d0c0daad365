"""The pictures of the site: each is drawn from the files that are kept, and shows their numbers."""

import json
from pathlib import Path

import pytest
from PIL import Image

from bam.sweep import comparison
from scripts.lib import kept
from tests.cases import run_command


def test_every_picture_is_legible_on_a_phone_and_small(tmp_path):
    done = run_command("scripts.paper.plots", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    drawn = {Path(line) for line in done.stdout.splitlines()}
    assert {path.name for path in drawn} >= {"gains.png", "time.png", "own_data.png"}
    for path in drawn:
        with Image.open(path) as image:
            assert image.width == 720 and image.height < 2 * image.width
            assert len(image.convert("L").getcolors()) > 10
        assert path.stat().st_size < 80_000


def test_a_picture_that_there_is_not_is_named_with_those_that_there_are(tmp_path):
    done = run_command("scripts.paper.plots", "--only=gain", f"--out={tmp_path}")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "no picture 'gain'; there are gains, time" in done.stderr


def test_the_gains_are_those_of_the_tables_and_one_pair_has_no_interval():
    rows = kept.gain_rows()
    table = json.loads(Path("docs/results/cifar10_medium/table1.json").read_text())["rows"]
    values = (table[1]["accuracies"], table[0]["accuracies"])  # BAM's, DP-SGD's
    by_hand = comparison.estimate([a - b for a, b in zip(*values, strict=True)])
    shown = rows["own learning rates"]
    assert (shown["mean"], shown["half_width"]) == pytest.approx((by_hand.mean, by_hand.half_width))
    assert round(shown["mean"], 2) == 1.05
    assert rows["ε = 3, small CNN"]["half_width"] is None
    assert rows["Linear, CIFAR-10 features"] is None
    assert list(rows)[-1] == "ResNet-9, BAM's time"
    assert rows["ResNet-9, BAM's time"]["num"] == 4


def test_times_are_medians_over_paired_runs():
    [(_, one, _), (label, slower, accuracy), (_, larger, _)] = next(iter(kept.timed().values()))
    assert one == 1 and 1.8 < larger < slower < 2.3
    assert label == "BAM\nbatch 1,024"
    assert round(accuracy["mean"], 2) == 59.73
