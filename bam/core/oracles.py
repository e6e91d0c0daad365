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

An oracle knows nothing about batches, clipping or noise. Each example's gradient depends only on
that example and on public or already privatised values. So clipping it afterwards bounds the
example's influence as in DP-SGD, and the four methods have the same privacy guarantee. An oracle
is a frozen record: its numbers are arguments of the compiled program, and its loss, counts and
masks are compiled (`bam.core.program`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import (
    Any,
    Concatenate,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeAlias,
    cast,
    runtime_checkable,
)

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from bam.core import program, pytree, scalars
from bam.core.example_loss import guard_loss
from bam.core.own_weights import at_own_weights
from bam.core.program import STATIC
from bam.core.pytree import Grads, Params
from bam.core.scalars import Number
from bam.errors import InputError

# `(params, example) -> scalar loss of one example`
LossFn = Callable[[Params, PyTree], Float[Array, ""]]
# A pytree of bools like the parameters, a function from them to one, or None.
AscentMask: TypeAlias = PyTree
# A user's k rows, and a flag for each: False for padding.
User: TypeAlias = tuple[PyTree, Bool[Array, " k"]]
Options = ParamSpec("Options")


@runtime_checkable
class Method(Protocol):
    """A per-example gradient, and the point where it is evaluated.

    A frozen dataclass of your own with these names is a method. Its numbers are arguments of the
    program if it is registered by `jax.tree_util.register_dataclass`. It may also have `with_loss`:
    `change -> Method`, the same method for another loss, `change(loss_fn)`, such as a user's mean
    loss (`mean_loss`) or the loss of some of the parameters.
    """

    @property
    def ascend(self) -> Callable[[Params, Grads | None], Params]:
        """`(params, previous_private_grad) -> params`, the shift shared by the whole batch.

        The identity for every method but DP-SAT. `previous_private_grad` is a pytree like `params`,
        already privatised: zeros before the first step. bam's oracles also take None: no shift.
        """

    @property
    def grad(self) -> Callable[[Params, PyTree], Grads]:
        """`(params, example) -> grads`, the unclipped gradient of one example, like `params`.

        Sensitive: nothing has been privatised yet.
        """


@program.record
class Oracle:
    """A method of your own from its functions, see `Method`.

    A number of a `jax.tree_util.Partial` is an argument of the program; every other number that a
    function keeps is compiled.
    """

    ascend: Callable[[Params, Grads | None], Params]
    grad: Callable[[Params, PyTree], Grads]
    with_loss: Callable[[Callable[[LossFn], LossFn]], Method] | None = None

    def __post_init__(self) -> None:
        """Makes the functions pytrees."""
        for name, fn in vars(self).copy().items():
            vars(self)[name] = fn and program.as_partial(fn)


def as_part(oracle: Method) -> Method:
    """Returns an oracle as a pytree of its numbers."""
    if program.is_part(oracle):
        return oracle
    return Oracle(oracle.ascend, oracle.grad, getattr(oracle, "with_loss", None))


def method(
    make: Callable[Concatenate[LossFn, Options], Method],
) -> Callable[Concatenate[LossFn, Options], Oracle]:
    """Decorates a method `(loss_fn, ...) -> Oracle`, so that its oracles have a `with_loss`.

    With it, the ascent of a changed loss uses that loss: one ascent for a user's mean loss, and
    only along the trained parameters.
    """

    @functools.wraps(make)
    def make_oracle(loss_fn: LossFn, *args: Options.args, **options: Options.kwargs) -> Oracle:
        def with_loss(change: Callable[[LossFn], LossFn]) -> Method:
            return make_oracle(change(loss_fn), *args, **options)

        oracle = make(loss_fn, *args, **options)
        return Oracle(oracle.ascend, oracle.grad, with_loss)

    return make_oracle


def mean_loss(loss_fn: LossFn) -> LossFn:
    """Returns the loss of a user, `(params, (rows, is_real))`: the mean over rows with flag True.

    Examples:
      >>> import jax.numpy as jnp
      >>> loss = mean_loss(lambda w, x: w * x)
      >>> loss(jnp.array(2.0), (jnp.array([1.0, 3.0, 9.0]), jnp.array([True, True, False]))).item()
      4.0
    """

    def loss(params: Params, user: User) -> Float[Array, ""]:
        rows, is_real = user
        total = pytree.sum_of_real(guard_loss(loss_fn), params, rows, is_real)
        return total / jnp.maximum(1, jnp.sum(is_real)).astype(total.dtype)

    return loss


@dataclasses.dataclass(frozen=True, eq=False)
class _OfLoss:
    """What the four methods share."""

    loss_fn: LossFn = dataclasses.field(metadata=STATIC)

    def ascend(self, params: Params, previous_private_grad: Grads | None) -> Params:
        """Returns the same parameters: no shared shift."""
        return params

    def with_loss(self, change: Callable[[LossFn], LossFn]) -> Method:
        """Returns the same method for another loss."""
        return dataclasses.replace(cast(Any, self), loss_fn=change(self.loss_fn))


def dp_sgd(loss_fn: LossFn) -> Method:
    r"""Plain per-example gradient, $g_i = \nabla L(\theta; x_i, y_i)$ (Abadi et al. 2016).

    `loss_fn` is `(params, example) -> scalar loss of one example`, here and in all methods.

    Examples:
      >>> import jax.numpy as jnp
      >>> oracle = dp_sgd(lambda w, x: 0.5 * jnp.sum((w - x) ** 2))
      >>> oracle.grad(jnp.array([3.0, 0.0]), jnp.array([1.0, 0.0])).tolist()
      [2.0, 0.0]
    """
    return DPSGD(loss_fn)


@program.record
class DPSGD(_OfLoss):
    """The oracle of `dp_sgd`."""

    def grad(self, params: Params, example: PyTree) -> Grads:
        """Returns g_i."""
        return jax.grad(guard_loss(self.loss_fn))(params, example)


def dp_sat(loss_fn: LossFn, radius: Number) -> Method:
    r"""DP-SAT: the gradient at a shared shift along the previous privatised gradient.

    $g_i = \nabla L(\theta + \rho\, p / \|p\|_2; x_i, y_i)$ with $p = \hat g_{priv}^{(t-1)}$. The
    shift has length `radius` ρ, in the units of the parameters. It reuses a released value, so it
    is free post-processing. Before the first step, or if `p` is zero, there is no shift. A ρ that
    is negative or not finite is an InputError.

    Source: Park et al. 2023, "Differentially Private Sharpness-Aware Training".

    Examples:
      >>> import jax.numpy as jnp
      >>> oracle = dp_sat(lambda w, x: 0.5 * jnp.sum((w - x) ** 2), radius=0.5)
      >>> at = oracle.ascend(jnp.array([3.0, 0.0]), jnp.array([0.0, 2.0]))
      >>> oracle.grad(at, jnp.array([1.0, 0.0])).tolist()
      [2.0, 0.5]
    """
    oracle = DPSAT(loss_fn, radius)
    return dp_sgd(loss_fn) if _is_exactly(0, oracle.radius) else oracle


@program.record
class DPSAT(DPSGD):
    """The oracle of `dp_sat`."""

    radius: Number

    def __post_init__(self) -> None:
        """Reads ρ."""
        vars(self)["radius"] = _non_negative("radius", self.radius)

    def ascend(self, params: Params, previous_private_grad: Grads | None) -> Params:
        """Returns θ + ρ p / ‖p‖."""
        if previous_private_grad is None:
            return params
        return pytree.shift(params, self.radius, pytree.unit(previous_private_grad))


def bam_sam(
    loss_fn: LossFn,
    radius: Number,
    mix: Number = 1.0,
    *,
    ascent_views: int = 0,
    ascent_mask: AscentMask = None,
) -> Method:
    r"""BAM by the SAM approximation: the gradient after an ascent step along the example's own.

    $(1-\alpha)\, g_i + \alpha\, \nabla L(\theta + r\, g_i / \|g_i\|_2; x_i, y_i)$ with $g_i =
    \nabla L(\theta; x_i, y_i)$. If the gradient is zero there is no ascent, and the result stays
    finite. With α = 1 this is Eq. 14 of Knolle et al. 2023 (arXiv 2308.12018), which approximates
    `bam_exact` with λ = r up to O(r²). Other α give the mixing of Zhao et al. 2022, which penalises
    with λ = α·r. It costs two gradients. If a cheaper part gives the direction, α < 1 costs a
    third: the whole g_i.

    A cheaper direction is as private, because it still comes from the example alone: its first k
    views (`ascent_views`), or chosen parameters (`ascent_mask`), whose shift leaves the other
    weights shared by the batch.

    Args:
      loss_fn: `(params, example) -> scalar loss of one example`.
      radius: r ≥ 0, in the units of the parameters. Zero is `dp_sgd`, to the bit.
      mix: α in [0, 1]. Zero is `dp_sgd`, to the bit.
      ascent_views: k, the number of rows of `example["image"]` that give the direction; 0 for all.
      ascent_mask: pytree of bools like `params`, True for parameters that the ascent moves, or a
        function from `params` to one (as in `optax.masked`); None for all.

    Raises:
      InputError: if `radius` is negative or not finite, or `mix` is outside [0, 1]; when the
        gradient is computed, if the example has fewer than k views, or the mask is True nowhere.

    Examples:
      >>> import jax.numpy as jnp
      >>> oracle = bam_sam(lambda w, x: 0.5 * jnp.sum((w - x) ** 2), radius=0.5)
      >>> oracle.grad(jnp.array([3.0, 0.0]), jnp.array([1.0, 0.0])).tolist()
      [2.5, 0.0]
    """
    mix = scalars.argument("mix", mix)
    oracle = BAMSAM(loss_fn, radius, mix, ascent_views, ascent_mask)
    is_dp_sgd = _is_exactly(0, oracle.radius) or _is_exactly(0, oracle.mix)
    return dp_sgd(loss_fn) if is_dp_sgd else oracle


@program.record
class BAMSAM(_OfLoss):
    """The oracle of `bam_sam`.

    `mix` is None if it is exactly 1, because the program then needs no mean of two gradients.
    """

    radius: Number
    mix: Number | None
    ascent_views: int = dataclasses.field(metadata=STATIC)
    ascent_mask: AscentMask = dataclasses.field(metadata=STATIC)

    def __post_init__(self) -> None:
        """Reads r, α, k and the mask."""
        mix = 1.0 if self.mix is None else scalars.argument("mix", self.mix)
        if scalars.is_known(mix) and not 0 <= mix <= 1:
            raise InputError(f"mix must be between 0 and 1, got {mix}")
        vars(self).update(
            radius=_non_negative("radius", self.radius),
            mix=None if _is_exactly(1, mix) else mix,
            ascent_views=_num_views(self.ascent_views),
            ascent_mask=_mask(self.ascent_mask),
        )

    def grad(self, params: Params, example: PyTree) -> Grads:
        """Returns (1−α) G(0) + α G(r)."""
        here, ahead = self._here_and_ahead(params, example)
        if self.mix is None:
            return ahead
        if here is None:
            here = jax.grad(guard_loss(self.loss_fn))(params, example)
        in_range = (self.mix >= 0) & (self.mix <= 1)  # a traced number was not checked before
        mix = jnp.where(in_range, self.mix, jnp.nan)
        return jax.tree.map(
            lambda g0, gr: ((1 - mix) * g0 + mix * gr).astype(g0.dtype), here, ahead
        )

    def _here_and_ahead(self, params: Params, example: PyTree) -> tuple[Grads | None, Grads]:
        """Returns G(0), or None if only a part of it was computed, and G(r)."""
        gradient = jax.grad(guard_loss(self.loss_fn))
        # The whole gradient gives both G(0) and the direction.
        if self.ascent_views == 0 and self.ascent_mask is None:
            here = gradient(params, example)
            shifted = pytree.shift(params, self.radius, pytree.unit(here))
            return here, at_own_weights(gradient)(shifted, example)
        chosen, put_back = _choose(params, self.ascent_mask)
        few_views = _first_views(example, self.ascent_views)
        uphill = jax.grad(lambda c: guard_loss(self.loss_fn)(put_back(c), few_views))(chosen)
        shifted = put_back(pytree.shift(chosen, self.radius, pytree.unit(uphill)))
        # With a mask, most layers keep weights that are shared by the batch.
        ahead = at_own_weights(gradient) if self.ascent_mask is None else gradient
        return None, ahead(shifted, example)


def bam_exact(
    loss_fn: LossFn, penalty: Number, *, ascent_views: int = 0, ascent_mask: AscentMask = None
) -> Method:
    r"""BAM's exact gradient, by forward-over-reverse differentiation.

    $\nabla [L + \lambda \|\nabla L\|_2] = g_i + \lambda H_i\, g_i / \|g_i\|_2$, Eq. 13 of Knolle et
    al. 2023 (arXiv 2308.12018). If the gradient is zero, the penalty has subgradient 0, not NaN.
    The gradient is linearised once: the primal pass gives $g_i$, and the linear map gives the
    Hessian-vector product. With `ascent_views` the primal pass gives the gradient of the first
    views instead, and $g_i$ is computed besides.

    Two options are cheaper and exact for another penalty: `ascent_views` penalises the gradient
    norm of the first k views, and `ascent_mask` the norm of the chosen parameters' gradient. Errors
    are those of `bam_sam`.

    Args:
      loss_fn: `(params, example) -> scalar loss of one example`, twice differentiable (piecewise
        is enough: ReLU networks have a Hessian almost everywhere).
      penalty: λ ≥ 0, finite, in the units of the parameters. Zero is `dp_sgd`, to the bit.
      ascent_views: k, the number of rows of `example["image"]` that are penalised; 0 for all.
      ascent_mask: as in `bam_sam`; the penalised norm is over the parameters that are True.

    Examples:
      >>> import jax.numpy as jnp
      >>> oracle = bam_exact(lambda w, x: 0.5 * jnp.sum((w - x) ** 2), penalty=0.5)
      >>> oracle.grad(jnp.array([3.0, 0.0]), jnp.array([1.0, 0.0])).tolist()
      [2.5, 0.0]
    """
    oracle = BAMExact(loss_fn, penalty, ascent_views, ascent_mask)
    return dp_sgd(loss_fn) if _is_exactly(0, oracle.penalty) else oracle


@program.record
class BAMExact(_OfLoss):
    """The oracle of `bam_exact`."""

    penalty: Number
    ascent_views: int = dataclasses.field(metadata=STATIC)
    ascent_mask: AscentMask = dataclasses.field(metadata=STATIC)

    def __post_init__(self) -> None:
        """Reads λ, k and the mask."""
        vars(self).update(
            penalty=_non_negative("penalty", self.penalty),
            ascent_views=_num_views(self.ascent_views),
            ascent_mask=_mask(self.ascent_mask),
        )

    def grad(self, params: Params, example: PyTree) -> Grads:
        """Returns G(0) + λ G'(0)."""
        gradient, mask = jax.grad(guard_loss(self.loss_fn)), self.ascent_mask
        gradient_along = at_own_weights(gradient) if mask is None else gradient
        chosen, put_back = _choose(params, mask)
        few_views = _first_views(example, self.ascent_views)
        penalised, hessian_vector_product = jax.linearize(
            lambda c: gradient_along(put_back(c), few_views), chosen
        )
        # v = g / ‖g‖, zero for a zero gradient. The linear map then gives H v.
        direction = pytree.unit(_choose(penalised, mask)[0])
        here = penalised if self.ascent_views == 0 else gradient(params, example)
        return pytree.shift(here, self.penalty, hessian_vector_product(direction))


class _Flags(NamedTuple):
    """A tree of bools that can be compared."""

    tree: jax.tree_util.PyTreeDef
    flags: tuple[bool, ...]


# A mask as a program keeps it; a function makes a tree of bools from the parameters.
_Mask: TypeAlias = _Flags | Callable[[Params], PyTree] | None


def _choose(params: Params, mask: _Mask) -> tuple[list[Array], Callable[[list[Array]], Params]]:
    """Returns the leaves for which `mask` is True, and a function that replaces them."""
    leaves, structure = jax.tree.flatten(params)
    if mask is not None and not isinstance(mask, _Flags):
        chosen = mask(params)
        mask = None if chosen is None else _flags(chosen)
    flags = [True] * len(leaves) if mask is None else mask.flags
    if mask is not None and (mask.tree != structure or not any(flags)):
        raise InputError(
            "ascent_mask must be a tree of bools like the parameters (None where they are not "
            f"trained) with at least one True, got {jax.tree.unflatten(*mask)}"
        )

    def put_back(chosen: list[Array]) -> Params:
        new = iter(chosen)
        merged = [next(new) if f else leaf for leaf, f in zip(leaves, flags, strict=True)]
        return jax.tree.unflatten(structure, merged)

    return [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag], put_back


def _first_views(example: PyTree, num_views: int) -> PyTree:
    """Returns the example with its first `num_views` views, or with all for 0."""
    if num_views == 0:
        return example
    if not isinstance(example, dict) or "image" not in example:
        raise InputError(
            'ascent_views needs examples that are dicts with views in "image", not users'
        )
    if example["image"].shape[0] < num_views:
        raise InputError(
            f"ascent_views = {num_views}, but an example has {example['image'].shape[0]} views"
        )
    return {**example, "image": example["image"][:num_views]}


def _non_negative(name: str, value: Any) -> Number:
    """Reads a number that is finite and at least 0.

    Any other is an InputError, or NaN if it is traced.
    """
    read = scalars.argument(name, value)
    if not scalars.is_known(read):
        return jnp.where((read >= 0) & (read < math.inf), read, jnp.nan)
    if not (math.isfinite(read) and read >= 0):
        raise InputError(f"{name} must be a finite number of at least 0, got {value}")
    return read


def _is_exactly(number: int, value: Number | None) -> bool:
    """Returns whether a known value equals a number and so removes a branch."""
    return scalars.is_known(value) and bool(value == number)


def _num_views(ascent_views: int) -> int:
    views = scalars.whole("ascent_views", ascent_views)
    if views < 0:
        raise InputError(f"ascent_views must be at least 0, got {views}")
    return views


def _mask(mask: AscentMask) -> _Mask:
    """Returns a mask as a program keeps it.

    InputError for a leaf that is not a bool.
    """
    if mask is None or isinstance(mask, _Flags):
        return mask
    # A module of bools is a tree, though it can be called.
    if callable(mask) and not any(isinstance(x, bool) for x in jax.tree.leaves(mask)):
        return cast(_Mask, mask)
    return _flags(mask)


def _flags(mask: AscentMask) -> _Flags:
    flags, tree = jax.tree.flatten(mask)
    return _Flags(tree, tuple(scalars.flag("ascent_mask", flag) for flag in flags))
