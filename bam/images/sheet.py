"""Draws a contact sheet: some images of each class, side by side."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bam import files
from bam.data.common import Split
from bam.data.preprocessing import Target
from bam.extras import needs
from bam.text import literal

with needs("plots"):
    from matplotlib.figure import Figure


COLUMNS, MOST_ROWS = 8, 12


def draw(split: Split, classes: Sequence[str], path: Path, target: Target) -> None:
    """Writes a PNG with up to eight images of each of the first twelve classes, a row a class.

    Without classes, labels are numbers: up to three rows of images, from the least number to the
    largest, each below its number in the units of the files.
    """
    images, labels = split.images, np.asarray(split.labels)
    if classes:
        masks = labels.T == 1 if labels.ndim == 2 else [labels == k for k in range(len(classes))]
        rows = [np.flatnonzero(x)[:COLUMNS] for x in masks][:MOST_ROWS]
        titles = [[literal(name)] for name in classes]
    else:
        ranks = np.linspace(0, len(labels) - 1, min(3 * COLUMNS, len(labels))).astype(int)
        order = np.argsort(labels, axis=None, kind="stable")[ranks]
        rows = [order[i : i + COLUMNS] for i in range(0, len(order), COLUMNS)]
        numbers = target.in_units(labels.ravel())
        titles = [[f"{numbers[k]:.4g}" for k in row] for row in rows]
    height = 0.95 + 0.15 * (not classes)
    figure = Figure(figsize=(7, height * len(rows) + 0.2), layout="constrained")
    axes = figure.subplots(len(rows), COLUMNS, squeeze=False)
    for row, names, line in zip(rows, titles, axes, strict=False):
        for axis in line:
            axis.set_axis_off()
        for axis, name in zip(line, names, strict=False):
            axis.set_title(name, fontsize=9, loc="left")
        for axis, index in zip(line, row, strict=False):
            axis.imshow(images[[index]][0].squeeze(), cmap="gray", vmin=0, vmax=255)
    with files.write_atomically(path, mode=0o600) as file:  # private images, for its owner alone
        figure.savefig(file, dpi=150, format=path.suffix.lower().lstrip(".") or "png")
