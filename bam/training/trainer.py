"""An experiment: everything a config says, checked, planned and turned into functions."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Num

from bam import models
from bam.core import oracles, pytree, sampling, strategy
from bam.core.clipping import clip_by_l2_norm, finish
from bam.core.noise import first_noise, next_noise
from bam.core.pytree import Grads, Params
from bam.data import augment, datasets, users
from bam.extras import needs
from bam.privacy.plan import PrivacyPlan, make_plan
from bam.privacy.selection import Selection
from bam.training import devices, diagnostics, examples, finetune, public_clip, registry, tuning
from bam.training.step import TrainState, first_state, ordinary_step, private_step, step_key

with needs("train"):
    from ml_collections import ConfigDict


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A checked, planned, ready-to-run experiment; it serves any number of seeds.

    Attributes:
      config: the configuration it was built from, with what was chosen for its "auto" keys.
      dataset: the data, on the host; of users, see `users.grouped`.
      plan: the privacy plan of a run.
      sensitivity: S of the per-example transform: the noise on the sum has deviation σ·S.
      num_params: number of trained numbers.
      num_frozen: number of those that are not trained.
      init_digest: SHA-256 of the file of weights that training begins from; "": at random.
      init: `seed -> TrainState`.
      place: `split -> split`, on the devices as the functions below read it.
      step: `(state, train split on device, padded batch) -> state`, compiled. It donates its state
        and does not check the plan: `train` does.
      evaluate: `(params, images, labels) -> (number correct, sum of losses)`, compiled; the
        parameters are those of the whole model, `finetune.merge(state.averaged, state.frozen)`.
      means: `(state, train split on device, rows) -> (own, plain)`, compiled: the means of the
        method's gradients over those training examples, and of the plain ones. NOT PRIVATE.
      diagnose: `(state, train split on device, rows) -> {name: number}`, compiled: what
        `diagnostics.describe` says of these means, and `plain/loss`, the mean loss. NOT PRIVATE.
      mesh: the devices that share the work, see `bam.training.devices`; None for a single one.
      with_plan: `plan -> Experiment`, with another plan's noise multiplier.
    """

    config: ConfigDict
    dataset: datasets.Dataset
    plan: PrivacyPlan
    sensitivity: float
    num_params: int
    num_frozen: int
    init_digest: str
    init: Callable[[int], TrainState]
    place: Callable[[datasets.Split], datasets.Split]
    step: Callable[..., TrainState]
    evaluate: Callable[..., tuple[Array, Array]]
    means: Callable[..., tuple[diagnostics.Means, diagnostics.Means]]
    diagnose: Callable[..., dict[str, Array]]
    mesh: jax.sharding.Mesh | None
    with_plan: Callable[[PrivacyPlan], "Experiment"]


def build(
    config: ConfigDict,
    dataset: datasets.Dataset | None = None,
    hardware: Sequence[jax.Device] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Experiment:
    """Checks a config, loads its data, plans its privacy and prepares its functions.

    Before the plan is made nothing is compiled, and after it only what chooses a clip norm from
    public data or an "auto" key by timing; the functions are compiled when they are first called.

    Args:
      config: as `bam/training/config.py` makes it.
      dataset: data in memory, instead of what the config's `dataset` and `features` sections name.
      hardware: devices to share the work; None: all that are visible. The functions can be
        compiled, not run, for devices that are not there; no config key can be "auto" then.
      say: called with a line on what takes time.

    Raises:
      ValueError: for any value that cannot be; the message names the fix.
    """
    _check(config)
    if dataset is None:
        dataset = registry.make_dataset(config.dataset, config.features, say)
    datasets.check(dataset)
    dataset = users.grouped(dataset, users.group_size(config))
    shape = dataset.train.images.shape[-3:]
    mesh = devices.mesh(devices.visible() if hardware is None else hardware)

    plan = _plan(config, len(dataset.train.labels), config.clip_norm)
    tuning.check_microbatch_size(config.microbatch_size, plan.num_examples)
    module = registry.make_model(config.model, dataset.num_classes)
    network = functools.partial(models.as_functions, module, shape, precision=config.precision)
    model = network(convolution=config.convolution)
    like = jax.eval_shape(model.init, jax.random.key(0))
    weights = finetune.load(config.init_from, config.init_fresh, like)
    _check_parts(config, model, plan, shape, dataset.num_classes)
    if plan.private and config.public_clip.quantile:
        plan = _plan(config, plan.num_examples, public_clip.clip_norm(config, shape))
    config = tuning.tuned(config, dataset, mesh, say)
    return _assemble(config, dataset, mesh, weights, plan)


def _assemble(
    config: ConfigDict, dataset: datasets.Dataset, mesh: jax.sharding.Mesh | None,
    weights: finetune.Weights, plan: PrivacyPlan,
) -> Experiment:  # fmt: skip
    """The functions of what `build` has checked."""
    shape = dataset.train.images.shape[-3:]
    module = registry.make_model(config.model, dataset.num_classes)
    network = functools.partial(models.as_functions, module, shape, precision=config.precision)
    model = network(convolution=config.convolution)
    # Outside of loops and per-example gradients XLA's own convolution is the fastest everywhere.
    dense_model = network(convolution="xla")
    like = jax.eval_shape(model.init, jax.random.key(0))
    trained, frozen = finetune.split(like, config.trainable)
    optimizer = registry.make_optimizer(config.optimizer, plan)
    clip = registry.make_clip(config.clip, plan) if plan.private else clip_by_l2_norm(math.inf)
    sensitivity = clip.sensitivity if plan.private else 0.0
    sharing = {"microbatch_size": config.microbatch_size, "mesh": mesh}

    def first_weights(key: Array) -> tuple[Params, Params]:
        return finetune.split(finetune.begin(model.init(key), weights), config.trainable)

    def init(seed: int) -> TrainState:
        return devices.replicate(
            first_state(seed, first_weights, optimizer, clip, plan.drawing.strategy), mesh
        )

    def place(split: datasets.Split) -> datasets.Split:
        # A row of numbers for each image: of four axes, a TPU would lay out all anew in every step.
        return devices.replicate(
            split._replace(images=split.images.reshape(len(split.images), -1)), mesh
        )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, train: datasets.Split, batch: sampling.PaddedBatch) -> TrainState:
        given = state, batch, examples.example_at(config, dataset, train, state.step)
        loss = finetune.with_frozen(model.loss, state.frozen)
        options: dict[str, Any] = {
            "expected_batch_size": plan.expected_batch_size,
            "optimizer": optimizer,
            "ema_decay": config.ema_decay,
            **sharing,
        }
        if not plan.private:
            return ordinary_step(*given, loss=loss, **options)
        return private_step(
            *given,
            oracle=registry.make_oracle(config.method, loss),
            clip=clip,
            noise_multiplier=plan.noise_multiplier,
            strategy=plan.drawing.strategy,
            **options,
        )

    @jax.jit
    def evaluate(
        params: Params, images: Num[Array, "n h w c"], labels: Int[Array, " n"]
    ) -> tuple[Array, Array]:
        inputs = datasets.prepare(dataset, images, config.input_clip_norm)
        logits = dense_model.logits(params, inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.sum(jnp.argmax(logits, axis=-1) == labels), jnp.sum(losses)

    @jax.jit
    def means(
        state: TrainState, train: datasets.Split, indices: Array
    ) -> tuple[diagnostics.Means, diagnostics.Means]:
        example_at = functools.partial(
            examples.example_at(config, dataset, train, state.step), step_key(state)
        )

        def means_of(oracle: oracles.Oracle) -> diagnostics.Means:
            return diagnostics.means(
                lambda params, index: oracle.grad(params, example_at(index)),
                clip,
                oracle.ascend(state.params, state.private_grad),
                indices,
                clip_state=state.clip,
                **sharing,
            )

        loss = finetune.with_frozen(model.loss, state.frozen)
        own, plain = means_of(registry.make_oracle(config.method, loss)), oracles.dp_sgd(loss)
        return own, own if registry.is_plain(config.method.name) else means_of(plain)

    @jax.jit
    def diagnose(
        state: TrainState, train: datasets.Split, indices: Array
    ) -> dict[str, Float[Array, ""]]:
        own, plain = means(state, train, indices)
        example_at = functools.partial(
            examples.example_at(config, dataset, train, state.step), step_key(state)
        )
        params = finetune.merge(state.params, state.frozen)
        losses = jax.lax.map(
            lambda index: dense_model.loss(params, example_at(index)),
            indices,
            batch_size=config.microbatch_size,
        )
        noise_std = plan.noise_multiplier * sensitivity / plan.expected_batch_size
        noise_std *= strategy.norm(strategy.noise_of(plan.drawing.strategy, plan.num_steps))
        measured = diagnostics.describe(own, plain, state.private_grad, noise_std)
        return measured | {"plain/loss": jnp.mean(losses)}

    return Experiment(
        config=config,
        dataset=dataset,
        plan=plan,
        sensitivity=sensitivity,
        num_params=pytree.num_params(trained),
        num_frozen=pytree.num_params(frozen),
        init_digest=weights.digest,
        init=init,
        place=place,
        step=step,
        evaluate=evaluate,
        means=means,
        diagnose=diagnose,
        mesh=mesh,
        with_plan=functools.partial(_assemble, config, dataset, mesh, weights),
    )


def _plan(config: ConfigDict, num_examples: int, clip_norm: float) -> PrivacyPlan:
    private = registry.is_private(config.method.name)
    training_steps = config.num_steps or config.num_epochs * (
        num_examples // config.expected_batch_size
    )
    # Only a trial of a private search has that section.
    section = config.get("selection")
    return make_plan(
        num_examples=num_examples,
        expected_batch_size=config.expected_batch_size,
        num_steps=training_steps + config.spare_steps,
        spare_steps=config.spare_steps,
        target_epsilon=config.epsilon if private else math.inf,
        delta=config.delta,
        clip_norm=float(clip_norm) if private else math.inf,
        accountant=config.accountant,
        mechanism=config.mechanism.name,
        mechanism_options=registry.set_keys(config.mechanism, "name"),
        selection=Selection(**section) if section else None,
        group_size=users.group_size(config),
    )


def _check_parts(
    config: ConfigDict,
    model: models.Model,
    plan: PrivacyPlan,
    shape: tuple[int, ...],
    num_classes: int,
) -> None:
    """Traces one example's gradient, so that what it cannot do is known before anything is run."""
    clip = registry.make_clip(config.clip, plan) if plan.private else optax.identity()
    registry.make_optimizer(config.optimizer, plan)
    example = registry.example_like(config, shape)
    params = jax.eval_shape(model.init, jax.random.key(0))
    logits = jax.eval_shape(model.logits, params, example["image"])
    if logits.shape != (inputs := registry.num_inputs(config), num_classes):
        raise ValueError(
            f"model {config.model.name} makes logits {logits.shape} of {inputs} "
            f"inputs: one row of {num_classes} for each is needed"
        )
    trained, frozen = finetune.split(params, config.trainable)
    gradient = registry.make_gradient(config.method, model.loss)
    grads = jax.eval_shape(gradient, trained, frozen, example)
    if not pytree.same_structure(grads, trained):
        raise ValueError(f"method {config.method.name} gives no gradient like the parameters")

    def private(params: Params, grads: Grads) -> Grads:
        state = clip.init(params)
        return finish(clip, clip.update(grads, state, params)[0], state)[0]

    def drawn(params: Params) -> Array | None:
        state = first_noise(jnp.zeros(8, jnp.uint32), clip, params, plan.drawing.strategy)
        noise, _ = next_noise(state, plan.noise_multiplier, clip.sensitivity, plan.drawing.strategy)
        return noise.drawn

    if plan.private:
        jax.eval_shape(drawn, trained)  # it has room for so many parameters
    if not pytree.same_structure(jax.eval_shape(private, trained, grads), trained):
        raise ValueError(f"clip {config.clip.name} gives no gradient like the parameters")


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
    if config.epsilon == math.inf and registry.is_private(config.method.name):
        raise ValueError(
            f"method {config.method.name} has no privacy at epsilon inf: set a finite epsilon, or "
            "say --config=FILE:non_private"
        )
    learning_rate = config.optimizer.get("learning_rate", 1.0)
    if not 0 < learning_rate < math.inf:
        raise ValueError(f"optimizer.learning_rate must be positive, got {learning_rate}")
    users.check(config)
    augment.check(*(config.augment[k] for k in ("views", "shift", "flip")))
    of_pixels = config.augment.views == 1 and config.augment.shift == 0
    if config.features.name and not (of_pixels and config.augment.flip == "none"):
        raise ValueError("features cannot be shifted or mirrored: augment.views must be 1, no more")
    if config.features.name and config.public_clip.quantile:
        raise ValueError("public_clip reads images, not features: public_clip.quantile must be 0")
    if (config.init_from or config.trainable) and config.public_clip.quantile:
        raise ValueError("public_clip trains all of a model from scratch: set clip_norm instead")
    if not config.input_clip_norm >= 0:
        raise ValueError(f"input_clip_norm must be at least 0, got {config.input_clip_norm}")
    if not 0 <= config.ema_decay < 1:
        raise ValueError(f"ema_decay must be at least 0 and below 1, got {config.ema_decay}")
