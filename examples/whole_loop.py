"""The run of `bam train`, written as a loop of your own: the same weights, to the bit.

python -m examples.whole_loop digits:bam_sam FOLDER

The numbers come from a config; data, views, network, method, plan and optimizer are made here. If
it is stopped, the same command resumes from FOLDER.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree
from ml_collections import ConfigDict

import bam
from bam import models
from bam.core import oracles
from bam.data import augment, datasets
from bam.training.step import stream_key
from configs import cifar10, digits

METHODS = {"dp_sgd": oracles.dp_sgd, "bam_sam": oracles.bam_sam}


def train(config: ConfigDict, seed: int, folder: Path, data: datasets.Dataset) -> PyTree:
    """Takes the remaining steps of the run in a folder, and returns the weights."""
    private = bam.PrivateTraining(
        num_examples=len(data.train.labels), expected_batch_size=config.expected_batch_size,
        num_epochs=config.num_epochs, epsilon=config.epsilon, delta=config.delta,
        clip=bam.clip_by_l2_norm(config.clip_norm), seed=seed, folder=folder,
    )  # fmt: skip
    network = models.create(num_classes=data.num_classes, **config.model)
    model = bam.as_functions(network, data.train.images.shape[1:])
    views = {"num_views": config.augment.views, "shift": config.augment.shift}

    def loss_fn(params: PyTree, example: PyTree) -> jax.Array:
        """The mean loss of an example's views, which differ from step to step."""
        key = jax.random.fold_in(stream_key(seed, "views"), example["step"])
        key, _ = jax.random.split(jax.random.fold_in(key, example["place"]))
        images = augment.views(key, example["image"], flip=config.augment.flip, **views)
        images = datasets.prepare(data, images, config.input_clip_norm)
        return model.loss(params, {"image": images, "label": example["label"]})

    options = {k: v for k, v in config.method.items() if k in ("radius", "mix")}
    oracle = METHODS[config.method.name](loss_fn, **options)
    optimizer = optax.nadam(config.optimizer.learning_rate)
    tx = optax.chain(private.gradient(oracle, microbatch_size=config.microbatch_size), optimizer)

    @jax.jit  # One program, as in `bam train`: with several, the last bits differ.
    def step(batch: bam.DrawnBatch, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = tx.update(batch, state, params)
        return optax.apply_updates(params, updates), state

    params = model.init(stream_key(seed, "weights"))
    params, state = private.restore((params, tx.init(params)))
    blank = np.zeros(len(data.train.labels), np.int32)
    split = {"image": data.train.images, "label": data.train.labels, "place": blank, "step": blank}
    for batch in private.batches(split):
        places = jnp.arange(len(batch.mask), dtype=jnp.int32)
        numbers = {"place": places, "step": jnp.full_like(places, batch.step - 1)}
        batch = batch._replace(examples=batch.examples | numbers)
        params, state = step(batch, state, params)
        if batch.step % config.checkpoint.every == 0 or batch.step == private.plan.num_steps:
            private.save(folder, (params, state))
    private.write_statement(folder / "PRIVACY.md", config.dataset.name)
    return params


if __name__ == "__main__":
    name, _, method = sys.argv[1].partition(":")
    settings = {"cifar10": cifar10, "digits": digits}[name].get_config(method)
    train(settings, 0, Path(sys.argv[2]), datasets.load(name))
