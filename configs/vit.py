"""ViT-S/16 with public weights: low-rank factors and a new head, trained on your own images.

Command:   bam train --config=vit:dp_sgd --workdir=runs/vit --config.dataset.path=DATA
             --config.init_from=model.safetensors --config.init_fresh=^head,
             with images imported by --size=224
Hardware:  one GPU or TPU; benchmarks/hardware has the compilers' memory plans. Not trained here.
           64 images at a time fit an H100 and a TPU v5e, and were not timed.
Strengths: not chosen; the learning rate and C of low-rank factors were not searched.
"""

from ml_collections import ConfigDict

from bam.training import config as base


def get_config(method: str = "dp_sgd") -> ConfigDict:
    """Returns the configuration of a method on a folder of images of 224 × 224."""
    config = base.get_config(method)
    config.dataset.name = "folder"
    base.name_part(config, "model", "vit_s16")
    config.trainable = "lora|^head"
    config.lora.update({"rank": 8, "targets": "qkv|proj|fc"})
    config.expected_batch_size = 1024
    config.num_epochs = 10
    config.microbatch_size = 64
    return config
