r"""Bounding one example's gradient: optax transforms that promise a bound on their output.

The promise is `sensitivity`, S. Because of rounding, an output may be longer than S by the factor
`ROUNDING`, and the noise is scaled to that larger bound. For the clips above `chain` the bound is
proved. Let $u = 2^{-24}$. A computed norm is $n = \|g\| (1 + \eta)$ with
$|\eta| < 5 \cdot 10^{-6}$ (`pytree.l2_norm`), and each product, quotient or sum of two numbers is
off by a factor between $1 - u$ and $1 + u$ (a GPU's quotient by up to 4 u, which `ROUNDING`
covers). The engine writes the gradient to memory before its norm is taken, so the norm and the
scaling read the same numbers. For any other transform, also a `chain`, the engine measures the
integers that it adds, and drops an example that breaks the promise.

A clip is a frozen record. Its numbers are arguments of the compiled program (`bam.core.program`),
and `sensitivity` is computed from the numbers that `update` reads.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import (
    Any,
    ClassVar,
    NamedTuple,
    Protocol,
    TypeAlias,
    cast,
    get_args,
    runtime_checkable,
)

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from bam.core import program, pytree, scalars, slots
from bam.core.program import STATIC
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


@runtime_checkable
class Clip(Protocol):
    """An optax transform of *one example's* gradient that promises a bound on its output.

    A frozen dataclass of your own with these names is a clip. Its numbers are arguments of the
    program if it is registered by `jax.tree_util.register_dataclass`. It may also have `finish`:
    `(noised mean, state) -> (private gradient, state)`, called once per step. Only `finish` changes
    the state.
    """

    @property
    def init(self) -> Callable[..., PyTree]:
        """`params -> state`."""

    @property
    def update(self) -> Callable[..., tuple[PyTree, PyTree]]:
        """`(grads, state, params) -> (bounded grads, state)`.

        It may return further numbers beside the gradient: they are summed, noised and passed to
        `finish`. The state that it returns is ignored, because it has seen one example's gradient.
        """

    @property
    def sensitivity(self) -> Number:
        """S, the largest L2 norm that `update` can return for any input, NaN and infinity included.

        A sum over examples has this L2 sensitivity, for zero-out and for add/remove. It must be 0
        or at least 1e-12; `inf` means "not bounded".
        """


# What functions take; `as_declared` refuses a transform without a bound.
Transform: TypeAlias = Clip | optax.GradientTransformation


class _Pair:
    """A transform that optax can unpack as its pair of functions."""

    is_proved: ClassVar[bool] = False
    init: Callable[..., PyTree]
    update: Callable[..., tuple[PyTree, PyTree]]

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter((self.init, self.update))


class _Proved(_Pair):
    """A transform without state, whose bound is proved, so that the engine need not measure it."""

    is_proved: ClassVar[bool] = True
    finish: ClassVar[None] = None

    def init(self, params: PyTree) -> optax.EmptyState:
        return optax.EmptyState()


def clip_by_l2_norm(clip_norm: Number, slack: int = 0) -> "ClipByL2Norm | ClipByL2NormWithSlots":
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

    With `slack`, a number of slots from 2 to 256, the noised sum also tells how many gradients were
    clipped, and the norms of the others, at no cost in ε: see `bam.core.slots`. S stays C. 0 has no
    slots.

    A C that is negative, NaN, or positive but below 1e-12 (see `SMALLEST_CLIP_NORM`) is an
    InputError, as is another number of slots, or slots for C = inf.

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
    num_slots = slots.check(slack)
    return ClipByL2NormWithSlots(clip_norm, num_slots) if num_slots else ClipByL2Norm(clip_norm)


@program.record
class ClipByL2Norm(_Proved):
    """The transform of `clip_by_l2_norm`."""

    clip_norm: Number

    def __post_init__(self) -> None:
        """Reads C."""
        vars(self)["clip_norm"] = _read_bound("clip_norm", self.clip_norm)

    @property
    def sensitivity(self) -> Number:
        """C."""
        return _nan_unless(_is_bound(self.clip_norm), self.clip_norm)

    def update(self, grads: Grads, state: PyTree, params: PyTree = None) -> tuple[Grads, PyTree]:
        """Returns the clipped gradient, and the state."""
        norm = pytree.l2_norm(grads)
        return _clip(grads, norm, self.clip_norm, jnp.isfinite(norm)), state


@program.record
class ClipByL2NormWithSlots(_Pair):
    """The transform of `clip_by_l2_norm` with slots, whose noised means are its state.

    The bound is proved in `bam.core.slots`.
    """

    is_proved: ClassVar[bool] = True
    clip_norm: Number
    num_slots: int = dataclasses.field(metadata=STATIC)

    def __post_init__(self) -> None:
        """Reads C and the number of slots."""
        bound = _read_bound("clip_norm", self.clip_norm)
        if scalars.is_known(bound) and math.isinf(bound):
            raise InputError("slack needs a finite clip_norm, got inf: there is no room below it")
        vars(self).update(clip_norm=bound, num_slots=slots.check(self.num_slots))

    @property
    def sensitivity(self) -> Number:
        """C, of the gradient and its slots together."""
        return _nan_unless(_is_bound(self.clip_norm), self.clip_norm)

    def init(self, params: PyTree) -> slots.SlotState:
        """Returns the state before the first step."""
        return slots.first_state(self.num_slots)

    def update(
        self, grads: Grads, state: PyTree, params: PyTree = None
    ) -> tuple[slots.Slotted, PyTree]:
        """Returns the clipped gradient with its slots, and the state."""
        norm = pytree.l2_norm(grads)
        clipped = _clip(grads, norm, self.clip_norm, jnp.isfinite(norm))
        beside = slots.beside(norm, self.clip_norm, self.num_slots)
        return slots.Slotted(clipped, beside), state

    def finish(self, mean: slots.Slotted, state: slots.SlotState) -> tuple[Grads, slots.SlotState]:
        """Takes the slots out of the noised mean, so that the optimizer sees the gradient alone."""
        return mean.grads, slots.advance(state, mean.slots, self.clip_norm)


def normalize(clip_norm: Number, gamma: Number = 0.01) -> "Normalize":
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
    return Normalize(clip_norm, gamma)


@program.record
class Normalize(_Proved):
    """The transform of `normalize`."""

    clip_norm: Number
    gamma: Number

    def __post_init__(self) -> None:
        """Reads C and γ."""
        bound = _read_bound("clip_norm", self.clip_norm)
        floor = scalars.argument("gamma", self.gamma)
        if scalars.is_known(bound) and math.isinf(bound):
            raise InputError("clip_norm must be finite for normalize, got inf")
        if scalars.is_known(floor) and not _is_floor(floor):
            raise InputError(f"gamma must be finite and at least {SMALLEST_CLIP_NORM}, got {floor}")
        vars(self).update(clip_norm=bound, gamma=floor)

    @property
    def sensitivity(self) -> Number:
        """C, or NaN if C or γ turns out to be out of range."""
        in_range = _is_bound(self.clip_norm) & _is_floor(self.gamma)
        return _nan_unless(in_range, self.clip_norm)

    def update(self, grads: Grads, state: PyTree, params: PyTree = None) -> tuple[Grads, PyTree]:
        """Returns the scaled gradient, and the state."""
        norm = pytree.l2_norm(grads)
        # In two steps, because C / (n + γ) could overflow for a large C and a small norm.
        scaled = _scale(grads, 1.0, norm + self.gamma, jnp.isfinite(norm), self.clip_norm)
        return scaled, state


def clip_per_layer(clip_norm: PyTree) -> "ClipPerLayer":
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
    is_number = jax.tree_util.all_leaves([clip_norm])
    bounds, tree = jax.tree.flatten(clip_norm)
    return ClipPerLayer(tuple(bounds), None if is_number else tree)


@program.record
class ClipPerLayer(_Proved):
    """The transform of `clip_per_layer`: the C_k and their tree, or C alone and None."""

    bounds: tuple[Number, ...]
    tree: jax.tree_util.PyTreeDef | None = dataclasses.field(metadata=STATIC)

    def __post_init__(self) -> None:
        """Reads the bounds."""
        vars(self)["bounds"] = tuple(_read_bound("clip_norm", x) for x in self.bounds)

    @property
    def sensitivity(self) -> Number:
        """The L2 norm of the bounds."""
        if scalars.is_known(*self.bounds):
            return _nan_unless(all(map(_is_bound, self.bounds)), math.hypot(*self.bounds))
        in_range = jnp.all(jnp.stack([_is_bound(x) for x in self.bounds]))
        return _nan_unless(in_range, pytree.l2_norm([jnp.asarray(x) for x in self.bounds]))

    def update(self, grads: Grads, state: PyTree, params: PyTree = None) -> tuple[Grads, PyTree]:
        """Returns the gradient with clipped leaves, and the state.

        InputError for a gradient of another structure than the bounds.
        """
        leaves, tree = jax.tree.flatten(grads)
        bounds = [scalars.argument("clip_norm", x) for x in self.bounds]  # never narrow
        if self.tree is None:
            bounds = [bounds[0] * (1 / math.sqrt(max(1, len(leaves))))] * len(leaves)
        elif self.tree != tree:
            raise InputError(
                "clip_norm must be a number, or a tree of numbers with the structure of the "
                "gradient"
            )
        finite = jnp.isfinite(pytree.l2_norm(grads))
        clipped = [
            _clip(x, pytree.l2_norm(x), bound, finite)
            for x, bound in zip(leaves, bounds, strict=True)
        ]
        return jax.tree.unflatten(tree, clipped), state


def chain(*transforms: Transform) -> "Bounded":
    """Applies per-example transforms in order, of which the last must be bounded.

    InputError if it is not. This is `optax.chain` with a bound: the chain has the sensitivity of
    its last member. Anything may come before that member. Nothing may come after it, because even
    scaling by 2 would break the declared bound.

    Examples:
      >>> import optax
      >>> chain(optax.scale(10.0), clip_by_l2_norm(0.5)).sensitivity
      0.5
    """
    if not transforms:
        raise InputError("chain needs at least one transform, and the last must be bounded")
    if not hasattr(transforms[-1], "sensitivity"):
        raise InputError(
            "the output of this chain is not bounded: end it with a bounded transform, "
            "such as clip_by_l2_norm(C)"
        )
    *before, last = *map(program.as_transform, transforms[:-1]), as_declared(transforms[-1])
    return Chain((*before, last)) if before else last


@program.record
class Chain(_Pair):
    """The transform of `chain`.

    Its bound is not proved: XLA may compute the last transform's input twice, with other roundings
    for the norm than for the scaling.
    """

    transforms: tuple[Any, ...]

    @property
    def sensitivity(self) -> Number:
        """S of the last transform."""
        return self.transforms[-1].sensitivity

    def init(self, params: PyTree) -> PyTree:
        """Returns the states of all transforms."""
        return optax.chain(*self.transforms).init(params)

    def update(self, grads: Grads, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        """Returns what the last transform makes of the gradient, and the states."""
        return optax.chain(*self.transforms).update(grads, state, params)

    def finish(self, mean: PyTree, state: tuple[PyTree, ...]) -> tuple[Grads, PyTree]:
        """Applies the last transform's `finish`."""
        private_grad, last_state = finish(self.transforms[-1], mean, state[-1])
        return private_grad, (*state[:-1], last_state)


@program.record
class BoundedTransformation(_Pair):
    """A clip of your own from its functions, see `Clip`.

    A number of a `jax.tree_util.Partial` is an argument of the program; every other number that a
    function keeps is compiled. The engine measures what `update` returns. InputError for a
    sensitivity that is not 0 or at least 1e-12.
    """

    init: Callable[..., PyTree]
    update: Callable[..., tuple[PyTree, PyTree]]
    sensitivity: Number
    finish: Callable[[PyTree, PyTree], tuple[Grads, PyTree]] | None = None

    def __post_init__(self) -> None:
        """Reads the bound, once."""
        functions = {"init": self.init, "update": self.update, "finish": self.finish}
        vars(self).update({k: fn and program.as_partial(fn) for k, fn in functions.items()})
        bound = _read_bound("sensitivity", self.sensitivity)
        vars(self).update(sensitivity=_nan_unless(_is_bound(bound), bound))


Bounded: TypeAlias = (
    ClipByL2Norm | ClipByL2NormWithSlots | Normalize | ClipPerLayer | Chain | BoundedTransformation
)


def as_declared(clip: Transform) -> Bounded:
    """Returns a clip with the bound that it declares.

    InputError if it declares none.
    """
    if type(clip) in get_args(Bounded):
        return cast(Bounded, clip)
    if not (hasattr(clip, "init") and hasattr(clip, "update")):
        raise InputError(
            f"a clip is a transform, got {getattr(clip, '__name__', clip)}: write "
            "bam.clip_by_l2_norm(1.0), with your clip norm"
        )
    if getattr(clip, "sensitivity", None) is None:
        raise InputError(
            "this transform has no `sensitivity`, so its output is not bounded, as with "
            "optax.clip_by_global_norm(C): use bam.clip_by_l2_norm(C), normalize or "
            "clip_per_layer, or end a bam.chain (not optax.chain) with one of them"
        )
    clip = cast(Clip, clip)
    return BoundedTransformation(
        clip.init, clip.update, clip.sensitivity, getattr(clip, "finish", None)
    )


def sensitivity_of(clip: Transform) -> Number:
    """Returns a transform's declared L2 sensitivity, which is at least 0.

    InputError if it has none, or infinity. A traced sensitivity may turn out NaN or infinite: then
    the noised sum is NaN.
    """
    sensitivity = _sensitivity(as_declared(clip))
    if scalars.is_known(sensitivity) and not math.isfinite(sensitivity):
        raise InputError(
            f"this per-example transform is not bounded (sensitivity {sensitivity}): "
            "noise cannot hide it, so give a finite clip norm"
        )
    return sensitivity


def finish(clip: Transform, mean: PyTree, state: PyTree) -> tuple[Grads, PyTree]:
    """Returns the private gradient and the next state, by a transform's `finish`.

    `mean` is the noised sum divided by the expected batch size. Mean and state are both private, so
    this is post-processing. A transform without `finish` leaves both as they are.
    """
    own = getattr(clip, "finish", None)
    return (mean, state) if own is None else own(mean, state)


def _sensitivity(clip: Bounded) -> Number:
    """Returns S, or NaN if it is out of range, as that of a copy with another number may be."""
    while isinstance(clip, Chain):
        clip = clip.transforms[-1]
    if clip.is_proved:
        return clip.sensitivity
    return _nan_unless(_is_bound(clip.sensitivity), clip.sensitivity)


def num_slots_of(clip: Bounded) -> int:
    """Returns the number of slots beside the gradient, 0 for none."""
    while isinstance(clip, Chain):
        clip = clip.transforms[-1]
    return clip.num_slots if isinstance(clip, ClipByL2NormWithSlots) else 0


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


def bound_of(clip: Transform, clip_state: PyTree) -> Bound:
    """Returns the bound of a clip in this state.

    InputError if the clip declares no `sensitivity`.
    """
    clip = as_declared(clip)
    sensitivity, update = _sensitivity(clip), clip.update

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
    """Returns True only if a summand's L2 norm is at most `limit` · (1 + 1e-5).

    The summand is of floats or integers. The computed norm may be off by a relative 5e-6, and a
    traced `limit` by ten roundings, 1e-6 at most. So the computed norm must be at most
    `limit` · (1 + 4e-6).
    """
    length = pytree.l2_norm(jax.tree.map(lambda x: x.astype(jnp.float32), summand))
    return jnp.isfinite(length) & (length <= limit * (1 + 4e-6))


def _is_bound(value: Any) -> Any:
    return (value == 0) | (value >= SMALLEST_CLIP_NORM)


def _is_floor(gamma: Any) -> Any:
    return (gamma >= SMALLEST_CLIP_NORM) & (gamma < math.inf)


def _nan_unless(in_range: Any, value: Number) -> Number:
    """Returns the value, or NaN if a traced number turns out to be out of range."""
    if scalars.is_known(in_range, value):
        return value if in_range else math.nan
    return jnp.where(in_range, value, jnp.nan)


def _read_bound(name: str, value: Any) -> Number:
    """Reads a bound.

    InputError if it is out of range.
    """
    bound = scalars.argument(name, value)
    if scalars.is_known(bound) and not _is_bound(bound):
        raise InputError(f"{name} must be 0 or at least {SMALLEST_CLIP_NORM}, got {value}")
    return bound


def _clip(grads: Grads, norm: Array, bound: Number, keep: Array) -> Grads:
    """Scales `grads` with the given norm to norm at most `bound`.

    The result is zeros where `keep` is False. A bound of 0 gives zeros, even if squares underflow
    and the computed norm is 0.
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
