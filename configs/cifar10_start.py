"""What DP-SGD begins with: BAM in the first third of steps, or weights learned on drawn images.

Command:   python -m examples.flat_start --radius=0.1 --out=runs/start/flat.safetensors
           python -m examples.flat_start --radius=0 --out=runs/start/plain.safetensors
           bam sweep --config=cifar10_start --methods=dp_sgd,bam_first,flat,plain --num_seeds=5
             --set=epsilon=2 --workdir=runs/start
             --config.dataset.source=parquet --config.dataset.path=FOLDER
           From a clone's root: `examples/` has the schedule and the starts.
Hardware:  one CPU core.

Accuracy, pairs and time: docs/does_bam_help.md. All else is as in cifar10_medium.py.
"""

from ml_collections import ConfigDict

from bam.errors import InputError
from bam.training.registry import METHODS
from configs import cifar10_medium

# The last layer, for other classes, begins at random.
STARTS = {
    name: {"init_from": f"runs/start/{name}.safetensors", "init_fresh": "Dense_0"}
    for name in ("flat", "plain")
}
FIRST = {"name": "examples.penalty_schedule:oracle", "radius": 0.01, "linear": False}


def get_config(name: str = "flat") -> ConfigDict:
    """The config of DP-SGD from a start, or of a method from random weights."""
    config = cifar10_medium.get_config(name if name in METHODS else "dp_sgd")
    if name == "bam_first":
        with config.unlocked():
            config.method = ConfigDict(FIRST | {"last_step": config.num_steps // 3})
    elif name not in METHODS:
        if name not in STARTS:
            raise InputError(f"unknown start {name!r}; choose from bam_first, {', '.join(STARTS)}")
        config.update(STARTS[name])
    return config
