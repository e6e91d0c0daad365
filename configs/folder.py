"""A folder of your own images, which `bam data import` makes from photographs or scans.

Command:   bam train --config=folder:dp_sgd --workdir=runs/mine --config.dataset.path=DATA
Hardware:  any CPU, for some thousand images of 32×32.
Model:     a small CNN on pixels, or a linear model on features with --config.features.name=NAME.
Batches:   256, or half of N if that is less; the plan prints both.
Strengths: those of digits, not chosen for these images.
"""

from collections.abc import Callable
from typing import NamedTuple

from ml_collections import ConfigDict, config_dict

from bam import files
from bam.data.common import manifest
from bam.training import config as base


class _Read(NamedTuple):
    """An operation of a reference: `fn` of its value and of `args`, computed at each read."""

    fn: Callable[..., str | int]
    args: tuple[config_dict.FieldReference, ...] = ()


def _model_for(features: str) -> str:
    return "linear" if features else "convnet"


def _half_of(most: int, path: str) -> int:
    """`most`, or half of the training users or images if that is less, so that small sets train."""
    metadata = manifest(files.user_path(path) if path else None)
    num_units = metadata.get("num_users") or metadata.get("num_examples", {}).get("train", 2 * most)
    return min(most, max(1, num_units // 2))


def _at_most_half_of(path: config_dict.FieldReference, most: int) -> config_dict.FieldReference:
    return config_dict.FieldReference(most, op=_Read(_half_of, (path,)))


def get_config(method: str = "dp_sgd") -> ConfigDict:
    """Returns the configuration of a method on a folder of images."""
    config = base.get_config(method)
    config.dataset.name = "folder"
    # A reference, because the command line sets the name of the features later.
    features = config.features.get_ref("name")
    config.model.name = config_dict.FieldReference(features, op=_Read(_model_for))
    config.expected_batch_size = _at_most_half_of(config.dataset.get_ref("path"), 256)
    config.num_epochs = 30
    config.microbatch_size = _at_most_half_of(config.dataset.get_ref("path"), 32)
    config.optimizer.learning_rate = 5e-3
    base.set_strength(config, dp_sat=0.02, bam_sam=0.005, bam_exact=0.005)
    config.eval.every = 30
    return config
