"""A clip norm from public data: a quantile of per-example gradient norms on another data set."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from bam import files, memory, models
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
REMEDY = "take a smaller model, as --config.model.width=8, or set --config.clip_norm by hand"


class PublicData(NamedTuple):
    """A public data set, as a config's `dataset` section names one."""

    name: str
    source: str = ""
    path: str = ""
    num_classes: int = 0


def origin(name: str, quantile: float, num_steps: int) -> str:
    """Returns the text for a config's `clip_norm_from`: how C was measured.

    Examples:
      >>> origin("digits", 0.5, 20)
      '0.5-quantile-on-digits-after-20-steps'
    """
    return f"{quantile:g}-quantile-on-{name}-after-{num_steps}-steps"


def clip_norm(
    config: ConfigDict, public: PublicData, quantile: float, num_steps: int, shape: tuple[int, ...]
) -> float:
    """Returns C for a config's model and images of a shape, from `clip_norm_from_public`.

    Raises InputError as `check` and `clip_norm_from_public`.
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
    """Checks the public data and the config's gradients.

    InputError if the data are the private ones, or the gradients are others.
    """
    private = config.dataset
    # C of the private data would be a release without noise.
    same_name = public.name == private.name
    if private.name == "folder" or ":" in private.name:  # names of many data sets
        same_name &= (public.source, public.path) == (private.source, private.path)
    # One folder has many spellings, such as relative ones and links.
    paths = [files.user_path(x.path).resolve() for x in (public, private) if x.path]
    same_path = len(paths) == 2 and paths[0] == paths[1]
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
            raise InputError(
                f"no clip norm from public data: {why}; set --config.clip_norm by hand"
            )


def clip_norm_from_public(
    public: datasets.Dataset,
    shape: tuple[int, ...],
    model: JsonObject,
    quantile: float,
    num_steps: int,
) -> float:
    """C > 0, a quantile of the gradient norms of a model of the same kind on public data.

    The model is trained from scratch, non-privately, with NAdam and batches of 128 examples. Then
    the norm of every public example's gradient is computed, and the model is dropped. No private
    example is read, so the choice costs no privacy. On one machine, the same arguments give the
    same number.

    Args:
      public: the public images and labels.
      shape: `(height, width, channels)` of the private images; the public ones are resized to it.
      model: the `model` section of a config.
      quantile: in (0, 1].
      num_steps: the number of training steps, at least 0.

    Raises:
      InputError: for an argument out of range, if the public images have other channels than the
        private ones; if the training does not fit the memory; or if the quantile of the norms is
        zero or not finite.
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

    def prepare(image: Array, label: Array) -> PyTree:
        """Returns an example from a stored image."""
        # Made when it is read, because float images take four times the memory of stored ones.
        image = jax.image.resize(datasets.normalize(public, image), shape, "bilinear")
        return {"image": image[None], "label": label}

    optimizer = optax.nadam(LEARNING_RATE)

    @jax.jit
    def step(
        params: Params, opt_state: optax.OptState, *rows: Array
    ) -> tuple[Params, optax.OptState]:
        batch = jax.vmap(prepare)(*rows)
        gradient = jax.grad(lambda p: jnp.mean(jax.vmap(loss, (None, 0))(p, batch)))(params)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    # Fixed seeds: nothing here is private, and C must be the same if it is measured again.
    params = init(jax.random.key(0))
    opt_state = optimizer.init(params)
    draw = np.random.default_rng(0)
    for number in range(num_steps):
        rows = draw.integers(len(labels), size=BATCH_SIZE)
        if number == 0:
            args = (params, opt_state, images[rows], labels[rows])
            memory.check(step, *args, what=f"a step of {BATCH_SIZE} images", remedy=REMEDY)
        params, opt_state = step(params, opt_state, images[rows], labels[rows])

    # The engine's sum computes the norms microbatch by microbatch; here it has nothing to add.
    def norm_of(params: Params, row: tuple[Array, Array]) -> tuple[tuple[()], Array]:
        return (), pytree.l2_norm(jax.grad(loss)(params, prepare(*row)))

    norms_of = jax.jit(functools.partial(per_example_sum, norm_of))
    memory.check(norms_of, params, (images, labels), what="measuring norms", remedy=REMEDY)
    _, norms = norms_of(params, (images, labels))
    norm = float(jnp.quantile(norms, quantile))
    if not 0 < norm < float("inf"):  # NaN, too
        raise InputError(f"the {quantile:g} quantile of gradient norms on {public.name} is {norm}")
    return norm
