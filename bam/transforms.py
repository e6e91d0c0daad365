"""Bounding, summing and noising gradients, as optax transforms.

This file, `engine.py` and `grid.py` hold every line that privatises a gradient:

1. each example's gradient passes a transform that declares a bound on its output, `sensitivity`
   (`clip_by_l2_norm`, `normalize`, `clip_per_layer`); the engine drops an example that breaks it;
2. the bounded gradients are *summed*, so one example changes the sum by at most `sensitivity`;
3. Gaussian noise of standard deviation `noise_multiplier · sensitivity` is added to the sum, once;
4. the result is divided by the *expected* batch size, a public number.

That ε is what it says rests further on `sampling.py` and `privacy/accounting.py`.
"""

import math
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Int, PyTree

from bam import grid, tree
from bam.engine import ROUNDING, clipped_sum
from bam.grid import GaussianNoise
from bam.tree import Grads, Params

# Below this, float32 squares underflow and a norm can no longer be compared with the bound.
SMALLEST_CLIP_NORM = 1e-12
# With less, ε is in the thousands after a single step, and whole numbers overflow.
LEAST_NOISE_MULTIPLIER = 0.01


class BoundedTransformation(optax.GradientTransformation):
    """An optax transform of *one example's* gradient that promises a bound on its output.

    It is an ordinary `optax.GradientTransformation` (it unpacks to `init, update`) with one more
    attribute. Build one to add your own: `BoundedTransformation(init, update, sensitivity)`.

    Attributes:
      sensitivity: the largest L2 norm `update` can return, for any input at all, NaN and infinity
        included. Under add/remove adjacency it is the L2 sensitivity of a sum over examples.
      finish: what becomes of the noised mean, see `finish`; None leaves it as it is.
    """

    sensitivity: float
    finish: Callable[[Any, Any], tuple[Grads, Any]] | None

    def __new__(
        cls, init: Any, update: Any, sensitivity: float, finish: Any = None
    ) -> "BoundedTransformation":
        """Makes the pair `(init, update)` and attaches the bound.

        Args:
          init: `params -> state`.
          update: `(grads, state, params) -> (bounded grads, state)`, for one example.
          sensitivity: the bound, a number of at least 0; `inf` says "not bounded".
          finish: `(noised mean, state) -> (private gradient, state)`, once per step. Only here does
            the state change: what `update` returns of it is not used, because it has seen one
            example's gradient. `update` may return more than a gradient, for `finish` to read.

        Raises:
          ValueError: if `sensitivity` is negative, NaN, or positive and below 1e-12.
        """
        if not (sensitivity == 0 or sensitivity >= SMALLEST_CLIP_NORM):
            raise ValueError(
                f"sensitivity must be 0 or at least {SMALLEST_CLIP_NORM}, got {sensitivity}"
            )
        self = super().__new__(cls, init, update)
        self.sensitivity = float(sensitivity)
        self.finish = finish
        return self


def finish(clip: optax.GradientTransformation, mean: Any, state: Any) -> tuple[Grads, Any]:
    """What a per-example transform makes of the noised mean, and its state for the next step.

    Post-processing: `mean` and `state` are private already.

    Args:
      clip: the transform that bounded the examples.
      mean: the noised sum over the expected batch size.
      state: the transform's state in this step.

    Returns:
      `(private gradient, state)`; both as they were for a transform without a `finish`.
    """
    own = getattr(clip, "finish", None)
    return (mean, state) if own is None else own(mean, state)


def clip_by_l2_norm(clip_norm: float) -> BoundedTransformation:
    r"""Clips a gradient to norm at most C: $\bar g = g / \max(1, \|g\|_2 / C)$.

    The norm is taken over all leaves together, in float32 or wider. Edge cases:

    =================== =======================================================
    case                output
    =================== =======================================================
    ‖g‖ ≤ C             g, unchanged to the bit
    g = 0               0
    g has NaN or inf    0 (also if ‖g‖ overflows float32, above about 1.8e19)
    C = 0               0
    C = inf             g (0 if non-finite); sensitivity inf, so `privatize` refuses it
    =================== =======================================================

    Args:
      clip_norm: C, 0 or at least 1e-12 (smaller bounds are beyond float32's squares).

    Returns:
      A `BoundedTransformation` with sensitivity C. Structure, shapes and dtypes are kept.

    Raises:
      ValueError: if `clip_norm` is negative, NaN, or positive but below 1e-12.

    Source: Abadi et al. 2016; Algorithm 1 of arXiv 2308.12018.

    Examples:
      >>> import jax.numpy as jnp
      >>> clip = clip_by_l2_norm(1.0)
      >>> clipped, _ = clip.update({"w": jnp.array([3.0, 4.0])}, clip.init(None))
      >>> print(clipped["w"], clip.sensitivity)
      [0.6 0.8] 1.0
    """
    _check_clip_norm(clip_norm)

    def update(grads: Grads, state: Any, params: Any = None) -> tuple[Grads, Any]:
        norm = tree.l2_norm(grads)
        return _clip(grads, norm, clip_norm, jnp.isfinite(norm)), state

    return BoundedTransformation(_stateless, update, clip_norm)


def normalize(clip_norm: float, gamma: float = 0.01) -> BoundedTransformation:
    r"""Automatic clipping: every gradient is scaled to norm just below C.

    $\bar g = C\, g / (\|g\|_2 + \gamma)$. Non-finite gradients become zero.

    Args:
      clip_norm: C, finite, 0 or at least 1e-12.
      gamma: γ ≥ 1e-12 keeps small gradients small; a stability constant of the source.

    Returns:
      A `BoundedTransformation` with sensitivity C. Structure, shapes and dtypes are kept.

    Raises:
      ValueError: if `clip_norm` is infinite, negative, NaN or positive but below 1e-12, or
        `gamma` is not finite and at least 1e-12 (below that a norm may underflow unnoticed).

    Source: Bu et al. 2023, "Automatic Clipping".
    """
    _check_clip_norm(clip_norm)
    if math.isinf(clip_norm):
        raise ValueError("clip_norm must be finite for normalize, got inf")
    if not SMALLEST_CLIP_NORM <= gamma < math.inf:
        raise ValueError(f"gamma must be finite and at least {SMALLEST_CLIP_NORM}, got {gamma}")

    def update(grads: Grads, state: Any, params: Any = None) -> tuple[Grads, Any]:
        norm = tree.l2_norm(grads)
        # In two steps: for a large C and a small norm their quotient could overflow.
        return _scale(grads, 1 / (norm + gamma), jnp.isfinite(norm), clip_norm), state

    return BoundedTransformation(_stateless, update, clip_norm)


def clip_per_layer(clip_norm: float | PyTree[float]) -> BoundedTransformation:
    r"""Clips each leaf of the gradient (each parameter array) to a bound of its own.

    $\bar g_k = g_k / \max(1, \|g_k\|_2 / C_k)$; the whole gradient then has norm at most
    $(\sum_k C_k^2)^{1/2}$. A leaf with a NaN or infinity makes the example's whole output zero.

    Args:
      clip_norm: one number C, shared out as $C_k = C/\sqrt{K}$ over the K leaves; or a pytree of
        numbers like the parameters, the $C_k$.

    Returns:
      A `BoundedTransformation` with sensitivity C, or $(\sum_k C_k^2)^{1/2}$.

    Raises:
      ValueError: if a bound is negative, NaN, or positive but below 1e-12.

    Source: McMahan et al. 2018, "per-layer clipping".
    """
    bounds = jax.tree.leaves(clip_norm)
    for bound in bounds:
        _check_clip_norm(bound)
    shared = jax.tree_util.all_leaves([clip_norm])

    def update(grads: Grads, state: Any, params: Any = None) -> tuple[Grads, Any]:
        num_leaves = max(1, len(jax.tree.leaves(grads)))
        share = bounds[0] / math.sqrt(num_leaves) if shared else None
        leaf_bounds = jax.tree.map(lambda _: share, grads) if shared else clip_norm
        finite = jnp.isfinite(tree.l2_norm(grads))

        def clip_leaf(g: Array, bound: float) -> Array:
            return _clip(g, tree.l2_norm(g), bound, finite)

        return jax.tree.map(clip_leaf, grads, leaf_bounds), state

    return BoundedTransformation(_stateless, update, math.hypot(*bounds))


def chain(*transforms: optax.GradientTransformation) -> BoundedTransformation:
    """Applies per-example transforms in order; the last must be bounded.

    Like `optax.chain`, but keeps the promise: the sensitivity of the chain is that of its last
    member. Anything may come before it; nothing may come after it, because even scaling by 2 would
    break the declared bound.

    Args:
      *transforms: optax transforms of one example's gradient, the last with a `sensitivity`.

    Returns:
      A `BoundedTransformation`.

    Raises:
      ValueError: if there is no transform or the last is not bounded.

    Examples:
      >>> import optax
      >>> chain(optax.scale(10.0), clip_by_l2_norm(0.5)).sensitivity
      0.5
    """
    if not transforms:
        raise ValueError("chain needs at least one transform, and the last must be bounded")
    if not isinstance(transforms[-1], BoundedTransformation):
        raise ValueError(
            "the output of this chain is not bounded: end it with a bounded transform, "
            "such as clip_by_l2_norm(C)"
        )
    chained = optax.chain(*transforms)
    last = transforms[-1]

    def finish_last(mean: Any, state: Any) -> tuple[Grads, Any]:
        private_grad, last_state = finish(last, mean, state[-1])
        return private_grad, (*state[:-1], last_state)

    return BoundedTransformation(chained.init, chained.update, last.sensitivity, finish_last)


def sensitivity_of(clip: optax.GradientTransformation) -> float:
    """Declared L2 sensitivity of a per-example transform; refuses one without a finite bound.

    Args:
      clip: a transform of one example's gradient.

    Returns:
      The sensitivity, a finite number of at least 0.

    Raises:
      ValueError: if `clip` declares no bound, or an infinite one.
    """
    sensitivity = getattr(clip, "sensitivity", None)
    if sensitivity is None:
        raise ValueError(
            "this per-example transform declares no bound: use clip_by_l2_norm, normalize or "
            "clip_per_layer, or end a bam.chain (not optax.chain) with one of them"
        )
    if not math.isfinite(sensitivity):
        raise ValueError(
            f"this per-example transform is not bounded (sensitivity {sensitivity}): "
            "noise cannot hide it, so give a finite clip norm"
        )
    return sensitivity


class GaussianNoiseState(NamedTuple):
    """State of `add_gaussian_noise`: the key that nothing else uses, and how often it was used."""

    key: Array
    step: Int[Array, ""]


def next_noise(
    state: GaussianNoiseState, noise_multiplier: float, sensitivity: float
) -> tuple[GaussianNoise, GaussianNoiseState]:
    r"""The noise of one step, of standard deviation σ·S, and the state for the next step.

    Step t uses `fold_in(key, t)`, so the noise is independent across steps; within one it is
    across entries. S is widened by 1e-5, which is what the engine's own norms may be off by.

    Args:
      state: the key, and how often it was used.
      noise_multiplier: σ.
      sensitivity: S, the L2 sensitivity of the sum.

    Returns:
      `(noise, state)`: give the noise to `clipped_sum`.
    """
    std = noise_multiplier * sensitivity * ROUNDING
    noise = GaussianNoise(jax.random.fold_in(state.key, state.step), std)
    return noise, state._replace(step=state.step + 1)


def add_gaussian_noise(
    noise_multiplier: float, sensitivity: float, key: Array
) -> optax.GradientTransformation:
    r"""Adds $N(0, \sigma^2 S^2)$ to every entry of a *sum* of bounded gradients.

    For sums from elsewhere: `clipped_sum(…, noise=…)` and `privatize` add the same noise to sums
    that are exact. Here the sum is rounded to the noise's grid, of spacing σ·S / 2^20, first. Its
    own rounding, and this one, are not covered by S.

    One draw per call: call t uses `fold_in(key, t)`, and every entry has a draw of its own. The key
    lives in the state, not in the compiled program.

    Args:
      noise_multiplier: σ, 0 or at least 0.01. Zero adds nothing and gives no privacy.
      sensitivity: S, the L2 sensitivity of the sum, finite.
      key: a JAX PRNG key that is used for nothing else. `jax.random.key(i)` can be guessed by
        trying all i: for a sum to release, use `bam.secret_key()`.

    Returns:
      An optax transform of the sum. Each leaf keeps its dtype.

    Raises:
      ValueError: if σ or S is negative or not finite, or σ positive and below 0.01.
    """
    _check_noise(noise_multiplier, sensitivity)

    def init(params: Params) -> GaussianNoiseState:
        return GaussianNoiseState(key=key, step=jnp.zeros((), jnp.int32))

    def update(
        total: Grads, state: GaussianNoiseState, params: Any = None
    ) -> tuple[Grads, GaussianNoiseState]:
        noise, next_state = next_noise(state, noise_multiplier, sensitivity)
        if noise.std == 0:  # nothing to draw, which ordinary training should not pay for
            return total, next_state
        return grid.add_to_floats(noise, total), next_state

    return optax.GradientTransformation(init, update)


def secret_key() -> Array:
    """A PRNG key that nobody can know: 64 bits from the operating system.

    Returns:
      A typed threefry key, another one at every call.
    """
    words = np.frombuffer(secrets.token_bytes(8), np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


def _check_noise(noise_multiplier: float, sensitivity: float) -> None:
    if not (math.isfinite(noise_multiplier) and noise_multiplier >= 0):
        raise ValueError(f"noise_multiplier must be finite and at least 0, got {noise_multiplier}")
    if 0 < noise_multiplier < LEAST_NOISE_MULTIPLIER:
        raise ValueError(
            f"noise_multiplier {noise_multiplier} hides nothing: use 0 for none, or at least "
            f"{LEAST_NOISE_MULTIPLIER}"
        )
    if not (math.isfinite(sensitivity) and sensitivity >= 0):
        raise ValueError(f"sensitivity must be finite and at least 0, got {sensitivity}")


class PrivatizeState(NamedTuple):
    """State of `privatize`: that of its clip and that of its noise."""

    clip: Any
    noise: GaussianNoiseState


def privatize(
    clip: optax.GradientTransformation,
    noise_multiplier: float,
    expected_batch_size: float,
    key: Array,
) -> optax.GradientTransformationExtraArgs:
    r"""Turns per-example gradients into a private mean: clip, sum, add noise, divide.

    $\hat g_{priv} = \big(\sum_i \bar g_i + N(0, \sigma^2 C^2 I)\big) / l$ (Algorithm 1 of
    arXiv 2308.12018). This is the textbook form, for batches of per-example gradients that fit in
    memory; `clipped_sum` with `noise`, then division by l, is the same to the bit in constant
    memory. Initialise it once per key: a new state starts the noise over.

    The guarantee needs the batch to be drawn by Poisson sampling with probability l/N. Rows may be
    added to pad it: pass `mask` (True for real examples) to `update` and padded rows count for
    nothing, whatever they hold. An empty batch gives pure noise.

    Args:
      clip: a bounded per-example transform, such as `clip_by_l2_norm(1.0)`.
      noise_multiplier: σ, noise standard deviation over sensitivity; 0 or at least 0.01.
      expected_batch_size: l, public; never the number of rows drawn.
      key: a JAX PRNG key used for nothing else: `bam.secret_key()` for what is released, since
        `jax.random.key(i)` can be guessed by trying all i.

    Returns:
      An optax transform whose `update(grads, state, params, mask=None)` takes a pytree of
      `[B, ...]` per-example gradients and returns one of `[...]`, float32 or wider. Chain any
      optimizer after it.

    Raises:
      ValueError: if `clip` is not bounded, or a number is out of range; in `update`, if `params` is
        given and a gradient has no leading example axis.
      TypeError: in `update`, if a gradient is not of real floating-point numbers.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> tx = optax.chain(
      ...     privatize(clip_by_l2_norm(1.0), noise_multiplier=1.1, expected_batch_size=4,
      ...               key=jax.random.key(0)),
      ...     optax.nadam(1e-3))
      >>> params = {"w": jnp.zeros(3)}
      >>> updates, _ = tx.update({"w": jnp.ones((4, 3))}, tx.init(params), params)
      >>> updates["w"].shape
      (3,)
    """
    sensitivity = sensitivity_of(clip)
    _check_noise(noise_multiplier, sensitivity)
    if not (math.isfinite(expected_batch_size) and expected_batch_size > 0):
        raise ValueError(f"expected_batch_size must be positive, got {expected_batch_size}")

    def init(params: Params) -> PrivatizeState:
        noise = GaussianNoiseState(key=key, step=jnp.zeros((), jnp.int32))
        return PrivatizeState(clip.init(params), noise)

    def update(
        grads: Grads,
        state: PrivatizeState,
        params: Any = None,
        *,
        mask: Bool[Array, " batch"] | None = None,
        **extra_args: Any,
    ) -> tuple[Grads, PrivatizeState]:
        _check_per_example(grads, params)

        noise, noise_state = next_noise(state.noise, noise_multiplier, sensitivity)
        noised, _ = clipped_sum(
            lambda params, row: row,
            clip,
            params,
            grads,
            mask=mask,
            microbatch_size=max(1, jax.tree.leaves(grads)[0].shape[0]),
            noise=noise,
            clip_state=state.clip,
        )
        mean = jax.tree.map(lambda x: x / expected_batch_size, noised)
        private_grad, clip_state = finish(clip, mean, state.clip)
        return private_grad, PrivatizeState(clip_state, noise_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _stateless(params: Any) -> optax.EmptyState:
    return optax.EmptyState()


def _check_per_example(grads: Grads, params: Any) -> None:
    """Refuses ordinary gradients: their first weight axis would pass for examples."""
    if params is None:
        return
    for grad, param in zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True):
        if grad.shape[1:] != param.shape:
            raise ValueError(
                f"privatize needs per-example gradients [B, ...], got {grad.shape} for a parameter "
                f"of shape {param.shape}: use jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))"
            )


def _check_clip_norm(clip_norm: float) -> None:
    if not (clip_norm == 0 or clip_norm >= SMALLEST_CLIP_NORM):
        raise ValueError(f"clip_norm must be 0 or at least {SMALLEST_CLIP_NORM}, got {clip_norm}")


def _clip(grads: Grads, norm: Array, bound: float, keep: Array) -> Grads:
    """Scales `grads` of the given norm to norm at most `bound`; zeros where `keep` is False.

    A bound of 0 gives zeros even where squares underflow and the norm reads 0.
    """
    return _scale(grads, jnp.where(norm > bound, bound / norm, 1.0), keep & (bound > 0))


def _scale(grads: Grads, scale: Array, keep: Array, then: float = 1.0) -> Grads:
    """Returns `then · (scale · grads)`, or zeros where `keep` is False; never NaN from `0 · inf`.

    A scaled value is rounded towards zero where its dtype is narrow (bfloat16, float16), because
    rounding to nearest could lift the norm above the bound.
    """

    def one(x: Array) -> Array:
        scaled = then * (scale * tree.at_least_float32(x))
        rounded = scaled.astype(x.dtype)
        if jnp.finfo(x.dtype).bits < 32:
            grew = jnp.abs(tree.at_least_float32(rounded)) > jnp.abs(scaled)
            rounded = jnp.where(grew, jnp.nextafter(rounded, jnp.zeros_like(rounded)), rounded)
        return jnp.where(keep, rounded, jnp.zeros_like(x))

    return jax.tree.map(one, grads)
