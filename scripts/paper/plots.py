"""Draws pictures of the site from files in benchmarks/ and docs/results/.

python -m scripts.paper.plots

The other pictures in docs/figures/site/ show studies that ended: they were drawn at the tags
`archive-0.2.0` and `archive-0.3`.
"""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from bam.cli import console
from bam.sweep.plot import log_axis, plt

ROOT = Path(__file__).parents[2]
BLACK, BLUE, RED = "#000000", "#0072B2", "#D55E00"
GREEN, GREY = "#009E73", "#777777"
# For pictures 5 inches wide: on a page of 390 pixels their letters are as large as its text.
STYLE: dict[Any, Any] = {
    "font.size": 11, "axes.titlesize": 11, "axes.titlelocation": "left", "axes.grid": True,
    "axes.axisbelow": True, "grid.alpha": 0.25, "axes.spines.top": False, "errorbar.capsize": 3,
    "axes.spines.right": False, "figure.constrained_layout.use": True, "lines.linewidth": 1.8,
    "figure.constrained_layout.h_pad": 0.08, "lines.markersize": 5,
}  # fmt: skip


def speed() -> None:
    """Milliseconds per example, ours beside other libraries."""
    data = [_read(f"benchmarks/{x}_cpu.json") for x in ("peers", "peers_512")]
    versions = {name: text.split("+")[0] for name, text in data[1]["versions"].items()}
    bars = {
        "Ordinary training": "", "bam": "ours_nonprivate",
        f"PyTorch {versions['torch']}": "torch_nonprivate", "DP-SGD": "", " bam": "ours_dp_sgd",
        f"jax-privacy {versions['jax-privacy']}": "jax_privacy",
        f"Opacus {versions['opacus']}, hooks": "opacus_hooks",
        f"Opacus {versions['opacus']}, ghost": "opacus_ghost", "BAM": "", "  bam": "ours_bam_sam",
    }  # fmt: skip
    _, axes = plt.subplots(1, 2, figsize=(5, 4.1), sharey=True, sharex=True)
    for axis, result in zip(axes, data, strict=True):
        for y, key in enumerate(bars.values()):
            value = statistics.median(result["observations"].get(key, [0]))
            axis.barh(y, value, color=BLUE if key.startswith("ours") else GREY)
            text = f"{value:.0f}" if value else "not run" if key else ""
            axis.text(value + 2, y, text, va="center")
        axis.set(title=f"batch of {result['batch']}", xlabel="ms per example", xlim=(0, 115))
    _name_rows(axes[0], bars)


def time() -> None:
    """Accuracy of DP-SGD and BAM at ε = 2 against training time."""
    panels = {"ResNet-9 (width 16), CIFAR-10, ε = 2, 150 steps": _long_runs()}
    panels["The same network, 50 steps"] = _short_runs()
    _, axes = plt.subplots(2, figsize=(5, 6.9))
    for axis, (title, points) in zip(axes, panels.items(), strict=True):
        for label, (slowdown, accuracy) in points.items():
            color = BLUE if label.startswith("BAM") else RED if slowdown > 1.5 else BLACK
            _line(axis, {slowdown: accuracy}, color, ms=8)
            text = f"{label}\n{accuracy['mean']:.1f} %"
            place = (1.06 * slowdown, accuracy["mean"])
            axis.text(*place, text, va="center", color=color, weight="bold")
        longest = max(slowdown for slowdown, _ in points.values())
        axis.set(title=title, ylabel="test accuracy, %", xlim=(0.85, 2 * longest))
        axis.margins(y=0.12)
        log_axis(axis, (x for x in (1, 2, 4, 8) if x < 1.1 * longest))
    axes[-1].set_xlabel("training time, × DP-SGD's")


def _long_runs() -> dict[str, tuple[float, Any]]:
    """Label -> (median of the time divided by DP-SGD's with the same seed, accuracy)."""
    points: dict[str, tuple[float, Any]] = {}
    base: list[float] = []
    for folder, method in (("", "dp_sgd"), ("", "bam_sam"), ("/double", "dp_sgd")):
        table = _read(f"docs/results/cifar10_medium{folder}/table1.json")
        [row] = (x for x in table["rows"] if x["method"] == method)
        key = f"cifar10_medium/epsilon2/{method}"
        seconds = [table["runs"][f"{key}/seed{x}"]["seconds"] for x in row["seeds"]]
        base = base or seconds
        slowdown = statistics.median(x / y for x, y in zip(seconds, base, strict=False))
        name = "DP-SGD" if method == "dp_sgd" else "BAM"
        batch = table["configs"][key]["expected_batch_size"]
        points[f"{name}\nbatch {batch:,}"] = slowdown, row["accuracy"]
    return points


def _short_runs() -> dict[str, tuple[float, Any]]:
    """The same for the benchmark of methods."""
    names = {"dp_sgd": "DP-SGD", "dp_sgd_2": "DP-SGD\nbatch × 2", "dp_sgd_4": "DP-SGD\nbatch × 4"}
    names |= {"bam_sam": "BAM", "bam_sam_4": "BAM\nbatch × 4"}
    rows = _read("docs/results/benchmark/benchmark_rows.json")["rows"]
    rows = [x for x in rows if x["data"] == "pixels" and x["epsilon"] == 2]
    rows = [x for x in rows if x["method"] in names]
    return {names[x["method"]]: (x["slowdown"], x["accuracy"]) for x in rows}


def own_data() -> None:
    """Accuracy against the number of training images, for each ε."""
    lines: dict[str, dict[float, Any]] = {}
    for row in _read("docs/results/own_images/size.json")["rows"]:
        private = row["method"]["name"] != "non_private"
        label = f"ε = {row['config']['epsilon']:g}" if private else "not private"
        lines.setdefault(label, {})[row["num_examples"]] = row["accuracy"]
    # Lines from top to bottom, each with a factor of x so that error bars do not overlap.
    looks = {"not private": (GREY, 1), "ε = 8": (GREEN, 1.03), "ε = 3": (BLUE, 1)}
    looks["ε = 1"] = RED, 0.97
    _, axis = plt.subplots(figsize=(5, 3.9))
    y = 0.0
    for label, (color, shift) in reversed(looks.items()):
        line = lines[label]
        _line(axis, {shift * num: accuracy for num, accuracy in line.items()}, color)
        y = max(line[min(line)]["mean"], y + 4)  # labels do not overlap
        axis.text(0.9 * min(line), y, label, color=color, weight="bold", ha="right", va="center")
    axis.set(xlabel="training images", ylabel="test accuracy, %", xlim=(190, 5700), ylim=(52, 102))
    log_axis(axis, (500, 1000, 2000, 5000))


def _line(axis: Any, points: Mapping[float, Any], color: str, **look: Any) -> None:
    """Draws x -> accuracy in % with its 95 % interval, cut at 100 because accuracies end there."""
    means = [x["mean"] for x in points.values()]
    halves = [x["half_width"] for x in points.values()]
    above = [min(half, 100 - mean) for mean, half in zip(means, halves, strict=True)]
    axis.errorbar([*points], means, (halves, above), fmt="o-", color=color, **look)


def _read(name: str) -> Any:
    return json.loads((ROOT / name).read_text(encoding="utf-8"))


def _name_rows(axis: Any, rows: Mapping[str, Any]) -> None:
    """Names the rows of a chart from top to bottom; a row without a value is a heading."""
    axis.set_yticks(range(len(rows)), rows)
    for each in axis.figure.axes:
        each.tick_params(axis="y", length=0, labelsize=10)
        each.grid(visible=False, axis="y")
    axis.set_ylim(len(rows) - 0.4, -0.6)
    for label, value in zip(axis.get_yticklabels(), rows.values(), strict=True):
        label.set_fontweight("normal" if value else "bold")


def draw(folder: Path) -> list[Path]:
    """Draws all pictures into a folder; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for picture in (speed, time, own_data):
        path = folder / f"{picture.__name__}.png"
        with plt.rc_context(STYLE):
            picture()
            plt.savefig(path, dpi=144)
            plt.close()
        with Image.open(path) as image:  # 256 colours take a third of the bytes
            image.convert("RGB").quantize(256).save(path, optimize=True)
        paths.append(path)
    return paths


def main() -> None:
    """Draws all pictures into the folder of the site."""
    print(*draw(ROOT / "docs/figures/site"), sep="\n")


if __name__ == "__main__":
    console.run(main)
