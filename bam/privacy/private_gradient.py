"""The private gradient of a drawn batch: one step's clip, sum, noise and division.

`bam train` and `bam.PrivateTraining` take their steps with it. It is a record whose numbers (σ, S,
a radius) are arguments of the compiled step, and it reads no randomness but its arguments.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Int, Int32, PyTree, UInt32

from bam.core import program, pytree, tracing
from bam.core.clipping import Bounded
from bam.core.engine import pad_rows, plain_sum
from bam.core.noise import check_rounding, fitting_size, init_noise, keyless
from bam.core.oracles import DPSGD, LossFn, Method, as_part, mean_loss
from bam.core.private_mean import NoisedMean, PrivatizeState, private_mean
from bam.core.program import STATIC
from bam.core.pytree import Grads, Params
from bam.errors import InputError
from bam.privacy import processes
from bam.privacy.plan import PrivacyPlan

FIRST_PRIVATE = (
    "A batch is no gradient, which TrainState.apply_gradients and nnx.Optimizer.update take: first "
    "call the private transform's update, then give its result to the optimizer"
)

ExampleOf = Callable[[PyTree], PyTree]
# Names, each with its function from the parameters and an example to a number.
Figures: TypeAlias = tuple[tuple[str, Callable[[Params, PyTree], Array]], ...]


class DrawnBatch(NamedTuple):
    """The examples of one step of a `PrivateTraining`.

    All fields are as secret as the examples.

    You may replace a row's values by others of the same shape, computed from that row alone. Rows
    cannot be added, and `mask`, `step` and `tag` must stay as they are.

    Attributes:
      examples: pytree of `[M, ...]`, at random places, with zeros where there is no example; for
        users `[M, k, ...]`, one row for each user.
      mask: `[M]`, or `[M, k]` for users, True for examples.
      step: from 1.
      tag: two words, made of the training's tag, the step and a checksum of the mask.
    """

    examples: PyTree
    mask: Bool[Array | np.ndarray, "rows ..."]
    step: Int32[Array | np.ndarray, ""]
    tag: UInt32[Array | np.ndarray, "2"]

    def __contains__(self, key: object) -> NoReturn:
        """Raises a TypeError: Flax's `TrainState` asks this of gradients."""
        raise TypeError(FIRST_PRIVATE)


class PrivateState(NamedTuple):
    """State of `PrivateTraining.gradient`.

    Never publish it, and never save it beside a release: it holds the noise key.

    Attributes:
      privatize: state of the clip and of the noise.
      previous: the last private gradient, for the trained parameters alone; zeros before the first
        step.
      tag: two words that identify the training.
      num_nonfinite: number of per-example gradients left out so far because they were not finite.
        NOT PRIVATE.
      not_private: name -> `[M]` (`[M, k]` for users), the figures of each example of the last
        batch, 0 where there is none; besides those asked for, the `norm` `[M]` of each gradient
        before clipping. Empty if none were asked for.
    """

    privatize: PrivatizeState
    previous: Grads
    tag: UInt32[Array, "2"]
    num_nonfinite: Int[Array, ""]
    not_private: dict[str, Array]


def batch_of(
    examples: PyTree,
    mask: Bool[np.ndarray, "rows ..."],
    step: int,
    tag: UInt32[np.ndarray, "2"],
) -> DrawnBatch:
    """Returns the batch of a step, from 1, for the training with this tag."""
    number, mask = np.array(step, np.int32), np.asarray(mask)
    tag_of_batch = np.asarray(_tag_of_batch(tag, number, mask))
    # Read-only, because the tag has a checksum of the mask.
    for fact in (number, mask, tag_of_batch):
        fact.setflags(write=False)
    return DrawnBatch(examples, mask, number, tag_of_batch)


def first_state(
    clip: Bounded,
    mean: NoisedMean,
    params: Params,
    key: Array | np.ndarray,
    tag: Array | np.ndarray,
    figures: Mapping[str, tuple[int, ...]] = types.MappingProxyType({}),
) -> PrivateState:
    """Returns the state before the first step, or its structure for placeholders of `params`.

    `figures` are the names and shapes of `PrivateState.not_private`.
    """
    not_private = {name: jnp.zeros(shape, jnp.float32) for name, shape in figures.items()}
    if pytree.is_placeholder(params):
        noise = keyless(mean.strategy)
        state = PrivatizeState(clip.init(params), noise)
        return PrivateState(state, params, noise.key, noise.key, not_private)
    noise = init_noise(jnp.asarray(key), clip, params, mean.strategy)
    check_rounding(noise, mean.noise_multiplier, mean.strategy)
    # The private gradient is float32 or wider, whatever the parameters are.
    wide = jax.tree.map(lambda x: pytree.at_least_float32(jnp.asarray(x)), params)
    state = PrivatizeState(clip.init(params), noise)
    previous = optax.tree.zeros_like(wide)
    num_nonfinite = jnp.zeros((), jnp.int32)
    return PrivateState(state, previous, jnp.asarray(tag), num_nonfinite, not_private)


@program.record
class PrivateGradient:
    r"""From a drawn batch to $\big(\sum_i \mathrm{clip}(g_i) + N(0, \sigma^2 S^2 I)\big) / l$.

    Attributes:
      oracle: the method, of one example; it makes the unclipped gradients g_i.
      clip: the per-example transform, of sensitivity S.
      mean: σ, l, and the correlation of noise.
      microbatch_size: number of rows whose gradients are in memory at once.
      mesh: the devices that share rows; None for a single device.
      group_size: k, if a row is a user with k rows; the oracle's loss is then the user's mean.
      trainable: a regular expression of the names of trained parameters; "" trains all.
      figures: what `PrivateState.not_private` tells of each example.
    """

    oracle: Method
    clip: Bounded
    mean: NoisedMean
    microbatch_size: int = dataclasses.field(metadata=STATIC)
    mesh: Mesh | None = dataclasses.field(default=None, metadata=STATIC)
    group_size: int = dataclasses.field(default=0, metadata=STATIC)
    trainable: str = dataclasses.field(default="", metadata=STATIC)
    figures: Figures = dataclasses.field(default=(), metadata=STATIC)

    def __post_init__(self) -> None:
        """Makes the method a pytree of its numbers."""
        object.__setattr__(self, "oracle", as_part(self.oracle))

    def update(
        self,
        batch: DrawnBatch,
        state: PrivateState,
        params: Params,
        example_of: ExampleOf = lambda row: row,
    ) -> tuple[Grads, PrivateState]:
        """Returns the private gradient, and the next state.

        The gradient is NaN if the batch is not the state's next one. `example_of` makes the
        example of a row inside the sum, so that only one microbatch of its views exists.
        """
        rows, mask = batch.examples, jnp.asarray(batch.mask)
        if self.group_size:
            rows, mask = (rows, mask), jnp.any(mask, axis=1)
        # The shift is shared by all examples and uses only the last private gradient.
        at = self.oracle.ascend(params, _whole(state.previous, params))
        oracle, like = self._method_of_trained(at), pytree.choose(params, self.trainable)

        def of_row(trained: Params, row: PyTree) -> Grads:
            grads = oracle.grad(trained, example_of(row))
            # An oracle of one's own may shift to a tree of several weights.
            shapes, expected = (list(map(jnp.shape, jax.tree.leaves(x))) for x in (grads, like))
            if not pytree.same_structure(grads, like) or shapes != expected:
                raise InputError(
                    "the oracle's gradient has another structure or other shapes than the "
                    "parameters"
                )
            return grads

        gradient, norms, after = private_mean(
            of_row,
            self.clip,
            self.mean,
            pytree.choose(at, self.trainable),
            rows,
            mask,
            state.privatize,
            microbatch_size=self.microbatch_size,
            mesh=self.mesh,
        )
        # Gradients that were left out have a norm that is not finite. Their number has no noise, so
        # it must not enter anything below.
        num_nonfinite = state.num_nonfinite + jnp.sum(~jnp.isfinite(norms))
        # Another batch than the next one would repeat this step's noise.
        is_next = is_next_batch(batch, state)
        gradient, clip_state = jax.tree.map(
            lambda x: jnp.where(is_next, x, jnp.nan) if _is_float(x) else x,
            (gradient, after.clip),  # which may hold noised numbers, too
        )
        gradient, clip_state = tracing.refuse_vmap((gradient, clip_state))
        after = after._replace(clip=clip_state)
        not_private = _each(self, batch, params, example_of)
        if "norm" in state.not_private:
            not_private["norm"] = norms.astype(jnp.float32)
        after_step = PrivateState(after, gradient, state.tag, num_nonfinite, not_private)
        return _whole(gradient, params), after_step

    def _method_of_trained(self, at: Params) -> Method:
        """Returns the method for the loss of a row as a function of the trained parameters."""

        def loss_of(loss: LossFn) -> LossFn:
            loss = mean_loss(loss) if self.group_size else loss
            return lambda trained, row: loss(pytree.merge(trained, at), row)

        oracle: Any = self.oracle
        return oracle.with_loss(loss_of) if self.group_size or self.trainable else oracle


@program.record
class PlainGradient:
    r"""From a drawn batch to $\sum_i g_i / l$, without clipping and noise: NOT PRIVATE.

    Attributes:
      oracle: `bam.dp_sgd` of the loss.
      clip: bounds nothing.
      mean: l.
      microbatch_size: number of rows that one backward pass reads.
      mesh: the devices that share rows; None for a single device.
      figures: what `PrivateState.not_private` tells of each example.
    """

    oracle: Method
    clip: Bounded
    mean: NoisedMean
    microbatch_size: int = dataclasses.field(metadata=STATIC)
    mesh: Mesh | None = dataclasses.field(default=None, metadata=STATIC)
    figures: Figures = dataclasses.field(default=(), metadata=STATIC)

    def update(
        self,
        batch: DrawnBatch,
        state: PrivateState,
        params: Params,
        example_of: ExampleOf = lambda row: row,
    ) -> tuple[Grads, PrivateState]:
        """Returns the mean gradient, and the next state, as `PrivateGradient.update`."""
        oracle: Any = self.oracle
        # One backward pass for a microbatch: without a clip, no example needs its own gradient.
        total = plain_sum(
            lambda params, row: oracle.loss_fn(params, example_of(row)),
            params,
            batch.examples,
            mask=jnp.asarray(batch.mask),
            microbatch_size=self.microbatch_size,
            mesh=self.mesh,
        )
        gradient = self.mean.of(total)
        noise = state.privatize.noise
        after = state.privatize._replace(noise=noise._replace(step=noise.step + 1))
        not_private = _each(self, batch, params, example_of)
        return gradient, state._replace(privatize=after, previous=gradient, not_private=not_private)


def gradient_of(
    plan: PrivacyPlan,
    oracle: Method,
    clip: Bounded,
    *,
    microbatch_size: int,
    mesh: Mesh | None = None,
    group_size: int = 0,
    trainable: str = "",
    figures: Figures = (),
) -> PrivateGradient | PlainGradient:
    """Returns the gradient of a plan's steps, which is plain if the plan has no privacy.

    `group_size` and `trainable` are for loops of one's own, whose oracle knows neither users nor
    frozen weights. The examples of `bam train` hold both already.

    InputError without privacy for another method than DP-SGD, `group_size` and `trainable`.
    """
    mean, size = mean_of(plan), fitting_rows(plan, clip, microbatch_size)
    if plan.private:
        return PrivateGradient(oracle, clip, mean, size, mesh, group_size, trainable, figures)
    if not isinstance(oracle, DPSGD) or group_size or trainable:
        raise InputError(
            "epsilon=inf needs private.gradient(bam.dp_sgd(loss_fn)), without trainable and groups"
        )
    return PlainGradient(oracle, clip, mean, size, mesh, figures)


def _each(
    gradient: PrivateGradient | PlainGradient,
    batch: DrawnBatch,
    params: Params,
    example_of: ExampleOf,
) -> dict[str, Array]:
    """Returns a gradient's figures of each example of a batch, 0 where there is none."""
    if not gradient.figures:
        return {}
    mesh, mask, size = gradient.mesh, jnp.asarray(batch.mask), gradient.microbatch_size

    def of_row(params: Params, row: PyTree) -> dict[str, Array]:
        example = example_of(row)
        return {name: fn(params, example) for name, fn in gradient.figures}

    def of_rows(params: Params, rows: PyTree) -> dict[str, Array]:
        of_one = jax.vmap(of_row, (None, 0)) if mask.ndim == 2 else of_row
        return jax.lax.map(functools.partial(of_one, params), rows, batch_size=size)

    if mesh:
        every, rows_of_each = PartitionSpec(), PartitionSpec(*mesh.axis_names)
        of_rows = jax.shard_map(
            of_rows, mesh=mesh, in_specs=(every, rows_of_each), out_specs=rows_of_each,
            check_vma=False,
        )  # fmt: skip
    num_rows = len(mask)
    figures = of_rows(params, pad_rows(batch.examples, -num_rows % (mesh.size if mesh else 1)))
    if any(x.shape[mask.ndim :] for x in figures.values()):
        raise InputError("a figure of not_private must be one number for an example")
    figures = {k: jnp.where(mask, x[:num_rows], 0).astype(jnp.float32) for k, x in figures.items()}
    if mesh:  # as in the first state, so that the step is compiled once
        figures = jax.lax.with_sharding_constraint(figures, processes.everywhere(mesh))
    return figures


def mean_of(plan: PrivacyPlan) -> NoisedMean:
    """Returns σ, l and the correlation of a plan's noise."""
    return NoisedMean(plan.noise_multiplier, plan.expected_batch_size, plan.mechanism.strategy)


def fitting_rows(plan: PrivacyPlan, clip: Bounded, microbatch_size: int) -> int:
    """Returns the microbatch size as asked, or a smaller one if 32 bits cannot hold the sum."""
    if not plan.private:
        return microbatch_size
    sensitivity = float(clip.sensitivity)
    return fitting_size(microbatch_size, plan.noise_multiplier, sensitivity, plan.capacity)


def is_next_batch(batch: DrawnBatch, state: PrivateState) -> bool | Bool[Array, ""]:
    """Returns whether a batch is of the state's training, unchanged, and of its next step."""
    values: tuple[Any, ...] = (batch.step, batch.tag, batch.mask)
    values += (state.privatize.noise.step, state.tag)
    if not any(isinstance(x, jax.core.Tracer) for x in values):
        values = tuple(map(np.asarray, values))  # NumPy is faster for a few small operations
    number, tag, mask, steps_taken, tag_of_training = values
    expected = _tag_of_batch(tag_of_training, number, mask)
    is_next = (number == steps_taken + 1) & (tag == expected).all()
    return bool(is_next) if isinstance(is_next, np.bool_) else is_next


def _tag_of_batch(
    tag_of_training: UInt32[Array | np.ndarray, "2"],
    step: Int32[Array | np.ndarray, ""],
    mask: Bool[Array | np.ndarray, "rows ..."],
) -> UInt32[Array | np.ndarray, "2"]:
    """Returns the training's tag, XOR the step and a checksum of the mask.

    Each place has its own word, so another mask has another sum, except for one in 2^32.
    """
    # The constants and the mix are xxHash's; any good hash of 32 bits would do.
    xp: Any = np if isinstance(mask, np.ndarray) else jnp
    words = xp.arange(1, mask.size + 1, dtype=xp.uint32) * xp.uint32(0x9E3779B1)
    words = (words ^ (words >> 15)) * xp.uint32(0x85EBCA77)
    words = (words ^ (words >> 13)) * xp.uint32(0xC2B2AE3D)
    words = xp.where(mask.ravel(), words ^ (words >> 16), xp.uint32(mask.size))
    checksum = xp.sum(words, dtype=xp.uint32)
    return tag_of_training ^ xp.stack([xp.asarray(step).astype(xp.uint32), checksum])


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))


def _whole(gradient: Grads, params: Params) -> Grads:
    """Returns a gradient of the trained parameters, with zeros for the others."""
    return pytree.merge(gradient, optax.tree.zeros_like(params))
