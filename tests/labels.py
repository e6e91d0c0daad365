"""Labels of every kind, and the data and configs of a tiny training on them."""

import numpy as np

from bam.data import datasets
from configs import digits

SEVERAL = np.random.default_rng(1).integers(0, 2, (40, 3)).astype(np.int32)
PIXELS = np.random.default_rng(1).integers(0, 2, (40, 4, 4)).astype(np.int32)
NUMBERS = np.linspace(-1, 1, 40, dtype=np.float32)


def data_of(labels, num_classes, shape=(4, 4, 1)):
    images = np.random.default_rng(0).random((len(labels), *shape), np.float32)
    split = datasets.Split(images, np.asarray(labels))
    zeros, ones = np.zeros(1, np.float32), np.ones(1, np.float32)
    return datasets.Dataset("own", split, split, num_classes, zeros, ones)


def config_of(loss, **changes):
    config = digits.get_config("dp_sgd")
    config.update({"accountant": "rdp", "num_steps": 3, "expected_batch_size": 10, "delta": 1e-3})
    config.loss.name, config.model.name, config.microbatch_size = loss, "linear", 5
    config.update_from_flattened_dict(changes)
    return config
