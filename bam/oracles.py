"""The four methods: one example in, one (unclipped) gradient out.

Every method is the gradient along an *ascent ray* G_i(r) = ∇L(θ + r·v_i; x_i, y_i) with ‖v_i‖ = 1:

=============== ================================================= =========================
method          direction v                                       gradient
=============== ================================================= =========================
`dp_sgd`        none                                              G_i(0)
`dp_sat`        shared: the previous step's privatised gradient   G(ρ)
`bam_sam`       the example's own gradient                        (1−α)·G_i(0) + α·G_i(r)
`bam_exact`     the example's own gradient                        G_i(0) + λ·G_i'(0)
=============== ================================================= =========================

An oracle knows nothing about batches, clipping or noise. Because each example's gradient depends
on that example (and public or already privatised values) alone, clipping it afterwards bounds the
example's influence exactly as in DP-SGD: the four methods have the same privacy guarantee.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from bam import tree
from bam.tree import Grads, Params

LossFn = Callable[[Params, Any], Float[Array, ""]]


class Oracle(NamedTuple):
    """A per-example gradient, and where it is evaluated.

    Attributes:
      ascend: `(params, previous_private_grad) -> params`. The shift shared by the whole batch;
        the identity for every method but DP-SAT. `previous_private_grad` is a pytree like
        `params`, already privatised, or None before the first step.
      grad: `(params, example) -> grads`. The unclipped gradient of one example, a pytree like
        `params`. Sensitive: nothing has been privatised yet.
    """

    ascend: Callable[[Params, Grads | None], Params]
    grad: Callable[[Params, Any], Grads]


def dp_sgd(loss_fn: LossFn) -> Oracle:
    r"""Plain per-example gradient, $g_i = \nabla L(\theta; x_i, y_i)$ (Abadi et al. 2016).

    Args:
      loss_fn: `(params, example) -> scalar loss of one example`.

    Returns:
      An `Oracle` whose `ascend` is the identity.

    Example:
      >>> import jax.numpy as jnp
      >>> oracle = dp_sgd(lambda w, x: 0.5 * jnp.sum((w - x) ** 2))
      >>> oracle.grad(jnp.array([3.0, 0.0]), jnp.array([1.0, 0.0])).tolist()
      [2.0, 0.0]
    """
    return Oracle(ascend=_stay, grad=jax.grad(loss_fn))


def dp_sat(loss_fn: LossFn, radius: float) -> Oracle:
    r"""DP-SAT: the gradient at a shared shift along the previous privatised gradient.

    $g_i = \nabla L(\theta + \rho\, p / \|p\|_2; x_i, y_i)$ with $p = \hat g_{priv}^{(t-1)}$. The
    shift reuses a released value, so it is free post-processing. Before the first step (or if `p`
    is zero) there is no shift.

    Args:
      loss_fn: `(params, example) -> scalar loss of one example`.
      radius: ρ ≥ 0, in the units of the parameters.

    Returns:
      An `Oracle` that shifts in `ascend` and is plain in `grad`.

    Raises:
      ValueError: if `radius` is negative or not finite.

    Source: Park et al. 2023, "Differentially Private Sharpness-Aware Training".
    """
    _check_non_negative("radius", radius)

    def ascend(params: Params, previous_private_grad: Grads | None) -> Params:
        if previous_private_grad is None or radius == 0:
            return params
        return tree.shift(params, radius, tree.unit(previous_private_grad))

    return Oracle(ascend=ascend, grad=jax.grad(loss_fn))


def bam_sam(loss_fn: LossFn, radius: float, mix: float = 1.0) -> Oracle:
    r"""BAM by the SAM approximation: the gradient after one ascent step of the example's own.

    $(1-\alpha)\, g_i + \alpha\, \nabla L(\theta + r\, g_i / \|g_i\|_2; x_i, y_i)$ with
    $g_i = \nabla L(\theta; x_i, y_i)$. With α = 1 this is Eq. 14 of Knolle et al. 2023
    (arXiv 2308.12018), an approximation of `bam_exact` with λ = r whose error is O(r²). Other α
    give the mixing of Zhao et al. 2022, which penalises with λ = α·r. Costs two gradients.

    Args:
      loss_fn: `(params, example) -> scalar loss of one example`.
      radius: r ≥ 0, in the units of the parameters. Zero is `dp_sgd`, to the bit.
      mix: α in [0, 1]. Zero is `dp_sgd`, to the bit.

    Returns:
      An `Oracle`; a zero gradient ascends nowhere and stays finite.

    Raises:
      ValueError: if `radius` is negative or not finite, or `mix` is outside [0, 1].
    """
    _check_non_negative("radius", radius)
    if not 0 <= mix <= 1:
        raise ValueError(f"mix must be between 0 and 1, got {mix}")
    if radius == 0 or mix == 0:
        return dp_sgd(loss_fn)
    gradient = jax.grad(loss_fn)

    def grad(params: Params, example: Any) -> Grads:
        here = gradient(params, example)
        ahead = gradient(tree.shift(params, radius, tree.unit(here)), example)
        if mix == 1:
            return ahead
        return jax.tree.map(lambda g0, gr: (1 - mix) * g0 + mix * gr, here, ahead)

    return Oracle(ascend=_stay, grad=grad)


def bam_exact(loss_fn: LossFn, penalty: float) -> Oracle:
    r"""BAM's exact gradient, by forward-over-reverse differentiation.

    $\nabla [L + \lambda \|\nabla L\|_2] = g_i + \lambda H_i\, g_i / \|g_i\|_2$, Eq. 13 of Knolle et
    al. 2023 (arXiv 2308.12018). The gradient is linearised once: the primal pass gives $g_i$ and
    the linear map gives the Hessian-vector product, so $g_i$ is never computed twice.

    Args:
      loss_fn: `(params, example) -> scalar loss of one example`, twice differentiable (piecewise
        is enough: ReLU networks have a Hessian almost everywhere).
      penalty: λ ≥ 0, in the units of the parameters. Zero is `dp_sgd`, to the bit.

    Returns:
      An `Oracle`; where the gradient is zero the penalty's subgradient 0 is used, not NaN.

    Raises:
      ValueError: if `penalty` is negative or not finite.
    """
    _check_non_negative("penalty", penalty)
    if penalty == 0:
        return dp_sgd(loss_fn)
    gradient = jax.grad(loss_fn)

    def grad(params: Params, example: Any) -> Grads:
        here, hessian_vector_product = jax.linearize(lambda p: gradient(p, example), params)
        return tree.shift(here, penalty, hessian_vector_product(tree.unit(here)))

    return Oracle(ascend=_stay, grad=grad)


def _stay(params: Params, previous_private_grad: Grads | None) -> Params:
    """The shared shift of a method that has none."""
    return params


def _check_non_negative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value}")
