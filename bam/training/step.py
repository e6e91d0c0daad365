"""The compiled functions of a run: its step, evaluation and diagnostics, from parts and state.

The loop over microbatches is in `bam.core.engine`.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Num, PyTree

from bam import models
from bam.core import oracles, program, pytree, sampling
from bam.core.clipping import Bounded
from bam.core.engine import plain_sum
from bam.core.noise import NoiseState, init_noise
from bam.core.privatize import NoisedMean, PrivatizeState, private_mean
from bam.core.program import STATIC
from bam.core.pytree import Grads, Params
from bam.core.scalars import Number
from bam.core.seeds import host_key
from bam.data import datasets
from bam.files import JsonObject
from bam.models import finetune, losses
from bam.models.interpreter import interpreted
from bam.training import diagnostics, examples

DENSE = "xla"  # the fastest convolutions without per-example gradients


class TrainState(NamedTuple):
    """Everything a run carries from step to step.

    Attributes:
      step: steps taken.
      params: the trained weights θ; the other fields but `frozen` have no frozen weights either.
      averaged: exponential moving average of the weights (the weights themselves without EMA).
      opt_state: the optimizer's state.
      noise: the noise key and the number of its uses; for correlated noise also the noise of the
        last b − 1 steps, which is as secret.
      clip: state of the per-example transform, made from privatised values alone.
      private_grad: the last privatised gradient; zeros before the first step.
      augment_key: the key of all random views; the step and a row's place are folded into it.
      num_nonfinite: number of per-example gradients dropped so far because they were not finite.
        NOT PRIVATE.
      frozen: the weights that are not trained, see `finetune.py`; an empty tree if all are
        trained.
    """

    step: Int[Array, ""]
    params: Params
    averaged: Params
    opt_state: optax.OptState
    noise: NoiseState
    clip: PyTree
    private_grad: Grads
    augment_key: Array
    num_nonfinite: Int[Array, ""]
    frozen: Params


@program.record
class Parts:
    """The parts of a run, as the first argument of the functions below.

    It is a pytree whose leaves are the numbers in the parts, such as σ and the learning rate, so
    that other numbers compile nothing.

    Attributes:
      oracle: the method, for `loss`.
      clip: the per-example transform; it bounds nothing if the run is not private.
      optimizer: the transform that follows the noise.
      mean: σ, l, and the correlation of noise.
      ema_decay: decay of the averaged weights; None for no average.
      noise_norm: the factor by which correlated noise is longer in one step; 1 if independent.
      is_private: whether gradients are bounded and noised.
      loss: the loss of an example as a function of the trained parameters; the example holds the
        `frozen` ones.
      model: the network as functions of its parameters.
      inputs: the settings that make examples from rows.
      microbatch_size: number of rows whose gradients are in memory at once.
      mesh: the devices that share rows; None for a single device.
    """

    oracle: oracles.Method
    clip: Bounded
    optimizer: optax.GradientTransformation
    mean: NoisedMean
    ema_decay: float | None
    noise_norm: float
    is_private: bool = dataclasses.field(metadata=STATIC)
    loss: oracles.LossFn = dataclasses.field(metadata=STATIC)
    model: models.Model = dataclasses.field(metadata=STATIC)
    inputs: examples.Inputs = dataclasses.field(metadata=STATIC)
    microbatch_size: int = dataclasses.field(metadata=STATIC)
    mesh: jax.sharding.Mesh | None = dataclasses.field(metadata=STATIC)

    def __post_init__(self) -> None:
        """Makes the method and the optimizer pytrees of their numbers."""
        object.__setattr__(self, "oracle", oracles.as_part(self.oracle))
        object.__setattr__(self, "optimizer", program.as_transform(self.optimizer))

    def example_at(self, state: TrainState, train: datasets.Split) -> Callable[[PyTree], PyTree]:
        """A function from a row to its example, so that only one microbatch of views exists."""
        at = examples.example_at(self.inputs, train, state.step)
        key = step_key(state)
        return lambda row: at(key, row) | {"frozen": state.frozen}

    @property
    def sharing(self) -> JsonObject:
        """The arguments of a sum that share rows out."""
        return {"microbatch_size": self.microbatch_size, "mesh": self.mesh}


def take(
    parts: Parts, state: TrainState, train: datasets.Split, batch: sampling.PaddedBatch
) -> TrainState:
    """One training step: Algorithm 2 of arXiv 2308.12018, on a train split on the devices.

    The gradient is the sum of bounded gradients, with noise of standard deviation σ·S, divided by
    the plan's l, which is public. Without privacy, it is the sum of gradients of the same batch,
    divided by l. If data are streamed, the split holds the batch's rows, in their order.
    """
    # Rows become examples inside the sum: K views of a whole batch would not fit the memory.
    oracle, example_at = parts.oracle, parts.example_at(state, train)
    rows = examples.rows(parts.inputs, train, batch.indices)
    mask = jnp.asarray(batch.mask)
    if parts.is_private:
        gradient, norms, after = private_mean(
            lambda params, row: oracle.grad(params, example_at(row)),
            parts.clip,
            parts.mean,
            oracle.ascend(state.params, state.private_grad),
            rows,
            mask,
            PrivatizeState(state.clip, state.noise),
            **parts.sharing,
        )
        # Dropped examples have a norm that is not finite. Their number has no noise, so it must not
        # enter anything below.
        num_nonfinite = state.num_nonfinite + jnp.sum(~jnp.isfinite(norms))
        state = state._replace(num_nonfinite=num_nonfinite, **after._asdict())
    else:
        # One backward pass for a microbatch: without a clip, no example needs its own gradient.
        total = plain_sum(
            lambda params, row: parts.loss(params, example_at(row)),
            state.params,
            rows,
            mask=mask,
            **parts.sharing,
        )
        gradient = parts.mean.of(total)
    # From here on everything is post-processing of the private gradient.
    return descend(state, gradient, parts.optimizer, parts.ema_decay)


def descend(
    state: TrainState,
    gradient: Grads,
    optimizer: optax.GradientTransformation,
    ema_decay: Number | None,
) -> TrainState:
    """Updates the weights with an optax transform of the gradient, and then their average."""
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return state._replace(
        step=state.step + 1,
        params=params,
        averaged=_average(state.averaged, params, state.step, ema_decay),
        opt_state=opt_state,
        private_grad=gradient,
    )


def _average(
    averaged: Params, params: Params, step: Int[Array, ""], decay: Number | None
) -> Params:
    """One step of the EMA of De et al. 2022, whose decay warms up as (1 + t)/(10 + t)."""
    if decay is None:
        return params
    # Without the warm-up, the random initial weights would dominate the average for long.
    decay_now: Float[Array, ""] = jnp.minimum(decay, (1 + step) / (10 + step))
    return optax.incremental_update(params, averaged, 1 - decay_now)


def evaluate(
    params: Params,
    images: Num[Array | np.ndarray, "n h w c"],
    labels: Num[Array | np.ndarray, "n ..."],
    *,
    model: models.Model,
    criterion: losses.Loss,
    prepare: datasets.Preparation,
    mesh: jax.sharding.Mesh | None,
) -> tuple[Array, Array, Float[Array, "n ..."]]:
    """The number of correctly classified images, the sum of the losses, and the outputs.

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


def means(
    parts: Parts, state: TrainState, train: datasets.Split, indices: Array | np.ndarray
) -> tuple[diagnostics.Means, diagnostics.Means]:
    """Means over training examples of the method's and of plain gradients. NOT PRIVATE.

    `indices` are rows of the train split on the devices. If data are streamed, it holds these rows
    alone.
    """
    example_at = parts.example_at(state, train)

    def means_of(oracle: oracles.Method) -> diagnostics.Means:
        return diagnostics.means(
            lambda params, row: oracle.grad(params, example_at(row)),
            parts.clip,
            oracle.ascend(state.params, state.private_grad),
            examples.rows(parts.inputs, train, indices),
            clip_state=state.clip,
            **parts.sharing,
        )

    # The gradients of DP-SGD are the plain ones, so one pass is enough.
    plain = oracles.dp_sgd(parts.loss)
    if pytree.same_structure(parts.oracle, plain):
        return (both := means_of(plain)), both
    return means_of(parts.oracle), means_of(plain)


def diagnose(
    parts: Parts, state: TrainState, train: datasets.Split, indices: Array | np.ndarray
) -> dict[str, Float[Array, ""]]:
    """The figures of `diagnostics.describe` for `means`, and the loss `plain/loss`. NOT PRIVATE."""
    method, plain = means(parts, state, train, indices)
    example_at = parts.example_at(state, train)
    params = finetune.merge(state.params, state.frozen)
    # In microbatches, because the views of all examples would not fit the memory.
    losses = jax.lax.map(
        lambda row: parts.model.loss(params, example_at(row), DENSE),
        examples.rows(parts.inputs, train, indices),
        batch_size=parts.microbatch_size,
    )
    noise_std: Number = 0.0
    if parts.is_private:
        mean = parts.mean
        noise_std = mean.noise_multiplier * parts.clip.sensitivity * parts.noise_norm
        noise_std /= mean.expected_batch_size
    figures = diagnostics.describe(method, plain, state.private_grad, noise_std)
    return figures | {"plain/loss": jnp.mean(losses)}


def first_state(
    seed: int, init: Callable[[Array], tuple[Params, Params]], parts: Parts
) -> TrainState:
    """The state before the first step, without aliased buffers, so that it can be donated.

    `init` makes `(trained, frozen)` weights from a key. `bam.models.interpreter` computes the state
    without a compilation.
    """

    def state(weights_key: Array, noise_key: Array, augment_key: Array) -> TrainState:
        params, frozen = init(weights_key)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            averaged=params,
            opt_state=parts.optimizer.init(params),
            noise=init_noise(noise_key, parts.clip, params, parts.mean.strategy),
            clip=parts.clip.init(params),
            private_grad=optax.tree.zeros_like(params),
            augment_key=augment_key,
            num_nonfinite=jnp.zeros((), jnp.int32),
            frozen=frozen,
        )

    return interpreted(
        state,
        stream_key(seed, "weights"),
        jnp.asarray(host_key(seed, "noise")),
        stream_key(seed, "views"),
    )


def step_key(state: TrainState) -> Array:
    """The key of the next step's views."""
    # `step` counts the steps taken, so it is the number of the next one, from 0.
    return jax.random.fold_in(state.augment_key, state.step)


def stream_key(seed: int, label: str) -> Array:
    """The JAX key of a seed's stream "weights" or "views"."""
    # Named, because a user may choose another default generator, with keys of another size.
    return jax.random.wrap_key_data(jnp.asarray(host_key(seed, label)), impl="threefry2x32")
