"""The private mean as an optax transform of per-example gradients that fit in memory."""

import dataclasses
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, PyTree, UInt32

from bam.core import forks, pytree, scalars
from bam.core.clipping import Transform, as_declared, sensitivity_of
from bam.core.noise import check_noise, check_rounding, fitting_size, init_noise, keyless
from bam.core.private_mean import NoisedMean, PrivatizeState, private_mean
from bam.core.program import as_partial, compile_once
from bam.core.pytree import Grads, Params
from bam.core.scalars import Number
from bam.core.seeds import check_key, digest, is_secret, remember
from bam.core.strategy import INDEPENDENT
from bam.core.strategy import check as check_strategy
from bam.core.tracing import check_keys, is_tracing
from bam.errors import InputError

NO_MULTI_STEPS = (
    "optax.MultiSteps cannot wrap a private gradient, because noise is added once for each batch: "
    "leave it out, and lower microbatch_size to save memory"
)

Shapes = tuple[jax.tree_util.PyTreeDef, list[tuple[int, ...]]]  # a tree's structure and shapes

# By the digest of the key's words: the claims of living transforms, and secret keys that any
# transform was given.
_claims: "weakref.WeakValueDictionary[bytes, Claim]" = weakref.WeakValueDictionary()
_given: dict[bytes, None] = {}


def privatize(
    clip: Transform,
    noise_multiplier: Number,
    expected_batch_size: Number,
    key: UInt32[Array, "8"],
    strategy: Sequence[float] = INDEPENDENT,
) -> optax.GradientTransformationExtraArgs:
    r"""Turns per-example gradients into a private mean: clip, sum, add noise, divide.

    $\hat g_{priv} = \big(\sum_i \bar g_i + N(0, \sigma^2 S^2 I)\big) / l$ (Algorithm 1 of
    arXiv 2308.12018). This is the textbook form, for batches of per-example gradients that fit in
    memory. In constant memory, use `clipped_sum` with `noise` and divide by l. Initialise the
    transform once per key, because a new state starts the noise over.

    The guarantee needs a batch that is drawn by Poisson sampling with probability l/N, and padded
    to a number of rows that does not depend on who was drawn. So `update` needs `mask`, True for
    real examples; masked rows count for nothing, whatever they hold. An empty batch is pure noise.

    The transform cannot see how gradients were computed. A row's gradient must depend only on the
    parameters, that row and its own randomness: no BatchNorm, no statistic of the batch. Its place
    must not depend on the other rows either, because a `vmap` may round a row differently at
    another place. `sampling.pad` draws places at random. If real rows are packed from first to last
    instead, a missing row moves all later ones by one.

    Args:
      clip: a bounded per-example transform, such as `clip_by_l2_norm(1.0)`.
      noise_multiplier: σ, noise standard deviation over sensitivity; 0 or at least 0.01.
      expected_batch_size: l, public; never the number of rows drawn.
      key: `[8]` words, used for nothing else. Use `bam.secret_key()` for a release, or
        `bam.seeded_key(seed)` to repeat a run; anyone who guesses the seed knows that key. If two
        transforms have one key, as in `optax.multi_transform`, each gradient reveals the other.
      strategy: the factors that correlate the noise over steps, see `bam.core.strategy`. With b
        factors, batches must not hold an example twice within b steps
        (`bam.privacy.mechanisms.banded`), and σ must come from that mechanism:
        `bam.epsilon(noise_multiplier=σ, …)` is too small for it.

    Returns:
      An optax transform. Its `update(grads, state, params, mask=mask)` takes a pytree of `[B, ...]`
      per-example gradients and `[B]` bools (or None if every row was drawn), and returns a tree of
      `[...]`, float32 or wider. Chain any optimizer after it.

    Raises:
      InputError: if `clip` is not bounded, a number is out of range, or the key is invalid or was
        given to a transform before; in `init`, if the transform was initialised for other shapes
        before; in `update`, without `mask`, or if `params` is given and a gradient has no leading
        example axis.
      TypeError: in `update`, if a gradient is not of real floating-point numbers.
      RuntimeError: in `init` under `jit` or `vmap`, unless the key is an argument, and in a fork.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from bam import clip_by_l2_norm, secret_key
      >>> tx = optax.chain(
      ...     privatize(clip_by_l2_norm(1.0), noise_multiplier=1.1, expected_batch_size=4,
      ...               key=secret_key()),
      ...     optax.nadam(1e-3))
      >>> params, mask = {"w": jnp.zeros(3)}, jnp.array([True, False, True, True])
      >>> updates, _ = tx.update({"w": jnp.ones((4, 3))}, tx.init(params), params, mask=mask)
      >>> updates["w"].shape
      (3,)
    """
    clip = as_declared(clip)
    noised_mean = NoisedMean(noise_multiplier, expected_batch_size, strategy)
    sensitivity, sigma = sensitivity_of(clip), noised_mean.noise_multiplier
    check_noise(sigma, sensitivity)
    check_strategy(noised_mean.strategy)
    claim = claim_key(key)
    key, process = key.copy() if isinstance(key, np.ndarray) else key, forks.this_process()

    def init(params: Params) -> PrivatizeState:
        if pytree.is_placeholder(params):
            return PrivatizeState(clip.init(params), keyless(noised_mean.strategy))
        forks.check_not_forked(process, "this private transform")
        if is_tracing() and not isinstance(key, jax.core.Tracer):
            raise RuntimeError(
                "init a private transform outside of jit and vmap: its key would be a constant of "
                "the program, and one for all that vmap maps over. For several trainings make a "
                "transform with a key of its own for each"
            )
        shapes = _shapes_of(params)
        if claim.shapes not in (None, shapes):
            raise InputError(
                "this transform was already initialised for other parameters and would add the "
                "same noise to these: make one transform for each, each with its own key"
            )
        noise = init_noise(key, clip, params, noised_mean.strategy)
        check_rounding(noise, sigma, noised_mean.strategy)
        claim.shapes = shapes
        return PrivatizeState(clip.init(params), noise)

    def update(
        grads: Grads,
        state: PrivatizeState,
        params: PyTree = None,
        *,
        mask: Bool[Array, " batch"] | str | None = "none given",
        **extra_args: object,
    ) -> tuple[Grads, PrivatizeState]:
        forks.check_not_forked(process, "this private transform")
        _check_per_example(grads, claim.shapes if params is None else _shapes_of(params))
        if isinstance(mask, str):
            raise InputError(
                "privatize needs update(…, mask=mask), with True for drawn rows and False for "
                "padding (mask=None: all rows were drawn)"
            )
        check_keys(state.noise.key, state.noise.step)
        # All rows at once, or fewer if 32 bits cannot hold the sum of their integers.
        size = max(1, len(jax.tree.leaves(grads)[0]))
        is_noised = not (scalars.is_known(sigma, sensitivity) and sigma * sensitivity == 0)
        if is_noised:
            size = fitting_size(size, sigma, sensitivity, size)
        mean = compile_once(
            private_mean,
            as_partial(_row),
            clip,
            noised_mean,
            microbatch_size=size,
            is_noised=is_noised,
        )
        private_grad, _, after = mean(params, grads, mask, state)
        return private_grad, after

    return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(eq=False)
class Claim:
    """The use of a key by a transform, for as long as one of the two lives.

    `shapes` are those of the parameters of the first `init`.
    """

    key: weakref.ref[Any]
    shapes: Shapes | None = None


def claim_key(key: UInt32[Array | np.ndarray, "8"]) -> Claim:
    """Claims a key for a transform.

    InputError for a key that another transform was given.

    An equal key of the same seed is only warned of, while the other transform lives, because it is
    right in two trainings that are compared, and wrong within one. A traced key cannot be checked.
    """
    check_key(key)
    claim = Claim(weakref.ref(key))
    if isinstance(key, jax.core.Tracer):
        return claim
    weakref.finalize(key, lambda claim: None, claim)  # the key holds its claim
    row = digest(key)
    other = _claims.get(row)
    if row in _given or (other and other.key() is key):
        raise InputError(
            "another transform was made with this key, and both would add the same noise: pass a "
            "new key, bam.secret_key()"
        )
    if other:
        warnings.warn(
            "another transform has an equal key (from the same seed?) and adds the same noise: "
            "within one training, give each its label, seeded_key(seed, label)",
            RuntimeWarning,
            stacklevel=3,
        )
    if is_secret(key):
        remember(_given, row, None)
    _claims[row] = claim
    return claim


def _row(params: Params, row: Grads) -> Grads:
    """Returns the gradient of an example that is its gradient."""
    return row


def _shapes_of(params: Params) -> Shapes:
    leaves, structure = jax.tree.flatten(params)
    return structure, [jnp.shape(x) for x in leaves]


def _check_per_example(grads: Grads, expected: Shapes | None = None) -> None:
    """Refuses ordinary gradients, whose first weight axis would pass for the examples' axis.

    `optax.MultiSteps` gives such gradients to what it wraps, while JAX traces.
    """
    leaves = jax.tree.leaves(grads)
    if not leaves:
        raise InputError("privatize needs per-example gradients, got a tree without an array")
    _, shapes = expected or (None, [])
    if not shapes:  # `init(None)` tells nothing of the parameters
        return
    if len(leaves) != len(shapes):
        raise InputError(
            f"privatize needs a gradient for each of {len(shapes)} parameters, got {len(leaves)}"
        )
    for grad, shape in zip(leaves, shapes, strict=True):
        if not jnp.ndim(grad) or jnp.shape(grad)[1:] != shape:
            is_accumulated = isinstance(grad, jax.core.Tracer) and grad.shape == shape
            raise InputError(
                f"privatize needs per-example gradients [B, ...], got {jnp.shape(grad)} for a "
                f"parameter of shape {shape}: use jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))"
                + (f". {NO_MULTI_STEPS}" if is_accumulated else "")
            )
