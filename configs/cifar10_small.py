"""CIFAR-10 for two CPU cores: it compares Table 1's methods and does not reproduce its numbers.

Command:   python -m scripts.paper.reproduce --table=1 --datasets=cifar10_small --seeds=5
             --workdir=DIR --config.dataset.path=FOLDER
Hardware:  2-core CPU.

Reduced from configs/cifar10.py: ResNet-9 of width 8 instead of 64 (1/60 of the
arithmetic), one view without augmentation instead of 16, 100 steps of 512 expected examples
instead of 900 of 4096: a run costs about 1/70,000 of the paper's. All 50,000 images take part, the
layers, the clip norm and the optimizer are the paper's.
"""

from ml_collections import ConfigDict

from bam.training import config as base
from configs import cifar10


def get_config(method: str = "bam_sam") -> ConfigDict:
    """Returns the configuration of a method on CIFAR-10, reduced."""
    config = cifar10.get_config(method)
    config.expected_batch_size = 512
    config.num_steps = 100
    config.microbatch_size = 1
    config.augment.update({"views": 1, "shift": 0, "flip": "none"})
    config.model.width = 8
    config.optimizer.learning_rate = 1e-2
    # The best of five strengths of each method, on held-out images at ε = 2, with one seed.
    base.set_strength(config, dp_sat=0.02, bam_sam=0.01, bam_exact=0.01)
    config.eval.every = 0
    return config
