"""MNIST on fixed scattering features: a linear model or a small CNN.

Command:   bam train --config=configs/mnist_scattering.py:METHOD --workdir=DIR
             --config.dataset.path=FOLDER
           The CNN: --config.model.name=tanh_cnn --config.model.width=32
Hardware:  one CPU core. A run of DP-SGD: 79 to 94 s.

Accuracy of DP-SGD at ε = 3, δ = 1e-5: 98.68 ± 0.02 %, mean ± 95 % interval of five seeds, linear
(Tramèr and Boneh, arXiv 2011.11660: 98.7). The CNN: not run.
"""

from ml_collections import ConfigDict

from configs import cifar10_scattering


def get_config(method: str = "dp_sgd") -> ConfigDict:
    """Returns the configuration of a method on scattering features of MNIST."""
    config = cifar10_scattering.get_config(method)
    config.expected_batch_size = 8192
    config.num_epochs = 30
    config.dataset.name = "mnist"
    config.features.update({"whiten": 0.1, "mirror": False})  # a mirrored digit is not that digit
    return config
