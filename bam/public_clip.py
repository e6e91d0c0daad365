"""A clip norm from public data: a quantile of per-example gradient norms on another data set."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from bam import models, tree
from bam.data import datasets
from bam.engine import per_example_sum
from bam.tree import Params

BATCH_SIZE = 128
LEARNING_RATE = 2e-3


def clip_norm_from_public(
    public: datasets.Dataset,
    shape: tuple[int, ...],
    model: dict,
    quantile: float,
    num_steps: int,
) -> float:
    """A quantile of the gradient norms of the same kind of model on public data.

    The model is trained from scratch, non-privately, for a while on the public images, which are
    resized to the private ones' shape; then the norm of every public example's gradient is taken.
    No private example is read, so the choice costs no privacy. Nothing of the model is kept.

    Args:
      public: a data set whose every example is public.
      shape: `(height, width, channels)` of the private images.
      model: `name`, `width` and options, as `models.create` takes them.
      quantile: in (0, 1]; 0.5 is the median.
      num_steps: NAdam steps of 128 examples before measuring, 0 for none.

    Returns:
      The clip norm C > 0. The same arguments give the same number on one machine.

    Raises:
      ValueError: for a quantile or number of steps out of range, other channels than the private
        images', or a quantile that is zero or not finite.
    """
    if not 0 < quantile <= 1:
        raise ValueError(f"public_clip.quantile must be above 0 and at most 1, got {quantile}")
    if num_steps < 0:
        raise ValueError(f"public_clip.num_steps must be at least 0, got {num_steps}")
    if public.train.images.shape[-1] != shape[-1]:
        raise ValueError(
            f"public_clip.dataset {public.name} has {public.train.images.shape[-1]} channels, "
            f"the private images have {shape[-1]}"
        )
    module = models.create(num_classes=public.num_classes, **model)
    init, _, loss = models.as_functions(module, shape)
    images = jax.image.resize(
        datasets.normalize(public, public.train.images),
        (len(public.train.labels), *shape),
        "bilinear",
    )
    examples = {"image": images[:, None], "label": jnp.asarray(public.train.labels)}
    optimizer = optax.nadam(LEARNING_RATE)

    @jax.jit
    def step(
        params: Params, opt_state: optax.OptState, examples: Any, rows: Array
    ) -> tuple[Params, optax.OptState]:
        batch = jax.tree.map(lambda x: x[rows], examples)
        gradient = jax.grad(lambda p: jnp.mean(jax.vmap(loss, (None, 0))(p, batch)))(params)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = init(jax.random.key(0))
    opt_state = optimizer.init(params)
    draw = np.random.default_rng(0)
    for _ in range(num_steps):
        rows = draw.integers(len(public.train.labels), size=BATCH_SIZE)
        params, opt_state = step(params, opt_state, examples, rows)

    def norm_of(params: Params, example: Any) -> tuple[tuple[()], Array]:
        return (), tree.l2_norm(jax.grad(loss)(params, example))

    _, norms = jax.jit(functools.partial(per_example_sum, norm_of))(params, examples)
    found = float(jnp.quantile(norms, quantile))
    if not 0 < found < float("inf"):
        raise ValueError(f"the {quantile:g} quantile of gradient norms on {public.name} is {found}")
    return found
