"""Draws pictures of the site from files that are kept in benchmarks/ and docs/results/.

python -m scripts.paper.plots

The other pictures in docs/figures/site/ are of studies that ended: they were drawn at the tags
`archive-0.2.0` and `archive-0.3`.
"""

import json
import math
import statistics
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from bam.cli import console
from bam.sweep.plot import log_axis, plt

ROOT = Path(__file__).parents[2]
BLACK, BLUE, RED = "#000000", "#0072B2", "#D55E00"
GREEN, GREY = "#009E73", "#777777"
# In pictures 5 inches wide: on a page of 390 pixels letters are then as large as its text.
STYLE: dict[Any, Any] = {
    "font.size": 11, "axes.titlesize": 11, "axes.titlelocation": "left", "axes.grid": True,
    "axes.axisbelow": True, "grid.alpha": 0.25, "axes.spines.top": False, "errorbar.capsize": 3,
    "axes.spines.right": False, "figure.constrained_layout.use": True, "lines.linewidth": 1.8,
    "figure.constrained_layout.h_pad": 0.08, "lines.markersize": 5,
}  # fmt: skip


def speed() -> None:
    """Milliseconds of an example beside other libraries."""
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
    for axis, measured in zip(axes, data, strict=True):
        for y, key in enumerate(bars.values()):
            value = statistics.median(measured["observations"].get(key, [0]))
            axis.barh(y, value, color=BLUE if key.startswith("ours") else GREY)
            text = f"{value:.0f}" if value else "not run" if key else ""
            axis.text(value + 2, y, text, va="center")
        axis.set(title=f"batch of {measured['batch']}", xlabel="ms per example", xlim=(0, 115))
    _name_rows(axes[0], bars)


def time() -> None:
    """Accuracy against training time, of DP-SGD and BAM at ε = 2."""
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
    """Label -> median time over DP-SGD's of the same seed, and accuracy."""
    points: dict[str, tuple[float, Any]] = {}
    base: list[float] = []
    for folder, method in (("", "dp_sgd"), ("", "bam_sam"), ("/double", "dp_sgd")):
        kept = _read(f"docs/results/cifar10_medium{folder}/table1.json")
        [row] = (x for x in kept["rows"] if x["method"] == method)
        key = f"cifar10_medium/epsilon2/{method}"
        seconds = [kept["runs"][f"{key}/seed{x}"]["seconds"] for x in row["seeds"]]
        base = base or seconds
        slowdown = statistics.median(x / y for x, y in zip(seconds, base, strict=False))
        name = "DP-SGD" if method == "dp_sgd" else "BAM"
        batch = kept["configs"][key]["expected_batch_size"]
        points[f"{name}\nbatch {batch:,}"] = slowdown, row["accuracy"]
    return points


def _short_runs() -> dict[str, tuple[float, Any]]:
    """The same of the benchmark of methods."""
    names = {"dp_sgd": "DP-SGD", "dp_sgd_2": "DP-SGD\nbatch × 2", "dp_sgd_4": "DP-SGD\nbatch × 4"}
    names |= {"bam_sam": "BAM", "bam_sam_4": "BAM\nbatch × 4"}
    rows = _read("docs/results/benchmark/benchmark_rows.json")["rows"]
    rows = [x for x in rows if x["data"] == "pixels" and x["epsilon"] == 2]
    rows = [x for x in rows if x["method"] in names]
    return {names[x["method"]]: (x["slowdown"], x["accuracy"]) for x in rows}


def own_data() -> None:
    """Accuracy against the number of one's own images, and ε."""
    lines: dict[str, dict[float, Any]] = {}
    for row in _read("docs/results/own_images/size.json")["rows"]:
        private = row["method"]["name"] != "non_private"
        label = f"ε = {row['config']['epsilon']:g}" if private else "not private"
        lines.setdefault(label, {})[row["num_examples"]] = row["accuracy"]
    # Lines from above to below, with a factor of x by which no bar hides another.
    looks = {"not private": (GREY, 1), "ε = 8": (GREEN, 1.03), "ε = 3": (BLUE, 1)}
    looks["ε = 1"] = RED, 0.97
    _, axis = plt.subplots(figsize=(5, 3.9))
    y = 0.0
    for label, (color, shift) in reversed(looks.items()):
        line = lines[label]
        _line(axis, {shift * num: accuracy for num, accuracy in line.items()}, color)
        y = max(line[min(line)]["mean"], y + 4)  # no label on another
        axis.text(0.9 * min(line), y, label, color=color, weight="bold", ha="right", va="center")
    axis.set(xlabel="training images", ylabel="test accuracy, %", xlim=(190, 5700), ylim=(52, 102))
    log_axis(axis, (500, 1000, 2000, 5000))


def training() -> None:
    """A private training from the data to the statement: the example of docs/own_images.md."""
    folder = "docs/results/own_images"
    record = _read(f"{folder}/training.json")
    plan, rows = record["plan"], record["metrics"]
    _, ((data, numbers), (curves, statement)) = plt.subplots(2, 2, figsize=(5, 4.9))
    with Image.open(ROOT / folder / "sheet.png") as sheet:
        data.imshow(sheet.crop((0, 0, 520, sheet.height)))
    data.set_title("1  Your images")
    data.axis("off")
    table = {
        "privacy": f"ε = {plan['epsilon']:.3g}, δ = {plan['delta']:g}",
        "protects": f"each of {plan['num_examples']} users",
        "batch": f"about {plan['expected_batch_size']} users",
        "draws": f"Poisson, q = {plan['sampling_prob']:.2f}",
        "steps": f"T = {plan['num_steps']}",
        "noise": f"σ = {plan['noise_multiplier']:.2f}",
    }
    for row, (name, value) in enumerate(table.items()):
        numbers.text(0.03, 0.9 - 0.16 * row, name, color=GREY, fontsize=9, va="center")
        numbers.text(0.34, 0.9 - 0.16 * row, value, fontsize=9, va="center")
    numbers.set_title("2  The plan")
    steps = [row["step"] for row in rows]
    curves.plot(steps, [100 * row["test_accuracy"] for row in rows], color=BLUE)
    curves.text(0, 105, "test accuracy, %", color=BLUE)
    curves.set(ylim=(0, 119), xlabel="step", title="3  Training")
    spent = curves.twinx()
    spent.plot([0, *steps], [0, *(row["epsilon"] for row in rows)], color=RED)
    spent.text(steps[-1], 1.2, "ε so far", color=RED, ha="right")
    spent.set(ylim=(0, 1.19 * plan["epsilon"]), yticks=range(1 + math.ceil(plan["epsilon"])))
    spent.grid(visible=False)
    text = (ROOT / folder / "statement.md").read_text(encoding="utf-8")
    words = text.partition("# Privacy of this model")[2].partition(". Nothing")[0].split()
    lines = textwrap.fill(" ".join(words) + " …", 27)
    statement.text(0.03, 0.96, lines, va="top", fontsize=9, linespacing=1.4)
    statement.set_title("4  PRIVACY.md")
    for axis in (numbers, statement):
        axis.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(0, 1))
        axis.grid(visible=False)
        axis.spines[["top", "right"]].set_visible(True)


def _line(axis: Any, points: Mapping[float, Any], color: str, **look: Any) -> None:
    """Draws x -> accuracy in % with its 95 % interval, which ends at 100 as accuracies do."""
    means = [x["mean"] for x in points.values()]
    halves = [x["half_width"] for x in points.values()]
    above = [min(half, 100 - mean) for mean, half in zip(means, halves, strict=True)]
    axis.errorbar([*points], means, (halves, above), fmt="o-", color=color, **look)


def _read(name: str) -> Any:
    return json.loads((ROOT / name).read_text(encoding="utf-8"))


def _name_rows(axis: Any, rows: Mapping[str, Any]) -> None:
    """Names the rows of a chart, from above to below; those without a value are headings."""
    axis.set_yticks(range(len(rows)), rows)
    for each in axis.figure.axes:
        each.tick_params(axis="y", length=0, labelsize=10)
        each.grid(visible=False, axis="y")
    axis.set_ylim(len(rows) - 0.4, -0.6)
    for label, value in zip(axis.get_yticklabels(), rows.values(), strict=True):
        label.set_fontweight("normal" if value else "bold")


def draw(folder: Path) -> list[Path]:
    """Draws them into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for picture in (training, speed, time, own_data):
        path = folder / f"{picture.__name__}.png"
        with plt.rc_context(STYLE):
            picture()
            plt.savefig(path, dpi=144)
            plt.close()
        with Image.open(path) as image:  # a third of the bytes
            image.convert("RGB").quantize(256).save(path, optimize=True)
        paths.append(path)
    return paths


def main() -> None:
    """Draws them where the pages show them."""
    print(*draw(ROOT / "docs/figures/site"), sep="\n")


if __name__ == "__main__":
    console.run(main)
