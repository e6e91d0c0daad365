"""Configs of the trainings that tests audit."""

from bam.training import config as base

REAL, NUM_CANARIES = 100, 300


def canary_config(method="dp_sgd", expected_batch_size=8, num_steps=4, **augment):
    """A linear model of one canary's data, in microbatches of one row."""
    config = base.get_config(method)
    config.update(
        {"num_steps": num_steps, "epsilon": 4.0, "microbatch_size": 1, "accountant": "rdp"}
    )
    config.expected_batch_size = expected_batch_size
    config.model = {"name": "linear", "width": 1}
    config.optimizer.update({"name": "sgd", "learning_rate": 1e-3})
    config.augment.update(augment)
    return config


def one_run_config(epsilon=1.0, method="dp_sgd"):
    """Logistic regression on 100 digits, all of them in every step: μ-GDP, without tables."""
    config = base.get_config(method)
    config.update({"epsilon": epsilon, "num_steps": 3, "microbatch_size": 50, "accountant": "rdp"})
    config.expected_batch_size = REAL + NUM_CANARIES
    config.dataset.holdout = 1437 - REAL
    config.model = {"name": "linear", "width": 1}
    config.optimizer.update({"name": "sgd", "learning_rate": 1e-3})
    return config
