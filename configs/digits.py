"""Handwritten digits (8×8, inside scikit-learn): the demo.

Command:   python -m scripts.train --config=configs/digits.py:bam_sam --workdir=runs/digits
Hardware:  any CPU.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(method: str = "dp_sgd") -> ConfigDict:
    """Returns the configuration of a method on digits."""
    config = base.get_config(method)
    config.expected_batch_size = 256
    config.num_epochs = 20
    config.microbatch_size = 32
    config.optimizer.learning_rate = 1e-2
    config.eval.every = 10
    return config
