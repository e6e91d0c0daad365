"""ImageNet32 with WRN-16-4: Table 1 and Table 2 of arXiv 2308.12018.

Command:   bam train --config=configs/imagenet32.py:METHOD --workdir=DIR
             --config.dataset.path=FOLDER
           METHOD is dp_sgd, dp_sat, bam_sam or bam_exact; ε = 10, δ = 8e-7 in the paper.
Hardware:  several GPUs are meant. Time: not run. 64 examples at a time fit an H100 and a TPU v5e
           by their compilers, and were not timed.

Table 1, Table 2 and what differs from the authors' code: docs/paper.md. The model is De et al.'s
WRN-16-4; `--config.model.name=wide_resnet_bam` is the authors' variant, without weight
standardisation.
"""

from ml_collections import ConfigDict

from bam.training import config as base


def get_config(method: str = "bam_sam") -> ConfigDict:
    """Returns the configuration of a method on ImageNet32."""
    config = base.get_config(method)
    config.epsilon = 10.0
    config.delta = 7.5e-7  # the paper's 8e-7 is above 1/N for all 1,281,167 training images
    config.clip_norm = 1.0
    config.expected_batch_size = 4096
    config.num_epochs = 75
    config.microbatch_size = 64
    config.optimizer.learning_rate = 1e-3
    config.augment.update({"views": 4, "shift": 4, "flip": "horizontal"})
    config.dataset.name = "imagenet32"
    base.name_part(config, "model", "wide_resnet", width=4, weight_standardisation="standardise")
    base.set_strength(config, dp_sat=0.07, bam_sam=0.005, bam_exact=0.005)
    config.eval.every = 1000
    return config
