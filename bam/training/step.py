"""One step of training: Algorithm 2 of arXiv 2308.12018, and what it carries to the next.

`private_step` is the algorithm for any method, `ordinary_step` what it is compared with.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt32

from bam.core.chacha import host_key
from bam.core.clipping import BoundedTransformation
from bam.core.engine import plain_sum
from bam.core.noise import NoiseState, first_noise, renewed
from bam.core.oracles import LossFn, Oracle
from bam.core.privatize import NoisedMean, PrivatizeState, private_mean
from bam.core.pytree import Grads, Params
from bam.privacy.plan import PrivacyPlan
from bam.training import devices

# Separate random streams of one seed, by JAX. Noise and batches have keys of their own, which are
# cryptographic (bam.core.chacha).
INIT_STREAM, AUGMENT_STREAM = 0, 2

# `(key of the step, row) -> example`: one training example, with this step's views.
ExampleAt = Callable[[Array, PyTree], PyTree]


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


def private_step(
    state: TrainState,
    rows: PyTree,
    mask: Bool[Array, " rows"],
    example_at: ExampleAt,
    oracle: Oracle,
    clip: BoundedTransformation,
    plan: PrivacyPlan,
    descend: Callable[[TrainState, Grads], TrainState],
    *,
    microbatch_size: int,
    mesh: jax.sharding.Mesh | None,
) -> TrainState:
    """A batch of examples -> the private gradient -> the next weights.

    `example_at` makes an example of a row, so that only a microbatch of views exists at a time. The
    clip bounds an example's gradient by S; the noise on the sum has a deviation of σ·S, and is
    correlated over steps as the plan's strategy says; the sum is divided by the plan's l, which is
    public. `descend` takes the step along the private gradient. Microbatches and mesh are as in
    `bam.clipped_sum`.
    """
    key = step_key(state)
    private_grad, norms, after = private_mean(
        lambda params, row: oracle.grad(params, example_at(key, row)),
        clip,
        oracle.ascend(state.params, state.private_grad),
        rows,
        PrivatizeState(state.clip, state.noise),
        NoisedMean(plan.noise_multiplier, plan.expected_batch_size, plan.mechanism.strategy),
        mask=mask,
        microbatch_size=microbatch_size,
        mesh=mesh,
    )
    # From here on everything is post-processing of private_grad.
    return descend(state, private_grad)._replace(
        noise=after.noise,
        clip=after.clip,
        num_nonfinite=state.num_nonfinite + jnp.sum(~jnp.isfinite(norms)),
    )


def ordinary_step(
    state: TrainState,
    rows: PyTree,
    mask: Bool[Array, " rows"],
    example_at: ExampleAt,
    loss: LossFn,
    expected_batch_size: int,
    descend: Callable[[TrainState, Grads], TrainState],
    *,
    microbatch_size: int,
    mesh: jax.sharding.Mesh | None,
) -> TrainState:
    """The step without clipping and noise, on the same batches: NOT private."""
    key = step_key(state)
    total = plain_sum(
        lambda params, row: loss(params, example_at(key, row)),
        state.params,
        rows,
        mask=mask,
        microbatch_size=microbatch_size,
        mesh=mesh,
    )
    return descend(state, jax.tree.map(lambda x: x / expected_batch_size, total))


def descend(
    state: TrainState,
    gradient: Grads,
    *,
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
    params, frozen = init(stream_key(seed, INIT_STREAM))
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        averaged=jax.tree.map(jnp.copy, params),
        opt_state=jax.tree.map(jnp.copy, optimizer.init(params)),
        noise=first_noise(jnp.asarray(host_key(seed, "noise")), clip, params, strategy),
        clip=jax.tree.map(jnp.copy, clip.init(params)),
        private_grad=optax.tree.zeros_like(params),
        augment_key=stream_key(seed, AUGMENT_STREAM),
        num_nonfinite=jnp.zeros((), jnp.int32),
        frozen=frozen,
    )


def step_key(state: TrainState) -> Array:
    """The key of the views that the next step will see."""
    return jax.random.fold_in(state.augment_key, state.step)


def stream_key(seed: int, stream: int) -> Array:
    """JAX's key, of 64 bits, of the initial weights or of the views of a seed.

    All bits of the seed count (a JAX key made from it directly would keep 32), and streams are
    apart from each other. JAX's default generator does not matter.
    """
    words = np.random.SeedSequence(seed, spawn_key=(0xA5, stream)).generate_state(2)
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


def with_noise_key(
    state: TrainState, key: UInt32[Array, "8"] | UInt32[np.ndarray, "8"]
) -> TrainState:
    """A state whose future noise comes from another key; the count of draws goes on.

    Correlated noise then takes nothing back of earlier noise: see `ledger.py` on what that costs.
    """
    placed: Array = devices.put(key, state.noise.key.sharding)
    return state._replace(noise=renewed(state.noise, placed))


def without_noise_key(state: TrainState) -> TrainState:
    """The same state with zeros for a noise key and past: what may be saved of a run to release."""
    return with_noise_key(state, np.zeros(8, np.uint32))
