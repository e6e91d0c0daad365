"""Draws random views of the first training examples: look at what the model will see.

python -m scripts.contact_sheet --config=configs/cifar10.py --out=views.png
"""

from pathlib import Path

import jax
import numpy as np
from absl import flags
from ml_collections import config_flags

from bam.cli import console
from bam.data import augment
from bam.sweep import plot
from bam.sweep.plot import plt
from bam.training import loading

_CONFIG = config_flags.DEFINE_config_file("config", None, "configs/NAME.py[:METHOD]")
_OUT = flags.DEFINE_string("out", "", "PNG file to write")
_NUM_EXAMPLES = flags.DEFINE_integer("num_examples", 8, "rows of the sheet", lower_bound=1)
console.require("config", "out")


def main() -> None:
    """Writes one row per example: the image itself, then its views."""
    with console.one_line_errors():
        console.check_writable(_OUT.value)
        config = _CONFIG.value
        dataset = loading.make_dataset(config.dataset)
        options = {k: config.augment[k] for k in ("shift", "flip")}
        augment.check(config.augment.views, **options)
        rows = []
        for index in range(min(_NUM_EXAMPLES.value, len(dataset.train.labels))):
            image = jax.numpy.asarray(dataset.train.images[index])
            key = jax.random.fold_in(jax.random.key(config.seed or 0), index)
            views = augment.views(key, image, num_views=config.augment.views, **options)
            rows.append(np.concatenate([np.asarray(image)[None], np.asarray(views)]))
        title = (
            f"{dataset.name}: the image, then {config.augment.views} views "
            f"(shift ≤ {options['shift']}, flip {options['flip']})"
        )
        draw(np.array(rows), Path(_OUT.value), title)


def draw(images: np.ndarray, path: Path, title: str) -> None:
    """Draws uint8 images `[rows, columns, height, width, 1 or 3]` as a grid."""
    num_rows, num_columns = images.shape[:2]
    framed = np.pad(images, [(0, 0), (0, 0), (1, 1), (1, 1), (0, 0)], constant_values=255)
    whole = np.concatenate(np.concatenate(framed, axis=-3), axis=-2)
    size = (0.7 * num_columns + 0.3, 0.72 * num_rows + 0.5)
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    axis.imshow(whole.squeeze(), cmap="gray", vmin=0, vmax=255)
    axis.set_axis_off()
    figure.suptitle(title, fontsize=10)
    plot.save(figure, path)


if __name__ == "__main__":
    console.run(main)
