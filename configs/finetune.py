"""Five classes of CIFAR-10, after training on the other five as if they were public.

Command:   bam train --config=finetune:dp_sgd --workdir=DIR
             --config.init_from=WEIGHTS --config.init_fresh=Dense_0 --config.trainable=NAMES
             --config.dataset.path=FOLDER
           WEIGHTS are of the other five classes, NAMES a value of TRAINED below.
Hardware:  one CPU core: 6 minutes for the public classes, 17 to 44 s for each private run.
Accuracy:  docs/finetuning.md.

The network and the size of a run are those of configs/cifar10_small.py.
"""

from ml_collections import ConfigDict

from bam.training import config as base
from configs import cifar10_small

# Trained part of a network -> the regular expression for `trainable`; `{head}` is the last layer.
TRAINED = {
    "last layer": "{head}",
    "normalisation, gains and last layer": "Norm|/gain|{head}",
    "all": "",
}


def get_config(method: str = "dp_sgd") -> ConfigDict:
    """Returns the configuration of a method on the private classes."""
    config = cifar10_small.get_config(method)
    config.expected_batch_size = 256  # of 25,000 images
    some_classes = "examples.some_classes:some_classes"
    base.name_part(config, "dataset", some_classes, of="cifar10", classes=(5, 6, 7, 8, 9))
    config.eval.every = 10
    return config
