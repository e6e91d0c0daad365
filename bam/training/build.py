"""From a config to a `Trainer`: values are checked, data listed, privacy planned and parts made."""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from bam import waits
from bam.core import strategy
from bam.data import datasets, users
from bam.errors import InputError
from bam.extras import needs
from bam.models import finetune
from bam.models.normalisation import Normalisation
from bam.privacy.plan import PrivacyPlan, steps_in
from bam.privacy.private_gradient import gradient_of
from bam.privacy.recorded_plan import plan_for
from bam.training import devices, examples, fit, loading, methods, parts
from bam.training import step as steps
from bam.training.config import NOISE, check
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
        data, load = loading.list_data(config.dataset, config.features, log)
    else:
        data, load = dataset, lambda: dataset

    def by_unit(dataset: datasets.Dataset) -> tuple[datasets.Dataset, Normalisation | None]:
        """Returns the data set with a row for each unit of privacy, and its normalisation."""
        datasets.check(dataset, check_labels)
        dataset, normalisation = loading.normalise(config, dataset)
        return users.group_by_user(dataset, config.dataset.group_size), normalisation

    # Kept by the function itself, because a changed copy of the trainer loads the same data.
    @functools.cache
    def load_by_unit() -> datasets.Dataset:
        loaded = load()
        return listing if loaded is data else by_unit(loaded)[0]

    # Everything is checked and planned from the number, shapes and labels of the data.
    listing, normalisation = by_unit(data)
    if line := users.unused_line(data, config.dataset.group_size):
        log(line)
    shape, num_examples = listing.train.images.shape[-3:], _num_examples(config, listing)
    check_microbatch_size(config.microbatch_size, num_examples)
    with waits.awaited(log, "checking the network and the loss", stays=False):
        criterion, model, loss = parts.make_network(config, listing.num_classes, shape)
        # The method sees the loss alone: it knows neither batches nor clips nor noise.
        oracle = parts.make_oracle(config.method, loss)
        fit.check_shapes(config, listing, criterion, model, oracle)
    # The plan is made without the clip: σ and ε do not depend on C.
    with waits.awaited(log, "planning", stays=False):
        plan = _plan_of_run(config, num_examples, plan, folder)
    trained, _ = finetune.split(shapes_of(model), config.trainable)
    clip_norm = clip_norm_of(config, plan)
    clip = parts.make_clip(config.clip, plan, clip_norm)
    # A user's clip may return another tree, or its S may be too large for floats to hold the noise.
    fit.check_clip(config.clip.name, clip, plan, trained)
    gradient = gradient_of(
        plan,
        oracle,
        clip,
        microbatch_size=config.microbatch_size,
        mesh=devices.mesh(devices.visible() if hardware is None else hardware),
    )
    sensitivity = clip.sensitivity if plan.private else 0.0
    optimizer = parts.make_optimizer(config.optimizer, plan, clip_norm, sensitivity)
    fit.check_optimizer(config.optimizer.name, optimizer, trained)
    return Trainer(
        config=config,
        listing=listing,
        load=load_by_unit,
        plan=plan,
        parts=steps.Parts(
            gradient=gradient,
            optimizer=optimizer,
            ema_decay=ema_decay(config),
            noise_norm=strategy.norm(strategy.noise_of(plan.mechanism.strategy, plan.num_steps)),
            loss=loss,
            model=model,
            inputs=examples.inputs_of(config, listing),
        ),
        criterion=criterion,
        weights=finetune.load(config.init_from, config.init_fresh, shapes_of(model), shape),
        features_digest=loading.features_digest(config.features),
        normalisation=normalisation,
        log=log,
    )


def _num_examples(config: ConfigDict, dataset: datasets.Dataset) -> int:
    """Returns N: the config's number, or else the number of training examples or users.

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


def _plan_of_run(
    config: ConfigDict, num_examples: int, plan: PrivacyPlan | None, folder: Path | None
) -> PrivacyPlan:
    """Returns the plan of a run, see `plan_for`."""
    noise = {key: config[key] for key in NOISE}
    if not methods.is_private(config.method.name):
        noise = {"epsilon": math.inf}
    num_steps = config.num_steps or steps_in(
        config.num_epochs, num_examples, config.expected_batch_size
    )
    return plan_for(
        folder,
        plan=plan,
        spare_steps=config.spare_steps,
        num_examples=num_examples,
        group_size=config.dataset.group_size,
        num_examples_given=config.num_examples is not None,
        expected_batch_size=config.expected_batch_size,
        num_steps=num_steps + config.spare_steps,
        delta=config.delta,
        accountant=config.accountant,
        mechanism=parts.set_keys(config.mechanism, ""),
        **noise,
    )
