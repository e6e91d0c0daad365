"""CIFAR-10 on fixed scattering features: a linear model.

Command:   bam train --config=configs/cifar10_scattering.py:METHOD --workdir=DIR
             --config.epsilon=EPSILON --config.dataset.path=FOLDER
Data:      CIFAR-10; here as JPEG. Features of its images: 7 minutes once, and 1.9 GB.
Hardware:  one CPU core; 4 GB of memory. A run of DP-SGD: 49 to 94 s, of BAM 95 to 169 s.

Accuracy, %, δ = 1e-5, mean ± 95 % interval of five seeds, at ε = 1 and 3 of ten
(docs/results_prior.md):
  ε    theirs: linear, small CNN  DP-SGD        DP-SAT        BAM (SAM)     BAM (exact)
  1    –                          62.88 ± 0.12  62.86 ± 0.12  62.35 ± 0.17  not run
  2    –                          65.98 ± 0.20  65.98 ± 0.16  65.82 ± 0.16  not run
  3    67.0, 69.3                 66.72 ± 0.15  66.69 ± 0.16  66.74 ± 0.08  66.72 ± 0.09
  8    –                          67.69 ± 0.28  67.16 ± 0.32  67.79 ± 0.25  not run
"Theirs": Tramèr and Boneh. Their small CNN: configs/cifar10_scattering_cnn.py.

Departures from Tramèr and Boneh (arXiv 2011.11660): JPEG images, Poisson batches of expected size
4096 for 10 epochs, the mean of an image's features and its mirror image's, whitening by public
photographs where they divide channels into 27 groups or measure statistics under noise.
"""

from ml_collections import ConfigDict

from bam.training import config as base

# Chosen on held-out training images at ε = 2 (docs/results_prior.md): strength, C, learning rate
# in units of C. BAM (exact) has the values of its SAM form.
SEARCHED = {
    "dp_sgd": (0.0, 0.1, 0.4),
    "dp_sat": (0.1, 0.1, 0.4),
    "bam_sam": (0.005, 50.0, 0.2),
    "bam_exact": (0.005, 50.0, 0.2),
}


def get_config(method: str = "dp_sgd") -> ConfigDict:
    """Returns the configuration of a method on scattering features of CIFAR-10."""
    config = base.get_config(method)
    config.epsilon = 3.0
    config.delta = 1e-5
    strength, config.clip_norm, learning_rate = SEARCHED.get(method, (0.0, 0.1, 1e-3))
    config.expected_batch_size = 4096
    config.num_epochs = 10
    config.microbatch_size = 8  # the fastest of 1, 4, 8, 16 and 32 for the linear model
    # A run without privacy does not clip: its gradients are not in units of C, but some 100 long.
    per_clip_norm = method != "non_private"
    base.name_part(config, "optimizer", "sgd", momentum=0.9, per_clip_norm=per_clip_norm)
    config.optimizer.learning_rate = learning_rate
    config.dataset.name = "cifar10"
    base.name_part(config, "features", "scattering", whiten=1.0, mirror=True, groups=1)
    base.name_part(config, "model", "linear")
    if strength:
        base.set_strength(config, **{method: strength})
    return config
