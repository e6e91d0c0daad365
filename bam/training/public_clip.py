"""A clip norm from public data: a quantile of per-example gradient norms on another data set."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from bam import files, models
from bam.core import pytree
from bam.core.engine import per_example_sum
from bam.core.pytree import Params
from bam.data import datasets
from bam.errors import InputError
from bam.extras import needs
from bam.files import JsonObject
from bam.training import loading, methods, parts

with needs("train"):
    from ml_collections import ConfigDict

BATCH_SIZE = 128
LEARNING_RATE = 2e-3


class PublicData(NamedTuple):
    """A public data set, as a config's `dataset` section names one."""

    name: str
    source: str = ""
    path: str = ""
    num_classes: int = 0


def origin(name: str, quantile: float, num_steps: int) -> str:
    """What a config's `clip_norm_from` says of a C that was measured so.

    Examples:
      >>> origin("digits", 0.5, 20)
      '0.5-quantile-on-digits-after-20-steps'
    """
    return f"{quantile:g}-quantile-on-{name}-after-{num_steps}-steps"


def clip_norm(
    config: ConfigDict, public: PublicData, quantile: float, num_steps: int, shape: tuple[int, ...]
) -> float:
    """C for a config's model and images of a shape, from public data: `clip_norm_from_public`.

    Raises InputError if those are the private data set, for a run whose gradients are not those
    that are measured, or as `clip_norm_from_public`.
    """
    check(config, public)
    return clip_norm_from_public(
        loading.make_dataset(ConfigDict(public._asdict())),
        shape,
        config.model.to_dict(),
        quantile,
        num_steps,
    )


def check(config: ConfigDict, public: PublicData) -> None:
    """InputError if public data are a config's private ones, or its gradients are of other kind."""
    private = config.dataset
    same_name = public.name == private.name
    if private.name == "folder" or ":" in private.name:  # one name, many data sets
        same_name &= (public.source, public.path) == (private.source, private.path)
    paths = [files.user_path(x.path).resolve() for x in (public, private) if x.path]
    same_path = len(paths) == 2 and paths[0] == paths[1]  # whichever way either is written
    if same_name or same_path:
        raise InputError(f"the public data set {public.name!r} is the private data set")
    refused = {
        "method non_private clips nothing": not methods.is_private(config.method.name),
        "it measures the cross-entropy, and no other loss": config.loss.name != "cross_entropy",
        "it reads images, not features": config.features.name,
        "it trains all of a model from scratch": config.init_from or config.trainable,
        "it measures gradients of examples, not of users": config.dataset.group_size,
    }
    for why, is_so in refused.items():
        if is_so:
            raise InputError(f"no clip norm from public data: {why}")


def clip_norm_from_public(
    public: datasets.Dataset,
    shape: tuple[int, ...],
    model: JsonObject,
    quantile: float,
    num_steps: int,
) -> float:
    """A quantile of the gradient norms of the same kind of model on public data: C > 0.

    The model (its section of a config) is trained from scratch, non-privately, for so many NAdam
    steps of 128 examples on the public images, resized to the private ones' `(height, width,
    channels)`; then the norm of every public example's gradient is taken. No private example is
    read, so the choice costs no privacy. Nothing of the model is kept. The same arguments give the
    same number on one machine.

    Raises:
      InputError: for a quantile outside (0, 1], a negative number of steps, other channels than the
        private images', or a quantile that is zero or not finite.
    """
    if not 0 < quantile <= 1:
        raise InputError(f"the quantile must be above 0 and at most 1, got {quantile}")
    if num_steps < 0:
        raise InputError(f"the number of steps must be at least 0, got {num_steps}")
    if public.train.images.shape[-1] != shape[-1]:
        raise InputError(
            f"the public data set {public.name} has {public.train.images.shape[-1]} channels, "
            f"the private images have {shape[-1]}"
        )
    module = parts.make_model(ConfigDict(model), public.num_classes)
    init, _, loss = models.as_functions(module, shape)
    images, labels = (jnp.asarray(x) for x in public.train[:2])

    def prepared(image: Array, label: Array) -> PyTree:
        """An example, made when it is read: as floats all images take four times the memory."""
        image = jax.image.resize(datasets.normalize(public, image), shape, "bilinear")
        return {"image": image[None], "label": label}

    optimizer = optax.nadam(LEARNING_RATE)

    @jax.jit
    def step(
        params: Params, opt_state: optax.OptState, *rows: Array
    ) -> tuple[Params, optax.OptState]:
        batch = jax.vmap(prepared)(*rows)
        gradient = jax.grad(lambda p: jnp.mean(jax.vmap(loss, (None, 0))(p, batch)))(params)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = init(jax.random.key(0))
    opt_state = optimizer.init(params)
    draw = np.random.default_rng(0)
    for _ in range(num_steps):
        rows = draw.integers(len(labels), size=BATCH_SIZE)
        params, opt_state = step(params, opt_state, images[rows], labels[rows])

    def norm_of(params: Params, row: tuple[Array, Array]) -> tuple[tuple[()], Array]:
        return (), pytree.l2_norm(jax.grad(loss)(params, prepared(*row)))

    _, norms = jax.jit(functools.partial(per_example_sum, norm_of))(params, (images, labels))
    norm = float(jnp.quantile(norms, quantile))
    if not 0 < norm < float("inf"):
        raise InputError(f"the {quantile:g} quantile of gradient norms on {public.name} is {norm}")
    return norm
