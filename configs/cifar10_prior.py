"""CIFAR-10 on features of drawn images: a linear model.

Command:   bam sweep --config=cifar10_prior --methods=dp_sgd --num_seeds=5 --workdir=DIR
             --set=optimizer.learning_rate=RATE --config.epsilon=EPSILON --config.num_steps=STEPS
             --config.dataset.path=FOLDER
"""

from ml_collections import ConfigDict

from bam.training import config as base
from configs import cifar10_scattering


def get_config(method: str = "dp_sgd") -> ConfigDict:
    """Returns the configuration of a method on features of CIFAR-10 from drawn images."""
    config = cifar10_scattering.get_config(method)
    base.name_part(config, "features", "prior")
    config.epsilon = 1.0
    config.expected_batch_size = 8192
    config.num_steps = 100
    if method == "dp_sgd":
        config.optimizer.learning_rate = 2.0
    config.eval.every = 0
    return config
