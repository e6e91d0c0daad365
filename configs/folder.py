"""A folder of one's own images, as `bam data import` makes it of photographs or scans.

Command:   bam train --config=folder:dp_sgd --workdir=runs/mine --config.dataset.path=DATA
Hardware:  any CPU, for some thousand images of 32×32.
Model:     a small CNN of pixels; a linear model of features, with --config.features.name=NAME.
Strengths: as for digits, not chosen for anyone's images.
"""

from collections.abc import Callable
from typing import NamedTuple

from ml_collections import ConfigDict, config_dict

from bam.training import config as base


class _Read(NamedTuple):
    """What a reference makes of the value that it refers to whenever it is read."""

    fn: Callable[[str], str]
    args: tuple[()] = ()


def _model_for(features: str) -> str:
    return "linear" if features else "convnet"


def get_config(method: str = "dp_sgd") -> ConfigDict:
    """Returns the configuration of a method on a folder of images."""
    config = base.get_config(method)
    config.dataset.name = "folder"
    # By the name of the features, which the command line sets later.
    features = config.features.get_ref("name")
    config.model.name = config_dict.FieldReference(features, op=_Read(_model_for))
    config.expected_batch_size = 256
    config.num_epochs = 30
    config.microbatch_size = 32
    config.optimizer.learning_rate = 5e-3
    base.set_strength(config, dp_sat=0.02, bam_sam=0.005, bam_exact=0.005)
    config.eval.every = 30
    return config
