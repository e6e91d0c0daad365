"""The privacy of one DP-SGD step: clip, sum, add noise, divide by the expected batch size."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from bam.core import program, scalars
from bam.core.clipping import Bounded, bound_of, finish, sensitivity_of
from bam.core.engine import per_example_sum
from bam.core.noise import NoiseState, advance_noise
from bam.core.program import STATIC
from bam.core.pytree import Grads, Params
from bam.core.scalars import Number
from bam.core.strategy import INDEPENDENT, as_numbers
from bam.core.tracing import check_keys
from bam.errors import InputError


class PrivatizeState(NamedTuple):
    """State of a private mean: the clip's state and the noise's state."""

    clip: PyTree
    noise: NoiseState


@program.record
class NoisedMean:
    """The public numbers of a private mean: σ, l, and the strategy that correlates its noise."""

    noise_multiplier: Number
    expected_batch_size: Number
    strategy: Sequence[float] = dataclasses.field(default=INDEPENDENT, metadata=STATIC)

    def __post_init__(self) -> None:
        """Copies the numbers.

        InputError for anything else, or an l that is not positive. `privatize` checks the range of
        σ and the strategy.
        """
        for name in ("noise_multiplier", "expected_batch_size"):
            object.__setattr__(self, name, scalars.argument(name, getattr(self, name)))
        object.__setattr__(self, "strategy", as_numbers(self.strategy))
        size = self.expected_batch_size
        if scalars.is_known(size) and not (math.isfinite(size) and size > 0):
            raise InputError(f"expected_batch_size must be positive, got {size}")

    def of(self, total: PyTree) -> PyTree:
        """Returns the mean of a sum, or NaN if l is traced and not positive."""
        size = self.expected_batch_size
        if not scalars.is_known(size):
            size = jnp.where((size > 0) & (size < math.inf), size, jnp.nan)
        # A product has the same bits whether l is an argument or a constant of the program.
        return jax.tree.map(lambda x: x * (1 / jnp.asarray(size, x.dtype)), total)


def private_mean(
    grad_fn: Callable[[Params, PyTree], Grads],
    clip: Bounded,
    noised_mean: NoisedMean,
    params: Params,
    examples: PyTree,
    mask: Bool[Array, " batch"] | None,
    state: PrivatizeState,
    *,
    microbatch_size: int = 16,
    mesh: jax.sharding.Mesh | None = None,
    is_noised: bool = True,
) -> tuple[Grads, Float[Array, " batch"], PrivatizeState]:
    r"""Returns the private mean $(\sum_i m_i\, clip(g_i) + N(0, \sigma^2 S^2)) / l$ of a step.

    It is computed in constant memory. `privatize`, `bam train` and `bam.PrivateTraining` call it in
    every private step. g_i is `grad_fn(params, example)`, an oracle's `grad` at the weights that
    its `ascend` returns. The rows must be a batch of `sampling.pad`, at random places, and the call
    must be part of a compiled program. It returns the mean, the norms of `clipped_sum`, which are
    NOT private, and the next step's state.
    """
    # Noise for S · σ, whatever the number of rows: an empty batch gets as much.
    noise, noise_state = advance_noise(
        state.noise, noised_mean.noise_multiplier, sensitivity_of(clip), noised_mean.strategy
    )
    check_keys(noise.key, noise.step)
    noised, norms = per_example_sum(
        grad_fn,
        params,
        examples,
        bound=bound_of(clip, state.clip),
        mask=mask,
        microbatch_size=microbatch_size,
        mesh=mesh,
        noise=noise if is_noised else None,
        draw_places=False,
    )
    mean = noised_mean.of(noised)
    private_grad, clip_state = finish(clip, mean, state.clip)
    return private_grad, norms, PrivatizeState(clip_state, noise_state)
