"""The settings and parts of a run, and the functions that are compiled of them."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from bam import models
from bam.core import pytree, sampling
from bam.core.program import compile_once
from bam.core.pytree import Params
from bam.data import datasets
from bam.errors import InputError
from bam.extras import needs
from bam.files import JsonObject
from bam.models import finetune, losses
from bam.models.normalisation import Normalisation
from bam.privacy.plan import PrivacyPlan
from bam.privacy.private_gradient import DrawnBatch, batch_of, fitting_rows, mean_of
from bam.privacy.private_training import PrivateTraining
from bam.training import devices, examples
from bam.training import step as steps
from bam.training.programs import Programs
from bam.training.step import TrainState, first_state

with needs("train"):
    from ml_collections import ConfigDict

STEP, BIAS = "a step", "measuring the clipping bias"


@dataclasses.dataclass(frozen=True, eq=False)
class Trainer:
    """The settings and parts of a run, and its compiled functions.

    One trainer serves any number of seeds.

    Attributes:
      config: the configuration it was built from.
      listing: the data set, whose images are blank if they will be features.
      load: returns the data set.
      plan: the privacy plan of a run.
      parts: what the compiled functions read: network, method, clip, noise, optimizer, devices.
      criterion: the loss of one output, with its accuracy and metrics.
      weights: the weights that training begins from, for parameters that are not random.
      features_digest: SHA-256 of the weights of the map of images; "" without such weights.
      normalisation: the normalisation of pixels that the weights, or those of the map, expect;
        None if neither is used.
      log: called with a line on long waits.
    """

    config: ConfigDict
    listing: datasets.Dataset
    load: Callable[[], datasets.Dataset]
    plan: PrivacyPlan
    parts: steps.Parts
    criterion: losses.Loss
    weights: finetune.Weights
    features_digest: str
    normalisation: Normalisation | None
    log: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        """Raises ValueError if the parts are of another plan, config or data set.

        Then one of them was replaced.
        """
        plan, config, parts = self.plan, self.config, self.parts
        if (parts.gradient.mean, parts.is_private) != (mean_of(plan), plan.private):
            raise ValueError("the parts have the noise of another plan: build it with plan=PLAN")
        size = fitting_rows(plan, parts.gradient.clip, config.microbatch_size)
        inputs = examples.inputs_of(config, self.listing)
        settings = parts.inputs, parts.gradient.microbatch_size, parts.ema_decay
        if settings != (inputs, size, ema_decay(config)):
            raise ValueError("the parts are of another config or data set: build a trainer of it")

    @property
    def dataset(self) -> datasets.Dataset:
        """Returns the data on the host, with a row for each user if users are protected.

        The first call loads them. It may take minutes if they are features.
        """
        return self.load()

    def init(self, seed: int) -> TrainState:
        """Returns the state before the first step."""

        def first_weights(key: Array) -> tuple[Params, Params]:
            params = finetune.begin(self.parts.model.init(key), self.weights)
            return finetune.split(params, self.config.trainable)

        state = first_state(seed, first_weights, self.parts)
        return devices.replicate(state, self.mesh)

    def training(self, seed: int | None) -> PrivateTraining:
        """Returns a training of the plan, with the clip and the devices of the parts.

        `step` is its transform. A loop here takes each batch once, and its state is made once, so
        the transform of `PrivateTraining.gradient`, which checks both, is not needed.
        """
        gradient = self.parts.gradient
        return PrivateTraining(plan=self.plan, clip=gradient.clip, mesh=gradient.mesh, seed=seed)

    def rows(self, indices: np.ndarray) -> PyTree:
        """Returns the training rows of these numbers on the devices, zeros at `PADDING`."""
        return examples.rows_at(self.dataset.train, indices, self.mesh)

    def place_rows(self) -> examples.Rows:
        """Returns the training rows, placed on the devices unless they are read from files."""
        return examples.Rows(self.dataset.train, self.plan, self.mesh)

    def batch(
        self, state: TrainState, padded: sampling.PaddedBatch, rows: examples.Rows | None = None
    ) -> DrawnBatch:
        """Returns a batch as the state's next one, in a run's form, for timings and audits.

        It is not drawn, and counts nowhere. `rows` are of `place_rows`, which is called without
        them.
        """
        tag, step = jax.device_get((state.private.tag, state.step))
        numbers = np.where(padded.mask, padded.indices, sampling.PADDING)
        rows = rows or self.place_rows()
        return batch_of(*rows.of(padded._replace(indices=numbers)), int(step) + 1, tag)

    @functools.cached_property
    def programs(self) -> Programs:
        """The functions of `bam.training.step` without their first argument, the parts."""
        return Programs(self.parts, self.log)

    @functools.cached_property
    def step(self) -> Callable[..., TrainState]:
        """Takes a step that donates the old state, so that the memory need not hold two."""
        return self.programs.bind(steps.take, STEP, donate=(0,))

    @functools.cached_property
    def mean_gradients(self) -> Callable[..., Any]:
        """Returns the means of gradients. NOT PRIVATE."""
        return self.programs.bind(steps.mean_gradients, "measuring gradients")

    @functools.cached_property
    def diagnose(self) -> Callable[..., dict[str, Array]]:
        """Returns the clipping bias and other figures. NOT PRIVATE."""
        return self.programs.bind(steps.diagnose, BIAS)

    @functools.cached_property
    def score_images(self) -> Callable[..., tuple[Array, Array, Array]]:
        """The function of `bam.training.step`, compiled once for all methods."""
        # It takes a few parts alone: all of them would compile it for each method.
        return compile_once(
            steps.score_images,
            model=self.parts.model,
            criterion=self.criterion,
            prepare=self.parts.inputs.prepare,
            mesh=self.mesh,
        )

    def check_step(self, state: TrainState, rows: examples.Rows, keeps_size: bool = False) -> None:
        """Compiles the step for batches of the rows, without taking it.

        `memory.TooLargeError`, an InputError, if the step does not fit the memory.
        """
        nothing = sampling.pad(np.arange(0), self.plan.capacity, 0, 0)
        args = state, self.batch(state, nothing, rows)
        self.programs.check(steps.take, STEP, *args, donate=(0,), keeps_size=keeps_size)

    def check_diagnostics(self, state: TrainState, rows: PyTree, keeps_size: bool = False) -> None:
        """Compiles the diagnostics.

        InputError if they do not fit the memory.
        """
        self.programs.check(steps.diagnose, BIAS, state, rows, keeps_size=keeps_size)

    def with_microbatch_size(self, size: int) -> "Trainer":
        """Returns the run with another number of rows at once, or fewer if 32 bits hold fewer."""
        config = self.config.copy_and_resolve_references()
        check_microbatch_size(size, self.plan.num_examples)
        config.microbatch_size = size
        fitting = fitting_rows(self.plan, self.parts.gradient.clip, size)
        parts = self.parts.with_microbatch_size(fitting)
        return dataclasses.replace(self, config=config, parts=parts)

    @property
    def mesh(self) -> Mesh | None:
        """Returns the devices that share rows, or None for a single one."""
        return self.parts.gradient.mesh

    @functools.cached_property
    def shapes(self) -> tuple[PyTree, PyTree]:
        """The shapes of the trained and of the frozen parameters."""
        return finetune.split(shapes_of(self.parts.model), self.config.trainable)

    @property
    def num_params(self) -> int:
        """The number of trained scalars."""
        return pytree.num_params(self.shapes[0])

    @property
    def num_frozen(self) -> int:
        """The number of frozen scalars."""
        return pytree.num_params(self.shapes[1])

    @property
    def sensitivity(self) -> float:
        """S of the per-example transform, where the noise on the sum has deviation σ·S."""
        return float(self.parts.gradient.clip.sensitivity) if self.plan.private else 0.0

    @property
    def num_devices(self) -> int:
        """The number of devices that share the work."""
        return self.mesh.size if self.mesh else 1

    @property
    def clip_norm(self) -> float:
        """Returns C, the clip norm of the config, or `inf` without privacy."""
        return clip_norm_of(self.config, self.plan)

    @property
    def record(self) -> JsonObject:
        """The record in `plan.json` and `summary.json`: the plan, with C and S of the clip."""
        # JSON lacks infinity, which is C without privacy.
        clip_norm = self.clip_norm if self.plan.private else None
        return self.plan.to_json() | {"clip_norm": clip_norm, "sensitivity": self.sensitivity}


def ema_decay(config: ConfigDict) -> float | None:
    """None removes the average from the program."""
    return float(config.ema_decay) or None


def clip_norm_of(config: ConfigDict, plan: PrivacyPlan) -> float:
    """Returns C, the clip norm of the config, or `inf` without privacy."""
    return float(config.clip_norm) if plan.private else math.inf


def check_microbatch_size(size: object, num_examples: int) -> None:
    """Raises InputError unless `microbatch_size` is an integer from 1 to the number of examples."""
    # `isinstance` would take True for an int, and the key accepts values of any type.
    if type(size) is not int or not 1 <= size <= num_examples:
        raise InputError(
            f"microbatch_size must be from 1 to {num_examples}, the number of training examples, "
            f"got {size}; bam train --config.dry_run --tune finds the fastest"
        )


def shapes_of(model: models.Model) -> PyTree:
    """Returns the shapes of a network's parameters."""
    return jax.eval_shape(lambda: model.init(jax.random.key(0)))  # traced, so no key is made
