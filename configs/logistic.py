"""Breast cancer (scikit-learn) with logistic regression by noisy gradient descent, full batch.

Command:   bam train --config=configs/logistic.py:dp_sgd --workdir=DIR
           bam train --config=configs/logistic.py:dp_sgd,inputs --workdir=DIR
Hardware:  any CPU. Accuracy: docs/results.md (python -m scripts.paper.logistic).

After a comma, the clipped quantity: "gradients" (the default) or "inputs". The logistic loss is
Lipschitz, so inputs of norm at most b bound every gradient: with two logits and a bias its norm is
at most √2·√(b² + 1), and the clip at that bound never acts.
"""

import math

from ml_collections import ConfigDict

from bam.errors import InputError
from bam.training import config as base

INPUT_CLIP_NORM = 3.0


def get_config(method_and_clipping: str = "dp_sgd,gradients") -> ConfigDict:
    """Returns the configuration "METHOD" or "METHOD,inputs" on breast cancer."""
    method, _, clipping = method_and_clipping.partition(",")
    if clipping not in ("", "gradients", "inputs"):
        raise InputError(f"unknown clipping {clipping!r}; choose from gradients, inputs")
    config = base.get_config(method)
    config.epsilon = 1.0
    config.delta = 1e-5
    config.expected_batch_size = 455  # all examples: q = 1
    config.num_epochs = 100
    config.microbatch_size = 91
    base.name_part(config, "optimizer", "sgd", learning_rate=2.0)
    config.dataset.name = "breast_cancer"
    base.name_part(config, "model", "linear")
    if clipping == "inputs":
        config.input_clip_norm = INPUT_CLIP_NORM
        config.clip_norm = math.sqrt(2) * math.sqrt(INPUT_CLIP_NORM**2 + 1)
    config.eval.every = 10
    return config
