"""CIFAR-10, private, on fixed scattering features: a linear model or a small CNN.

Command:   python -m scripts.train --config=configs/cifar10_scattering.py:METHOD --workdir=DIR
             --config.epsilon=EPSILON --config.dataset.source=parquet --config.dataset.path=FOLDER
           The CNN: --config.model.name=tanh_cnn
"""

from ml_collections import ConfigDict

from configs import base


def get_config(method: str = "dp_sgd") -> ConfigDict:
    """Returns the configuration of a method on scattering features of CIFAR-10."""
    config = base.get_config(method)
    config.epsilon = 3.0
    config.delta = 1e-5
    config.clip_norm = 0.1
    config.expected_batch_size = 4096
    config.num_epochs = 10
    config.microbatch_size = 8  # the fastest of 1, 4, 8, 16 and 32 for the linear model
    config.optimizer = ConfigDict({"name": "sgd", "momentum": 0.9})
    # In units of C; gradients that are not clipped have no such unit, and are some 100 long.
    private = method != "non_private"
    config.optimizer.update({"learning_rate": 0.4 if private else 1e-3, "per_clip_norm": private})
    config.dataset.name = "cifar10"
    config.features.update({"name": "scattering", "whiten": 1.0, "mirror": True, "groups": 1})
    config.model = ConfigDict({"name": "linear", "width": 64})
    base.set_strength(config, dp_sat=0.02, bam_sam=0.002, bam_exact=0.002)
    return config
