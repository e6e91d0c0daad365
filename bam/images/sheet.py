"""A contact sheet: some images of each class, beside each other."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bam import files
from bam.data.common import Split
from bam.extras import needs

with needs("plots"):
    from matplotlib.figure import Figure


def draw(split: Split, classes: Sequence[str], path: Path) -> None:
    """Writes a PNG with a row of up to eight images of each of the first twelve classes."""
    images, labels = split.images, np.asarray(split.labels)
    is_of = labels.T == 1 if labels.ndim == 2 else [labels == k for k in range(len(classes))]
    chosen = [np.flatnonzero(x)[:8] for x in is_of][:12] or [np.arange(min(8, len(labels)))]
    figure = Figure(figsize=(7, 0.95 * len(chosen) + 0.2), layout="constrained")
    axes = figure.subplots(len(chosen), 8, squeeze=False)
    for number, (row, line) in enumerate(zip(chosen, axes, strict=True)):
        line[0].set_title(files.drawn(classes[number]) if classes else "", fontsize=9, loc="left")
        for axis in line:
            axis.set_axis_off()
        for axis, index in zip(line, row, strict=False):
            axis.imshow(images[[index]][0].squeeze(), cmap="gray", vmin=0, vmax=255)
    figure.savefig(path, dpi=150)
