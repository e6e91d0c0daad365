"""CIFAR-100 with ResNet-9: Table 1 and Table 2 of arXiv 2308.12018.

Command:   bam train --config=configs/cifar100.py:METHOD --workdir=DIR
             --config.epsilon=EPSILON --config.dataset.path=FOLDER
           METHOD is dp_sgd, dp_sat, bam_sam or bam_exact; EPSILON is 1, 2 or 10, δ = 1e-5.
Hardware:  as configs/cifar10.py. Time: not run.

Table 1, Table 2 and what differs from the authors' code: docs/paper.md. It differs from CIFAR-10
in λ for BAM and in ScaleNorm. There is no config with WRN-16-4, because the paper trains it on
ImageNet32 alone.
"""

from ml_collections import ConfigDict

from bam.training import config as base
from configs import cifar10


def get_config(method: str = "bam_sam") -> ConfigDict:
    """Returns the configuration of a method on CIFAR-100."""
    config = cifar10.get_config(method)
    config.dataset.name = "cifar100"
    config.model.scale_norm = True
    base.set_strength(config, dp_sat=0.086, bam_sam=0.01, bam_exact=0.01)
    return config
