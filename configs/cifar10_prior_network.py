"""CIFAR-10 with a whole network that begins at the weights that it learned from drawn images.

Command:   python -c 'from bam.features import prior; prior.save_network("network.safetensors")'
           bam train --config=cifar10_prior_network:METHOD --workdir=DIR
             --config.init_from=network.safetensors --config.dataset.path=FOLDER
Hardware:  one GPU; not run there. In docs/log.md are 100 steps with one view on two CPU cores.

The network is that of `bam.features.prior`. A run is as long as configs/cifar10.py's, with its
views, C, optimizer and rate. The best of the short runs began with a private last layer, which
another run had trained (`trainable`): both ε count (docs/batches.md).
"""

from ml_collections import ConfigDict

from bam.training import config as base
from configs import cifar10


def get_config(method: str = "dp_sgd") -> ConfigDict:
    """Returns the configuration of a method on CIFAR-10, from weights of drawn images."""
    config = cifar10.get_config(method)
    base.name_part(config, "model", "resnet9", width=32)
    config.epsilon = 8.0
    config.init_fresh = "Dense_0"
    config.init_mean, config.init_std = 0.5, 1.0
    return config
