"""From a config to a `Trainer`: values are checked, data listed, privacy planned and parts made."""

import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from bam import models, waits
from bam.core import oracles, pytree, strategy
from bam.core.clipping import Bounded, finish
from bam.core.noise import advance_noise, init_noise
from bam.core.pytree import Grads, Params
from bam.data import datasets, users
from bam.errors import InputError
from bam.extras import needs
from bam.models import finetune, losses
from bam.models.normalisation import Normalisation
from bam.privacy.plan import Population, PrivacyPlan
from bam.privacy.private_gradient import gradient_of
from bam.privacy.recorded_plan import plan_for
from bam.training import devices, examples, loading, methods, parts
from bam.training import step as steps
from bam.training.config import check
from bam.training.trainer import (
    Trainer,
    check_microbatch_size,
    clip_norm_of,
    ema_decay,
    shapes_of,
)

with needs("train"):
    from ml_collections import ConfigDict


def build(
    config: ConfigDict,
    dataset: datasets.Dataset | None = None,
    hardware: Sequence[jax.Device] | None = None,
    log: Callable[[str], None] = lambda line: None,
    plan: PrivacyPlan | None = None,
    folder: Path | None = None,
) -> Trainer:
    """Checks a config, lists its data, plans its privacy and makes its parts.

    It compiles no step: the functions of the trainer are compiled on their first call. It computes
    no features: `Trainer.dataset` does, when it is first read.

    Args:
      config: from `bam/training/config.py`.
      dataset: data in memory, in place of the config's `dataset` and `features` sections.
      hardware: devices to share the work; None takes all visible ones. For devices that are not
        there, the functions can be compiled but not run.
      log: called with a line on long waits.
      plan: a plan of this config, with another σ than one made today; None makes one.
      folder: of the run to begin or to continue, whose recorded plan is taken; None for none.

    Raises:
      InputError: for a value out of range, or a plan of another config or other data; the message
        names the remedy.
    """
    # Before the data, because reading them may take minutes.
    check(config)
    config = config.copy_and_resolve_references()
    check_labels = parts.make_loss(config.loss).check
    if dataset is None:
        listing, load = loading.list_data(config.dataset, config.features, log)
    else:
        listing, load = dataset, lambda: dataset

    def in_units(dataset: datasets.Dataset) -> tuple[datasets.Dataset, Normalisation | None]:
        """Returns the data set with a row for each unit of privacy, and its normalisation."""
        datasets.check(dataset, check_labels)
        dataset, expected = loading.normalise(config, dataset)
        return users.grouped(dataset, config.dataset.group_size), expected

    # Everything is checked and planned from the number, shapes and labels of the data.
    rows, expected = in_units(listing)
    shape, num_examples = rows.train.images.shape[-3:], _num_examples(config, rows)
    check_microbatch_size(config.microbatch_size, num_examples)
    criterion, model, loss = _network(config, rows.num_classes, shape)
    # The method sees the loss alone: it knows neither batches nor clips nor noise.
    oracle = parts.make_oracle(config.method, loss)
    _check_shapes(config, rows, criterion, model, oracle)
    # The plan is made without the clip: σ and ε do not depend on C.
    with waits.awaited(log, "planning", stays=False):
        plan = _planned(config, num_examples, plan, folder)
    trained, _ = finetune.split(shapes_of(model), config.trainable)
    clip_norm = clip_norm_of(config, plan)
    clip = parts.make_clip(config.clip, plan, clip_norm)
    # A user's clip may return another tree, or its S may be too large for floats to hold the noise.
    _check_clip(config.clip.name, clip, plan, trained)
    gradient = gradient_of(
        plan,
        oracle,
        clip,
        microbatch_size=config.microbatch_size,
        mesh=devices.mesh(devices.visible() if hardware is None else hardware),
    )
    sensitivity = clip.sensitivity if plan.private else 0.0
    return Trainer(
        config=config,
        listing=rows,
        load=functools.cache(lambda: rows if (data := load()) is listing else in_units(data)[0]),
        plan=plan,
        parts=steps.Parts(
            gradient=gradient,
            optimizer=parts.make_optimizer(config.optimizer, plan, clip_norm, sensitivity),
            ema_decay=ema_decay(config),
            noise_norm=strategy.norm(strategy.noise_of(plan.mechanism.strategy, plan.num_steps)),
            loss=loss,
            model=model,
            inputs=examples.inputs_of(config, rows),
        ),
        criterion=criterion,
        weights=finetune.load(config.init_from, config.init_fresh, shapes_of(model), shape),
        features_digest=loading.features_digest(config.features),
        normalisation=expected,
        log=log,
    )


def _num_examples(config: ConfigDict, dataset: datasets.Dataset) -> int:
    """N: the config's number, or the number of training examples or users if it is not set.

    InputError if the config's number is smaller than that.
    """
    num_rows, public_number = len(dataset.train.labels), config.num_examples
    if public_number is not None and public_number < num_rows:
        unit = "users" if config.dataset.group_size else "training examples"
        raise InputError(
            f"num_examples is {public_number}, but there are {num_rows} {unit} (NOT PRIVATE): set "
            "--config.num_examples to a larger number that is public, or leave some out of the data"
        )
    return num_rows if public_number is None else int(public_number)


def _planned(
    config: ConfigDict, num_examples: int, plan: PrivacyPlan | None, folder: Path | None
) -> PrivacyPlan:
    """The plan of a run, see `plan_for`."""
    # An epoch has N // l steps on average, because q = l/N.
    epochs_steps = config.num_epochs * (num_examples // config.expected_batch_size)
    return plan_for(
        folder,
        Population(num_examples, config.dataset.group_size, config.num_examples is not None),
        config.epsilon if methods.is_private(config.method.name) else math.inf,
        plan=plan,
        expected_batch_size=config.expected_batch_size,
        num_steps=(config.num_steps or epochs_steps) + config.spare_steps,
        spare_steps=config.spare_steps,
        delta=config.delta,
        accountant=config.accountant,
        mechanism=parts.set_keys(config.mechanism, ""),
    )


def _network(
    config: ConfigDict, num_classes: int, shape: tuple[int, ...]
) -> tuple[losses.Loss, models.Model, oracles.LossFn]:
    """The criterion of outputs, the network, and the loss of an example.

    For bam's models and losses, equal sections give the same objects, so that runs share compiled
    programs.
    """
    # A user's function may return another network for the same options, so it is called each time.
    if ":" in config.model.name + config.loss.name:
        return _new_network(config, num_classes, tuple(shape))
    names, values = ("model", "loss", "lora", "convolution", "precision"), config.to_dict()
    sections = {name: values[name] for name in names}
    text = json.dumps(sections, default=lambda x: np.asarray(x).tolist())
    return _made_network(text, num_classes, tuple(shape))


@functools.lru_cache(maxsize=32)
def _made_network(
    sections: str, num_classes: int, shape: tuple[int, ...]
) -> tuple[losses.Loss, models.Model, oracles.LossFn]:
    return _new_network(ConfigDict(json.loads(sections)), num_classes, shape)


def _new_network(
    config: ConfigDict, num_classes: int, shape: tuple[int, ...]
) -> tuple[losses.Loss, models.Model, oracles.LossFn]:
    criterion = parts.make_loss(config.loss)
    model = models.as_functions(
        parts.make_model(config.model, num_classes),
        shape,
        convolution=config.convolution,
        precision=config.precision,
        lora_rank=config.lora.rank,
        lora_targets=config.lora.targets,
        loss=criterion,
    )

    def loss(params: Params, example: PyTree) -> Float[Array, ""]:
        return model.loss(finetune.merge(params, example["frozen"]), example)

    return criterion, model, loss


def _check_shapes(
    config: ConfigDict,
    dataset: datasets.Dataset,
    criterion: losses.Loss,
    model: models.Model,
    oracle: oracles.Method,
) -> None:
    """InputError if the shapes of outputs, loss or gradients do not fit together.

    The functions are traced and not run, so a mistake shows at once and not in the first step.
    """
    params = shapes_of(model)
    for name, x in zip(pytree.names(params), jax.tree.leaves(params), strict=True):
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            raise InputError(
                f"model {config.model.name} has a parameter {x.dtype}{list(x.shape)} at {name}: "
                "make it float32 or bfloat16, and leave jax_enable_x64 off"
            )
    label = examples.label_of(dataset)
    example = examples.example_like(config, dataset.train.images.shape[-3:], label)
    logits = jax.eval_shape(model.logits, params, example["image"])
    inputs, like = examples.num_inputs(config), logits.shape[1:-1]
    if logits.shape != (inputs, *like, dataset.num_classes) or like != label.shape[: len(like)]:
        raise InputError(
            f"model {config.model.name} returns logits {logits.shape} for {inputs} "
            f"inputs: one row of {dataset.num_classes} for each is needed"
        )
    output = jax.ShapeDtypeStruct(logits.shape[1:], logits.dtype)
    if jax.eval_shape(criterion.of_output, output, label).shape:
        raise InputError(
            f"loss {config.loss.name} does not return a single number for an output of shape "
            f"{output.shape}"
        )
    trained, frozen = finetune.split(params, config.trainable)

    def gradient(params: Params, example: PyTree) -> Grads:
        return oracle.grad(oracle.ascend(params, optax.tree.zeros_like(params)), example)

    grads = jax.eval_shape(gradient, trained, example | {"frozen": frozen})
    if not pytree.same_structure(grads, trained):
        raise InputError(
            f"method {config.method.name} returns a gradient of another structure, shape or dtype "
            "than the parameters"
        )


def _check_clip(name: str, clip: Bounded, plan: PrivacyPlan, trained: PyTree) -> None:
    """InputError if the clip or its noise does not fit the trained parameters."""

    def clipped(params: Params) -> Grads:
        state = clip.init(params)
        return finish(clip, clip.update(params, state, params)[0], state)[0]

    def correlated(params: Params) -> Array | None:
        strategy = plan.mechanism.strategy
        # Any key will do: the noise is traced, not drawn.
        state = init_noise(jnp.zeros(8, jnp.uint32), clip, params, strategy)
        noise, _ = advance_noise(state, plan.noise_multiplier, clip.sensitivity, strategy)
        return noise.correlated

    if plan.private:
        jax.eval_shape(correlated, trained)  # raises if floats cannot hold the noise
    if not pytree.same_structure(jax.eval_shape(clipped, trained), trained):
        raise InputError(
            f"clip {name} returns a gradient of another structure, shape or dtype than the "
            "parameters"
        )
