"""Draws random views of the first training examples: look at what the model will see.

python -m scripts.contact_sheet --config=configs/cifar10.py --out=views.png
"""

from pathlib import Path

import jax
import numpy as np
from absl import flags
from ml_collections import config_flags

from bam import parts, plotting
from bam.data import augment
from scripts.lib import cli

_CONFIG = config_flags.DEFINE_config_file("config", None, "configs/NAME.py[:METHOD]")
_OUT = flags.DEFINE_string("out", "", "picture to write, PNG or SVG")
_NUM_EXAMPLES = flags.DEFINE_integer("num_examples", 8, "rows of the sheet", lower_bound=1)
flags.mark_flags_as_required(["config"])


def main() -> None:
    """Writes one row per example: the image itself, then its views."""
    with cli.one_line_errors():
        if not _OUT.value:
            raise ValueError("--out is required: the picture to write")
        config = _CONFIG.value
        dataset = parts.make_dataset(config.dataset)
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
        f"(shift ≤ {config.augment.shift}, flip {config.augment.flip})"
    )
    plotting.contact_sheet(np.array(rows), Path(_OUT.value), title)


if __name__ == "__main__":
    cli.run(main)
