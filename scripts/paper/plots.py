"""Draws the picture of speed from the files that `make bench-peers` leaves in benchmarks/.

python -m scripts.paper.plots

The other pictures in docs/figures/site/ are of many_runs that ended: they were drawn at the tags
`archive-0.2.0` and `archive-0.3`.
"""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from bam.cli import console
from bam.sweep.plot import plt

ROOT = Path(__file__).parents[2]
BLUE, GREY = "#0072B2", "#777777"
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


def draw(folder: Path) -> Path:
    """Draws it into a folder."""
    path = folder / "speed.png"
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        speed()
        plt.savefig(path, dpi=144)
        plt.close()
    with Image.open(path) as image:  # a third of the bytes
        image.convert("RGB").quantize(256).save(path, optimize=True)
    return path


def main() -> None:
    """Draws it where the page shows it."""
    print(draw(ROOT / "docs/figures/site"))


if __name__ == "__main__":
    console.run(main)
