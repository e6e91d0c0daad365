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

from bam.cli import console, sweeps
from bam.sweep import plot
from bam.sweep.comparison import Study
from bam.sweep.plot import plt
from bam.training import registry

_METHODS = flags.DEFINE_list("methods", "", "METHOD or METHOD:STRENGTH; dp_sgd must be there")
_OUT = flags.DEFINE_string("out", "docs/figures/strengths", "files to write, less .png, .md, .json")
flags.adopt_module_key_flags(sweeps)
console.require("config", "workdir")
console.ensure(("methods",), lambda methods: "dp_sgd" in methods, "--methods must have dp_sgd")


def main() -> None:
    """Trains what is missing, then writes and prints the table and draws the figure."""
    with console.one_line_errors():
        groups = {name: sweeps.method_config(name) for name in _METHODS.value}
        strength = {name: registry.strength(config.method) for name, config in groups.items()}
        study = Study(groups, lambda name: "dp_sgd", facts=lambda x, _: {"strength": strength[x]})
        rows, _ = sweeps.carry_out(study, Path(_OUT.value))
        config = groups["dp_sgd"]
        draw(rows, Path(f"{_OUT.value}.png"), f"{config.dataset.name}, ε = {config.epsilon:g}")


def draw(rows: list[dict[str, Any]], path: Path, where: str) -> None:
    """The gains with their 95 % intervals, a line for each method."""
    figure, axis = plt.subplots(figsize=(7.0, 4.4), layout="constrained")
    stronger = sorted(
        (row for row in rows if row["strength"] and row["gain"]), key=lambda row: row["strength"]
    )
    for method in dict.fromkeys(row["method"]["name"] for row in stronger):
        own = [row for row in stronger if row["method"]["name"] == method]
        plot.error_bars(
            axis,
            [row["strength"] for row in own],
            [row["gain"]["mean"] for row in own],
            [row["gain"]["half_width"] for row in own],
            registry.label(method),
            plot.style_of(method),
        )
    axis.axhline(0, color=plot.style_of("dp_sgd")["color"], linewidth=1, label="DP-SGD")
    plot.log_axis(axis, {row["strength"] for row in stronger})
    axis.set_xlabel("strength: λ of BAM, ρ of DP-SAT")
    axis.set_ylabel("accuracy gained, points")
    axis.legend(frameon=False)
    axis.set_title(f"Accuracy over DP-SGD, paired by seed, 95 % intervals\n{where}", fontsize=11)
    plot.save(figure, path)


if __name__ == "__main__":
    console.run(main)
