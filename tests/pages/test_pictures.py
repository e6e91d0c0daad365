"""Pictures of the site are drawn from the files that are kept, and show their numbers."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scripts.paper import pictures


def test_pictures_are_legible_on_a_phone_and_small(tmp_path):
    paths = pictures.draw(tmp_path)
    assert [path.name for path in paths] == [
        "training.png",
        "speed.png",
        "time.png",
        "own_data.png",
        "audits.png",
    ]
    for path in paths:
        with Image.open(path) as image:
            assert image.width == 720 and image.height < 2 * image.width
            assert len(image.convert("L").getcolors()) > 10
        assert path.stat().st_size < 80_000


def test_studies_are_drawn_again_from_their_csv_files(tmp_path):
    paths = pictures.draw_studies(tmp_path)
    assert len(paths) == len(pictures.STUDIES) + 1
    for path in paths:  # two panels side by side, with text as large as a page's
        with Image.open(path) as image:
            assert image.width == 930
        assert (Path("docs/figures") / path.relative_to(tmp_path)).exists()


def test_every_run_is_compared_with_those_of_the_table():
    runs = pictures._table("docs/figures/bias_accuracy.csv")
    groups = {
        name: [run for run in runs if (run["method"] == "dp_sgd") == plain]
        for name, plain in (("plain", True), ("ours", False))
    }
    paired = pictures._less(groups["ours"], groups["plain"], (*pictures.PROBLEM, *pictures.PAIRED))
    assert (len(pictures._less(runs, runs, pictures.PROBLEM)), len(paired)) == (220, 141)


def test_accuracy_and_time_are_those_of_the_tables():
    for folder in ("", "/double"):
        kept = json.loads(Path(f"docs/results/cifar10_medium{folder}/table1.json").read_text())
        assert {run["num_steps"] for run in kept["runs"].values()} == {150}  # as the title says
    points = pictures._long_runs()
    (one, _), (larger, _) = points["DP-SGD\nbatch 1,024"], points["DP-SGD\nbatch 2,048"]
    slower, accuracy = points["BAM\nbatch 1,024"]
    assert one == 1 and 1.8 < larger < slower < 2.3
    assert round(accuracy["mean"], 2) == 59.73
    assert len(pictures._short_runs()) == 5


@pytest.mark.parametrize(
    ("mean", "half", "ends"), [(90, 20, (70, 100)), (90, 5, (85, 95)), (100, 0, (100, 100))]
)
def test_no_interval_leaves_the_accuracies_that_there_can_be(mean, half, ends):
    figure, axis = pictures.plt.subplots()
    pictures._line(axis, {500: {"mean": mean, "half_width": half}}, "k")
    [container] = axis.containers
    [[(_, low), (_, high)]] = container[2][0].get_segments()
    pictures.plt.close(figure)
    np.testing.assert_allclose((low, high), ends)
