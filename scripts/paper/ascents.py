"""What BAM's cheaper ascents do to clipping bias and accuracy, beside the full ascent and DP-SGD.

python -m scripts.paper.ascents --config=configs/cifar10_small.py --workdir=runs/ascents --seeds=3
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from bam.cli import console, stats, sweeps, tables
from bam.cli.study import Study, carry_out

flags.adopt_module_key_flags(sweeps)
console.require("config", "workdir")

# Label -> method and its options.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "DP-SGD": ("dp_sgd", {}),
    "BAM-SAM": ("bam_sam", {}),
    "BAM-SAM, one-view ascent": ("bam_sam", {"ascent_views": 1}),
    "BAM-SAM, ascent on GroupNorm only": ("bam_sam", {"ascent_params": "GroupNorm"}),
}
# Of the last step's measurement; NOT PRIVATE, so for data one may look at.
MEASURED = {"‖bias‖": "bias_norm", "relative": "relative_bias", "cosine": "cosine"}
MEASURED |= {"‖ĝ‖": "gradient_norm"}


def main() -> None:
    """Trains what is missing, then writes and prints the table."""
    with console.one_line_errors():
        columns: tables.Columns = {
            heading: lambda row, name=name: tables.interval(row[name], ".3f")  # type: ignore[misc]
            for heading, name in MEASURED.items()
        }
        groups = {label: _config(label) for label in VARIANTS}
        study = Study(groups, lambda label: "DP-SGD", columns, _measured)
        carry_out(study, Path(sweeps.WORKDIR.value) / "ascents")


def _config(label: str) -> ConfigDict:
    method, options = VARIANTS[label]
    config = sweeps.method_config(method, {"method.ascent_views", "method.ascent_params"})
    config.method.update(options)
    if not config.diagnostics.every:
        config.diagnostics.every = config.num_steps or 100
    return config


def _measured(label: str, runs: Sequence[sweeps.Run]) -> dict[str, Any]:
    rows = [[row for row in run.rows if "not_private/bias_norm" in row][-1] for run in runs]
    found = {
        x: stats.estimate([row[f"not_private/{x}"] for row in rows]) for x in MEASURED.values()
    }
    return {name: estimate and estimate._asdict() for name, estimate in found.items()}


if __name__ == "__main__":
    console.run(main)
