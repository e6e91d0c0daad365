"""What BAM's cheaper ascents do to clipping bias and accuracy, beside the full ascent and DP-SGD.

python -m scripts.paper.ascents --config=configs/cifar10_small.py --workdir=runs/ascents --seeds=3

The bias is the mean over training; it is NOT PRIVATE, so for data one may look at.
"""

from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from bam.cli import console, sweeps
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


def main() -> None:
    """Trains what is missing, then writes and prints the table."""
    with console.one_line_errors():
        groups = {label: _config(*variant) for label, variant in VARIANTS.items()}
        carry_out(Study(groups, lambda label: "DP-SGD"), Path(sweeps.WORKDIR.value) / "ascents")


def _config(method: str, options: dict[str, Any]) -> ConfigDict:
    config = sweeps.method_config(method, {"method.ascent_views", "method.ascent_params"})
    config.method.update(options)
    if not config.diagnostics.every:
        config.diagnostics.every = config.num_steps or 100
    return config


if __name__ == "__main__":
    console.run(main)
