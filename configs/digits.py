"""Handwritten digits (8×8, inside scikit-learn): the demo.

Command:   bam train --config=configs/digits.py:bam_sam --workdir=runs/digits
Hardware:  any CPU.
Strengths: the best of 0.005, 0.01, 0.02, 0.05 and 0.1 on 200 held-out training images, five seeds
           (the larger, where two are equal), as docs/demo/search.md has them:
           bam sweep --config=digits --holdout=200 --num_seeds=5 --workdir=DIR
             --methods=dp_sgd,dp_sat:0.005,dp_sat:0.01,… (and so for bam_sam, bam_exact)
"""

from ml_collections import ConfigDict

from bam.training import config as base


def get_config(method: str = "dp_sgd") -> ConfigDict:
    """Returns the configuration of a method on digits."""
    config = base.get_config(method)
    config.expected_batch_size = 256
    config.num_epochs = 20
    config.microbatch_size = 32
    config.optimizer.learning_rate = 1e-2
    base.set_strength(config, dp_sat=0.02, bam_sam=0.005, bam_exact=0.005)
    config.eval.every = 10
    return config
