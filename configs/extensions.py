"""The worked extensions of `examples/` on digits, beside DP-SGD and BAM.

Command:   bam train --config=extensions:NAME --workdir=DIR
           NAME is a key of EXTENSIONS below.
Hardware:  any CPU.

Not in the paper. docs/benchmark.md compares them, with settings of their own.
"""

from collections.abc import Mapping

from ml_collections import ConfigDict

from bam.errors import InputError
from bam.files import JsonMapping
from bam.training import config as base
from configs import digits

# Name -> (method, parts that differ from its config's, each with its options).
EXTENSIONS = {
    "dp_sgd": ("dp_sgd", {}),
    "bam_sam": ("bam_sam", {}),
    "automatic": ("dp_sgd", {"clip": {"name": "examples.automatic_clipping:clip", "gamma": 0.01}}),
    "adaptive": ("dp_sgd", {"clip": {"name": "examples.adaptive_clipping:clip", "quantile": 0.5}}),
    "psac": ("dp_sgd", {"clip": {"name": "examples.dp_psac:clip", "r": 0.1}}),
    "slaclip": ("dp_sgd", {"clip": {"name": "examples.slaclip:clip", "num_slots": 50}}),
    "schedule": (
        "dp_sgd",
        {"method": {"name": "examples.penalty_schedule:oracle", "radius": 0.02, "last_step": 50}},
    ),
    "adam_bc": (
        "dp_sgd",
        {"optimizer": {"name": "examples.dp_adam_bc:optimizer", "b1": 0.9, "b2": 0.999}},
    ),
    "disk": (
        "dp_sgd",
        {
            "method": {"name": "examples.disk:oracle", "kappa": 0.7, "gamma": 0.5}
            | {"learning_rate": 0.1},
            "clip": {"name": "examples.disk:clip", "kappa": 0.7},
            "optimizer": {"name": "sgd", "learning_rate": 0.1, "momentum": 0.0},
        },
    ),
    "scale": ("dp_sgd", {"clip": {"name": "examples.scale_then_privatize:clip", "floor": 0.01}}),
    "lookahead": (
        "dp_sgd",
        {"optimizer": {"name": "examples.eval_params:lookahead", "learning_rate": 1.0}},
    ),
    "schedule_free": (
        "dp_sgd",
        {"optimizer": {"name": "examples.eval_params:schedule_free", "learning_rate": 1.0}},
    ),
    "low_pass": ("dp_sgd", {"optimizer": {"name": "examples.low_pass:adam", "decay": 0.9}}),
    "smoothing": (
        "dp_sgd",
        {"method": {"name": "examples.random_smoothing:oracle", "radius": 0.05}},
    ),
}


def get_config(name: str = "automatic") -> ConfigDict:
    """Returns the configuration of a worked extension.

    InputError for another name.
    """
    if name not in EXTENSIONS:
        raise InputError(f"unknown extension {name!r}; choose from {', '.join(EXTENSIONS)}")
    method, sections = EXTENSIONS[name]
    return name_parts(digits.get_config(method), sections)


def name_parts(config: ConfigDict, sections: Mapping[str, JsonMapping]) -> ConfigDict:
    """Names the parts of sections, with their options, in a config."""
    for key, options in sections.items():
        base.name_part(config, key, **options)
    return config
