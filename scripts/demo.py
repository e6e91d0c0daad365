"""The demo: how the clip norm C and BAM change clipping bias and accuracy, on digits.

python -m scripts.demo                                      (make demo, once .venv is there)

It trains logistic regression on scikit-learn's digits with 10 seeds, and writes a table and a
picture. Its learning rates and λ are the best of docs/demo/settings.json, a search at commit
1eb7a78 with other seeds, on training images that were set aside.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from bam import files, tables, waits
from bam.cli import command, screen
from bam.files import JsonMapping, JsonObject

with waits.awaited(screen.show, "loading bam"):
    from bam.sweep import plot
    from bam.sweep.comparison import Runs, Study
    from scripts.lib import many_runs

DEFAULTS = (
    "--config=digits", "--workdir=runs/demo", "--num_seeds=10", "--config.model.name=linear",
    "--config.epsilon=1", "--config.checkpoint.every=0", "--config.diagnostics.every=10",
    "--config.diagnostics.num_examples=1437",
)  # fmt: skip

# Entry of the comparison, the baseline first -> C, colour.
ENTRIES = {
    "DP-SGD C=3": (3.0, "#000000"),
    "DP-SGD C=1": (1.0, "#E69F00"),
    "DP-SGD C=10": (10.0, "#CC79A7"),
    "BAM C=3": (3.0, "#0072B2"),
}
SETTINGS = Path(__file__).parents[1] / "docs/demo/settings.json"


def main() -> None:
    """Trains and shows the entries."""
    workdir = Path(flags.FLAGS.workdir)
    screen.say(f"training {len(ENTRIES)} settings, chosen on held-out images; compiling first")
    study = Study(best_configs(), lambda name: next(iter(ENTRIES)))
    rows, runs_by_entry = many_runs.carry_out(study, workdir / "sweep")
    with waits.awaited(screen.show, "drawing"):
        draw(rows, runs_by_entry, workdir / "sweep.png")
    screen.say(*(f"{row['label']}: {verdict(row)}" for row in rows))
    screen.say(f"picture: {workdir / 'sweep.png'} (bias is of training images: not private)")


def best_configs() -> dict[str, ConfigDict]:
    """Maps each entry to the config with the best mean accuracy on held-out images.

    Of equal ones it takes the first.
    """
    rows, configs = reversed(files.read_json(SETTINGS)["rows"]), {}
    best = {x["entry"]: x for x in sorted(rows, key=lambda row: sum(row["accuracies"]))}
    for name, (clip_norm, _) in ENTRIES.items():
        config = many_runs.method_config(
            best[name]["method"], ("clip_norm", "optimizer.learning_rate")
        )
        config.clip_norm, config.optimizer.learning_rate = clip_norm, best[name]["learning_rate"]
        configs[name] = config
    return configs


def verdict(row: JsonMapping) -> str:
    """A row's gain in accuracy over the baseline, in a few words."""
    gain = row["gain"]
    if gain is None:
        return "the others are compared with this"
    points = tables.interval(gain, "+.1f").replace("-", "−") + " points"
    if gain["half_width"] is None:
        return f"{points}, from one run: no evidence"
    return points if abs(gain["mean"]) > gain["half_width"] else f"no difference found ({points})"


def draw(rows: Sequence[JsonMapping], runs_by_entry: Runs, path: Path) -> None:
    """Draws the bias over training and, below it in the same order, the accuracies."""
    figure, (above, below) = plot.plt.subplots(2, 1, figsize=(5.3, 6.2), layout="constrained")
    rows = sorted(rows, key=lambda row: row["relative_bias"]["mean"])
    for y, row in enumerate(rows):
        name, mean, half = row["label"], row["accuracy"]["mean"], row["accuracy"]["half_width"]
        color, runs = ENTRIES[name][1], [run.rows for run in runs_by_entry[name].values()]
        steps, bias = plot.over_seeds(runs, "not_private/relative_bias")
        near: JsonObject = {"textcoords": "offset points", "color": color}
        above.plot(steps, bias.mean(axis=0), color=color, linewidth=2)
        above.annotate(name, (steps[-1], bias[:, -1].mean()), (6, -4), **near)
        below.errorbar(mean, y, xerr=half, color=color, fmt="o", ms=7, capsize=4, lw=2)
        below.annotate(verdict(row), (mean, y), (0, 9), ha="center", fontsize=9, **near)
    above.set_title("Clipping bias, as a share of the gradient's length", loc="left", fontsize=11)
    above.yaxis.set_major_formatter(plot.PercentFormatter(xmax=1))
    above.set_xlabel("training step")
    below.set_title("Test accuracy, %, with 95 % intervals", loc="left", fontsize=11)
    below.set_yticks(range(len(rows)), [row["label"] for row in rows])
    below.set_ylim(-0.5, len(rows) - 0.4)
    below.set_xlabel(f"logistic regression on digits, ε = {rows[0]['epsilon']:.3g}")
    plot.save(figure, path)


if __name__ == "__main__":
    command.run_script(main, defaults=DEFAULTS)
