"""A folder of one's own images, as `bam data import` makes it of photographs or scans.

Command:   bam train --config=folder:dp_sgd --workdir=runs/mine --config.dataset.path=DATA
Hardware:  any CPU, for some thousand images of 32×32.
Model:     a small CNN of pixels; a linear model of features, with --config.features.name=NAME.
Batches:   256, or half of N where that is less; the plan says so, as it says N.
Strengths: as for digits, not chosen for anyone's images.
"""

from collections.abc import Callable
from typing import NamedTuple

from ml_collections import ConfigDict, config_dict

from bam import files
from bam.data.common import manifest
from bam.training import config as base


class _Read(NamedTuple):
    """What a reference makes, whenever it is read, of its own value and of those of others."""

    fn: Callable[..., str | int]
    args: tuple[config_dict.FieldReference, ...] = ()


def _model_for(features: str) -> str:
    return "linear" if features else "convnet"


def _half_of(most: int, path: str) -> int:
    """Half of the users or images to train on, and at most so many, so that 100 train, too."""
    facts = manifest(files.user_path(path) if path else None)
    num_units = facts.get("num_users") or facts.get("num_examples", {}).get("train", 2 * most)
    return min(most, max(1, num_units // 2))


def _at_most_half_of(path: config_dict.FieldReference, most: int) -> config_dict.FieldReference:
    return config_dict.FieldReference(most, op=_Read(_half_of, (path,)))


def get_config(method: str = "dp_sgd") -> ConfigDict:
    """Returns the configuration of a method on a folder of images."""
    config = base.get_config(method)
    config.dataset.name = "folder"
    # By the name of the features, which the command line sets later.
    features = config.features.get_ref("name")
    config.model.name = config_dict.FieldReference(features, op=_Read(_model_for))
    config.expected_batch_size = _at_most_half_of(config.dataset.get_ref("path"), 256)
    config.num_epochs = 30
    config.microbatch_size = _at_most_half_of(config.dataset.get_ref("path"), 32)
    config.optimizer.learning_rate = 5e-3
    base.set_strength(config, dp_sat=0.02, bam_sam=0.005, bam_exact=0.005)
    config.eval.every = 30
    return config
