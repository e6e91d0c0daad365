"""What a run carries from step to step, and how a gradient moves it.

`Trainer.step` puts it together; the loop over microbatches is in `bam.core.engine`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from bam.core.clipping import BoundedTransformation
from bam.core.noise import NoiseState, first_noise
from bam.core.pytree import Grads, Params
from bam.core.seeds import host_key


class TrainState(NamedTuple):
    """Everything a run carries from step to step.

    Attributes:
      step: steps taken.
      params: the weights θ that are trained; all other fields but `frozen` are like them alone.
      averaged: exponential moving average of the weights (the weights themselves without EMA).
      opt_state: the optimizer's state.
      noise: the noise key and how often it was used; of correlated noise the last b − 1 steps,
        which is as secret.
      clip: state of the per-example transform, made from private values alone.
      private_grad: the last privatised gradient; zeros before the first step.
      augment_key: the key of all random views; (step, example) are folded into it.
      num_nonfinite: per-example gradients dropped so far for NaN or infinity. NOT PRIVATE.
      frozen: the weights that are not trained; an empty tree if all are (see `finetune.py`).
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


def descend(
    state: TrainState,
    gradient: Grads,
    optimizer: optax.GradientTransformation,
    ema_decay: float,
) -> TrainState:
    """The step along a gradient by any optax transform, and the average of the weights.

    An `ema_decay` of 0 is no average.
    """
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return state._replace(
        step=state.step + 1,
        params=params,
        averaged=_average(state.averaged, params, state.step, ema_decay),
        opt_state=opt_state,
        private_grad=gradient,
    )


def _average(averaged: Params, params: Params, step: Int[Array, ""], decay: float) -> Params:
    """One step of the EMA of De et al. 2022, whose decay warms up as (1 + t)/(10 + t)."""
    if decay == 0:
        return params
    decay_now: Float[Array, ""] = jnp.minimum(decay, (1 + step) / (10 + step))
    return optax.incremental_update(params, averaged, 1 - decay_now)


def first_state(
    seed: int,
    init: Callable[[Array], tuple[Params, Params]],
    optimizer: optax.GradientTransformation,
    clip: BoundedTransformation,
    strategy: Sequence[float],
) -> TrainState:
    """The state before the first step; no aliased buffers, so it is safe to donate.

    `init` makes `(trained, frozen)` weights of a key; the strategy is that of the noise.
    """
    params, frozen = init(stream_key(seed, "weights"))
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        averaged=jax.tree.map(jnp.copy, params),
        opt_state=jax.tree.map(jnp.copy, optimizer.init(params)),
        noise=first_noise(jnp.asarray(host_key(seed, "noise")), clip, params, strategy),
        clip=jax.tree.map(jnp.copy, clip.init(params)),
        private_grad=optax.tree.zeros_like(params),
        augment_key=stream_key(seed, "views"),
        num_nonfinite=jnp.zeros((), jnp.int32),
        frozen=frozen,
    )


def step_key(state: TrainState) -> Array:
    """The key of the views that the next step will see."""
    return jax.random.fold_in(state.augment_key, state.step)


def stream_key(seed: int, label: str) -> Array:
    """JAX's key of a stream of a seed, "weights" or "views", whatever its default generator is."""
    return jax.random.wrap_key_data(jnp.asarray(host_key(seed, label)), impl="threefry2x32")
