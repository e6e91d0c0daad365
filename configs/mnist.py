"""MNIST with LeNet-5.

Command:   bam train --config=configs/mnist.py:METHOD --workdir=DIR
             --config.dataset.path=FOLDER
Hardware:  any CPU; 8 examples at a time are the fastest of 1 and 8 there.
           Accuracy: not run with this version.
Clip norm: 1, or a quantile of gradient norms on public data, such as scikit-learn's digits:
           bam clip_norm --config=mnist:dp_sgd --public=digits
             --config.dataset.path=FOLDER
           prints C and the flags to add. Not run.

Not in the paper. The strengths of the ascent are those of its CIFAR-10 runs.
"""

from ml_collections import ConfigDict

from bam.training import config as base


def get_config(method: str = "dp_sgd") -> ConfigDict:
    """Returns the configuration of a method on MNIST."""
    config = base.get_config(method)
    config.epsilon = 3.0
    config.delta = 1e-5
    config.expected_batch_size = 1024
    config.num_epochs = 15
    config.microbatch_size = 8
    config.optimizer.learning_rate = 2e-3
    config.dataset.name = "mnist"
    base.name_part(config, "model", "lenet5")
    base.set_strength(config, dp_sat=0.086, bam_sam=0.02, bam_exact=0.02)
    config.eval.every = 100
    return config
