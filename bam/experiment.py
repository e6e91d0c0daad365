"""An experiment: everything a config says, checked, planned and turned into functions.

`build` checks the config and plans the privacy before anything is compiled or written. What the
functions do in one step of training is `step`, inside `build`.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from bam import devices, diagnostics, models, oracles, parts, public_clip, sampling, tree, tuning
from bam.data import augment, datasets
from bam.engine import clipped_sum, plain_sum
from bam.privacy.accounting import PrivacyPlan, make_plan
from bam.transforms import (
    BoundedTransformation,
    GaussianNoiseState,
    clip_by_l2_norm,
    finish,
    next_noise,
)
from bam.tree import Grads, Params

# Separate random streams of one seed. Sampling has its own, on the host (bam.sampling).
INIT_STREAM, NOISE_STREAM, AUGMENT_STREAM = 0, 1, 2


class TrainState(NamedTuple):
    """Everything a run carries from step to step.

    Attributes:
      step: steps taken.
      params: the weights θ.
      averaged: exponential moving average of the weights (the weights themselves without EMA).
      opt_state: the optimizer's state.
      noise: the noise key and how often it was used.
      clip: state of the per-example transform, made from private values alone.
      private_grad: the last privatised gradient; zeros before the first step.
      augment_key: the key of all random views; (step, example) are folded into it.
      num_nonfinite: per-example gradients dropped so far for NaN or infinity. NOT PRIVATE.
    """

    step: Int[Array, ""]
    params: Params
    averaged: Params
    opt_state: Any
    noise: GaussianNoiseState
    clip: Any
    private_grad: Grads
    augment_key: Array
    num_nonfinite: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A checked, planned, ready-to-run experiment; it serves any number of seeds.

    Attributes:
      config: the configuration it was built from, with what was found for its "auto" keys.
      dataset: the data, on the host.
      plan: the privacy plan of one run.
      sensitivity: S of the per-example transform: the noise on the sum has deviation σ·S.
      num_params: number of trainable numbers.
      capacity: rows of a padded Poisson batch.
      init: `seed -> TrainState`.
      step: `(state, train split on device, padded batch) -> state`, compiled. It takes over its
        state's memory, and does not check the plan: `train` does.
      evaluate: `(params, images, labels) -> (number correct, sum of losses)`, compiled.
      means: `(state, train split on device, rows) -> (own, plain)`, compiled: the means of the
        method's gradients over those training examples, and of the plain ones. NOT PRIVATE.
      diagnose: `(state, train split on device, rows) -> {name: number}`, compiled: what
        `diagnostics.describe` says of these means, and `plain/loss`, the mean loss. NOT PRIVATE.
      mesh: the devices that share the work, see `bam.devices`; None for one.
    """

    config: ConfigDict
    dataset: datasets.Dataset
    plan: PrivacyPlan
    sensitivity: float
    num_params: int
    capacity: int
    init: Callable[[int], TrainState]
    step: Callable[..., TrainState]
    evaluate: Callable[..., tuple[Array, Array]]
    means: Callable[..., tuple[diagnostics.Means, diagnostics.Means]]
    diagnose: Callable[..., dict[str, Array]]
    mesh: jax.sharding.Mesh | None


def build(config: ConfigDict, dataset: datasets.Dataset | None = None) -> Experiment:
    """Checks a config, loads its data, plans its privacy and prepares its functions.

    Nothing is written, and nothing is compiled until the functions are first called.

    Args:
      config: as `configs/base.py` makes it.
      dataset: data in memory, instead of what the config's `dataset` section names.

    Returns:
      An `Experiment`.

    Raises:
      ValueError: for any value that cannot be; the message names the fix.
    """
    _check(config)
    if dataset is None:
        dataset = load_dataset(**config.dataset)
    datasets.check(dataset)
    mesh = devices.mesh()
    config = _tuned(config, dataset, mesh)
    num_examples = len(dataset.train.labels)
    private = config.method.name != "non_private"
    training_steps = config.num_steps or config.num_epochs * (
        num_examples // config.expected_batch_size
    )
    plan = make_plan(
        num_examples=num_examples,
        expected_batch_size=config.expected_batch_size,
        num_steps=training_steps + config.spare_steps,
        spare_steps=config.spare_steps,
        target_epsilon=config.epsilon if private else math.inf,
        delta=config.delta,
        clip_norm=_clip_norm(config, dataset.train.images.shape[1:]) if private else math.inf,
        accountant=config.accountant,
    )
    module = models.create(num_classes=dataset.num_classes, **config.model)
    arithmetic = {"precision": config.precision, "convolution": config.convolution}
    model = models.as_functions(module, dataset.train.images.shape[1:], **arithmetic)
    # Outside of loops and per-example gradients XLA's own convolution is the fastest everywhere.
    dense_model = models.as_functions(
        module, dataset.train.images.shape[1:], **(arithmetic | {"convolution": "xla"})
    )
    oracle = parts.make_oracle(config.method, model.loss)
    clip = parts.make_clip(config.clip, plan) if private else clip_by_l2_norm(math.inf)
    sensitivity = clip.sensitivity if private else 0.0
    _check_parts(oracle, clip, model, dataset, config)
    augmentation = {
        "num_views": config.augment.views,
        "shift": config.augment.shift,
        "flip": config.augment.flip,
        "padding": config.augment.padding,
    }
    optimizer = parts.make_optimizer(config.after_noise, config.optimizer, plan)
    expected_batch_size = plan.expected_batch_size
    sharing = {"microbatch_size": config.microbatch_size, "mesh": mesh}

    def prepare(images: Any) -> Float[Array, "... c"]:
        return clip_inputs(jnp.asarray(datasets.normalize(dataset, images)), config.input_clip_norm)

    def with_views(split: datasets.Split, step_key: Array, index: Array) -> Any:
        """One example of a split, its image replaced by this step's views of it."""
        # The second key is for oracles with random numbers of their own; no loss reads it.
        views_key, own_key = jax.random.split(jax.random.fold_in(step_key, index))
        views = prepare(augment.views(views_key, split.images[index], **augmentation))
        return {"image": views, "label": split.labels[index], "key": own_key}

    def gradient_at(split: datasets.Split, step_key: Array) -> Callable[[Params, Array], Grads]:
        return lambda params, index: oracle.grad(params, with_views(split, step_key, index))

    def init(seed: int) -> TrainState:
        params = model.init(stream_key(seed, INIT_STREAM))
        state = TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            averaged=jax.tree.map(jnp.copy, params),
            opt_state=jax.tree.map(jnp.copy, optimizer.init(params)),  # no two share memory
            noise=GaussianNoiseState(stream_key(seed, NOISE_STREAM), jnp.zeros((), jnp.int32)),
            clip=jax.tree.map(jnp.copy, clip.init(params)),
            private_grad=optax.tree.zeros_like(params),
            augment_key=stream_key(seed, AUGMENT_STREAM),
            num_nonfinite=jnp.zeros((), jnp.int32),
        )
        return devices.replicate(state, mesh)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, train: datasets.Split, batch: sampling.PaddedBatch) -> TrainState:
        # A batch is its indices: images are fetched a microbatch at a time, so memory is flat.
        indices, mask = jnp.asarray(batch.indices), jnp.asarray(batch.mask)
        step_key = jax.random.fold_in(state.augment_key, state.step)
        noise, noise_state = next_noise(state.noise, plan.noise_multiplier, sensitivity)
        if private:
            total, norms = clipped_sum(
                gradient_at(train, step_key),
                clip,
                oracle.ascend(state.params, state.private_grad),
                indices,
                mask=mask,
                noise=noise,
                clip_state=state.clip,
                **sharing,
            )
        else:  # ordinary training: no per-example gradient exists
            norms = jnp.zeros(mask.shape)
            total = plain_sum(
                lambda params, index: model.loss(params, with_views(train, step_key, index)),
                state.params,
                indices,
                mask=mask,
                **sharing,
            )
        mean = jax.tree.map(lambda x: x / expected_batch_size, total)
        private_grad, clip_state = finish(clip, mean, state.clip) if private else (mean, state.clip)
        # From here on everything is post-processing of private_grad.
        updates, opt_state = optimizer.update(private_grad, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(
            step=state.step + 1,
            params=params,
            averaged=_average(state.averaged, params, state.step, config.ema_decay),
            opt_state=opt_state,
            noise=noise_state,
            clip=clip_state,
            private_grad=private_grad,
            augment_key=state.augment_key,
            num_nonfinite=state.num_nonfinite + jnp.sum(~jnp.isfinite(norms)),
        )

    @jax.jit
    def evaluate(params: Params, images: Any, labels: Any) -> tuple[Array, Array]:
        logits = dense_model.logits(params, prepare(images))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.sum(jnp.argmax(logits, axis=-1) == labels), jnp.sum(losses)

    def means_of(
        state: TrainState, train: datasets.Split, indices: Array
    ) -> tuple[diagnostics.Means, diagnostics.Means]:
        key = jax.random.fold_in(state.augment_key, state.step)
        params_at = oracle.ascend(state.params, state.private_grad)
        own = diagnostics.means(gradient_at(train, key), clip, params_at, indices, **sharing)
        if config.method.name in ("non_private", "dp_sgd"):
            return own, own
        plain_grad = oracles.dp_sgd(model.loss).grad
        plain = diagnostics.means(
            lambda params, index: plain_grad(params, with_views(train, key, index)),
            clip,
            state.params,
            indices,
            **sharing,
        )
        return own, plain

    @jax.jit
    def diagnose(
        state: TrainState, train: datasets.Split, indices: Array
    ) -> dict[str, Float[Array, ""]]:
        own, plain = means_of(state, train, indices)
        key = jax.random.fold_in(state.augment_key, state.step)
        losses = jax.lax.map(
            lambda index: dense_model.loss(state.params, with_views(train, key, index)),
            indices,
            batch_size=config.microbatch_size,
        )
        noise_std = plan.noise_multiplier * sensitivity / expected_batch_size
        found = diagnostics.describe(own, plain, state.private_grad, noise_std)
        return found | {"plain/loss": jnp.mean(losses)}

    return Experiment(
        config=config,
        dataset=dataset,
        plan=plan,
        sensitivity=sensitivity,
        num_params=tree.num_params(jax.eval_shape(model.init, jax.random.key(0))),
        capacity=sampling.usual_capacity(num_examples, plan.sampling_prob, config.microbatch_size),
        init=init,
        step=step,
        evaluate=evaluate,
        means=jax.jit(means_of),
        diagnose=diagnose,
        mesh=mesh,
    )


def stream_key(seed: int, stream: int) -> Array:
    """The JAX key of one random stream of a seed.

    All bits of the seed count (a JAX key made from it directly would keep 32), and streams are
    apart from each other and from the sampler's.

    Args:
      seed: a non-negative integer of any size.
      stream: `INIT_STREAM`, `NOISE_STREAM` or `AUGMENT_STREAM`.

    Returns:
      A typed threefry key of 64 bits.
    """
    words = np.random.SeedSequence(seed, spawn_key=(0xA5, stream)).generate_state(2)
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


def noise_key_from_system() -> Array:
    """A noise key that nobody can know: 64 bits from the operating system."""
    words = devices.random_bits(2)
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


def with_noise_key(state: TrainState, key: Array) -> TrainState:
    """A state whose future noise comes from another key; the count of draws goes on."""
    key = devices.put(key, state.noise.key.sharding)
    return state._replace(noise=state.noise._replace(key=key))


def without_noise_key(state: TrainState) -> TrainState:
    """The same state with zeros for a noise key: what may be saved of a run to release."""
    nothing = jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32), impl="threefry2x32")
    return with_noise_key(state, nothing)


def _tuned(
    config: ConfigDict, dataset: datasets.Dataset, mesh: jax.sharding.Mesh | None
) -> ConfigDict:
    """A copy of a config whose `microbatch_size` and `convolution` are what will run."""
    config = config.copy_and_resolve_references()
    num_examples, shape = len(dataset.train.labels), dataset.train.images.shape[1:]
    if config.microbatch_size == "auto":
        chosen = tuning.fastest(
            functools.partial(_timed_step, config, dataset.num_classes, shape, mesh),
            facts=[
                config[key].to_dict() if isinstance(config[key], ConfigDict) else config[key]
                for key in ("model", "method", "augment", "precision")
            ]
            + [dataset.num_classes, shape, mesh.size if mesh else 1],
            convolutions=() if config.convolution == "auto" else (config.convolution,),
            largest=min(num_examples, config.expected_batch_size),
        )
        with config.ignore_type():  # a number takes the place of "auto"
            config.update(chosen._asdict())
    elif config.convolution == "auto":
        config.convolution = "matmul" if jax.default_backend() == "cpu" else "xla"
    size = config.microbatch_size
    if type(size) is not int or not 1 <= size <= num_examples:
        raise ValueError(
            f'microbatch_size {size} must be "auto" or from 1 to the number of training examples, '
            f"{num_examples}"
        )
    return config


def _timed_step(
    config: ConfigDict,
    num_classes: int,
    shape: tuple[int, ...],
    mesh: jax.sharding.Mesh | None,
    convolution: str,
    size: int,
) -> Callable[[int], Any]:
    """The sum that a step spends its time on, over random images, for `tuning.fastest`."""
    module = models.create(num_classes=num_classes, **config.model)
    model = models.as_functions(module, shape, precision=config.precision, convolution=convolution)
    oracle = parts.make_oracle(config.method, model.loss)
    params = devices.replicate(model.init(jax.random.key(0)), mesh)
    clip = clip_by_l2_norm(1.0)

    def example(index: Array) -> Any:
        key = jax.random.fold_in(jax.random.key(1), index)
        views = jax.random.normal(key, (config.augment.views, *shape))
        return {"image": views, "label": index % num_classes, "key": key}

    @jax.jit
    def step(params: Params, indices: Array) -> Grads:
        if config.method.name == "non_private":
            return plain_sum(
                lambda params, i: model.loss(params, example(i)),
                params,
                indices,
                microbatch_size=size,
                mesh=mesh,
            )
        return clipped_sum(
            lambda params, i: oracle.grad(params, example(i)),
            clip,
            params,
            indices,
            microbatch_size=size,
            mesh=mesh,
        )[0]

    return lambda num_examples: step(params, np.arange(num_examples))


def _check_parts(
    oracle: oracles.Oracle,
    clip: BoundedTransformation,
    model: models.Model,
    dataset: datasets.Dataset,
    config: ConfigDict,
) -> None:
    """Traces one example's gradient, so that what it cannot do is known before anything is run."""
    shape = (config.augment.views, *dataset.train.images.shape[1:])
    example = {
        "image": jax.ShapeDtypeStruct(shape, jnp.float32),
        "label": jax.ShapeDtypeStruct((), jnp.int32),
        "key": jax.eval_shape(lambda: jax.random.key(0)),
    }
    params = jax.eval_shape(model.init, jax.random.key(0))
    grads = jax.eval_shape(oracle.grad, params, example)
    if not tree.same_structure(grads, params):
        raise ValueError(f"method {config.method.name} gives no gradient like the parameters")

    def bounded(params: Params, grads: Grads) -> Any:
        return clip.update(grads, clip.init(params), params)[0]

    found = jax.eval_shape(bounded, params, grads)
    if config.diagnostics.every and not tree.same_structure(found, params):
        raise ValueError(
            f"diagnostics.every must be 0 with clip {config.clip.name}: it adds more to the sum "
            "than a gradient"
        )


def _check(config: ConfigDict) -> None:
    """Checks the values that nothing below checks at once."""
    at_least = {
        "seed": (0 if config.seed is None else config.seed, 0),
        "expected_batch_size": (config.expected_batch_size, 1),
        "num_steps": (config.num_steps, 0),
        "dataset.num_classes": (config.dataset.num_classes, 0),
        "spare_steps": (config.spare_steps, 0),
        "dataset.holdout": (config.dataset.holdout, 0),
        "num_epochs": (config.num_epochs, 0 if config.num_steps else 1),
        "eval.every": (config.eval.every, 0),
        "checkpoint.every": (config.checkpoint.every, 0),
        "diagnostics.every": (config.diagnostics.every, 0),
        "diagnostics.num_examples": (config.diagnostics.num_examples, 1),
    }
    for name, (value, least) in at_least.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    learning_rate = config.optimizer.get("learning_rate", 1.0)
    if not 0 < learning_rate < math.inf:
        raise ValueError(f"optimizer.learning_rate must be positive, got {learning_rate}")
    augment.check(*(config.augment[k] for k in ("views", "shift", "flip", "padding")))
    if not config.input_clip_norm >= 0:
        raise ValueError(f"input_clip_norm must be at least 0, got {config.input_clip_norm}")
    if not 0 <= config.ema_decay < 1:
        raise ValueError(f"ema_decay must be at least 0 and below 1, got {config.ema_decay}")


def _average(averaged: Params, params: Params, step: Array, decay: float) -> Params:
    """One step of the EMA of De et al. 2022, whose decay warms up as (1 + t)/(10 + t)."""
    if decay == 0:
        return params
    decay_now = jnp.minimum(decay, (1 + step) / (10 + step))
    return optax.incremental_update(params, averaged, 1 - decay_now)


@functools.lru_cache(maxsize=2)  # several methods share one data set
def load_dataset(
    name: str, source: str, path: str, num_classes: int, holdout: int
) -> datasets.Dataset:
    """The data of a config's `dataset` section; the last two are kept in memory.

    Args:
      name: as `datasets.load` takes it.
      source: likewise.
      path: likewise.
      num_classes: likewise.
      holdout: training examples to set aside, see `datasets.hold_out`.

    Returns:
      A `Dataset`.
    """
    return datasets.hold_out(datasets.load(name, source, path, num_classes), holdout)


def _clip_norm(config: ConfigDict, shape: tuple[int, ...]) -> float:
    """C as the config gives it, or from public data if the config says so."""
    public, private = config.public_clip, config.dataset
    if public.quantile == 0:
        return float(config.clip_norm)
    if not public.dataset:
        raise ValueError("public_clip.quantile is set: name the public data, public_clip.dataset")
    same_name = public.dataset == private.name != "folder"
    same_path = public.path and private.path and _place(public.path) == _place(private.path)
    if same_name or same_path:
        raise ValueError(f"public_clip.dataset {public.dataset!r} is the private data set")
    return _public_clip_norm(
        (public.dataset, public.source, public.path, public.num_classes),
        shape,
        tuple(sorted(config.model.items())),
        public.quantile,
        public.num_steps,
    )


def _place(path: str) -> Path:
    """The one name of a file or folder that many paths lead to."""
    return Path(os.path.expanduser(path)).resolve()


@functools.lru_cache  # experiments that differ by method or ε share it
def _public_clip_norm(
    source: tuple[str, str, str, int],
    shape: tuple[int, ...],
    model: Any,
    quantile: float,
    steps: int,
) -> float:
    public = load_dataset(*source, holdout=0)
    return public_clip.clip_norm_from_public(public, shape, dict(model), quantile, steps)


def clip_inputs(inputs: Array, input_clip_norm: float) -> Array:
    """Scales inputs `[..., h, w, c]` to L2 norm at most b each; b = 0 leaves them as they are."""
    if input_clip_norm == 0:
        return inputs
    norm = jnp.sqrt(jnp.sum(jnp.square(inputs), axis=(-3, -2, -1), keepdims=True))
    return inputs / jnp.maximum(1.0, norm / input_clip_norm)
