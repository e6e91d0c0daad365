"""CIFAR-10, private, on features from procedural images beside scattering: a linear model.

Command:   bam sweep --config=cifar10_prior --methods=dp_sgd --num_seeds=5 --workdir=DIR
             --set=optimizer.learning_rate=RATE --config.epsilon=EPSILON --config.num_steps=STEPS
             --config.dataset.source=parquet --config.dataset.path=FOLDER
           From a clone's root: `examples/` makes the features.
Hardware:  one CPU core; 5 GB of memory. Features: a quarter of an hour, once, and 2.3 GB. A run: 66
           to 148 s.

Test accuracy, %, δ = 1e-5, mean ± 95 % interval of five seeds (docs/results_prior.md):
  ε = 1, rate 0.2, 100 steps  69.27 ± 0.39
  ε = 3, rate 0.4, 150 steps  72.47 ± 0.13
  ε = 8, rate 0.8, 150 steps  74.00 ± 0.38
"""

from ml_collections import ConfigDict

from configs import cifar10_scattering


def get_config(method: str = "dp_sgd") -> ConfigDict:
    """Returns the configuration of a method on features of CIFAR-10 from dead leaves."""
    config = cifar10_scattering.get_config(method)
    config.features = ConfigDict({"name": "examples.dead_leaves:features", "filters": 800})
    config.features.cache = ""
    config.epsilon = 1.0
    config.expected_batch_size = 8192
    config.num_steps = 100
    if method == "dp_sgd":
        config.optimizer.learning_rate = 0.2
    config.eval.every = 0
    return config
