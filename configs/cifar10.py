"""CIFAR-10 with ResNet-9: Table 1 and Table 2 of arXiv 2308.12018.

Command:   bam train --config=configs/cifar10.py:METHOD --workdir=DIR
             --config.epsilon=EPSILON --config.dataset.path=FOLDER
           METHOD is dp_sgd, dp_sat, bam_sam or bam_exact; EPSILON is 1, 2 or 10, δ = 1e-5.
Data:      FOLDER holds the official archive, Parquet files, or what tensorflow-datasets prepared as
           array_record. bam recognises which, by the names of the files.
Hardware:  one GPU. DP-SGD at ε = 2 took 19 minutes on an H100 80GB, in bfloat16, on images in JPEG
           (benchmarks/dp_sgd_h100_summary.json). There 64 or 256 examples at a time are fastest.

Table 1, Table 2 and what differs from the authors' code: docs/paper.md.
"""

from ml_collections import ConfigDict

from bam.training import config as base


def get_config(method: str = "bam_sam") -> ConfigDict:
    """Returns the configuration of a method on CIFAR-10."""
    config = base.get_config(method)
    config.epsilon = 2.0
    config.delta = 1e-5
    config.clip_norm = 1.0
    config.expected_batch_size = 4096
    config.num_epochs = 75
    config.microbatch_size = 64
    config.optimizer.learning_rate = 2e-3
    config.augment.update({"views": 16, "shift": 4, "flip": "horizontal"})
    config.dataset.name = "cifar10"
    # The authors' code centres the weights without dividing by their deviation.
    base.name_part(
        config,
        "model",
        "resnet9",
        width=64,
        symmetries=1,
        scale_norm=False,
        weight_standardisation="centre",
    )
    base.set_strength(config, dp_sat=0.086, bam_sam=0.02, bam_exact=0.02)
    config.eval.every = 120
    return config
