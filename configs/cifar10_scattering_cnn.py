"""CIFAR-10 on fixed scattering features: Tramèr and Boneh's small CNN.

Command:   python -m scripts.paper.reproduce --datasets=cifar10_scattering_cnn
             --methods=dp_sgd,bam_sam --epsilons=3 --seeds=3 --workdir=DIR
             --config.dataset.path=FOLDER
Data:      CIFAR-10; here as JPEG. Features of its images: 7 minutes once, and 1.9 GB.
Hardware:  one CPU core; 4 GB of memory. A run of DP-SGD: 519 to 605 s, of BAM 891 s.

Accuracy, %, ε = 3, δ = 1e-5, mean ± 95 % interval of three seeds (docs/results_prior.md):
  theirs  DP-SGD        DP-SAT   BAM (SAM)        BAM (exact)
  69.3    67.01 ± 0.80  not run  67.29, one seed  not run

Departures from Tramèr and Boneh (arXiv 2011.11660): those of configs/cifar10_scattering.py; they
train for 60 epochs of 8192 expected examples, here it is 10 of 4096.
"""

from ml_collections import ConfigDict

from bam.training import config as base
from configs import cifar10_scattering


def get_config(method: str = "dp_sgd") -> ConfigDict:
    """Returns the configuration of a method for the CNN on scattering features of CIFAR-10."""
    config = cifar10_scattering.get_config(method)
    base.name_part(config, "model", "tanh_cnn")
    config.microbatch_size = 1
    if method != "non_private":  # the best of three for DP-SGD at ε = 3: docs/results_prior.md
        config.clip_norm, config.optimizer.learning_rate = 0.1, 0.8
    return config
