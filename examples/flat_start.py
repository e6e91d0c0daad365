"""Weights to begin private training from, learned on drawn images by SAM or by plain training.

A ResNet-9 learns which of 500 images of dead leaves a view was cut from: a piece of another size,
contrast and colour, perhaps mirrored. With a radius r > 0 each step follows the gradient at weights
moved by r along their own (SAM), which seeks a flat loss; with r = 0 it is a plain one. Nothing
private and no photograph is read, so DP-SGD from these weights has the ε of DP-SGD.

    python -m examples.flat_start --radius=0.1 --out=runs/start/flat.safetensors

Source: Foret et al. 2021, arXiv 2010.01412 (SAM); Dosovitskiy et al. 2014, arXiv 1406.6909 (an
image is a class of its views).
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from bam import models
from bam.cli import console
from bam.core import pytree
from bam.data.dead_leaves import dead_leaves
from bam.training import finetune

SIDE, NUM_SCENES, BATCH = 32, 500, 64


def view(key, image):
    """A piece of an image at its size, of half to all its sides; float `[32, 32, 3]`."""
    keys = jax.random.split(key, 4)
    scales = 1 / jax.random.uniform(keys[0], (2,), minval=0.5)
    place = -SIDE * (scales - 1) * jax.random.uniform(keys[1], (2,))
    piece = jax.image.scale_and_translate(image, image.shape, (0, 1), scales, place, "linear")
    mirrored = jnp.where(jax.random.bernoulli(keys[2]), piece[:, ::-1], piece)
    contrast, shift = jax.random.normal(keys[3], (2, 3))
    return (mirrored - 0.5) * 4 * jnp.exp(0.2 * contrast) + 0.4 * shift


def train(module, radius, steps):
    """`(params, figures)`: accuracy and loss of new views, and the loss 0.1 along its gradient."""
    num_scenes = module.num_classes
    scenes = jnp.stack([dead_leaves(np.random.default_rng(i)) for i in range(num_scenes)])
    model = models.as_functions(module, scenes.shape[1:], convolution="xla")
    optimizer = optax.nadam(optax.cosine_decay_schedule(3e-3, steps))

    def batch(step, size):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(1), step), size + 1)
        labels = jax.random.randint(keys[0], (size,), 0, num_scenes)
        return jax.vmap(view)(keys[1:], scenes[labels]), labels

    def loss(params, images, labels):
        logits = model.logits(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def ahead(params, distance, *views):
        return pytree.shift(params, distance, pytree.unit(jax.grad(loss)(params, *views)))

    def figures(params, images, labels):
        right = jnp.argmax(model.logits(params, images), axis=-1) == labels
        points = {"loss": params, "loss ahead": ahead(params, 0.1, images, labels)}
        losses = {name: loss(point, images, labels) for name, point in points.items()}
        return {"accuracy": right.mean(), **losses}

    @jax.jit
    def step(params, state, number):
        views = batch(number, BATCH)
        at = ahead(params, radius, *views) if radius else params
        updates, state = optimizer.update(jax.grad(loss)(at, *views), state, params)
        return optax.apply_updates(params, updates), state

    params = model.init(jax.random.key(0))
    state = optimizer.init(params)
    for number in range(steps):
        params, state = step(params, state, number)
    return params, jax.jit(figures)(params, *batch(steps, 512))


def main():
    """Writes the weights, and prints how well and how flatly they were learned."""
    with console.one_line_errors():
        console.check_writable(_OUT.value)
        network = models.create("resnet9", NUM_SCENES, 16, weight_standardisation="centre")
        params, figures = train(network, _RADIUS.value, _STEPS.value)
        finetune.save(params, Path(_OUT.value))
        print({name: round(float(x), 4) for name, x in figures.items()})


if __name__ == "__main__":  # flags here: whoever imports this module may have an --out, too
    _OUT = flags.DEFINE_string("out", "", "safetensors file to write")
    _RADIUS = flags.DEFINE_float("radius", 0.1, "how far SAM looks ahead; 0: plain training", 0)
    _STEPS = flags.DEFINE_integer("steps", 1000, "batches of 64 views", 1)
    console.require("out")
    console.run(main)
