"""Draws the pictures of the site, from the JSON and CSV files that the studies left.

python -m scripts.paper.plots [--only=gains,time] [--out=docs/figures/site]
"""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from PIL import Image

from bam.cli import console
from bam.sweep import plot
from bam.sweep.plot import plt
from bam.training import registry
from scripts.lib import kept

_ONLY = flags.DEFINE_list("only", "", "pictures to draw, by name; empty: all")
_OUT = flags.DEFINE_string("out", "docs/figures/site", "folder for NAME.png")

BLACK, BAM, RED = "#000000", "#0072B2", "#D55E00"
GREEN, GREY, ORANGE = "#009E73", "#777777", "#E69F00"
# In pictures 5 inches wide: on a page of 390 pixels letters are then as large as its text.
STYLE: dict[Any, Any] = {
    "font.size": 11, "axes.titlesize": 11, "axes.titlelocation": "left", "axes.grid": True,
    "axes.axisbelow": True, "grid.alpha": 0.25, "axes.spines.top": False, "errorbar.capsize": 3,
    "axes.spines.right": False, "figure.constrained_layout.use": True, "lines.linewidth": 1.8,
    "figure.constrained_layout.h_pad": 0.08, "lines.markersize": 5,
}  # fmt: skip


def _line(axis: Any, points: Mapping[float, kept.Interval], color: str, **look: Any) -> None:
    middle, low, high = np.array([*points.values()]).T
    bars = (middle - low, high - middle)
    axis.errorbar([*points], middle, bars, fmt="o-", color=color, **look)


def _rows(axis: Any, rows: Mapping[str, Any]) -> None:
    """Names the rows of a chart, from above to below; those without a value are headings."""
    axis.set_yticks(range(len(rows)), rows)
    for each in axis.figure.axes:
        each.tick_params(axis="y", length=0, labelsize=10)
        each.grid(visible=False, axis="y")
    axis.set_ylim(len(rows) - 0.4, -0.6)
    for label, value in zip(axis.get_yticklabels(), rows.values(), strict=True):
        label.set_fontweight("normal" if value else "bold")


def gains() -> None:
    """What BAM gains over DP-SGD, as a forest plot."""
    rows = kept.gain_rows()
    _, axis = plt.subplots(figsize=(5, 0.9 + 0.225 * len(rows)))
    for y, gain in enumerate(rows.values()):
        if gain:
            color, half = RED if y == len(rows) - 1 else BAM, gain["half_width"]
            face, note = (color, "") if half else ("white", "one pair")
            axis.errorbar(gain["mean"], y, xerr=half, fmt="o", color=color, mfc=face)
            text = f"{note} {gain['mean']:+.2f}".replace("-", "−")
            axis.text(5.4, y, text, ha="right", va="center", fontsize=10)
    axis.axvline(0, color=BLACK, lw=1)
    axis.axhspan(len(rows) - 2.5, len(rows), color=RED, alpha=0.12, lw=0)
    _rows(axis, rows)
    axis.set(xlim=(-1.6, 5.4), xlabel="points over DP-SGD, 95 % interval")


def time() -> None:
    """Accuracy against time at equal ε."""
    panels = kept.timed()
    _, axes = plt.subplots(len(panels), figsize=(5, 0.3 + 3.3 * len(panels)), squeeze=False)
    for axis, (title, points) in zip(axes.flat, panels.items(), strict=True):
        for label, ratio, found in points:
            color = BAM if label.startswith("BAM") else RED if ratio > 1.5 else BLACK
            _line(axis, {ratio: kept.interval(found)}, color, ms=8)
            place, text = (1.06 * ratio, found["mean"]), f"{label}\n{found['mean']:.1f} %"
            axis.text(*place, text, va="center", color=color, weight="bold")
        longest = max(ratio for _, ratio, _ in points)
        axis.set(title=title, ylabel="test accuracy, %", xlim=(0.85, 2 * longest))
        axis.margins(y=0.12)
        plot.log_axis(axis, (x for x in (1, 2, 4, 8) if x < 1.1 * longest))
    axes.flat[-1].set_xlabel("training time, × DP-SGD's")


def bias() -> None:
    """‖bias‖, ‖gradient‖ and their ratio over those of DP-SGD, against λ."""
    _, axes = plt.subplots(1, 2, figsize=(5, 3.9), sharey=True)
    shown = {
        "bias_norm": (RED, 0.94, 0.012, 0.34, "bias"),
        "gradient_norm": (BAM, 1.06, 0.03, 0.56, "gradient"),
        "relative_bias": (GREEN, 1, 0.01, 1.06, "bias / gradient"),
    }
    for axis, folder in zip(axes, ("", "scattering/"), strict=True):
        for quantity, (color, shift, x, y, label) in shown.items():
            found = kept.effects(folder, quantity)
            _line(axis, {shift * key: value for key, value in found.items()}, color)
            axis.text(x, y, "" if folder else label, color=color, weight="bold")
        axis.axhline(1, color=BLACK, lw=1)
        axis.set(title="Linear, features" if folder else "ResNet-9, width 8", xlabel="λ")
        axis.set_yscale("log")
        plot.log_axis(axis, found)
    marks = (0.2, 0.3, 0.5, 0.7, 1, 1.5, 2)
    axes[0].set_yticks(marks, [f"{mark:g}×" for mark in marks])
    axes[0].set_ylabel("times DP-SGD's")


def strength() -> None:
    """What BAM gains over DP-SGD, against λ."""
    _, axis = plt.subplots(figsize=(5, 3.9))
    looks = ((BAM, 0.5, 1.0), (GREEN, -2.6, 0.96), (RED, -5.6, 1.04))
    for (label, line), (color, y, shift) in zip(kept.strength_lines().items(), looks, strict=True):
        _line(axis, {shift * key: value for key, value in line.items()}, color)
        axis.text(0.001, y, label, color=color, weight="bold")
    axis.axhline(0, color=BLACK, lw=1)
    axis.set(xlabel="λ", ylabel="points over DP-SGD")
    plot.log_axis(axis, (0.001, 0.005, 0.01, 0.02, 0.05, 0.1))


def searches() -> None:
    """Held-out accuracy of DP-SGD and BAM by learning rate and λ."""
    figure = plt.figure(figsize=(5, 5.2))
    axes = figure.subplot_mosaic("ab;cc", height_ratios=(6, 3)).values()
    files = {"Linear, C = 0.1": ["scattering/search_C0.1"]}
    files["Linear, C = 50"] = ["scattering/search_C50"]
    files["ResNet-9, C = 1"] = ["cifar10_medium/search", "cifar10_medium/finer/search"]
    for axis, (title, names) in zip(axes, files.items(), strict=True):
        rows = [row for name in names for row in kept.read(f"docs/results/{name}.json")]
        found = {
            (row["strength"], row["learning_rate"]): row["accuracy"]
            for row in rows
            if row["method"] in ("dp_sgd", "bam_sam") and row["accuracy"]
        }
        down, across = (sorted({key[k] for key in found}) for k in (0, 1))
        best = max(found.values())
        cells = [[found.get((y, x), np.nan) for x in across] for y in down]
        axis.imshow(cells, cmap="cividis", aspect="auto", vmin=best - 4, vmax=best)
        for (y, x), value in found.items():
            look: Any = {"color": BLACK if value > best - 2 else "white", "fontsize": 10}
            look |= {"ha": "center", "va": "center", "weight": 700 if value == best else 400}
            axis.text(across.index(x), down.index(y), f"{value:.1f}", **look)
        axis.set_xticks(range(len(across)), [f"{x:g}" for x in across])
        axis.set_yticks(range(len(down)), [f"λ = {y:g}" if y else "DP-SGD" for y in down])
        axis.set_title(title)
        axis.grid(visible=False)
    figure.supxlabel("learning rate, at ε = 2", fontsize=11)


def audits() -> None:
    """The lower bounds of audits, and the claims."""
    rows = {}
    _, axis = plt.subplots(figsize=(5, 4.2))
    for y, row in enumerate(kept.read("docs/audit.json")):
        low, claimed = row["empirical_epsilon_lower"], row["claimed_epsilon"]
        axis.plot((low, claimed), (y, y), color=BAM, lw=7, solid_capstyle="butt", alpha=0.35)
        axis.plot(low, y, "o", color=BAM, ms=6)
        axis.plot(claimed, y, "|", color=BLACK, ms=16, mew=2.5)
        axis.text(low - 0.1, y, f"{low:.2f}", ha="right", va="center", color=BAM)
        setting = (
            f"one run, {row['dataset'].replace('mnist', 'MNIST')}"
            if "kind" in row
            else f"q = {row['sampling_prob']:g}"
        )
        rows[f"{registry.label(row['method'])}, {setting}"] = row
    _rows(axis, rows)
    axis.set(title="● lower bound by audit    ┃ claim", xlim=(0, 4.4), xlabel="ε")


def speed() -> None:
    """Milliseconds of an example beside other libraries."""
    data = [kept.read(f"benchmarks/{name}_cpu.json") for name in ("peers", "peers_512")]
    versions = {name: text.split("+")[0] for name, text in data[1]["versions"].items()}
    bars = {
        "Ordinary training": "", "bam": "ours_nonprivate",
        f"PyTorch {versions['torch']}": "torch_nonprivate", "DP-SGD": "", " bam": "ours_dp_sgd",
        f"jax-privacy {versions['jax-privacy']}": "jax_privacy",
        f"Opacus {versions['opacus']}, hooks": "opacus_hooks",
        f"Opacus {versions['opacus']}, ghost": "opacus_ghost", "BAM": "", "  bam": "ours_bam_sam",
    }  # fmt: skip
    _, axes = plt.subplots(1, 2, figsize=(5, 4.1), sharey=True, sharex=True)
    for axis, found in zip(axes, data, strict=True):
        for y, key in enumerate(bars.values()):
            value = statistics.median(found["observations"].get(key, [0]))
            axis.barh(y, value, color=BAM if key.startswith("ours") else GREY)
            text = f"{value:.0f}" if value else "not run" if key else ""
            axis.text(value + 2, y, text, va="center")
        axis.set(title=f"batch of {found['batch']}", xlabel="ms per example", xlim=(0, 115))
    _rows(axes[0], bars)


def hardware() -> None:
    """The share of a chip's peak that compilers lead one to expect."""
    methods = {"ordinary": "non_private", "DP-SGD": "dp_sgd", "BAM": "bam_sam"}
    methods |= {"BAM, ascent\nof one view": "bam_sam_one_view", "BAM, exact": "bam_exact"}
    figure, axes = plt.subplots(1, 2, figsize=(5, 4.2), sharey=True, sharex=True)
    titles = {"cifar10": "ResNet-9, CIFAR-10", "imagenet32": "WRN-16-4, ImageNet32"}
    for axis, (config, title) in zip(axes, titles.items(), strict=True):
        for chip, color, shift in (("v5e_1x1", BAM, -0.2), ("h100", ORANGE, 0.2)):
            names = [f"benchmarks/hardware/{config}_{x}_{chip}.json" for x in methods.values()]
            shares = [100 * kept.read(name)["estimated_share_of_peak"] for name in names]
            bars = axis.barh(np.arange(len(methods)) + shift, shares, 0.38, color=color)
            axis.bar_label(bars, fmt="%.0f", padding=2, fontsize=10)
        axis.set(xlabel="% of peak", xlim=(0, 68))
        axis.set_title(title, fontsize=10)
    _rows(axes[0], methods)
    chips = ("TPU v5e, estimate", "H100, upper bound")
    plot.legend_below(figure, dict(zip(chips, axes[0].containers, strict=True)))


def own_data() -> None:
    """Accuracy against the number of one's own images, and ε."""
    lines: dict[str, dict[float, kept.Interval]] = {}
    for row in kept.read("docs/results/own_images/size.json")["rows"]:
        private = row["method"]["name"] != "non_private"
        label = f"ε = {row['config']['epsilon']:g}" if private else "not private"
        lines.setdefault(label, {})[row["num_examples"]] = kept.interval(row["accuracy"])
    _, axis = plt.subplots(figsize=(5, 3.9))
    looks, y = dict(zip(lines, ((GREY, 1), (RED, 0.97), (BAM, 1), (GREEN, 1.03)), strict=True)), 0.0
    for label, line in sorted(lines.items(), key=lambda item: min(item[1].items())):
        color, shift = looks[label]
        _line(axis, {shift * key: value for key, value in line.items()}, color)
        y = max(line[min(line)][0], y + 4)  # no label on another
        axis.text(0.9 * min(line), y, label, color=color, weight="bold", ha="right", va="center")
    axis.set(xlabel="training images", ylabel="test accuracy, %", xlim=(210, 5700))
    axis.set_ylim(top=102)
    plot.log_axis(axis, (500, 1000, 2000, 5000))


PICTURES = {
    picture.__name__: picture
    for picture in (gains, time, bias, strength, searches, audits, speed, hardware, own_data)
}


def draw(name: str, folder: Path) -> Path:
    """Draws a picture into a folder; ValueError for one that there is not."""
    if name not in PICTURES:
        raise ValueError(f"no picture {name!r}; there are {', '.join(PICTURES)}")
    path = folder / f"{name}.png"
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        PICTURES[name]()
        plt.savefig(path, dpi=144)
        plt.close()
    with Image.open(path) as image:  # a third of the bytes
        image.convert("RGB").quantize(256).save(path, optimize=True)
    return path


def main() -> None:
    """Draws what is asked for."""
    with console.one_line_errors():
        for name in _ONLY.value or PICTURES:
            print(draw(name, Path(_OUT.value)))


if __name__ == "__main__":
    console.run(main)
