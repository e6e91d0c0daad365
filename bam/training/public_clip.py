"""A clip norm from public data: a quantile of per-example gradient norms on another data set."""

import functools

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
from bam.training import loading, registry

with needs("train"):
    from ml_collections import ConfigDict, FrozenConfigDict

BATCH_SIZE = 128
LEARNING_RATE = 2e-3


def clip_norm(config: ConfigDict, shape: tuple[int, ...]) -> float:
    """C from the public data that a config's `public_clip` section names, for images of a shape.

    Raises InputError if that is the private data set, or as `clip_norm_from_public`.
    """
    public, private = config.public_clip, config.dataset
    if not public.dataset:
        raise InputError("public_clip.quantile is set: name the public data, public_clip.dataset")
    same_name = public.dataset == private.name
    if private.name == "folder" or ":" in private.name:  # one name, many data sets
        same_name &= (public.source, public.path) == (private.source, private.path)
    paths = [files.user_path(x.path).resolve() for x in (public, private) if x.path]
    same_path = len(paths) == 2 and paths[0] == paths[1]  # whichever way either is written
    if same_name or same_path:
        raise InputError(f"public_clip.dataset {public.dataset!r} is the private data set")
    section = {key: public[key] for key in ("source", "path", "num_classes")}
    section["name"] = public.dataset
    return _clip_norm(
        FrozenConfigDict(section),
        shape,
        FrozenConfigDict(config.model),
        public.quantile,
        public.num_steps,
    )


@functools.lru_cache  # experiments that differ by method or ε share it
def _clip_norm(
    section: FrozenConfigDict,
    shape: tuple[int, ...],
    model: FrozenConfigDict,
    quantile: float,
    num_steps: int,
) -> float:
    public = loading.make_dataset(section.as_configdict())
    return clip_norm_from_public(
        public, shape, model.as_configdict().to_dict(), quantile, num_steps
    )


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
        raise InputError(f"public_clip.quantile must be above 0 and at most 1, got {quantile}")
    if num_steps < 0:
        raise InputError(f"public_clip.num_steps must be at least 0, got {num_steps}")
    if public.train.images.shape[-1] != shape[-1]:
        raise InputError(
            f"public_clip.dataset {public.name} has {public.train.images.shape[-1]} channels, "
            f"the private images have {shape[-1]}"
        )
    module = registry.make_model(ConfigDict(model), public.num_classes)
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
