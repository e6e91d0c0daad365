"""Clipping bias and related diagnostics. NOT PRIVATE: they read gradients without noise.

`means` reads a batch once, in the memory of one microbatch. `bias` and `describe` are algebra on
the few means that it returns. Nothing here feeds back into training.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from bam.core import clipping, pytree, scalars
from bam.core.clipping import Bounded, Transform, finish
from bam.core.engine import per_example_sum
from bam.core.program import as_partial, compile_once
from bam.core.pytree import Grads, Params
from bam.core.scalars import Number

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class Means(NamedTuple):
    """The means of one pass over a batch of n per-example gradients. NOT PRIVATE.

    Attributes:
      gradient: ĝ = Σ g_i / n.
      clipped: ĝ_clip = Σ clip(g_i) / n.
      direction: Σ g_i/‖g_i‖ / n, so that ⟨direction, ĝ⟩/‖ĝ‖ is the mean of cos(g_i, ĝ).
      fraction_clipped: share of the examples whose gradient the clip changes by at least 1e-5.
      norms: `[rows]`, ‖g_i‖₂; NaN in masked rows and for gradients that are not finite.
    """

    gradient: Grads
    clipped: Grads
    direction: Grads
    fraction_clipped: Float[Array, ""]
    norms: Float[Array, " rows"]


class Bias(NamedTuple):
    """Bias of a clipped mean ĝ_clip against ĝ, with the two parts of Theorem 1. NOT PRIVATE.

    Let a = ⟨ĝ_clip, ĝ⟩/‖ĝ‖² and c = ĝ_clip − a·ĝ, which is orthogonal to ĝ. The bias is
    (a − 1)·ĝ + c, and ‖bias‖² = (1 − a)²‖ĝ‖² + ‖c‖²: an error of magnitude and one of direction.

    Attributes:
      bias_norm: ‖ĝ_clip − ĝ‖₂.
      relative_bias: ‖ĝ_clip − ĝ‖₂ / ‖ĝ‖₂; 0 if ĝ is zero.
      magnitude: a, Theorem 1's magnitude error; 1 if ĝ is zero.
      direction_norm: ‖c‖₂, Theorem 1's directional error without noise.
      cosine: cos(ĝ_clip, ĝ), the agreement in direction; 0 if either is zero.
      gradient_norm: ‖ĝ‖₂.
    """

    bias_norm: Float[Array, ""]
    relative_bias: Float[Array, ""]
    magnitude: Float[Array, ""]
    direction_norm: Float[Array, ""]
    cosine: Float[Array, ""]
    gradient_norm: Float[Array, ""]


def means(
    grad_fn: Callable[[Params, PyTree], Grads],
    clip: Transform,
    params: Params,
    batch: PyTree,
    *,
    mask: Bool[Array, " rows"] | None = None,
    microbatch_size: int = 16,
    mesh: jax.sharding.Mesh | None = None,
    clip_state: PyTree | None = None,
) -> Means:
    """Means of a batch's gradients, clipped gradients and directions, in one pass. NOT PRIVATE.

    A gradient that is not finite counts as zero, as in training. Arguments are those of
    `clipped_sum`; `grad_fn` is the method's unclipped gradient, for BAM the one that it clips.
    Memory does not grow with the number of rows. If the clip has a `finish`, it is applied to the
    clipped mean, without noise.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    mask = jnp.ones(rows, bool) if mask is None else jnp.asarray(mask, bool)
    clip_state = clip.init(params) if clip_state is None else clip_state
    # A function made in this call would be compiled anew in each call.
    compiled = compile_once(
        _means,
        as_partial(grad_fn),
        clipping.as_declared(clip),
        microbatch_size=microbatch_size,
        mesh=mesh,
    )
    return compiled(params, batch, mask, clip_state)


def _means(
    grad_fn: Callable[[Params, PyTree], Grads],
    clip: Bounded,
    params: Params,
    batch: PyTree,
    mask: Bool[Array, " rows"],
    clip_state: PyTree,
    *,
    microbatch_size: int,
    mesh: jax.sharding.Mesh | None,
) -> Means:
    def read(params: Params, example: PyTree) -> tuple[PyTree, Float[Array, ""]]:
        grads = grad_fn(params, example)
        clipped, _ = clip.update(grads, clip_state, params)
        norm = pytree.l2_norm(grads)
        # The clipped tree may have other coordinates than the gradient; `finish` maps it back.
        alone, _ = finish(clip, clipped, clip_state)
        change = pytree.l2_norm(jax.tree.map(jnp.subtract, grads, alone))
        # A clip that scales by 1 may still change the last bits.
        was_clipped = (change > 1e-5 * norm).astype(jnp.float32)
        # One NaN would spoil the sums of all examples.
        summands = jax.tree.map(
            lambda x: jnp.where(jnp.isfinite(norm), x, 0),
            (grads, clipped, pytree.unit(grads), was_clipped),
        )
        return summands, norm

    sums, norms = per_example_sum(
        read, params, batch, mask=mask, microbatch_size=microbatch_size, mesh=mesh
    )
    num_examples = jnp.maximum(jnp.sum(mask), 1)  # with every row masked, means are 0, not NaN
    gradient, clipped, direction, fraction = jax.tree.map(lambda x: x / num_examples, sums)
    clipped, _ = finish(clip, clipped, clip_state)
    norms = jnp.where(mask & jnp.isfinite(norms), norms, jnp.nan)
    return Means(gradient, clipped, direction, fraction, norms)


def bias(clipped: Grads, gradient: Grads) -> Bias:
    r"""Bias $\hat g_{clip} - \hat g$ with the parts of Theorem 1, arXiv 2308.12018. NOT PRIVATE.

    Noise has mean zero and adds no bias (Lemma 1). If no gradient exceeds C, and both are means of
    the same gradients, the bias is zero (Lemma 2).

    `gradient` is the quantity that the mean of clipped gradients should estimate. It is the mean of
    the same gradients unclipped, or the mean of other ones, such as the plain gradients at θ for
    BAM.

    Examples:
      >>> b = bias(jnp.array([1.0, 0.5]), jnp.array([2.0, 0.0]))
      >>> print(b.magnitude, b.direction_norm, b.relative_bias ** 2)
      0.5 0.5 0.3125
    """
    norm = pytree.l2_norm(gradient)
    # The projection on ĝ gives the error of magnitude, the rest that of direction.
    toward = pytree.unit(gradient)
    along = optax.tree.vdot(clipped, toward)  # a·‖ĝ‖
    sideways = jax.tree.map(lambda x, v: x - along * v, clipped, toward)  # c
    bias_norm = pytree.l2_norm(jax.tree.map(jnp.subtract, clipped, gradient))
    nonzero = norm > 0
    floor = jnp.where(nonzero, norm, 1)  # 0/0 in the branch not taken would trip `debug_nans`
    return Bias(
        bias_norm=bias_norm,
        relative_bias=jnp.where(nonzero, bias_norm / floor, 0),
        magnitude=jnp.where(nonzero, along / floor, 1),
        direction_norm=pytree.l2_norm(sideways),
        cosine=optax.tree.vdot(pytree.unit(clipped), toward),
        gradient_norm=norm,
    )


def clipping_bias(
    grad_fn: Callable[[Params, PyTree], Grads],
    clip: Transform,
    params: Params,
    batch: PyTree,
    **sharing: Any,
) -> Bias:
    """Returns the `bias` of a batch's clipped mean against its unclipped mean.

    The arguments are those of `means`.
    """
    batch_means = means(grad_fn, clip, params, batch, **sharing)
    return bias(batch_means.clipped, batch_means.gradient)


def bias_by_batch_size(
    groups: Iterable[Means], smallest: int, largest: int
) -> dict[str, dict[str, float]]:
    """Bias of batches of doubling sizes, from the means of small groups. NOT PRIVATE.

    The groups are disjoint, with `smallest` examples each. They merge two by two up to `largest`
    examples, and few are in memory at a time. Returns size as text -> means of `Bias`'s fields over
    the batches of that size.
    """
    biases: dict[int, list[Bias]] = {}
    # Batches that wait for a partner of their size, at most one of each size, as the bits of a
    # counter: memory grows with the logarithm of `largest`.
    waiting: list[tuple[int, tuple[Grads, Grads]]] = []
    for group in groups:
        size, batch = smallest, (group.clipped, group.gradient)
        biases.setdefault(size, []).append(bias(*batch))
        # Two batches of one size make one of twice the size.
        while size < largest and waiting and waiting[-1][0] == size:
            _, partner = waiting.pop()
            batch = jax.tree.map(lambda x, y: (x + y) / 2, batch, partner)
            size *= 2
            biases.setdefault(size, []).append(bias(*batch))
        if size < largest:
            waiting.append((size, batch))
    return {
        str(size): {
            name: float(jnp.mean(jnp.array([getattr(x, name) for x in same_size])))
            for name in Bias._fields
        }
        for size, same_size in sorted(biases.items())
    }


def describe(
    method: Means, plain: Means, previous_private_grad: Grads, noise_std: Number
) -> dict[str, Float[Array, ""]]:
    """Returns all figures of one batch, by name. NOT PRIVATE.

    A method has three kinds of bias, because its gradient G_i (for BAM and DP-SAT at θ') need not
    be the plain g_i = ∇L(θ; x_i, y_i). The names are those of `Bias`:

    =========================== ==================================================================
    `bias_norm`, …              mean clip(G_i) against mean G_i: the effect of clipping
    `against_plain/bias_norm`,… mean clip(G_i) against mean g_i at θ: the error as an estimate of ∇L
    `plain/bias_norm`, …        mean clip(g_i) against mean g_i at θ: the bias of DP-SGD at this θ
    =========================== ==================================================================

    Further figures:

    - `fraction_clipped` and the quantiles `norm_quantile_NN` of ‖G_i‖
    - `plain/mean_norm`: the mean of ‖g_i‖ over examples with a finite one. L_BAO is L plus λ times
      this mean.
    - `snr` = ‖ĝ_clip‖ / (noise_std·√d): the gradient over the root mean square norm of the noise;
      left out without noise
    - `cosine_examples` = mean_i cos(g_i, ĝ): the agreement of the directions in which BAM ascends
    - `cosine_previous` = cos(ĝ_priv of the previous step, ĝ): that of DP-SAT's direction

    Args:
      method: the means over G_i.
      plain: the means over g_i for the same examples.
      previous_private_grad: the privatised gradient of the previous step.
      noise_std: the standard deviation of the noise on the mean, σS/l; 0 without noise.
    """
    figures: dict[str, Array] = dict(bias(method.clipped, method.gradient)._asdict())
    for prefix, clipped in (("against_plain", method.clipped), ("plain", plain.clipped)):
        fields = bias(clipped, plain.gradient)._asdict()
        figures |= {f"{prefix}/{name}": value for name, value in fields.items()}
    figures["fraction_clipped"] = method.fraction_clipped
    # Norms are NaN in masked rows and for gradients that are not finite.
    for level, norm in zip(
        QUANTILES, jnp.nanquantile(method.norms, jnp.array(QUANTILES)), strict=True
    ):
        figures[f"norm_quantile_{100 * level:02.0f}"] = norm
    figures["plain/mean_norm"] = jnp.nanmean(plain.norms)
    # In many dimensions, the norm of the noise is close to its root mean square.
    noise_norm = noise_std * math.sqrt(pytree.num_params(method.clipped))
    # A traced σ cannot be compared with 0, and a run without noise has a Python 0.
    if not scalars.is_known(noise_norm) or noise_norm:
        figures["snr"] = pytree.l2_norm(method.clipped) / noise_norm
    toward = pytree.unit(plain.gradient)
    figures["cosine_examples"] = optax.tree.vdot(plain.direction, toward)
    figures["cosine_previous"] = optax.tree.vdot(pytree.unit(previous_private_grad), toward)
    return figures


def bias_aware_objective(
    loss_fn: Callable[[Params, PyTree], Float[Array, ""]], penalty: float
) -> Callable[[Params, PyTree], Float[Array, ""]]:
    r"""Returns the loss of one example that BAM minimises, $L_{BAO} = L + \lambda \|\nabla L\|_2$.

    NOT PRIVATE. λ is `penalty`. The mean over a batch is at least the mean loss plus λ times the
    norm of the mean gradient (Lemma 3 of arXiv 2308.12018). Where ∇L is zero, `jax.grad` of this
    function is NaN; `bam.bam_exact`, which computes the gradient faster, takes the subgradient 0.

    Examples:
      >>> objective = bias_aware_objective(lambda w, x: 0.5 * jnp.sum((w - x) ** 2), penalty=0.1)
      >>> print(objective(jnp.array([3.0, 4.0]), jnp.zeros(2)))
      13.0
    """

    def objective(params: Params, example: PyTree) -> Float[Array, ""]:
        loss, grads = jax.value_and_grad(loss_fn)(params, example)
        return loss + penalty * pytree.l2_norm(grads)

    return objective
