"""The compiled functions of a run: its step, evaluation and diagnostics, from parts and state.

The loop over microbatches is in `bam.core.engine`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Num, PyTree

from bam import models
from bam.core import oracles, program, pytree
from bam.core.program import STATIC
from bam.core.pytree import Grads, Params
from bam.core.scalars import Number
from bam.core.seeds import host_key
from bam.data import datasets
from bam.models import finetune, losses
from bam.models.interpreter import interpret
from bam.privacy import private_gradient
from bam.privacy.private_gradient import DrawnBatch, PlainGradient, PrivateGradient, PrivateState
from bam.training import diagnostics, examples
from bam.training.parts import AnyOptimizer

DENSE = "xla"  # the fastest convolutions without per-example gradients


class TrainState(NamedTuple):
    """Everything a run carries from step to step.

    Attributes:
      params: the trained weights θ; `averaged` has no frozen weights either.
      averaged: the weights to evaluate and release: those that the optimizer is evaluated at (θ,
        unless it has `eval_params`), or their exponential moving average.
      opt_state: the optimizer's state.
      private: the state of the private gradient, with the noise key and the last private gradient.
      augment_key: the key of all random views; the step and a row's place are folded into it.
      frozen: the weights that are not trained, see `finetune.py`; an empty tree if all are
        trained.
    """

    params: Params
    averaged: Params
    opt_state: optax.OptState
    private: PrivateState
    augment_key: Array
    frozen: Params

    @property
    def step(self) -> Int[Array, ""]:
        """The number of steps taken."""
        return self.private.privatize.noise.step


@program.record
class Parts:
    """The parts of a run, as the first argument of the functions below.

    It is a pytree whose leaves are the numbers in the parts, such as σ and the learning rate, so
    that other numbers compile nothing.

    Attributes:
      gradient: from a batch to its private gradient; a `PlainGradient` if the run is not private.
      optimizer: the transform that follows the noise.
      ema_decay: decay of the averaged weights; None for no average.
      noise_norm: the factor by which correlated noise is longer in one step; 1 if independent.
      loss: the loss of an example as a function of the trained parameters; the example holds the
        `frozen` ones.
      model: the network as functions of its parameters.
      inputs: the settings that make examples from rows.
    """

    gradient: PrivateGradient | PlainGradient
    optimizer: AnyOptimizer
    ema_decay: float | None
    noise_norm: float
    loss: oracles.LossFn = dataclasses.field(metadata=STATIC)
    model: models.Model = dataclasses.field(metadata=STATIC)
    inputs: examples.Inputs = dataclasses.field(metadata=STATIC)

    def __post_init__(self) -> None:
        """Makes the optimizer a pytree of its numbers."""
        object.__setattr__(self, "optimizer", program.as_transform(self.optimizer))

    @property
    def is_private(self) -> bool:
        """Whether gradients are bounded and noised."""
        return isinstance(self.gradient, PrivateGradient)

    def example_of(self, state: TrainState, data: PyTree = None) -> Callable[[PyTree], PyTree]:
        """Returns the function from a row to its example, in the state's next step.

        `data` are all rows, if a row has its number alone.
        """
        # The number of steps taken is the number of the next one, from 0.
        key = jax.random.fold_in(state.augment_key, state.step)
        example_of_row = examples.example_of(self.inputs, key, state.step)
        return lambda row: example_of_row(examples.take_row(row, data)) | {"frozen": state.frozen}

    def with_microbatch_size(self, size: int) -> "Parts":
        """Returns the same parts with another number of rows at once."""
        gradient = dataclasses.replace(self.gradient, microbatch_size=size)
        return dataclasses.replace(self, gradient=gradient)

    @property
    def sharing(self) -> dict[str, Any]:
        """The arguments of a sum that share rows out."""
        return {"microbatch_size": self.gradient.microbatch_size, "mesh": self.gradient.mesh}


def take(parts: Parts, state: TrainState, batch: DrawnBatch) -> TrainState:
    """Takes one training step: Algorithm 2 of arXiv 2308.12018.

    The gradient is the sum of bounded gradients, with noise of standard deviation σ·S, divided by
    the plan's l, which is public. Without privacy, it is the sum of gradients of the same batch,
    divided by l.
    """
    rows, data = examples.in_order(batch.examples)
    batch = batch._replace(examples=rows)
    # Rows become examples inside the sum: K views of a whole batch would not fit the memory.
    example_of = parts.example_of(state, data)
    gradient, private = parts.gradient.update(batch, state.private, state.params, example_of)
    # From here on everything is post-processing of the private gradient.
    return descend(state._replace(private=private), gradient, parts.optimizer, parts.ema_decay)


def descend(
    state: TrainState,
    gradient: Grads,
    optimizer: AnyOptimizer,
    ema_decay: Number | None,
) -> TrainState:
    """Updates the weights, and then their average, in a state whose step is counted already."""
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    eval_params = getattr(optimizer, "eval_params", None)
    evaluated = eval_params(opt_state, params) if eval_params else params
    averaged = _average(state.averaged, evaluated, state.step - 1, ema_decay)
    return state._replace(params=params, averaged=averaged, opt_state=opt_state)


def _average(
    averaged: Params, params: Params, step: Int[Array, ""], decay: Number | None
) -> Params:
    """Takes one step of the EMA of De et al. 2022, whose decay warms up as (1 + t)/(10 + t)."""
    if decay is None:
        return params
    # Without the warm-up, the random initial weights would dominate the average for long.
    decay_now: Float[Array, ""] = jnp.minimum(decay, (1 + step) / (10 + step))
    return optax.incremental_update(params, averaged, 1 - decay_now)


def score_images(
    params: Params,
    images: Num[Array | np.ndarray, "n h w c"],
    labels: Num[Array | np.ndarray, "n ..."],
    *,
    model: models.Model,
    criterion: losses.Loss,
    prepare: datasets.Preparation,
    mesh: jax.sharding.Mesh | None,
) -> tuple[Array, Array, Float[Array, "n ..."]]:
    """Returns the number of correctly classified images, the sum of the losses, and the outputs.

    An image whose loss is not finite counts as wrong, whatever its outputs. The parameters are
    those of the whole model, `finetune.merge(state.averaged, state.frozen)`.
    """
    outputs = model.logits(params, prepare(images), DENSE)
    # Some losses, such as that of a regression, have no accuracy.
    right = criterion.right or (lambda output, label: jnp.zeros(()))
    losses, is_right = (
        jax.vmap(f)(outputs, jnp.asarray(labels)) for f in (criterion.of_output, right)
    )
    # A diverged network counts as wrong, even where its largest output is NaN.
    finite = jnp.isfinite(losses) & jnp.isfinite(is_right)
    num_right = jnp.sum(jnp.where(finite, is_right, 0))
    if mesh:  # so that every process has all rows
        everywhere = NamedSharding(mesh, PartitionSpec())
        outputs = jax.lax.with_sharding_constraint(outputs, everywhere)
    return num_right, jnp.sum(losses), outputs


def mean_gradients(
    parts: Parts, state: TrainState, rows: PyTree
) -> tuple[diagnostics.Means, diagnostics.Means]:
    """Returns means over training rows of the method's and of plain gradients. NOT PRIVATE."""
    rows, data = examples.in_order(rows)
    example_of, private = parts.example_of(state, data), state.private

    def means_of(oracle: oracles.Method) -> diagnostics.Means:
        return diagnostics.means(
            lambda params, row: oracle.grad(params, example_of(row)),
            parts.gradient.clip,
            oracle.ascend(state.params, private.previous),
            rows,
            clip_state=private.privatize.clip,
            **parts.sharing,
        )

    # The gradients of DP-SGD are the plain ones, so one pass is enough.
    plain = oracles.dp_sgd(parts.loss)
    if pytree.same_structure(parts.gradient.oracle, plain):
        return (both := means_of(plain)), both
    return means_of(parts.gradient.oracle), means_of(plain)


def diagnose(parts: Parts, state: TrainState, rows: PyTree) -> dict[str, Float[Array, ""]]:
    """Returns `diagnostics.describe` of `mean_gradients`, and `plain/loss`. NOT PRIVATE."""
    method, plain = mean_gradients(parts, state, rows)
    rows, data = examples.in_order(rows)
    example_of = parts.example_of(state, data)
    params = finetune.merge(state.params, state.frozen)
    # In microbatches, because the views of all examples would not fit the memory.
    losses = jax.lax.map(
        lambda row: parts.model.loss(params, example_of(row), DENSE),
        rows,
        batch_size=parts.gradient.microbatch_size,
    )
    noise_std: Number = 0.0
    if parts.is_private:
        mean, clip = parts.gradient.mean, parts.gradient.clip
        noise_std = mean.noise_multiplier * clip.sensitivity * parts.noise_norm
        noise_std /= mean.expected_batch_size
    figures = diagnostics.describe(method, plain, state.private.previous, noise_std)
    return figures | {"plain/loss": jnp.mean(losses)}


def first_state(
    seed: int, init: Callable[[Array], tuple[Params, Params]], parts: Parts
) -> TrainState:
    """Returns the state before the first step, without aliased buffers, so that it can be donated.

    `init` makes `(trained, frozen)` weights from a key. `bam.models.interpreter` computes the state
    without a compilation.
    """
    gradient = parts.gradient

    def state(weights_key: Array, noise_key: Array, tag: Array, augment_key: Array) -> TrainState:
        params, frozen = init(weights_key)
        return TrainState(
            params=params,
            averaged=params,
            opt_state=parts.optimizer.init(params),
            private=private_gradient.first_state(
                gradient.clip, gradient.mean, params, noise_key, tag
            ),
            augment_key=augment_key,
            frozen=frozen,
        )

    return interpret(
        state,
        stream_key(seed, "weights"),
        jnp.asarray(host_key(seed, "noise")),
        jnp.asarray(host_key(seed, "whose batch")[:2]),
        stream_key(seed, "views"),
    )


def stream_key(seed: int, label: str) -> Array:
    """Returns the JAX key of a seed's stream "weights" or "views"."""
    # Named, because a user may choose another default generator, with keys of another size.
    return jax.random.wrap_key_data(jnp.asarray(host_key(seed, label)), impl="threefry2x32")
