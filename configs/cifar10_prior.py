"""CIFAR-10, private, on features from procedural images beside scattering: a linear model."""

from ml_collections import ConfigDict

from configs import cifar10_scattering


def get_config(method: str = "dp_sgd") -> ConfigDict:
    """Returns the configuration of a method on features of CIFAR-10 from dead leaves."""
    config = cifar10_scattering.get_config(method)
    config.features = ConfigDict({"name": "examples.dead_leaves:features", "filters": 800})
    config.features.cache = ""
    config.expected_batch_size = 8192
    config.num_steps = 100
    config.epsilon = 1.0
    config.eval.every = 0
    return config
