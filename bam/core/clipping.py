r"""Bounding one example's gradient: optax transforms that promise a bound on their output.

The promise is `sensitivity`, S. Because of rounding, an output may be longer than S by the factor
`ROUNDING`, and the noise is scaled to that larger bound. For the clips in `PROVED` the bound is
proved. Let $u = 2^{-24}$. A computed norm is $n = \|g\| (1 + \eta)$ with
$|\eta| < 5 \cdot 10^{-6}$ (`pytree.l2_norm`), and each product, quotient or sum of two numbers is
off by a factor between $1 - u$ and $1 + u$ (a GPU's quotient by up to 4 u, which `ROUNDING`
covers). The engine keeps the gradient in memory, so the norm belongs to the very numbers that are
scaled. For any other transform, also a `chain`, the engine measures the integers that it adds, and
drops an example that breaks the promise. A config finds a transform by its name in `CLIPS`.

A bound is read when the transform is made and cannot be changed afterwards, because noise is scaled
to it once, and the transform, which is traced again for each new shape, must keep to it.
"""

import dataclasses
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, PyTree

from bam.core import pytree, scalars
from bam.core.closure import Closure, as_closure
from bam.core.pytree import Grads, Params
from bam.core.scalars import Number
from bam.errors import InputError

# Norms are computed in float32, so a gradient bounded by S may be longer by this factor. Noise is
# scaled to the larger bound. The clip itself needs at most 6.4e-6, with 2e-7 of a GPU's division.
# The rest covers scalars that a program receives in float32. σ, σS, σS · ROUNDING and the product
# of an entry with 1 / spacing are off by u each, and 1 / spacing by 4 u on a GPU, together by less
# than 9 u = 5.4e-7. A traced S of many leaves is off by 1.4e-6.
ROUNDING = 1 + 1e-5

# Squares of entries below 1e-19 underflow in float32. 10⁸ of them have norm 1e-15, which must be
# little beside a bound.
SMALLEST_CLIP_NORM = 1e-12


class _Promise(NamedTuple):
    """The parts of a `BoundedTransformation` besides `init` and `update`."""

    bound: Closure  # without arguments; it returns S
    finish: Callable[[PyTree, PyTree], tuple[Grads, PyTree]] | None = None
    is_proved: bool = False


# By `update` function. They are not kept in the transforms, whose attributes could be replaced.
_promises: weakref.WeakKeyDictionary[Callable[..., Any], _Promise] = weakref.WeakKeyDictionary()


class BoundedTransformation(optax.GradientTransformation):
    """An optax transform of *one example's* gradient that promises a bound on its output.

    It is an ordinary `optax.GradientTransformation` (it unpacks to `init, update`) with further
    attributes. To add your own, call `BoundedTransformation(init, update, sensitivity)` with
    `init: params -> state` and, for one example,
    `update: (grads, state, params) -> (bounded grads, state)`. A transform never changes: its
    attributes cannot be assigned, a copy is the same object, there is no pickle, and the result of
    `_replace` declares no bound.

    Attributes:
      sensitivity: the largest L2 norm that `update` can return for any input, NaN and infinity
        included; `inf` means "not bounded". A sum over examples has this L2 sensitivity, for
        zero-out and for add/remove. It must be 0 or at least 1e-12; anything else is an
        InputError.
      finish: `(noised mean, state) -> (private gradient, state)`, called once per step; None leaves
        both as they are. Only `finish` changes the state. The state that `update` returns is
        ignored, because it has seen one example's gradient. `update` may return further numbers
        beside the gradient: they are summed, noised and passed to `finish`.
      is_proved: whether the bound is proved, so that the engine need not measure it. It is True for
        the three clips of this file alone, not for a `chain`.
    """

    __slots__ = ()  # no dictionary that could be written to

    def __new__(
        cls,
        init: Callable[..., PyTree],
        update: Callable[..., tuple[PyTree, PyTree]],
        sensitivity: Number,
        finish: Callable[[PyTree, PyTree], tuple[Grads, PyTree]] | None = None,
    ) -> "BoundedTransformation":
        """Makes the pair `(init, update)` and attaches the bound."""
        bound = _checked("sensitivity", sensitivity)
        return cls._of(init, update, _Promise(Closure(_nan_if_out_of_range, (), (bound,)), finish))

    @classmethod
    def _of(
        cls, init: Callable[..., PyTree], update: Callable[..., Any], promise: _Promise
    ) -> "BoundedTransformation":
        # A new object, so that the same `update` can have another bound in another transform.
        bounded_update = dataclasses.replace(as_closure(update))
        _promises[bounded_update] = promise
        return super().__new__(cls, init, bounded_update)

    def _replace(self, **changed: Any) -> optax.GradientTransformation:
        """Returns a plain optax pair without a bound, because the bound belonged to this pair."""
        return optax.GradientTransformation(*self)._replace(**changed)

    @property
    def sensitivity(self) -> Number:
        """S; an AttributeError if none was declared."""
        bound: Number = _promise_of(self).bound()
        return bound

    @property
    def finish(self) -> Callable[[PyTree, PyTree], tuple[Grads, PyTree]] | None:
        """The function that follows the noise, once per step, or None."""
        return _promise_of(self).finish

    @property
    def is_proved(self) -> bool:
        """Whether the bound is proved."""
        return _promise_of(self).is_proved

    def _flatten(self) -> tuple[tuple[PyTree, ...], bool]:
        promise = _promise_of(self)
        if promise.is_proved:  # S is computed from the update's own numbers
            return (self.update,), True
        finish = promise.finish and as_closure(promise.finish)
        return (as_closure(self.init), self.update, promise.bound, finish), False

    @classmethod
    def _unflatten(cls, is_proved: bool, parts: tuple[Any, ...]) -> "BoundedTransformation":
        if is_proved:
            return _proved(parts[0])
        init, update, bound, finish = parts
        return cls._of(init, update, _Promise(bound, finish))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        """Refuses another bound: noise may already be scaled to this one."""
        raise AttributeError(f"{name} of a clip cannot be changed: make another clip")

    def __delattr__(self, name: str) -> NoReturn:
        """Refuses, as `__setattr__`."""
        raise AttributeError(f"{name} of a clip cannot be deleted: make another clip")

    def __copy__(self) -> "BoundedTransformation":
        """Returns itself, because it cannot change."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "BoundedTransformation":
        """Returns itself."""
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuses a pickle, which would lose the bound."""
        raise TypeError("a clip cannot be pickled: make a new one in the other process")

    # Compared by identity: the same pair of functions may have another bound elsewhere.
    __eq__, __ne__, __hash__ = object.__eq__, object.__ne__, object.__hash__


jax.tree_util.register_pytree_node(
    BoundedTransformation, BoundedTransformation._flatten, BoundedTransformation._unflatten
)


def _promise_of(clip: BoundedTransformation) -> _Promise:
    if clip.update not in _promises:
        raise AttributeError(
            "this clip was made without its bound: make it by clip_by_l2_norm, normalize or "
            "clip_per_layer, or by bam.BoundedTransformation"
        )
    return _promises[clip.update]


def finish(clip: optax.GradientTransformation, mean: PyTree, state: PyTree) -> tuple[Grads, PyTree]:
    """Applies a transform's `finish` to the noised mean; returns the gradient and the next state.

    `mean` is the noised sum divided by the expected batch size. Mean and state are both private, so
    this is post-processing. A transform without `finish` leaves both as they are.
    """
    finish = getattr(clip, "finish", None)
    return (mean, state) if finish is None else finish(mean, state)


def clip_by_l2_norm(clip_norm: Number) -> BoundedTransformation:
    r"""Clips a gradient to norm at most C: $\bar g = g / \max(1, \|g\|_2 / C)$.

    The norm is taken over all leaves together, in float32 or wider; structure, shapes and dtypes
    are kept. C is `clip_norm`, and the sensitivity. Edge cases:

    =================== =======================================================
    case                output
    =================== =======================================================
    ‖g‖ ≤ C             g, unchanged to the bit
    g = 0               0
    g has NaN or inf    0 (also if ‖g‖ overflows float32, above about 1.8e19)
    C = 0               0
    C = inf             g (0 if non-finite); sensitivity inf, so `privatize` refuses it
    =================== =======================================================

    A C that is negative, NaN, or positive but below 1e-12 (see `SMALLEST_CLIP_NORM`) is an
    InputError.

    Proof of the bound: if n ≤ C (1 + u), g is returned, and $\|g\| \le C (1 + u) / (1 - |\eta|)$.
    Otherwise C, C/n and its products with entries are rounded once each, so $\|\bar g\| \le
    C (1 + u)^3 / (1 - |\eta|) < C (1 + 5.2 \cdot 10^{-6})$. Entries below 1e-19, whose squares
    underflow, together have a norm of at most 1e-15 if they are at most 10⁸. Squared norms add, so
    they lengthen the output by less than a relative 1e-6, for any C ≥ 1e-12.

    Source: Abadi et al. 2016; Algorithm 1 of arXiv 2308.12018.

    Examples:
      >>> import jax.numpy as jnp
      >>> clip = clip_by_l2_norm(1.0)
      >>> clipped, _ = clip.update({"w": jnp.array([3.0, 4.0])}, clip.init(None))
      >>> print(clipped["w"], clip.sensitivity)
      [0.6 0.8] 1.0
    """
    return _proved(Closure(_clip_whole, (), (_checked("clip_norm", clip_norm),)))


def _clip_whole(
    clip_norm: Number, grads: Grads, state: PyTree, params: PyTree = None
) -> tuple[Grads, PyTree]:
    norm = pytree.l2_norm(grads)
    return _clip(grads, norm, clip_norm, jnp.isfinite(norm)), state


def normalize(clip_norm: Number, gamma: Number = 0.01) -> BoundedTransformation:
    r"""Automatic clipping: a gradient much longer than γ is scaled to norm just below C.

    $\bar g = C\, g / (\|g\|_2 + \gamma)$. Non-finite gradients become zero. Structure, shapes and
    dtypes are kept, and the sensitivity is C. γ keeps small gradients small; it is a stability
    constant of the source.

    Proof of the bound: n + γ, its inverse, C and two products are rounded once each, and
    $n + \gamma > \|g\| (1 - |\eta|)$, so $\|\bar g\| \le C (1 + u)^5 / (1 - |\eta|) <
    C (1 + 5.4 \cdot 10^{-6})$.

    Raises:
      InputError: if C is infinite, negative, NaN or positive but below 1e-12, or γ is infinite, NaN
        or below 1e-12, where a norm may underflow unnoticed.

    Source: Bu et al. 2023, "Automatic Clipping".

    Examples:
      >>> import jax.numpy as jnp
      >>> clip = normalize(1.0, gamma=5.0)
      >>> clipped, _ = clip.update(jnp.array([3.0, 4.0]), clip.init(None))
      >>> [round(float(x), 4) for x in clipped]
      [0.3, 0.4]
    """
    bound, floor = _checked("clip_norm", clip_norm), scalars.argument("gamma", gamma)
    if scalars.is_known(bound) and math.isinf(bound):
        raise InputError("clip_norm must be finite for normalize, got inf")
    if scalars.is_known(floor) and not SMALLEST_CLIP_NORM <= floor < math.inf:
        raise InputError(f"gamma must be finite and at least {SMALLEST_CLIP_NORM}, got {gamma}")
    return _proved(Closure(_normalize, (), (bound, floor)))


def _normalize(
    clip_norm: Number, gamma: Number, grads: Grads, state: PyTree, params: PyTree = None
) -> tuple[Grads, PyTree]:
    norm = pytree.l2_norm(grads)
    # In two steps, because C / (n + γ) could overflow for a large C and a small norm.
    return _scale(grads, 1.0, norm + gamma, jnp.isfinite(norm), clip_norm), state


def _bound_of_normalize(clip_norm: Number, gamma: Number) -> Number:
    in_range = (gamma >= SMALLEST_CLIP_NORM) & (gamma < math.inf)
    if scalars.is_known(clip_norm, gamma):
        return _nan_if_out_of_range(clip_norm) if in_range else math.nan
    return jnp.where(in_range, _nan_if_out_of_range(clip_norm), jnp.nan)


def clip_per_layer(clip_norm: PyTree) -> BoundedTransformation:
    r"""Clips each leaf of the gradient (each parameter array) to its own bound.

    $\bar g_k = g_k / \max(1, \|g_k\|_2 / C_k)$; the whole gradient then has norm at most
    $(\sum_k C_k^2)^{1/2}$, the sensitivity. A leaf with a NaN or infinity makes the example's whole
    output zero.

    `clip_norm` is either one number C, shared out as $C_k = C/\sqrt{K}$ over the K leaves, or a
    pytree of numbers like the parameters, the $C_k$. A bound that is negative, NaN, or positive but
    below 1e-12 is an InputError.

    The bound holds for each leaf as in `clip_by_l2_norm`, with two more roundings if one C is
    shared out. So the whole gradient exceeds S at most by the factor of `clip_by_l2_norm`, plus
    2e-7.

    Source: McMahan et al. 2018, "per-layer clipping".

    Examples:
      >>> import jax.numpy as jnp
      >>> clip = clip_per_layer({"w": 1.0, "b": 2.0})
      >>> gradient = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([1.0])}
      >>> clipped, _ = clip.update(gradient, clip.init(gradient))
      >>> print(clipped["w"], clipped["b"])
      [0.6 0.8] [1.]
    """
    bounds = tuple(_checked("clip_norm", x) for x in jax.tree.leaves(clip_norm))
    tree: jax.tree_util.PyTreeDef | None = jax.tree.structure(clip_norm)
    tree = None if jax.tree_util.all_leaves([clip_norm]) else tree
    # As text, because `StaticValue` compares other objects by identity, and equal trees share a
    # program.
    return _proved(Closure(_clip_leaves, (str(tree),), (bounds,)))


def _clip_leaves(
    tree: str, bounds: Sequence[Number], grads: Grads, state: PyTree, params: PyTree = None
) -> tuple[Grads, PyTree]:
    leaves = jax.tree.leaves(grads)
    structure: jax.tree_util.PyTreeDef = jax.tree.structure(grads)
    if tree == str(None):
        bounds = [bounds[0] * (1 / math.sqrt(max(1, len(leaves))))] * len(leaves)
    elif tree != str(structure):
        raise InputError(
            "clip_norm must be a number, or a tree of numbers with the structure of the gradient"
        )
    finite = jnp.isfinite(pytree.l2_norm(grads))
    clipped = [
        _clip(g, pytree.l2_norm(g), bound, finite) for g, bound in zip(leaves, bounds, strict=True)
    ]
    return jax.tree.unflatten(structure, clipped), state


def _bound_of_leaves(tree: str, bounds: Sequence[Number]) -> Number:
    if scalars.is_known(*bounds):
        return math.hypot(*map(_nan_if_out_of_range, bounds))
    in_range = jnp.all(jnp.stack([_is_clip_norm(x) for x in bounds]))
    return jnp.where(in_range, pytree.l2_norm([jnp.asarray(x) for x in bounds]), jnp.nan)


def chain(*transforms: optax.GradientTransformation) -> BoundedTransformation:
    """Applies per-example transforms in order; the last one must be bounded, else InputError.

    This is `optax.chain` with a bound: the chain has the sensitivity of its last member. Anything
    may come before that member. Nothing may come after it, because even scaling by 2 would break
    the declared bound.

    Examples:
      >>> import optax
      >>> chain(optax.scale(10.0), clip_by_l2_norm(0.5)).sensitivity
      0.5
    """
    if not transforms:
        raise InputError("chain needs at least one transform, and the last must be bounded")
    if not isinstance(transforms[-1], BoundedTransformation):
        raise InputError(
            "the output of this chain is not bounded: end it with a bounded transform, "
            "such as clip_by_l2_norm(C)"
        )
    last = as_declared(transforms[-1])
    if len(transforms) == 1:
        return last
    # Not proved: the last transform may scale other numbers than those whose norm it took.
    parts = (*(_as_closures(x) for x in transforms[:-1]), last)
    return BoundedTransformation(
        Closure(_init_chained, (), parts),
        Closure(_update_chained, (len(parts),), parts),
        last.sensitivity,
        Closure(_finish_last, (), (last,)),
    )


def _as_closures(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    if isinstance(transform, BoundedTransformation):
        return transform
    return optax.GradientTransformation(*map(as_closure, transform))


def _init_chained(*parts: Any) -> PyTree:
    *transforms, params = parts
    return optax.chain(*transforms).init(params)


def _update_chained(num: int, *args: Any) -> tuple[PyTree, PyTree]:
    return optax.chain(*args[:num]).update(*args[num:])


def _finish_last(
    last: BoundedTransformation, mean: PyTree, state: tuple[PyTree, ...]
) -> tuple[Grads, PyTree]:
    private_grad, last_state = finish(last, mean, state[-1])
    return private_grad, (*state[:-1], last_state)


def as_declared(clip: optax.GradientTransformation) -> BoundedTransformation:
    """Returns the transform with the bound that it declares now, which is used from here on.

    A user's pair with a `sensitivity` attribute could get another one later, so it is read once,
    here. InputError if a transform declares none.
    """
    if type(clip) is BoundedTransformation and clip.update in _promises:
        return clip
    sensitivity = getattr(clip, "sensitivity", None)
    if sensitivity is None:
        raise InputError(
            "this transform has no `sensitivity`, so its output is not bounded: use "
            "clip_by_l2_norm, normalize or clip_per_layer, or end a bam.chain (not optax.chain) "
            "with one of them"
        )
    return BoundedTransformation(clip.init, clip.update, sensitivity, getattr(clip, "finish", None))


def sensitivity_of(clip: optax.GradientTransformation) -> Number:
    """A transform's declared L2 sensitivity, at least 0; InputError if it has none, or infinity.

    A traced sensitivity may turn out NaN or infinite: then the noised sum is NaN.
    """
    sensitivity = as_declared(clip).sensitivity
    if scalars.is_known(sensitivity) and not math.isfinite(sensitivity):
        raise InputError(
            f"this per-example transform is not bounded (sensitivity {sensitivity}): "
            "noise cannot hide it, so give a finite clip norm"
        )
    return sensitivity


class Bound(NamedTuple):
    """A clip in one step: the function that bounds one example's gradient, and its bound.

    Attributes:
      bounded_grad: `(params, gradient) -> (clipped, norm)`: the clipped gradient, or zeros if the
        gradient is not finite, and the gradient's norm before clipping.
      sensitivity: S, which the clip declares.
      is_proved: whether S is proved to bound `clipped`, if norm and scaling read the same numbers
        in memory.
    """

    bounded_grad: Callable[[Params, Grads], tuple[PyTree, Float[Array, ""]]]
    sensitivity: Number
    is_proved: bool


def bound_of(clip: optax.GradientTransformation, clip_state: PyTree) -> Bound:
    """The bound of a clip in this state; InputError if it declares no `sensitivity`."""
    clip = as_declared(clip)
    sensitivity, update = clip.sensitivity, clip.update

    def bounded_grad(params: Params, grads: Grads) -> tuple[PyTree, Float[Array, ""]]:
        pytree.check_real(grads)
        # Narrow gradients are bounded in 32 bits: rounding in the narrow type could lift the norm.
        grads = jax.tree.map(pytree.at_least_float32, grads)
        norm = pytree.l2_norm(grads)
        clipped, _ = update(grads, clip_state, params)
        pytree.check_real(clipped)
        if clip.is_proved:  # it returns zeros itself where the norm is not finite
            return clipped, norm
        # With S = 0, entries whose squares underflow have a norm of 0 but are not 0.
        keep = jnp.isfinite(norm) & (sensitivity > 0)
        return jax.tree.map(lambda x: jnp.where(keep, x, 0), clipped), norm

    return Bound(bounded_grad, sensitivity, clip.is_proved)


def is_within(summand: PyTree, limit: Number) -> Bool[Array, ""]:
    """True only if a summand (floats or integers) has an L2 norm of at most `limit` · (1 + 1e-5).

    The computed norm may be off by a relative 5e-6, and a traced `limit` by ten roundings, 1e-6 at
    most. So the computed norm must be at most `limit` · (1 + 4e-6).
    """
    length = pytree.l2_norm(jax.tree.map(lambda x: x.astype(jnp.float32), summand))
    return jnp.isfinite(length) & (length <= limit * (1 + 4e-6))


class Clip(NamedTuple):
    """A row of `CLIPS`: a clip that a config can name.

    Attributes:
      make: `(plan, clip_norm, **options) -> BoundedTransformation`; no clip here reads the plan.
      words: how PRIVACY.md describes the clipped gradient; "" says that its norm is at most S.
      public_options: the options of `make`, which a release repeats. A config can have no others.
    """

    make: Callable[..., BoundedTransformation]
    words: str
    public_options: tuple[str, ...] = ()


CLIPS = {
    "l2": Clip(
        lambda plan, clip_norm: clip_by_l2_norm(clip_norm),
        "scaled down to an L2 norm of at most C",
    ),
    "normalize": Clip(
        lambda plan, clip_norm, gamma=0.01: normalize(clip_norm, gamma),
        "scaled, up or down, to an L2 norm of at most C",
        public_options=("gamma",),
    ),
    "per_layer": Clip(
        lambda plan, clip_norm: clip_per_layer(clip_norm),
        "scaled down layer by layer, all together to an L2 norm of at most C",
    ),
}


def _proved(update: Closure) -> BoundedTransformation:
    """A transform without state whose update is in `PROVED`: its docstring proves the bound.

    The bound is computed from the update's own numbers, so the two cannot disagree.
    """
    numbers = jax.tree.map(_unwritable, update.numbers)
    update = Closure(update.fn, update.structure, numbers)
    bound = Closure(PROVED[update.fn], update.structure, numbers)
    return BoundedTransformation._of(_no_state, update, _Promise(bound, is_proved=True))


def _unwritable(number: Any) -> Any:
    return number.item() if isinstance(number, np.ndarray | np.generic) else number


def _no_state(params: PyTree) -> optax.EmptyState:
    return optax.EmptyState()


def _is_clip_norm(value: Any) -> Any:
    return (value == 0) | (value >= SMALLEST_CLIP_NORM)


def _nan_if_out_of_range(value: Number) -> Number:
    """The bound itself, or NaN if it is out of range: a traced one that no check could see."""
    if scalars.is_known(value):
        return value if _is_clip_norm(value) else math.nan
    return jnp.where(_is_clip_norm(value), value, jnp.nan)


# Proved update function -> the function of its numbers that returns the bound.
PROVED: dict[Callable[..., Any], Callable[..., Number]] = {
    _clip_whole: _nan_if_out_of_range,
    _normalize: _bound_of_normalize,
    _clip_leaves: _bound_of_leaves,
}


def _checked(name: str, value: Any) -> Number:
    """Reads a bound; InputError if it is out of range."""
    bound = scalars.argument(name, value)
    if scalars.is_known(bound) and not _is_clip_norm(bound):
        raise InputError(f"{name} must be 0 or at least {SMALLEST_CLIP_NORM}, got {value}")
    return bound


def _clip(grads: Grads, norm: Array, bound: Number, keep: Array) -> Grads:
    """Scales `grads` with the given norm to norm at most `bound`; zeros where `keep` is False.

    A bound of 0 gives zeros, even if squares underflow and the computed norm is 0.
    """
    is_longer = norm > bound
    ratio = jnp.where(is_longer, bound, 1.0), jnp.where(is_longer, norm, 1.0)
    return _scale(grads, *ratio, keep & (bound > 0))


def _scale(
    grads: Grads, numerator: Number, denominator: Array, keep: Array, factor: Number = 1.0
) -> Grads:
    """Returns `factor · (numerator / denominator · grads)`, or zeros where `keep` is False.

    Never NaN from `0 · inf`. A scaled value is rounded towards zero where its dtype is narrow
    (bfloat16, float16), because rounding to nearest could lift the norm above the bound.
    """
    # The division comes last: XLA keeps a quotient, but repeats a `where` for every entry.
    scale = jnp.where(keep, numerator, 0.0) / jnp.where(keep, denominator, 1.0)

    def scale_leaf(x: Array) -> Array:
        scaled = factor * (scale * pytree.at_least_float32(x))
        is_narrow = jnp.finfo(x.dtype).bits < 32
        rounded = pytree.round_towards_zero(scaled, x.dtype) if is_narrow else scaled
        return jnp.where(scale > 0, rounded.astype(x.dtype), jnp.zeros_like(x))

    return jax.tree.map(scale_leaf, grads)
