"""Loops that keep Flax's `TrainState` or `nnx.Optimizer`: first the private gradient, then theirs.

Both have dropout, by a key for each example and step, and a training curve that is NOT PRIVATE.

python -m examples.with_train_state
"""

from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import bam
from bam.data import datasets

PLAN: dict[str, Any] = {
    "expected_batch_size": 256, "num_epochs": 12, "epsilon": 3.0, "delta": 1e-5,
}  # fmt: skip


def digits() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns the training and the test split, as rows `x` and labels `y`."""
    _, train, test = datasets.load("digits")[:3]
    splits = ((split.images.reshape(-1, 64) / 255.0, split.labels) for split in (train, test))
    first, second = ({"x": x.astype(np.float32), "y": y} for x, y in splits)
    return first, second


def mean_of(figure: jax.Array, batch: bam.DrawnBatch) -> float:
    """Returns the mean of a figure over the examples of a batch."""
    return float(figure.sum() / max(1, batch.mask.sum()))


class Linen(nn.Module):
    """Two layers with dropout, in Linen."""

    @nn.compact
    def __call__(self, x: jax.Array, drops: bool = False) -> jax.Array:
        """Returns the logits of rows `[..., 64]`."""
        hidden = nn.Dropout(0.2, deterministic=not drops)(nn.relu(nn.Dense(64)(x)))
        logits: jax.Array = nn.Dense(10)(hidden)
        return logits


def linen() -> tuple[float, list[float]]:
    """Trains a Linen network in a `TrainState`.

    It returns the test accuracy and the training losses.
    """
    train, test = digits()
    network = Linen()
    params = network.init(jax.random.key(0), train["x"][0])

    def loss(params: Any, example: Any) -> jax.Array:
        logits = network.apply(params, example["x"], True, rngs={"dropout": example["key"]})
        return optax.softmax_cross_entropy_with_integer_labels(logits, example["y"])

    private = bam.PrivateTraining(
        num_examples=len(train["y"]), clip=bam.clip_by_l2_norm(1.0), **PLAN
    )
    private_gradient = private.gradient(bam.dp_sgd(loss), not_private={"loss": loss})
    noise, curve = private_gradient.init(params), []
    state = TrainState.create(apply_fn=network.apply, params=params, tx=optax.adam(1e-2))
    for batch in private.batches(train, keys=True):
        gradient, noise = private_gradient.update(batch, noise, state.params)
        state = state.apply_gradients(grads=gradient)
        curve.append(mean_of(noise.not_private["loss"], batch))
    logits = network.apply(state.params, test["x"])
    return float(np.mean(np.argmax(logits, axis=-1) == test["y"])), curve


class Nnx(nnx.Module):
    """Two layers with dropout, in NNX."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Returns the logits of rows `[..., 64]`.

        Without a key there is no dropout.
        """
        dropout = nnx.Dropout(0.2, deterministic=key is None)
        return self.head(dropout(nnx.relu(self.hidden(x)), rngs=key))


def with_nnx() -> tuple[float, list[float]]:
    """Trains an NNX network by `nnx.Optimizer`, and returns what `linen` returns."""
    train, test = digits()
    network = Nnx(nnx.Rngs(0))
    structure, _ = nnx.split(network, nnx.Param)

    def loss(params: Any, example: Any) -> jax.Array:
        logits = nnx.merge(structure, params)(example["x"], example["key"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, example["y"])

    private = bam.PrivateTraining(
        num_examples=len(train["y"]), clip=bam.clip_by_l2_norm(1.0), **PLAN
    )
    private_gradient = private.gradient(bam.dp_sgd(loss), not_private={"loss": loss})
    noise, curve = private_gradient.init(nnx.state(network, nnx.Param)), []
    optimizer = nnx.Optimizer(network, optax.adam(1e-2), wrt=nnx.Param)
    for batch in private.batches(train, keys=True):
        params = nnx.state(network, nnx.Param)
        gradient, noise = private_gradient.update(batch, noise, params)
        optimizer.update(network, gradient)
        curve.append(mean_of(noise.not_private["loss"], batch))
    logits = network(test["x"])
    return float(np.mean(np.argmax(logits, axis=-1) == test["y"])), curve


if __name__ == "__main__":
    for name, run in (("TrainState", linen), ("nnx.Optimizer", with_nnx)):
        accuracy, losses = run()
        print(f"{name}: test accuracy {accuracy:.1%}")
        print(f"NOT PRIVATE: training loss {losses[0]:.2f}, at the end {losses[-1]:.2f}")
