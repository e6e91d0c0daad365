"""Clipping bias, measured. NOT PRIVATE: everything here reads un-noised gradients."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from bam import tree
from bam.engine import clipped_sum
from bam.transforms import BoundedTransformation
from bam.tree import Grads, Params


class Bias(NamedTuple):
    """Clipping bias of one batch. NOT PRIVATE.

    Attributes:
      bias_norm: ‖ĝ_clip − ĝ‖₂.
      relative_bias: ‖ĝ_clip − ĝ‖₂ / ‖ĝ‖₂; 0 where ĝ is zero.
      cosine: cos(ĝ_clip, ĝ), the direction that clipping keeps; 0 where either is zero.
      gradient_norm: ‖ĝ‖₂.
    """

    bias_norm: Float[Array, ""]
    relative_bias: Float[Array, ""]
    cosine: Float[Array, ""]
    gradient_norm: Float[Array, ""]


def clipping_bias(
    grad_fn: Callable[[Params, Any], Grads],
    clip: optax.GradientTransformation,
    params: Params,
    batch: Any,
    *,
    mask: Bool[Array, " batch"] | None = None,
    microbatch_size: int = 16,
    mesh: jax.sharding.Mesh | None = None,
) -> Bias:
    r"""Bias of the clipped mean, $\hat g_{clip} - \hat g$, against the unclipped mean.

    $\hat g = \frac1n \sum_i g_i$ and $\hat g_{clip} = \frac1n \sum_i clip(g_i)$, with $g_i$ what
    `grad_fn` returns: a method's own gradient, so for BAM the one that it clips. Noise has mean
    zero and adds no bias (Lemma 1 of arXiv 2308.12018); if no gradient exceeds C it is zero
    (Lemma 2).

    Args:
      grad_fn: `(params, example) -> grads`, unclipped.
      clip: a bounded per-example transform.
      params: pytree of arrays.
      batch: pytree of `[n, ...]` arrays.
      mask: `[n]`, True for real examples; None means all are.
      microbatch_size: as in `clipped_sum`; memory does not grow with n.
      mesh: as in `clipped_sum`.

    Returns:
      A `Bias`, NOT PRIVATE.
    """
    size = jax.tree.leaves(batch)[0].shape[0] if mask is None else jnp.sum(mask)

    def twice(params: Params, example: Any) -> Any:
        grads = grad_fn(params, example)
        return grads, grads

    def clip_first(pair: Any, state: Any, params: Any = None) -> Any:
        clipped, _ = clip.update(pair[0], state, params)
        return (clipped, pair[1]), state

    # One pass sums both; the second half is not bounded, and the infinite sensitivity says so.
    clip_first_of_two = BoundedTransformation(clip.init, clip_first, math.inf)
    sums, _ = clipped_sum(
        twice,
        clip_first_of_two,
        params,
        batch,
        mask=mask,
        microbatch_size=microbatch_size,
        mesh=mesh,
    )
    mean_clipped, mean = jax.tree.map(lambda x: x / jnp.maximum(size, 1), sums)
    bias_norm = tree.l2_norm(jax.tree.map(jnp.subtract, mean_clipped, mean))
    norm = tree.l2_norm(mean)
    return Bias(
        bias_norm=bias_norm,
        relative_bias=jnp.where(norm > 0, bias_norm / jnp.where(norm > 0, norm, 1), 0),
        cosine=optax.tree.vdot(tree.unit(mean_clipped), tree.unit(mean)),
        gradient_norm=norm,
    )
