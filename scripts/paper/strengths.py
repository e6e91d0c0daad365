"""Accuracy gained over DP-SGD against the strength of the ascent (λ of BAM, ρ of DP-SAT).

python -m scripts.paper.strengths --config=configs/cifar10_scattering.py --workdir=runs/figures \
  --methods=dp_sgd,bam_sam:0.002,bam_sam:0.01 --num_seeds=5 --out=docs/figures/strengths \
  --config.dataset.source=parquet --config.dataset.path=FOLDER

Runs are those of scripts.paper.figures, which can share the workdir: give both the same --config
flags, --config.diagnostics.every among them.
"""

from pathlib import Path
from typing import Any

from absl import flags

from bam import files
from bam.cli import console, plotting, sweeps, tables
from bam.cli.plotting import plt
from bam.training import registry

_METHODS = flags.DEFINE_list("methods", "", "METHOD or METHOD:STRENGTH; dp_sgd must be there")
_OUT = flags.DEFINE_string("out", "docs/figures/strengths", "files to write, less .png, .md, .json")
flags.adopt_module_key_flags(sweeps)
console.require("config", "workdir")
console.ensure(("methods",), lambda methods: "dp_sgd" in methods, "--methods must have dp_sgd")

COLUMNS: tables.Columns = {
    "method": lambda row: registry.label(row["method"]),
    "strength": lambda row: f"{row['strength']:g}" if row["strength"] else "–",
    "seeds": lambda row: str(len(row["accuracies"])),
    "accuracy, %": lambda row: tables.interval(row["accuracy"], ".2f"),
    **tables.gain("gain", lambda row: row["method"] == "dp_sgd"),
}


def main() -> None:
    """Trains what is missing, then writes and prints the table and draws the figure."""
    with console.one_line_errors():
        groups = {
            name: sweeps.of_seeds(name.replace(":", "_"), sweeps.strength_config(name))
            for name in _METHODS.value
        }
        found = sweeps.run_missing(groups)
        rows = []
        for name, runs in found.items():
            method = next(iter(groups[name].values())).method
            rows.append(
                {
                    "method": method.name,
                    "strength": registry.strength(method),
                    **sweeps.judged(runs, found["dp_sgd"]),
                }
            )
        out = Path(_OUT.value)
        out.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(Path(f"{out}.json"), rows)
        config = next(iter(groups["dp_sgd"].values()))
        draw(rows, Path(f"{out}.png"), f"{config.dataset.name}, ε = {config.epsilon:g}")
    tables.show(COLUMNS, rows, keep=Path(f"{out}.md"))


def draw(rows: list[dict[str, Any]], path: Path, where: str) -> None:
    """The gains with their 95 % intervals, a line for each method."""
    figure, axis = plt.subplots(figsize=(7.0, 4.4), layout="constrained")
    stronger = sorted(
        (row for row in rows if row["strength"] and row["gain"]), key=lambda row: row["strength"]
    )
    for method in dict.fromkeys(row["method"] for row in stronger):
        own = [row for row in stronger if row["method"] == method]
        plotting.error_bars(
            axis,
            [row["strength"] for row in own],
            [row["gain"]["mean"] for row in own],
            [row["gain"]["half_width"] for row in own],
            registry.label(method),
            plotting.style_of(method),
        )
    axis.axhline(0, color=plotting.style_of("dp_sgd")["color"], linewidth=1, label="DP-SGD")
    plotting.log_axis(axis, {row["strength"] for row in stronger})
    axis.set_xlabel("strength: λ of BAM, ρ of DP-SAT")
    axis.set_ylabel("accuracy gained, points")
    axis.legend(frameon=False)
    axis.set_title(f"Accuracy over DP-SGD, paired by seed, 95 % intervals\n{where}", fontsize=11)
    plotting.save(figure, path)


if __name__ == "__main__":
    console.run(main)
