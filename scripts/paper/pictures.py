"""Draws pictures from the numbers that are kept in benchmarks/, docs/results/ and docs/figures/.

python -m scripts.paper.pictures

It draws five pictures of docs/figures/site/; the others there are of studies that ended, and were
drawn at the commits 1eb7a78 and 1b935bb. It also draws again the pictures of clipping
bias, beside their CSV files. `scripts.paper.figures` made those of figures 2 and 4 to 6; earlier
versions made `lambda`, `scattering/batches` and `bias_accuracy`.
"""

import csv
import json
import math
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from bam import waits
from bam.cli import command, screen
from bam.part_table import METHODS
from bam.sweep import plot
from bam.sweep.plot import log_axis, plt
from bam.training import methods

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
    for axis, timings in zip(axes, data, strict=True):
        for y, key in enumerate(bars.values()):
            value = statistics.median(timings["observations"].get(key, [0]))
            axis.barh(y, value, color=BLUE if key.startswith("ours") else GREY)
            text = f"{value:.0f}" if value else "not run" if key else ""
            axis.text(value + 2, y, text, va="center")
        axis.set(title=f"batch of {timings['batch']}", xlabel="ms per example", xlim=(0, 115))
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
        record = _read(f"docs/results/cifar10_medium{folder}/table1.json")
        [row] = (x for x in record["rows"] if x["method"] == method)
        key = f"cifar10_medium/epsilon2/{method}"
        seconds = [record["runs"][f"{key}/seed{x}"]["seconds"] for x in row["seeds"]]
        base = base or seconds
        slowdown = statistics.median(x / y for x, y in zip(seconds, base, strict=False))
        name = "DP-SGD" if method == "dp_sgd" else "BAM"
        batch = record["configs"][key]["expected_batch_size"]
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


def _table(name: str) -> list[dict[str, str]]:
    with (ROOT / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _read(name: str) -> Any:
    return json.loads((ROOT / name).read_text(encoding="utf-8"))


def _name_rows(axis: Any, rows: Mapping[str, Any]) -> None:
    """Names the rows of a chart, from above to below.

    Rows without a value are headings.
    """
    axis.set_yticks(range(len(rows)), rows)
    for each in axis.figure.axes:
        each.tick_params(axis="y", length=0, labelsize=10)
        each.grid(visible=False, axis="y")
    axis.set_ylim(len(rows) - 0.4, -0.6)
    for label, value in zip(axis.get_yticklabels(), rows.values(), strict=True):
        label.set_fontweight("normal" if value else "bold")


# The panels of a picture: a quantity of its CSV file -> the heading.
# Drawn together, because ‖bias‖ alone does not show its causes.
BIAS = {
    "bias_norm": "clipping bias ‖ĝ_clip − ĝ‖",
    "gradient_norm": "gradient ‖ĝ‖",
    "relative_bias": "relative bias ‖ĝ_clip − ĝ‖ / ‖ĝ‖",
    "cosine": "direction kept, cos(ĝ_clip, ĝ)",
}
ASCENT = {
    "cosine_previous": "DP-SAT:\ncos(previous private gradient, ĝ)",
    "cosine_examples": "BAM:\nmean of cos(g_i, ĝ)",
    "cosine_others": "BAM: the same,\nwithout g_i's own share of ĝ",
}
STAGES = {"start": "before the first step", "end": "after the last step"}
BY_STAGE = {f"{x} {y}": f"{text}\n{STAGES[y]}" for y in STAGES for x, text in BIAS.items()}
DIRECTION = {name: text for name, text in BY_STAGE.items() if name.startswith("cosine")}
SMALL = "ResNet-9 of width 8, CIFAR-10\ntrained in batches of 512, ε = 2"
WIDE = "ResNet-9 of width 16, CIFAR-10\ntrained in batches of 2048, ε = 2"
LINEAR = "linear model on features of CIFAR-10\n{}ε = 3"
FEATURES = LINEAR.format("trained in batches of 4096, ")
TRAINED = "Clipping bias and accuracy of runs trained with each batch size"
WEIGHTS = "BAM's clipping bias at DP-SGD's weights; DP-SGD is at λ = 0"


class Study(NamedTuple):
    """A picture of numbers that are kept beside it, under docs/figures/."""

    title: str
    headings: Mapping[str, str]
    x_name: str = "step"
    share_y: bool = False


STUDIES = {
    "figure2": Study(f"Clipping bias over training\n{SMALL}", BIAS),
    "scattering/figure2": Study(f"Clipping bias over training\n{FEATURES}", BIAS),
    "batch_2048/figure2": Study(f"Clipping bias over training\n{WIDE}", BIAS),
    "figure4": Study(f"Ascent direction and batch gradient\n{SMALL}", ASCENT, share_y=True),
    "scattering/figure4": Study(
        f"Ascent direction and batch gradient\n{FEATURES}", ASCENT, share_y=True
    ),
    "figure5": Study(f"Clipping bias against the batch size\n{SMALL}", BY_STAGE, "batch size"),
    "figure6": Study(f"Direction kept against the batch size\n{SMALL}", DIRECTION, "batch size"),
    "lambda": Study(f"{WEIGHTS}\n{SMALL}", BY_STAGE, "strength"),
    "scattering/batches": Study(
        f"{TRAINED}\n{LINEAR.format('10 epochs, ')}",
        BIAS | {"test_accuracy": "test accuracy"},
        "batch size",
    ),
}
# Settings that the compared runs of `bias_accuracy` share, and those that its pairs share, too.
PROBLEM = ("holdout", "dataset", "model", "batch_size", "epsilon", "rest")
PAIRED = ("seed", "clip_norm", "learning_rate")


def study(name: str, path: Path) -> None:
    """Draws a picture of `STUDIES` from its CSV file."""
    title, headings, x_name, share_y = STUDIES[name]
    rows = _table(f"docs/figures/{name}.csv")
    seeds = [key for key in rows[0] if key.startswith("seed ")]
    lines: Any = defaultdict(lambda: defaultdict(dict))  # quantity -> method -> x -> values by seed
    for row in rows:
        method, values = row["method"], [float(row[seed]) for seed in seeds]
        if x_name == "strength":  # one line, which begins at DP-SGD
            if method.startswith("DP-SAT"):
                continue
            method = "BAM (SAM)"
        lines[row["quantity"]][method][float(row[x_name])] = values
    looks = _looks(sorted({method for by_method in lines.values() for method in by_method}))
    charts = []
    for quantity, heading in headings.items():
        mean_lines = [
            plot.mean_line(method, [*points], np.array([*points.values()]).T, looks[method])
            for method, points in lines[quantity].items()
        ]
        x_label = "λ" if x_name == "strength" else x_name
        percent = quantity == "test_accuracy"
        charts.append(plot.Panel(heading, x_label, mean_lines, x_name == "batch size", percent))
    title += f", mean ± SD of {len(seeds)} seeds"
    plot.panels(charts, path, title, share_y=share_y)


def _looks(names: Sequence[str]) -> dict[str, Any]:
    """Line styles of methods by their label, with or without a strength."""
    sections: dict[str, Any] = {}  # as a config's `method`
    for name in names:
        label, _, strength = name.partition(", ")
        [key] = (x for x, method in METHODS.items() if method.label == label)
        sections[name] = {"name": key, "mix": 1.0}
        if METHODS[key].strength:
            value = float(strength.partition(" = ")[2] or 0)
            sections[name][METHODS[key].strength] = value
    styles = plot.styles([*sections.values()])
    return {name: styles[methods.full_label(section)] for name, section in sections.items()}


def bias_accuracy(path: Path) -> None:
    """Accuracy against the direction kept, each run less a mean of comparable runs."""
    runs = _table("docs/figures/bias_accuracy.csv")
    plain = [run for run in runs if run["method"] == "dp_sgd"]
    ours = [run for run in runs if run["method"] != "dp_sgd"]
    compared = {
        "accuracy, points over\nthe mean of its budget": (runs, runs, PROBLEM),
        "accuracy, points over DP-SGD\nof the same seed, C and rate": (
            ours, plain, (*PROBLEM, *PAIRED),
        ),
    }  # fmt: skip
    cosines = {"cosine": "cos(ĝ_clip, ĝ), of the\ngradients that are clipped"}
    cosines["against_plain/cosine"] = "cos(ĝ_clip, ∇L),\nof the loss at θ"
    figure, axes = plt.subplots(2, 2, figsize=(6.2, 6.6), layout="constrained", sharey="row")
    dots: dict[str, Any] = {}
    for row_axes, (y_label, (subject, base, shared)) in zip(axes, compared.items(), strict=True):
        for axis, (quantity, heading) in zip(row_axes, cosines.items(), strict=True):
            for method in ("bam_exact", "bam_sam", "dp_sat", "dp_sgd"):
                points = _less([run for run in subject if run["method"] == method], base, shared)
                color = plot.style_of(method)["color"]
                look = {"s": 16, "alpha": 0.7, "linewidths": 0, "color": color}
                marks = axis.scatter(
                    [x[quantity] for x in points], [x["accuracy"] for x in points], **look
                )
                dots.setdefault(methods.label(method), marks)
            axis.axhline(0, color=GREY, linewidth=0.8, zorder=0)
            axis.axvline(0, color=GREY, linewidth=0.8, zorder=0)
            axis.set_title(heading, fontsize=10)
            axis.set_xlabel("difference in the direction kept")
        row_axes[0].set_ylabel(y_label)
    plot.legend_below(figure, dots)
    figure.suptitle("Is less directional bias more accuracy? One dot a run", fontsize=11)
    plot.save(figure, path)


def _less(
    runs: Sequence[Mapping[str, str]], base: Sequence[Mapping[str, str]], shared: Sequence[str]
) -> list[dict[str, float]]:
    """Accuracy and cosines of runs, less the means of the base runs with the same settings."""
    names = ("accuracy", "cosine", "against_plain/cosine")
    differences = []
    for run in runs:
        same = [x for x in base if all(x[key] == run[key] for key in shared)]
        if same:
            differences.append(
                {x: float(run[x]) - statistics.mean(float(y[x]) for y in same) for x in names}
            )
    return differences


def audits() -> None:
    """The lower bounds on ε of audits beside the claims."""
    rows = {}
    _, axis = plt.subplots(figsize=(5, 4.2))
    for y, row in enumerate(_read("docs/audit.json")):
        is_one_run = "kind" in row
        which = "_independent" * is_one_run
        lower, claimed = row[f"empirical_epsilon_lower{which}"], row["claimed_epsilon"]
        axis.plot((lower, claimed), (y, y), color=BLUE, lw=7, solid_capstyle="butt", alpha=0.35)
        axis.plot(lower, y, "o", color=BLUE, ms=6)
        axis.plot(claimed, y, "|", color=BLACK, ms=16, mew=2.5)
        axis.text(lower - 0.1, y, f"{lower:.2f}", ha="right", va="center", color=BLUE)
        dataset = row.get("dataset", "").replace("mnist", "MNIST")
        setting = f"one run, {dataset}" if is_one_run else f"q = {row['sampling_prob']:g}"
        rows[f"{methods.label(row['method'])}, {setting}"] = row
    _name_rows(axis, rows)
    axis.set(title="● lower bound by audit    ┃ claim", xlim=(0, 4.4), xlabel="ε")


def draw(folder: Path) -> list[Path]:
    """Draws the pictures of docs/figures/site/ into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for picture in (training, speed, time, own_data, audits):
        path = folder / f"{picture.__name__}.png"
        with plt.rc_context(STYLE):
            picture()
            plt.savefig(path, dpi=144)
            plt.close()
        _shrink(path)
        paths.append(path)
    return paths


def draw_studies(folder: Path) -> list[Path]:
    """Draws the pictures of `STUDIES`, and that of accuracy, into a folder."""
    paths = [folder / f"{name}.png" for name in (*STUDIES, "bias_accuracy")]
    for name, path in zip(STUDIES, paths, strict=False):
        path.parent.mkdir(parents=True, exist_ok=True)
        study(name, path)
    bias_accuracy(paths[-1])
    for path in paths:
        _shrink(path)
    return paths


def _shrink(path: Path) -> None:
    """Keeps 256 colours, for a third of the bytes."""
    with Image.open(path) as image:
        image.convert("RGB").quantize(256).save(path, optimize=True)


def main() -> None:
    """Draws them where the pages show them."""
    figures = ROOT / "docs/figures"
    with waits.awaited(screen.show, "drawing"):
        paths = [*draw(figures / "site"), *draw_studies(figures)]
    screen.say(*map(str, paths))


if __name__ == "__main__":
    command.run_script(main)
